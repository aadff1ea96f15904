"""DeepEP's first API, `Buffer`: normal kernels for large steps and low-latency kernels for small ones, in one buffer.

Based on https://github.com/deepseek-ai/DeepEP: deep_ep/buffer.py of 1.x, and deep_ep/buffers/legacy.py of 2.x with its
document. Both versions accept the arguments used here. DeepEP's handles are opaque: their fields differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moeserve.layers.context import ModelContext
from moeserve.moe.dispatch.base import Dispatched, PackedTokens, PendingDispatch, SlottedTokens
from moeserve.moe.dispatch.deepep.communicator import DeepEPShape, Event, PendingCombine, from_float8, to_float8
from moeserve.ops.interfaces import Keys, PairKernels

# T tokens of this rank, D model width, K experts per token, N distinct tokens that this rank received, R pairs of those
# that it computes, e local experts, S slots of each: low_latency_tokens for every rank

MAX_LOW_LATENCY_RESULTS = 2  # in use at a time: DeepEP has two buffers


@dataclass(frozen=True)
class NormalHandle:
    handle: tuple[Any, ...]
    pair_of_row_R: Tensor  # the pair (n * K + k of the N tokens) of each packed row
    weights_NK: Tensor


@dataclass(frozen=True)
class LowLatencyHandle:
    handle: tuple[Any, ...]
    experts_TK: Tensor
    weights_TK: Tensor


@dataclass(frozen=True)
class PendingNormalDispatch:
    """A dispatch in progress by the normal kernels."""

    received: Tensor | tuple[Tensor, Tensor]  # [N, D], or float8 and scales
    experts_NK: Tensor  # local experts; -1: of another rank, or none
    weights_NK: Tensor
    num_rows: int  # R
    handle: tuple[Any, ...]
    event: Event
    keys: Keys
    pairs: PairKernels
    dtype: torch.dtype

    def wait(self) -> Dispatched[NormalHandle]:
        self.event.current_stream_wait()
        rows_ND, top_k = from_float8(self.received, self.dtype), self.experts_NK.shape[1]
        order_P, counts_e = self.pairs.order(self.experts_NK, self.keys)
        pair_of_row_R = order_P[: self.num_rows]  # exact, since the host has the number: no spare rows
        rows_RD = self.pairs.gather(rows_ND, pair_of_row_R, top_k)
        return Dispatched(PackedTokens(rows_RD, counts_e), NormalHandle(self.handle, pair_of_row_R, self.weights_NK))


@dataclass(frozen=True)
class PendingLowLatencyDispatch:
    """A dispatch in progress by the low-latency kernels."""

    received: Tensor | tuple[Tensor, Tensor]  # [e, S, D], or float8 and scales; undefined beyond the counts
    counts_e: Tensor  # int32
    expected_rows: int
    event: Event
    handle: LowLatencyHandle
    dtype: torch.dtype

    def wait(self) -> Dispatched[LowLatencyHandle]:
        self.event.current_stream_wait()
        slots_eSD = from_float8(self.received, self.dtype)
        return Dispatched(SlottedTokens(slots_eSD, self.counts_e.to(torch.int64), self.expected_rows), self.handle)


class LegacyCommunicator:
    """See `DeepEPCommunicator`.

    Normal kernels send a token's row once to each rank that holds any of its experts. That rank adds the weighted
    outputs in float32 and in the order of k, and rounds; the token's rank adds these sums. So the placement decides
    what is rounded, unlike with our other dispatchers. The host waits for the numbers of rows.

    Low-latency kernels send a row for each pair, and the token's rank adds the weighted outputs, as our other
    dispatchers do. Their shapes do not depend on the routing.
    """

    def __init__(
        self, deep_ep: ModuleType, shape: DeepEPShape, process_group: Any, rank: int, context: ModelContext
    ) -> None:
        """
        Args:
            deep_ep: the package.
            process_group: the torch.distributed group of the ep ranks in their order, with NCCL.
            rank: the rank of this process in the group.
        """
        self.shape = shape
        self.has_streams = context.device.type == "cuda"
        self.pairs = context.kernels.pairs
        self.keys = Keys(shape.num_slots[rank])
        self.num_low_latency_results = 0
        self.is_dirty = False  # normal kernels have written where low-latency kernels need zeros
        buffer_class = deep_ep.Buffer
        num_nvl_bytes, num_rdma_bytes = _buffer_sizes(buffer_class, shape)
        self.num_bytes = num_nvl_bytes + num_rdma_bytes
        options: dict[str, Any] = {}
        if shape.low_latency_tokens:
            # one queue pair for each local expert, and for each multiprocessor of the normal kernels
            num_pairs = max(shape.num_slots[rank], buffer_class.num_sms)
            options = dict(low_latency_mode=True, num_qps_per_rank=num_pairs)
        # 1.0 has no such argument; without it the destructor may hang after an exception
        self.is_ended_by_us = "explicitly_destroy" in inspect.signature(buffer_class).parameters
        if self.is_ended_by_us:
            options["explicitly_destroy"] = True
        self.buffer = buffer_class(process_group, num_nvl_bytes, num_rdma_bytes, **options)

    def is_capturable(self, tokens_per_rank: Sequence[int]) -> bool:
        return self.shape.is_low_latency(tokens_per_rank)

    def prepare(self, tokens_per_rank: Sequence[int]) -> None:
        if not self.is_dirty or not self.shape.is_low_latency(tokens_per_rank):
            return
        assert not (self.has_streams and torch.cuda.is_current_stream_capturing()), "replays would clean each time"
        # collective: all ep ranks, since all have used the same kernels
        self.buffer.clean_low_latency_buffer(
            self.shape.low_latency_tokens, self.shape.hidden_size, self.shape.num_physical
        )
        self.is_dirty = False

    def dispatch(
        self, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, tokens_per_rank: Sequence[int]
    ) -> PendingDispatch[NormalHandle] | PendingDispatch[LowLatencyHandle]:
        self.prepare(tokens_per_rank)
        if self.shape.is_low_latency(tokens_per_rank):
            return self._dispatch_low_latency(hidden_TD, experts_TK, weights_TK, tokens_per_rank)
        return self._dispatch_normal(hidden_TD, experts_TK, weights_TK)

    def combine(self, output: Tensor, handle: NormalHandle | LowLatencyHandle) -> PendingCombine:
        if isinstance(handle, LowLatencyHandle):
            self.num_low_latency_results -= 1
            # collective: all ep ranks
            output_TD, event, _ = self.buffer.low_latency_combine(
                output, handle.experts_TK, handle.weights_TK, handle.handle, async_finish=True
            )
            return PendingCombine(output_TD, event)
        sum_ND = self.pairs.weighted_sum(output, handle.pair_of_row_R, handle.weights_NK, self.shape.dtype)
        # collective: all ep ranks
        output_TD, _, event = self.buffer.combine(sum_ND, handle.handle, async_finish=True)
        return PendingCombine(output_TD, event)

    def close(self) -> None:
        if self.is_ended_by_us:
            self.buffer.destroy()

    def _dispatch_normal(self, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> PendingNormalDispatch:
        to_rank, to_rdma_rank, to_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(
            experts_TK, self.shape.num_physical
        )
        self.is_dirty = True
        # collective: all ep ranks; the host waits for the sizes
        received, experts_NK, weights_NK, rows_of_each, handle, event = self.buffer.dispatch(
            to_float8(hidden_TD) if self.shape.is_float8 else hidden_TD,
            num_tokens_per_rank=to_rank,
            num_tokens_per_rdma_rank=to_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=to_expert,
            topk_idx=experts_TK,
            topk_weights=weights_TK,
            async_finish=True,
        )
        return PendingNormalDispatch(
            received=received,
            experts_NK=experts_NK,
            weights_NK=weights_NK,
            num_rows=sum(rows_of_each),
            handle=handle,
            event=event,
            keys=self.keys,
            pairs=self.pairs,
            dtype=self.shape.dtype,
        )

    def _dispatch_low_latency(
        self, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, tokens_per_rank: Sequence[int]
    ) -> PendingLowLatencyDispatch:
        assert self.num_low_latency_results < MAX_LOW_LATENCY_RESULTS, "combine what was dispatched before"
        self.num_low_latency_results += 1
        # collective: all ep ranks
        received, counts_e, handle, event, _ = self.buffer.low_latency_dispatch(
            hidden_TD,
            experts_TK,
            self.shape.low_latency_tokens,
            self.shape.num_physical,
            use_fp8=self.shape.is_float8,
            async_finish=True,
        )
        handle = LowLatencyHandle(handle, experts_TK, weights_TK)
        expected_rows = self.shape.expected_rows(tokens_per_rank)
        return PendingLowLatencyDispatch(received, counts_e, expected_rows, event, handle, self.shape.dtype)


def _buffer_sizes(buffer_class: Any, shape: DeepEPShape) -> tuple[int, int]:
    """Return the bytes for NVLink and for RDMA, from the buffer's own hints."""
    hidden_bytes, num_ranks = shape.hidden_size * shape.dtype.itemsize, shape.num_ranks
    configs = buffer_class.get_dispatch_config(num_ranks), buffer_class.get_combine_config(num_ranks)
    num_nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, num_ranks) for config in configs)
    num_rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, num_ranks) for config in configs)
    if shape.low_latency_tokens:
        hint = buffer_class.get_low_latency_rdma_size_hint(
            shape.low_latency_tokens, shape.hidden_size, num_ranks, shape.num_physical
        )
        num_rdma_bytes = max(num_rdma_bytes, hint)
    return num_nvl_bytes, num_rdma_bytes
