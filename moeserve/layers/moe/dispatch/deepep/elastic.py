"""DeepEP's second API, `ElasticBuffer`: the same kernels for all steps, with rows laid out by expert.

Based on https://github.com/deepseek-ai/DeepEP: deep_ep/buffers/elastic.py of 2.x and its README.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.base import Dispatched, PackedTokens
from moeserve.layers.moe.dispatch.deepep.communicator import (
    DeepEPShape,
    Event,
    PendingCombine,
    received_rows,
    to_float8,
)
from moeserve.ops import pairs
from moeserve.ops.products.interface import RowGroups
from moeserve.ops.rows.interface import Rows, plain_rows

# R received rows: one for each pair that this rank computes, and possibly spare rows

LEAST_LIMIT = 128  # minimum limit of a rank's tokens in a small step, if there are no low-latency steps


@dataclass(frozen=True)
class PendingElasticDispatch:
    """A dispatch in progress."""

    received: Tensor | tuple[Tensor, Tensor]  # [R, D], or float8 and scales
    expected_rows: int | None  # estimated number of rows that count in a small step; None: there are no spare rows
    event: Event
    handle: Any  # DeepEP's handle for the combine
    weights_R: Tensor
    num_tokens: int  # T
    communicator: ElasticCommunicator

    def wait(self) -> Dispatched:
        self.event.current_stream_wait()
        rows_RD = received_rows(self.received, self.communicator.shape.dtype)
        # The end of each expert's rows, [e] int32. There is no padding between experts.
        ends_e: Tensor = self.handle.psum_num_recv_tokens_per_expert
        counts_e = ends_e.to(torch.int64).diff(prepend=ends_e.new_zeros(1, dtype=torch.int64))
        groups = RowGroups(counts_e, self.expected_rows is not None, self.expected_rows)
        combine = partial(self.communicator.combine, self.handle, self.weights_R, self.num_tokens)
        return Dispatched(PackedTokens(rows_RD, groups), combine)


@dataclass(frozen=True)
class PendingEmptyCombine:
    """A combine in progress on a rank without tokens, which sent one padding row."""

    pending: PendingCombine

    def wait(self) -> Tensor:
        return self.pending.wait()[:0]


class ElasticCommunicator:
    """See `DeepEPCommunicator`.

    A token's row is sent once to each rank that holds any of its experts, and copied there into a row for each of these
    experts. Outputs are multiplied by their weights and rounded. Each rank adds its outputs of a token and rounds the
    sum, and the token's rank adds these sums. So the placement determines which sums are rounded.

    Small steps have rows for all possible pairs, so that shapes do not depend on the routing. In large steps, these
    rows would be too many, and the host waits for the number of rows.
    """

    def __init__(
        self,
        deep_ep: ModuleType,
        shape: DeepEPShape,
        process_group: Any,
        context: BuildContext,
        *,
        is_deterministic: bool = True,
    ) -> None:
        """
        Args:
            deep_ep: the package.
            process_group: the torch.distributed group of the ep ranks in their order, with NCCL.
            is_deterministic: give an expert's rows the same order each time, by a sort after each dispatch. In DeepEP
                2.1 the sort waits for the host, so no graph can capture it. Sums are added in the order of k, so they
                are repeatable without the sort if the output of a row does not depend on the row's place. Published
                versions refuse this option between hosts.
        """
        self.shape = shape
        self.is_deterministic = is_deterministic
        self.max_tokens = max(shape.max_tokens_per_rank, shape.low_latency_tokens)
        self.pairs = pairs.make(context.backend)
        buffer_class = deep_ep.ElasticBuffer
        known = inspect.signature(buffer_class).parameters
        options = {"deterministic": is_deterministic} if "deterministic" in known else {}
        if "explicitly_destroy" in known:  # otherwise the destructor waits for other ranks, also after an error
            options["explicitly_destroy"] = True
        self.is_ended_by_us = "explicitly_destroy" in options
        self.buffer = buffer_class(
            process_group,
            num_max_tokens_per_rank=self.max_tokens,
            hidden=shape.hidden_size,
            num_topk=shape.top_k,
            use_fp8_dispatch=shape.is_float8,
            **options,
        )
        self.num_bytes = int(self.buffer.num_bytes)

    def is_capturable(self, tokens_per_rank: Sequence[int]) -> bool:
        return not self.is_deterministic and self._limit(tokens_per_rank, is_padded=True) is not None

    def prepare(self, tokens_per_rank: Sequence[int]) -> None:
        """Return at once: any step may follow any other."""

    def dispatch(
        self,
        hidden_TD: Rows,
        experts_TK: Tensor,
        weights_TK: Tensor,
        tokens_per_rank: Sequence[int],
        is_padded: bool = False,
    ) -> PendingElasticDispatch:
        num_tokens, shape = len(hidden_TD), self.shape
        limit = self._limit(tokens_per_rank, is_padded)
        if num_tokens == 0:  # kernels may not support zero rows; a row without experts is not sent
            hidden_TD = plain_rows(hidden_TD).new_zeros(1, shape.hidden_size)
            experts_TK = experts_TK.new_full((1, experts_TK.shape[1]), -1)
            weights_TK = weights_TK.new_zeros(1, weights_TK.shape[1])
        # collective: all ep ranks
        received, _, weights_R, handle, event = self.buffer.dispatch(
            to_float8(hidden_TD) if shape.is_float8 else hidden_TD,
            topk_idx=experts_TK,
            topk_weights=weights_TK,
            num_experts=shape.num_physical,
            num_max_tokens_per_rank=limit or self.max_tokens,
            expert_alignment=1,
            async_with_compute_stream=True,
            do_cpu_sync=limit is None,
            do_expand=True,
        )
        expected_rows = None if limit is None else shape.expected_rows(tokens_per_rank)
        return PendingElasticDispatch(received, expected_rows, event, handle, weights_R, num_tokens, self)

    def combine(
        self, handle: Any, weights_R: Tensor, num_tokens: int, output: Tensor
    ) -> PendingCombine | PendingEmptyCombine:
        """Multiply outputs by their weights, and send the products to the ranks of their tokens.

        Args:
            num_tokens: number of tokens of this rank.
        """
        num_rows = handle.psum_num_recv_tokens_per_expert[-1:]
        weighted_RD = self.pairs.weigh(output.contiguous(), weights_R, num_rows)
        # collective: all ep ranks
        output_TD, _, event = self.buffer.combine(weighted_RD, handle, async_with_compute_stream=True)
        pending = PendingCombine(output_TD, event.current_stream_wait)
        return pending if num_tokens else PendingEmptyCombine(pending)

    def _limit(self, tokens_per_rank: Sequence[int], is_padded: bool) -> int | None:
        """Return the number of tokens per rank for which a small step allocates memory; None: the step is large.

        The limit is one of few values, because kernels are compiled for each value.
        """
        shape, limit = self.shape, self.shape.low_latency_tokens or LEAST_LIMIT
        while limit < max(tokens_per_rank):
            limit *= 2
        limit = min(limit, self.max_tokens)
        num_pairs = limit * shape.num_ranks * min(shape.top_k, max(shape.num_slots))
        return limit if shape.is_low_latency(tokens_per_rank) or shape.has_room(num_pairs, is_padded) else None

    def close(self) -> None:
        if self.is_ended_by_us:
            self.buffer.destroy()
