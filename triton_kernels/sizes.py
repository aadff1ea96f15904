"""Integer arithmetic for launches, on the host. Triton's own functions take microseconds for each call there."""

from __future__ import annotations


def ceil_div(number: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not less than the number; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()
