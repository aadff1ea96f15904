"""Sorting, row copies and weighted sums of pairs, in torch and in C++, against plain loops."""

from __future__ import annotations

import random

import pytest
import torch
from paged_steps import NATIVE, same_bytes
from torch import Tensor

from moeserve.ops import pairs as pairs_ops
from moeserve.ops.native import set_num_threads
from moeserve.ops.pairs.interface import Keys, PairKernels
from moeserve.ops.pairs.reference import TorchPairs

# T tokens, D model width, K experts per token, P pairs = T * K, R pairs that are not padding

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def operations(implementation: str) -> PairKernels:
    return TorchPairs() if implementation == "torch" else pairs_ops.make(NATIVE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(6))
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
@pytest.mark.parametrize("seed", range(5))
def test_order(operations: PairKernels, seed: int, dtype: torch.dtype) -> None:
    """The keys are columns of a wider tensor."""
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


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
@pytest.mark.parametrize("divisor", [1, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_gather(operations: PairKernels, num_rows: int, divisor: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    source = (torch.randn(40, 90) * 100).to(dtype)[:, 7:]  # rows of a wider tensor
    indices_R = torch.randint(0, 40 * divisor, (num_rows,))
    indices_R[1::7] = -1
    gathered = operations.gather(source, indices_R, divisor)
    assert (gathered.shape, gathered.dtype) == ((num_rows, 83), dtype)
    kept = indices_R >= 0
    assert torch.equal(gathered[kept], source[indices_R[kept] // divisor])


def random_sum(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [R, D] of some pairs in random order, the pairs, and weights [T, K]."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    num_tokens, top_k = draw.choice([0, 1, 3, 40]), draw.choice([1, 2, 8])
    width = draw.choice([1, 3, 16, 100, 128, 256, 600])
    num_pairs = num_tokens * top_k
    pairs_R = torch.randperm(num_pairs)[: draw.choice([0, num_pairs // 2, num_pairs])]
    return torch.randn(len(pairs_R), width).to(dtype), pairs_R, torch.rand(num_tokens, top_k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_weighted_sum(operations: PairKernels, seed: int, dtype: torch.dtype) -> None:
    output_RD, pairs_R, weights_TK = random_sum(seed, dtype)
    num_tokens, top_k = weights_TK.shape
    expected_TD = torch.zeros(num_tokens, output_RD.shape[1], dtype=torch.float64)
    for row, pair in zip(output_RD, pairs_R.tolist(), strict=True):
        expected_TD[pair // top_k] += row.double() * weights_TK[pair // top_k, pair % top_k].double()
    total_TD = operations.weighted_sum(output_RD, pairs_R, weights_TK, dtype)
    assert total_TD.dtype == dtype
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8}[dtype]
    assert ((total_TD.double() - expected_TD).abs() <= expected_TD.abs() * rounding * 1.01 + 2e-6).all()
    assert same_bytes(total_TD, TorchPairs().weighted_sum(output_RD, pairs_R, weights_TK, dtype))
    with_others_RD, with_others_R = output_RD.repeat(2, 1), torch.cat([torch.full_like(pairs_R, -1), pairs_R])
    assert same_bytes(total_TD, operations.weighted_sum(with_others_RD, with_others_R, weights_TK, dtype))


def test_the_sum_is_in_the_order_of_k(operations: PairKernels) -> None:
    """1e8 - 1e8 + 1 is 1 in this order and 0 in others, whatever the order of the rows."""
    output_RD = torch.tensor([[1.0], [-1e8], [1e8]])
    for pairs, total in (([2, 1, 0], 1.0), ([1, 2, 0], 0.0)):
        total_TD = operations.weighted_sum(output_RD, torch.tensor(pairs), torch.ones(1, 3), torch.float32)
        assert total_TD.tolist() == [[total]]


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
    for num_threads in (2, 3):
        set_num_threads(num_threads)
        assert same_bytes(operations.weighted_sum(output_RD, pairs_R, weights_TK, dtype), expected_TD)
        assert same_bytes(operations.gather(output_RD, pairs_R), output_RD[pairs_R])
    for token in (0, 55, 119):
        rows = (pairs_R // top_k == token).nonzero()[:, 0]
        own_pairs = pairs_R[rows] - token * top_k
        alone_TD = operations.weighted_sum(output_RD[rows], own_pairs, weights_TK[token : token + 1], dtype)
        assert same_bytes(alone_TD[0], expected_TD[token])
