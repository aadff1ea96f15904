"""The router against its rules written out for each expert, and against transformers' routers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from build_contexts import cpu_context
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from moeserve.layers.moe.router import Router
from moeserve.ops.routing.interface import RouterSpec

CPU = torch.device("cpu")
WIDTH = 9

CONFIGS = {
    "mixtral": RouterSpec(num_experts=5, top_k=3, is_normalized=True),
    "qwen": RouterSpec(num_experts=7, top_k=2, scale=1.0),
    "deepseek-v2": RouterSpec(num_experts=12, top_k=4, num_groups=3, num_chosen_groups=2, scale=16.0),
    "deepseek-v3": RouterSpec(
        num_experts=12,
        top_k=5,
        scoring="sigmoid",
        num_groups=4,
        num_chosen_groups=2,
        experts_rating_group=2,
        is_normalized=True,
        scale=2.5,
        has_correction=True,
    ),
    "kimi": RouterSpec(num_experts=6, top_k=3, scoring="sigmoid", is_normalized=True, scale=2.8, has_correction=True),
    "gpt-oss": RouterSpec(num_experts=6, top_k=4, scoring="softmax_of_chosen", has_bias=True),
}


def make_router(config: RouterSpec) -> Router:
    router = Router(config, WIDTH, cpu_context())
    for weight in router.parameters():
        weight.normal_(0.0, 0.5)
    return router


def by_hand(router: Router, token: Tensor) -> dict[int, float]:
    """Return the weights of one token by expert."""
    config = router.config
    bias = [0.0] * config.num_experts if router.bias is None else router.bias.tolist()
    correction = [0.0] * config.num_experts if router.correction is None else router.correction.tolist()
    logits = [float(row @ token) + add for row, add in zip(router.weight.double(), bias, strict=True)]
    match config.scoring:
        case "softmax":
            total = sum(math.exp(logit) for logit in logits)
            scores = [math.exp(logit) / total for logit in logits]
        case "sigmoid":
            scores = [1 / (1 + math.exp(-logit)) for logit in logits]
        case "softmax_of_chosen":
            scores = logits
    ranks = [score + add for score, add in zip(scores, correction, strict=True)]

    group_size = config.num_experts // config.num_groups
    groups = [range(first, first + group_size) for first in range(0, config.num_experts, group_size)]
    groups.sort(key=lambda group: -sum(sorted((ranks[e] for e in group), reverse=True)[: config.experts_rating_group]))
    eligible = [expert for group in groups[: config.num_chosen_groups] for expert in group]
    chosen = sorted(eligible, key=lambda expert: -ranks[expert])[: config.top_k]

    weights = {expert: scores[expert] for expert in chosen}
    if config.scoring == "softmax_of_chosen":
        total = sum(math.exp(logit) for logit in weights.values())
        weights = {expert: math.exp(logit) / total for expert, logit in weights.items()}
    total = sum(weights.values()) if config.is_normalized else 1.0
    return {expert: weight / total * config.scale for expert, weight in weights.items()}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routing(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    router = make_router(CONFIGS[name])
    hidden_TD = torch.randn(40, WIDTH).to(dtype)
    routing = router(hidden_TD)
    assert routing.weights_TK.dtype == torch.float32
    for token, experts, weights in zip(hidden_TD.double(), routing.experts_TK, routing.weights_TK, strict=True):
        given = dict(zip(experts.tolist(), weights.tolist(), strict=True))
        assert given == pytest.approx(by_hand(router, token), rel=1e-5)
        assert len(given) == router.config.top_k


def test_experts_are_in_descending_order() -> None:
    """`combine` adds in this order, so it must depend on the scores only."""
    torch.manual_seed(0)
    weights_TK = make_router(CONFIGS["qwen"])(torch.randn(20, WIDTH)).weights_TK
    assert weights_TK.equal(weights_TK.sort(dim=-1, descending=True).values)


@pytest.mark.parametrize(
    ("name", "reference_class", "method"),
    [
        ("deepseek-v2", DeepseekV2TopkRouter, "group_limited_greedy"),
        ("deepseek-v3", DeepseekV3TopkRouter, "noaux_tc"),
        ("kimi", DeepseekV3TopkRouter, "noaux_tc"),
    ],
)
def test_against_transformers(name: str, reference_class: type, method: str) -> None:
    torch.manual_seed(4)
    config = CONFIGS[name]
    router = make_router(config)
    reference = reference_class(
        SimpleNamespace(
            num_experts=config.num_experts,
            num_local_experts=config.num_experts,
            num_experts_per_tok=config.top_k,
            hidden_size=WIDTH,
            routed_scaling_factor=config.scale,
            topk_method=method,
            n_group=config.num_groups,
            topk_group=config.num_chosen_groups,
            norm_topk_prob=config.is_normalized,
        )
    )
    reference.weight.data.copy_(router.weight)
    if router.correction is not None:
        reference.e_score_correction_bias.copy_(router.correction)
    hidden_TD = torch.randn(200, WIDTH)
    _, weights_TK, experts_TK = reference(hidden_TD)
    expected_TE = torch.zeros(200, config.num_experts).scatter(1, experts_TK, weights_TK.detach())
    routing = router(hidden_TD)
    given_TE = torch.zeros(200, config.num_experts).scatter(1, routing.experts_TK, routing.weights_TK)
    torch.testing.assert_close(given_TE, expected_TE, atol=1e-5, rtol=1e-5)


def test_zero_scores_give_finite_weights() -> None:
    router = make_router(CONFIGS["kimi"])
    router.weight.fill_(-1e4)
    assert router(torch.full((1, WIDTH), 1.0)).weights_TK.isfinite().all()
