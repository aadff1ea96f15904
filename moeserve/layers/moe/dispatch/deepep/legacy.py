"""DeepEP's first API, `Buffer`: normal kernels for large steps and low-latency kernels for small steps, in one buffer.

Based on https://github.com/deepseek-ai/DeepEP: deep_ep/buffer.py of 1.x, and deep_ep/buffers/legacy.py of 2.x with its
document. Both versions accept the arguments used here. DeepEP's handles are opaque, because their fields differ
between versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.base import Dispatched, PendingDispatch, SlottedTokens, pack
from moeserve.layers.moe.dispatch.deepep.communicator import (
    DeepEPShape,
    Event,
    PendingCombine,
    received_rows,
    to_float8,
)
from moeserve.layers.moe.dispatch.deepep.support import MAX_RANKS_OF_ONE_HOST
from moeserve.ops import pairs
from moeserve.ops.pairs.interface import Keys
from moeserve.ops.products.interface import RowGroups
from moeserve.ops.rows.interface import Rows, plain_rows

# N distinct tokens that this rank received (in steps without a waiting host: all tokens of all ranks, most of them
# undefined), R pairs of these tokens that this rank computes, S = low_latency_tokens * number of ranks

MAX_LOW_LATENCY_RESULTS = 2  # maximum number of results in use at a time: DeepEP has two buffers


@dataclass(frozen=True)
class PendingNormalDispatch:
    """A dispatch in progress with DeepEP's normal kernels."""

    received: Tensor | tuple[Tensor, Tensor]  # [N, D], or float8 and scales
    experts_NK: Tensor  # local experts; -1: an expert of another rank, or none
    weights_NK: Tensor
    num_rows: int | None  # R; None: only the GPU knows the number
    expected_rows: int | None
    handle: tuple[Any, ...]  # DeepEP's handle for the combine
    event: Event
    communicator: LegacyCommunicator

    def wait(self) -> Dispatched:
        self.event.current_stream_wait()
        communicator, top_k = self.communicator, self.experts_NK.shape[1]
        rows_ND = received_rows(self.received, communicator.shape.dtype)
        order_P, counts_e = communicator.pairs.order(self.experts_NK, communicator.keys)
        pair_of_row_R = order_P[: self.num_rows]
        packed = communicator.pack(rows_ND, pair_of_row_R, top_k, counts_e, self.expected_rows)
        return Dispatched(packed, partial(communicator.combine, self.handle, pair_of_row_R, self.weights_NK))


@dataclass(frozen=True)
class PendingLowLatencyDispatch:
    """A dispatch in progress with DeepEP's low-latency kernels."""

    received: Tensor | tuple[Tensor, Tensor]  # [e, S, D], or float8 and scales; undefined beyond the counts
    counts_e: Tensor  # int32
    expected_rows: int
    receive: Callable[[], None]  # launches the kernel that receives
    handle: tuple[Any, ...]  # DeepEP's handle for the combine
    experts_TK: Tensor
    weights_TK: Tensor
    communicator: LegacyCommunicator

    def wait(self) -> Dispatched:
        self.receive()
        slots_eSD = received_rows(self.received, self.communicator.shape.dtype)
        groups = RowGroups(self.counts_e.to(torch.int64), expected_rows=self.expected_rows)
        combine = self.communicator.combine_low_latency
        tokens = SlottedTokens(slots_eSD, groups)
        return Dispatched(tokens, partial(combine, self.handle, self.experts_TK, self.weights_TK))


