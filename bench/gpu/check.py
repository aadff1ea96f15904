"""Checks of kernels: where they run, what they compare, and how far a result may be from float64.

A kernel's result is compared with the same computation in float64 on the same inputs. The tolerance of a comparison is
a number of roundings to the result's dtype, plus `FLOAT32_SLACK` for float32 arithmetic. The root of the mean square of
all errors may be this share of the results', and each error `PEAK` times this share of the largest result of its row.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WRONG = 1e9  # the error ratio of a wrong exact result, or of NaN: JSON has no infinity
FLOAT32_SLACK = 2.0**-12  # relative: sums of up to 16384 products on tensor cores, and approximated functions
FP8_SLACK = 2.0**-6  # tensor cores of sm_90 keep 13 bits below the largest of 32 products of 8-bit floats
PEAK = 8.0  # the errors of a row are about normally distributed; 8 standard deviations of them never occur


@dataclass(frozen=True)
class Place:
    """The device, random numbers and dtypes of checks."""

    device: torch.device
    generator: torch.Generator  # of this device
    dtypes: tuple[torch.dtype, ...]  # of activations and weights
    is_small: bool  # for Triton's interpreter: shapes that take seconds, not hours

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).mul_(scale).to(dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device, dtype=dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def order(self, number: int) -> Tensor:
        """Return the numbers below `number` in random order."""
        return torch.randperm(number, generator=self.generator, device=self.device)

    def codes(self, *shape: int) -> Tensor:
        """Draw float8_e4m3fn of magnitudes below 2: without the exponent's highest bit, none is NaN."""
        drawn = torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator, device=self.device)
        return drawn.bitwise_and_(0xBF).view(torch.float8_e4m3fn)

    def weights(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Draw numbers of either kind: codes for float8_e4m3fn, otherwise normal ones."""
        return self.codes(*shape) if dtype == torch.float8_e4m3fn else self.normal(*shape, dtype=dtype)


@dataclass(frozen=True)
class Case:
    """One comparison of a check. A ratio above 1 is wrong."""

    name: str
    error_ratio: float


@dataclass(frozen=True)
class Check:
    """Kernels beside their references, with new random inputs in every run."""

    name: str
    kernels: tuple[str, ...]  # functions of `triton_kernels` that it calls
    run: Callable[[Place], Iterator[Case]]


def gpu_place(seed: int) -> Place:
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(seed)
    return Place(device, generator, (torch.bfloat16,), is_small=False)


def run_check(check: Check, place: Place, seconds_left: Callable[[], float]) -> dict[str, Any]:
    """Return the row of a check.

    Raises:
        Exception: a CUDA error. Other errors fail the check only.
    """
    cases: list[Case] = []
    row: dict[str, Any] = {"name": check.name, "kernels": list(check.kernels)}
    try:
        for case in check.run(place):
            cases.append(case)
            if seconds_left() <= 0:
                row["left_out"] = f"everything after {case.name!r}: no time was left"
                break
    except Exception as error:
        if "CUDA error" in str(error):
            raise
        row["error"] = f"{type(error).__name__}: {error}"[:2000]
        row["trace"] = traceback.format_exc(limit=-4)
    if not cases and not check.kernels and "error" not in row:
        return row | {"status": "left out", "reason": "no library that takes these shapes is installed"}
    row["num_cases"] = len(cases)
    if cases:
        most = worst(cases)
        row |= {"error_ratio": most.error_ratio, "worst": most.name}
        row["wrong"] = [case.name for case in cases if not case.error_ratio <= 1][:20]
    return row | {"status": "passed" if cases and not row["wrong"] and "error" not in row else "failed"}


def worst(cases: Iterable[Case]) -> Case:
    """Return the case with the largest error ratio; NaN counts as wrong."""
    return max(cases, key=lambda case: case.error_ratio if case.error_ratio == case.error_ratio else math.inf)


def compare(
    actual: Tensor,
    exact: Tensor,
    *,
    roundings: float = 1,
    dtype: torch.dtype | None = None,
    slack: float = FLOAT32_SLACK,
) -> float:
    """Return the error ratio of a result. NaN, and any other shape, is wrong.

    Args:
        exact: float64.
        roundings: how often the result, or what it is a sum of, was rounded to the dtype.
        dtype: of those roundings; None: that of the result.
        slack: relative error of the arithmetic before them.
    """
    if actual.shape != exact.shape:
        return WRONG
    if actual.numel() == 0:
        return 0.0
    tolerance = slack + roundings * torch.finfo(dtype or actual.dtype).eps / 2
    error, tiny = (actual.double() - exact).abs(), torch.finfo(actual.dtype).smallest_normal
    peak = error / (PEAK * tolerance * exact.abs().amax(-1, keepdim=True) + tiny)
    total = error.square().mean().sqrt() / (tolerance * exact.square().mean().sqrt() + tiny)
    ratio = max(float(peak.max()), float(total))
    return WRONG if math.isnan(ratio) or math.isnan(float(total)) else min(ratio, WRONG)


def compare_exactly(actual: Tensor, expected: Tensor) -> float:
    """Return 0, or WRONG where a byte differs: NaN and the sign of zero count too."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return WRONG
    return 0.0 if torch.equal(_bits(actual), _bits(expected)) else WRONG


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(bits)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
