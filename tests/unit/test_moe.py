"""The MoE layer and its parts against a loop over single tokens in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from build_contexts import cpu_context
from torch import Tensor

from moeserve.distributed.groups import groups_of_one_rank
from moeserve.layers.chunked_sums import InputShare
from moeserve.layers.moe.dispatch.base import PackedTokens, SlottedTokens
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.moe.dispatch.local import LocalDispatcher
from moeserve.layers.moe.experts import Experts
from moeserve.layers.moe.layer import MoELayer, MoESpec
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.moe.router import Routing
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.layers.network import Run
from moeserve.layers.weights import allocate_weights
from moeserve.ops.products.interface import RowGroups
from moeserve.ops.routing.interface import RouterSpec
from moeserve.ops.rows.activations import ClampedSwiGLU

NO_STEP = cast(Any, SimpleNamespace(padding=None))  # the only field that local dispatch reads
CPU = torch.device("cpu")


def make_layer(num_experts: int, top_k: int, width: int, expert_width: int, dtype: torch.dtype) -> MoELayer:
    router = RouterSpec(num_experts=num_experts, top_k=top_k, is_normalized=True)
    return randomized(MoESpec(router=router, expert_width=expert_width), width, dtype)


def randomized(config: MoESpec, width: int, dtype: torch.dtype = torch.float32) -> MoELayer:
    placement = Placement.even(config.router.num_experts, num_ranks=1)
    layer = MoELayer(
        config, width, placement, TorchDispatchers("local", groups_of_one_rank().ep, cpu_context()), cpu_context(dtype)
    )
    allocate_weights(layer)
    for weight in layer.parameters():
        weight.normal_(0.0, 0.5)
    return layer


def one_token_at_a_time(layer: MoELayer, hidden_TD: Tensor) -> Tensor:
    router, gate_up, down = (
        w.double()
        for w in (layer.router.weight, *(w.open.weight_eOI for w in (layer.experts.gate_up, layer.experts.down)))
    )
    rows = []
    for token in hidden_TD.double():
        odds = [math.exp(float(row @ token)) for row in router]
        chosen = sorted(range(len(odds)), key=lambda expert: -odds[expert])[: layer.router.config.top_k]
        total = sum(odds[expert] for expert in chosen)
        row = torch.zeros_like(token)
        for expert in chosen:
            gate, up = (gate_up[expert] @ token).chunk(2)
            row += odds[expert] / total * (down[expert] @ (gate * torch.sigmoid(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "width", "expert_width"),
    [(1, 4, 2, 8, 6), (7, 5, 3, 12, 5), (33, 8, 1, 16, 24), (20, 3, 3, 7, 9), (64, 16, 4, 10, 3)],
)
def test_layer(num_tokens: int, num_experts: int, top_k: int, width: int, expert_width: int) -> None:
    torch.manual_seed(num_tokens)
    layer = make_layer(num_experts, top_k, width, expert_width, torch.float32)
    hidden_TD = torch.randn(num_tokens, width)
    torch.testing.assert_close(
        layer(hidden_TD, Run(NO_STEP, {})).double(), one_token_at_a_time(layer, hidden_TD), atol=1e-4, rtol=1e-4
    )


def test_bf16_is_within_rounding() -> None:
    torch.manual_seed(0)
    layer = make_layer(6, 2, 64, 48, torch.bfloat16)
    hidden_TD = torch.randn(30, 64, dtype=torch.bfloat16)
    expected = one_token_at_a_time(layer, hidden_TD)
    given = layer(hidden_TD, Run(NO_STEP, {}))
    assert given.dtype == torch.bfloat16
    assert (given.double() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("is_gated", [False, True])
def test_shared_experts_add_to_the_routed_ones(is_gated: bool) -> None:
    torch.manual_seed(1)
    router = RouterSpec(num_experts=4, top_k=2, is_normalized=True)
    shared = SharedExpertsSpec(width=11, is_gated=is_gated)
    layer = randomized(MoESpec(router=router, expert_width=6, shared=shared), 8)
    assert layer.shared_experts is not None
    hidden_TD = torch.randn(9, 8)

    hidden = hidden_TD.double()
    mlp = layer.shared_experts.mlp
    gate, up = (hidden @ mlp.gate_up.open.weight_eOI[0].double().T).chunk(2, dim=-1)
    shared_TD = (gate * torch.sigmoid(gate) * up) @ mlp.down.weight.double().T
    if is_gated:
        assert layer.shared_experts.gate is not None
        shared_TD *= torch.sigmoid(hidden @ layer.shared_experts.gate.weight.double().T)
    torch.testing.assert_close(
        layer(hidden_TD, Run(NO_STEP, {})).double(),
        one_token_at_a_time(layer, hidden_TD) + shared_TD,
        atol=1e-4,
        rtol=1e-4,
    )


def test_experts_with_biases_and_a_clamped_activation() -> None:
    torch.manual_seed(2)
    alpha, limit = 1.5, 0.7
    router = RouterSpec(num_experts=3, top_k=1)
    activation = ClampedSwiGLU(alpha=alpha, limit=limit)
    config = MoESpec(router=router, expert_width=5, activation=activation, has_expert_bias=True)
    experts = randomized(config, 8).experts
    gate_up_weights, down_weights = experts.gate_up.open, experts.down.open
    assert gate_up_weights.bias_eO is not None
    assert down_weights.bias_eO is not None
    rows_RD = torch.randn(7, 8)
    counts = [4, 0, 3]
    given = experts(PackedTokens(rows_RD, RowGroups(torch.tensor(counts)))).double()

    expert_of_row = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for row, expert, output in zip(rows_RD.double(), expert_of_row, given, strict=True):
        gate_up = gate_up_weights.weight_eOI[expert].double() @ row + gate_up_weights.bias_eO[expert].double()
        hidden = [
            min(gate, limit) / (1 + math.exp(-alpha * min(gate, limit))) * (max(-limit, min(up, limit)) + 1)
            for gate, up in zip(gate_up[:5].tolist(), gate_up[5:].tolist(), strict=True)
        ]
        expected = down_weights.weight_eOI[expert].double() @ torch.tensor(hidden).double()
        expected += down_weights.bias_eO[expert].double()
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[4, 0, 3], [0, 0, 0], [0, 5, 5], [1, 1, 1], []])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_experts_on_slots(counts: list[int], has_bias: bool, dtype: torch.dtype, is_packed: bool) -> None:
    """Slots give the same results as packed rows, whatever unused slots hold; the same bytes with packed weights."""
    torch.manual_seed(sum(counts))
    activation = ClampedSwiGLU(alpha=1.5, limit=0.7)
    experts = Experts(len(counts), 8, InputShare(slice(0, 6), None), activation, cpu_context(dtype), has_bias=has_bias)
    allocate_weights(experts)
    for weight in experts.parameters():
        weight.normal_(0.0, 0.5)
    if is_packed:
        experts.gate_up.pack()
        experts.down.pack()
    rows_RD = torch.randn(sum(counts), 8).to(dtype)
    slots_eSD = torch.full((len(counts), 5, 8), math.nan, dtype=dtype)
    for slots, rows in zip(slots_eSD, rows_RD.split(counts) if counts else [], strict=True):
        slots[: len(rows)] = rows
    counts_e = torch.tensor(counts, dtype=torch.int64)
    packed_RD = experts(PackedTokens(rows_RD, RowGroups(counts_e)))
    slotted_eSD = experts(SlottedTokens(slots_eSD, RowGroups(counts_e)))

    assert slotted_eSD.shape == slots_eSD.shape
    given_RD = slotted_eSD[torch.arange(5) < counts_e[:, None]]
    if is_packed:
        assert torch.equal(given_RD, packed_RD)
    else:
        torch.testing.assert_close(given_RD, packed_RD)


@pytest.mark.parametrize("experts", [[[2]] * 9, [[0], [3], [0], [1]], [[3, 0]], [[1, 2], [2, 1], [0, 3]]])
def test_dispatch_sorts_by_expert_and_combine_restores(experts: list[list[int]]) -> None:
    """Cases: all tokens to one expert, experts without tokens, one token, a full batch."""
    experts_TK = torch.tensor(experts)
    hidden_TD = torch.arange(1.0, len(experts) + 1)[:, None].repeat(1, 3)
    weights_TK = torch.rand(experts_TK.shape, generator=torch.Generator().manual_seed(0))
    dispatcher = LocalDispatcher(Placement.even(4, 1), cpu_context())
    dispatched = dispatcher.dispatch(hidden_TD, Routing(experts_TK, weights_TK), NO_STEP).wait()

    assert isinstance(dispatched.tokens, PackedTokens)
    assert dispatched.tokens.groups.counts_e.tolist() == [sum(row.count(e) for row in experts) for e in range(4)]
    sent = sorted((e, t) for t, row in enumerate(experts) for e in row)
    gather = dispatched.tokens.gather
    assert gather is not None
    rows_RD = dispatched.tokens.rows_RD[gather.indices_R // gather.divisor]
    assert rows_RD[:, 0].tolist() == [t + 1.0 for _, t in sent]

    scale_of_expert = torch.tensor([10.0, 100.0, 1000.0, 10000.0])
    expert_of_row = torch.tensor([e for e, _ in sent])
    output_RD = rows_RD * scale_of_expert[expert_of_row][:, None]
    total_TD = dispatched.combine(output_RD).wait()
    torch.testing.assert_close(total_TD, hidden_TD * (scale_of_expert[experts_TK] * weights_TK).sum(1, keepdim=True))


def test_combine_adds_in_float32() -> None:
    """Adding in bf16 would lose the small terms."""
    experts_TK = torch.tensor([[0, 1, 2]])
    routing = Routing(experts_TK, torch.tensor([[1.0, 1.0, 1.0]]))
    dispatcher = LocalDispatcher(Placement.even(3, 1), cpu_context())
    dispatched = dispatcher.dispatch(torch.ones(1, 1, dtype=torch.bfloat16), routing, NO_STEP).wait()
    output_RD = torch.tensor([[256.0], [0.9], [0.9]], dtype=torch.bfloat16)
    assert dispatched.combine(output_RD).wait().item() == 258.0
