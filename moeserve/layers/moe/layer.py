"""The mixture of experts: route, dispatch, run the experts, combine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.config.needs import Needs
from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import share_experts
from moeserve.layers.linear import Linear
from moeserve.layers.moe.dispatch.base import Dispatcher, PendingDispatch, PendingOutput
from moeserve.layers.moe.dispatch.factory import DispatcherFactory
from moeserve.layers.moe.dispatch.host import HostDispatcher
from moeserve.layers.moe.dispatch.local import LocalDispatcher
from moeserve.layers.moe.experts import Experts
from moeserve.layers.moe.placement.load import ExpertLoad
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.moe.router import Router, Routing
from moeserve.layers.moe.rows import expert_rows
from moeserve.layers.moe.shared import SharedExperts, SharedExpertsSpec
from moeserve.layers.network import Build, FeedForwardSpec, Network, NetworkPart, Run, Stages, run_in_turn
from moeserve.layers.norm import RMSNorm, RowsForm, ScaledFirstNorm
from moeserve.layers.rows import At, Row, whole
from moeserve.ops import rows
from moeserve.ops.routing.interface import RouterSpec
from moeserve.ops.rows.activations import Activation, SwiGLU
from moeserve.ops.rows.interface import Rows, plain_rows


@dataclass(frozen=True, kw_only=True)
class MoESpec(FeedForwardSpec):
    """The shape of one mixture-of-experts layer."""

    router: RouterSpec
    expert_width: int
    activation: Activation = SwiGLU()
    has_expert_bias: bool = False
    has_output_bias: bool = False  # a bias of the output; the router's weights sum to one, so each expert adds it
    # Number of last experts that the router chooses for every token; stored as shared experts (Inkling).
    num_fixed: int = 0
    may_lack_correction: bool = False  # a checkpoint may lack the router's correction, which is then zero
    shared: SharedExpertsSpec | None = None
    averages_shared: bool = False  # the output is half the sum of routed and shared experts (Cohere)
    # The router's weights multiply the experts' inputs instead of their outputs (Llama 4). Needs one expert per token.
    weighs_inputs: bool = False
    num_unused_experts: int = 0  # number of unused experts that are stored behind the router's experts (ERNIE-4.5-VL)
    # Size of the rows that experts read and write, which are projected from and to the model's width (latent MoE).
    latent_size: int | None = None  # None: the model's width
    router_size: int | None = None  # size of the rows that the router reads; None: the model's width
    latent_norm_epsilon: float | None = None  # epsilon of a norm of latent rows before the experts; None: no norm
    output_norm_epsilon: float | None = None  # epsilon of one norm for the outputs of all experts; None: no norm
    router_factor: float = 1.0  # multiplies the stored weights of the router
    zero_experts_return_nothing: bool = False  # zero experts return zeros instead of their input

    @property
    def moe(self) -> MoESpec:
        return self

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="routing by a sparse mixer" if self.router.scoring == "sparse_mixer" else None)

    def build(self, build: Build) -> MoELayer:
        return MoELayer(self, build.hidden_size, next(build.placements), build.dispatchers, build.context)


class MoELayer(Network):
    """Routes each token, sends it to its experts, and adds up the weighted outputs.

    Router and shared experts are whole on every rank. A rank has the routed experts in its own slots, or a slice of
    each routed expert (`Placement.num_slices`).

    With T tokens of this rank, D model width, and K experts per token:

        router       [T, D] -> K experts and weights of each token
        dispatch     [T, D] -> rows of this rank's experts    collective: all ep ranks
        experts      rows -> rows                             meanwhile: shared experts, [T, D] -> [T, D]
        combine      rows -> [T, D], weighted and added       collective: all ep ranks

    Experts of a latent size L read and write narrower rows: a projection [T, D] -> [T, L] comes before dispatch, and a
    projection [T, L] -> [T, D] after combine. Both projections are whole on every rank.

    Args:
        config: the computation, independent of the layout.
        hidden_size: D.
        placement: the logical expert in each slot of each rank of the ep group.
        dispatchers: makes the dispatcher that carries tokens between ranks.
    """

    waits = True

    @property
    def moe(self) -> MoELayer:
        return self

    def __init__(
        self,
        config: MoESpec,
        hidden_size: int,
        placement: Placement,
        dispatchers: DispatcherFactory,
        context: BuildContext,
    ) -> None:
        super().__init__()
        assert placement.num_logical == config.router.num_experts
        assert not config.weighs_inputs or config.router.top_k == 1
        self.config = config
        self.weighs_inputs = config.weighs_inputs
        self.rank_in_group = dispatchers.group.rank_in_group
        self.router = Router(config.router, config.router_size or hidden_size, context)
        row_size = config.latent_size or hidden_size
        self.to_latent: Linear | None = None
        self.from_latent: Linear | None = None
        if config.latent_size is not None:
            self.to_latent = Linear(hidden_size, row_size, context)
            self.from_latent = Linear(row_size, hidden_size, context)
        self.latent_norm: RMSNorm | None = None
        if config.latent_norm_epsilon is not None:
            self.latent_norm = RMSNorm(row_size, config.latent_norm_epsilon, context)
        self.output_norm: ScaledFirstNorm | None = None
        if config.output_norm_epsilon is not None:
            assert placement.num_slices == 1
            self.output_norm = ScaledFirstNorm(row_size, config.output_norm_epsilon, context.of_experts)
        self.experts = Experts(
            placement.num_slots[self.rank_in_group],
            row_size,
            share_experts(config.expert_width, placement.num_slices, context.of_experts),
            config.activation,
            context.of_experts,
            has_bias=config.has_expert_bias,
            has_down_bias=config.has_expert_bias or config.has_output_bias,
        )
        self.shared_experts = None if config.shared is None else SharedExperts(config.shared, hidden_size, context)
        self.load = ExpertLoad(placement, self.rank_in_group, context.of_experts)
        self.dispatcher: Dispatcher
        if context.on_host is None:
            self.dispatcher = dispatchers.make(placement, self.load.rows_e)
        else:  # this rank is the only one
            local = LocalDispatcher(placement, context.on_host, self.load.rows_e)
            self.dispatcher = HostDispatcher(local, context.device)
        # Each chosen expert of a token gets one row.
        self.bytes_per_token = config.router.top_k * row_size * context.dtype.itemsize
        self.add_shared = rows.make(context.backend).add
        if config.averages_shared:
            add_scaled = rows.make(context.backend).add_scaled
            half_1 = torch.full((1,), 0.5, dtype=torch.float32, device=context.device)
            self.add_shared = lambda routed_TD, shared_TD: add_scaled(routed_TD, shared_TD, half_1)
        self.side_stream = context.backend.side_stream

    @property
    def placement(self) -> Placement:
        """The logical expert in each slot of each rank."""
        return self.load.placement

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The logical expert in each slot of this rank."""
        return self.placement.logical_of_slot[self.rank_in_group]

    def parts(self) -> Iterator[NetworkPart]:
        yield NetworkPart("routers", self.router)
        router = self.config.router
        yield NetworkPart("routed experts", self.experts, router.top_k, router.num_experts)
        for linear in (self.to_latent, self.from_latent):
            if linear is not None:
                yield NetworkPart("latent projections", linear)
        if self.shared_experts is not None:
            yield NetworkPart("shared experts", self.shared_experts)

    def rows(self, at: At, router_factor: float = 1.0) -> Iterator[Row]:
        """Yield the weight mapping of this module.

        Args:
            router_factor: multiplies the stored weights of the router.
        """
        config = self.config
        router_factor *= config.router_factor
        yield from self.router.rows(at.under("gate"), router_factor, config.may_lack_correction, config.num_fixed)
        if self.shared_experts is not None:
            yield from self.shared_experts.rows(at)
        for linear, name in ((self.to_latent, "to_latent"), (self.from_latent, "from_latent")):
            if linear is not None:
                yield from linear.rows(at.under(name))
        for norm, name in ((self.latent_norm, "latent_norm"), (self.output_norm, "output_norm")):
            if norm is not None:
                yield from norm.rows(at.under(name))
        yield from expert_rows(at.under("experts"), self)
        if self.config.has_output_bias:
            yield at("bias"), None
            for bias_D in () if self.experts.down.bias is None else self.experts.down.bias:
                yield at("bias"), whole(bias_D)

    def place(self, placement: Placement) -> None:
        """Switch to a placement with the same numbers of slots. All weights must be in their new slots already."""
        assert placement.num_slots == self.placement.num_slots
        self.load.placement = placement
        self.dispatcher.expert_copies.place(placement)

    def is_capturable(self, tokens_per_rank: Sequence[int]) -> bool:
        """True if a CUDA graph should capture padded steps with `tokens_per_rank` tokens. The same on all ranks."""
        return self.dispatcher.is_capturable(tokens_per_rank, self.bytes_per_token)

    @property
    def input_form(self) -> RowsForm:
        """The form of rows to give to `forward`. The router always reads plain rows."""
        if self.to_latent is not None:
            experts_read_float8 = self.to_latent.weights.is_in_blocks
        else:
            experts_read_float8 = self.experts.gate_up.is_in_blocks and self.dispatcher.takes_float8
        shared_read_float8 = self.shared_experts is not None and self.shared_experts.mlp.gate_up.is_in_blocks
        return "both" if experts_read_float8 or shared_read_float8 else "plain"

    def forward(self, hidden_TD: Rows, run: Run, cache: Any = None) -> Tensor:
        (output_TD,) = run_in_turn([self.stages(hidden_TD, run)])
        return output_TD

    def stages(self, hidden_TD: Rows, run: Run, cache: Any = None, routed_TD: Tensor | None = None) -> Stages[Tensor]:
        """Yield after dispatch has started, and after combine has started.

        Args:
            routed_TD: the inputs of the router; None: the router reads the inputs of the experts.
        """
        step = run.step
        plain_TD = plain_rows(hidden_TD)
        routing = self.router(plain_TD if routed_TD is None else routed_TD, step)
        if step.padding is not None:
            routing = routing.without(step.padding[step.own_rows])
        zero_weights_T1: Tensor | None = None
        if self.config.router.num_zero_experts:
            routing, zero_weights_T1 = routing.without_zero_experts(self.config.router.num_experts)
        if self.to_latent is not None:
            sent_TD = self.to_latent(self.to_latent.weights.input_of(hidden_TD))
            if self.latent_norm is not None:
                sent_TD = self.latent_norm(sent_TD)
        else:
            sent_TD = hidden_TD if self.dispatcher.takes_float8 else plain_TD
        if self.weighs_inputs:
            sent_TD = plain_rows(sent_TD) * routing.weights_TK.to(plain_TD.dtype)
            routing = Routing(routing.experts_TK, torch.ones_like(routing.weights_TK))
        pending = self.dispatcher.dispatch(sent_TD, routing, step)
        shared = None if self.shared_experts is None else self.side_stream.start(self.shared_experts, hidden_TD)
        yield
        output, combine = self._run_experts(pending)
        del pending  # DeepEP's low-latency kernels have memory for two results, in all halves together
        combined = combine(output)  # collective: all ep ranks
        yield
        combined_TD = combined.wait()
        if self.from_latent is not None:
            combined_TD = self.from_latent(combined_TD)
        if zero_weights_T1 is not None and not self.config.zero_experts_return_nothing:
            combined_TD = (combined_TD.float() + plain_TD.float() * zero_weights_T1).to(combined_TD.dtype)
        return combined_TD if shared is None else self.add_shared(combined_TD, shared.wait())

    def _run_experts(self, pending: PendingDispatch) -> tuple[Tensor, Callable[[Tensor], PendingOutput]]:
        """Return the outputs of this rank's experts, and the function that starts to combine them."""
        dispatched = pending.wait()
        if not dispatched.is_counted:
            self.load.count(dispatched.tokens.groups.counts_e)
        output = self.experts(dispatched.tokens)
        if self.output_norm is not None:
            self.output_norm.in_place(output)
        return output, dispatched.combine
