"""Kernels of pairs in Triton's interpreter, compared with the torch reference."""

from __future__ import annotations

import random

import pytest
import torch

from moeserve.ops.pairs.interface import Keys
from moeserve.ops.pairs.reference import TorchPairs
from moeserve.triton_kernels import pairs
from moeserve.triton_kernels.pairs import gather_rows, order_pairs, scatter_rows, weigh_rows, weighted_sum

# T tokens, D model width, K experts per token, P pairs = T * K, R rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["one launch", "three launches"])
def _launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "three launches":
        monkeypatch.setattr(pairs, "MAX_RANKED_PAIRS", 0)


@pytest.fixture(params=["searched", "inverted"])
def _rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "inverted":
        monkeypatch.setattr(pairs, "SEARCHED_ROWS", ())


@pytest.mark.slow_but("-0", "-4")
@pytest.mark.usefixtures("_launches")
@pytest.mark.parametrize("seed", range(5))
def test_order(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dtype, num_known = draw.choice([torch.int32, torch.int64]), draw.choice([8, 80, 300])
    wide = torch.randint(-1, num_known, (draw.choice([1, 2, 40, 150, 300]), 9)).to(dtype)
    keys_TK = wide[:, 2 : 2 + draw.choice([1, 2, 6])]  # strided rows
    first = draw.choice([0, 0, 5])
    num_counted = draw.choice([0, 1, num_known - first, (num_known - first) // 2])
    expected_P, expected_counts = TorchPairs().order(keys_TK, Keys(num_counted, first, num_known))
    load = torch.full((num_counted,), 2**40)
    for given in (None, load, load):
        pairs_P, counts = order_pairs(keys_TK, first, num_counted, given)
        assert pairs_P.dtype == counts.dtype == torch.int64
        assert pairs_P.tolist() == expected_P.tolist()
        assert counts.tolist() == expected_counts.tolist()
    assert load.tolist() == (2**40 + 2 * expected_counts).tolist()


@pytest.mark.usefixtures("_launches")
@pytest.mark.parametrize("keys", [[], [-1], [3] * 300, [7, 0] * 257], ids=len)
def test_order_of_one_dimension(keys: list[int]) -> None:
    pairs_P, counts = order_pairs(torch.tensor(keys, dtype=torch.int64), 0, 7)
    kept = sorted((pair for pair, key in enumerate(keys) if 0 <= key < 7), key=lambda pair: keys[pair])
    assert pairs_P.tolist() == kept + [-1] * (len(keys) - len(kept))
    assert counts.tolist() == [keys.count(key) for key in range(7)]


def test_order_of_more_blocks_than_one_iteration_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "MAX_RANKED_PAIRS", 0)
    monkeypatch.setitem(pairs.START_BLOCKS, "BLOCK_B", 4)
    torch.manual_seed(0)
    keys_TK = torch.randint(-1, 9, (800, 3))
    assert keys_TK.numel() > 2 * 4 * pairs.PLACE_BLOCKS["BLOCK_P"]
    expected_P, expected_counts = TorchPairs().order(keys_TK, Keys(6, 2, 9))
    pairs_P, counts = order_pairs(keys_TK, 2, 6)
    assert torch.equal(pairs_P, expected_P)
    assert torch.equal(counts, expected_counts)


@pytest.mark.parametrize(
    ("num_rows", "width", "divisor", "dtype"),
    [
        (0, 16, 1, torch.float32),
        (1, 1, 3, torch.int64),
        (20, 83, 1, torch.bfloat16),
        (20, 83, 3, torch.float8_e4m3fn),
        (5, 2100, 3, torch.float32),
    ],
)
def test_gather(num_rows: int, width: int, divisor: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    source_SD = (torch.randn(40, width + 7) * 100).to(dtype)[:, 7:]  # strided rows
    indices_R = torch.randint(0, 40 * divisor, (num_rows,))
    indices_R[3::5] = -1
    rows_RD = gather_rows(source_SD, indices_R, divisor)
    assert (rows_RD.shape, rows_RD.dtype) == ((num_rows, width), dtype)
    for row_D, index in zip(rows_RD, indices_R.tolist(), strict=True):
        assert index == -1 or torch.equal(row_D.view(torch.uint8), source_SD[index // divisor].view(torch.uint8))


@pytest.mark.parametrize(("num_rows", "dtype"), [(0, torch.float32), (1, torch.int64), (30, torch.bfloat16)])
def test_scatter(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    rows_RD = (torch.randn(num_rows, 83) * 100).to(dtype)
    indices_R = torch.randperm(40)[:num_rows]
    indices_R[::7] = -1
    assert torch.equal(scatter_rows(rows_RD, indices_R, 40), TorchPairs().scatter(rows_RD, indices_R, 40))


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("seed", range(6))
def test_weighted_sum(seed: int) -> None:
    """Results equal the reference bit for bit. Rows without a pair are at random places and hold NaN.

    The interpreter truncates to bfloat16 where a GPU rounds, so these results may differ in the last bit.
    """
    draw, dtype = random.Random(seed), DTYPES[seed % 3]
    torch.manual_seed(seed)
    num_tokens, top_k = draw.choice([0, 1, 3, 12]), draw.choice([1, 2, 8])
    width, num_pairs = draw.choice([1, 3, 128, 1100]), num_tokens * top_k
    pairs_R = torch.randperm(num_pairs)[: draw.choice([0, num_pairs // 2, num_pairs, num_pairs])]
    output_RD, weights_TK = torch.randn(len(pairs_R), width).to(dtype), torch.rand(num_tokens, top_k)
    expected_TD = TorchPairs().weighted_sum(output_RD, pairs_R, weights_TK, dtype)

    order = torch.randperm(len(pairs_R) + 4)
    with_spare_RD = torch.cat([output_RD, torch.full((4, width), float("nan"), dtype=dtype)])[order]
    total_TD = weighted_sum(with_spare_RD, torch.cat([pairs_R, torch.full((4,), -1)])[order], weights_TK, dtype)
    assert total_TD.dtype == dtype
    if dtype == torch.bfloat16:
        assert ((total_TD.float() - expected_TD.float()).abs() <= expected_TD.float().abs() * 2**-7).all()
    else:
        assert torch.equal(total_TD.view(torch.uint8), expected_TD.view(torch.uint8))


@pytest.mark.usefixtures("_rows")
def test_exact_sums() -> None:
    """1e8 - 1e8 + 1 is 1 in the order of k and 0 in others. The sign of zero is kept. Results have the wanted dtype."""
    output_RD, ones = torch.tensor([[1.0], [-1e8], [1e8]]), torch.ones(1, 3)
    for order, total in (([2, 1, 0], 1.0), ([1, 2, 0], 0.0)):
        assert weighted_sum(output_RD, torch.tensor(order), ones, torch.float32).tolist() == [[total]]
    total_TD = weighted_sum(torch.tensor([[-0.0, 0.0]]).half(), torch.tensor([0]), ones[:, :1], torch.float32)
    assert total_TD.dtype == torch.float32
    assert total_TD.signbit().tolist() == [[True, False]]


@pytest.mark.usefixtures("_rows")
def test_pair_without_a_row_adds_nothing_even_if_its_weight_is_nan() -> None:
    weights_TK = torch.tensor([[float("nan"), 1.0], [float("nan"), 0.5]])
    output_RD = torch.tensor([[2.0, 3.0]])
    total_TD = weighted_sum(output_RD, torch.tensor([3]), weights_TK, torch.float32)
    assert total_TD.tolist() == [[0.0, 0.0], [1.0, 1.5]]
    assert weighted_sum(output_RD[:0], torch.tensor([3])[:0], weights_TK, torch.float16).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("num_rows", "num_counted", "width", "dtype"),
    [(0, 0, 4, torch.float32), (5, 0, 3, torch.float16), (7, 7, 1100, torch.float16), (400, 270, 17, torch.float32)],
)
def test_only_used_rows_are_weighed(
    num_rows: int, num_counted: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(num_rows)
    rows_RD, weights_R = torch.randn(num_rows, width + 3).to(dtype)[:, 3:], torch.rand(num_rows)
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, 12345.0, **options))
    for count_dtype in (torch.int32, torch.int64):
        counted = torch.tensor([num_counted], dtype=count_dtype)
        weighed_RD = weigh_rows(rows_RD, weights_R, counted)
        expected_RD = TorchPairs().weigh(rows_RD, weights_R, counted)
        assert weighed_RD.dtype == expected_RD.dtype == dtype
        assert torch.equal(weighed_RD[:num_counted], expected_RD[:num_counted])
        assert (weighed_RD[num_counted:] == weighed_RD.new_tensor(12345.0)).all(), "nothing was written"
