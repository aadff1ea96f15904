"""Routing in C++: the choice of the reference, ties, NaN and batch invariance."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from paged_steps import KERNELS, same_bytes
from torch import Tensor

from moeserve.ops.interfaces import RouterConfig
from moeserve.ops.threads import set_num_threads
from moeserve.ops.torch.table import TORCH_KERNELS

# T tokens, D model width, E experts, K experts per token

pytestmark = pytest.mark.usefixtures("isa")

DTYPES = [torch.float32, torch.bfloat16]


def random_config(draw: random.Random) -> RouterConfig:
    num_groups = draw.choice([1, 1, 2, 3, 8])
    num_experts = num_groups * draw.choice([2, 3, 5, 8, 16, 20])
    num_chosen_groups = draw.randint(1, num_groups)
    return RouterConfig(
        num_experts=num_experts,
        top_k=draw.randint(1, min(9, num_experts // num_groups * num_chosen_groups)),
        scoring=draw.choice(["softmax", "sigmoid", "softmax_of_chosen"]),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        experts_rating_group=draw.choice([1, 2]),
        is_normalized=draw.choice([False, True]),
        scale=draw.choice([1.0, 2.5]),
        has_bias=draw.choice([False, True]),
        has_correction=draw.choice([False, True]),
    )


def random_tensors(config: RouterConfig, num_tokens: int, width: int, dtype: torch.dtype) -> list[Any]:
    """Return hidden states, weight, bias and correction."""
    num_experts = config.num_experts
    return [
        torch.randn(num_tokens, width + 3).to(dtype)[:, 3:],
        torch.randn(num_experts, width) * width**-0.5,
        torch.randn(num_experts) if config.has_bias else None,
        torch.randn(num_experts) * 0.1 if config.has_correction else None,
    ]


def gaps(config: RouterConfig, tensors: list[Any]) -> Tensor:
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(20))
def test_choice_and_weights_match_the_reference(seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    config = random_config(draw)
    num_tokens, width = draw.choice([0, 1, 2, 3, 5, 17, 40]), draw.choice([1, 7, 16, 33, 100, 256])
    tensors = random_tensors(config, 4 * num_tokens, width, dtype)
    is_clear_T = gaps(config, tensors) > 2e-6  # rounding cannot change the order
    tensors[0] = tensors[0][is_clear_T][:num_tokens]
    assert len(tensors[0]) >= 0.5 * num_tokens
    experts_TK, weights_TK = KERNELS.make_router(config)(*tensors)
    expected_experts_TK, expected_weights_TK = TORCH_KERNELS.make_router(config)(*tensors)
    assert experts_TK.dtype == torch.int64
    assert weights_TK.dtype == torch.float32
    assert torch.equal(experts_TK, expected_experts_TK)
    torch.testing.assert_close(weights_TK, expected_weights_TK, atol=1e-6, rtol=1e-5)


def logits_as_hidden(logits: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Return hidden states and a weight with exactly these logits."""
    return torch.tensor(logits), torch.eye(len(logits[0]))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_chosen"])
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
def test_ties_between_experts_go_to_the_lowest_index(
    scoring: Any, logits: list[float], top_k: int, chosen: list[int]
) -> None:
    config = RouterConfig(num_experts=len(logits), top_k=top_k, scoring=scoring)
    hidden_TD, weight_ED = logits_as_hidden([logits] * 3)
    experts_TK, _ = KERNELS.make_router(config)(hidden_TD, weight_ED, None, None)
    assert experts_TK.tolist() == [chosen] * 3


@pytest.mark.parametrize("experts_rating_group", [1, 2])
def test_ties_between_groups_go_to_the_lowest_index(experts_rating_group: Any) -> None:
    config = RouterConfig(
        num_experts=20,
        top_k=3,
        scoring="softmax_of_chosen",
        num_groups=10,
        num_chosen_groups=2,
        experts_rating_group=experts_rating_group,
    )
    hidden_TD, weight_ED = logits_as_hidden([[1.0, 2.0] * 10, [0.0, 0.0] * 8 + [5.0, 5.0] * 2])
    experts_TK, _ = KERNELS.make_router(config)(hidden_TD, weight_ED, None, None)
    assert experts_TK.tolist() == [[1, 3, 0], [16, 17, 18]]


