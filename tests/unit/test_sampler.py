"""The sampler, compared with a slow reference, with transformers' logits processors, and across batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from logprob_rows import unpacked
from sampled_rows import RowSpec, sampled, uploaded
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moeserve.config.devices import DEVICES
from moeserve.config.settings import LogprobsMode
from moeserve.errors import EngineError
from moeserve.ops.backend import REFERENCE
from moeserve.ops.sampling import make
from moeserve.ops.sampling import reference as sampling
from moeserve.ops.select import select_backend
from moeserve.protocol import TokenLogprobs
from moeserve.sampling_params import RequestParams
from moeserve.worker import sampler
from moeserve.worker.grammars import AllowedTokens
from moeserve.worker.sampler import SampledToken

# L rows, V vocabulary

# Closer than this to a bound of min_p or top_p, or to the boundary of two tokens, rounding decides.
ROUNDING = 1e-9


def spec(
    *,
    seed: int = 0,
    position: int = 0,
    barred: list[int] | None = None,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    allowed: list[int] | None = None,
    **params: Any,
) -> RowSpec:
    return RowSpec(
        params=RequestParams(**params),
        seed=seed,
        position=position,
        barred_token_ids=barred or [],
        prompt_token_ids=prompt or [],
        output_token_ids=output or [],
        allowed=None if allowed is None else allowed_tokens(allowed),
    )


def allowed_tokens(token_ids: list[int], num_bits: int = 2**16) -> AllowedTokens:
    """Return a mask that is longer than the row, as one of a tokenizer may be."""
    bits = np.zeros(num_bits, np.uint8)
    bits[token_ids] = 1
    return AllowedTokens(np.packbits(bits, bitorder="little"))


BACKENDS = {"best": select_backend(torch.device("cpu")), "torch": REFERENCE}  # the same without C++
OPERATIONS = {name: make(backend) for name, backend in BACKENDS.items()}
chosen_kernels = "best"


@pytest.fixture(autouse=True, params=OPERATIONS, scope="module")
def choose_kernels(request: pytest.FixtureRequest) -> None:
    """Run each test with C++ kernels and without."""
    global chosen_kernels
    chosen_kernels = request.param


def sample(logits_LV: Tensor, specs: list[RowSpec]) -> list[SampledToken]:
    return sampled(logits_LV, specs, OPERATIONS[chosen_kernels])


def prompt_logprobs(
    logits_RV: Tensor, targets: list[int], num_top: int, mode: LogprobsMode = "raw_logprobs", temperature: float = 0.0
) -> list[TokenLogprobs]:
    params = RequestParams(prompt_logprobs=num_top, temperature=temperature)
    operations = OPERATIONS[chosen_kernels]
    tensors = sampler.prompt_logprobs(logits_RV, torch.tensor(targets), params, operations, uploaded, mode)
    rows = sampler.prompt_rows(tensors)
    if isinstance(rows, str):
        raise EngineError(rows)
    return unpacked([rows])


def tokens(logits_LV: Tensor, specs: list[RowSpec]) -> list[int]:
    return [sampled.token_id for sampled in sample(logits_LV, specs)]


def random_logits(rows: int, vocabulary: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the number of scores processed together."""

    def set_sizes(piece_size: int) -> None:
        monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], sampling_piece=piece_size))
        monkeypatch.setattr(sampling, "FLOAT_PIECE_SIZE", piece_size)

    return set_sizes


# ---- The reference: one row, plain loops, float64.


def reference_scores(logits: list[float], spec: RowSpec) -> list[float]:
    params, scores = spec.params, list(logits)
    for token in range(len(scores)):
        scores[token] += params.logit_bias.get(token, 0.0)
        if token in spec.barred_token_ids or not is_allowed(token, spec):
            scores[token] = -math.inf
        if token in spec.prompt_token_ids or token in spec.output_token_ids:
            if scores[token] > 0:
                scores[token] /= params.repetition_penalty
            else:
                scores[token] *= params.repetition_penalty
        count = spec.output_token_ids.count(token)
        scores[token] -= params.frequency_penalty * count
        scores[token] -= params.presence_penalty * (count > 0)
    return scores


