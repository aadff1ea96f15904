"""Block-sparse attention with C++ kernels.

The blocks chosen for a row depend only on its request, not on the chunk, the batch or the number of threads. Pieces of
the chosen blocks form a block table, in which each pair of an indexer's head and a key-value head of each row is a
chunk by itself. Paged attention over this table computes the results.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.attention.interface import KeyValueCache
from moeserve.ops.block_sparse.interface import BlockSparseShape
from moeserve.ops.native import is_measured
from moeserve.step_inputs import StepInputs

# n heads of the indexer, I size of its keys, P pairs of heads, R = T * P, U pieces of a row


class CpuBlockSparse:
    """A `BlockSparseAttention` of C++ kernels."""

    def __init__(self, native: ModuleType, shape: BlockSparseShape) -> None:
        self._native = native
        self._shape = shape

    def write(self, key_TI: Tensor, index_keys: Tensor, step: StepInputs) -> None:
        self._native.write_cache(key_TI[:, None], None, index_keys[:, None], None, step.cache_slots)

    def attend(
        self, query_TNH: Tensor, index_query_TnI: Tensor, cache: KeyValueCache, index_keys: Tensor, step: StepInputs
    ) -> Tensor:
        shape, (num_tokens, num_heads, _) = self._shape, query_TNH.shape
        num_kv_heads, num_pairs = shape.attention.num_kv_heads, shape.num_pairs
        block_size = index_keys.shape[1]
        piece_size = math.gcd(block_size, shape.block_size)
        max_pieces = min(shape.top_k * shape.block_size, step.block_table.shape[1] * block_size) // piece_size
        num_rows = num_tokens * num_pairs
        sizes = (num_rows, max_pieces), (num_rows,), (num_rows + 1,)
        pieces_RU, counts_R, starts = (new_empty(query_TNH, *size, dtype=torch.int32) for size in sizes)
        out_TNV = new_empty(query_TNH, num_tokens, num_heads, cache.values.shape[3])
        if is_measured():
            pieces_RU.zero_()  # so that its memory is measured
            return out_TNV.zero_()
        self._native.choose_blocks(
            index_query_TnI,
            index_keys,
            step.block_table,
            step.row_starts,
            step.context_lens,
            pieces_RU,
            counts_R,
            starts,
            num_kv_heads=num_kv_heads,
            chosen_size=shape.block_size,
            piece_size=piece_size,
            top_k=shape.top_k,
            num_local=shape.num_local,
        )
        of_pieces = [part.view(-1, 1, piece_size, part.shape[3]) for part in (cache.keys, cache.values)]
        of_pairs = [part.view(num_rows, num_heads // num_pairs, part.shape[2]) for part in (query_TNH, out_TNV)]
        self._native.paged_attention(
            of_pairs[0],
            *of_pieces,
            pieces_RU,
            starts,
            counts_R,
            of_pairs[1],
            scale=shape.attention.scale,
            window=None,
            whole_group_size=shape.attention.whole_group_size,
        )
        return out_TNV
