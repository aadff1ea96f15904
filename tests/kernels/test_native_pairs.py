"""Sorting, gathering and adding up pairs: in torch and in C++ with each instruction set, against plain loops."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from paged_steps import (
    INSTRUCTION_SETS,
    KERNELS,
    kernels,
    needs_kernels,
    same_bytes,
    settings_restored,
    use_instruction_set,
)
from torch import Tensor

from moeserve.ops.interfaces import Keys, PairKernels
from moeserve.ops.threads import set_num_threads
from moeserve.ops.torch.pairs import TorchPairs

# T tokens, D model width, K experts per token, P pairs = T * K, R pairs that are not padding

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["torch", *INSTRUCTION_SETS])
def operations(request: pytest.FixtureRequest) -> Iterator[PairKernels]:
    with settings_restored():
        if request.param == "torch":
            yield TorchPairs()
        else:
            use_instruction_set(request.param)
            yield KERNELS.pairs


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(20))
def test_sort(operations: PairKernels, seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(seed)
    first_key, num_keys = draw.choice([0, 0, 5]), draw.choice([0, 1, 2, 7, 64, 300])
    counted = range(first_key, first_key + num_keys)
    num_known = first_key + num_keys + draw.choice([0, 4])
    keys = [draw.randint(-1, num_known - 1) for _ in range(draw.choice([0, 1, 8, 50, 1000]))]
    order_R, counts = operations.sort(torch.tensor(keys, dtype=dtype), Keys(num_keys, first_key, num_known))
    assert order_R.dtype == counts.dtype == torch.int64
    assert order_R.tolist() == sorted((p for p, key in enumerate(keys) if key in counted), key=lambda p: keys[p])
    assert counts.tolist() == [keys.count(key) for key in counted]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(10))
def test_order(operations: PairKernels, seed: int, dtype: torch.dtype) -> None:
    """Of keys that are a part of wider rows."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    wide = torch.randint(-1, 12, (draw.choice([0, 1, 2, 40]), 9), dtype=dtype)
    keys_TK = wide[:, 2 : 2 + draw.choice([1, 3, 7])]
    keys = Keys(draw.choice([0, 1, 5]), first=draw.choice([0, 4]), num_known=12)
    order_P, counts = operations.order(keys_TK, keys)
    expected_R, expected_counts = TorchPairs().sort(keys_TK.flatten(), keys)
    assert order_P.tolist() == expected_R.tolist() + [-1] * (keys_TK.numel() - len(expected_R))
    assert counts.tolist() == expected_counts.tolist()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
