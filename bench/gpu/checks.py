"""Every kernel beside float64: all checks, and how they run on a GPU."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moeserve.bench.gpu import check_attention, check_experts, check_rows
from moeserve.bench.gpu.check import Case, Check, Place, worst

# The longest first, so that those who share the work end together.
CHECKS: tuple[Check, ...] = (*check_experts.CHECKS[::-1], *check_attention.CHECKS, *check_rows.CHECKS)


def gpu_place(seed: int) -> Place:
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(seed)
    return Place(device, generator, (torch.bfloat16,), is_small=False)


def run_check(check: Check, place: Place, seconds_left: Callable[[], float]) -> dict[str, Any]:
    """The row of a check. One that fails, or cannot run, says where."""
    cases: list[Case] = []
    row: dict[str, Any] = {"name": check.name, "kernels": list(check.kernels)}
    try:
        for case in check.run(place):
            cases.append(case)
            if seconds_left() <= 0:
                row["left_out"] = f"what comes after {case.name!r}: no time was left"
                break
    except Exception as error:  # whatever a kernel or its compiler does, the other checks go on
        row["error"] = f"{type(error).__name__}: {error}"[:2000]
        row["trace"] = traceback.format_exc(limit=-4)
    row["num_cases"] = len(cases)
    if cases:
        most = worst(cases)
        row |= {"error_ratio": most.error_ratio, "worst": most.name}
        row["wrong"] = [case.name for case in cases if not case.error_ratio <= 1][:20]
    if not cases and not check.kernels and "error" not in row:
        return row | {"status": "told", "reason": "none of what it checks is installed, and takes these shapes"}
    is_right = bool(cases) and not row["wrong"] and "error" not in row
    return row | {"status": "passed" if is_right else "failed"}


def covered(checks: Sequence[Check] = CHECKS) -> set[str]:
    """The kernels that are checked."""
    return {kernel for check in checks for kernel in check.kernels}
