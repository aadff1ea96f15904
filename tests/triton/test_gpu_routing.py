"""Routing in Triton's interpreter: experts and weights of the reference, ties, groups and NaN."""

from __future__ import annotations

import math
import random
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.ops.interfaces import RouterConfig
from moeserve.ops.torch.routing import TorchRouter
from moeserve.triton_kernels.routing import route

# T tokens, E experts, K experts per token

SCORINGS = ["softmax", "sigmoid", "softmax_of_chosen"]


def routed(logits_TE: Tensor, correction_E: Tensor | None, config: RouterConfig) -> tuple[Tensor, Tensor]:
    rules = asdict(config)
    for name in ("num_experts", "has_bias", "has_correction"):
        del rules[name]
    return route(logits_TE, correction_E, **rules)


def reference(logits_TE: Tensor, correction_E: Tensor | None, config: RouterConfig) -> tuple[Tensor, Tensor]:
    """Return the experts and weights of the torch router for exactly these logits."""
    return TorchRouter(config)(logits_TE, torch.eye(logits_TE.shape[1]), None, correction_E)


def random_config(draw: random.Random) -> RouterConfig:
    num_groups = draw.choice([1, 1, 2, 3, 8])
    group_size = draw.choice([2, 3, 5, 8, 16, 20])
    num_chosen_groups = draw.randint(1, num_groups)
    return RouterConfig(
        num_experts=num_groups * group_size,
        top_k=draw.randint(1, min(16, group_size * num_chosen_groups)),
        scoring=draw.choice(SCORINGS),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        experts_rating_group=draw.choice([1, 2]),
        is_normalized=draw.choice([False, True]),
        scale=draw.choice([1.0, 2.5]),
        has_correction=draw.choice([False, True]),
    )


def is_clear(logits_TE: Tensor, correction_E: Tensor | None, config: RouterConfig) -> Tensor:
    """Return a mask [T] of the tokens for which rounding cannot change the order of the compared numbers."""
    scores_TE = logits_TE.double()
    if config.scoring == "softmax":
        scores_TE = scores_TE.softmax(-1)
    elif config.scoring == "sigmoid":
        scores_TE = scores_TE.sigmoid()
    ranks_TE = scores_TE if correction_E is None else scores_TE + correction_E
    ratings_TG = (
        ranks_TE.unflatten(-1, (config.num_groups, -1)).topk(config.experts_rating_group, dim=-1).values.sum(-1)
    )
    gaps = [numbers.sort(-1).values.diff(dim=-1).abs() for numbers in (ranks_TE, ratings_TG)]
    return torch.cat(gaps, dim=-1).amin(-1) > 1e-6


KNOWN = [
    RouterConfig(
        num_experts=256,
        top_k=8,
        scoring="sigmoid",
        num_groups=8,
        num_chosen_groups=4,
        experts_rating_group=2,
        is_normalized=True,
        scale=2.5,
        has_correction=True,
    ),  # DeepSeek-V3
    RouterConfig(num_experts=160, top_k=6, num_groups=8, num_chosen_groups=3, scale=16.0),  # DeepSeek-V2
    RouterConfig(num_experts=512, top_k=16, scoring="sigmoid"),
]


