"""Token selection on a GPU: the largest score of each row, and random draws, without sorting or waiting for the GPU.

A program chooses the token of one row. At temperature 0 it is the first of the most likely tokens. A draw orders the
tokens of a row by score, descending, then by id, ascending. `min_p`, `top_k` and `top_p` each keep a
prefix of this order. The drawn token is the first whose cumulative mass exceeds a uniform number times the kept mass.

The order itself is never computed. Scores become int32 keys that order alike, and a search over the keys finds the
boundary score; each iteration computes the mass above three keys in one pass over the row, and quarters the range. A
row is read from memory once and then from the cache. Tokens with equal keys are ordered by their ids.

Masses are summed in float32 by BLOCK_V lanes, in the order of the ids, and the lanes are added in float64. They depend
on the row alone and never decrease as tokens are added. Compared with float64 throughout, a boundary between two tokens
moves by less than 1e-6 of the total mass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.sizes import next_power_of_2

# R rows, V width of a row, W settings of a request

LOWEST_KEY = tl.constexpr(-(2**31) + 2**23 - 1)  # key of minus infinity
NAN_KEY = tl.constexpr(2**31 - 1)
LOG2_E = tl.constexpr(1.4426950408889634)
# Places of a request's settings, 8 bytes each: SAMPLING_SETTINGS of step_inputs.py.
TEMPERATURE, TOP_P, MIN_P, TOP_K, NUM_PROMPT_TOKENS, SEED = map(tl.constexpr, range(6))
NUM_SETTINGS = tl.constexpr(6)


def launch_sizes(width: int) -> dict[str, int]:
    """Return the scores that the program of a row reads at a time, and its warps.

    Each thread has 8 numbers, whose three sums fit its registers.
    """
    block = min(max(next_power_of_2(width), 256), 4096)
    return {"BLOCK_V": block, "num_warps": max(block // 256, 1)}


def row_maximum(rows_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest number of each row, and the first index that has it. NaN is larger than any number.

    Memory moved: R * V * element size, which bounds the time; about 6 * R * V operations.

    Args:
        rows_RV: [R, V] float32, bfloat16 or float16, rows contiguous.

    Returns:
        Numbers [R] float32 and indices [R] int64.
    """
    num_rows, width = rows_RV.shape
    assert width > 0, "rows of width 0 have no maximum"
    assert rows_RV.stride(1) == 1, f"strides {rows_RV.stride()}"
    largest_R = torch.empty(num_rows, dtype=torch.float32, device=rows_RV.device)
    indices_R = torch.empty(num_rows, dtype=torch.int64, device=rows_RV.device)
    if num_rows == 0:  # an empty grid cannot be launched
        return largest_R, indices_R
    row_maximum_kernel[(num_rows,)](
        rows_RV,
        largest_R,
        indices_R,
        rows_RV.stride(0),
        width,
        **launch_sizes(width),
    )
    return largest_R, indices_R