@pytest.mark.parametrize("num_rows", [0, 1, 30])
def test_scatter(operations: PairKernels, num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    rows_RD = (torch.randn(num_rows, 83) * 100).to(dtype)
    indices_R = torch.randperm(40)[:num_rows]
    indices_R[::7] = -1
    out_PD = operations.scatter(rows_RD, indices_R, 40)
    assert (out_PD.shape, out_PD.dtype) == ((40, 83), dtype)
    for place in range(40):
        (row,) = [*rows_RD[indices_R == place], torch.zeros(83, dtype=dtype)][:1]
        assert torch.equal(out_PD[place], row)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_join(operations: PairKernels, num_rows: int, dtype: torch.dtype) -> None:
    first_TX, second_TD = torch.randint(0, 2**60, (num_rows, 5))[:, 1:4], torch.randn(num_rows, 90).to(dtype)[:, 7:]
    joined_TV = operations.join(first_TX, second_TD)
    assert joined_TV.dtype == dtype
    num_values = 3 * 8 // dtype.itemsize
    assert torch.equal(joined_TV[:, :num_values].flatten().view(torch.int64).view(-1, 3), first_TX)
    assert torch.equal(joined_TV[:, num_values:], second_TD)


def test_gather_leaves_out_what_has_no_row(operations: PairKernels) -> None:
    source = torch.randn(4, 9)
    gathered = operations.gather(source, torch.tensor([5, -1, 0, -1]), divisor=2)
    assert torch.equal(gathered[[0, 2]], source[[2, 0]])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
@pytest.mark.parametrize("divisor", [1, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 500])
def test_gather(operations: PairKernels, num_rows: int, divisor: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    source = (torch.randn(40, 90) * 100).to(dtype)[:, 7:]  # rows of a wider tensor
    indices_R = torch.randint(0, 40 * divisor, (num_rows,))
    gathered = operations.gather(source, indices_R, divisor)
    assert gathered.dtype == dtype
    assert gathered.shape == (num_rows, 83)
    for row, index in zip(gathered, indices_R.tolist(), strict=True):
        assert torch.equal(row, source[index // divisor])


def random_sum(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [R, D] of some pairs in no order, those pairs, and weights [T, K]."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    num_tokens, top_k = draw.choice([0, 1, 3, 40]), draw.choice([1, 2, 8])
    width = draw.choice([1, 3, 16, 100, 128, 256, 600])
    num_pairs = num_tokens * top_k
    pairs_R = torch.randperm(num_pairs)[: draw.choice([0, num_pairs // 2, num_pairs])]
    return torch.randn(len(pairs_R), width).to(dtype), pairs_R, torch.rand(num_tokens, top_k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(30))
def test_weighted_sum(operations: PairKernels, seed: int, dtype: torch.dtype) -> None:
    output_RD, pairs_R, weights_TK = random_sum(seed, dtype)
    num_tokens, top_k = weights_TK.shape
    expected_TD = torch.zeros(num_tokens, output_RD.shape[1], dtype=torch.float64)
    for row, pair in zip(output_RD, pairs_R.tolist(), strict=True):
        expected_TD[pair // top_k] += row.double() * weights_TK[pair // top_k, pair % top_k].double()
    total_TD = operations.weighted_sum(output_RD, pairs_R, weights_TK, dtype)
    assert total_TD.dtype == dtype
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert ((total_TD.double() - expected_TD).abs() <= expected_TD.abs() * rounding * 1.01 + 2e-6).all()
    assert same_bytes(total_TD, TorchPairs().weighted_sum(output_RD, pairs_R, weights_TK, dtype))


def test_the_sum_is_in_the_order_of_k(operations: PairKernels) -> None:
    """1e8 - 1e8 + 1 is 1 in this order, and 0 in others; rows come in another."""
    output_RD = torch.tensor([[1.0], [-1e8], [1e8]])
    total_TD = operations.weighted_sum(output_RD, torch.tensor([2, 1, 0]), torch.ones(1, 3), torch.float32)
    assert total_TD.tolist() == [[1.0]]
    total_TD = operations.weighted_sum(output_RD, torch.tensor([1, 2, 0]), torch.ones(1, 3), torch.float32)
    assert total_TD.tolist() == [[0.0]]


def test_padding_adds_nothing(operations: PairKernels) -> None:
    """Not even where its weight is not a number, in the kernels; the reference multiplies it with zero."""
    output_RD = torch.tensor([[2.0, 3.0]])
    total_TD = operations.weighted_sum(output_RD, torch.tensor([3]), torch.full((3, 2), 0.5), torch.float32)
    assert total_TD.tolist() == [[0.0, 0.0], [1.0, 1.5], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bytes_alone_and_in_any_batch_on_any_threads(
    operations: PairKernels, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    num_tokens, top_k, width = 120, 6, 700
    weights_TK = torch.rand(num_tokens, top_k)
    pairs_R = torch.randperm(num_tokens * top_k)
    output_RD = torch.randn(len(pairs_R), width).to(dtype)
    set_num_threads(1)
    expected_TD = operations.weighted_sum(output_RD, pairs_R, weights_TK, dtype)
    for num_threads in (2, 3, 8):
        set_num_threads(num_threads)
        assert same_bytes(operations.weighted_sum(output_RD, pairs_R, weights_TK, dtype), expected_TD)
        assert same_bytes(operations.gather(output_RD, pairs_R), output_RD[pairs_R])
    for token in (0, 55, 119):
        rows = (pairs_R // top_k == token).nonzero()[:, 0]
        own_pairs = pairs_R[rows] - token * top_k
        alone_TD = operations.weighted_sum(output_RD[rows], own_pairs, weights_TK[token : token + 1], dtype)
        assert same_bytes(alone_TD[0], expected_TD[token])


SORT = dict(
    keys=torch.tensor([1, 0, -1]),
    first_key=0,
    num_known=2,
    order=torch.empty(3).long(),
    counts=torch.empty(2).long(),
)
GATHER = dict(source=torch.randn(3, 4), indices=torch.tensor([5, 0]), divisor=2, out=torch.randn(2, 4))
SCATTER = dict(source=torch.randn(2, 3), indices=torch.tensor([2, -1]), out=torch.empty(4, 3))
JOIN = dict(first=torch.zeros(2, 2).long(), second=torch.randn(2, 4), out=torch.empty(2, 8))
SUM = dict(rows=torch.randn(3, 4), pair_of_row=torch.tensor([3, 0, 1]), weights=torch.rand(2, 2), out=torch.randn(2, 4))


@needs_kernels
@pytest.mark.parametrize(
    ("function", "good", "argument", "wrong", "message"),
    [
        ("sort_pairs", SORT, "keys", lambda t: t.double(), "keys is not of type int32 or int64"),
        ("sort_pairs", SORT, "keys", lambda t: torch.zeros(6, dtype=torch.int64)[::2], "keys is not contiguous"),
        ("sort_pairs", SORT, "keys", lambda t: torch.tensor([1, 2, 0]), "pair 1 has key 2, but there are 2"),
        ("sort_pairs", SORT, "keys", lambda t: torch.tensor([-2, 1, 0]), "pair 0 has key -2"),
        ("sort_pairs", SORT, "num_known", lambda n: 1, "of 1 keys, 2 from 0 on cannot be counted"),
        ("sort_pairs", SORT, "first_key", lambda n: -1, "2 from -1 on cannot be counted"),
        ("sort_pairs", SORT, "order", lambda t: t[:2], "order has shape"),
        ("sort_pairs", SORT, "counts", lambda t: t[:, None], "1 dimensions"),
        ("gather_rows", GATHER, "source", lambda t: t.t().contiguous().t(), "source is not contiguous"),
        ("gather_rows", GATHER, "indices", lambda t: torch.tensor([0, 6]), "row 1 comes from 6, but there are 6"),
        ("gather_rows", GATHER, "indices", lambda t: torch.tensor([-2, 0]), "row 0 comes from -2"),
        ("gather_rows", GATHER, "divisor", lambda n: 0, "divisor=0"),
        ("gather_rows", GATHER, "out", lambda t: t[:, :3], "out has shape"),
        ("gather_rows", GATHER, "out", lambda t: t.bfloat16(), "out is not of type source's"),
        ("order_pairs", SORT, "keys", lambda t: t.double(), "keys is not of type int32 or int64"),
        ("order_pairs", SORT, "keys", lambda t: torch.tensor([[1], [0], [2]]).int(), "pair 2 has key 2"),
        ("order_pairs", SORT, "keys", lambda t: t[None, :2], "order has shape"),
        ("scatter_rows", SCATTER, "indices", lambda t: torch.tensor([4, 0]), "row 0 goes to 4, but there are 4"),
        ("scatter_rows", SCATTER, "indices", lambda t: torch.tensor([0, -2]), "row 1 goes to -2"),
        ("scatter_rows", SCATTER, "indices", lambda t: t[:1], "indices has shape"),
        ("scatter_rows", SCATTER, "out", lambda t: t.half(), "out is not of type source's"),
        ("scatter_rows", SCATTER, "out", lambda t: t[:, :2], "out has shape"),
        ("join_rows", JOIN, "second", lambda t: t[:1], "second has shape"),
        ("join_rows", JOIN, "first", lambda t: t.t(), "first is not contiguous"),
        ("join_rows", JOIN, "out", lambda t: t[:, :7].contiguous(), "does not fit rows of 16 . 16 bytes"),
        ("weighted_sum", SUM, "rows", lambda t: t.half(), "rows is not of type float32 or bfloat16"),
        ("weighted_sum", SUM, "pair_of_row", lambda t: torch.tensor([4, 0, 1]), "row 0 belongs to pair 4"),
        ("weighted_sum", SUM, "pair_of_row", lambda t: torch.tensor([3, 0, -1]), "row 2 belongs to pair -1"),
        ("weighted_sum", SUM, "pair_of_row", lambda t: t[:2], "pair_of_row has shape"),
        ("weighted_sum", SUM, "weights", lambda t: t.bfloat16(), "weights is not of type float32"),
        ("weighted_sum", SUM, "weights", lambda t: t.t(), "weights is not contiguous"),
        ("weighted_sum", SUM, "out", lambda t: t.bfloat16(), "out is not of type rows'"),
    ],
)
def test_wrong_arguments_are_refused(
    function: str, good: dict[str, Any], argument: str, wrong: Callable[[Any], Any], message: str
) -> None:
    getattr(kernels, function)(**good)
    with pytest.raises(ValueError, match=message):
        getattr(kernels, function)(**good | {argument: wrong(good[argument])})
