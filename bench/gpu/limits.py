"""The GPU, its measured limits, and the timing of calls.

Without a GPU, as in a rehearsal, calls are timed by the host's clock, and not replayed from a graph.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench, do_bench_cudagraph

from moeserve.bench.gpu.parts import Row, is_cuda_error
from moeserve.bench.harness import environment
from moeserve.bench.limits import Work
from moeserve.machine import installed_version

FLUSHED_BYTES = 2**27  # read between calls: larger than any L2 cache
DRIVER_FILE = Path("/proc/driver/nvidia/version")
LIBRARIES = ("triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclass(frozen=True)
class GpuLimits:
    """The rates that this GPU has just reached while otherwise idle."""

    copy_bandwidth: float  # bytes/s, counting reads and writes
    bf16_rate: float  # operations/s of a dense product; a multiply-add counts as two
    fp8_rate: float

    def seconds(self, work: Work, *, is_fp8: bool = False) -> float:
        """Return the minimum time of work. Moving and computing overlap, so it is the longer of the two."""
        return max(
            work.num_bytes / self.copy_bandwidth, work.operations / (self.fp8_rate if is_fp8 else self.bf16_rate)
        )

    @property
    def row(self) -> Row:
        rates = f"{self.bf16_rate / 1e12:.0f} TFLOP/s in bf16, {self.fp8_rate / 1e12:.0f} in fp8"
        lines = [f"{self.copy_bandwidth / 1e9:,.0f} GB/s copied, {rates}"]
        return {"status": "measured", "limits": vars(self), "lines": lines}


def gpu_environment(commit: str | None, has_gpu: bool) -> Row:
    """Return machine, GPU and versions of a result, ready for JSON. Memory is in bytes.

    Args:
        commit: commit of installed files; None: the commit of this checkout.
        has_gpu: False if kernels are only compiled, or run on a CPU.
    """
    found = environment()
    found["commit"] = commit or found["commit"]
    found["versions"] |= {name: installed_version(name) or None for name in LIBRARIES} | {"cuda": torch.version.cuda}
    if not has_gpu:
        return found | {"gpu": {"name": "none"}}
    gpu = torch.cuda.get_device_properties(0)
    driver = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", DRIVER_FILE.read_text()) if DRIVER_FILE.exists() else None
    facts = {"name": gpu.name, "isa": f"sm_{gpu.major}{gpu.minor}", "memory": gpu.total_memory}
    return found | {"gpu": facts | {"driver": driver and driver[1]}}


def measure_limits(device: str = "cuda") -> GpuLimits:
    """Time copies of a gibibyte, and products of square matrices larger than any cache. On a CPU, both are small."""
    num_bytes, size = (2**12, 32) if device == "cpu" else (2**30, 8192)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target, operations = torch.empty_like(source), 2.0 * size**3
    copy_bandwidth = 2 * num_bytes / eager_seconds(lambda: target.copy_(source))
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    bf16_rate = operations / eager_seconds(lambda: torch.mm(left, right.T))
    try:
        left_8, right_8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).T
        one = torch.ones((), device=device)
        options: dict[str, Any] = dict(scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        fp8_rate = operations / eager_seconds(lambda: torch._scaled_mm(left_8, right_8, **options))
    except Exception as error:  # the GPU or torch does not support these products
        if is_cuda_error(error):
            raise
        print(f"8-bit products count as twice as fast as 16-bit ones: {type(error).__name__}: {error}", flush=True)
        fp8_rate = 2 * bf16_rate
    return GpuLimits(copy_bandwidth, bf16_rate, fp8_rate)


def eager_seconds(call: Callable[[], object]) -> float:
    """Return the median time of a call that the host launches: that of its launches if they take longer."""
    if torch.cuda.is_available():
        return float(do_bench(call, return_mode="median")) / 1e3
    call()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def replay_seconds(call: Callable[[], object]) -> float:
    """Return the median time of a call that is replayed from a CUDA graph."""
    if not torch.cuda.is_available():
        return eager_seconds(call)
    return float(do_bench_cudagraph(call, rep=10, return_mode="median")) / 1e3


class ColdTimer:
    """Times calls as in a model: replayed from a CUDA graph, with none of their data in the L2 cache."""

    def __init__(self, device: torch.device) -> None:
        self._flushed = torch.ones(FLUSHED_BYTES if device.type == "cuda" else 4, dtype=torch.uint8, device=device)
        self._flush_seconds = functools.cache(lambda: replay_seconds(self.flush))

    def __call__(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call: the time of replays with flushes, minus that of the flushes alone."""

        def cold() -> None:
            self.flush()
            call()

        return max(replay_seconds(cold) - self._flush_seconds(), 1e-9)

    def flush(self) -> None:
        self._flushed.view(torch.int32).sum()
