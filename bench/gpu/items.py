"""The items of each part, for a GPU, or at small sizes for a CPU.

On a CPU they are a rehearsal in Triton's interpreter, with the simulated device of `fake_device.py`. It shows before a
GPU is available that the installation is complete and that each part works. Its times are meaningless. Products of
bfloat16 are wrong in the interpreter, so all results that are compared are in float32, and 8-bit blocks are computed
with torch's conversions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from moeserve.bench.gpu import fake_device
from moeserve.bench.gpu.parts import Item, Row, SecondsLeft
from moeserve.ops import select
from moeserve.ops.interfaces import Kernels
from moeserve.ops.side_stream import CudaSideStream

FAMILIES = ("Mixtral", "DeepseekV3", "GptOss")  # grouped-query and latent attention; windows, sinks, biases
COPIED_BYTES = 2**12
PRODUCT_SIZE = 32
TORCH_TYPES = {
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
    "fp32": (torch.float32, torch.int32),
}
SMALL_DEEPSEEK: dict[str, Any] = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=16,
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """The settings that the items of a part run with."""

    seed: int
    seconds_left: SecondsLeft
    on_cpu: bool = False  # rehearse on a CPU
    table: Kernels | None = None  # kernels to check; None: our own

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with rehearsing() if self.on_cpu else contextlib.nullcontext():
            yield

    @property
    def kernels(self) -> Kernels:
        from moeserve.ops.triton.table import TRITON_KERNELS

        return self.table or (select.TABLES["cpu"]() if self.on_cpu else TRITON_KERNELS)

    def source(self, index: int = 0) -> Any:
        from moeserve.bench.gpu.inputs import Source

        device = torch.device("cpu" if self.on_cpu else "cuda")
        generator = torch.Generator(device).manual_seed(self.seed + index)
        return Source(device, generator, torch.float32 if self.on_cpu else torch.bfloat16)

    def check(self, name: str, *, is_small: bool) -> Row:
        from moeserve.bench.gpu.cases import CASES
        from moeserve.bench.gpu.check import run_check

        source = self.source(list(CASES).index(name))
        cases = (case for each in CASES[name] for case in each.cases(source, each.small if is_small else each.large))
        return run_check(cases, self.seconds_left, self.kernels)


def items_of(part: str, setting: Setting) -> Iterator[Item]:
    """Yield the items of a part. Imports only the modules that this part needs."""
    seed, seconds_left, on_cpu = setting.seed, setting.seconds_left, setting.on_cpu

    def one(measure: Callable[[], Row]) -> Iterator[Row]:
        yield measure()

    match part:
        case "compile":
            from moeserve.bench.gpu.compiled import SMALL_CHECK, compile_items

            has_gpu = torch.cuda.is_available() and not on_cpu
            major, minor = torch.cuda.get_device_capability() if has_gpu else fake_device.CAPABILITY
            for name, rows in compile_items(10 * major + minor):
                if not on_cpu or name.endswith(SMALL_CHECK):
                    yield name, rows
        case "sanitizer":
            from moeserve.bench.gpu.sanitizer import sanitizer_items

            yield from sanitizer_items(seed, seconds_left)
        case "checks":
            from moeserve.bench.gpu.cases import CASES

            for name in CASES:
                yield name, partial(one, partial(setting.check, name, is_small=on_cpu))
        case "engine" | "ranks":
            from moeserve.bench.gpu.engine import COMPARISONS, RANK_COMPARISONS, Prompts, compare

            for each in COMPARISONS if part == "engine" else RANK_COMPARISONS:
                if on_cpu:
                    if (each.dtype, each.variant) != ("float32", "graphs") or each.family not in FAMILIES:
                        continue
                    settings: dict[str, Any] = dict(max_num_seqs=2, max_num_batched_tokens=8, kv_cache_memory="1MiB")
                    each = dataclasses.replace(each, prompts=Prompts((2, 5), 3), settings={**each.settings, **settings})
                yield each.name, partial(one, partial(compare, each, "cpu" if on_cpu else "cuda", seed))
        case "kernels":
            from moeserve.bench.gpu.kernels import timed_cases, timed_items
            from moeserve.bench.gpu.limits import ColdTimer

            cases = timed_cases(setting.source(), is_small=on_cpu)
            timer: Any = small_timer if on_cpu else ColdTimer
            yield from timed_items(cases, setting.kernels, partial(limits_of, on_cpu), timer)
        case "throughput":
            from moeserve.bench.gpu.throughput import MODELS, Model, Sizes, measure, published

            models: Sequence[Model] = MODELS
            sizes = Sizes()
            if on_cpu:
                models = (Model("a small DeepSeek-V2-Lite", published("DeepSeek-V2-Lite").config | SMALL_DEEPSEEK),)
                lengths: Any = dict(prompt_tokens=2, new_tokens=3, prompts=(5,), chunk_tokens=4)
                sizes = Sizes("cpu", "float32", batches=(1,), num_rounds=1, **lengths)
            for index, model in enumerate(models):
                measured = partial(limits_of, on_cpu)
                yield model.name, partial(measure, model, len(models) - index, seconds_left, measured, sizes)


def limits_of(on_cpu: bool) -> Any:
    from moeserve.bench.gpu.limits import measure_limits

    return measure_limits("cpu", COPIED_BYTES, PRODUCT_SIZE) if on_cpu else measure_limits()


def small_timer() -> Any:
    """Return a timer that captures a call, and replays it the minimum number of times."""
    from moeserve.bench.gpu.limits import replay_seconds

    return partial(replay_seconds, num_calls=1, num_replays=1)


@contextlib.contextmanager
def rehearsing() -> Iterator[Kernels]:
    """Install the simulated device, and yield the Triton table for a CPU."""
    from triton.runtime import interpreter

    from moeserve.ops.triton.table import TRITON_KERNELS

    torch.set_num_threads(1)
    original, interpreter._convert_float = interpreter._convert_float, convert_by_torch
    table_of_cpu = select.TABLES["cpu"]
    try:
        with fake_device.installed():
            table = dataclasses.replace(TRITON_KERNELS, side_stream=CudaSideStream(), supports_cuda_graphs=True)
            select.TABLES["cpu"] = lambda: table
            yield table
    finally:
        interpreter._convert_float = original
        select.TABLES["cpu"] = table_of_cpu


def convert_by_torch(numbers: np.ndarray, from_type: Any, to_type: Any, rounding: Any) -> np.ndarray:
    """Convert the bits of floats to another type. The interpreter's conversions to few bits lose carries and NaN."""
    from_dtype, from_bits = TORCH_TYPES[str(from_type)]
    dtype, to_bits = TORCH_TYPES[str(to_type)]
    bits = torch.from_numpy(np.ascontiguousarray(numbers).copy()).view(from_bits)
    converted: np.ndarray = bits.view(from_dtype).to(dtype).view(to_bits).numpy()
    return converted.view(f"uint{8 * converted.itemsize}")
