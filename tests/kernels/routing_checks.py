"""Checks of any implementation of `RouteTokens`: the choice of the reference, ties, and NaN."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from paged_steps import same_bytes
from torch import Tensor

from moeserve.ops.routing.interface import RouterSpec, RouteTokens
from moeserve.ops.routing.reference import TorchRouter

# T tokens, D model width, E experts, K experts per token, G groups

MakeRouter = Callable[[RouterSpec], RouteTokens]
SCORINGS: tuple[Any, ...] = ("softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen")


def random_config(draw: random.Random) -> RouterSpec:
    num_groups = draw.choice([1, 1, 2, 3, 8])
    num_experts = num_groups * draw.choice([2, 3, 5, 8, 16, 20])
    num_chosen_groups = draw.randint(1, num_groups)
    return RouterSpec(
        num_experts=num_experts,
        top_k=draw.randint(1, min(16, num_experts // num_groups * num_chosen_groups)),
        scoring=draw.choice(SCORINGS),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        experts_rating_group=draw.choice([1, 2]),
        is_normalized=draw.choice([False, True]),
        scale=draw.choice([1.0, 2.5]),
        has_bias=draw.choice([False, True]),
        has_correction=draw.choice([False, True]),
    )


def random_tensors(config: RouterSpec, num_tokens: int, width: int, dtype: torch.dtype) -> list[Any]:
    """Return hidden states, weight, bias and correction."""
    num_experts = config.num_experts
    return [
        torch.randn(num_tokens, width + 3).to(dtype)[:, 3:],
        torch.randn(num_experts, width) * width**-0.5,
        torch.randn(num_experts) if config.has_bias else None,
        torch.randn(num_experts) * 0.1 if config.has_correction else None,
    ]


def gaps(config: RouterSpec, tensors: list[Any]) -> Tensor:
    """Return the least difference between any two numbers that are compared for a token: scores, and group scores."""
    hidden_TD, weight_ED, bias_E, correction_E = (None if t is None else t.double() for t in tensors)
    scores_TE = hidden_TD @ weight_ED.T + (0 if bias_E is None else bias_E)
    if config.scoring == "softmax":
        scores_TE = scores_TE.softmax(-1)
    elif config.scoring == "sigmoid":
        scores_TE = scores_TE.sigmoid()
    ranks_TE = scores_TE + (0 if correction_E is None else correction_E)
    groups_TGe = ranks_TE.unflatten(-1, (config.num_groups, -1))
    ratings_TG = groups_TGe.topk(config.experts_rating_group, dim=-1).values.sum(-1)
    smallest = [numbers.sort(-1).values.diff(dim=-1).abs() for numbers in (ranks_TE, ratings_TG)]
    return torch.cat(smallest, dim=-1).amin(-1)


def check_choice_and_weights(
    make_router: MakeRouter, config: RouterSpec, num_tokens: int, width: int, dtype: torch.dtype
) -> None:
    tensors = random_tensors(config, 100 * num_tokens, width, dtype)
    is_clear_T = gaps(config, tensors) > 2e-6  # rounding cannot change the order
    tensors[0] = tensors[0][is_clear_T][:num_tokens]
    assert len(tensors[0]) >= 0.5 * num_tokens
    experts_TK, weights_TK = make_router(config)(*tensors)
    expected_experts_TK, expected_weights_TK = TorchRouter(config)(*tensors)
    assert (experts_TK.dtype, weights_TK.dtype) == (torch.int64, torch.float32)
    assert torch.equal(experts_TK, expected_experts_TK)
    torch.testing.assert_close(weights_TK, expected_weights_TK, atol=1e-6, rtol=1e-5)


def route(
    make_router: MakeRouter, config: RouterSpec, logits: list[list[float]], correction_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Route tokens with exactly these finite logits."""
    return make_router(config)(torch.tensor(logits), torch.eye(len(logits[0])), None, correction_E)


def check_ties(make_router: MakeRouter, scoring: Any) -> None:
    """Ties between experts, and between groups, go to the lowest index."""
    for logits, chosen in (
        ([1.0] * 40, [0, 1, 2, 3, 4]),
        ([0.5, 2.0, 0.5, 2.0, 2.0, 0.5], [1, 3, 4, 0]),
        ([*[-1.0] * 30, 3.0, *[-1.0] * 9, 3.0], [30, 40, 0]),
        ([3.0, 2.0, 2.0, 2.0], [0, 1]),
    ):
        config = RouterSpec(num_experts=len(logits), top_k=len(chosen), scoring=scoring)
        assert route(make_router, config, [logits] * 3)[0].tolist() == [chosen] * 3
    ratings: tuple[Any, Any] = (1, 2)
    for experts_rating_group in ratings:
        groups: Any = dict(num_groups=10, num_chosen_groups=2, experts_rating_group=experts_rating_group)
        config = RouterSpec(num_experts=20, top_k=3, scoring="softmax_of_chosen", **groups)
        experts_TK, _ = route(make_router, config, [[1.0, 2.0] * 10, [0.0, 0.0] * 8 + [5.0, 5.0] * 2])
        assert experts_TK.tolist() == [[1, 3, 0], [16, 17, 18]]


def check_experts_of_other_groups_stay_behind_any_correction(make_router: MakeRouter) -> None:
    """An expert of a chosen group precedes all others even with the lowest possible score."""
    config = RouterSpec(num_experts=4, top_k=2, num_groups=2, num_chosen_groups=1, has_correction=True)
    correction_E = torch.tensor([-3e38, 10.0, 9.0, 9.0])
    assert route(make_router, config, [[0.0, 5.0, 1.0, 2.0]], correction_E)[0].tolist() == [[1, 0]]


def check_large_logits_have_finite_weights(make_router: MakeRouter, scoring: Any) -> None:
    config = RouterSpec(num_experts=4, top_k=4, scoring=scoring, is_normalized=True)
    logits = [[3e38, -3e38, 1e4, -1e4], [-3e38, -1e30, -1e4, -1e4]]
    assert route(make_router, config, logits)[1].isfinite().all()


def check_nan_reaches_the_weights_of_its_token_only(make_router: MakeRouter, scoring: Any, bad: float) -> None:
    torch.manual_seed(0)
    config = RouterSpec(num_experts=40, top_k=4, scoring=scoring, num_groups=4, num_chosen_groups=2)
    hidden_TD, weight_ED, _, _ = random_tensors(config, 6, 50, torch.float32)
    router = make_router(config)
    experts_TK, weights_TK = router(hidden_TD, weight_ED, None, None)
    hidden_TD[2, 20], hidden_TD[2, 21] = bad, -bad
    bad_experts_TK, bad_weights_TK = router(hidden_TD, weight_ED, None, None)
    assert bad_weights_TK[2].isnan().any()
    assert len(set(bad_experts_TK[2].tolist())) == 4
    assert 0 <= bad_experts_TK[2].min() <= bad_experts_TK[2].max() < 40
    others = [0, 1, 3, 4, 5]
    assert same_bytes(bad_experts_TK[others], experts_TK[others])
    assert same_bytes(bad_weights_TK[others], weights_TK[others])
