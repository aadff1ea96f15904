"""Experts whose router is a network with a state, which the router passes on to the router of the next layer (Zaya)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.layers.linear import Linear
from moeserve.layers.moe.layer import MoELayer, MoESpec
from moeserve.layers.network import Build, FeedForwardSpec, Network, NetworkPart, Run, Stages
from moeserve.layers.norm import RMSNorm
from moeserve.layers.rows import At, Row, whole
from moeserve.layers.weights import QuantizationLimits
from moeserve.ops import mixing
from moeserve.ops.mixing.interface import Affine
from moeserve.ops.rows.interface import plain_rows

# R width of the router


@dataclass
class RouterState:
    """The state of the last router, on its way to the next router."""

    state_tR: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class StatefulMoESpec(FeedForwardSpec):
    """The shape of experts and of their router's network."""

    experts: MoESpec
    router_width: int
    reads_state: bool  # False in the first layer

    @property
    def moe(self) -> MoESpec:
        return self.experts

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="routers with states", reads_earlier_layer=self.reads_state)

    def build(self, build: Build) -> StatefulMoE:
        return StatefulMoE(self, build)


class StatefulMoE(Network):
    """Experts and their router's network, which computes the rows from which the router chooses."""

    waits = True

    def __init__(self, config: StatefulMoESpec, build: Build) -> None:
        super().__init__()
        context, width, limits = build.context, config.router_width, QuantizationLimits(8, None)
        self.experts = config.experts.build(build)
        self.down = Linear(build.hidden_size, width, context, has_bias=True, limits=limits)
        self.scale = context.parameter(width, dtype=torch.float32) if config.reads_state else None
        self.norm = RMSNorm(width, build.norm_epsilon, context)
        self.first, self.second = (Linear(width, width, context, has_bias=True, limits=limits) for _ in range(2))
        self.mixing = mixing.make(context.backend)

    @property
    def moe(self) -> MoELayer:
        return self.experts

    def parts(self) -> Iterator[NetworkPart]:
        yield from self.experts.parts()
        yield NetworkPart("routers", nn.ModuleList([self.down, self.norm, self.first, self.second]))

    def rows(self, at: At) -> Iterator[Row]:
        yield from self.experts.rows(at)
        own = at.under("router")
        yield from self.down.rows(own.under("down_proj"))
        if self.scale is not None:
            yield own("states_scale"), whole(self.scale)
        yield from self.norm.rows(own.under("norm"))
        yield from self.first.rows(own.under("fc1"))
        yield from self.second.rows(own.under("fc2"))

    def stages(self, rows: Any, run: Run, cache: Any) -> Stages[Tensor]:
        before, state_tR = run.shared(RouterState), self.down(plain_rows(rows))
        if self.scale is not None:
            assert before.state_tR is not None
            state_tR = self.mixing.add(state_tR, Affine(), before.state_tR, Affine(self.scale))
        before.state_tR = state_tR
        router_tR = self.norm(state_tR)
        for linear in (self.first, self.second):
            router_tR = self.mixing.gelu(linear(router_tR))
        output_tD: Tensor = yield from self.experts.stages(rows, run, None, router_tR)
        return output_tD
