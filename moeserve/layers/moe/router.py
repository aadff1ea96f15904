"""The choice of logical experts for each token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeserve.layers.build_context import BuildContext
from moeserve.layers.rows import At, Destination, Row, some_columns, some_rows, whole
from moeserve.ops import pairs, routing
from moeserve.ops.routing.interface import RouterSpec
from moeserve.step_inputs import StepInputs

ALWAYS = 1e30  # the correction of an expert that is always chosen


@dataclass(frozen=True)
class Routing:
    """The logical experts of each token and their weights."""

    experts_TK: Tensor  # int64
    weights_TK: Tensor  # float32

    def without_zero_experts(self, num_experts: int) -> tuple[Routing, Tensor]:
        """Return a copy that routes only to the first `num_experts` experts, and the sum [T, 1] of other weights."""
        is_zero_TK = self.experts_TK >= num_experts
        weights_T1 = (self.weights_TK * is_zero_TK).sum(dim=-1, keepdim=True)
        return Routing(self.experts_TK.masked_fill(is_zero_TK, -1), self.weights_TK), weights_T1

    def without(self, padding_T: Tensor) -> Routing:
        """Return a copy that routes padding rows to no expert. `padding_T`: bool."""
        return Routing(self.experts_TK.masked_fill(padding_T[:, None], -1), self.weights_TK)


@dataclass(frozen=True)
class RoutePlace:
    """The place of a layer's routes in a step, on a rank that reports chosen experts or receives forced experts."""

    layer: int  # index in `StepInputs.forced_routes`
    memory_TK: Tensor  # int64: where the experts of a step's rows are written, which the next step overwrites


class Router(nn.Module):
    """Chooses experts in float32 for any model dtype, because rounding could change the choice."""

    def __init__(self, config: RouterSpec, hidden_size: int, context: BuildContext) -> None:
        super().__init__()
        self.config = config
        num_experts, dtype = config.num_experts + config.num_zero_experts, torch.float32
        self.weight = context.parameter(num_experts, hidden_size, dtype=dtype)
        self.bias = context.parameter(num_experts, dtype=dtype) if config.has_bias else None
        self.correction = context.parameter(num_experts, dtype=dtype) if config.has_correction else None
        self.factors = context.parameter(num_experts, dtype=dtype) if config.has_factors else None
        self.table: nn.Parameter | None = None  # the experts of each token id
        if config.table_size is not None:
            self.table = context.parameter(config.table_size, config.top_k, dtype=torch.int64)
        self.gather = pairs.make(context.backend).gather
        self.kernel = routing.make(context.backend, config)
        self.route_place: RoutePlace | None = None

    def rows(self, at: At, factor: float = 1.0, may_lack_correction: bool = False, num_fixed: int = 0) -> Iterator[Row]:
        """Yield the weight mapping of this module, whose weights are whole on every rank.

        Args:
            factor: multiplies the stored weights.
            may_lack_correction: True: a correction that the checkpoint does not store is zero.
            num_fixed: number of last experts, which have no stored correction and are always chosen.
        """
        if at.has("transposed"):  # [hidden size, experts]
            yield at("transposed"), whole(self.weight.T, factor=factor)
        else:
            yield at("weight"), whole(self.weight, factor=factor)
        if self.bias is not None:
            yield at("bias"), whole(self.bias)
        if self.correction is not None:
            name, correction_E = "e_score_correction_bias", self.correction
            if num_fixed:  # the largest corrections: zero times a stored column, plus a number
                num_experts, num_inputs = self.weight.shape
                num_routed = num_experts - num_fixed
                yield at(name), whole(correction_E[:num_routed])
                place = slice(num_routed, num_experts), slice(0, 1)
                memory = correction_E[num_routed:, None]
                yield at("weight"), Destination(memory, (num_experts, num_inputs), place, offset=ALWAYS, factor=0.0)
            elif may_lack_correction and not at.has(name):  # zero times a stored column
                zeros = some_columns(correction_E[:, None], slice(0, 1), self.weight.shape[1])
                yield at("weight"), dataclasses.replace(zeros, factor=0.0)
            else:
                shape = at.stored.get(at(name), ())
                if len(shape) == 2:  # the first row is for text
                    yield at(name), some_rows(correction_E[None], slice(0, 1), shape[0])
                else:
                    yield at(name), whole(correction_E)
        if self.factors is not None:
            yield at("per_expert_scale"), whole(self.factors)
        if self.table is not None:
            yield at("tid2eid"), whole(self.table)

    def forward(self, hidden_TD: Tensor, step: StepInputs | None = None) -> Routing:
        """Route this rank's tokens [t, D]. `step` is required if token ids determine the experts."""
        given_TK = None
        if self.table is not None:
            assert step is not None
            given_TK = self.gather(self.table, step.token_ids[step.own_rows])
        if self.route_place is None:
            return self._route(hidden_TD, given_TK)
        memory_TK = self.route_place.memory_TK[: len(hidden_TD)]
        routing = self._route(hidden_TD, given_TK, memory_TK)
        if step is None or step.forced_routes is None:
            return routing
        forced_TK = step.forced_routes[self.route_place.layer][step.own_rows]
        return self._route(hidden_TD, forced_TK.where(forced_TK >= 0, routing.experts_TK), memory_TK)

    def _route(self, hidden_TD: Tensor, given_TK: Tensor | None, out_TK: Tensor | None = None) -> Routing:
        parameters = self.weight, self.bias, self.correction
        return Routing(*self.kernel(hidden_TD, *parameters, given_TK, self.factors, out_TK))