class LegacyCommunicator:
    """See `DeepEPCommunicator`.

    Normal kernels send a token's row once to each rank that holds any of its experts. That rank adds the weighted
    outputs in float32 and in the order of k, and rounds the sum; the token's rank adds these sums. So the placement
    determines which sums are rounded. The host waits for the numbers of rows, unless all ranks are on one host and the
    step has room for all pairs.

    Low-latency kernels send a row for each pair, and the token's rank adds the weighted outputs in the order of k.
    Shapes do not depend on the routing. One kernel sends, and another kernel receives at the wait; between the two, no
    multiprocessor is taken from other kernels.
    """

    def __init__(
        self, deep_ep: ModuleType, shape: DeepEPShape, process_group: Any, rank: int, context: BuildContext
    ) -> None:
        """
        Args:
            deep_ep: the package.
            process_group: the torch.distributed group of the ep ranks in their order, with NCCL.
            rank: the rank of this process in the group.
        """
        self.shape = shape
        self.has_streams = context.device.type == "cuda"
        self.pairs = pairs.make(context.backend)
        self.pack = partial(pack, self.pairs, gathers_late=context.backend.products_gather_rows)
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
        # DeepEP 1.0 has no such argument; without the argument, the destructor may hang after an exception.
        self.is_ended_by_us = "explicitly_destroy" in inspect.signature(buffer_class).parameters
        if self.is_ended_by_us:
            options["explicitly_destroy"] = True
        self.buffer = buffer_class(process_group, num_nvl_bytes, num_rdma_bytes, **options)
        # With so few ranks, all ranks are on one host: see support.py. Old versions have no such argument.
        self.can_assume_worst = (
            shape.num_ranks <= MAX_RANKS_OF_ONE_HOST
            and "num_worst_tokens" in inspect.signature(buffer_class.dispatch).parameters
        )

    def is_capturable(self, tokens_per_rank: Sequence[int]) -> bool:
        return self.shape.is_low_latency(tokens_per_rank) or self._worst_tokens(tokens_per_rank, is_padded=True) > 0

    def prepare(self, tokens_per_rank: Sequence[int]) -> None:
        if not self.shape.is_low_latency(tokens_per_rank):
            self.is_dirty = True
            return
        if not self.is_dirty:
            return
        assert not (self.has_streams and torch.cuda.is_current_stream_capturing()), "replays would clean each time"
        # collective: all ep ranks, since all have used the same kernels
        self.buffer.clean_low_latency_buffer(
            self.shape.low_latency_tokens, self.shape.hidden_size, self.shape.num_physical
        )
        self.is_dirty = False

    def dispatch(
        self,
        hidden_TD: Rows,
        experts_TK: Tensor,
        weights_TK: Tensor,
        tokens_per_rank: Sequence[int],
        is_padded: bool = False,
    ) -> PendingDispatch:
        self.prepare(tokens_per_rank)
        expected_rows = self.shape.expected_rows(tokens_per_rank)
        if self.shape.is_low_latency(tokens_per_rank):
            return self._dispatch_low_latency(hidden_TD, experts_TK, weights_TK, expected_rows)
        num_worst_tokens = self._worst_tokens(tokens_per_rank, is_padded)
        return self._dispatch_normal(hidden_TD, experts_TK, weights_TK, expected_rows, num_worst_tokens)

    def combine(
        self, handle: tuple[Any, ...], pair_of_row_R: Tensor, weights_NK: Tensor, output: Tensor
    ) -> PendingCombine:
        """Combine outputs with DeepEP's normal kernels.

        Args:
            pair_of_row_R: the pair (n * K + k of the N tokens) of each packed row.
        """
        sum_ND = self.pairs.weighted_sum(output.contiguous(), pair_of_row_R, weights_NK, self.shape.dtype)
        # collective: all ep ranks
        output_TD, _, event = self.buffer.combine(sum_ND, handle, async_finish=True)
        return PendingCombine(output_TD, event.current_stream_wait)

    def combine_low_latency(
        self, handle: tuple[Any, ...], experts_TK: Tensor, weights_TK: Tensor, output: Tensor
    ) -> PendingCombine:
        """Combine outputs with DeepEP's low-latency kernels."""
        self.num_low_latency_results -= 1
        # collective: all ep ranks
        output_TD, _, receive = self.buffer.low_latency_combine(
            output.contiguous(), experts_TK, weights_TK, handle, return_recv_hook=True
        )
        return PendingCombine(output_TD, receive)

    def close(self) -> None:
        if self.is_ended_by_us:
            self.buffer.destroy()

    def _worst_tokens(self, tokens_per_rank: Sequence[int], is_padded: bool) -> int:
        """Return the maximum number of tokens that a rank may receive; 0 if a step has no room for their pairs."""
        num_tokens = sum(tokens_per_rank)
        has_room = self.shape.has_room(num_tokens * self.shape.top_k, is_padded)
        return num_tokens if self.can_assume_worst and has_room else 0

    def _dispatch_normal(
        self, hidden_TD: Rows, experts_TK: Tensor, weights_TK: Tensor, expected_rows: int, num_worst_tokens: int
    ) -> PendingNormalDispatch:
        to_rank, to_rdma_rank, to_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(
            experts_TK, self.shape.num_physical
        )
        options = {"num_worst_tokens": num_worst_tokens} if num_worst_tokens else {}
        # collective: all ep ranks; without `num_worst_tokens` the host waits for the sizes
        received, experts_NK, weights_NK, rows_of_each, handle, event = self.buffer.dispatch(
            to_float8(hidden_TD) if self.shape.is_float8 else hidden_TD,
            num_tokens_per_rank=to_rank,
            num_tokens_per_rdma_rank=to_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=to_expert,
            topk_idx=experts_TK,
            topk_weights=weights_TK,
            async_finish=True,
            **options,
        )
        return PendingNormalDispatch(
            received=received,
            experts_NK=experts_NK,
            weights_NK=weights_NK,
            num_rows=None if num_worst_tokens else sum(rows_of_each),
            expected_rows=expected_rows if num_worst_tokens else None,
            handle=handle,
            event=event,
            communicator=self,
        )

    def _dispatch_low_latency(
        self, hidden_TD: Rows, experts_TK: Tensor, weights_TK: Tensor, expected_rows: int
    ) -> PendingLowLatencyDispatch:
        assert self.num_low_latency_results < MAX_LOW_LATENCY_RESULTS, "combine what was dispatched before"
        self.num_low_latency_results += 1
        # collective: all ep ranks
        received, counts_e, handle, _, receive = self.buffer.low_latency_dispatch(
            plain_rows(hidden_TD),
            experts_TK,
            self.shape.low_latency_tokens,
            self.shape.num_physical,
            use_fp8=self.shape.is_float8,
            return_recv_hook=True,
        )
        return PendingLowLatencyDispatch(
            received, counts_e, expected_rows, receive, handle, experts_TK, weights_TK, self
        )


def _buffer_sizes(buffer_class: Any, shape: DeepEPShape) -> tuple[int, int]:
    """Return the sizes in bytes of the NVLink buffer and of the RDMA buffer, from DeepEP's hints."""
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
