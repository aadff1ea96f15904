"""Dispatch to experts on the host: rows leave the GPU in each layer, and the weighted sums return to it.

A token of a layer takes 2 * D bytes each way in bfloat16, and 12 bytes for each of its experts, so a decode step needs
little of the link. Shared experts run on the GPU while the host computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.layers.moe.dispatch.base import Dispatched, PendingOutput, ReadyOutput
from moeserve.layers.moe.dispatch.local import LocalDispatcher
from moeserve.layers.moe.router import Routing
from moeserve.ops.rows.interface import Rows, plain_rows
from moeserve.step_inputs import StepInputs


class HostCopies:
    """Tensors on their way to pinned memory of the host. Those that are on the host already are not copied."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copied: torch.cuda.Event | None = None
        self._on_host = list(tensors)
        if tensors[0].is_cuda:
            self._on_host = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
            for host, each in zip(self._on_host, tensors, strict=True):
                host.copy_(each, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[Tensor]:
        """Return the copies, once the GPU has computed the tensors and copied them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._on_host


@dataclass(frozen=True)
class HostDispatch:
    """A dispatch whose rows are on their way to the host."""

    copies: HostCopies
    dispatcher: HostDispatcher
    step: StepInputs

    def wait(self) -> Dispatched:
        rows_TD, experts_TK, weights_TK = self.copies.wait()
        dispatched = self.dispatcher.local.dispatch(rows_TD, Routing(experts_TK, weights_TK), self.step).wait()

        def combine(output: Tensor) -> PendingOutput:
            sum_TD = dispatched.combine(output).wait()
            if self.dispatcher.device.type == "cuda":
                sum_TD = sum_TD.pin_memory().to(self.dispatcher.device, non_blocking=True)
            return ReadyOutput(sum_TD)

        return Dispatched(dispatched.tokens, combine)


class HostDispatcher:
    """The dispatcher of a rank whose experts are on the host. See `Dispatcher` for the contract."""

    takes_float8 = False

    def __init__(self, local: LocalDispatcher, device: torch.device) -> None:
        """
        Args:
            local: the dispatcher on the host.
            device: of the rows that tokens bring, and of their sums.
        """
        self.local = local
        self.device = device
        self.expert_copies = local.expert_copies

    def dispatch(self, hidden_TD: Rows, routing: Routing, step: StepInputs) -> HostDispatch:
        copies = HostCopies([plain_rows(hidden_TD), routing.experts_TK, routing.weights_TK])
        return HostDispatch(copies, self, step)

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        return False  # the host must compute in the middle of the step
