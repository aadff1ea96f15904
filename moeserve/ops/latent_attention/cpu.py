"""Latent attention with C++ kernels."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.indexer.interface import ChosenEntries
from moeserve.ops.latent_attention.interface import LatentShape
from moeserve.ops.native import is_measured
from moeserve.step_inputs import StepInputs

# L latent size, P elements of a latent vector


class CpuLatentAttention:
    """A `LatentAttentionBackend` of C++ kernels. The vectors are keys and values of a single key-value head."""

    takes_all_rows = True

    def __init__(self, native: ModuleType, shape: LatentShape) -> None:
        self._native = native
        self._shape = shape

    def write(self, latent_TP: Tensor, cache: Tensor, step: StepInputs) -> None:
        self._native.write_cache(latent_TP[:, None], None, cache[:, None], None, step.cache_slots)

    def attend(
        self,
        query_TNP: Tensor,
        cache: Tensor,
        step: StepInputs,
        max_rows: int | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        assert max_rows is None, "long chunks run here like all others"
        return self._attend(query_TNP, cache[:, None], step.block_table, step.row_starts, step.context_lens, sinks_N)

    def attend_chosen(
        self, query_TNP: Tensor, cache: Tensor, chosen: ChosenEntries, sinks_N: Tensor | None = None
    ) -> Tensor:
        # Pass each vector as a block and each row as a chunk. The block size does not affect the result.
        vectors = cache.flatten(0, 1)[:, None, None]
        return self._attend(query_TNP, vectors, chosen.slots_TC, chosen.starts, chosen.counts_T, sinks_N)

    def _attend(
        self,
        query_TNP: Tensor,
        vectors: Tensor,
        block_table: Tensor,
        row_starts: Tensor,
        context_lens: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        shape = self._shape
        out_TNL = new_empty(query_TNP, *query_TNP.shape[:2], shape.latent_size)
        if is_measured():
            return out_TNL.zero_()
        tensors = (query_TNP, vectors, vectors, block_table, row_starts, context_lens, out_TNL)
        self._native.paged_attention(
            *tensors,
            scale=shape.scale,
            window=shape.window,
            sinks=sinks_N,
            value_size=shape.latent_size,
            whole_group_size=shape.whole_num_heads,
        )
        return out_TNL

    def attend_expanded(self, *_: Any) -> None:
        raise AssertionError("long chunks are absorbed like all others")
