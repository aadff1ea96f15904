"""Attention to a window and to compressed entries with C++ kernels.

Results are batch-invariant: a token's bytes do not depend on the chunk, the batch or the number of threads.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.compressed_attention.interface import CompressedCache, CompressedShape
from moeserve.ops.indexer.interface import ChosenEntries
from moeserve.ops.native import is_measured
from moeserve.step_inputs import StepInputs

NUM_KEPT = 64  # maximum number of chunks of a captured step

# I size of an indexer's key, m tokens of a window, L maximum number of vectors that a row attends to, X values and
# gates of a token, Y = X / 2


class CpuCompressedAttention:
    """A `CompressedAttention` of C++ kernels, which calls paged attention with each vector as a block."""

    def __init__(self, native: ModuleType, shape: CompressedShape) -> None:
        self._native = native
        self._shape = shape

    def pool(self, projected_TX: Tensor, bias_mY: Tensor, tails: Tensor, block_size: int, step: StepInputs) -> Tensor:
        pooled_TH = new_empty(projected_TX, len(projected_TX), bias_mY.shape[1] // self._shape.num_series)
        if is_measured():
            return pooled_TH.zero_()
        self._native.pool_windows(
            projected_TX, bias_mY, tails, *_chunks(step), _drafts(step), pooled_TH, block_size=block_size
        )
        return pooled_TH

    def write(
        self,
        vector_TH: Tensor,
        entry_TH: Tensor | None,
        index_key_TI: Tensor | None,
        cache: CompressedCache,
        step: StepInputs,
        windows: StepInputs,
    ) -> None:
        self._native.write_cache(vector_TH[:, None], None, cache.tokens[:, None], None, windows.cache_slots)
        if entry_TH is None:
            return
        entries = [(entry_TH, cache.entries)]
        if index_key_TI is not None:
            assert cache.index_keys is not None
            entries.append((index_key_TI, cache.index_keys))
        self.write_entries(cache.block_size, step, *entries)

    def write_entries(self, block_size: int, step: StepInputs, *entries: tuple[Tensor, Tensor]) -> None:
        num_blocks, entries_of_block, _ = entries[0][1].shape
        entry_slot_T = torch.empty(len(step.cache_slots), dtype=torch.int64)
        self._native.find_entry_slots(
            *_chunks(step),
            entry_slot_T,
            num_blocks=num_blocks,
            block_size=block_size,
            ratio=self._shape.ratio,
            entries_of_block=entries_of_block,
        )
        for rows_TH, memory in entries:
            self._native.write_cache(rows_TH[:, None], None, memory[:, None], None, entry_slot_T)

    def attend(
        self,
        query_TNH: Tensor,
        chosen: ChosenEntries | None,
        sinks_N: Tensor,
        cache: CompressedCache,
        step: StepInputs,
        windows: StepInputs,
    ) -> Tensor:
        shape, out_TNH = self._shape, new_empty(query_TNH, *query_TNH.shape)
        num_tokens, most_positions = len(query_TNH), step.block_table.shape[1] * cache.block_size
        most_entries = 0 if shape.ratio is None else most_positions // shape.ratio
        if chosen is not None:
            most_entries = chosen.slots_TC.shape[1]
        num_listed = min(shape.window, most_positions) + most_entries
        listed_TL = new_empty(query_TNH, num_tokens, num_listed, dtype=torch.int32)
        if is_measured():
            listed_TL.zero_()  # so that its memory is measured
            return out_TNH.zero_()
        count_T, starts = (torch.empty(size, dtype=torch.int32) for size in (num_tokens, num_tokens + 1))
        entries = (None, None) if chosen is None else (chosen.slots_TC, chosen.counts_T)
        num_blocks, entries_of_block, _ = cache.entries.shape
        self._native.list_vectors(
            *_chunks(step),
            windows.block_table,
            *entries,
            listed_TL,
            count_T,
            starts,
            num_blocks=num_blocks,
            block_size=cache.block_size,
            num_window_blocks=len(cache.tokens),
            entries_of_block=entries_of_block,
            ratio=shape.ratio,
            window=shape.window,
        )
        vectors = cache.vectors[:, None, None]
        self._native.paged_attention(
            query_TNH,
            vectors,
            vectors,
            listed_TL,
            starts,
            count_T,
            out_TNH,
            scale=shape.scale,
            window=None,
            sinks=sinks_N,
            whole_group_size=shape.whole_num_heads,
        )
        return out_TNH


def _drafts(step: StepInputs) -> Tensor | None:
    """Return the number of drafts of each chunk, [S] int32; None: no chunk has drafts."""
    counts = [span.num_drafts for span in step.spans]
    if not any(counts):
        return None
    if len(counts) <= NUM_KEPT and min(counts) == max(counts):
        return _kept_drafts(counts[0])[: len(counts)]
    return torch.tensor(counts, dtype=torch.int32)


@functools.cache
def _kept_drafts(num_drafts: int) -> Tensor:
    """Return equal numbers of drafts, in memory that captured steps may read when they are replayed."""
    return torch.full((NUM_KEPT,), num_drafts, dtype=torch.int32)


def _chunks(step: StepInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return step.cache_slots, step.block_table, step.row_starts, step.context_lens
