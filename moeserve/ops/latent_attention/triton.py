"""Latent attention with Triton kernels."""

from __future__ import annotations

from torch import Tensor

from moeserve.ops.indexer.interface import ChosenEntries
from moeserve.ops.latent_attention.interface import ExpandLatents
from moeserve.step_inputs import StepInputs
from moeserve.triton_kernels.expanded_attention import expanded_attention
from moeserve.triton_kernels.latent_attention import latent_attention, write_latents

# P elements of a latent vector; K and E parts of a key


class TritonLatentAttention:
    """A `LatentAttentionBackend` in Triton.

    If contexts are split, the last bits of a row depend on the number of chunks of the step.
    """

    def __init__(self, scale: float, latent_size: int, whole_num_heads: int, *, splits_contexts: bool = True) -> None:
        """
        Args:
            splits_contexts: see `launch_attention`. If False, this backend also runs long chunks, with a fixed order of
                sums.
        """
        self.takes_all_rows = not splits_contexts
        self._scale = scale
        self._latent_size = latent_size

    def write(self, latent_TP: Tensor, cache: Tensor, step: StepInputs) -> None:
        write_latents(latent_TP, cache, step.cache_slots)

    def attend(
        self,
        query_TNP: Tensor,
        cache: Tensor,
        step: StepInputs,
        max_rows: int | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        assert sinks_N is None, "these kernels have no sinks"
        most, least = step.max_rows_per_chunk, step.min_rows_per_chunk
        if max_rows is not None and most <= max_rows:
            max_rows = None
        elif max_rows is not None:
            attended = [span.num_rows for span in step.spans if min(span.num_rows, span.context_len) <= max_rows]
            most, least = max(attended, default=0), min(attended, default=0)
        return latent_attention(
            query_TNP,
            cache,
            step.block_table,
            step.row_starts,
            step.context_lens,
            scale=self._scale,
            latent_size=self._latent_size,
            max_rows_per_chunk=most,
            min_rows_per_chunk=least,
            max_context=step.block_table.shape[1] * cache.shape[1],
            max_rows=max_rows,
            rows_have_positions=step.rows_have_positions,
            splits_contexts=not self.takes_all_rows,
        )

    def attend_chosen(
        self, query_TNP: Tensor, cache: Tensor, chosen: ChosenEntries, sinks_N: Tensor | None = None
    ) -> Tensor:
        assert sinks_N is None, "these kernels have no sinks"
        return latent_attention(
            query_TNP,
            cache.flatten(0, 1)[:, None],  # pass each vector as a block, and each row as a chunk
            chosen.slots_TC,
            chosen.starts,
            chosen.counts_T,
            scale=self._scale,
            latent_size=self._latent_size,
            max_rows_per_chunk=1,
            min_rows_per_chunk=1,
            max_context=chosen.slots_TC.shape[1],
            splits_contexts=not self.takes_all_rows,
        )

    def attend_expanded(
        self,
        query_TNK: Tensor,
        query_TNE: Tensor,
        cache: Tensor,
        step: StepInputs,
        max_rows: int,
        expand: ExpandLatents,
        out_TNV: Tensor,
    ) -> None:
        expanded_attention(
            query_TNK,
            query_TNE,
            cache,
            step.block_table,
            step.row_starts,
            step.context_lens,
            [0 if min(span.num_rows, span.context_len) <= max_rows else span.context_len for span in step.spans],
            expand,
            out_TNV,
            scale=self._scale,
        )
