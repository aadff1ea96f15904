"""Grouped-query attention with Triton kernels over a paged cache."""

from __future__ import annotations

from torch import Tensor

from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.ops.rows.interface import Rotation
from moeserve.step_inputs import StepInputs
from moeserve.triton_kernels.paged_attention import paged_attention
from moeserve.triton_kernels.rotary import rotary_with_cache_write


class TritonAttention:
    """An `AttentionBackend` in Triton. A row's result does not depend on the other chunks of the step."""

    def __init__(self, shape: AttentionShape, *, splits_contexts: bool = True) -> None:
        """
        Args:
            splits_contexts: see `launch_attention`.
        """
        self._shape = shape
        self._splits_contexts = splits_contexts

    def rotate_and_write(
        self,
        query_TNH: Tensor,
        key_TGH: Tensor,
        value_TGV: Tensor,
        rotation: Rotation,
        cache: KeyValueCache,
        step: StepInputs,
    ) -> Tensor:
        angles = rotation.cosines, rotation.sines, rotation.is_interleaved
        caches = cache.keys, cache.values, step.cache_slots
        scales = cache.key_scales, cache.value_scales
        return rotary_with_cache_write(query_TNH, key_TGH, value_TGV, *angles, *caches, *scales)

    def attend(
        self,
        query_TNH: Tensor,
        cache: KeyValueCache,
        step: StepInputs,
        sinks_N: Tensor | None = None,
        biases_TNE: Tensor | None = None,
    ) -> Tensor:
        assert biases_TNE is None
        return paged_attention(
            query_TNH,
            cache.keys,
            cache.values,
            step.block_table,
            step.row_starts,
            step.context_lens,
            cache.key_scales,
            cache.value_scales,
            scale=self._shape.scale,
            window=self._shape.window,
            sinks_N=sinks_N,
            max_rows_per_chunk=step.max_rows_per_chunk,
            min_rows_per_chunk=step.min_rows_per_chunk,
            max_context=step.block_table.shape[1] * cache.keys.shape[2],
            rows_have_positions=step.rows_have_positions,
            splits_contexts=self._splits_contexts,
        )
