"""Grouped-query attention in plain torch over a paged cache."""

from __future__ import annotations

from torch import Tensor

from moeserve.ops.attention.dense import attend_causally, first_visible
from moeserve.ops.attention.float8_rows import decode_rows, encode_rows
from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.ops.rows.interface import Rotation
from moeserve.ops.rows.reference import apply_rope
from moeserve.step_inputs import ChunkSpan, StepInputs

# R rows of one chunk, C positions of its context, B blocks


class TorchAttention:
    """An `AttentionBackend` that gathers each chunk's keys and values and calls torch's attention."""

    def __init__(self, shape: AttentionShape) -> None:
        self.scale = shape.scale
        self.window = shape.window

    def write(self, key_TGH: Tensor, value_TGV: Tensor, cache: KeyValueCache, step: StepInputs) -> None:
        kept = step.cache_slots >= 0
        slots = step.cache_slots[kept]
        block_size = cache.keys.shape[2]
        blocks, offsets = slots // block_size, slots % block_size
        if cache.key_scales is None or cache.value_scales is None:
            cache.keys[blocks, :, offsets] = key_TGH[kept]
            cache.values[blocks, :, offsets] = value_TGV[kept]
            return
        cache.keys[blocks, :, offsets], cache.key_scales[blocks, :, offsets] = encode_rows(key_TGH[kept])
        cache.values[blocks, :, offsets], cache.value_scales[blocks, :, offsets] = encode_rows(value_TGV[kept])

    def rotate_and_write(
        self,
        query_TNH: Tensor,
        key_TGH: Tensor,
        value_TGV: Tensor,
        rotation: Rotation,
        cache: KeyValueCache,
        step: StepInputs,
    ) -> Tensor:
        self.write(apply_rope(key_TGH, rotation), value_TGV, cache, step)
        return apply_rope(query_TNH, rotation)

    def attend(
        self,
        query_TNH: Tensor,
        cache: KeyValueCache,
        step: StepInputs,
        sinks_N: Tensor | None = None,
        biases_TNE: Tensor | None = None,
    ) -> Tensor:
        out_TNV = query_TNH.new_zeros(*query_TNH.shape[:2], cache.values.shape[3])
        for chunk, span in enumerate(step.spans):
            if span.num_rows == 0 or span.context_len == 0:
                continue
            end = span.last_row + 1
            rows = slice(end - min(span.num_rows, span.context_len), end)
            biases_RNE = None if biases_TNE is None else biases_TNE[rows]
            sinks = sinks_N if sinks_N is None or sinks_N.dim() == 1 else sinks_N[rows]
            blocks = step.block_table[chunk]
            out_TNV[rows] = self._attend_chunk(query_TNH[rows], cache, blocks, span, sinks, biases_RNE)
        return out_TNV

    def _attend_chunk(
        self,
        query_RNH: Tensor,
        cache: KeyValueCache,
        block_ids: Tensor,
        span: ChunkSpan,
        sinks_N: Tensor | None,
        biases_RNE: Tensor | None,
    ) -> Tensor:
        num_rows, block_size = query_RNH.shape[0], cache.keys.shape[2]
        start = span.context_len - num_rows
        # With chunked attention, `first` is a multiple of the chunk size, so counting positions from `first` does not
        # change the chunks.
        first = 0 if self.window is None else first_visible(start, self.window)
        first_block = first // block_size
        block_ids_B = block_ids[first_block : -(-span.context_len // block_size)]
        positions = slice(first - first_block * block_size, span.context_len - first_block * block_size)
        key_GCH, value_GCV, *scales_GC = (
            part[block_ids_B].transpose(0, 1).flatten(1, 2)[:, positions] for part in cache.tensors
        )
        if scales_GC:
            key_GCH = decode_rows(key_GCH, scales_GC[0], query_RNH.dtype)
            value_GCV = decode_rows(value_GCV, scales_GC[1], query_RNH.dtype)
        return attend_causally(
            query_RNH,
            key_GCH,
            value_GCV,
            scale=self.scale,
            window=self.window,
            sinks_N=sinks_N,
            biases_RNE=biases_RNE,
        )
