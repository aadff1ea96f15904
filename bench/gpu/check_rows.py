"""Checks of the kernels that treat rows one by one: norms, activations, rotary embedding, 8-bit floats."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from moeserve.bench.gpu.check import (
    FUNCTION_SLACK,
    Case,
    Check,
    Expected,
    Place,
    compare,
    compare_exactly,
    dtype_name,
    rounding_unit,
)
from moeserve.triton_kernels.activation import clamped_silu_multiply, silu_multiply
from moeserve.triton_kernels.fp8 import dequantize_blocks, dequantize_weight_blocks, quantize_blocks
from moeserve.triton_kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_in_place
from moeserve.triton_kernels.rotary import rotary, rotary_with_cache_write

# T rows or tokens, D width, N query heads, G key-value heads, H head size, F rotated pairs, B blocks, O and I: rows and
# columns of a weight

EPSILON = 1e-5
ALPHA, LIMIT = 1.702, 7.0
FP8 = torch.float8_e4m3fn
FP8_BLOCK = 128
LARGEST_CODE = 448.0


def check_norms(place: Place) -> Iterator[Case]:
    """Rows of a model's width, and heads that lie apart in a fused projection."""
    shapes = [(3, 40), (2, 130)] if place.is_small else [(1, 4096), (129, 2048), (64, 2880), (33, 7168), (4096, 4096)]
    for dtype, (num_rows, width) in itertools.product(place.dtypes, shapes):
        name = f"{dtype_name(dtype)} {num_rows} x {width}"
        x, update = place.normal(num_rows, width, dtype=dtype), place.normal(num_rows, width, dtype=dtype)
        weight = (1 + place.normal(width, scale=0.2)).to(dtype)
        yield Case(f"rms_norm {name}", compare(rms_norm(x, weight, EPSILON), _normed(x, weight)))
        total, normed = add_rms_norm(x, update, weight, EPSILON)
        added = (x.float() + update.float()).to(dtype)  # one rounding, so it is exact
        yield Case(f"add_rms_norm, sum {name}", compare_exactly(total, added))
        yield Case(f"add_rms_norm {name}", compare(normed, _normed(added, weight)))
    head_shapes = [(3, 2, 16)] if place.is_small else [(4096, 32, 128), (5, 4, 64)]
    for dtype, (num_rows, num_heads, head_size) in itertools.product(place.dtypes, head_shapes):
        projected = place.normal(num_rows, num_heads + 3, head_size, dtype=dtype)
        before, weight = projected.clone(), (1 + place.normal(head_size, scale=0.2)).to(dtype)
        rms_norm_in_place(projected[:, :num_heads], weight, EPSILON)
        name = f"{dtype_name(dtype)} {num_rows} x {num_heads} x {head_size}"
        expected = _normed(before[:, :num_heads], weight)
        yield Case(f"rms_norm_in_place {name}", compare(projected[:, :num_heads], expected))
        others = compare_exactly(projected[:, num_heads:], before[:, num_heads:])
        yield Case(f"rms_norm_in_place, what is beside {name}", others)


def _normed(x_TD: Tensor, weight_D: Tensor) -> Expected:
    """Rounded after the scaling and after the weight."""
    x, weight = x_TD.double(), weight_D.double()
    value = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight
    return Expected(value, FUNCTION_SLACK * value.abs()).rounded_to(x_TD.dtype, times=2)


