"""Attention over a paged KV cache as one operation: writing keys and values, and attending to them."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from moeserve.ops import backend
from moeserve.ops.dense_attention import attend_causally
from moeserve.ops.native import require_native
from moeserve.ops.rotary import Turn
from moeserve.step_inputs import ChunkSpan, StepInputs

# T tokens, N query heads, G key-value heads, H head size; R rows of one chunk, C positions they attend to, B blocks

logger = logging.getLogger(__name__)

NATIVE_DTYPES = (torch.float32, torch.bfloat16)


class AttentionBackend(Protocol):
    """Grouped-query attention of one layer. Query head n reads key-value head n // (N // G).

    Both caches are [num_blocks, G, block_size, H], in the dtype of keys, values and queries.
    """

    def write(
        self, key_TGH: Tensor, value_TGH: Tensor, key_cache: Tensor, value_cache: Tensor, step: StepInputs
    ) -> None:
        """Stores each token's key and value at `step.cache_slots`; a slot of -1 keeps nothing."""
        ...

    def turn_and_write(
        self,
        query_TNH: Tensor,
        key_TGH: Tensor,
        value_TGH: Tensor,
        turn: Turn,
        key_cache: Tensor,
        value_cache: Tensor,
        step: StepInputs,
    ) -> Tensor:
        """`write` with keys turned; returns the queries turned. Both are given away."""
        ...

    def attend(
        self,
        query_TNH: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        step: StepInputs,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Row i of a chunk is at position p = context_len - num_rows + i and attends to the positions up to p.

        With a window, only to those after p - window. Rows of no chunk, or before position 0, get zeros.

        Args:
            sinks_N: float32, one more score of each query head, whose share of the weights goes to no value (gpt-oss,
                arXiv 2508.10925): each row is scaled down by sum(exp(scores)) / (sum(exp(scores)) + exp(sink)).

        Returns:
            [T, N, H] in the dtype of the queries.
        """
        ...


def turn_then_write(
    backend: AttentionBackend,
    query_TNH: Tensor,
    key_TGH: Tensor,
    value_TGH: Tensor,
    turn: Turn,
    key_cache: Tensor,
    value_cache: Tensor,
    step: StepInputs,
) -> Tensor:
    """`turn_and_write`, one after the other."""
    query_TNH, key_TGH = turn.apply(query_TNH), turn.apply(key_TGH)
    backend.write(key_TGH, value_TGH, key_cache, value_cache, step)
    return query_TNH


def choose_attention(device: str, *, scale: float, window: int | None) -> AttentionBackend:
    """The attention backend for a device type.

    Args:
        scale: what the products of queries and keys are multiplied with.
        window: positions that a token attends to at most, its own included; None: all up to its own.
    """
    reference = TorchAttention(scale=scale, window=window)
    match backend.of(device):
        case "native":
            return CpuAttention(require_native(), reference)
        case "triton":
            from moeserve.ops.gpu import GpuAttention

            return GpuAttention(reference)
        case "torch":
            if device != "meta":
                logger.info(
                    "the kernels for device %s are not built or installed: attention runs in plain torch, slower",
                    device,
                )
            return reference


class TorchAttention:
    """The reference, on any device: gathers each chunk's keys and values and calls torch's attention."""

    def __init__(self, *, scale: float, window: int | None) -> None:
        self.scale = scale
        self.window = window

    def write(
        self, key_TGH: Tensor, value_TGH: Tensor, key_cache: Tensor, value_cache: Tensor, step: StepInputs
    ) -> None:
        kept = step.cache_slots >= 0
        slots = step.cache_slots[kept]
        block_size = key_cache.shape[2]
        blocks, offsets = slots // block_size, slots % block_size
        key_cache[blocks, :, offsets] = key_TGH[kept]
        value_cache[blocks, :, offsets] = value_TGH[kept]

    turn_and_write = turn_then_write

    def attend(
        self,
        query_TNH: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        step: StepInputs,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        out_TNH = torch.zeros_like(query_TNH)
        for chunk, span in enumerate(step.spans):
            if span.num_rows == 0 or span.context_len == 0:
                continue
            last_row = span.first_row + span.num_rows
            rows = slice(last_row - min(span.num_rows, span.context_len), last_row)
            out_TNH[rows] = self._attend_chunk(
                query_TNH[rows], key_cache, value_cache, step.block_table[chunk], span, sinks_N
            )
        return out_TNH

    def _attend_chunk(
        self,
        query_RNH: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_ids: Tensor,
        span: ChunkSpan,
        sinks_N: Tensor | None,
    ) -> Tensor:
        num_rows, block_size = query_RNH.shape[0], key_cache.shape[2]
        start = span.context_len - num_rows
        first = 0 if self.window is None else max(0, start - self.window + 1)
        first_block = first // block_size
        block_ids_B = block_ids[first_block : -(-span.context_len // block_size)]
        positions = slice(first - first_block * block_size, span.context_len - first_block * block_size)
        key_GCH, value_GCH = (
            cache[block_ids_B].transpose(0, 1).flatten(1, 2)[:, positions] for cache in (key_cache, value_cache)
        )

        return attend_causally(query_RNH, key_GCH, value_GCH, scale=self.scale, window=self.window, sinks_N=sinks_N)


class CpuAttention:
    """C++ kernels. A row's result has the same bytes whatever the chunk, the batch, the threads and the block size.

    Other dtypes than `NATIVE_DTYPES` go to the reference.
    """

    def __init__(self, kernels: ModuleType, reference: TorchAttention) -> None:
        self.kernels = kernels
        self.reference = reference

    def write(
        self, key_TGH: Tensor, value_TGH: Tensor, key_cache: Tensor, value_cache: Tensor, step: StepInputs
    ) -> None:
        tensors = (key_TGH, value_TGH, key_cache, value_cache, step.cache_slots)
        self.kernels.write_cache(*tensors)

    turn_and_write = turn_then_write

    def attend(
        self,
        query_TNH: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        step: StepInputs,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        if query_TNH.dtype not in NATIVE_DTYPES:
            return self.reference.attend(query_TNH, key_cache, value_cache, step, sinks_N)
        out_TNH = query_TNH.new_empty(query_TNH.shape)  # contiguous, whatever the query is
        tensors = (query_TNH, key_cache, value_cache, step.block_table, step.row_starts, step.context_lens, out_TNH)
        self.kernels.paged_attention(*tensors, scale=self.reference.scale, window=self.reference.window, sinks=sinks_N)
        return out_TNH