def test_experts_of_other_groups_stay_behind_any_correction() -> None:
    """An expert of a chosen group precedes all others even with the lowest possible score."""
    config = RouterConfig(num_experts=4, top_k=2, num_groups=2, num_chosen_groups=1, has_correction=True)
    hidden_TD, weight_ED = logits_as_hidden([[0.0, 5.0, 1.0, 2.0]])
    correction_E = torch.tensor([-3e38, 10.0, 9.0, 9.0])
    experts_TK, _ = KERNELS.make_router(config)(hidden_TD, weight_ED, None, correction_E)
    assert experts_TK.tolist() == [[1, 0]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_far_apart_logits_keep_their_order(scoring: Any) -> None:
    """Scores down to the smallest float32 numbers."""
    logits = [-95.0, 0.0, -99.0, -30.0, -88.0, -90.0, -86.0, -103.0]
    if scoring == "sigmoid":
        logits[1] = -1.0
    config = RouterConfig(num_experts=8, top_k=8 if scoring == "softmax" else 3, scoring=scoring)
    hidden_TD, weight_ED = logits_as_hidden([logits])
    experts_TK, weights_TK = KERNELS.make_router(config)(hidden_TD, weight_ED, None, None)
    assert experts_TK[0].tolist() == [1, 3, 6, 4, 5, 0, 2, 7][: config.top_k]
    huge_TD, weight_ED = logits_as_hidden([[3e38, -3e38, 1e4, -1e4, 0, 0, 0, 0], [-3e38, -1e30, *[-1e4] * 6]])
    assert KERNELS.make_router(config)(huge_TD, weight_ED, None, None)[1].isfinite().all()
    torch.testing.assert_close(weights_TK, TORCH_KERNELS.make_router(config)(hidden_TD, weight_ED, None, None)[1])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_chosen"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_reaches_the_weights_of_its_token_only(scoring: Any, bad: float) -> None:
    torch.manual_seed(0)
    config = RouterConfig(num_experts=40, top_k=4, scoring=scoring, num_groups=4, num_chosen_groups=2)
    hidden_TD, weight_ED, _, _ = random_tensors(config, 30, 50, torch.float32)
    kernel = KERNELS.make_router(config)
    experts_TK, weights_TK = kernel(hidden_TD, weight_ED, None, None)
    hidden_TD[7, 20], hidden_TD[7, 21] = bad, -bad
    bad_experts_TK, bad_weights_TK = kernel(hidden_TD, weight_ED, None, None)
    assert bad_weights_TK[7].isnan().any()
    assert len(set(bad_experts_TK[7].tolist())) == 4
    assert 0 <= bad_experts_TK[7].min() <= bad_experts_TK[7].max() < 40
    others = [*range(7), *range(8, 30)]
    assert same_bytes(bad_experts_TK[others], experts_TK[others])
    assert same_bytes(bad_weights_TK[others], weights_TK[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "width"), [(64, 1024), (37, 1001)])
def test_a_token_has_the_same_bytes_alone_and_in_any_batch_on_any_threads(
    dtype: torch.dtype, num_experts: int, width: int
) -> None:
    torch.manual_seed(0)
    config = RouterConfig(num_experts=num_experts, top_k=6, scoring="sigmoid", is_normalized=True)
    hidden_TD, weight_ED, _, _ = random_tensors(config, 150, width, dtype)
    kernel = KERNELS.make_router(config)
    set_num_threads(1)
    expected = kernel(hidden_TD, weight_ED, None, None)
    for num_threads in (2, 3):
        set_num_threads(num_threads)
        for tokens in (slice(None), *(slice(first, first + size) for first in (0, 77) for size in (1, 3, 33))):
            actual = kernel(hidden_TD[tokens], weight_ED, None, None)
            assert all(map(same_bytes, actual, [part[tokens] for part in expected])), f"{num_threads}, {tokens}"


def test_top_k_above_the_number_of_experts_is_refused() -> None:
    config = RouterConfig(num_experts=3, top_k=4)
    with pytest.raises(ValueError, match="top_k=4, but there are 3 experts"):
        KERNELS.make_router(config)(*random_tensors(config, 2, 5, torch.float32))
