"""The division of a product's inputs over tp ranks, such that its sums have the same bytes with any number of ranks.

Each rank adds the products of its own inputs, and the ranks then add their sums. To keep the bytes, inputs are always
added in the same chunks, and the sums of chunks in the same binary tree (`InputChunks`). A rank computes some of the
chunks, and the branches of the tree that join these chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeserve.distributed.mesh import share_of
from moeserve.layers.build_context import BuildContext
from moeserve.ops.products.interface import InputChunks

# Best first. With 8 chunks, 1, 2, 4 and 8 ranks have whole branches of the tree.
NUMBERS_OF_CHUNKS = (8, 4, 2, 7, 6, 5, 3, 1)
MIN_EXPERT_CHUNK = 384  # inputs; smaller chunks make small batches of narrow experts several percent slower
EXPERT_CHUNK_UNIT = 32  # inputs in a group of int4 weights; chunks must not divide a group


@dataclass(frozen=True)
class InputShare:
    """The inputs of one tp rank, and the chunks in which the rank adds them."""

    inputs: slice
    chunks: InputChunks | None  # None: inputs are added in any order


def num_input_chunks(can_divide: Callable[[int], bool]) -> int:
    """Return the number of chunks for a layer. `can_divide(n)` is True if n ranks can divide the layer's heads."""
    return next(number for number in NUMBERS_OF_CHUNKS if can_divide(number))


def keeps_bytes(num_chunks: int, num_ranks: int) -> bool:
    """Return True if sums over `num_ranks` have the same bytes as on one rank: each has a whole branch of the tree."""
    per_rank = num_chunks // num_ranks
    return num_ranks == 1 or (num_chunks % num_ranks == 0 and per_rank & (per_rank - 1) == 0)


def share_inputs(num_inputs: int, num_chunks: int, context: BuildContext) -> InputShare:
    """Return this rank's share of a product's inputs.

    All chunks have the same size, except that the last chunk has the rest. If sums cannot keep their bytes with this
    number of ranks, inputs are divided evenly instead of into chunks.
    """
    rank, num_ranks = context.tp.rank_in_group, context.tp.world_size
    if not context.is_batch_invariant:
        return InputShare(share_of(num_inputs, rank, num_ranks), None)
    if not keeps_bytes(num_chunks, num_ranks):
        inputs = share_of(num_inputs, rank, num_ranks)
        return InputShare(inputs, InputChunks(max(1, inputs.stop - inputs.start), keeps_float32=True))
    return _whole_chunks(num_inputs, -(-num_inputs // num_chunks), num_chunks // num_ranks, rank, num_ranks)


def num_expert_chunks(width: int) -> int:
    """Return the number of chunks in which down projections of experts of this width add their inputs."""
    return next(number for number in (8, 4, 2, 1) if number == 1 or width >= number * MIN_EXPERT_CHUNK)


def share_experts(width: int, num_slices: int, context: BuildContext) -> InputShare:
    """Return this rank's share of the width of each expert: one of `num_slices` slices, or with 1 the whole width.

    The down projection of a whole expert sums over its inputs in the same chunks as that of a sliced expert, so that
    both give the same bytes. Experts in MXFP4 are never sliced, so they have no chunks.
    """
    assert num_slices in (1, context.tp.world_size)
    rank = context.tp.rank_in_group if num_slices > 1 else 0
    if not context.is_batch_invariant or context.quantization == "mxfp4":
        return InputShare(share_of(width, rank, num_slices), None)
    num_chunks = num_expert_chunks(width)
    assert keeps_bytes(num_chunks, num_slices)
    if num_chunks == 1:
        return InputShare(slice(0, width), None)
    size = -(-width // (num_chunks * EXPERT_CHUNK_UNIT)) * EXPERT_CHUNK_UNIT
    return _whole_chunks(width, size, num_chunks // num_slices, rank, num_slices)


def _whole_chunks(num_inputs: int, size: int, chunks_per_rank: int, rank: int, num_ranks: int) -> InputShare:
    first, last = (min(num_inputs, size * chunks_per_rank * n) for n in (rank, rank + 1))
    return InputShare(slice(first, last), InputChunks(size, keeps_float32=num_ranks > 1))
