"""What a check of a kernel is: where it runs, what it compares, and how far a result may be from exact numbers.

A kernel's numbers are compared with the same computation in float64, on the same inputs. What may differ is argued from
roundings: each result has a slack of its own, and the largest error over slack is the error ratio: 1 and less is right.
Slacks are bounds for the worst case, which for long sums is far from the usual one. So the root of the mean square of
all errors must be small too, as a share of the results'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

WRONG = 1e9  # the error ratio of a result that must be exact and is not, or is no number; JSON knows no infinity

# Relative to the sum of all products' magnitudes. Tensor cores add 16 products at a time to a float32 number, and cut
# off instead of rounding: 2**-22 of the sum so far each time, for sums of up to 16384 products.
SUM_SLACK = 2.0**-17
# Tensor cores of sm_90 keep 13 bits below the largest of 32 products of 8-bit floats, and cut off the rest: of each
# product half a bit on average, and the largest is up to 64 times the mean. The signs of what is cut off differ.
FP8_SUM_SLACK = 2.0**-8
FUNCTION_SLACK = 2.0**-18  # relative, of an approximated exponential, root or quotient and the float32 steps around it
RMS_SLACK = 2.0**-12  # of results that are hardly rounded
FP8_RMS_SLACK = 2.0**-6


@dataclass(frozen=True)
class Place:
    """Where checks run, and with what."""

    device: torch.device
    generator: torch.Generator  # of this device
    dtypes: tuple[torch.dtype, ...]  # of activations and weights
    is_small: bool  # for the interpreter: shapes that take it seconds, not hours

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return drawn.mul_(scale).to(dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device, dtype=dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def order(self, number: int) -> Tensor:
        """The numbers below `number` in random order."""
        return torch.randperm(number, generator=self.generator, device=self.device)

    def codes(self, *shape: int) -> Tensor:
        """Random float8_e4m3fn of magnitudes below 2: without the exponent's highest bit, all are numbers."""
        drawn = torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator, device=self.device)
        return drawn.bitwise_and_(0xBF).view(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Case:
    """One comparison of a check."""

    name: str
    error_ratio: float


@dataclass(frozen=True)
class Check:
    """Some kernels beside their references, case by case: new random inputs on every run."""

    name: str
    kernels: tuple[str, ...]  # functions of `triton_kernels` that it calls
    run: Callable[[Place], Iterator[Case]]

    def error_ratio(self, place: Place) -> float:
        """The largest of all cases."""
        return worst(self.run(place)).error_ratio


@dataclass(frozen=True)
class Expected:
    """Exact results, and how far each may be off. Float64, of one shape."""

    value: Tensor
    slack: Tensor
    rms: float = RMS_SLACK  # root of the mean square of errors, as a share of the results'

    def rounded_to(self, dtype: torch.dtype, times: int = 1) -> Expected:
        """After so many roundings to the dtype, one after another."""
        unit = rounding_unit(dtype)
        rounding = times * unit * (1 + 2.0**-6)
        slack = self.slack * (1 + rounding) + rounding * self.value.abs() + smallest_step(dtype)
        return Expected(self.value, slack, self.rms + times * unit)


def worst(cases: Iterable[Case]) -> Case:
    """The one with the largest ratio."""
    found = max(cases, key=lambda case: _or_wrong(case.error_ratio))
    return Case(found.name, min(_or_wrong(found.error_ratio), WRONG))


def rounding_unit(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to the nearest."""
    return torch.finfo(dtype).eps / 2


def smallest_step(dtype: torch.dtype) -> float:
    """Between numbers that are next to zero."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def compare(actual: Tensor, expected: Expected) -> float:
    """The error ratio. Anything that is no number is wrong, and so is another shape."""
    if actual.shape != expected.value.shape:
        return WRONG
    if actual.numel() == 0:
        return 0.0
    error = (actual.double() - expected.value).abs()
    ratio = float((error / expected.slack.clamp(min=1e-300)).max())
    mean_square = float(expected.value.square().mean())
    relative = float(error.square().mean() / mean_square) ** 0.5 if mean_square > 0 else 0.0
    return min(max(_or_wrong(ratio), _or_wrong(relative / expected.rms)), WRONG)


def _or_wrong(ratio: float) -> float:
    """NaN is larger than nothing, so it must not be compared."""
    return WRONG if math.isnan(ratio) else ratio


def compare_exactly(actual: Tensor, expected: Tensor) -> float:
    """0, or WRONG where a byte differs."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return WRONG
    return 0.0 if torch.equal(as_bits(actual), as_bits(expected)) else WRONG


def as_bits(tensor: Tensor) -> Tensor:
    """What compares bit by bit: NaN and the sign of zero too."""
    if not tensor.is_floating_point():
        return tensor
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(bits)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
