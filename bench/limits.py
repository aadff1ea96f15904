"""The limits of the machine: memory read bandwidth and rate of multiply-adds, by instructions that do nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moeserve.errors import SettingsError
from moeserve.memory import BufferPool
from moeserve.ops.native import missing_kernels, native_kernels

CACHES = Path("/sys/devices/system/cpu")
UNKNOWN_CACHE_BYTES = 1 << 28


@dataclass(frozen=True)
class MachineLimits:
    """The highest rates measured with `num_threads` threads. A multiply-add counts as two operations."""

    read_bandwidth: float  # GB/s, 1e9 bytes
    matmul_rate: float  # bf16 GFLOP/s
    byte_matmul_rate: float  # int8, in 1e9 operations per second
    num_threads: int


@dataclass(frozen=True)
class Work:
    """The minimum memory traffic and arithmetic of a computation."""

    num_bytes: float  # bytes to read
    operations: float  # of matrix products; a multiply-add counts as two
    multiplies_bytes: bool = False  # instead of bf16

    def seconds(self, limits: MachineLimits) -> float:
        """Return the minimum time. Reading and computing overlap, so it is the longer of the two."""
        rate = limits.byte_matmul_rate if self.multiplies_bytes else limits.matmul_rate
        return max(self.num_bytes / (limits.read_bandwidth * 1e9), self.operations / (rate * 1e9))


class LimitProbe:
    """Measures the limits repeatedly, each time in well under a second, with the number of threads of the C++ kernels.

    On a shared machine a limit may last only a second. Each figure is therefore the best of several passes, not their
    median:

    - Reading: loads of whole vectors, with prefetching, from a buffer in large pages.
    - Products: multiply-adds on registers. The limit of a format is that of the fastest instruction, among those that
      the kernels may use, for this format or one of more bits.

    Args:
        buffer_bytes: to read. None: four times the size of all caches, so that little is still in a cache.
        dtype: of the products that `matmul_rate` counts.
        clock: returns seconds; `time.process_time` leaves out those in which other processes had the core.

    Raises:
        SettingsError: there are no C++ kernels.
    """

    def __init__(
        self,
        *,
        buffer_bytes: int | None = None,
        num_passes: int = 3,
        dtype: torch.dtype = torch.bfloat16,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        kernels = native_kernels()
        if kernels is None:
            raise SettingsError(f"limits cannot be measured, because the C++ kernels {missing_kernels()}")
        self._kernels = kernels
        self._num_passes = num_passes
        self._clock = clock
        self._formats = ["float32"] if dtype == torch.float32 else ["float32", "bfloat16"]
        num_bytes = 4 * (cache_bytes() or UNKNOWN_CACHE_BYTES) if buffer_bytes is None else buffer_bytes
        # Not zeros: untouched pages would share one page of zeros.
        self._buffer = BufferPool().empty(num_bytes // 512 * 128, dtype=torch.int32).fill_(1)
        self.measure()  # the first pass starts threads

    def measure(self) -> MachineLimits:
        matmul_rate = max(map(self._multiply_rate, self._formats))
        return MachineLimits(
            read_bandwidth=self._best_rate(self._read) / 1e9,
            matmul_rate=matmul_rate / 1e9,
            byte_matmul_rate=max(matmul_rate, self._multiply_rate("int8")) / 1e9,
            num_threads=self._kernels.num_threads(),
        )

    def _multiply_rate(self, number_format: str) -> float:
        """Return operations per second."""
        return self._best_rate(lambda: 2 * self._kernels.multiply_on_registers(number_format))

    def _read(self) -> int:
        self._kernels.read_memory(self._buffer)
        return self._buffer.nbytes

    def _best_rate(self, work: Callable[[], int]) -> float:
        return max(self._rate(work) for _ in range(self._num_passes))

    def _rate(self, work: Callable[[], int]) -> float:
        start = self._clock()
        amount = work()
        return amount / (self._clock() - start)


def cache_bytes(folder: Path = CACHES) -> int:
    """Return the size of the caches of all cores together; 0 if unknown, as on systems other than Linux."""
    size_of: dict[tuple[str, str], int] = {}
    for cache in folder.glob("cpu[0-9]*/cache/index[0-9]*"):
        level, cores, size = ((cache / name).read_text() for name in ("level", "shared_cpu_list", "size"))
        size_of[level, cores] = int(size.strip().removesuffix("K")) * 1024  # cores share a cache
    return sum(size_of.values())


def mean_limits(limits: Sequence[MachineLimits]) -> MachineLimits:
    """Return the mean of several measurements of the limits."""
    return MachineLimits(
        read_bandwidth=sum(each.read_bandwidth for each in limits) / len(limits),
        matmul_rate=sum(each.matmul_rate for each in limits) / len(limits),
        byte_matmul_rate=sum(each.byte_matmul_rate for each in limits) / len(limits),
        num_threads=limits[0].num_threads,
    )
