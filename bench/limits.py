"""The limits of the machine: memory read bandwidth and rate of matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moeserve.ops import products as products_ops
from moeserve.ops.products.interface import OpenWeights, PackedFormat
from moeserve.ops.select import select_backend


@dataclass(frozen=True)
class MachineLimits:
    """The highest rates measured with `num_threads` threads, in torch and in our own matrix products."""

    read_bandwidth: float  # GB/s, 1e9 bytes
    matmul_rate: float  # bf16 GFLOP/s; a multiply-add counts as two
    num_threads: int


@dataclass(frozen=True)
class Work:
    """The minimum memory traffic and arithmetic of a computation."""

    num_bytes: float  # bytes to read
    operations: float  # of matrix products; a multiply-add counts as two

    def seconds(self, limits: MachineLimits) -> float:
        """Return the minimum time. Reading and computing overlap, so it is the longer of the two."""
        return max(self.num_bytes / (limits.read_bandwidth * 1e9), self.operations / (limits.matmul_rate * 1e9))


class LimitProbe:
    """Measures the limits repeatedly, each time in well under a second, with torch's current number of threads.

    On a shared machine a limit may last only a second. Each figure is therefore the best of several passes, not their
    median:

    - Reading: the sum of a float32 buffer of `buffer_bytes`, or the dot product of its halves, whichever is faster.
      The buffer must be larger than the caches.
    - Products: `matmul_size` / 4 rows times a square bf16 weight of `matmul_size`, with torch's linear or our packed
      product, whichever is faster.

    Other code may read slightly faster than torch, so a fraction of this limit can exceed 1.

    Args:
        dtype: of the products.
        clock: returns seconds; `time.process_time` leaves out those in which other processes had the core.
    """

    def __init__(
        self,
        *,
        buffer_bytes: int = 1 << 30,
        matmul_size: int = 4096,
        num_passes: int = 3,
        dtype: torch.dtype = torch.bfloat16,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_passes = num_passes
        self._clock = clock
        buffer = torch.ones(buffer_bytes // 8 * 2)  # not zeros: untouched pages would share one page of zeros
        first_half, second_half = buffer.chunk(2)
        self._num_bytes = buffer.nbytes
        self._reads: list[Callable[[], object]] = [buffer.sum, lambda: torch.dot(first_half, second_half)]

        rows = torch.randn(max(1, matmul_size // 4), matmul_size).to(dtype)
        weight = torch.randn(matmul_size, matmul_size).to(dtype)
        self._operations = 2 * rows.numel() * matmul_size
        self._products: list[Callable[[], object]] = [lambda: torch.nn.functional.linear(rows, weight)]
        backend = select_backend(torch.device("cpu"))
        packing = backend.packing
        if packing is not None:
            packed_format: PackedFormat = "float32" if dtype == torch.float32 else "bfloat16"
            packed = packing.pack(OpenWeights(weight[None]), packed_format, in_place=False)
            product = products_ops.SINGLE.of_packed(backend.native, packed)
            self._products.append(lambda: product.multiply(rows))
        self.measure()  # the first pass touches pages and starts threads

    def measure(self) -> MachineLimits:
        return MachineLimits(
            read_bandwidth=self._num_bytes / self._best_seconds(self._reads) / 1e9,
            matmul_rate=self._operations / self._best_seconds(self._products) / 1e9,
            num_threads=torch.get_num_threads(),
        )

    def _best_seconds(self, ways: Sequence[Callable[[], object]]) -> float:
        return min(self._seconds(way) for _ in range(self._num_passes) for way in ways)

    def _seconds(self, work: Callable[[], object]) -> float:
        start = self._clock()
        work()
        return self._clock() - start


def measure_limits(*, buffer_bytes: int = 1 << 30, matmul_size: int = 4096, num_passes: int = 5) -> MachineLimits:
    """Measure the limits once. See `LimitProbe`."""
    return LimitProbe(buffer_bytes=buffer_bytes, matmul_size=matmul_size, num_passes=num_passes).measure()


def mean_limits(limits: Sequence[MachineLimits]) -> MachineLimits:
    """Return the mean of several measurements of the limits."""
    return MachineLimits(
        read_bandwidth=sum(each.read_bandwidth for each in limits) / len(limits),
        matmul_rate=sum(each.matmul_rate for each in limits) / len(limits),
        num_threads=limits[0].num_threads,
    )
