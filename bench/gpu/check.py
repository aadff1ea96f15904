"""The comparison of a kernel's results with those of torch in float32, and the rows of checks.

An operation is run by the table of kernels that is checked, and by the torch table on the same inputs in float32. One
rule holds for all floating-point results: the root of the mean square of all errors may be the tolerance times that of
the results, and each error `PEAK` times the tolerance times the largest result of its row. The tolerance is `ROUNDINGS`
roundings to the result's dtype, and `FLOAT32_SLACK` for float32 arithmetic. Integers must be equal.
"""

from __future__ import annotations

import dataclasses
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.bench.gpu.inputs import Source
from moeserve.bench.gpu.parts import is_cuda_error
from moeserve.ops.interfaces import Kernels
from moeserve.ops.torch.table import TORCH_KERNELS
from moeserve.ops.triton.table import TRITON_KERNELS

WRONG = 1e9  # the error ratio of a wrong integer, of NaN, or of another shape: JSON has no infinity
ROUNDINGS = 4
FLOAT32_SLACK = 2.0**-12  # relative: sums of up to 16384 products on tensor cores, and approximated functions
FP8_SLACK = 2.0**-6  # tensor cores of sm_90 keep 13 bits below the largest of 32 products of 8-bit floats
PEAK = 8.0  # the errors of a row are about normally distributed; 8 standard deviations of them never occur

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One operation on one set of inputs."""

    name: str
    run: Callable[..., Results]  # (kernels, *inputs) -> results by name; leaves the inputs unchanged
    inputs: tuple[Any, ...]
    slack: float = FLOAT32_SLACK
    kernels: Kernels | None = None  # another table than the checked one

    def ratios(self, kernels: Kernels) -> Iterator[tuple[str, float]]:
        """Yield the name and error ratio of each result. A ratio above 1 is wrong."""
        found = self.run(self.kernels or kernels, *self.inputs)
        expected = self.run(TORCH_KERNELS, *map(in_float32, self.inputs))
        for result, actual in found.items():
            yield f"{result}, {self.name}", compare(actual, expected[result], self.slack)


# (source, True for small shapes, since others take minutes in the interpreter) -> cases with new random inputs
Check = Callable[[Source, bool], Iterator[Case]]


def run_check(
    check: Check,
    source: Source,
    seconds_left: Callable[[], float],
    *,
    is_small: bool = False,
    kernels: Kernels = TRITON_KERNELS,
) -> dict[str, Any]:
    """Return the row of a check.

    Raises:
        Exception: a CUDA error. Other errors fail the check only.
    """
    ratios: dict[str, float] = {}
    row: dict[str, Any] = {}
    try:
        for case in check(source, is_small):
            ratios |= case.ratios(kernels)
            if seconds_left() <= 0:
                row["left_out"] = f"everything after {case.name!r}: no time was left"
                break
    except Exception as error:
        if is_cuda_error(error):
            raise
        row |= {"error": f"{type(error).__name__}: {error}"[:2000], "log": traceback.format_exc(limit=-4)}
    if not ratios and "error" not in row:
        return {"status": "left out", "reason": "no library that takes these shapes is installed"}
    wrong = [name for name, ratio in ratios.items() if ratio > 1][:20]
    row |= {"status": "failed" if wrong or "error" in row else "passed", "num_cases": len(ratios), "wrong": wrong}
    if ratios:
        worst = max(ratios, key=ratios.__getitem__)
        row |= {"worst": worst, "error_ratio": ratios[worst]}
        row["lines"] = [f"{len(ratios)} cases, worst {ratios[worst]:.3g} of the tolerance ({worst})"]
    return row


def in_float32(value: Any) -> Any:
    """Return an input with its tensors in float32, and with zeros for NaN. Integers and float64 are unchanged."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return (value.float() if value.element_size() < 4 else value).nan_to_num(0.0)
    if type(value) is tuple:
        return tuple(map(in_float32, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: in_float32(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return type(value)(**changed)
    return value


def compare(actual: Tensor, expected: Tensor, slack: float = FLOAT32_SLACK) -> float:
    """Return the error ratio of a result. NaN, and any other shape, is wrong."""
    if actual.shape != expected.shape:
        return WRONG
    if not actual.is_floating_point():
        return 0.0 if torch.equal(actual, expected.to(actual.dtype)) else WRONG
    if actual.numel() == 0:
        return 0.0
    tolerance = slack + ROUNDINGS * torch.finfo(actual.dtype).eps / 2
    exact = expected.double()
    error, tiny = (actual.double() - exact).abs(), torch.finfo(actual.dtype).smallest_normal
    peak = error / (PEAK * tolerance * exact.abs().amax(-1, keepdim=True) + tiny)
    total = error.square().mean().sqrt() / (tolerance * exact.square().mean().sqrt() + tiny)
    ratio = max(float(peak.max()), float(total))
    return WRONG if math.isnan(float(peak.sum() + total)) else min(ratio, WRONG)
