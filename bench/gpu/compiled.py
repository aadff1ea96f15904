"""Compilation of all kernels ahead of checks and measurements, with or without a GPU.

Launches are recorded instead of run, on tensors whose memory is never touched, and compiled as on a GPU. A kernel's key
in Triton's cache depends on the sources of Triton and of the kernel, on ptxas, the target, and the types and alignments
of arguments, but not on the driver. A folder that was filled without a GPU therefore serves a machine with the same
wheel of Triton, and thus the same Python version. Kernels that are missing in it are compiled at their first launch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from moeserve.bench.gpu import engine
from moeserve.bench.gpu.cases import CASES
from moeserve.bench.gpu.check import Case
from moeserve.bench.gpu.inputs import Source
from moeserve.bench.gpu.kernels import TIMED, timed_cases
from moeserve.bench.gpu.launches import Launch, decode, prefill, record_step, recorded_launches
from moeserve.bench.gpu.models import published
from moeserve.bench.gpu.parts import Item, Row
from moeserve.bench.gpu.probe import LOST_TIME
from moeserve.bench.gpu.throughput import CHUNK_TOKENS, MEASURES, MODELS, name_parts
from moeserve.ops.interfaces import KeyValueCache
from moeserve.ops.triton.table import TRITON_KERNELS
from moeserve.ops.weight_blocks import CODES
from moeserve.step_inputs import ChunkSpan, StepInputs

SMALL_CHECK = "norms"  # compiles in about a second


class UntouchedSource(Source):
    """Tensors of large shapes without values, whose memory is only reserved."""

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype)

    def raw_bytes(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8)

    def codes(self, *shape: int) -> Tensor:
        return self.raw_bytes(*shape).view(CODES)

    def encoded(self, cache: KeyValueCache) -> KeyValueCache:
        shape = cache.keys.shape
        scales = [torch.empty(shape[:-1], dtype=torch.bfloat16) for _ in range(2)]
        return KeyValueCache(self.raw_bytes(*shape), self.raw_bytes(*shape), *scales)

    def fill_unread(self, cache: Tensor, step: StepInputs, value: float) -> None:
        pass


def untouched_source() -> UntouchedSource:
    return UntouchedSource(torch.device("cpu"), torch.Generator().manual_seed(0), torch.bfloat16)


def compiling_for(capability: int) -> contextlib.AbstractContextManager[Any]:
    """Compile the kernels of launches with `warmup` for an absent GPU, with the same cache keys as on that GPU."""
    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,  # compiled kernels are kept for each device
        get_current_stream=lambda device: 0,
    )
    return mock.patch.object(driver, "_active", gpu)


def relocate(folder: Path) -> None:
    """Correct the paths in a Triton cache that was filled elsewhere."""
    for path in folder.glob("*/__grp__*.json"):
        names = json.loads(path.read_text())["child_paths"]
        path.write_text(json.dumps({"child_paths": {name: str(path.parent / name) for name in names}}))


def compile_items(capability: int) -> Iterator[Item]:
    """Yield the functions that compile the kernels of models, of checks, and of timed cases."""
    recorders: dict[str, Callable[[], Sequence[Launch]]] = {}
    source = untouched_source()
    steps = [decode(batch, 512) for batch in sorted({each.batch for each in MEASURES})]
    steps.append(prefill(CHUNK_TOKENS, CHUNK_TOKENS))
    for name in MODELS:
        model, quantization = name_parts(name)
        recorders[name] = partial(launches_of_steps, published(model, 2), steps, quantization)
    steps = [decode(4, 40), prefill(40, 40), [*prefill(6, 40), ChunkSpan(6, 1, 20)]]
    for family, dtype in engine.CHECKPOINTS:
        config = engine.config_of(family).to_dict()
        recorders[f"{family}, {dtype}"] = partial(launches_of_steps, config, steps, None, getattr(torch, dtype))
    for name, operations in CASES.items():
        makes = [make for each in operations for _, make in each.cases(source, each.large)]
        recorders[f"the check {name}"] = partial(launches_of, makes)
    for name, make in timed_cases(source, TIMED + LOST_TIME):
        recorders[name] = partial(launches_of, [make])
    for name, record in recorders.items():
        yield f"kernels of {name}", partial(compile_rows, record, capability)


def compile_rows(record: Callable[[], Sequence[Launch]], capability: int) -> Iterator[Row]:
    """Yield one row with the number of kernels, and the number of those that were not in the cache."""
    were_found: dict[str, bool] = {}

    def listen(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        were_found[metadata["hash"]] = cache_hit

    wrong: set[str] = set()
    hashes = set()
    launches = record()
    knobs.compilation.listener = listen
    try:
        with compiling_for(capability):
            for launch in launches:
                try:
                    if launch.kernel is not None:
                        hashes.add(launch.compile().hash)
                except Exception as error:
                    wrong.add(f"{launch.name}: {type(error).__name__}: {error}"[:500])
    finally:
        knobs.compilation.listener = None
    num_new = sum(not is_found for is_found in were_found.values())
    lines = [f"{len(hashes)} kernels, {num_new} of them compiled now"]
    status = "failed" if wrong else "passed"
    yield {"status": status, "num_kernels": len(hashes), "num_new": num_new, "lines": lines, "wrong": sorted(wrong)}


@torch.inference_mode()
def launches_of(makes: Iterable[Callable[[], Case]]) -> list[Launch]:
    with recorded_launches() as launches:
        for make in makes:
            make().bind(TRITON_KERNELS)()
    return launches


def launches_of_steps(config: dict[str, Any], steps: Sequence[list[ChunkSpan]], *more: Any) -> list[Launch]:
    return [launch for spans in steps for part in record_step(config, spans, *more) for launch in part]
