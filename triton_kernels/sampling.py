"""The choice of tokens on a GPU: the highest score of each row, or a random draw; no sort, no word to the host.

A draw goes by the order of a row's tokens: score descending, then id ascending. `min_p`, `top_k` and `top_p` each keep
a beginning of that order, and the token drawn is where the cumulative mass passes a share of what is kept. None of it
needs the order itself: the mass of all tokens from a score upwards is one pass over the row, and the score that is
looked for is found by halving twice, with three such masses a pass. A row's scores are read once from memory and then
from the cache. Scores become integers that compare alike, "keys", and tokens of one key are told apart by their ids.

Masses are float32 in lanes, each lane a sum of V / BLOCK_V numbers in the order of the ids, and the lanes are added in
float64. So they depend on the row alone, and never fall as tokens join. Against float64 throughout, a boundary between
two tokens moves by less than 1e-6 of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# R rows, V width of a row

LOWEST_KEY = tl.constexpr(-(2**31) + 2**23 - 1)  # of minus infinity
NAN_KEY = tl.constexpr(2**31 - 1)
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Config:
    """What the one program of a row looks at together."""

    BLOCK_V: int  # power of two
    num_warps: int


def choose_config(width: int) -> Config:
    """For rows of a width: 8 numbers for each thread, of which three sums fit its registers."""
    block = min(max(triton.next_power_of_2(width), 256), 4096)
    return Config(BLOCK_V=block, num_warps=max(block // 256, 1))


def greedy_rows(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The token of the highest logit of each row, of equal ones the lowest, and whether the highest is a number.

    NaN is larger than any number. So a row with NaN or infinity in it, or of nothing but minus infinity, tells of it.

    Memory moved: R * V * element size, which bounds the time; about 6 * R * V operations.

    Args:
        logits_RV: float32, bfloat16 or float16; rows contiguous.

    Returns:
        Tokens [R] int64, and whether they can be used [R] bool.
    """
    largest_R, tokens_R = row_maximum(logits_RV)
    return tokens_R, largest_R.isfinite()


