"""The GPU, its measured limits, and the timing of calls under graph replay with a cold cache."""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moeserve.bench.gpu.costs import GpuLimits
from moeserve.bench.harness import environment
from moeserve.machine import installed_version

COPIED_BYTES = 2**30
PRODUCT_SIZE = 8192
FLUSHED_BYTES = 2**27  # read between calls: larger than any L2 cache
NUM_REPLAYS = 7
GRAPH_SECONDS = 0.01  # approximate length of one replay
MAX_CALLS = 20  # maximum calls in one graph
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def gpu_environment(commit: str | None = None, *, has_gpu: bool = True) -> dict[str, Any]:
    """Return machine, GPU and versions of a result, ready for JSON. Memory is in bytes.

    Args:
        commit: commit of an installed wheel; None: the commit of this checkout.
        has_gpu: False if kernels are only compiled.
    """
    found = environment()
    found["commit"] = commit or found["commit"]
    versions = {name: installed_version(name) or None for name in ("triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")}
    found["versions"] |= versions | {"cuda": torch.version.cuda}
    if not has_gpu:
        return found | {"gpu": {"name": "none"}}
    properties = torch.cuda.get_device_properties(0)
    driver = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", DRIVER_FILE.read_text()) if DRIVER_FILE.exists() else None
    found["gpu"] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "isa": f"sm_{properties.major}{properties.minor}",
        "memory": properties.total_memory,
        "driver": driver and driver[1],
    }
    return found


def measure_limits(
    device: str = "cuda", copied_bytes: int = COPIED_BYTES, product_size: int = PRODUCT_SIZE
) -> GpuLimits:
    """Time copies of a gibibyte, and products of square matrices larger than any cache."""
    source = torch.empty(copied_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    copy_seconds = event_seconds(lambda: target.copy_(source))
    left, right = (torch.randn(product_size, product_size, device=device).bfloat16() for _ in range(2))
    output = torch.empty_like(left)
    operations = 2.0 * product_size**3
    bf16_rate = operations / event_seconds(lambda: torch.mm(left, right.T, out=output))
    try:
        left_8, right_8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).T
        one = torch.ones((), device=device)
        options: dict[str, Any] = dict(scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        fp8_rate = operations / event_seconds(lambda: torch._scaled_mm(left_8, right_8, **options))
    except RuntimeError:  # the GPU or torch does not support 8-bit products
        fp8_rate = 2 * bf16_rate
    return GpuLimits(2.0 * copied_bytes / copy_seconds, bf16_rate, fp8_rate)


def limits_row(limits: GpuLimits) -> dict[str, Any]:
    rates = f"{limits.bf16_rate / 1e12:.0f} TFLOP/s in bf16, {limits.fp8_rate / 1e12:.0f} in fp8"
    line = f"{limits.copy_bandwidth / 1e9:,.0f} GB/s copied, {rates}"
    return {"status": "measured", "limits": vars(limits), "lines": [line]}


def event_seconds(call: Callable[[], object], num_calls: int = 10) -> float:
    """Return the median time of several calls, each measured between two events, after two uncounted calls."""
    for _ in range(2):
        call()
    seconds = []
    for _ in range(num_calls):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


Timer = Callable[[Callable[[], object]], float]  # a call -> its seconds under graph replay


class ColdTimer:
    """Times calls as in a model: replayed from a CUDA graph, with none of their data in the L2 cache."""

    def __init__(self, device: str = "cuda") -> None:
        self._flushed = torch.ones(FLUSHED_BYTES // 4, dtype=torch.int32, device=device)
        self._flush_seconds = functools.cache(functools.partial(replay_seconds, self.flush))

    def __call__(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call: the time of replays with flushes, minus that of the flushes alone."""

        def cold() -> None:
            self.flush()
            call()

        call()  # compiles
        once = event_seconds(call, num_calls=3)
        num_calls = max(1, min(MAX_CALLS, int(GRAPH_SECONDS / max(once, 1e-6))))
        return max(replay_seconds(cold, num_calls) - self._flush_seconds(num_calls), 1e-9)

    def flush(self) -> None:
        self._flushed.sum()


def replay_seconds(call: Callable[[], object], num_calls: int, num_replays: int = NUM_REPLAYS) -> float:
    """Return the seconds of one call, from a graph of several calls."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        call()
    torch.cuda.current_stream().wait_stream(side_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            call()
    return event_seconds(graph.replay, num_calls=num_replays) / num_calls