@pytest.mark.parametrize("seed", range(15))
def test_experts_and_weights_equal_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    config = KNOWN[seed] if seed < len(KNOWN) else random_config(draw)
    num_tokens = draw.choice([0, 1, 2, 5])
    correction_E = torch.randn(config.num_experts, generator=generator) * 0.1 if config.has_correction else None
    wide_TE = torch.randn(8 * num_tokens, config.num_experts + 3, generator=generator)
    logits_TE = wide_TE[is_clear(wide_TE[:, 3:], correction_E, config)][:num_tokens, 3:]  # strided rows
    assert len(logits_TE) >= 0.5 * num_tokens
    experts_TK, weights_TK = routed(logits_TE, correction_E, config)
    expected_experts_TK, expected_weights_TK = reference(logits_TE, correction_E, config)
    assert (experts_TK.dtype, weights_TK.dtype) == (torch.int64, torch.float32)
    assert torch.equal(experts_TK, expected_experts_TK)
    torch.testing.assert_close(weights_TK, expected_weights_TK, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(
    ("logits", "top_k", "chosen"),
    [
        ([1.0] * 40, 5, [0, 1, 2, 3, 4]),
        ([0.0, -0.0, 0.0, -0.0], 3, [0, 1, 2]),
        ([0.5, 2.0, 0.5, 2.0, 2.0, 0.5], 4, [1, 3, 4, 0]),
        ([*[-1.0] * 30, 3.0, *[-1.0] * 9, 3.0], 3, [30, 40, 0]),
        ([3.0, 2.0, 2.0, 2.0], 2, [0, 1]),
    ],
)
def test_ties_go_to_the_lowest_expert(scoring: Any, logits: list[float], top_k: int, chosen: list[int]) -> None:
    config = RouterConfig(num_experts=len(logits), top_k=top_k, scoring=scoring)
    experts_TK, _ = routed(torch.tensor([logits] * 2), None, config)
    assert experts_TK.tolist() == [chosen] * 2


@pytest.mark.parametrize("experts_rating_group", [1, 2])
def test_ties_go_to_the_lowest_group(experts_rating_group: Any) -> None:
    config = RouterConfig(
        num_experts=20,
        top_k=3,
        scoring="softmax_of_chosen",
        num_groups=10,
        num_chosen_groups=2,
        experts_rating_group=experts_rating_group,
    )
    experts_TK, _ = routed(torch.tensor([[1.0, 2.0] * 10, [0.0, 0.0] * 8 + [5.0, 5.0] * 2]), None, config)
    assert experts_TK.tolist() == [[1, 3, 0], [16, 17, 18]]


def test_expert_with_the_lowest_rank_precedes_those_of_other_groups() -> None:
    config = RouterConfig(num_experts=4, top_k=2, num_groups=2, num_chosen_groups=1, has_correction=True)
    correction_E = torch.tensor([-3e38, 10.0, 9.0, 9.0])
    experts_TK, _ = routed(torch.tensor([[0.0, 5.0, 1.0, 2.0]]), correction_E, config)
    assert experts_TK.tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("scoring", "num_bad", "sign"),
    [("softmax", 1, 1.0), ("softmax", 40, -1.0), ("sigmoid", 3, -1.0), ("softmax_of_chosen", 40, 1.0)],
)
def test_nan_affects_its_token_only(scoring: Any, num_bad: int, sign: float) -> None:
    config = RouterConfig(num_experts=40, top_k=4, scoring=scoring, num_groups=4, num_chosen_groups=2)
    logits_TE = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    experts_TK, weights_TK = routed(logits_TE, None, config)
    logits_TE[2, 40 - num_bad :] = math.copysign(math.nan, sign)
    bad_experts_TK, bad_weights_TK = routed(logits_TE, None, config)
    assert bad_weights_TK[2].isnan().any()
    assert len(set(bad_experts_TK[2].tolist())) == 4
    assert 0 <= bad_experts_TK[2].min() <= bad_experts_TK[2].max() < 40
    others = [0, 1, 3, 4]
    assert torch.equal(bad_experts_TK[others], experts_TK[others])
    assert torch.equal(bad_weights_TK[others], weights_TK[others])


@pytest.mark.parametrize("scoring", SCORINGS)
def test_large_and_infinite_logits(scoring: Any) -> None:
    """Large logits have finite weights, and infinite ones valid experts."""
    logits_TE = torch.tensor([[3e38, -3e38, 1e4, -1e4], [-3e38, -1e30, -1e4, -1e4]])
    config = RouterConfig(num_experts=4, top_k=4, scoring=scoring, is_normalized=True)
    assert routed(logits_TE, None, config)[1].isfinite().all()
    config = RouterConfig(num_experts=6, top_k=3, scoring=scoring)
    for bad in (math.inf, -math.inf):
        assert routed(torch.full((1, 6), bad), None, config)[0].tolist() == [[0, 1, 2]]