def is_allowed(token: int, spec: RowSpec) -> bool:
    return spec.allowed is None or bool(spec.allowed.bits[token // 8] & (1 << token % 8))


def reference_kept(scores: list[float], params: RequestParams) -> list[tuple[int, float]]:
    """Return the tokens that may be drawn with their probabilities, most likely first. Skip ties within rounding."""
    highest = max(scores)
    weights = {
        token: math.exp((score - highest) / params.temperature) for token, score in enumerate(scores) if score > -1e30
    }
    order = sorted(weights, key=lambda token: (-scores[token], token))
    assume(all(not 0 < abs(weights[token] - params.min_p) < ROUNDING for token in order))
    order = [token for token in order if weights[token] >= params.min_p and weights[token] > 0]
    if params.top_k > 0:
        order = order[: params.top_k]
    total = math.fsum(weights[token] for token in order)
    kept: list[int] = []
    for token in order:
        kept.append(token)
        share = math.fsum(weights[token] for token in kept) / total
        if params.top_p < 1.0:
            assume(abs(share - params.top_p) > ROUNDING)
            if share >= params.top_p:
                break
    total = math.fsum(weights[token] for token in kept)
    return [(token, weights[token] / total) for token in kept]


def reference_token(logits: list[float], spec: RowSpec) -> int:
    scores = reference_scores(logits, spec)
    if spec.params.temperature == 0:
        return min(range(len(scores)), key=lambda token: (-scores[token], token))
    number, passed = reference_uniform(spec.seed, spec.position), 0.0
    for token, probability in reference_kept(scores, spec.params):
        passed += probability
        assume(abs(passed - number) > ROUNDING)
        if number < passed:
            return token
    raise AssertionError("probabilities do not sum to one")


def reference_uniform(seed: int, position: int) -> float:
    """Philox 4x64-10 as in the paper (Salmon et al., SC 2011). numpy counts up by one before its first block."""
    mask = 2**64 - 1
    keys, words = [seed, 0], [position + 1, 0, 0, 0]
    for _ in range(10):
        first, second = words[0] * 0xD2E7470EE14C6C93, words[2] * 0xCA5A826395121157
        words = [(second >> 64) ^ words[1] ^ keys[0], second & mask, (first >> 64) ^ words[3] ^ keys[1], first & mask]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    return (words[0] >> 11) / 2**53


# Quarters, so that sums are exact in every type and many tokens are equally likely.
quarters = st.integers(-16, 16).map(lambda quarter: quarter / 4)


@st.composite
def rows_and_specs(draw: st.DrawFn) -> tuple[Tensor, list[RowSpec]]:
    vocabulary = draw(st.integers(1, 60))
    token_ids = st.lists(st.integers(0, vocabulary - 1), max_size=8)
    rows = draw(st.lists(st.lists(quarters, min_size=vocabulary, max_size=vocabulary), max_size=4))
    specs = [
        spec(
            seed=draw(st.integers(0, 2**64 - 1)),
            position=draw(st.integers(0, 2**40)),
            barred=[*draw(token_ids)[: vocabulary - 1], 2**40] if vocabulary > 8 else [],
            prompt=draw(token_ids),
            output=draw(token_ids),
            temperature=draw(st.sampled_from([0.0, 1e-300, 0.5, 1.0, 1.7])),
            top_k=draw(st.sampled_from([-1, 0, 0, 1, 3, 7, 100])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.6, 0.01])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.03, 0.4, 1.0])),
            repetition_penalty=draw(st.sampled_from([1.0, 2.0, 0.5])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.5])),
            presence_penalty=draw(st.sampled_from([0.0, 0.75, -1.5])),
            logit_bias=draw(st.dictionaries(st.integers(0, vocabulary + 5), quarters, max_size=4)),
        )
        for _ in rows
    ]
    grammars = [draw(st.none() | st.sets(st.integers(0, vocabulary - 1))) for _ in rows]
    for row, grammar in enumerate(grammars):
        if grammar is not None and not grammar <= {*specs[row].barred_token_ids}:
            specs[row] = replace(specs[row], allowed=allowed_tokens(list(grammar)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return torch.tensor(rows, dtype=dtype).view(len(rows), vocabulary), specs


@given(rows_and_specs(), st.sampled_from([1, 100, 2**18]))
@settings(max_examples=120)
def test_tokens_equal_the_reference(batch: tuple[Tensor, list[RowSpec]], piece_size: int) -> None:
    logits_LV, specs = batch
    expected = [reference_token(logits, spec) for logits, spec in zip(logits_LV.tolist(), specs, strict=True)]
    before_LV = logits_LV.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], sampling_piece=piece_size))
        patch.setattr(sampling, "FLOAT_PIECE_SIZE", piece_size)
        assert tokens(logits_LV, specs) == expected
    assert torch.equal(logits_LV, before_LV), "the caller's logits were changed"


