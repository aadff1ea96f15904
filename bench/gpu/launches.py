"""Kernel launches of calls and of whole steps, recorded instead of run, as for an absent H100, and compiled ahead.

Tensors may be on torch's "meta" device, or in memory that is never touched, so published shapes need no memory.
Launches have the same grids and compile-time arguments as on the GPU: a decode step is padded, and its block tables
have room for the longest context, as in a CUDA graph.

A kernel's key in Triton's cache depends on the sources of Triton and of the kernel, on ptxas, the target, and the types
and alignments of arguments, but not on the driver. A folder that was filled without a GPU therefore serves a machine
with the same wheel of Triton, and thus the same Python version. Kernels that are missing in it are compiled at their
first launch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from moeserve.bench.gpu import engine
from moeserve.bench.gpu.cases import CASES
from moeserve.bench.gpu.check import Case
from moeserve.bench.gpu.inputs import Source
from moeserve.bench.gpu.kernels import timed_cases
from moeserve.bench.gpu.models import BLOCK_SIZE, make_model, published
from moeserve.bench.gpu.parts import Item, Job, Row
from moeserve.bench.gpu.throughput import CHUNK_TOKENS, MEASURES, MODELS
from moeserve.config.settings import QuantizationName
from moeserve.distributed.groups import Groups
from moeserve.kv.layer_cache import Places
from moeserve.kv.rules import CacheRules
from moeserve.ops import sampling as sampling_ops
from moeserve.ops.attention.interface import KeyValueCache
from moeserve.ops.backend import TRITON
from moeserve.ops.products.weight_blocks import CODES
from moeserve.step_inputs import NUM_SETTINGS, ChunkSpan, StateRows, StepInputs

CAPABILITY = (9, 0)  # of the GPU for which kernels are compiled where there is none
SMALL_CHECK = "norms"  # compiles in about a second
META = torch.device("meta")
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", multi_processor_count=132)
MAX_BLOCKS = 2560  # for which a decode step's block tables have room
# torch operations that launch nothing.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh"}


class TensorFacts:
    """A tensor without its memory: the properties that Triton specialises a kernel on."""

    def __init__(self, tensor: Tensor) -> None:
        address = tensor.storage_offset() * tensor.element_size() if tensor.is_meta else tensor.data_ptr()
        self.dtype, self.shape, self.data_ptr = tensor.dtype, tuple(tensor.shape), lambda: address


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel, or an operation of torch that launches one."""

    name: str
    arguments: dict[str, Any]  # a kernel's arguments by name
    grid: tuple[int, ...] | None = None  # None: chosen by torch
    kernel: Any = None  # Triton's kernel
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # compiler options

    def compile(self) -> Any:
        """Compile the kernel of this launch for the GPU of Triton's driver, or find it in Triton's cache."""
        return self.kernel.run(**self.arguments, grid=self.grid, warmup=True, **self.options)


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record the launches of Triton kernels within the context, without running them."""
    launches: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        parameters = inspect.signature(kernel.fn).parameters  # a kernel of the interpreter has no `params`
        values = {name: parameter.default for name, parameter in parameters.items()}
        values |= dict(zip(kernel.arg_names, args, strict=False))
        values |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
        grid = grid(values) if callable(grid) else grid
        facts = {name: TensorFacts(each) if isinstance(each, Tensor) else each for name, each in values.items()}
        launches.append(Launch(kernel.fn.__name__, facts, grid, kernel, options))

    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(InterpretedFunction, "run", record),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=H100),
        mock.patch.object(torch.cuda, "get_device_name", return_value=H100.name),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
    ):
        yield launches


class Operations(TorchDispatchMode):
    """Appends the torch operations that launch a kernel to a list."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        name = func.overloadpacket.__name__
        if isinstance(first, Tensor) and first.device == META and name not in ALLOCATIONS:
            is_written = name.endswith("_") or "out" in (kwargs or {})
            is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]
            if is_written or not any(isinstance(each, Tensor) and is_alias(first, each) for each in args):
                self._launches.append(Launch(f"torch {name}", {}))
        return result


