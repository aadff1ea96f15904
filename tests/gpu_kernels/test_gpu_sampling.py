"""Row maxima and random draws in Triton's interpreter, compared with the torch reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from sampled_rows import positions_of, settings_of
from torch import Tensor

from moeserve.ops import sampling as sampling_ops
from moeserve.ops.backend import REFERENCE
from moeserve.ops.sampling import reference as reference
from moeserve.sampling_params import RequestParams
from moeserve.triton_kernels import sampling
from moeserve.triton_kernels.sampling import choose_tokens, row_maximum

# R rows, V width of a row

ROUNDING = 1e-6  # share of a row's mass; closer to a border than this, rounding decides


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide rows into several blocks, the last of which is partial."""
    monkeypatch.setattr(sampling, "launch_sizes", lambda width: {"BLOCK_V": 128, "num_warps": 1})


@triton.jit
def _number_in_seed(seed, position):
    return seed.to(tl.float64, bitcast=True)


@pytest.fixture
def given_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the bits of a seed be the random number, in the kernel and in the reference."""
    monkeypatch.setattr(sampling, "_uniform", _number_in_seed)
    monkeypatch.setattr(reference, "uniform", lambda seed, position: float(np.uint64(seed).view(np.float64)))


def seeds_of(numbers: list[float]) -> list[int]:
    return np.array(numbers, np.float64).view(np.uint64).tolist()


def drawn(
    scores_RV: Tensor, params: list[RequestParams], numbers: list[float], choose: Any = choose_tokens
) -> list[int]:
    settings_RW = settings_of(params, seeds_of(numbers))
    return choose(scores_RV, settings_RW, positions_of([0] * len(params)))[1].tolist()


def expected_tokens(scores_RV: Tensor, params: list[RequestParams], numbers: list[float]) -> list[int]:
    return drawn(scores_RV.clone(), params, numbers, sampling_ops.make(REFERENCE).choose_tokens)


def some_numbers(num_rows: int) -> list[float]:
    return torch.rand(num_rows, generator=torch.Generator().manual_seed(7), dtype=torch.float64).tolist()


def is_clear(scores_V: Tensor, params: RequestParams, number: float) -> bool:
    """True if rounding cannot affect the kept tokens or the drawn token."""
    order = sorted(range(len(scores_V)), key=lambda token: (-scores_V[token].item(), token))
    weights = ((scores_V.double() - scores_V.max().double()) / params.temperature).exp()[order]
    distances = (weights - params.min_p).abs()
    if params.min_p > 0 and ((distances > 0) & (distances < ROUNDING * params.min_p)).any():
        return False
    weights = weights[weights >= params.min_p]
    if params.top_k > 0:
        weights = weights[: params.top_k]
    cumulative = weights.cumsum(0)
    if params.top_p < 1:
        bound = params.top_p * cumulative[-1]
        if ((cumulative - bound).abs() < ROUNDING * cumulative[-1]).any():
            return False
        cumulative = cumulative[: int((cumulative < bound).sum()) + 1]
    return bool(((cumulative / cumulative[-1] - number).abs() > ROUNDING).all())


def random_params(generator: torch.Generator, width: int) -> RequestParams:
    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    return RequestParams(
        temperature=pick(0.05, 0.7, 1.0, 1.3, 5.0, 100.0),
        top_k=pick(-1, 0, 0, 1, 2, 17, width, 10 * width),
        top_p=pick(1.0, 1.0, 0.001, 0.5, 0.9, 0.999),
        min_p=pick(0.0, 0.0, 0.01, 0.3, 1.0),
    )


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        *(("normal", 3), ("normal", 200), ("bfloat16", 200), ("few values", 200), ("barred", 200), ("flat", 3)),
        *(("all below zero", 200), ("far apart", 3)),
    ],
)
def test_drawn_tokens_equal_the_reference(kind: str, width: int, small_blocks: None, given_numbers: None) -> None:
    generator = torch.Generator().manual_seed(len(kind) + width)
    num_rows = 4
    scores_RV = torch.randn(num_rows, 2 * width, generator=generator)[:, width:] * 3  # strided rows
    match kind:
        case "bfloat16":
            scores_RV.copy_(scores_RV.bfloat16())
        case "few values":
            scores_RV.copy_(scores_RV.round())
        case "barred":
            is_barred = torch.rand(num_rows, width, generator=generator) < 0.4
            is_barred[:, width // 2] = False
            scores_RV.masked_fill_(is_barred, -math.inf)
        case "flat":
            scores_RV.fill_(-0.0)
        case "all below zero":
            scores_RV.sub_(1000.0)
        case "far apart":
            scores_RV.mul_(1e37)
    params = [random_params(generator, width) for _ in range(num_rows)]
    numbers = some_numbers(num_rows)
    actual = drawn(scores_RV, params, numbers)
    expected = expected_tokens(scores_RV, params, numbers)
    clear = [row for row in range(num_rows) if is_clear(scores_RV[row], params[row], numbers[row])]
    assert clear
    assert [actual[row] for row in clear] == [expected[row] for row in clear]


@pytest.mark.parametrize(("spread", "top_p"), [(0.01, 0.9)])
def test_row_of_a_vocabulary(spread: float, top_p: float, given_numbers: None) -> None:
    """Use the blocks of production. Few tokens are more likely than rounding errors."""
    scores_RV = torch.randn(1, 32000, generator=torch.Generator().manual_seed(9)) * spread
    params, numbers = [RequestParams(temperature=0.9, top_p=top_p)], some_numbers(1)
    assert is_clear(scores_RV[0], params[0], numbers[0])
    assert drawn(scores_RV, params, numbers) == expected_tokens(scores_RV, params, numbers)


def test_random_numbers_are_those_of_the_reference() -> None:
    """Among equally likely tokens, the drawn one shows the first bits of the number."""
    seeds = [0, 1, 2**32 - 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    num_outputs = [0, 1, 31, 32, 2**31, 2**40]
    width = 4096
    settings_RW = settings_of([RequestParams(temperature=1.0)] * len(seeds), seeds)
    tokens_R = choose_tokens(torch.zeros(len(seeds), width), settings_RW, positions_of(num_outputs))[1]
    expected = [int(reference.uniform(*each) * width) for each in zip(seeds, num_outputs, strict=True)]
    assert tokens_R.tolist() == expected


def test_greedy_and_drawn_rows_in_one_launch(given_numbers: None) -> None:
    """The highest score is that of the row, whatever is drawn, in the dtype of a model."""
    scores_RV = torch.tensor([[0.0, 1.0, 1.0], [3.0, -math.inf, 3.0], [0.0, math.nan, 2.0]], dtype=torch.float16)
    params = [RequestParams(temperature=0), RequestParams(temperature=1.0), RequestParams(temperature=1.0)]
    largest_R, tokens_R = choose_tokens(scores_RV, settings_of(params, seeds_of([0.9] * 3)), positions_of([0] * 3))
    assert tokens_R.tolist()[:2] == [1, 2]
    assert largest_R.tolist()[:2] == [1.0, 3.0]
    assert largest_R[2].isnan()


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_smallest_and_largest_uniform_number(number: float, small_blocks: None, given_numbers: None) -> None:
    """0 draws the most likely token; the largest number draws no token that is impossible or barred."""
    scores_RV = torch.tensor([[0.0, 1.0, -math.inf, 1.0, -300.0, 0.5, -math.inf]])
    params = RequestParams(temperature=1.0)
    assert drawn(scores_RV, [params], [number]) == [1 if number == 0.0 else 0]


def test_ties_go_to_the_lowest_id(small_blocks: None, given_numbers: None) -> None:
    """Four equal tokens, across blocks: each has a quarter, in the order of the ids."""
    scores_RV = torch.full((4, 200), -math.inf)
    ids = [3, 127, 128, 199]
    scores_RV[:, ids] = 2.0
    numbers = [(place + 0.5) / 4 for place in range(4)]
    assert drawn(scores_RV, [RequestParams(temperature=1.0)] * 4, numbers) == ids
    assert drawn(scores_RV[:1], [RequestParams(temperature=1.0)], [0.25]) == [127]  # a border belongs to the next
    for params in (RequestParams(temperature=1.0, top_k=2), RequestParams(temperature=1.0, top_p=0.45)):
        assert drawn(scores_RV[:2], [params] * 2, [0.49, 0.51]) == [3, 127]


@pytest.mark.parametrize("temperature", [1e-300, 1e-5])
def test_tiny_temperature_is_greedy(temperature: float, small_blocks: None, given_numbers: None) -> None:
    scores_RV = torch.tensor([[1.0, 3.0, -math.inf, 3.0 - 1e-3]]).repeat(2, 1)
    params = [RequestParams(temperature=temperature)] * 2
    assert drawn(scores_RV, params, [0.0, 1 - 2.0**-53]) == [1, 1]


def test_token_of_a_row_does_not_depend_on_other_rows(small_blocks: None, given_numbers: None) -> None:
    generator = torch.Generator().manual_seed(3)
    scores_RV = torch.randn(3, 100, generator=generator)
    params = [random_params(generator, 100) for _ in range(3)]
    numbers = [0.1, 0.9, 0.3]
    together = drawn(scores_RV, params, numbers)
    assert together == [drawn(scores_RV[r : r + 1], [params[r]], [numbers[r]])[0] for r in range(3)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_row_without_finite_scores_returns_some_token(bad: float, small_blocks: None, given_numbers: None) -> None:
    scores_RV = torch.full((2, 70), bad)
    scores_RV[1, :3] = 1.0
    params = [RequestParams(temperature=1.0, top_k=3, top_p=0.9, min_p=0.1)] * 2
    assert all(0 <= token < 70 for token in drawn(scores_RV, params, [0.5, 0.5]))


def test_no_rows(given_numbers: None) -> None:
    assert drawn(torch.empty(0, 10), [], []) == []
    largest_R, indices_R = row_maximum(torch.empty(0, 10))
    assert largest_R.shape == indices_R.shape == (0,)


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 1), (torch.float16, 7), (torch.float32, 128), (torch.float16, 300)]
)
def test_row_maximum(dtype: torch.dtype, width: int, small_blocks: None) -> None:
    generator = torch.Generator().manual_seed(width)
    rows_RV = torch.randn(9, width + 3, generator=generator).to(dtype)[:, 3:]
    rows_RV[1] = rows_RV[1].round()  # ties
    rows_RV[2] = -math.inf
    rows_RV[3, width // 2] = math.inf
    rows_RV[4, width // 2] = math.nan
    rows_RV[5, width // 2] = -math.inf
    rows_RV[6, width // 3], rows_RV[6, width - 1] = math.inf, math.nan
    rows_RV[7] = -0.0
    rows_RV[7, width - 1] = 0.0
    rows_RV[8].sub_(100)
    largest_R, indices_R = row_maximum(rows_RV)
    for row, (values, expected) in enumerate(zip(rows_RV, reference.row_maximum(rows_RV)[0], strict=True)):
        is_largest = values.isnan() if expected.isnan() else values == expected
        assert indices_R[row] == int(is_largest.nonzero()[0])
        assert largest_R[row] == expected or (largest_R[row].isnan() and expected.isnan())