def test_extreme_penalties_leave_a_choice() -> None:
    logits_LV = torch.tensor([[4.0, 3.0, -2.0, 1e38]])
    for penalty in (1e-300, 100.0):
        for temperature in (0.0, 5e-324, 100.0):
            chosen = tokens(
                logits_LV,
                [spec(repetition_penalty=penalty, prompt=[0, 1, 2, 3], barred=[0], temperature=temperature)],
            )
            assert chosen[0] in (1, 2, 3)


def test_top_p_keeps_the_token_at_the_bound() -> None:
    equal_LV = torch.zeros(100, 4)
    for top_p, kept in [(0.5, {0, 1}), (0.5001, {0, 1, 2}), (0.25, {0}), (1e-9, {0}), (0.7501, {0, 1, 2, 3})]:
        assert set(tokens(equal_LV, [spec(top_p=top_p, seed=i) for i in range(100)])) == kept


def test_the_last_number_below_one_gives_the_last_kept_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "uniform", lambda seed, position: 1 - 2.0**-53)
    logits_LV = torch.tensor([[-5000.0, 1.0, -math.inf, 2.0, -5000.0, 0.0]])
    assert tokens(logits_LV, [spec()]) == [5]
    assert tokens(logits_LV, [spec(barred=[5])]) == [1]
    assert tokens(logits_LV, [spec(top_p=0.5)]) == [3]


# ---- Against transformers.


def chosen_at(row_V: Tensor, numbers: list[float], monkeypatch: pytest.MonkeyPatch, **params: Any) -> list[int]:
    """Return the tokens chosen by these random numbers."""
    monkeypatch.setattr(sampling, "uniform", lambda seed, position: numbers[position])
    return tokens(row_V.expand(len(numbers), -1), [spec(position=i, **params) for i in range(len(numbers))])


@pytest.mark.parametrize("vocabulary", [57, 400])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 40, "temperature": 1.5},
        {"top_p": 0.999, "temperature": 3.0},
        {"min_p": 0.002, "temperature": 1.5},
        {"min_p": 0.02, "top_k": 50, "top_p": 0.95, "temperature": 1.3},
    ],
)
def test_kept_tokens_and_probabilities_equal_transformers(
    params: dict[str, Any], vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_V = random_logits(1, vocabulary, seed=vocabulary)[0]
    scores_LV = row_V[None].double()
    # in the order of RequestParams
    for warper in (
        TemperatureLogitsWarper(float(params.get("temperature", 1.0))),
        MinPLogitsWarper(params.get("min_p", 0.0)),
        TopKLogitsWarper(min(params.get("top_k", vocabulary), vocabulary)),
        TopPLogitsWarper(params.get("top_p", 1.0)),
    ):
        scores_LV = warper(torch.zeros(1, 1, dtype=torch.long), scores_LV)
    probabilities = torch.softmax(scores_LV[0], -1).numpy()
    kept = sorted(np.flatnonzero(probabilities), key=lambda token: -probabilities[token])
    bounds = np.concatenate([[0.0], np.cumsum(probabilities[kept])])

    # A number just above the lower bound of each kept token, and one just below the upper bound. The cold tail of a
    # row is narrower than the spacing of numbers near one.
    width = np.diff(bounds)
    wide = width > 1e-12
    assert wide.all() or params == {"temperature": 0.3}
    for numbers in (bounds[:-1] + 0.01 * width, bounds[1:] - 0.01 * width):
        assert chosen_at(row_V, numbers[wide].tolist(), monkeypatch, **params) == np.array(kept)[wide].tolist()


@pytest.mark.parametrize("spread", [0.1, 3.0, 60.0])
def test_large_vocabularies_give_the_same_tokens_with_all_kernels(spread: float) -> None:
    """The choice falls on the likeliest tokens or far behind them, among equal or impossible ones."""
    logits_LV = random_logits(64, 50_021) * spread / 3
    logits_LV[::4] = logits_LV[::4].bfloat16().float()  # many are equal
    logits_LV[1::4, ::3] = -math.inf
    kinds = [{}, {"top_k": 7000}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 40, "top_p": 0.95}, {"temperature": 0.1}]
    specs = [spec(seed=row, **kinds[row % len(kinds)]) for row in range(64)]
    drawn = [[each.token_id for each in sampled(logits_LV, specs, table)] for table in OPERATIONS.values()]
    assert drawn[0] == drawn[1]


# ---- Log-probabilities.


def check_logprobs(found: TokenLogprobs | None, row_V: Tensor, token_id: int, num_top: int) -> None:
    """Check the log-probabilities of a chosen or given token and of the most likely ones."""
    assert found is not None
    order = sorted(range(len(row_V)), key=lambda token: (-row_V[token].item(), token))
    assert found.token_ids == [token_id, *order[:num_top]]
    assert found.ranks == [1 + int((row_V > row_V[token]).sum()) for token in found.token_ids]
    expected = torch.log_softmax(row_V.float(), -1)[found.token_ids]
    torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece_size", [1, 700, 2**18])
