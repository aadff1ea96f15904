"""Routing on a GPU: the top-k experts of each token and their weights.

One program chooses the experts of a token from its logits. With the router's weights, several programs compute the
logits of a token first, each from a part of the inputs, and the last of them adds the parts and chooses.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.arrivals import is_last_to_arrive
from moeserve.triton_kernels.sizes import ceil_div, next_power_of_2

# T tokens, D model width, E experts, K experts per token, G groups of experts, S experts of one group

SCORINGS = ("softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen", "sqrt_softplus")
MAX_EXPERTS = 4096  # they fit the registers of one program
MAX_WEIGHED_TOKENS = 64  # with weights, which each token reads from the L2 cache
MAX_WEIGHED_PRODUCTS = 2**23
MAX_PARTS = 2**15  # logits from parts of the inputs, which one program adds
TILE_SIZE = 4096  # weights that a program holds at a time

TINY = tl.constexpr(1e-20)  # avoids a division by zero if all weights are zero
LOWEST_KEY = tl.constexpr(-(2**31))  # of an expert whose group is not selected; above TAKEN
TAKEN = tl.constexpr(-(2**63))  # rank of an expert or group that is already selected, or does not exist
LOW_BITS = tl.constexpr(2**32 - 1)


def can_weigh(hidden_TD: Tensor, weight_ED: Tensor) -> bool:
    """Return True if `route` takes weights for these tokens, and so few that this saves time."""
    return len(hidden_TD) <= MAX_WEIGHED_TOKENS and len(hidden_TD) * weight_ED.numel() <= MAX_WEIGHED_PRODUCTS


def route(
    rows: Tensor,
    correction_E: Tensor | None,
    *,
    weight_ED: Tensor | None = None,
    bias_E: Tensor | None = None,
    arrivals_T: Tensor | None = None,
    top_k: int,
    scoring: str,
    num_groups: int = 1,
    num_chosen_groups: int = 1,
    experts_rating_group: int = 1,
    is_normalized: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Select the experts of each token and compute their weights. `RouterSpec` describes the settings.

    Ties between experts, and between groups, go to the lowest index. NaN counts as larger than any number: the weights
    of its token contain NaN, and its K experts are still distinct.

    Memory moved: T * (4 * E + 12 * K) bytes. About 2 * K * E comparisons and E exponentials for each token, in K
    dependent steps, which bound the time. With weights also 4 * E * D bytes, and from the L2 cache T times as many.

    Args:
        rows: logits [T, E] float32, with the bias; or with weights hidden states [T, D]. Rows are contiguous.
        weight_ED: float32, contiguous; None: the rows are logits. See `can_weigh`.
        bias_E: float32, contiguous; only with weights.
        arrivals_T: [MAX_WEIGHED_TOKENS] int32, zeros before and after; only with weights.
        correction_E: float32, contiguous, added to the scores for the selection, not for the weights.
        scoring: one of SCORINGS.

    Returns:
        Experts [T, K] int64, best first, and their weights [T, K] float32.
    """
    has_weights = weight_ED is not None
    num_tokens, num_experts = rows.shape[0], (rows if weight_ED is None else weight_ED).shape[0 if has_weights else 1]
    experts_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=rows.device)
    weights_TK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=rows.device)
    if num_tokens == 0:  # an empty grid cannot be launched
        return experts_TK, weights_TK
    options = _options(
        scoring, num_experts, num_groups, num_chosen_groups, experts_rating_group, top_k, rows.shape[1], has_weights
    )
    partial_TPE = None
    if has_weights:
        partial_TPE = rows.new_empty(num_tokens, options["NUM_SPLITS"], num_experts, dtype=torch.float32)
    route_kernel[num_tokens, options["NUM_SPLITS"]](
        rows,
        weight_ED,
        bias_E,
        partial_TPE,
        arrivals_T,
        correction_E,
        experts_TK,
        weights_TK,
        rows.stride(0),
        scale,
        IS_NORMALIZED=is_normalized,
        **options,
    )
    return experts_TK, weights_TK