def check_activations(place: Place) -> Iterator[Case]:
    shapes = [(3, 20), (1, 1100)] if place.is_small else [(1, 14336), (64, 2880), (4096, 1408), (513, 768)]
    for dtype, (num_rows, width) in itertools.product(place.dtypes, shapes):
        name = f"{dtype_name(dtype)} {num_rows} x {width}"
        gate_up = place.normal(num_rows, 2 * width, dtype=dtype, scale=4)
        gate, up = gate_up.double().chunk(2, dim=-1)
        value = gate * torch.sigmoid(gate) * up
        expected = Expected(value, FUNCTION_SLACK * value.abs()).rounded_to(dtype, times=2)
        yield Case(f"silu_multiply {name}", compare(silu_multiply(gate_up), expected))

        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        value = gate * torch.sigmoid(ALPHA * gate) * (up + 1)
        # Rounded: alpha * gate, whose error is an exponent's; its sigmoid; the product; up + 1; and the result.
        rounding = rounding_unit(dtype) * (4 + (ALPHA * gate).abs()) * 1.01 + FUNCTION_SLACK
        slack = rounding * value.abs() + torch.finfo(dtype).tiny
        clamped = clamped_silu_multiply(gate_up, alpha=ALPHA, limit=LIMIT)
        expected = Expected(value, slack, rms=8 * rounding_unit(dtype) + 2.0**-12)
        yield Case(f"clamped_silu_multiply {name}", compare(clamped, expected))