def test_logprobs_are_log_softmax_of_raw_logits(
    piece_size: int, dtype: torch.dtype, small_pieces: Callable[[int], None]
) -> None:
    """Equal logits share a rank, and the lowest id comes first."""
    small_pieces(piece_size)
    logits_LV = (random_logits(7, 300, dtype=dtype) * 4).round() / 4  # with zeros of both signs
    nums = [0, 1, 5, None, 64, 3, 400]
    params = {"temperature": 2.0, "top_k": 20, "logit_bias": {3: 50.0}, "min_p": 0.01}
    batch = sample(logits_LV, [spec(seed=row, logprobs=num, **params) for row, num in enumerate(nums)])
    for row_V, num, result in zip(logits_LV, nums, batch, strict=True):
        assert result.token_id == 3  # by its bias, which log-probabilities do not know
        if num is None:
            assert result.logprobs is None
        else:
            check_logprobs(result.logprobs, row_V, 3, num)

    targets = [0, 299, 5, 5, 77, 150, 3]
    for num_top in (0, 4):
        whole = prompt_logprobs(logits_LV, targets, num_top)
        for found, row_V, target in zip(whole, logits_LV, targets, strict=True):
            check_logprobs(found, row_V, target, num_top)


@given(rows_and_specs(), st.sampled_from([1, 100, 2**18]))
@settings(max_examples=60)
def test_processed_numbers_are_those_of_drawing(batch: tuple[Tensor, list[RowSpec]], piece_size: int) -> None:
    """Greedy rows have no temperature. Numbers of float32 differ by a rounding at most."""
    logits_LV, specs = batch
    vocabulary = logits_LV.shape[1]
    specs = [replace(each, params=msgspec.structs.replace(each.params, logprobs=vocabulary)) for each in specs]
    expected = [reference_numbers(*each) for each in zip(logits_LV.tolist(), specs, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], sampling_piece=piece_size))
        for place, mode in enumerate(("processed_logprobs", "processed_logits")):
            results = sampled(logits_LV, specs, OPERATIONS[chosen_kernels], mode)
            for result, numbers in zip(results, expected, strict=True):
                assert result.logprobs is not None
                found = dict(zip(result.logprobs.token_ids, result.logprobs.logprobs, strict=True))
                assert [found[token] for token in range(vocabulary)] == pytest.approx(
                    numbers[place], rel=1e-6, abs=1e-6
                )


def reference_numbers(logits: list[float], spec: RowSpec) -> tuple[list[float], list[float]]:
    """Return the log-probabilities with which tokens are drawn, and the scores of which these are made."""
    scores, params = reference_scores(logits, spec), spec.params
    if params.temperature == 0:
        log_total = max(scores) + math.log(math.fsum(math.exp(score - max(scores)) for score in scores))
        return [score - log_total for score in scores], scores
    assume(params.temperature > 1e-200)  # otherwise the reference drops tokens whose weights are zero
    kept = dict(reference_kept(scores, params))
    logprobs = [math.log(kept[token]) if token in kept else -math.inf for token in range(len(scores))]
    return logprobs, [score / params.temperature if token in kept else -math.inf for token, score in enumerate(scores)]


def test_prompts_have_the_temperature_alone() -> None:
    logits_LV, targets = random_logits(5, 40), [0, 39, 5, 5, 7]
    for temperature, divisor in ((0.0, 1.0), (0.5, 0.5)):
        found = prompt_logprobs(logits_LV, targets, 3, "processed_logprobs", temperature)
        expected = (logits_LV.double() / divisor).log_softmax(dim=1)[range(5), targets]
        assert [each.logprobs[0] for each in found] == pytest.approx(expected.tolist(), abs=1e-6)
    raw = [each.logprobs[0] for each in prompt_logprobs(logits_LV, targets, 0, "raw_logits", 0.5)]
    assert raw == logits_LV[range(5), targets].tolist()


def test_a_forced_token_has_the_number_of_drawing_it() -> None:
    logits_LV = random_logits(1, 40)
    forced = replace(spec(logprobs=0, forced_token_ids=(7,), temperature=0.5), forced_token_id=7)
    (result,) = sampled(logits_LV, [forced], OPERATIONS[chosen_kernels], "processed_logprobs")
    assert result.token_id == 7
    assert result.logprobs is not None
    assert result.logprobs.logprobs[0] == pytest.approx(
        (logits_LV[0].double() / 0.5).log_softmax(dim=0)[7].item(), abs=1e-6
    )


