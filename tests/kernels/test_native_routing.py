"""Routing in C++: the choice of the reference, ties, NaN and batch invariance."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import routing_checks
import torch
from paged_steps import NATIVE, same_bytes
from routing_checks import SCORINGS, random_config, random_tensors, route
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from moeserve.ops import routing as routing_ops
from moeserve.ops.backend import REFERENCE
from moeserve.ops.native import set_num_threads
from moeserve.ops.routing.interface import RouterSpec

# T tokens, D model width, E experts, K experts per token

pytestmark = pytest.mark.usefixtures("isa")

DTYPES = [torch.float32, torch.bfloat16]


router_of, reference_router = (partial(routing_ops.make, backend) for backend in (NATIVE, REFERENCE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(15))
def test_choice_and_weights_match_the_reference(seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    num_tokens, width = draw.choice([0, 1, 2, 3, 5, 17, 40]), draw.choice([1, 7, 16, 33, 100, 256])
    routing_checks.check_choice_and_weights(router_of, random_config(draw), num_tokens, width, dtype)


def test_factors_of_experts_multiply_their_weights() -> None:
    torch.manual_seed(0)
    config = RouterSpec(num_experts=9, top_k=4, is_normalized=True, has_factors=True)
    tensors, factors_E = random_tensors(config, 5, 33, torch.float32), torch.randn(9)
    experts_TK, weights_TK = routing_ops.make(NATIVE, config)(*tensors, None, factors_E)
    plain_TK, expected_TK = routing_ops.make(NATIVE, config)(*tensors)
    assert torch.equal(experts_TK, plain_TK)
    assert torch.equal(weights_TK, expected_TK * factors_E[experts_TK])
    of_reference = routing_ops.make(REFERENCE, config)(*tensors, None, factors_E)
    torch.testing.assert_close(weights_TK, of_reference[1])


@pytest.mark.parametrize(("scale", "tolerance"), [(1.0, 0.02), (1.0, 0.6), (0.01, 0.6), (100.0, 3.0)])
def test_a_sparse_mixer_is_that_of_transformers(scale: float, tolerance: float) -> None:
    """No, some or all experts are near the best one, whose logit may be negative."""
    torch.manual_seed(0)
    config = RouterSpec(num_experts=5, top_k=2, scoring="sparse_mixer", tolerance=tolerance)
    logits_TE = scale * torch.randn(300, 5)
    assert (logits_TE.amax(-1) < 0).any()
    weights_TK, experts_TK = sparsemixer(logits_TE, tolerance / 2, training=False)
    for make_router in (router_of, reference_router):
        found = make_router(config)(logits_TE, torch.eye(5), None, None)
        assert torch.equal(found[0], experts_TK)
        torch.testing.assert_close(found[1], weights_TK)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_ties_and_extremes(scoring: Any) -> None:
    routing_checks.check_ties(router_of, scoring)
    routing_checks.check_large_logits_have_finite_weights(router_of, scoring)
    routing_checks.check_experts_of_other_groups_stay_behind_any_correction(router_of)
    for bad in (float("nan"), float("inf"), -float("inf")):
        routing_checks.check_nan_reaches_the_weights_of_its_token_only(router_of, scoring, bad)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_far_apart_logits_keep_their_order(scoring: Any) -> None:
    """Scores down to the smallest float32 numbers."""
    logits = [-95.0, 0.0, -99.0, -30.0, -88.0, -90.0, -86.0, -103.0]
    if scoring == "sigmoid":
        logits[1] = -1.0
    config = RouterSpec(num_experts=8, top_k=8 if scoring == "softmax" else 3, scoring=scoring)
    experts_TK, weights_TK = route(router_of, config, [logits])
    assert experts_TK[0].tolist() == [1, 3, 6, 4, 5, 0, 2, 7][: config.top_k]
    torch.testing.assert_close(weights_TK, route(reference_router, config, [logits])[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "width"), [(64, 1024), (37, 1001)])
def test_a_token_has_the_same_bytes_alone_and_in_any_batch_on_any_threads(
    dtype: torch.dtype, num_experts: int, width: int
) -> None:
    torch.manual_seed(0)
    config = RouterSpec(num_experts=num_experts, top_k=6, scoring="sigmoid", is_normalized=True)
    hidden_TD, weight_ED, _, _ = random_tensors(config, 150, width, dtype)
    kernel = routing_ops.make(NATIVE, config)
    set_num_threads(1)
    expected = kernel(hidden_TD, weight_ED, None, None)
    for num_threads in (2, 3):
        set_num_threads(num_threads)
        for tokens in (slice(None), *(slice(first, first + size) for first in (0, 77) for size in (1, 3, 33))):
            actual = kernel(hidden_TD[tokens], weight_ED, None, None)
            assert all(map(same_bytes, actual, [part[tokens] for part in expected])), f"{num_threads}, {tokens}"


def test_top_k_above_the_number_of_experts_is_refused() -> None:
    config = RouterSpec(num_experts=3, top_k=4)
    with pytest.raises(ValueError, match="top_k=4, but there are 3 experts"):
        routing_ops.make(NATIVE, config)(*random_tensors(config, 2, 5, torch.float32))