def check_rotary(place: Place) -> Iterator[Case]:
    """Whole heads and parts of them, in place and elsewhere, and with the write into a cache with unused slots."""
    # tokens, query heads, key-value heads, head size, pairs
    shapes = (
        [(5, 3, 1, 16, 8), (3, 4, 2, 20, 6)]
        if place.is_small
        else [(1, 32, 8, 128, 64), (4097, 64, 8, 64, 32), (128, 96, 8, 128, 32), (77, 16, 16, 192, 32)]
    )
    for dtype, shape, is_interleaved in itertools.product(place.dtypes, shapes, (False, True)):
        num_tokens, num_heads, num_kv_heads, head_size, num_pairs = shape
        name = f"{dtype_name(dtype)} {' x '.join(map(str, shape))}{' interleaved' if is_interleaved else ''}"
        angles = place.uniform(num_tokens, num_pairs) * 6.3
        cosines, sines = angles.cos(), angles.sin()
        fused = place.normal(num_tokens, num_heads + 2 * num_kv_heads, head_size, dtype=dtype)
        query, key, value = fused.clone().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        turned = _turned(query, cosines, sines, is_interleaved)

        out = torch.empty_like(query)
        yield Case(f"rotary {name}", compare(rotary(query, cosines, sines, is_interleaved, out), turned))
        in_place = fused.clone()[:, :num_heads]
        yield Case(f"rotary in place {name}", compare(rotary(in_place, cosines, sines, is_interleaved), turned))

        block_size = 16
        num_blocks = -(-num_tokens // block_size) + 2
        slots = place.order(num_blocks * block_size)[:num_tokens]
        slots[::5] = -1
        cache = place.normal(2, num_blocks, num_kv_heads, block_size, head_size, dtype=dtype)
        before = cache.clone()
        turned_key = _turned(key, cosines, sines, is_interleaved)
        written = rotary_with_cache_write(query, key, value, cosines, sines, is_interleaved, cache[0], cache[1], slots)
        yield Case(f"rotary_with_cache_write, queries {name}", compare(written, turned))
        is_kept = slots >= 0
        places = (slots[is_kept] // block_size, slots[is_kept] % block_size)
        kept_keys = Expected(turned_key.value[is_kept], turned_key.slack[is_kept], turned_key.rms)
        found = cache[0].transpose(1, 2)[places]
        yield Case(f"rotary_with_cache_write, keys {name}", compare(found, kept_keys))
        before[0].transpose(1, 2)[places] = found
        before[1].transpose(1, 2)[places] = value[is_kept]
        yield Case(f"rotary_with_cache_write, cache {name}", compare_exactly(cache, before))


def _turned(heads_TNH: Tensor, cosines_TF: Tensor, sines_TF: Tensor, is_interleaved: bool) -> Expected:
    num_pairs = cosines_TF.shape[1]
    heads, cosines, sines = heads_TNH.double(), cosines_TF.double()[:, None], sines_TF.double()[:, None]
    value, slack = heads.clone(), torch.zeros_like(heads)
    if is_interleaved:
        firsts, seconds = slice(0, 2 * num_pairs, 2), slice(1, 2 * num_pairs, 2)
    else:
        firsts, seconds = slice(0, num_pairs), slice(num_pairs, 2 * num_pairs)
    first, second = heads[..., firsts], heads[..., seconds]
    value[..., firsts] = first * cosines - second * sines
    value[..., seconds] = second * cosines + first * sines
    for part in (firsts, seconds):  # two float32 products and their sum
        slack[..., part] = 2.0**-22 * (first.abs() + second.abs())
    return Expected(value, slack).rounded_to(heads_TNH.dtype)


def check_fp8(place: Place) -> Iterator[Case]:
    shapes = [(3, 300), (2, 128)] if place.is_small else [(1, 4096), (128, 7168), (4096, 2048), (65, 1408)]
    for dtype, (num_rows, width) in itertools.product(place.dtypes, shapes):
        name = f"{dtype_name(dtype)} {num_rows} x {width}"
        sizes = 10 ** (place.uniform(num_rows, 1) * 4 - 3)
        x = (place.normal(num_rows, width) * sizes).to(dtype)
        x[0, : min(width, FP8_BLOCK)] = 0
        codes, scales = quantize_blocks(x)
        expected_scales, scaled = _scaled(x)
        yield Case(f"quantize_blocks, scales {name}", compare(scales, expected_scales))
        # A code has 3 bits after its first one, and below 2**-6 steps of 2**-9: half a step is the rounding. One more
        # share of the float32 factor's error.
        slack = (scaled.abs() / 16).clamp(min=2.0**-10) * (1 + 2.0**-18)
        yield Case(f"quantize_blocks, codes {name}", compare(codes, Expected(scaled, slack, rms=2.0**-4)))

        codes, scales = place.codes(num_rows, width), place.uniform(*scales.shape)
        value = codes.double() * scales.double().repeat_interleave(FP8_BLOCK, dim=1)[:, :width]
        expected = Expected(value, 2.0**-23 * value.abs()).rounded_to(dtype)
        yield Case(f"dequantize_blocks {name}", compare(dequantize_blocks(codes, scales, dtype), expected))

    weights = [(130, 257)] if place.is_small else [(4096, 7168), (2048, 1408), (300, 200)]
    for dtype, (num_outputs, num_inputs) in itertools.product(place.dtypes, weights):
        weight = place.codes(num_outputs, num_inputs)
        scale = place.uniform(-(-num_outputs // FP8_BLOCK), -(-num_inputs // FP8_BLOCK))
        rows = scale.double().repeat_interleave(FP8_BLOCK, dim=0)[:num_outputs]
        value = weight.double() * rows.repeat_interleave(FP8_BLOCK, dim=1)[:, :num_inputs]
        expected = Expected(value, 2.0**-23 * value.abs()).rounded_to(dtype)
        actual = dequantize_weight_blocks(weight, scale, dtype)
        name = f"{dtype_name(dtype)} {num_outputs} x {num_inputs}"
        yield Case(f"dequantize_weight_blocks {name}", compare(actual, expected))


def _scaled(x_TD: Tensor) -> tuple[Expected, Tensor]:
    """Scales of blocks, and what the codes are before they are rounded."""
    num_rows, width = x_TD.shape
    num_blocks = -(-width // FP8_BLOCK)
    padded = torch.zeros(num_rows, num_blocks * FP8_BLOCK, dtype=torch.float64, device=x_TD.device)
    padded[:, :width] = x_TD.double()
    blocks = padded.view(num_rows, num_blocks, FP8_BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scale = largest[..., 0] / LARGEST_CODE
    scaled = (blocks * (LARGEST_CODE / largest)).flatten(1)[:, :width].clamp(-LARGEST_CODE, LARGEST_CODE)
    return Expected(scale, 2.0**-23 * scale), scaled


CHECKS = (
    Check("norms", ("rms_norm", "rms_norm_in_place", "add_rms_norm"), check_norms),
    Check("activations", ("silu_multiply", "clamped_silu_multiply"), check_activations),
    Check("rotary embedding", ("rotary", "rotary_with_cache_write"), check_rotary),
    Check("8-bit blocks", ("quantize_blocks", "dequantize_blocks", "dequantize_weight_blocks"), check_fp8),
)
