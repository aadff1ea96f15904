"""The GPU, its measured limits, and the timing of calls under graph replay with a cold cache.

Without a GPU, as in a rehearsal, calls are timed by the host's clock and repeated instead of replayed.
"""

from __future__ import annotations

import functools
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moeserve.bench.gpu.costs import GpuLimits
from moeserve.bench.gpu.parts import is_cuda_error
from moeserve.bench.harness import environment
from moeserve.machine import installed_version

COPIED_BYTES, SMALL_COPIED_BYTES = 2**30, 2**12
PRODUCT_SIZE, SMALL_PRODUCT_SIZE = 8192, 32
FLUSHED_BYTES = 2**27  # read between calls: larger than any L2 cache
NUM_REPLAYS = 7
GRAPH_SECONDS = 0.01  # approximate length of one replay
MAX_CALLS = 20  # maximum calls in one graph
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def gpu_environment(commit: str | None = None, *, has_gpu: bool = True) -> dict[str, Any]:
    """Return machine, GPU and versions of a result, ready for JSON. Memory is in bytes.

    Args:
        commit: commit of installed files; None: the commit of this checkout.
        has_gpu: False if kernels are only compiled, or run on a CPU.
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
        "isa": f"sm_{properties.major}{properties.minor}",
        "memory": properties.total_memory,
        "driver": driver and driver[1],
    }
    return found


def measure_limits(device: str = "cuda") -> GpuLimits:
    """Time copies of a gibibyte, and products of square matrices larger than any cache. On a CPU, both are small."""
    on_cpu = device == "cpu"
    source = torch.ones(SMALL_COPIED_BYTES if on_cpu else COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = event_seconds(lambda: target.copy_(source))
    size = SMALL_PRODUCT_SIZE if on_cpu else PRODUCT_SIZE
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    output = torch.empty_like(left)
    operations = 2.0 * size**3
    bf16_rate = operations / event_seconds(lambda: torch.mm(left, right.T, out=output))
    try:
        left_8, right_8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).T
        one = torch.ones((), device=device)
        options: dict[str, Any] = dict(scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        fp8_rate = operations / event_seconds(lambda: torch._scaled_mm(left_8, right_8, **options))
    except Exception as error:  # the GPU or torch does not support these products
        if is_cuda_error(error):
            raise
        print(f"8-bit products count as twice as fast as 16-bit ones: {type(error).__name__}: {error}", flush=True)
        fp8_rate = 2 * bf16_rate
    return GpuLimits(2.0 * len(source) / copy_seconds, bf16_rate, fp8_rate)


def limits_row(limits: GpuLimits) -> dict[str, Any]:
    rates = f"{limits.bf16_rate / 1e12:.0f} TFLOP/s in bf16, {limits.fp8_rate / 1e12:.0f} in fp8"
    line = f"{limits.copy_bandwidth / 1e9:,.0f} GB/s copied, {rates}"
    return {"status": "measured", "limits": vars(limits), "lines": [line]}


def event_seconds(call: Callable[[], object], num_calls: int = 10) -> float:
    """Return the median time of several calls, each measured between two events, after two uncounted calls."""
    for _ in range(2):
        call()
    return statistics.median(_seconds_of(call) for _ in range(num_calls))


def _seconds_of(call: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


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
    if not torch.cuda.is_available():
        return event_seconds(call, num_calls=1)
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
