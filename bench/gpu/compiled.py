"""Compilation of all kernels ahead of checks and measurements, with or without a GPU.

Launches are recorded instead of run, on tensors whose memory is never touched, and compiled as on a GPU. A kernel's key
in Triton's cache depends on the sources of Triton and of the kernel, on ptxas, the target, and the types and alignments
of arguments, but not on the driver. A folder that was filled without a GPU therefore serves a machine with the same
wheel of Triton, and thus the same Python version. Kernels that are missing in it are compiled at their first launch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
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
from moeserve.bench.gpu.kernels import timed_cases
from moeserve.bench.gpu.launches import Launch, decode, prefill, record_step, recorded_launches
from moeserve.bench.gpu.parts import Item, Row
from moeserve.bench.gpu.throughput import MODELS, Model, Sizes
from moeserve.ops.interfaces import KeyValueCache
from moeserve.ops.triton.table import TRITON_KERNELS
from moeserve.ops.weight_blocks import CODES
from moeserve.step_inputs import ChunkSpan

SMALLEST_LAYERS = 2  # minimum layers of a model: one of each kind
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

    def scattered(self, *shape: int, places: Any, unread: float) -> Tensor:
        return self.normal(*shape)


def untouched_source() -> UntouchedSource:
    return UntouchedSource(torch.device("cpu"), torch.Generator().manual_seed(0), torch.bfloat16)


class AbsentGpu:
    """A Triton driver that compiles for an absent GPU, with the same cache keys as on that GPU."""

    def __init__(self, capability: int = 90) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # compiled kernels are kept for each device

    def get_current_stream(self, device: int) -> int:
        return 0


def compiling_for(capability: int) -> contextlib.AbstractContextManager[Any]:
    """Compile the kernels of launches with `warmup` for an absent GPU."""
    return mock.patch.object(driver, "_active", AbsentGpu(capability))


def relocate(folder: Path) -> None:
    """Correct the paths in a Triton cache that was filled elsewhere."""
    for path in folder.glob("*/__grp__*.json"):
        names = json.loads(path.read_text())["child_paths"]
        path.write_text(json.dumps({"child_paths": {name: str(path.parent / name) for name in names}}))


def compile_items(capability: int) -> Iterator[Item]:
    """Yield the functions that compile the kernels of models, of checks, and of timed cases."""
    recorders: dict[str, Callable[[], Sequence[Launch]]] = {}
    source = untouched_source()
    for model in MODELS:
        recorders[model.name] = functools.partial(launches_of_model, model)
    for family, dtype in engine.CHECKPOINTS:
        recorders[f"{family}, {dtype}"] = functools.partial(launches_of_family, family, dtype)
    for name, operations in CASES.items():
        makes = [make for each in operations for _, make in each.cases(source, each.large)]
        recorders[f"the check {name}"] = functools.partial(launches_of, makes)
    for name, make in timed_cases(source):
        recorders[name] = functools.partial(launches_of, [make])
    for name, record in recorders.items():
        yield f"kernels of {name}", functools.partial(compile_rows, record, capability)


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


def launches_of_model(model: Model) -> list[Launch]:
    sizes = Sizes()
    steps = [decode(batch, 512) for batch in sorted({each.batch for each in sizes.measures})]
    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder), SMALLEST_LAYERS)
        return launches_of_steps(Path(folder), [*steps, prefill(sizes.chunk_tokens, sizes.chunk_tokens)], model)


def launches_of_family(family: str, dtype: engine.Dtype) -> list[Launch]:
    steps = [decode(4, 40), prefill(40, 40), [*prefill(6, 40), ChunkSpan(6, 1, 20)]]
    with tempfile.TemporaryDirectory() as folder:
        engine.config_of(family).save_pretrained(folder)
        return launches_of_steps(Path(folder), steps, Model(family, {}, None), getattr(torch, dtype))


def launches_of_steps(
    folder: Path, steps: Sequence[list[ChunkSpan]], model: Model, dtype: torch.dtype = torch.bfloat16
) -> list[Launch]:
    recorded = [record_step(folder, spans, model.quantization, dtype) for spans in steps]
    return [launch for parts in recorded for part in parts for launch in part]
