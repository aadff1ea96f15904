"""The MoE layer and its parts against a loop over single tokens in float64."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moeserve.layers.rotary import RotaryConfig, Rotation
from moeserve.moe.dispatch.local import LocalDispatcher
from moeserve.moe.experts import Experts
from moeserve.moe.layer import MoELayer
from moeserve.moe.router import Routing, SoftmaxRouter
from moeserve.ops.linear import choose_linear

NO_STEP = cast(Any, None)  # local dispatch does not look at it
CPU = torch.device("cpu")


def make_layer(num_experts: int, top_k: int, width: int, expert_width: int, dtype: torch.dtype) -> MoELayer:
    layer = MoELayer(
        SoftmaxRouter(width, num_experts, top_k, dtype=dtype, device=CPU),
        Experts(num_experts, width, expert_width, dtype=dtype, device=CPU),
        num_experts,
        "local",
    )
    for weight in layer.parameters():
        weight.normal_(0.0, 0.5)
    return layer


def one_token_at_a_time(layer: MoELayer, hidden_TD: Tensor) -> Tensor:
    router, gate_up, down = (w.double() for w in (layer.router.weight, layer.experts.gate_up, layer.experts.down))
    rows = []
    for token in hidden_TD.double():
        odds = [math.exp(float(row @ token)) for row in router]
        chosen = sorted(range(len(odds)), key=lambda expert: -odds[expert])[: layer.router.top_k]
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
        layer(hidden_TD, NO_STEP).double(), one_token_at_a_time(layer, hidden_TD), atol=1e-4, rtol=1e-4
    )


def test_bf16_is_as_close_as_rounding_allows() -> None:
    torch.manual_seed(0)
    layer = make_layer(6, 2, 64, 48, torch.bfloat16)
    hidden_TD = torch.randn(30, 64, dtype=torch.bfloat16)
    expected = one_token_at_a_time(layer, hidden_TD)
    given = layer(hidden_TD, NO_STEP)
    assert given.dtype == torch.bfloat16
    assert (given.double() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("experts", [[[2]] * 9, [[0], [3], [0], [1]], [[3, 0]], [[1, 2], [2, 1], [0, 3]]])
def test_dispatch_packs_by_expert_and_combine_puts_back(experts: list[list[int]]) -> None:
    """All tokens to one expert, experts without tokens, one token, a full batch."""
    experts_TK = torch.tensor(experts)
    hidden_TD = torch.arange(1.0, len(experts) + 1)[:, None].repeat(1, 3)
    weights_TK = torch.rand(experts_TK.shape)
    dispatcher = LocalDispatcher(num_experts=4)
    arrived = dispatcher.dispatch(hidden_TD, Routing(experts_TK, weights_TK), NO_STEP).wait()

    assert arrived.tokens.counts_e.tolist() == [sum(row.count(e) for row in experts) for e in range(4)]
    sent = sorted((e, t) for t, row in enumerate(experts) for e in row)
    assert arrived.tokens.rows_RD[:, 0].tolist() == [t + 1.0 for _, t in sent]

    scale_of_expert = torch.tensor([10.0, 100.0, 1000.0, 10000.0])
    expert_of_row = torch.tensor([e for e, _ in sent])
    output_RD = arrived.tokens.rows_RD * scale_of_expert[expert_of_row][:, None]
    total_TD = dispatcher.combine(output_RD, arrived.ticket).wait()
    torch.testing.assert_close(total_TD, hidden_TD * (scale_of_expert[experts_TK] * weights_TK).sum(1, keepdim=True))


def test_combine_adds_in_float32() -> None:
    """In bf16 the small contributions would vanish beside the large one."""
    experts_TK = torch.tensor([[0, 1, 2]])
    routing = Routing(experts_TK, torch.tensor([[1.0, 1.0, 1.0]]))
    dispatcher = LocalDispatcher(num_experts=3)
    arrived = dispatcher.dispatch(torch.ones(1, 1, dtype=torch.bfloat16), routing, NO_STEP).wait()
    output_RD = torch.tensor([[256.0], [0.9], [0.9]], dtype=torch.bfloat16)
    assert dispatcher.combine(output_RD, arrived.ticket).wait().item() == 258.0


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    input_TI, weight_OI = torch.randn(num_rows, 37, dtype=dtype), torch.randn(11, 37, dtype=dtype)
    given = choose_linear("cpu")(input_TI, weight_OI)
    assert given.shape == (num_rows, 11)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        given.double(), input_TI.double() @ weight_OI.double().T, atol=tolerance * 10, rtol=tolerance
    )


def test_rotation_keeps_lengths_and_depends_on_the_distance_only() -> None:
    torch.manual_seed(0)
    frequencies = RotaryConfig(head_dim=10, theta=10000.0).frequencies()
    query, key = torch.randn(1, 1, 10), torch.randn(1, 1, 10)

    def product(query_position: int, key_position: int) -> float:
        turned_query = Rotation.at(torch.tensor([query_position]), frequencies).apply(query)
        turned_key = Rotation.at(torch.tensor([key_position]), frequencies).apply(key)
        assert turned_query.norm() == pytest.approx(float(query.norm()), rel=1e-5)
        return float((turned_query * turned_key).sum())

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-2)
    assert product(0, 0) == pytest.approx(float((query * key).sum()), abs=1e-5)


def test_linear_scaling_stretches_positions() -> None:
    plain = RotaryConfig(head_dim=8, theta=10000.0).frequencies()
    stretched = RotaryConfig(head_dim=8, theta=10000.0, scaling="linear", factor=4.0).frequencies()
    torch.testing.assert_close(plain / 4, stretched)
