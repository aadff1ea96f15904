"""The device that kernels are launched on. Triton's interpreter counts as a separate device."""

from __future__ import annotations

import functools

import torch
import triton

NUM_INTERPRETED_PROGRAMS = 3  # few enough that each computes several tiles or splits


def is_interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


@functools.cache
def device_name(device: torch.device) -> str:
    return "CPU" if is_interpreted() else torch.cuda.get_device_name(device)


@functools.cache
def num_programs(device: torch.device, programs_per_sm: int) -> int:
    """Return the number of programs that run at a time, on all multiprocessors."""
    if is_interpreted():
        return NUM_INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * programs_per_sm
