"""Routing on a GPU: the top-k experts of each token and their weights, with one program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens, E experts, K experts per token, G groups of experts, S experts of one group

SCORINGS = ("softmax", "sigmoid", "softmax_of_chosen")
MAX_EXPERTS = 4096  # they fit the registers of one program

TINY = tl.constexpr(1e-20)  # avoids a division by zero if all weights are zero
LOWEST_KEY = tl.constexpr(-(2**31))  # of an expert whose group is not selected; above TAKEN
TAKEN = tl.constexpr(-(2**63))  # rank of an expert or group that is already selected, or does not exist
LOW_BITS = tl.constexpr(2**32 - 1)


def route(
    logits_TE: Tensor,
    correction_E: Tensor | None,
    *,
    top_k: int,
    scoring: str,
    num_groups: int = 1,
    num_chosen_groups: int = 1,
    experts_rating_group: int = 1,
    is_normalized: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Select the experts of each token and compute their weights. `ops.interfaces.RouterConfig` describes the settings.

    Ties between experts, and between groups, go to the lowest index. NaN counts as larger than any number: the weights
    of its token contain NaN, and its K experts are still distinct.

    Memory moved: T * (4 * E + 12 * K) bytes. About 2 * K * E comparisons and E exponentials for each token, in K
    dependent steps, which bound the time.

    Args:
        logits_TE: float32, with the bias; rows contiguous.
        correction_E: float32, added to the scores for the selection, not for the weights.
        scoring: "softmax", "sigmoid" or "softmax_of_chosen".

    Returns:
        Experts [T, K] int64, best first, and their weights [T, K] float32.
    """
    num_tokens, num_experts = logits_TE.shape
    assert logits_TE.dtype == torch.float32, f"logits in {logits_TE.dtype}"
    assert logits_TE.stride(1) == 1, f"strides {logits_TE.stride()}"
    assert scoring in SCORINGS, f"scoring={scoring!r}"
    assert num_experts <= MAX_EXPERTS, f"{num_experts} experts do not fit one program"
    assert num_experts % num_groups == 0, f"{num_experts} experts in {num_groups} groups"
    assert 1 <= num_chosen_groups <= num_groups, f"{num_chosen_groups} of {num_groups} groups"
    group_size = num_experts // num_groups
    assert 1 <= top_k <= group_size * num_chosen_groups, f"top_k={top_k} of {num_chosen_groups} x {group_size} experts"
    assert experts_rating_group in (1, 2), f"experts_rating_group={experts_rating_group}"
    assert num_groups == 1 or experts_rating_group <= group_size, f"groups of {group_size} rated by two"
    if correction_E is not None:
        assert correction_E.shape == (num_experts,), f"{tuple(correction_E.shape)} corrections"
        assert correction_E.dtype == torch.float32, f"corrections in {correction_E.dtype}"
        correction_E = correction_E.contiguous()
    experts_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    weights_TK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    if num_tokens == 0:  # an empty grid cannot be launched
        return experts_TK, weights_TK
    route_kernel[(num_tokens,)](
        logits_TE,
        correction_E,
        experts_TK,
        weights_TK,
        logits_TE.stride(0),
        scale,
        NUM_GROUPS=num_groups,
        GROUP_SIZE=group_size,
        TOP_K=top_k,
        SCORING=scoring,
        NUM_CHOSEN_GROUPS=num_chosen_groups,
        EXPERTS_RATING_GROUP=experts_rating_group,
        IS_NORMALIZED=is_normalized,
        **launch_sizes(num_experts, num_groups, top_k),
    )
    return experts_TK, weights_TK


def launch_sizes(num_experts: int, num_groups: int, top_k: int) -> dict[str, int]:
    """Return the powers of two that hold groups, experts of a group and selected experts, and the number of warps."""
    block_groups = triton.next_power_of_2(num_groups)
    block_size = triton.next_power_of_2(num_experts // num_groups)
    return {
        "BLOCK_G": block_groups,
        "BLOCK_S": block_size,
        "BLOCK_K": triton.next_power_of_2(top_k),
        # One warp reduces without shared memory.
        "num_warps": max(block_groups * block_size // 512, 1),
    }


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
def route_kernel(
    logits_ptr,  # [T, E], rows row_stride elements apart
    correction_ptr,  # [E], or None
    experts_ptr,  # [T, K]
    weights_ptr,  # [T, K]
    row_stride,
    scale,
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
):
    token = tl.program_id(0).to(tl.int64)  # token * stride can exceed 2**31
    groups = tl.arange(0, BLOCK_G)
    members = tl.arange(0, BLOCK_S)
    experts = groups[:, None] * GROUP_SIZE + members[None, :]
    is_expert = (groups < NUM_GROUPS)[:, None] & (members < GROUP_SIZE)[None, :]

    scores = tl.load(logits_ptr + token * row_stride + experts, mask=is_expert, other=float("-inf"))
    if SCORING == "softmax":
        powers = tl.where(is_expert, tl.exp(scores - tl.max(scores)), 0.0)
        scores = powers / tl.sum(powers)
    elif SCORING == "sigmoid":
        power = tl.exp(-tl.abs(scores))  # at most 1, so it cannot overflow
        scores = tl.where(scores > 0.0, 1.0, power) / (1.0 + power)

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
    if IS_NORMALIZED:
        weights = weights / (tl.sum(weights) + TINY)
    tl.store(experts_ptr + token * TOP_K + places, selected.to(tl.int64), mask=is_place)
    tl.store(weights_ptr + token * TOP_K + places, weights * scale, mask=is_place)
