"""Compile kernels ahead of checks and measurements, in many processes: on the GPU's machine, or earlier on another.

A kernel's key in Triton's cache covers the sources of Triton and of the kernel, ptxas, the target, and the types and
alignments of arguments, but not the driver. So a folder that was filled without a GPU serves a machine with the same
wheel of Triton, and thus the same Python version. Kernels that are missing there are compiled at their first launch.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from moeserve.bench.gpu import engine, kernels
from moeserve.bench.gpu.check import Check
from moeserve.bench.gpu.checks import CHECKS
from moeserve.bench.gpu.compiled import untouched_source
from moeserve.bench.gpu.launches import decode, prefill, record_step
from moeserve.bench.gpu.machine_code import compiling_for
from moeserve.bench.gpu.parts import Item, Row
from moeserve.bench.gpu.recording import Launch, recorded_launches
from moeserve.bench.gpu.throughput import MODELS, Model, Sizes
from moeserve.ops.triton.table import TRITON_KERNELS
from moeserve.step_inputs import ChunkSpan

SMALLEST_LAYERS = 2  # layers of a model: one of each kind
SMALL_CHECK = "the check norms"  # compiles in about a second


def relocate(folder: Path) -> None:
    """Correct the paths in a cache of Triton that was filled elsewhere."""
    for path in folder.glob("*/__grp__*.json"):
        names = json.loads(path.read_text())["child_paths"]
        path.write_text(json.dumps({"child_paths": {name: str(path.parent / name) for name in names}}))


def compile_items(capability: int) -> Iterator[Item]:
    """Yield the functions that compile the kernels of checks, of timed calls, and of models."""
    rows = functools.partial(compile_rows, capability=capability)
    for name, make in kernels.items(untouched_source(), kernels.Sizes()):
        yield f"kernels of {name}", functools.partial(rows, functools.partial(launches_of, make))
    for name, check in CHECKS.items():
        yield f"kernels of the check {name}", functools.partial(rows, functools.partial(launches_of_check, check))
    for model in MODELS:
        yield f"kernels of {model.name}", functools.partial(rows, functools.partial(launches_of_model, model))
    for family, dtype in engine.CHECKPOINTS:
        record = functools.partial(launches_of_family, family, dtype)
        yield f"kernels of {family}, {dtype}", functools.partial(rows, record)


def compile_rows(record: Callable[[], Sequence[Launch]], capability: int) -> Iterator[Row]:
    """Yield one row with the number of kernels and the number that was not in the cache."""
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


def launches_of(make: Callable[[], kernels.Timed]) -> list[Launch]:
    timed = make()
    with recorded_launches() as launches, torch.inference_mode():
        timed.call()
    return launches


def launches_of_check(check: Check) -> list[Launch]:
    with recorded_launches() as launches, torch.inference_mode():
        for case in check(untouched_source(), False):
            case.run(case.kernels or TRITON_KERNELS, *case.inputs)
    return launches


def launches_of_model(model: Model) -> list[Launch]:
    sizes = Sizes()
    steps = [decode(batch, sizes.prompt_tokens) for batch in sizes.batches]
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