def record_step(
    config: Mapping[str, Any],
    spans: Sequence[ChunkSpan],
    quantization: QuantizationName | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> list[list[Launch]]:
    """Return the launches of each layer of a model, followed by those outside of layers and of the choice of tokens.

    Args:
        config: a config.json.
        spans: the chunks of the step.
    """
    source = Source(torch.device("cpu"), torch.Generator(), dtype)
    model = make_model(config, TRITON, dataclasses.replace(source, device=META), quantization)
    caches = model.make_caches(Places.equal(CacheRules(), max(4, len(spans))))
    drawn = source.step([(span.num_rows, span.context_len) for span in spans], BLOCK_SIZE)
    tensors: Any = {name: each.to(META) for name, each in vars(drawn).items() if isinstance(each, Tensor)}
    if all(span.num_rows == 1 for span in spans):
        tensors["padding"] = torch.empty(len(spans), dtype=torch.bool, device=META)
        tensors["block_table"] = torch.empty(len(spans), MAX_BLOCKS, dtype=torch.int32, device=META)
    states = StateRows.none(len(spans), META) if model.cache_needs.row_bytes else None
    step = dataclasses.replace(drawn, **tensors, states=states)
    settings_LW = torch.zeros(len(spans), NUM_SETTINGS, dtype=torch.int64, device=META)
    starts: dict[int | None, int] = {}  # index of the first launch of each layer

    def begin_layer(groups: Groups, number: int | None) -> None:
        starts.setdefault(number, len(launches))

    with (
        torch.inference_mode(),
        recorded_launches() as launches,
        Operations(launches),
        mock.patch.object(type(model.groups), "set_layer", begin_layer),
    ):
        for _ in range(2):  # the first run also clears memory that kernels keep
            starts.clear()
            launches.clear()
            logits_LV = model.logits(step.rows_for_logits(model(step, caches)))
            sampling_ops.make(TRITON).choose_tokens(logits_LV, settings_LW, step.logits_rows)
    first, *_, last = starts.values()
    of_layers = [launches[start:end] for start, end in itertools.pairwise(starts.values())]
    return [*of_layers, launches[:first] + launches[last:]]


def decode(num_requests: int, context_len: int) -> list[ChunkSpan]:
    return [ChunkSpan(row, 1, context_len) for row in range(num_requests)]


def prefill(num_rows: int, context_len: int) -> list[ChunkSpan]:
    return [ChunkSpan(0, num_rows, context_len)]


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


def items(job: Job) -> Iterator[Item]:
    """Yield the functions that compile the kernels of models, of checks, and of timed cases; on a CPU, of one check."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else CAPABILITY
    recorders: dict[str, Callable[[], Sequence[Launch]]] = {}
    source = untouched_source()
    steps = [decode(batch, 512) for batch in sorted({each.batch for each in MEASURES})]
    steps.append(prefill(CHUNK_TOKENS, CHUNK_TOKENS))
    for model in MODELS:
        recorders[model.name] = partial(launches_of_steps, published(model.published, 2), steps, model.quantization)
    steps = [decode(4, 40), prefill(40, 40), [*prefill(6, 40), ChunkSpan(6, 1, 20)]]
    for family, dtype in engine.CHECKPOINTS:
        config = engine.config_of(family).to_dict()
        recorders[f"{family}, {dtype}"] = partial(launches_of_steps, config, steps, None, getattr(torch, dtype))
    for name, operations in CASES.items():
        makes = [make for each in operations for _, make in each.cases(source, each.large)]
        recorders[f"the check {name}"] = partial(launches_of, makes)
    for name, make in timed_cases(source):
        recorders[name] = partial(launches_of, [make])
    for name, record in recorders.items():
        if not job.on_cpu or name.endswith(SMALL_CHECK):
            yield f"kernels of {name}", partial(compile_rows, record, 10 * major + minor)


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
            make().bind(TRITON)()
    return launches


def launches_of_steps(config: dict[str, Any], steps: Sequence[list[ChunkSpan]], *more: Any) -> list[Launch]:
    return [launch for spans in steps for part in record_step(config, spans, *more) for launch in part]