def row_maximum(rows_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row, float32, and its index [R] int64; of equal numbers the first.

    NaN is larger than any number. Memory moved: R * V * element size.
    """
    num_rows, width = rows_RV.shape
    assert width > 0, "rows of nothing have no maximum"
    assert rows_RV.stride(1) == 1, f"strides {rows_RV.stride()}"
    largest_R = torch.empty(num_rows, dtype=torch.float32, device=rows_RV.device)
    indices_R = torch.empty(num_rows, dtype=torch.int64, device=rows_RV.device)
    if num_rows == 0:  # a grid of no programs cannot be launched
        return largest_R, indices_R
    config = choose_config(width)
    row_maximum_kernel[(num_rows,)](
        rows_RV,
        largest_R,
        indices_R,
        rows_RV.stride(0),
        width,
        BLOCK_V=config.BLOCK_V,
        num_warps=config.num_warps,
    )
    return largest_R, indices_R


def sample_rows(
    scores_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    uniform_R: Tensor,
) -> Tensor:
    """Draws one token of each row, as moeserve's sampler does with the same number.

    The token is the reference's unless the number falls within 1e-6 of the border between two tokens, or a token
    within 1e-6 of a bound of `min_p` or `top_p`.

    Memory moved: 4 * R * V bytes once; from the cache, that 20 times for a plain draw and 20 times more for each of
    `top_k` and `top_p` where they are used. A pass is about 12 operations for each score, so the time is bound by
    those: one multiprocessor works on one row.

    Args:
        scores_RV: float32, rows contiguous; -inf where a token is barred. At least one of a row is finite, none is NaN
            or infinity; otherwise some token of the row is returned.
        temperature_R: float64 or float32, above 0.
        top_k_R: int32 or int64; below 1: all.
        top_p_R: float64 or float32; from 1: all.
        min_p_R: float64 or float32; 0: all.
        uniform_R: float64, from 0 to 1, without 1.

    Returns:
        Tokens [R] int64.
    """
    num_rows, width = scores_RV.shape
    assert scores_RV.dtype == torch.float32, f"scores in {scores_RV.dtype}"
    assert scores_RV.stride(1) == 1, f"strides {scores_RV.stride()}"
    assert 0 < width <= 2**24, f"{width} scores of a row are not counted exactly in float32"
    settings = (temperature_R, top_k_R, top_p_R, min_p_R, uniform_R)
    for setting_R in settings:
        assert setting_R.shape == (num_rows,), f"{tuple(setting_R.shape)} settings for {num_rows} rows"
        assert setting_R.is_contiguous(), f"strides {setting_R.stride()}"
    assert uniform_R.dtype == torch.float64, f"random numbers in {uniform_R.dtype}"
    tokens_R = torch.empty(num_rows, dtype=torch.int64, device=scores_RV.device)
    if num_rows == 0:
        return tokens_R
    config = choose_config(width)
    sample_kernel[(num_rows,)](
        scores_RV,
        *settings,
        tokens_R,
        scores_RV.stride(0),
        width,
        BLOCK_V=config.BLOCK_V,
        num_warps=config.num_warps,
    )
    return tokens_R


@triton.jit
def _order_keys(numbers):
    """Integers of 32 bits that compare like float32 numbers, with NaN above all."""
    bits = (numbers + 0.0).to(tl.int32, bitcast=True)  # adding zero makes -0.0 equal to 0.0
    keys = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where(numbers == numbers, keys, NAN_KEY)


@triton.jit
def _number_of(key):
    """The float32 number of a key, which is 64 bits wide so that sums and differences of keys fit."""
    bits = key.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


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
    lanes = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], -(2**31), tl.int32)  # below any key
    places = tl.zeros([BLOCK_V], tl.int32)
    for first in range(0, width, BLOCK_V):
        columns = first + lanes
        numbers = tl.load(rows_ptr + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
        keys = tl.where(columns < width, _order_keys(numbers), -(2**31))
        places = tl.where(keys > best, columns, places)  # of equal ones, a lane keeps the first
        best = tl.maximum(best, keys)
    largest = tl.max(best)
    index = tl.min(tl.where(best == largest, places, width))
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
    """The highest key such that the tokens from it upwards have a mass of at least `bound`, with IS_ABOVE of more.

    The mass of a token is e to the power of its score's distance from the highest over the temperature (`steepness`
    makes that a power of two), or with COUNTS, one. The lowest key is returned where no key above it has.
    """
    enough = lowest_key  # taken for granted
    too_little = highest_key + 1
    lanes = tl.arange(0, BLOCK_V)
    nothing = tl.zeros([BLOCK_V], tl.float32)
    while too_little - enough > 1:
        # Three keys at a time: the pass costs little more than with one, and there are half as many.
        distance = too_little - enough
        key_1 = enough + distance // 4
        key_2 = enough + distance // 2
        key_3 = enough + distance * 3 // 4
        number_1, number_2, number_3 = _number_of(key_1), _number_of(key_2), _number_of(key_3)
        sums_1, sums_2, sums_3 = nothing, nothing, nothing
        for first in range(0, width, BLOCK_V):
            columns = first + lanes
            # What is outside the row is below any key that is looked at: those are above that of minus infinity.
            scores = tl.load(scores_ptr + columns, mask=columns < width, other=float("-inf"))
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
        # Masses fall from key to key, so where a higher one is enough, the lower ones are.
        next_enough = tl.where(is_enough_3, key_3, tl.where(is_enough_2, key_2, tl.where(is_enough_1, key_1, enough)))
        too_little = tl.where(
            is_enough_3, too_little, tl.where(is_enough_2, key_3, tl.where(is_enough_1, key_2, key_1))
        )
        enough = next_enough
    return enough


@triton.jit
def _above_and_at(scores_ptr, width, highest, steepness, key, BLOCK_V: tl.constexpr):
    """Of a key: mass of the tokens above it (float64), how many those are, and how many tokens have it (float64)."""
    number = _number_of(key)
    lanes = tl.arange(0, BLOCK_V)
    masses_above = tl.zeros([BLOCK_V], tl.float32)
    num_above = tl.zeros([BLOCK_V], tl.int32)
    num_at = tl.zeros([BLOCK_V], tl.int32)
    for first in range(0, width, BLOCK_V):
        columns = first + lanes
        is_inside = columns < width
        scores = tl.load(scores_ptr + columns, mask=is_inside, other=float("-inf"))
        is_above = scores > number
        masses_above += tl.where(is_above, tl.exp2((scores - highest) * steepness), 0.0)
        num_above += is_above.to(tl.int32)
        num_at += (is_inside & (scores == number)).to(tl.int32)
    return tl.sum(masses_above.to(tl.float64)), tl.sum(num_above), tl.sum(num_at)


@triton.jit
def _mass_at(highest, steepness, key):
    """Of one token of a key, float64."""
    return tl.exp2((_number_of(key) - highest) * steepness).to(tl.float64)


@triton.jit
def _num_reaching(distance, mass):
    """How many tokens of a mass reach a distance: at least one, and never too many to be an int32."""
    return tl.minimum(tl.maximum(tl.ceil(distance / mass), 1.0), 16777216.0).to(tl.int32)


@triton.jit
def _num_passing(distance, mass):
    """How many tokens of a mass pass a distance."""
    return tl.minimum(tl.maximum(tl.floor(distance / mass) + 1.0, 1.0), 16777216.0).to(tl.int32)


@triton.jit
def sample_kernel(
    scores_ptr,  # [R, V] float32, rows row_stride elements apart
    temperature_ptr,  # [R]
    top_k_ptr,  # [R]
    top_p_ptr,  # [R]
    min_p_ptr,  # [R]
    uniform_ptr,  # [R] float64
    tokens_ptr,  # [R] int64
    row_stride,
    width,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # row * stride can pass 2**31
    scores_ptr += row * row_stride
    temperature = tl.load(temperature_ptr + row).to(tl.float64)
    top_k = tl.load(top_k_ptr + row).to(tl.int64)
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    min_p = tl.load(min_p_ptr + row).to(tl.float64)
    uniform = tl.load(uniform_ptr + row)
    lanes = tl.arange(0, BLOCK_V)

    highest_lanes = tl.full([BLOCK_V], float("-inf"), tl.float32)
    for first in range(0, width, BLOCK_V):
        columns = first + lanes
        scores = tl.load(scores_ptr + columns, mask=columns < width, other=float("-inf"))
        highest_lanes = tl.maximum(highest_lanes, scores)
    highest = tl.max(highest_lanes)
    highest_key = _order_keys(highest).to(tl.int64)
    # Zero times what it is multiplied with must be zero, and minus infinity stay that: neither infinite nor zero.
    steepness = tl.minimum(tl.maximum(1.0 / temperature * LOG2_E, 1e-30), 1e38).to(tl.float32)

    # What is kept: the tokens above a key, and so many of those that have it.
    cut_key = tl.full([], LOWEST_KEY, tl.int64)
    mass_above, num_above, num_at_cut = _above_and_at(scores_ptr, width, highest, steepness, cut_key, BLOCK_V)
    if min_p > 0.0:
        lowest_lanes = tl.full([BLOCK_V], float("inf"), tl.float32)
        num_lanes = tl.zeros([BLOCK_V], tl.int32)
        for first in range(0, width, BLOCK_V):
            columns = first + lanes
            scores = tl.load(scores_ptr + columns, mask=columns < width, other=float("-inf"))
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

    target = uniform * total  # below the total, so some token passes it
    key = _find_key(scores_ptr, width, highest, steepness, cut_key, highest_key, target, False, True, BLOCK_V)
    mass_above, num_above, num_at = _above_and_at(scores_ptr, width, highest, steepness, key, BLOCK_V)
    num_at = tl.where(key == cut_key, num_at_cut, num_at)
    place = tl.minimum(_num_passing(target - mass_above, _mass_at(highest, steepness, key)), num_at)

    # The token of the key at that place, counted from one.
    number = _number_of(key)
    num_before = tl.zeros([], tl.int32)
    token = tl.zeros([], tl.int32)
    for first in range(0, width, BLOCK_V):
        columns = first + lanes
        scores = tl.load(scores_ptr + columns, mask=columns < width, other=float("-inf"))
        is_at = (columns < width) & (scores == number)
        counts = num_before + tl.cumsum(is_at.to(tl.int32), axis=0)
        token = tl.maximum(token, tl.max(tl.where(is_at & (counts == place), columns, 0)))
        num_before = tl.max(counts)
    tl.store(tokens_ptr + row, token.to(tl.int64))