# ---- The same bytes in any batch.


def as_bytes(results: list[SampledToken]) -> list[bytes]:
    return [msgspec.msgpack.encode([result.token_id, result.logprobs]) for result in results]


def mixed_specs(num: int, vocabulary: int) -> list[RowSpec]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 3},
        {"temperature": 0.7, "logprobs": 0},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 5},
        {"temperature": 20.0, "top_p": 0.99},
        {"temperature": 1.0, "top_k": 300},
        {"temperature": 1.0, "min_p": 1e-6, "logprobs": 1},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.01, "top_p": 0.8, "presence_penalty": 0.6, "logit_bias": {5: 4.0}},
    ]
    return [
        spec(
            seed=1000 + i,
            position=i * i,
            prompt=list(range(i, i + 20)),
            output=[i % vocabulary, 3, 3],
            barred=[i] if i % 4 == 0 else [],
            allowed=list(range(i, vocabulary, 3)) if i % 5 == 2 else None,
            **kinds[i % len(kinds)],
        )
        for i in range(num)
    ]


@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype"),
    [(40, 1003, torch.float32), (40, 1003, torch.bfloat16), (9, 50_021, torch.bfloat16)],
)
def test_a_row_gives_the_same_bytes_in_any_batch(
    rows: int, vocabulary: int, dtype: torch.dtype, small_pieces: Callable[[int], None]
) -> None:
    logits_LV = random_logits(rows, vocabulary, dtype=dtype)
    specs = mixed_specs(rows, vocabulary)
    together = as_bytes(sample(logits_LV, specs))

    alone = [as_bytes(sample(logits_LV[row : row + 1], [specs[row]]))[0] for row in range(rows)]
    assert alone == together

    order = np.random.default_rng(3).permutation(rows).tolist()
    shuffled = as_bytes(sample(logits_LV[order], [specs[row] for row in order]))
    assert shuffled == [together[row] for row in order]

    num_threads = torch.get_num_threads()
    for piece_size, threads in [(1, 1), (vocabulary * 3, 2), (2**30, 3)]:
        small_pieces(piece_size)
        torch.set_num_threads(threads)
        try:
            assert as_bytes(sample(logits_LV, specs)) == together
        finally:
            torch.set_num_threads(num_threads)


def test_prompt_logprobs_give_the_same_bytes_in_any_chunks() -> None:
    logits_RV = random_logits(11, 5003, dtype=torch.bfloat16)

    def bytes_of_chunks(*bounds: int) -> bytes:
        chunks = [prompt_logprobs(logits_RV[a:b], list(range(40 + a, 40 + b)), 3) for a, b in pairwise(bounds)]
        return msgspec.msgpack.encode([row for chunk in chunks for row in chunk])

    assert bytes_of_chunks(*range(12)) == bytes_of_chunks(0, 4, 11) == bytes_of_chunks(0, 11)


@pytest.mark.parametrize(("fault", "word"), [(math.nan, "NaN"), (math.inf, "infinite")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_or_infinity_fails_alone(fault: float, word: str, temperature: float) -> None:
    logits_LV = random_logits(4, 50)
    logits_LV[2, 31] = fault
    results = sample(logits_LV, [spec(temperature=temperature)] * 4)
    assert [result.error is not None for result in results] == [False, False, True, False]
    assert word in str(results[2].error)
    with pytest.raises(EngineError, match=word):
        prompt_logprobs(logits_LV, [0] * 4, 1)


def test_a_row_without_any_possible_token_is_an_error() -> None:
    (result,) = sample(torch.full((1, 5), -math.inf), [spec()])
    assert result.error is not None
    for temperature in (0.0, 1.0):
        barred, free = sample(
            torch.zeros(2, 5), [spec(temperature=temperature, barred=[0, 1, 2, 3, 4]), spec(temperature=temperature)]
        )
        assert "5 tokens" in str(barred.error)
        assert free.error is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_grammar_fails_or_allows_nothing_fails_alone(temperature: float) -> None:
    specs = [
        spec(temperature=temperature, allowed=[]),
        spec(temperature=temperature, allowed=[3]),
        replace(spec(temperature=temperature), allowed=AllowedTokens(np.zeros(0, np.uint8), "too complex")),
        spec(temperature=temperature),
    ]
    nothing, one, failed, free = sample(torch.zeros(4, 5), specs)
    assert "structured_outputs" in str(nothing.error)
    assert (one.token_id, one.error, failed.error, free.error) == (3, None, "too complex", None)
