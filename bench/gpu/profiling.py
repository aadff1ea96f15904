"""The time of a decode step by kernel, from torch's profiler, and the idle time of the device."""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from moeserve.bench.decode import Generate, Workload, draw_prompts
from moeserve.bench.gpu.roofline import Roofline

WAITS = "the device waits"
NUM_NAMED = 4  # number of terms in a line of text


@dataclass(frozen=True)
class Profiled:
    """The times of one step, in seconds."""

    wall: float
    processor: float  # processor time of all threads of this process
    kernels: dict[str, float]  # by name


def profile_step(generate: Generate, workload: Workload, device: Literal["cpu", "cuda"]) -> Profiled:
    """Profile two generations of different lengths. Their difference consists only of decode steps.

    On a CPU, torch operations take the place of kernels.
    """
    device_type = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU

    def run(num_tokens: int) -> Profiled:
        kernels: dict[str, float] = collections.defaultdict(float)
        began = time.process_time()
        with profile(activities=[activity]) as profiler:
            wall = generate(draw_prompts(workload, Random(2)), num_tokens)
        for event in profiler.events() or ():
            if event.device_type == device_type and event.cpu_parent is None:
                kernels[event.name] += event.time_range.elapsed_us() / 1e6
        return Profiled(wall, time.process_time() - began, kernels)

    few, many = run(2), run(workload.new_tokens + 1)
    num_steps = workload.new_tokens - 1
    kernels = {name: (many.kernels[name] - few.kernels.get(name, 0.0)) / num_steps for name in many.kernels}
    return Profiled((many.wall - few.wall) / num_steps, (many.processor - few.processor) / num_steps, kernels)


def step_terms(profiled: Profiled, costs: Roofline) -> dict[str, Any]:
    """Return the terms of a step and their bounds, ready for JSON. Kernels that are not ours count as torch's."""
    bounds: dict[str, float] = collections.defaultdict(float)
    for name, bound in costs.bounds().items():
        bounds["torch" if name.startswith("torch ") else name] += bound
    idle = max(0.0, profiled.wall - sum(profiled.kernels.values()))
    terms: dict[str, float] = collections.defaultdict(float, {WAITS: idle})
    for name, seconds in profiled.kernels.items():
        terms[name if name in costs.costs else "torch"] += seconds
    busy = 1 - idle / profiled.wall if profiled.wall > 0 else 0.0
    host = profiled.processor
    return {"seconds": profiled.wall, "host_seconds": host, "busy": busy, "terms": dict(terms), "bounds": dict(bounds)}


def step_text(step: dict[str, Any]) -> str:
    """Format a step with its largest losses."""
    terms, bounds = step["terms"], step["bounds"]
    largest = sorted(terms, key=lambda name: bounds.get(name, 0.0) - terms[name])[:NUM_NAMED]
    losses = ", ".join(f"{name} {1e3 * terms[name]:.2f} (bound {1e3 * bounds.get(name, 0.0):.2f})" for name in largest)
    times = f"a step takes {1e3 * step['seconds']:.2f} ms, the host {1e3 * step['host_seconds']:.2f} ms"
    return f"{times}; the device is busy for {step['busy']:.0%}; most above their bounds, ms: {losses}"
