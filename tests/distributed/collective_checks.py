"""Checks of the collectives of a group against sums in numpy. They run on all ranks of the group."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from moeserve.distributed.coordinator import GroupCoordinator

DTYPES = ("float32", "bfloat16", "int64")
# Rows of each rank: equal, ragged, ranks without rows, no rows at all. Cut to the number of ranks.
RAGGED = ([3, 3, 3, 3], [2, 0, 5, 1], [0, 4, 0, 0], [0, 0, 0, 0], [1, 700, 3, 2])
# Rows that rank i sends to rank j. In the second table rank 2 sends and receives nothing.
TABLES = (
    [[i + j for j in range(4)] for i in range(4)],
    [[0, 2, 0, 1], [3, 0, 0, 0], [0, 0, 0, 0], [5, 1, 0, 2]],
    [[0] * 4 for _ in range(4)],
    [[0, 0, 0, 900], [0] * 4, [0] * 4, [0] * 4],
)
ROW_SHAPES = ((), (5,), (2, 3))

# Compares a sum of these terms with the sum in the tree of ranks.
CheckSum = Callable[[Tensor, list[Tensor], Tensor], None]


def same_bytes(got: Tensor, expected: Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    is_alike = got.dtype == expected.dtype and got.shape == expected.shape and got.is_contiguous()
    return is_alike and torch.equal(got.view(bits), expected.view(bits))


def check_exact(got: Tensor, terms: list[Tensor], expected: Tensor) -> None:
    assert same_bytes(got, expected)


def check_rounded(got: Tensor, terms: list[Tensor], expected: Tensor) -> None:
    """Accept any order of the additions, each rounded to the dtype."""
    if not expected.dtype.is_floating_point:
        check_exact(got, terms, expected)
        return
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    magnitude = sum(each.double().abs() for each in terms)
    bound = len(terms) * torch.finfo(expected.dtype).eps * magnitude
    assert bool(((got.double() - expected.double()).abs() <= bound).all())


def check_collectives(group: GroupCoordinator, check_sum: CheckSum = check_exact) -> None:
    """Check every collective with each dtype, with rows of several shapes, even and ragged.

    Args:
        check_sum: for sums with equal shares; sums with ragged shares are exact with every transport.
    """
    for dtype in DTYPES:
        check_gather(group, dtype)
        check_reduce_scatter(group, dtype, check_sum)
        check_exchange(group, dtype)
        check_broadcast(group, dtype)
    lowest = group.all_reduce_minimum(5 - group.rank_in_group)
    assert lowest == 5 - (group.world_size - 1)
    assert group.all_reduce_minimum(2**62 + group.rank_in_group) == 2**62


def check_gather(group: GroupCoordinator, dtype: str) -> None:
    for case, all_sizes in enumerate(RAGGED):
        sizes = all_sizes[: group.world_size]
        for shape in ROW_SHAPES:
            parts = [random_values(100 * case + rank, size, *shape, dtype=dtype) for rank, size in enumerate(sizes)]
            assert same_bytes(group.all_gather(strided(parts[group.rank_in_group]), sizes), torch.cat(parts))


def check_reduce_scatter(group: GroupCoordinator, dtype: str, check_sum: CheckSum) -> None:
    rank, num_ranks = group.rank_in_group, group.world_size
    for case, all_sizes in enumerate(RAGGED):
        sizes = all_sizes[:num_ranks]
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        check = check_exact if len(set(sizes)) > 1 else check_sum
        for shape in ROW_SHAPES:
            terms = [random_values(100 * case + each, sum(sizes), *shape, dtype=dtype) for each in range(num_ranks)]
            reduced = group.reduce_scatter(strided(terms[rank]), sizes)
            check(reduced, [each[own] for each in terms], sum_in_tree(terms)[own])
            if dtype == "float32":  # partial sums, rounded once
                rounded = group.reduce_scatter(strided(terms[rank]), sizes, torch.bfloat16)
                check_exact(rounded, terms, sum_in_tree(terms)[own].bfloat16())


def check_exchange(group: GroupCoordinator, dtype: str) -> None:
    """Several exchanges under way, waited for in another order."""
    rank, ranks = group.rank_in_group, range(group.world_size)
    pending = []
    for case, whole in enumerate(TABLES):
        table = [row[: group.world_size] for row in whole[: group.world_size]]
        for shape in ROW_SHAPES:
            sent = [random_values(100 * case + i, sum(table[i]), *shape, dtype=dtype) for i in ranks]
            expected = torch.cat([sent[i].split(table[i])[rank] for i in ranks])
            receive_sizes = [table[i][rank] for i in ranks]
            pending.append((group.all_to_all(strided(sent[rank]), table[rank], receive_sizes), expected))
    for arriving, expected in reversed(pending):
        assert same_bytes(arriving.wait(), expected)


def check_broadcast(group: GroupCoordinator, dtype: str) -> None:
    for source in range(group.world_size):
        for shape in [(), (0, 3), (4, 5)]:
            sent = random_values(source, *shape, dtype=dtype)
            given = sent if group.rank_in_group == source else torch.zeros_like(sent)
            assert same_bytes(group.broadcast(strided(given), source), sent)


def random_values(seed: int, *shape: int, dtype: str) -> Tensor:
    """Return the same values on all ranks, of several magnitudes so that the order of additions matters."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == "int64":
        return torch.randint(-(2**61), 2**61, shape, generator=generator)
    scales = 10.0 ** torch.randint(-3, 4, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * scales).to(getattr(torch, dtype))


def strided(x: Tensor) -> Tensor:
    """Return the same values in memory with other values in between."""
    wide = torch.full((*x.shape, 2), 77, dtype=x.dtype)
    wide[..., 1] = x
    return wide[..., 1]


def sum_in_tree(terms: list[Tensor]) -> Tensor:
    """Add by numpy, in float32 unless they are integers: the largest power of two of the terms, and those after it."""

    def add(numbers: list[np.ndarray]) -> np.ndarray:
        if len(numbers) == 1:
            return numbers[0]
        half = 2 ** ((len(numbers) - 1).bit_length() - 1)
        return np.asarray(add(numbers[:half]) + add(numbers[half:]))

    is_integer = terms[0].dtype == torch.int64
    total = add([(term if is_integer else term.float()).numpy() for term in terms])
    return torch.from_numpy(np.asarray(total)).to(terms[0].dtype)
