"""Times of cases under graph replay, as fractions of this GPU's measured limits, compared with torch and libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from moeserve.bench.gpu.cases import CASES
from moeserve.bench.gpu.check import Call, Case, Make, NamedCases, tensors_of
from moeserve.bench.gpu.costs import GpuLimits, Work
from moeserve.bench.gpu.inputs import Source
from moeserve.bench.gpu.limits import Timer, limits_row
from moeserve.bench.gpu.parts import Item, Row, is_cuda_error
from moeserve.ops.interfaces import Kernels
from moeserve.ops.libraries.measured import NAMES
from moeserve.ops.torch.table import TORCH_KERNELS

# The most important come first, for runs that are cut short.
FIRST = ("experts", "attention", "latent attention")


def timed_cases(source: Source, *, is_small: bool = False) -> NamedCases:
    """Yield the cases to time; with `is_small`, small cases of the same operations."""
    for name in dict.fromkeys([*FIRST, *CASES]):
        for operation in CASES[name]:
            yield from operation.cases(source, operation.small if is_small and operation.timed else operation.timed)


def timed_items(
    cases: NamedCases, kernels: Kernels, measure_limits: Callable[[], GpuLimits], make_timer: Callable[[], Timer]
) -> Iterator[Item]:
    """Yield all measurements on this GPU. They use the same limits, which are measured again at the end."""
    limits, timer = functools.cache(measure_limits), functools.cache(make_timer)

    def rows(name: str, make: Callable[[], Case]) -> Iterator[Row]:
        return measure(name, make(), kernels, timer(), limits())

    yield "limits before", lambda: [limits_row(limits())]
    for name, make in cases:
        yield name, partial(rows, name, make)
    yield "limits after", lambda: [limits_row(measure_limits())]


@torch.inference_mode()
def measure(name: str, case: Case, kernels: Kernels, timer: Timer, limits: GpuLimits) -> Iterator[Row]:
    """Yield the row of our kernels, one of each other implementation, and last the fastest, if there is a choice.

    Our row comes first, so that an implementation that fails or hangs cannot lose it.

    Raises:
        Exception: our own call failed, or a CUDA error.
    """
    call = case.bind(kernels)
    work, seconds = work_of(case, call), timer(call)
    row: Row = {
        "name": name,
        "status": "measured",
        "seconds": seconds,
        "bytes": work.num_bytes,
        "operations": work.operations,
        "operations_per_second": work.operations / seconds,
        "fraction_of_memory_bound": work.memory_seconds(limits) / seconds,
        "fraction_of_bound": work.bound_seconds(limits) / seconds,
    }
    rates = f"{work.num_bytes / seconds / 1e9:,.0f} GB/s, {work.operations / seconds / 1e12:,.1f} TFLOP/s"
    row["lines"] = [f"{seconds * 1e6:,.1f} us, {rates}, {row['fraction_of_bound']:.0%} of the bound"]
    row["lines"] += [case.note] if case.note else []
    yield row if case.bar is None else row | {"bars": [case.bar.verdict(row)]}
    times = {"triton": seconds}
    of_torch: dict[str, Make] = {"torch": partial(case.operation, TORCH_KERNELS)} if case.is_beside_torch else {}
    for label, make in {**case.others, **of_torch, **case.beside}.items():
        row = {"name": f"{name}, beside {label}"}
        try:
            other = times[label.split()[0]] = timer(partial(make(), *(() if label in case.beside else case.inputs)))
        except Exception as error:  # the shape is not supported, or does not fit into memory
            if is_cuda_error(error):
                raise
            torch.cuda.empty_cache()
            yield row | {"status": "left out", "reason": f"{type(error).__name__}: {error}"[:300]}
        else:
            line = f"{other * 1e6:,.1f} us, ours is {other / seconds:.2f} times as fast"
            yield row | {"status": "measured", "seconds": other, "times_as_fast": other / seconds, "lines": [line]}
    choosable = [each for each in NAMES if each in times]
    if case.choices and len(choosable) > 1:
        fastest = min(choosable, key=times.__getitem__)
        row = {"name": f"{name}, fastest", "status": "measured", "lines": [fastest]}
        yield row | {"choices": case.choices, "fastest": fastest}


def work_of(case: Case, call: Call) -> Work:
    """Return the work of a case. By default, each input and each result is moved once."""
    if case.work is not None:
        return case.work
    return Work(float(sum(each.nbytes for each in tensors_of((case.inputs, call()), dequantizes=False))))