@functools.cache
def _options(
    scoring: str,
    num_experts: int,
    num_groups: int,
    num_chosen_groups: int,
    experts_rating_group: int,
    top_k: int,
    num_inputs: int,
    has_weights: bool,
) -> dict[str, Any]:
    """Return the compile-time arguments and options of `route`. Rules that no kernel has are an error."""
    assert scoring in SCORINGS, f"scoring={scoring!r}"
    assert num_experts <= MAX_EXPERTS, f"{num_experts} experts do not fit one program"
    assert num_experts % num_groups == 0, f"{num_experts} experts in {num_groups} groups"
    assert 1 <= num_chosen_groups <= num_groups, f"{num_chosen_groups} of {num_groups} groups"
    group_size = num_experts // num_groups
    assert 1 <= top_k <= group_size * num_chosen_groups, f"top_k={top_k} of {num_chosen_groups} x {group_size} experts"
    assert experts_rating_group in (1, 2), f"experts_rating_group={experts_rating_group}"
    assert num_groups == 1 or experts_rating_group <= group_size, f"groups of {group_size} rated by two"
    sizes = launch_sizes(num_experts, num_groups, top_k)
    return {
        "NUM_INPUTS": num_inputs,
        "NUM_GROUPS": num_groups,
        "GROUP_SIZE": group_size,
        "TOP_K": top_k,
        "SCORING": scoring,
        "NUM_CHOSEN_GROUPS": num_chosen_groups,
        "EXPERTS_RATING_GROUP": experts_rating_group,
        **(weighing_sizes(sizes, num_inputs) if has_weights else sizes),
    }


