"""What the GPU is and what it can do, and how a call's time on it is taken. Knows no kernel."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from moeserve.bench.gpu.costs import GpuLimits
from moeserve.bench.harness import environment
from moeserve.machine import installed_version

COPIED_BYTES = 2**30
PRODUCT_SIZE = 8192
FLUSHED_BYTES = 2**27  # read between calls: more than any L2 cache holds
NUM_REPLAYS = 7  # of which the median counts
GRAPH_SECONDS = 0.01  # of one replay, about; long calls are replayed one by one
MAX_CALLS = 20  # of one replay
DEVICE = "cuda"
LONG_CALL_SECONDS = 0.02  # a longer call is replayed fewer times


def gpu_environment() -> dict[str, Any]:
    """The machine, the GPU and the versions behind a figure, ready for JSON. Memory is in bytes."""
    found = environment()
    versions = {name: installed_version(name) or None for name in ("triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")}
    found["versions"] |= versions | {"cuda": torch.version.cuda}
    properties = torch.cuda.get_device_properties(0)
    found["gpu"] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": driver_version(Path("/proc/driver/nvidia/version")),
    }
    return found


def driver_version(told: Path) -> str | None:
    """As the kernel module tells it, else as nvidia-smi does."""
    if told.exists() and (match := re.search(r"\s(\d+\.\d+(\.\d+)?)\s", told.read_text())):
        return match[1]
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    question = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(question, capture_output=True, text=True, timeout=20, check=False)
    return answer.stdout.split("\n")[0].strip() or None


def measure_limits() -> GpuLimits:
    """Copies of a gibibyte, and products of square matrices, which are larger than any cache."""
    bf16_seconds, fp8_seconds = _product_seconds()
    operations = 2.0 * PRODUCT_SIZE**3
    fp8_rate = None if fp8_seconds is None else operations / fp8_seconds
    return GpuLimits(2.0 * COPIED_BYTES / _copy_seconds(), operations / bf16_seconds, fp8_rate)


def _copy_seconds() -> float:
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    return event_seconds(lambda: target.copy_(source))


def _product_seconds() -> tuple[float, float | None]:
    """In bf16, and in 8-bit floats where there is such a product."""
    left, right = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda").bfloat16() for _ in range(2))
    output = torch.empty_like(left)
    bf16_seconds = event_seconds(lambda: torch.mm(left, right.T, out=output))
    try:
        left_8, right_8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).T
        one = torch.ones((), device="cuda")
        scaled = torch._scaled_mm
        fp8_seconds = event_seconds(
            lambda: scaled(left_8, right_8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        )
    except RuntimeError:  # a GPU or a torch without it
        return bf16_seconds, None
    return bf16_seconds, fp8_seconds


def gpu_memory() -> int:
    """Bytes, all of them."""
    return int(torch.cuda.get_device_properties(0).total_memory)


def synchronize() -> None:
    """Waits until the GPU has done what it was asked for."""
    torch.cuda.synchronize()


def limits_row(name: str, limits: GpuLimits) -> dict[str, Any]:
    return {"name": name, "status": "told", "limits": asdict(limits)}


def event_seconds(call: Callable[[], object], num_calls: int = 10) -> float:
    """The median of some calls, each between two events, after two that are not counted."""
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


class ColdTimer:
    """Times calls as a model makes them: replayed from a CUDA graph, with nothing of their own in the L2 cache."""

    def __init__(self) -> None:
        self._flushed = torch.ones(FLUSHED_BYTES // 4, dtype=torch.int32, device=DEVICE)
        self._flush_seconds: dict[int, float] = {}

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call: of replays with flushes, less that of the flushes alone."""
        call()  # compiles
        once = event_seconds(call, num_calls=3)
        num_calls = max(1, min(MAX_CALLS, int(GRAPH_SECONDS / max(once, 1e-6))))

        def both() -> None:
            self._flush()
            call()

        if num_calls not in self._flush_seconds:
            self._flush_seconds[num_calls] = replay_seconds(self._flush, num_calls)
        num_replays = 3 if once > LONG_CALL_SECONDS else NUM_REPLAYS
        return max(replay_seconds(both, num_calls, num_replays) - self._flush_seconds[num_calls], 1e-9)

    def seconds_without_graph(self, call: Callable[[], object]) -> float:
        """Of what waits for the GPU on its way, so that no graph can hold it."""

        def both() -> None:
            self._flush()
            call()

        return max(event_seconds(both, num_calls=5) - event_seconds(self._flush, num_calls=5), 1e-9)

    def _flush(self) -> None:
        self._flushed.sum()


def replay_seconds(call: Callable[[], object], num_calls: int, num_replays: int = NUM_REPLAYS) -> float:
    """Of one call in a graph of several."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        call()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            call()
    return event_seconds(graph.replay, num_calls=num_replays) / num_calls
