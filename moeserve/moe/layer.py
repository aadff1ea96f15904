"""The mixture-of-experts layer. Knows the order of things; each thing is someone else's."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moeserve.config import DispatcherName
from moeserve.moe.dispatch.base import Dispatcher
from moeserve.moe.dispatch.local import LocalDispatcher
from moeserve.moe.experts import Experts
from moeserve.moe.router import SoftmaxRouter
from moeserve.step_inputs import StepInputs

# T tokens, D model width


class MoELayer(nn.Module):
    """Routes each token, sends it to its experts, and gathers the weighted outputs."""

    def __init__(self, router: SoftmaxRouter, experts: Experts, num_experts: int, dispatcher: DispatcherName) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.dispatcher: Dispatcher[Any]
        match dispatcher:
            case "local":
                self.dispatcher = LocalDispatcher(num_experts)

    def forward(self, hidden_TD: Tensor, step: StepInputs) -> Tensor:
        routing = self.router(hidden_TD)
        in_flight = self.dispatcher.dispatch(hidden_TD, routing, step)
        arrived = in_flight.wait()
        output = self.experts(arrived.tokens)
        return self.dispatcher.combine(output, arrived.ticket).wait()
