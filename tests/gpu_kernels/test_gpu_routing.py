"""Routing in Triton's interpreter: experts and weights of the reference, ties, groups and NaN."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.bench.gpu.costs import DEEPSEEK_V3_ROUTER
from moeserve.ops.interfaces import RouterConfig
from moeserve.ops.triton.table import TritonRouter
from moeserve.triton_kernels.routing import route

sys.path.append(str(Path(__file__).parent.parent / "kernels"))
import routing_checks
from routing_checks import SCORINGS, random_config

KNOWN = [
    DEEPSEEK_V3_ROUTER,
    RouterConfig(num_experts=160, top_k=6, num_groups=8, num_chosen_groups=3, scale=16.0),  # DeepSeek-V2
    RouterConfig(num_experts=512, top_k=16, scoring="sigmoid"),
]


@pytest.mark.parametrize("seed", range(15))
def test_experts_and_weights_equal_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    config = KNOWN[seed] if seed < len(KNOWN) else random_config(draw)
    routing_checks.check_choice_and_weights(TritonRouter, config, draw.choice([0, 1, 2, 5]), 50, torch.float32)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_ties_and_extremes(scoring: Any) -> None:
    routing_checks.check_ties(TritonRouter, scoring)
    routing_checks.check_large_logits_have_finite_weights(TritonRouter, scoring)
    routing_checks.check_experts_of_other_groups_stay_behind_any_correction(TritonRouter)
    for bad in (math.nan, -math.nan):
        routing_checks.check_nan_reaches_the_weights_of_its_token_only(TritonRouter, scoring, bad)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_equal_infinite_logits_and_zeros_of_both_signs_are_ties(scoring: Any) -> None:
    rules: Any = dict(num_groups=1, num_chosen_groups=1, experts_rating_group=1, is_normalized=False, scale=1.0)
    for logits in ([math.inf] * 6, [-math.inf] * 6, [0.0, -0.0] * 3):
        experts_TK, _ = route(torch.tensor([logits]), None, top_k=3, scoring=scoring, **rules)
        assert experts_TK.tolist() == [[0, 1, 2]]
