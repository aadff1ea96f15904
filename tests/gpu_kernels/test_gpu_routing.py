"""Routing in Triton's interpreter: experts and weights of the reference, ties, groups and NaN."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from moeserve.bench.gpu.cases import ROUTERS
from moeserve.ops.routing.interface import RouterSpec
from moeserve.ops.routing.triton import TritonRouter
from moeserve.triton_kernels.routing import route

sys.path.append(str(Path(__file__).parent.parent / "kernels"))
import routing_checks
from routing_checks import SCORINGS, random_config

KNOWN = [
    ROUTERS["DeepSeek-V3"],
    ROUTERS["DeepSeek-V2"],
    RouterSpec(num_experts=512, top_k=16, scoring="sigmoid"),
    RouterSpec(num_experts=12, top_k=3, scoring="sqrt_softplus", is_normalized=True, scale=1.5, has_correction=True),
]


@pytest.mark.parametrize("seed", range(15))
def test_experts_and_weights_equal_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    config = KNOWN[seed] if seed < len(KNOWN) else random_config(draw)
    routing_checks.check_choice_and_weights(TritonRouter, config, draw.choice([0, 1, 2, 5, 70]), 50, torch.float32)


@pytest.mark.slow_but("bias", "few experts")
@pytest.mark.parametrize(
    ("config", "num_tokens", "width", "dtype"),
    [
        (ROUTERS["DeepSeek-V3"], 2, 1100, torch.float16),
        (
            RouterSpec(num_experts=60, top_k=4, num_groups=3, num_chosen_groups=2, has_bias=True),
            3,
            1100,
            torch.float32,
        ),
        (RouterSpec(num_experts=8, top_k=2, is_normalized=True), 5, 3000, torch.float16),
    ],
    ids=["DeepSeek-V3", "bias", "few experts"],
)
def test_logits_from_parts_of_the_inputs(config: RouterSpec, num_tokens: int, width: int, dtype: torch.dtype) -> None:
    """With small integers, whose sums are exact, all bytes are those of logits from torch. Ties are many."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    hidden_TD = drawn(num_tokens, width + 8).to(dtype)[:, 8:]
    weight_ED, bias_E, correction_E = drawn(config.num_experts, width), drawn(config.num_experts), None
    if config.has_correction:
        correction_E = drawn(config.num_experts)
    logits_TE = functional.linear(hidden_TD.float(), weight_ED, bias_E)
    expected = route(logits_TE, correction_E, top_k=config.top_k, **config.kernel_arguments)
    router = TritonRouter(config)
    for _ in range(2):  # the counters of arrivals are reset
        given = router(hidden_TD, weight_ED, bias_E, correction_E)
        assert [torch.equal(*pair) for pair in zip(given, expected, strict=True)] == [True, True]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_ties_and_extremes(scoring: Any) -> None:
    routing_checks.check_ties(TritonRouter, scoring)
    routing_checks.check_large_logits_have_finite_weights(TritonRouter, scoring)
    for bad in (math.nan, -math.nan):
        routing_checks.check_nan_reaches_the_weights_of_its_token_only(TritonRouter, scoring, bad)


def test_experts_of_other_groups_stay_behind_any_correction() -> None:
    routing_checks.check_experts_of_other_groups_stay_behind_any_correction(TritonRouter)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_equal_infinite_logits_and_zeros_of_both_signs_are_ties(scoring: Any) -> None:
    rules: Any = dict(num_groups=1, num_chosen_groups=1, experts_rating_group=1, is_normalized=False, scale=1.0)
    for logits in ([math.inf] * 6, [-math.inf] * 6, [0.0, -0.0] * 3):
        experts_TK, _ = route(torch.tensor([logits]), None, top_k=3, scoring=scoring, **rules)
        assert experts_TK.tolist() == [[0, 1, 2]]
