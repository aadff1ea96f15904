"""Attention to a window and to compressed entries with Triton kernels."""

from __future__ import annotations

from torch import Tensor

from moeserve.ops.compressed_attention.interface import CompressedCache, CompressedShape
from moeserve.ops.indexer.interface import ChosenEntries
from moeserve.step_inputs import StepInputs
from moeserve.triton_kernels.compressed_attention import compressed_attention, find_entry_slots, pool_windows
from moeserve.triton_kernels.latent_attention import write_latents

# I size of an indexer's key, m tokens of a window, X values and gates of a token, Y = X / 2


class TritonCompressedAttention:
    """A `CompressedAttention` in Triton. The last bits of a row depend on the number of rows of the step."""

    def __init__(self, shape: CompressedShape) -> None:
        self._shape = shape

    def pool(self, projected_TX: Tensor, bias_mY: Tensor, tails: Tensor, block_size: int, step: StepInputs) -> Tensor:
        return pool_windows(
            projected_TX,
            bias_mY,
            tails,
            step.cache_slots,
            step.block_table,
            step.row_starts,
            step.context_lens,
            block_size=block_size,
            num_series=self._shape.num_series,
        )

    def write(
        self,
        vector_TH: Tensor,
        entry_TH: Tensor | None,
        index_key_TI: Tensor | None,
        cache: CompressedCache,
        step: StepInputs,
        windows: StepInputs,
    ) -> None:
        write_latents(vector_TH, cache.tokens, windows.cache_slots)
        if entry_TH is None or self._shape.ratio is None:
            return
        entries = [(entry_TH, cache.entries)]
        if index_key_TI is not None and cache.index_keys is not None:
            entries.append((index_key_TI, cache.index_keys))
        self.write_entries(cache.block_size, step, *entries)

    def write_entries(self, block_size: int, step: StepInputs, *entries: tuple[Tensor, Tensor]) -> None:
        assert self._shape.ratio is not None
        slots_T = find_entry_slots(
            step.cache_slots,
            step.positions,
            block_size=block_size,
            ratio=self._shape.ratio,
            entries_of_block=entries[0][1].shape[1],
        )
        for rows_TH, memory in entries:
            write_latents(rows_TH, memory, slots_T)

    def attend(
        self,
        query_TNH: Tensor,
        chosen: ChosenEntries | None,
        sinks_N: Tensor,
        cache: CompressedCache,
        step: StepInputs,
        windows: StepInputs,
    ) -> Tensor:
        return compressed_attention(
            query_TNH,
            cache.vectors,
            sinks_N,
            None if chosen is None else chosen.slots_TC,
            None if chosen is None else chosen.counts_T,
            step.block_table,
            windows.block_table,
            step.row_starts,
            step.context_lens,
            scale=self._shape.scale,
            window=self._shape.window,
            ratio=self._shape.ratio,
            block_size=cache.block_size,
            first_entry=cache.tokens.shape[0] * cache.block_size,
            entries_of_block=cache.entries.shape[1],
        )
