"""Rows of keys and values as 8-bit floats (E4M3) with a scale for each row, in registers.

`ops/attention/float8_rows.py` defines the format. Conversions are integer operations on the bits of float32, so any
GPU runs them, and codes have the same bytes as on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_CODE = tl.constexpr(448.0)
LEAST_NUMBER = tl.constexpr(2.0**-6)
LEAST_RANGE = tl.constexpr(2.0**-100)
LARGEST_RANGE = tl.constexpr(448.0 * 2**7)
EXPONENT_SHIFT = tl.constexpr(2.0**120)  # float32 has this larger a bias of the exponent than E4M3
ABSOLUTE_BITS = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def decode_float8(codes, scales, dtype: tl.constexpr):
    """Return the numbers of rows of codes [C, V] uint8, given their scales [C]. They are exact in bfloat16."""
    bits = ((codes.to(tl.int32) << 24) >> 4) & -0x78100000  # 0x87F00000
    numbers = bits.to(tl.float32, bitcast=True) * (scales.to(tl.float32) * EXPONENT_SHIFT)[:, None]
    return numbers.to(dtype)


@triton.jit
def largest_bits(numbers):
    """Return the bits of the largest absolute number of each row. They have the order of the numbers; NaN is last."""
    return tl.max(numbers.to(tl.int32, bitcast=True) & ABSOLUTE_BITS, axis=1)


@triton.jit
def float8_scales(bits):
    """Return the scale of each row, float32, given the bits of its largest absolute number; NaN if not finite."""
    largest = tl.minimum(tl.maximum(bits.to(tl.float32, bitcast=True), LEAST_RANGE), LARGEST_RANGE)
    scales = tl.div_rn(largest, tl.full(largest.shape, LARGEST_CODE, tl.float32)).to(tl.int32, bitcast=True)
    scales = ((scales + 0xFFFFF) & -0x100000).to(tl.float32, bitcast=True)  # up, to 4 significant bits
    return tl.where(bits < INFINITY_BITS, scales, float("nan"))


@triton.jit
def encode_float8(numbers, scales):
    """Return the codes [N, H] uint8 of rows with these scales [N]. All codes of a row that is not finite are 0."""
    bits = numbers.to(tl.int32, bitcast=True)
    divisors = tl.broadcast_to(scales[:, None], numbers.shape)
    scaled = tl.div_rn((bits & ABSOLUTE_BITS).to(tl.float32, bitcast=True), divisors)
    is_number = (scaled >= LEAST_NUMBER) & (divisors == divisors)
    scaled = tl.where(is_number, tl.minimum(scaled, LARGEST_CODE), 0.0)
    magnitude = (scaled * (1.0 / EXPONENT_SHIFT)).to(tl.int32, bitcast=True)
    code = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20  # to nearest, ties to even
    signed = tl.where(divisors == divisors, code | ((bits >> 24) & 0x80), 0)
    return signed.to(tl.uint8)
