"""The items of each part, for a GPU, or at small sizes for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from moeserve.bench.gpu.inputs import Source
from moeserve.bench.gpu.parts import Item, Job, Row
from moeserve.ops.select import select_kernels

CAPABILITY = (9, 0)  # of the GPU for which kernels are compiled where there is none
REHEARSED_MODEL = "DeepSeek-V2-Lite"  # has latent attention and shared experts


def source_of(job: Job, index: int = 0) -> Source:
    """Return random inputs; items with another index get other ones."""
    device = torch.device("cpu" if job.on_cpu else "cuda")
    generator = torch.Generator(device).manual_seed(job.seed + index)
    return Source(device, generator, torch.float32 if job.on_cpu else torch.bfloat16)


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
            from moeserve.bench.gpu.cases import CASES, cases_of_check
            from moeserve.bench.gpu.check import run_check

            for index, name in enumerate(CASES):
                source = source_of(job, index)
                cases = cases_of_check(name, source, is_small=job.is_small)
                yield name, partial(one, partial(run_check, cases, job.seconds_left, select_kernels(source.device)))
        case "engine":
            from moeserve.bench.gpu.engine import COMPARISONS, REHEARSED, compare

            for each in REHEARSED if job.on_cpu else COMPARISONS:
                yield each.name, partial(one, partial(compare, each, "cpu" if job.on_cpu else "cuda", job.seed))
        case "probe":
            from moeserve.bench.gpu.probe import Probe

            source = source_of(job)
            yield from Probe(source, select_kernels(source.device)).items()
        case "throughput":
            from moeserve.bench.gpu.throughput import MODELS, measure

            for name in (REHEARSED_MODEL,) if job.on_cpu else job.models or MODELS:
                if name not in MODELS:
                    raise ValueError(f"--models: {name!r} is not one of {', '.join(MODELS)}")
                yield name, partial(measure, name, job.seconds_left, job.on_cpu)
        case "kernels":
            from moeserve.bench.gpu.kernels import timed_cases, timed_items

            source = source_of(job)
            cases = timed_cases(source, is_small=job.on_cpu)
            yield from timed_items(cases, select_kernels(source.device), source.device)
