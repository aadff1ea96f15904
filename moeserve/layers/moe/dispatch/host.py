"""Dispatch to experts on the host: in each layer, rows go from the GPU to the host, and the weighted sums return.

In each layer, a token takes 2 * D bytes each way in bfloat16, and 12 bytes for each of its experts, so a decode step
uses little of the link's bandwidth. Shared experts run on the GPU while the host computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.layers.moe.dispatch.base import Dispatched, PendingOutput, ReadyOutput
from moeserve.layers.moe.dispatch.local import LocalDispatcher
from moeserve.layers.moe.router import Routing
from moeserve.ops.reading import Reading, start_reading
from moeserve.ops.rows.interface import Rows, plain_rows
from moeserve.ops.upload import upload
from moeserve.step_inputs import StepInputs


@dataclass(frozen=True)
class HostDispatch:
    """A dispatch whose rows are on their way to the host."""

    reading: Reading
    dispatcher: HostDispatcher
    step: StepInputs

    def wait(self) -> Dispatched:
        rows_TD, experts_TK, weights_TK = self.reading.wait()
        dispatched = self.dispatcher.local.dispatch(rows_TD, Routing(experts_TK, weights_TK), self.step).wait()

        def combine(output: Tensor) -> PendingOutput:
            return ReadyOutput(upload(dispatched.combine(output).wait(), self.dispatcher.device))

        return Dispatched(dispatched.tokens, combine)


class HostDispatcher:
    """The dispatcher of a rank whose experts are on the host. See `Dispatcher` for the contract."""

    takes_float8 = False

    def __init__(self, local: LocalDispatcher, device: torch.device) -> None:
        """
        Args:
            local: the dispatcher on the host.
            device: the device of hidden states and of the weighted sums.
        """
        self.local = local
        self.device = device
        self.expert_copies = local.expert_copies

    def dispatch(self, hidden_TD: Rows, routing: Routing, step: StepInputs) -> HostDispatch:
        reading = start_reading([plain_rows(hidden_TD), routing.experts_TK, routing.weights_TK])
        return HostDispatch(reading, self, step)

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        return False  # the host must compute in the middle of the step
