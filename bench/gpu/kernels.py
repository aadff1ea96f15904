"""Times of cases under graph replay, as fractions of this GPU's measured limits, compared with libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from moeserve.bench.gpu.cases import CASES
from moeserve.bench.gpu.check import Case, NamedCases, bytes_of
from moeserve.bench.gpu.inputs import Source, source_of
from moeserve.bench.gpu.limits import ColdTimer, GpuLimits, measure_limits
from moeserve.bench.gpu.parts import Item, Job, Row, bar, is_cuda_error
from moeserve.bench.limits import Work
from moeserve.ops.backend import Backend
from moeserve.ops.select import select_backend

# The most important come first, for runs that are cut short.
TIMED = [
    operation
    for name in dict.fromkeys(["experts", "attention", "latent attention", *CASES])
    for operation in CASES[name]
]


def timed_cases(source: Source, *, is_small: bool = False) -> NamedCases:
    """Yield the cases to time; with `is_small`, small cases of the same operations."""
    for operation in TIMED:
        yield from operation.cases(source, operation.small if is_small and operation.timed else operation.timed)


def items(job: Job) -> Iterator[Item]:
    """Yield measurements, which are small on a CPU. They use the same limits, which are measured again at the end."""
    source = source_of(job)
    device, backend = source.device, select_backend(source.device)
    limits = functools.cache(partial(measure_limits, device.type))
    timer = functools.cache(partial(ColdTimer, device))

    def rows(name: str, make: Callable[[], Case]) -> Iterator[Row]:
        return measure(name, make(), backend, timer(), limits())

    yield "limits before", lambda: [limits().row]
    for name, make in timed_cases(source, is_small=device.type == "cpu"):
        yield name, partial(rows, name, make)
    yield "limits after", lambda: [measure_limits(device.type).row]


@torch.inference_mode()
def measure(
    name: str, case: Case, backend: Backend, timer: Callable[[Callable[[], Any]], float], limits: GpuLimits
) -> Iterator[Row]:
    """Yield the row of our kernels, one of each other implementation, and last the fastest, if there is a choice.

    Our row comes first, so that an implementation that fails or hangs cannot lose it.

    Raises:
        Exception: our own call failed, or a CUDA error.
    """
    call = case.bind(backend)
    work, seconds = case.work or Work(bytes_of((case.inputs, call())), 0.0), timer(call)
    of_bound = limits.seconds(work, is_fp8=case.is_fp8) / seconds
    figures = {"seconds": seconds, "bytes": work.num_bytes, "operations": work.operations}
    figures |= {"operations_per_second": work.operations / seconds, "fraction_of_bound": of_bound}
    figures["fraction_of_memory_bound"] = work.num_bytes / limits.copy_bandwidth / seconds
    rates = f"{work.num_bytes / seconds / 1e9:,.0f} GB/s, {work.operations / seconds / 1e12:,.1f} TFLOP/s"
    lines = [f"{seconds * 1e6:,.1f} us, {rates}, {of_bound:.0%} of the bound"]
    own = {"name": name, "status": "measured", "lines": lines} | figures
    yield own | (bar(figures, *case.bar) if case.bar else {})
    times = {"triton": seconds}
    for label, table in case.libraries.items():
        row: Row = {"name": f"{name}, beside {label}"}
        try:
            other = times[label.split()[0]] = timer(case.bind(table))
        except Exception as error:  # the shape is not supported, or does not fit into memory
            if is_cuda_error(error):
                raise
            yield row | {"status": "left out", "reason": f"{type(error).__name__}: {error}"[:300]}
        else:
            line = f"{other * 1e6:,.1f} us, ours is {other / seconds:.2f} times as fast"
            yield row | {"status": "measured", "seconds": other, "lines": [line]}
    if case.choices and len(times) > 1:
        fastest = min(times, key=times.__getitem__)
        row = {"name": f"{name}, fastest", "status": "measured", "lines": [fastest]}
        yield row | {"choices": case.choices, "fastest": fastest}
