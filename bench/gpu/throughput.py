"""Tokens per second of the engine on models of published shapes with random weights.

- *decode*: as described in `decode.py`.
- *prefill*: of a single prompt; the longer prompt is computed in chunks.
- The bounds are those of `roofline.py`, at the measured limits.
- *step*: the time of a decode step by kernel (`profiling.py`).
- Models that do not fit have fewer layers; the row gives their number.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch

from moeserve import LLM
from moeserve.bench.decode import Generate, Workload, draw_prompts, generate_with, rate_measure
from moeserve.bench.gpu.costs import Bar, GpuLimits
from moeserve.bench.gpu.launches import decode, prefill
from moeserve.bench.gpu.limits import limits_row, measure_limits
from moeserve.bench.gpu.parts import Row, SecondsLeft, left_out
from moeserve.bench.gpu.profiling import profile_step, step_terms, step_text
from moeserve.bench.gpu.roofline import PUBLISHED, Case, Roofline, roofline
from moeserve.config.settings import QuantizationName
from moeserve.models.registry import describe
from moeserve.models.summary import summarize
from moeserve.step_inputs import ChunkSpan

MEMORY_SHARE = 0.75  # fraction of the GPU's memory for weights
DECODE_BAR = Bar("fraction_of_bound", 0.9)


@dataclass(frozen=True)
class Sizes:
    """The batches and lengths to measure on a device."""

    device: Literal["cpu", "cuda"] = "cuda"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    batches: tuple[int, ...] = (64, 8, 1)  # the first one has a bar
    prompt_tokens: int = 496
    new_tokens: int = 33  # contexts are 512 long in the middle of these
    prompts: tuple[int, ...] = (4096, 32000)
    chunk_tokens: int = 8192  # prompt tokens in one step
    num_rounds: int = 3


@dataclass(frozen=True)
class Model:
    """A published model's config.json."""

    name: str
    config: dict[str, Any]
    quantization: QuantizationName | None = None

    def write(self, folder: Path, num_layers: int) -> dict[str, Any]:
        """Write the config.json with the first `num_layers` layers, and return its content."""
        config = self.config | {"num_hidden_layers": num_layers, "bos_token_id": None, "eos_token_id": None}
        (folder / "config.json").write_text(json.dumps(config))
        return config


def published(name: str, quantization: QuantizationName | None = None) -> Model:
    config = json.loads(PUBLISHED.read_text())[name]
    return Model(f"{name}, {quantization}" if quantization else name, config, quantization)


MODELS = (
    published("Qwen3-30B-A3B"),
    published("DeepSeek-V2-Lite"),
    published("Qwen3-30B-A3B", "fp8"),
    published("DeepSeek-V2-Lite", "fp8"),
    published("Mixtral-8x7B"),
)


def layers_that_fit(model: Model, memory_bytes: float) -> int:
    """Return the number of layers that fit; at least two, one of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = []
        for num_layers in (2, 3):
            model.write(Path(folder), num_layers)
            sizes.append(summarize(describe(folder), "bfloat16").weight_bytes)
    fitting = 2 + int((memory_bytes - sizes[0]) // (sizes[1] - sizes[0]))
    return max(2, min(model.config["num_hidden_layers"], fitting))


def measure(
    model: Model,
    num_remaining: int,
    seconds_left: SecondsLeft,
    measure_limits: Callable[[], GpuLimits] = measure_limits,
    sizes: Sizes = Sizes(),
) -> Iterator[Row]:
    """Yield rows of one model: limits, decode with each batch, and prefill.

    Args:
            num_remaining: number of models that share the time, including this one.

        Raises:
            Exception: any error that prevents the engine from running.
    """
    reserved = seconds_left() * (1 - 1 / num_remaining)
    limits = measure_limits()
    yield {"name": f"limits before {model.name}"} | limits_row(limits)
    num_layers, vocab_size = layers_that_fit(model, MEMORY_SHARE * total_memory()), model.config["vocab_size"]
    decodes = {
        f"{model.name}, decode, batch {batch}": Workload(batch, sizes.prompt_tokens, sizes.new_tokens, vocab_size)
        for batch in sizes.batches
    }
    prefills = {f"{model.name}, prefill of {length}": Workload(1, length, 1, vocab_size) for length in sizes.prompts}
    settings: dict[str, Any] = dict(
        device=sizes.device,
        dtype=sizes.dtype,
        quantization=model.quantization,
        load_format="dummy",
        show_progress=False,
        max_num_seqs=max(sizes.batches),
        max_model_len=max(sizes.prompts) + sizes.new_tokens,
        max_num_batched_tokens=sizes.chunk_tokens,
        enable_prefix_caching=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        config = model.write(Path(folder), num_layers)
        with LLM(folder, **settings) as llm:
            for name, workload in (decodes | prefills).items():
                if seconds_left() <= reserved:
                    yield left_out(name, "no time was left")
                    continue
                steps = [
                    roofline(Case(name, "", spans, model.quantization), config, limits)
                    for spans in spans_of(workload, sizes.chunk_tokens)
                ]
                row = rate_row(generate_with(llm), workload, steps, sizes.num_rounds)
                row["lines"][0] = f"{num_layers} of {model.config['num_hidden_layers']} layers, {row['lines'][0]}"
                if workload.batch == sizes.batches[0] and name in decodes:
                    row["bars"] = [DECODE_BAR.verdict(row)]
                if name in decodes:
                    row["step"] = step_terms(profile_step(generate_with(llm), workload, sizes.device), steps[0])
                    row["lines"].append(step_text(row["step"]))
                yield {"name": name, "status": "measured", "num_layers": num_layers} | row
    gc.collect()
    torch.cuda.empty_cache()


def spans_of(workload: Workload, chunk_tokens: int) -> list[list[ChunkSpan]]:
    """Return the steps whose bounds are summed: one decode step in the middle, or all chunks of a prompt."""
    if workload.new_tokens > 1:
        return [decode(workload.batch, workload.prompt_tokens + workload.new_tokens // 2)]
    ends = [*range(chunk_tokens, workload.prompt_tokens, chunk_tokens), workload.prompt_tokens]
    return [prefill(end - start, end) for start, end in zip([0, *ends], ends, strict=False)]


def rate_row(generate: Generate, workload: Workload, steps: Sequence[Roofline], num_rounds: int) -> Row:
    """Return the median rate of several rounds in tokens per second, with its bound."""
    generate(draw_prompts(workload, Random(1)), workload.new_tokens)  # compiles kernels for this batch
    is_decode = workload.new_tokens > 1
    measure_rate = rate_measure("decode" if is_decode else "prefill", generate, workload)
    rates = [measure_rate() for _ in range(num_rounds)]
    num_tokens = workload.batch if is_decode else workload.batch * workload.prompt_tokens
    rate = statistics.median(rates)
    bound = num_tokens / sum(sum(step.bounds().values()) for step in steps)
    line = f"{rate:,.0f} tokens/s, {rate / bound:.0%} of the bound"
    return {"rounds": rates, "rate": rate, "bound": bound, "fraction_of_bound": rate / bound, "lines": [line]}


def total_memory() -> int:
    """Return the bytes of the GPU's memory."""
    return int(torch.cuda.get_device_properties(0).total_memory)
