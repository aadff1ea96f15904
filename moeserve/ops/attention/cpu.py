"""Grouped-query attention with C++ kernels over a paged cache.

Results are batch-invariant: a row's bytes do not depend on the chunk, the batch, the number of threads or the block
size.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.ops.native import is_measured
from moeserve.ops.rows.cpu import CpuRows
from moeserve.ops.rows.interface import Rotation
from moeserve.step_inputs import StepInputs


class CpuAttention:
    """An `AttentionBackend` of C++ kernels."""

    def __init__(self, native: ModuleType, shape: AttentionShape) -> None:
        self._native = native
        self._shape = shape
        self._apply_rope = CpuRows(native).apply_rope

    def write(self, key_TGH: Tensor, value_TGV: Tensor, cache: KeyValueCache, step: StepInputs) -> None:
        caches = cache.keys, cache.values, step.cache_slots, cache.key_scales, cache.value_scales
        self._native.write_cache(key_TGH, value_TGV, *caches)

    def rotate_and_write(
        self,
        query_TNH: Tensor,
        key_TGH: Tensor,
        value_TGV: Tensor,
        rotation: Rotation,
        cache: KeyValueCache,
        step: StepInputs,
    ) -> Tensor:
        self.write(self._apply_rope(key_TGH, rotation), value_TGV, cache, step)
        return self._apply_rope(query_TNH, rotation)

    def attend(
        self,
        query_TNH: Tensor,
        cache: KeyValueCache,
        step: StepInputs,
        sinks_N: Tensor | None = None,
        biases_TNE: Tensor | None = None,
    ) -> Tensor:
        shape = self._shape
        out_TNV = new_empty(query_TNH, *query_TNH.shape[:2], cache.values.shape[3])
        if is_measured():
            return out_TNV.zero_()
        tensors = (query_TNH, cache.keys, cache.values, step.block_table, step.row_starts, step.context_lens, out_TNV)
        self._native.paged_attention(
            *tensors,
            scale=shape.scale,
            window=shape.window,
            sinks=sinks_N,
            whole_group_size=shape.whole_group_size,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            biases=biases_TNE,
        )
        return out_TNV
