"""The items of each part, for a GPU, or at small sizes for a CPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from moeserve.bench.gpu import rehearsal
from moeserve.bench.gpu.parts import Item, Job, Row
from moeserve.ops.interfaces import Kernels

CAPABILITY = (9, 0)  # of the GPU for which kernels are compiled where there is none


def installed(job: Job) -> Any:
    """Return a context in which items run: the interpreter's kernels on a CPU."""
    return rehearsal.rehearsing() if job.on_cpu and job.part != "compile" else contextlib.nullcontext()


def kernels_of(job: Job) -> Kernels:
    from moeserve.ops.select import select_kernels

    return select_kernels(device_of(job))


def device_of(job: Job) -> torch.device:
    return torch.device("cpu" if job.on_cpu else "cuda")


def source_of(job: Job, index: int = 0) -> Any:
    """Return random inputs; items with another index get other ones."""
    from moeserve.bench.gpu.inputs import Source

    device = device_of(job)
    generator = torch.Generator(device).manual_seed(job.seed + index)
    return Source(device, generator, torch.float32 if job.on_cpu else torch.bfloat16)


def check(job: Job, name: str, kernels: Kernels | None = None) -> Row:
    """Check the operations of one kind, and return the row. `kernels`: the table to check; None: that of the job."""
    from moeserve.bench.gpu.cases import CASES
    from moeserve.bench.gpu.check import run_check

    source = source_of(job, list(CASES).index(name))
    cases = (case for each in CASES[name] for case in each.cases(source, each.small if job.is_small else each.large))
    return run_check(cases, job.seconds_left, kernels or kernels_of(job))


def items_of(job: Job) -> Iterator[Item]:
    """Yield the items of a part. Imports only the modules that this part needs."""

    def one(measure: Callable[[], Row]) -> Iterator[Row]:
        yield measure()

    match job.part:
        case "compile":
            from moeserve.bench.gpu.compiled import SMALL_CHECK, compile_items

            major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else CAPABILITY
            for name, rows in compile_items(10 * major + minor):
                if not job.on_cpu or name.endswith(SMALL_CHECK):
                    yield name, rows
        case "checks":
            from moeserve.bench.gpu.cases import CASES

            for name in CASES:
                yield name, partial(one, partial(check, job, name))
        case "engine" | "ranks":
            from moeserve.bench.gpu.engine import COMPARISONS, RANK_COMPARISONS, Prompts, compare

            for each in COMPARISONS if job.part == "engine" else RANK_COMPARISONS:
                if job.on_cpu:
                    if (each.dtype, each.variant) != ("float32", "eager") or each.family not in rehearsal.FAMILIES:
                        continue
                    settings = {**each.settings, **rehearsal.ENGINE_SETTINGS}
                    each = dataclasses.replace(each, prompts=Prompts((2, 5), 3), settings=settings)
                yield each.name, partial(one, partial(compare, each, "cpu" if job.on_cpu else "cuda", job.seed))
        case "probe":
            from moeserve.bench.gpu.probe import probe_items

            yield from probe_items(source_of(job), kernels_of(job))
        case "throughput":
            from moeserve.bench.gpu.throughput import MODELS, SMALL_SIZES, Sizes, measure

            models = {model.name: model for model in MODELS}
            for name in (rehearsal.MODEL,) if job.on_cpu else job.models or models:
                if name not in models:
                    raise ValueError(f"--models: {name!r} is not one of {', '.join(models)}")
                yield name, partial(measure, models[name], job.seconds_left, SMALL_SIZES if job.on_cpu else Sizes())
        case "kernels":
            from moeserve.bench.gpu.kernels import timed_cases, timed_items
            from moeserve.bench.gpu.limits import ColdTimer, measure_limits, replay_seconds

            timer: Any = partial(partial, replay_seconds, num_calls=1) if job.on_cpu else ColdTimer
            cases = timed_cases(source_of(job), is_small=job.on_cpu)
            yield from timed_items(cases, kernels_of(job), partial(measure_limits, device_of(job).type), timer)
