"""The mixture-of-experts layer. Knows the order of things; each thing is someone else's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moeserve.config.settings import DispatcherName
from moeserve.distributed.group import GroupCoordinator
from moeserve.expert_placement.load import ExpertLoad
from moeserve.expert_placement.placement import Placement
from moeserve.moe.dispatch.all_to_all import AllToAllDispatcher
from moeserve.moe.dispatch.allgather import AllGatherDispatcher
from moeserve.moe.dispatch.base import Dispatcher
from moeserve.moe.dispatch.deepep.communicator import DeepEPCommunicator
from moeserve.moe.dispatch.deepep.dispatcher import DeepEPDispatcher
from moeserve.moe.dispatch.local import LocalDispatcher
from moeserve.moe.dispatch.slotted import SlottedDispatcher
from moeserve.moe.experts import Experts
from moeserve.moe.router import Router
from moeserve.moe.shared import SharedExperts, SharedExpertsConfig
from moeserve.ops.activation import GatedActivation, SwiGLU
from moeserve.ops.addition import choose_addition
from moeserve.ops.routing import RouterConfig
from moeserve.ops.side_stream import choose_aside
from moeserve.step_inputs import StepInputs

# T tokens, D model width


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The shape of one mixture-of-experts layer."""

    router: RouterConfig
    expert_width: int
    activation: GatedActivation = SwiGLU()
    has_expert_bias: bool = False
    shared: SharedExpertsConfig | None = None


class MoELayer(nn.Module):
    """Routes each token, sends it to its experts, and gathers the weighted outputs.

    Args:
        config: what the layer computes, whatever ranks do it.
        hidden_size: D.
        dispatcher: how tokens travel. "local" is for a group of one rank.
        communicator: with "deepep": the buffer of all layers.
        placement: the logical expert in each slot of each rank of the group. Router and shared experts are whole on
            every rank; of the experts, a rank has those in its own slots, in their order.
        group: the ep group.
        num_slots: lay the tokens of each expert out in that many slots; None: packed.
    """

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        dispatcher: DispatcherName,
        placement: Placement,
        group: GroupCoordinator,
        *,
        communicator: DeepEPCommunicator | None = None,
        num_slots: int | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        assert placement.num_logical == config.router.num_experts
        self.local_experts = placement.logical_of_slot[group.rank_in_group]
        self.router = Router(config.router, hidden_size, device=device)
        self.experts = Experts(
            placement.num_slots[group.rank_in_group],
            hidden_size,
            config.expert_width,
            config.activation,
            has_bias=config.has_expert_bias,
            dtype=dtype,
            device=device,
        )
        self.shared_experts = (
            None if config.shared is None else SharedExperts(config.shared, hidden_size, dtype=dtype, device=device)
        )
        self.bytes_per_token = config.router.top_k * hidden_size * dtype.itemsize  # of rows, one for each expert
        self.group = group
        self.dispatcher: Dispatcher[Any]
        match dispatcher:
            case "local":
                self.dispatcher = LocalDispatcher(placement, device)
            case "allgather":
                self.dispatcher = AllGatherDispatcher(group, placement, device)
            case "all_to_all":
                self.dispatcher = AllToAllDispatcher(group, placement, device)
            case "deepep":
                assert communicator is not None
                self.dispatcher = DeepEPDispatcher(group, placement, device, communicator=communicator)
        self.load = ExpertLoad(placement, group.rank_in_group, device)
        self.add = choose_addition(device.type)
        self.aside = choose_aside(device.type)
        if num_slots is not None:
            self.dispatcher = SlottedDispatcher(self.dispatcher, num_slots)

    @property
    def placement(self) -> Placement:
        """The logical expert in each slot of each rank."""
        return self.load.placement

    def place(self, placement: Placement) -> None:
        """From now on the slots hold other experts, whose weights are there already. As many slots on each rank."""
        assert placement.num_slots == self.load.placement.num_slots
        self.local_experts = placement.logical_of_slot[self.group.rank_in_group]
        self.load.placement = placement
        self.dispatcher.replicas.place(placement)

    def is_capturable(self, tokens_per_rank: Sequence[int]) -> bool:
        """Whether a CUDA graph is to hold such a step, padded. All ranks answer alike."""
        return self.dispatcher.is_capturable(tokens_per_rank, self.bytes_per_token)

    def forward(self, hidden_TD: Tensor, step: StepInputs) -> Tensor:
        routing = self.router(hidden_TD)
        if step.padding is not None:
            routing = routing.without(step.padding[step.own_rows])
        in_flight = self.dispatcher.dispatch(hidden_TD, routing, step)
        shared = None if self.shared_experts is None else self.aside(self.shared_experts, hidden_TD)  # meanwhile
        arrived = in_flight.wait()
        self.load.count(arrived.tokens.counts_e)
        output = self.experts(arrived.tokens)
        routed_TD = self.dispatcher.combine(output, arrived.handle).wait()
        return routed_TD if shared is None else self.add(routed_TD, shared.wait())
