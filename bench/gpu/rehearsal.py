"""The run on a CPU: all parts at small sizes in Triton's interpreter, with the simulated device of `fake_device.py`.

It shows that the installation is complete and that each part works, before there is a GPU. Times mean nothing. Products
of bfloat16 are wrong in the interpreter, so all results that are compared are in float32, and 8-bit blocks are computed
with torch's conversions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from moeserve.bench.gpu import fake_device
from moeserve.bench.gpu.costs import LatentShape, MoEShape, attention_shape
from moeserve.bench.gpu.inputs import Source
from moeserve.bench.gpu.limits import event_seconds, measure_limits, replay_seconds
from moeserve.bench.gpu.parts import Item, Row, SecondsLeft
from moeserve.ops import select
from moeserve.ops.interfaces import ClampedSwiGLU, Kernels
from moeserve.ops.side_stream import CudaSideStream
from moeserve.ops.triton.table import TRITON_KERNELS

FAMILIES = ("Mixtral", "DeepseekV3", "GptOss")  # grouped-query and latent attention; windows, sinks, biases
CAPABILITY = 90
COPIED_BYTES = 2**12
PRODUCT_SIZE = 32
TORCH_TYPES = {
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
    "fp32": (torch.float32, torch.int32),
}


@contextlib.contextmanager
def rehearsing() -> Iterator[Kernels]:
    """Install the simulated device, and yield the Triton table for the CPU."""
    from triton.runtime import interpreter

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
    """Convert bits of floats to another type. The interpreter's own conversion to few bits loses carries and NaN."""
    from_dtype, from_bits = TORCH_TYPES[str(from_type)]
    dtype, to_bits = TORCH_TYPES[str(to_type)]
    bits = torch.from_numpy(np.ascontiguousarray(numbers).copy()).view(from_bits)
    converted: np.ndarray = bits.view(from_dtype).to(dtype).view(to_bits).numpy()
    return converted.view(f"uint{8 * converted.itemsize}")


def rehearsal_source(seed: int) -> Source:
    device = torch.device("cpu")
    return Source(device, torch.Generator(device).manual_seed(seed), torch.float32)


def rehearsal_items(part: str, seed: int, seconds_left: SecondsLeft) -> Iterator[Item]:
    """Yield the items of a part, at small sizes."""
    match part:
        case "compile":
            from moeserve.bench.gpu.compile_ahead import SMALL_CHECK, compile_items

            yield from (item for item in compile_items(CAPABILITY) if item[0].endswith(SMALL_CHECK))
        case "sanitizer":
            from moeserve.bench.gpu.sanitizer import sanitizer_items

            yield from sanitizer_items(seed, seconds_left)
        case "checks":
            from moeserve.bench.gpu.check import run_check
            from moeserve.bench.gpu.checks import CHECKS

            def check_rows(name: str, index: int) -> Iterator[Row]:
                table = select.TABLES["cpu"]()
                yield run_check(
                    CHECKS[name], rehearsal_source(seed + index), seconds_left, is_small=True, kernels=table
                )

            for index, name in enumerate(CHECKS):
                yield name, functools.partial(check_rows, name, index)
        case "engine":
            from moeserve.bench.gpu.engine import COMPARISONS, Comparison, Prompts, compare

            prompts = Prompts(lengths=(2, 5), num_tokens=3)
            settings = dict(max_num_seqs=2, max_num_batched_tokens=8, kv_cache_memory="1MiB", enforce_eager=False)

            def comparison_rows(comparison: Comparison) -> Iterator[Row]:
                yield compare(dataclasses.replace(comparison, prompts=prompts, settings=settings), "cpu", seed)

            for each in COMPARISONS:
                if (each.dtype, each.variant) == ("float32", "graphs") and each.family in FAMILIES:
                    yield each.name, functools.partial(comparison_rows, each)
        case "kernels":
            from moeserve.bench.gpu.kernels import timed_items

            limits = functools.partial(measure_limits, "cpu", COPIED_BYTES, PRODUCT_SIZE)
            yield from timed_items(rehearsal_source(seed), small_sizes(), limits, OneReplay)
        case "throughput":
            from moeserve.bench.gpu.throughput import Model, Sizes, measure, published

            lengths = dict(prompt_tokens=3, new_tokens=4, prompts=(6,), chunk_tokens=4)
            sizes = Sizes("cpu", "float32", batches=(1,), num_rounds=1, **lengths)  # type: ignore[arg-type]
            model = Model("a small DeepSeek-V2-Lite", published("DeepSeek-V2-Lite").config | SMALL_DEEPSEEK)
            measured = measure_limits("cpu", COPIED_BYTES, PRODUCT_SIZE)
            yield model.name, functools.partial(measure, model, 1, seconds_left, measured, sizes)


SMALL_DEEPSEEK: dict[str, Any] = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)


class OneReplay:
    """A timer that captures a call, and replays it as seldom as possible."""

    def seconds(self, call: Callable[[], object]) -> float:
        return replay_seconds(call, num_calls=1, num_replays=1)

    def seconds_without_graph(self, call: Callable[[], object]) -> float:
        return event_seconds(call, num_calls=1)


def small_sizes() -> Any:
    from moeserve.bench.gpu.kernels import Sizes

    clamped = MoEShape(3, 160, 48, 2, ClampedSwiGLU(alpha=1.702, limit=7.0), has_bias=True)
    windowed = attention_shape(4, 2, 16, window=7, has_sinks=True)
    return Sizes(
        moe={"small": MoEShape(3, 32, 16, 2), "small, clamped": clamped},
        attention={"Mixtral-8x7B": attention_shape(4, 2, 16), "small, windowed": windowed},
        latent={"small": LatentShape(3, 16, 8)},
        vocab={"small": 40},
        num_tokens=(1,),
        decode_batches=((2, 20),),
        prefill_rows=20,
        latent_rows=3,
        row_counts=(2,),
        width=64,
        expert_width=48,
    )