def launch_sizes(num_experts: int, num_groups: int, top_k: int) -> dict[str, int]:
    """Return the powers of two that hold groups, experts of a group and selected experts, and the number of warps."""
    block_groups = next_power_of_2(num_groups)
    block_size = next_power_of_2(num_experts // num_groups)
    return {
        "BLOCK_G": block_groups,
        "BLOCK_S": block_size,
        "BLOCK_K": next_power_of_2(top_k),
        "BLOCK_D": 1,
        "NUM_SPLITS": 1,
        # One warp reduces without shared memory.
        "num_warps": max(block_groups * block_size // 512, 1),
    }


def weighing_sizes(sizes: dict[str, int], width: int) -> dict[str, int]:
    """Return `launch_sizes` for programs that also compute logits from hidden states of this width."""
    num_experts = sizes["BLOCK_G"] * sizes["BLOCK_S"]
    block = max(TILE_SIZE // num_experts, 8)
    num_steps = max(ceil_div(width, MAX_PARTS // num_experts * block), 2)
    return sizes | {"BLOCK_D": block, "NUM_SPLITS": ceil_div(width, num_steps * block), "num_warps": 4}


@triton.jit
def _order_keys(numbers):
    """Return int32 keys that order like the float32 numbers, with NaN above all."""
    bits = (numbers + 0.0).to(tl.int32, bitcast=True)  # adding zero makes -0.0 equal to 0.0
    keys = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where(numbers == numbers, keys, 0x7FFFFFFF)


@triton.jit
def _numbers_of(keys):
    """Return the float32 numbers of keys: the inverse of `_order_keys`."""
    return tl.where(keys >= 0, keys, keys ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _with_index(keys, indices):
    """Return distinct int64 ranks: higher keys rank higher, and among equal keys lower indices."""
    return keys.to(tl.int64) * (LOW_BITS + 1) - indices + LOW_BITS


@triton.jit
def _index_of(ranks):
    """Return the indices of ranks made by `_with_index`."""
    return (~ranks & LOW_BITS).to(tl.int32)


@triton.jit
def _sigmoid(numbers):
    power = tl.exp(-tl.abs(numbers))  # at most 1, so it cannot overflow
    return tl.where(numbers > 0.0, 1.0, power) / (1.0 + power)


@triton.jit
def route_kernel(
    rows_ptr,  # logits [T, E], or with weights hidden states [T, D]; row_stride elements apart
    weight_ptr,  # [E, D], or None
    bias_ptr,  # [E], or None
    partial_ptr,  # [T, NUM_SPLITS, E]: logits from parts of the inputs; only with weights
    arrivals_ptr,  # int32 for each token; only with weights
    correction_ptr,  # [E], or None
    experts_ptr,  # [T, K]
    weights_ptr,  # [T, K]
    row_stride,
    scale,
    NUM_INPUTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    EXPERTS_RATING_GROUP: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,  # inputs at a time; only with weights
    NUM_SPLITS: tl.constexpr,  # programs of a token; more than one only with weights
):
    token = tl.program_id(0).to(tl.int64)  # token * stride can exceed 2**31
    groups = tl.arange(0, BLOCK_G)
    members = tl.arange(0, BLOCK_S)
    experts = groups[:, None] * GROUP_SIZE + members[None, :]
    is_expert = (groups < NUM_GROUPS)[:, None] & (members < GROUP_SIZE)[None, :]

    row_ptr = rows_ptr + token * row_stride
    if weight_ptr is None:
        scores = tl.load(row_ptr + experts, mask=is_expert, other=float("-inf"))
    else:
        NUM_EXPERTS: tl.constexpr = NUM_GROUPS * GROUP_SIZE
        STEPS: tl.constexpr = (NUM_INPUTS + NUM_SPLITS * BLOCK_D - 1) // (NUM_SPLITS * BLOCK_D)
        split = tl.program_id(1)
        products = tl.zeros([BLOCK_G, BLOCK_S, BLOCK_D], tl.float32)
        for step in tl.static_range(STEPS):
            inputs = (split * STEPS + step) * BLOCK_D + tl.arange(0, BLOCK_D)
            is_input = inputs < NUM_INPUTS
            row = tl.load(row_ptr + inputs, mask=is_input, other=0.0).to(tl.float32)
            weight_ptrs = weight_ptr + experts[:, :, None] * NUM_INPUTS + inputs
            products += row * tl.load(weight_ptrs, mask=is_expert[:, :, None] & is_input, other=0.0)
        part_ptr = partial_ptr + token * NUM_SPLITS * NUM_EXPERTS
        tl.store(part_ptr + split * NUM_EXPERTS + experts, tl.sum(products, axis=2), mask=is_expert)
        if not is_last_to_arrive(arrivals_ptr + token, NUM_SPLITS):
            return
        scores = tl.zeros([BLOCK_G, BLOCK_S], tl.float32)
        if bias_ptr is not None:
            scores += tl.load(bias_ptr + experts, mask=is_expert, other=0.0)
        for part in tl.static_range(NUM_SPLITS):
            scores += tl.load(part_ptr + part * NUM_EXPERTS + experts, mask=is_expert, other=0.0, cache_modifier=".cg")
        scores = tl.where(is_expert, scores, float("-inf"))
    if SCORING == "softmax":
        powers = tl.where(is_expert, tl.exp(scores - tl.max(scores)), 0.0)
        scores = powers / tl.sum(powers)
    elif SCORING == "sigmoid":
        scores = _sigmoid(scores)
    elif SCORING == "sqrt_softplus":
        power = tl.exp(-tl.abs(scores))
        excess = tl.where(power < 2.0**-12, power, tl.log(1.0 + power))  # small powers would vanish beside 1
        scores = tl.sqrt(tl.maximum(scores, 0.0) + excess)

    ranked = scores
    if correction_ptr is not None:
        ranked += tl.load(correction_ptr + experts, mask=is_expert, other=0.0)
    keys = _order_keys(ranked)
    if NUM_GROUPS > 1:
        ranks = tl.where(is_expert, _with_index(keys, experts), TAKEN)
        best_G = tl.max(ranks, axis=1)
        ratings_G = _numbers_of((best_G >> 32).to(tl.int32))
        if EXPERTS_RATING_GROUP == 2:
            second_G = tl.max(tl.where(ranks == best_G[:, None], TAKEN, ranks), axis=1)
            ratings_G += _numbers_of((second_G >> 32).to(tl.int32))
        ranks_G = tl.where(groups < NUM_GROUPS, _with_index(_order_keys(ratings_G), groups), TAKEN)
        is_selected_G = groups < 0
        for _ in range(NUM_CHOSEN_GROUPS):
            is_best_G = ranks_G == tl.max(ranks_G)
            is_selected_G = is_selected_G | is_best_G
            ranks_G = tl.where(is_best_G, TAKEN, ranks_G)
        keys = tl.where(is_selected_G[:, None], keys, LOWEST_KEY)
    ranks = tl.where(is_expert, _with_index(keys, experts), TAKEN)

    places = tl.arange(0, BLOCK_K)
    selected = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for k in range(TOP_K):
        best = tl.max(ranks)
        is_best = ranks == best
        selected = tl.where(places == k, _index_of(best), selected)
        weights = tl.where(places == k, tl.sum(tl.where(is_best, scores, 0.0)), weights)
        ranks = tl.where(is_best, TAKEN, ranks)

    is_place = places < TOP_K
    if SCORING == "softmax_of_chosen":
        largest = tl.max(tl.where(is_place, weights, float("-inf")))
        powers = tl.where(is_place, tl.exp(weights - largest), 0.0)
        weights = powers / tl.sum(powers)
    elif SCORING == "sigmoid_of_chosen":
        weights = tl.where(is_place, _sigmoid(weights), 0.0)
    if IS_NORMALIZED:
        weights = weights / (tl.sum(weights) + TINY)
    tl.store(experts_ptr + token * TOP_K + places, selected.to(tl.int64), mask=is_place)
    tl.store(weights_ptr + token * TOP_K + places, weights * scale, mask=is_place)