def choose_tokens(scores_RV: Tensor, settings_RW: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
    """Choose one token of each row, greedily or at random; see `ChooseTokens`.

    A drawn token is that of the torch reference unless the random number is within 1e-6 of the border between two
    tokens, or a token within 1e-6 of a bound of `min_p` or `top_p`.

    Memory moved: R * V * element size once; from the cache, 20 times as much for a plain draw and again for each of
    `top_k` and `top_p` that is used. A pass takes about 12 operations for each score. These bound the time of a draw,
    because one multiprocessor processes a row.

    Args:
        scores_RV: [R, V] float32, bfloat16 or float16, rows contiguous, at most 2**24 wide.
    """
    num_rows, width = scores_RV.shape
    assert scores_RV.stride(1) == 1, f"strides {scores_RV.stride()}"
    assert 0 < width <= 2**24, f"{width} scores of a row are not counted exactly in float32"
    assert settings_RW.shape == (num_rows, NUM_SETTINGS.value), f"{tuple(settings_RW.shape)} for {num_rows} rows"
    assert positions_R.shape == (num_rows,), f"{tuple(positions_R.shape)} positions for {num_rows} rows"
    assert settings_RW.is_contiguous()
    assert positions_R.is_contiguous()
    assert settings_RW.dtype == positions_R.dtype == torch.int64, f"{settings_RW.dtype}, {positions_R.dtype}"
    largest_R = torch.empty(num_rows, dtype=torch.float32, device=scores_RV.device)
    tokens_R = torch.empty(num_rows, dtype=torch.int64, device=scores_RV.device)
    if num_rows:
        choose_kernel[(num_rows,)](
            scores_RV,
            settings_RW,
            positions_R,
            largest_R,
            tokens_R,
            scores_RV.stride(0),
            width,
            **launch_sizes(width),
        )
    return largest_R, tokens_R


@triton.jit
def _order_keys(numbers):
    """Return int32 keys that order like the float32 numbers, with NaN above all."""
    bits = (numbers + 0.0).to(tl.int32, bitcast=True)  # adding zero makes -0.0 equal to 0.0
    keys = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where(numbers == numbers, keys, NAN_KEY)


@triton.jit
def _number_of(key):
    """Return the float32 number of an int64 key. Keys are 64 bits wide here so that their differences fit."""
    bits = key.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _largest(scores_ptr, width, BLOCK_V: tl.constexpr):
    """Return the key of the largest number of a row, and the first index that has it."""
    lanes = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], -(2**31), tl.int32)  # below all keys
    places = tl.zeros([BLOCK_V], tl.int32)
    for first in range(0, width, BLOCK_V):
        columns = first + lanes
        numbers = tl.load(scores_ptr + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
        keys = tl.where(columns < width, _order_keys(numbers), -(2**31))
        places = tl.where(keys > best, columns, places)  # a lane keeps the first of equal numbers
        best = tl.maximum(best, keys)
    largest = tl.max(best)
    return largest, tl.min(tl.where(best == largest, places, width))


@triton.jit
def row_maximum_kernel(
    rows_ptr,  # [R, V], rows row_stride elements apart
    largest_ptr,  # [R] float32
    indices_ptr,  # [R] int64
    row_stride,
    width,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # row * stride can pass 2**31
    rows_ptr += row * row_stride
    largest, index = _largest(rows_ptr, width, BLOCK_V)
    tl.store(largest_ptr + row, _number_of(largest.to(tl.int64)))
    tl.store(indices_ptr + row, index.to(tl.int64))


@triton.jit
def _find_key(
    scores_ptr,  # [V]
    width,
    highest,
    steepness,
    lowest_key,
    highest_key,
    bound,  # float64
    COUNTS: tl.constexpr,
    IS_ABOVE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Find the highest key at which the tokens with this key or a higher one have a mass of at least `bound`.

    With IS_ABOVE their mass must exceed the bound. The mass of a token is 2 ** ((score - highest) * steepness), which
    is exp((score - highest) / temperature); with COUNTS it is 1. If no other key qualifies, return `lowest_key`.
    """
    enough = lowest_key  # assumed to qualify
    too_little = highest_key + 1
    lanes = tl.arange(0, BLOCK_V)
    nothing = tl.zeros([BLOCK_V], tl.float32)
    while too_little - enough > 1:
        # Test three keys in each pass: it costs little more than one key, and half as many passes are needed.
        distance = too_little - enough
        key_1 = enough + distance // 4
        key_2 = enough + distance // 2
        key_3 = enough + distance * 3 // 4
        number_1, number_2, number_3 = _number_of(key_1), _number_of(key_2), _number_of(key_3)
        sums_1, sums_2, sums_3 = nothing, nothing, nothing
        for first in range(0, width, BLOCK_V):
            columns = first + lanes
            # Lanes outside the row hold -inf, which is below all tested keys.
            scores = tl.load(scores_ptr + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
            if COUNTS:  # noqa: SIM108 - one is not compiled
                masses = tl.where(columns < width, 1.0, 0.0)
            else:
                masses = tl.exp2((scores - highest) * steepness)
            sums_1 += tl.where(scores >= number_1, masses, 0.0)
            sums_2 += tl.where(scores >= number_2, masses, 0.0)
            sums_3 += tl.where(scores >= number_3, masses, 0.0)
        mass_1 = tl.sum(sums_1.to(tl.float64))
        mass_2 = tl.sum(sums_2.to(tl.float64))
        mass_3 = tl.sum(sums_3.to(tl.float64))
        if IS_ABOVE:
            is_enough_1, is_enough_2, is_enough_3 = mass_1 > bound, mass_2 > bound, mass_3 > bound
        else:
            is_enough_1, is_enough_2, is_enough_3 = mass_1 >= bound, mass_2 >= bound, mass_3 >= bound
        # Masses fall with rising keys: if a key qualifies, so do all lower ones.
        next_enough = tl.where(is_enough_3, key_3, tl.where(is_enough_2, key_2, tl.where(is_enough_1, key_1, enough)))
        too_little = tl.where(
            is_enough_3, too_little, tl.where(is_enough_2, key_3, tl.where(is_enough_1, key_2, key_1))
        )
        enough = next_enough
    return enough


@triton.jit
def _above_and_at(scores_ptr, width, highest, steepness, key, BLOCK_V: tl.constexpr):
    """Return the mass (float64) and the number of the tokens above a key, and the number of tokens that have it."""
    number = _number_of(key)
    lanes = tl.arange(0, BLOCK_V)
    masses_above = tl.zeros([BLOCK_V], tl.float32)
    num_above = tl.zeros([BLOCK_V], tl.int32)
    num_at = tl.zeros([BLOCK_V], tl.int32)
    for first in range(0, width, BLOCK_V):
        columns = first + lanes
        is_inside = columns < width
        scores = tl.load(scores_ptr + columns, mask=is_inside, other=float("-inf")).to(tl.float32)
        is_above = scores > number
        masses_above += tl.where(is_above, tl.exp2((scores - highest) * steepness), 0.0)
        num_above += is_above.to(tl.int32)
        num_at += (is_inside & (scores == number)).to(tl.int32)
    return tl.sum(masses_above.to(tl.float64)), tl.sum(num_above), tl.sum(num_at)


@triton.jit
def _mass_at(highest, steepness, key):
    """Return the mass of one token with this key, float64."""
    return tl.exp2((_number_of(key) - highest) * steepness).to(tl.float64)


@triton.jit
def _num_reaching(distance, mass):
    """Return how many tokens of this mass add up to at least `distance`: at least 1, at most 2**24."""
    return tl.minimum(tl.maximum(tl.ceil(distance / mass), 1.0), 16777216.0).to(tl.int32)


@triton.jit
def _num_passing(distance, mass):
    """Return how many tokens of this mass add up to more than `distance`: at least 1, at most 2**24."""
    return tl.minimum(tl.maximum(tl.floor(distance / mass) + 1.0, 1.0), 16777216.0).to(tl.int32)


@triton.jit
def _uniform(seed, position):
    """Return the random number in [0, 1), float64, of one position: the first word of Philox 4x64-10.

    The counter is one more than the position, as numpy counts.
    """
    word_0 = (position + 1).to(tl.uint64, bitcast=True)
    word_1, word_2, word_3 = word_0 * 0, word_0 * 0, word_0 * 0
    key_0, key_1 = seed.to(tl.uint64, bitcast=True), word_0 * 0
    multiplier_0 = tl.full([], 0xD2E7470EE14C6C93, tl.uint64)
    multiplier_1 = tl.full([], 0xCA5A826395121157, tl.uint64)
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(word_0, multiplier_0), word_0 * multiplier_0
        high_1, low_1 = tl.umulhi(word_2, multiplier_1), word_2 * multiplier_1
        word_0, word_1, word_2, word_3 = high_1 ^ word_1 ^ key_0, low_1, high_0 ^ word_3 ^ key_1, low_0
        key_0 += tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
        key_1 += tl.full([], 0xBB67AE8584CAA73B, tl.uint64)
    return (word_0 >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def choose_kernel(
    scores_ptr,  # [R, V], rows row_stride elements apart
    settings_ptr,  # [R, W] int64
    positions_ptr,  # [R] int64
    largest_ptr,  # [R] float32
    tokens_ptr,  # [R] int64
    row_stride,
    width,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # row * stride can pass 2**31
    scores_ptr += row * row_stride
    settings_ptr += row * NUM_SETTINGS
    highest_key, token = _largest(scores_ptr, width, BLOCK_V)
    highest = _number_of(highest_key.to(tl.int64))
    tl.store(largest_ptr + row, highest)
    temperature = tl.load(settings_ptr + TEMPERATURE).to(tl.float64, bitcast=True)
    if (temperature > 0.0) & (tl.abs(highest) < float("inf")):
        num_outputs = tl.load(positions_ptr + row) + 1 - tl.load(settings_ptr + NUM_PROMPT_TOKENS)
        token = _draw(
            scores_ptr,
            width,
            highest,
            highest_key.to(tl.int64),
            temperature,
            tl.load(settings_ptr + TOP_K),
            tl.load(settings_ptr + TOP_P).to(tl.float64, bitcast=True),
            tl.load(settings_ptr + MIN_P).to(tl.float64, bitcast=True),
            _uniform(tl.load(settings_ptr + SEED), num_outputs),
            BLOCK_V,
        )
    tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit
def _draw(
    scores_ptr,  # [V]
    width,
    highest,
    highest_key,  # int64
    temperature,  # float64
    top_k,  # int64
    top_p,  # float64
    min_p,  # float64
    uniform,  # float64
    BLOCK_V: tl.constexpr,
):
    """Return a random token of a row whose highest score is finite."""
    lanes = tl.arange(0, BLOCK_V)
    # Finite and positive: 0 * steepness must be 0, and -inf * steepness must be -inf.
    steepness = tl.minimum(tl.maximum(1.0 / temperature * LOG2_E, 1e-30), 1e38).to(tl.float32)

    # Keep the tokens above cut_key, and the first num_at_cut of those that have it.
    cut_key = tl.full([], LOWEST_KEY, tl.int64)
    mass_above, num_above, num_at_cut = _above_and_at(scores_ptr, width, highest, steepness, cut_key, BLOCK_V)
    if min_p > 0.0:
        lowest_lanes = tl.full([BLOCK_V], float("inf"), tl.float32)
        num_lanes = tl.zeros([BLOCK_V], tl.int32)
        for first in range(0, width, BLOCK_V):
            columns = first + lanes
            scores = tl.load(scores_ptr + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
            is_likely = tl.exp2((scores - highest) * steepness).to(tl.float64) >= min_p
            lowest_lanes = tl.minimum(lowest_lanes, tl.where(is_likely, scores, float("inf")))
            num_lanes += is_likely.to(tl.int32)
        cut_key = _order_keys(tl.min(lowest_lanes)).to(tl.int64)
        mass_above, num_above, num_at_cut = _above_and_at(scores_ptr, width, highest, steepness, cut_key, BLOCK_V)
    if (top_k > 0) & (top_k < num_above + num_at_cut):
        cut_key = _find_key(
            scores_ptr, width, highest, steepness, cut_key, highest_key, top_k.to(tl.float64), True, False, BLOCK_V
        )
        mass_above, num_above, num_at_cut = _above_and_at(scores_ptr, width, highest, steepness, cut_key, BLOCK_V)
        num_at_cut = (top_k - num_above).to(tl.int32)
    mass_at = _mass_at(highest, steepness, cut_key)
    total = mass_above + num_at_cut * mass_at

    if top_p < 1.0:
        bound = top_p * total
        key = _find_key(scores_ptr, width, highest, steepness, cut_key, highest_key, bound, False, False, BLOCK_V)
        mass_above, num_above, num_at = _above_and_at(scores_ptr, width, highest, steepness, key, BLOCK_V)
        mass_at = _mass_at(highest, steepness, key)
        num_at = tl.where(key == cut_key, num_at_cut, num_at)
        num_at_cut = tl.minimum(_num_reaching(bound - mass_above, mass_at), num_at)
        cut_key = key
        total = mass_above + num_at_cut * mass_at

    target = uniform * total  # below the total, so some token exceeds it
    key = _find_key(scores_ptr, width, highest, steepness, cut_key, highest_key, target, False, True, BLOCK_V)
    mass_above, num_above, num_at = _above_and_at(scores_ptr, width, highest, steepness, key, BLOCK_V)
    num_at = tl.where(key == cut_key, num_at_cut, num_at)
    place = tl.minimum(_num_passing(target - mass_above, _mass_at(highest, steepness, key)), num_at)

    # Find the token with this key at that place, counted from one.
    number = _number_of(key)
    num_before = tl.zeros([], tl.int32)
    token = tl.zeros([], tl.int32)
    for first in range(0, width, BLOCK_V):
        columns = first + lanes
        scores = tl.load(scores_ptr + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
        is_at = (columns < width) & (scores == number)
        counts = num_before + tl.cumsum(is_at.to(tl.int32), axis=0)
        token = tl.maximum(token, tl.max(tl.where(is_at & (counts == place), columns, 0)))
        num_before = tl.max(counts)
    return token
