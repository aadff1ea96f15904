"""Tokens per second of the engine on models of published shapes with random weights.

- *decode*: as described in `decode.py`, greedy, sampled, and with longer contexts.
- *prefill*: of a single prompt; the longer prompt is computed in chunks.
- *bound*: the longer of two times: to read the weights that get rows with random routing, and the caches of contexts,
  once at the measured bandwidth; and to multiply at the measured rate.
- *step*: the time of a decode step by kernel, from torch's profiler. The device's idle time is the rest of the step's
  time without the profiler.
- Models that do not fit have fewer layers; the row gives their number.
"""

from __future__ import annotations

import collections
import gc
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from moeserve import LLM
from moeserve.bench.costs import FORMATS, step_work
from moeserve.bench.decode import Generate, Workload, draw_prompts, generate_with, rate_measure
from moeserve.bench.gpu.costs import Bar, Chunks, Work, attended_positions
from moeserve.bench.gpu.limits import limits_row, measure_limits
from moeserve.bench.gpu.parts import Row, SecondsLeft, left_out
from moeserve.bench.gpu.rehearsal import SMALL_MODEL
from moeserve.config.settings import QuantizationName
from moeserve.models.registry import describe
from moeserve.models.summary import summarize
from moeserve.planner.cost_formulas import operations_of_pair, positions_attended

PUBLISHED = Path(__file__).with_name("models.json")
MEMORY_SHARE = 0.75  # fraction of the GPU's memory for weights
WAITS = "the device waits"
SAMPLED: dict[str, Any] = dict(temperature=0.7, top_p=0.95)


@dataclass(frozen=True)
class Measure:
    """The generation of `new_tokens` after each of `batch` prompts; one new token: prefill."""

    batch: int
    prompt_tokens: int
    new_tokens: int = 33
    is_sampled: bool = False
    least: float | None = None  # minimum fraction of the bound

    @property
    def name(self) -> str:
        if self.new_tokens == 1:
            return f"prefill of {self.prompt_tokens}"
        sampled = ", sampled" if self.is_sampled else ""
        return f"decode, {self.batch} x {self.prompt_tokens + self.new_tokens // 2}{sampled}"

    def steps(self, chunk_tokens: int) -> list[Chunks]:
        """Return the chunks of the steps whose bounds count: a decode step, or all chunks of a prompt."""
        if self.new_tokens > 1:
            return [[(1, self.prompt_tokens + self.new_tokens // 2)] * self.batch]
        ends = [*range(chunk_tokens, self.prompt_tokens, chunk_tokens), self.prompt_tokens]
        return [[(end - start, end)] for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class Sizes:
    """The measures on a device, the most important first."""

    device: Literal["cpu", "cuda"] = "cuda"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    measures: tuple[Measure, ...] = (
        Measure(1, 496, least=0.6),
        Measure(8, 496, least=0.75),
        Measure(64, 496, least=0.85),
        Measure(1, 4096, 1),
        Measure(64, 496, is_sampled=True),
        Measure(16, 4080),
        Measure(1, 32000, 1),
    )
    chunk_tokens: int = 8192  # prompt tokens in one step
    num_rounds: int = 3
    changes: tuple[tuple[str, Any], ...] = ()  # of a model's config.json


SMALL_SIZES = Sizes(
    "cpu", "float32", (Measure(2, 2, 3, is_sampled=True), Measure(1, 5, 1)), 4, 1, (*SMALL_MODEL.items(),)
)


@dataclass(frozen=True)
class Model:
    """A published model's config.json."""

    name: str
    config: dict[str, Any]
    quantization: QuantizationName | None = None

    def write(self, folder: Path, num_layers: int, changes: tuple[tuple[str, Any], ...] = ()) -> dict[str, Any]:
        """Write the config.json with the first `num_layers` layers, and return its content."""
        config = self.config | {"num_hidden_layers": num_layers, "bos_token_id": None, "eos_token_id": None}
        config |= {name: value for name, value in changes if name in config}
        (folder / "config.json").write_text(json.dumps(config))
        return config


def published(name: str, quantization: QuantizationName | None = None) -> Model:
    config = json.loads(PUBLISHED.read_text())[name]
    return Model(f"{name} {quantization}" if quantization else name, config, quantization)


MODELS = (
    published("Qwen3-30B-A3B"),
    published("Qwen3-30B-A3B", "fp8"),
    published("DeepSeek-V2-Lite"),
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


def measure(model: Model, seconds_left: SecondsLeft, sizes: Sizes = Sizes()) -> Iterator[Row]:
    """Yield the rows of one model: limits, then rates.

    Raises:
        Exception: any error that prevents the engine from running.
    """
    limits = measure_limits(sizes.device)
    yield {"name": f"limits before {model.name}"} | limits_row(limits)
    memory = torch.cuda.get_device_properties(0).total_memory if sizes.device == "cuda" else 0
    num_layers = layers_that_fit(model, MEMORY_SHARE * memory)
    settings: dict[str, Any] = dict(
        device=sizes.device,
        dtype=sizes.dtype,
        quantization=model.quantization,
        load_format="dummy",
        show_progress=False,
        max_num_seqs=max(each.batch for each in sizes.measures),
        max_model_len=max(each.prompt_tokens + each.new_tokens + 1 for each in sizes.measures),
        max_num_batched_tokens=sizes.chunk_tokens,
        enable_prefix_caching=False,
    )
    if sizes.device == "cpu":
        settings |= dict(kv_cache_memory="1MiB", packed_cache=0)
    with tempfile.TemporaryDirectory() as folder:
        config = model.write(Path(folder), num_layers, sizes.changes)
        with LLM(folder, **settings) as llm:
            for each in sizes.measures:
                name = f"{model.name}, {each.name}"
                if seconds_left() <= 0:
                    yield left_out(name, "no time was left") | {"item": model.name}
                    continue
                works = [work_of(Path(folder), chunks, model.quantization) for chunks in each.steps(sizes.chunk_tokens)]
                bound = sum(work.bound_seconds(limits) for work in works)
                workload = Workload(each.batch, each.prompt_tokens, each.new_tokens, config["vocab_size"])
                row = rate_row(generate_with(llm, **(SAMPLED if each.is_sampled else {})), each, workload, bound, sizes)
                row["lines"][0] = f"{num_layers} of {model.config['num_hidden_layers']} layers, {row['lines'][0]}"
                yield {"name": name, "status": "measured", "num_layers": num_layers} | row
    gc.collect()
    torch.cuda.empty_cache()


def work_of(folder: Path, chunks: Chunks, quantization: QuantizationName | None) -> Work:
    """Return the work of a step: weights with rows and visible caches, read once; products and attention."""
    num_tokens, description = sum(num_rows for num_rows, _ in chunks), describe(folder)
    weights = FORMATS[quantization or "bfloat16"]
    products = step_work(folder, num_tokens=num_tokens, num_logits=len(chunks), weights=weights)
    cache, operations = summarize(description, "bfloat16").cache, products.operations
    cached = sum(cache.bytes_of_tokens(context) for _, context in chunks)
    for attention in description.model.attentions:
        window = positions_attended(attention)
        for num_rows, context in chunks:
            of_pair = operations_of_pair(attention, 1)[num_rows > 1]
            operations += of_pair * attended_positions(num_rows, context, window)
    return Work(products.num_bytes + cached, operations, "fp8" if quantization == "fp8" else "bf16")


def rate_row(generate: Generate, measure: Measure, workload: Workload, bound: float, sizes: Sizes) -> Row:
    """Return the median rate of several rounds in tokens per second, its bound, and the kernels of a decode step.

    Args:
        bound: minimum seconds of the measured steps.
    """
    generate(draw_prompts(workload, Random(1)), workload.new_tokens)  # compiles kernels for this batch
    is_decode = workload.new_tokens > 1
    measure_rate = rate_measure("decode" if is_decode else "prefill", generate, workload)
    rates = [measure_rate() for _ in range(sizes.num_rounds)]
    num_tokens = workload.batch if is_decode else workload.batch * workload.prompt_tokens
    rate = statistics.median(rates)
    figures = {
        "rounds": rates,
        "rate": rate,
        "bound": num_tokens / bound,
        "fraction_of_bound": rate * bound / num_tokens,
    }
    lines = [f"{rate:,.0f} tokens/s, {figures['fraction_of_bound']:.0%} of the bound"]
    row: Row = figures | {"lines": lines}
    if measure.least is not None:
        row["bars"] = [Bar("fraction_of_bound", measure.least).verdict(row)]
    if is_decode:
        seconds, kernels = num_tokens / rate, kernel_seconds(generate, workload, sizes.device)
        row["step"] = {"seconds": seconds, "terms": {WAITS: max(0.0, seconds - sum(kernels.values()))} | kernels}
        largest = sorted(row["step"]["terms"].items(), key=lambda term: -term[1])[:5]
        terms = ", ".join(f"{name} {1e3 * each:.2f}" for name, each in largest)
        lines.append(f"a step takes {1e3 * seconds:.2f} ms; of these: {terms}")
    return row


def kernel_seconds(generate: Generate, workload: Workload, device: Literal["cpu", "cuda"]) -> dict[str, float]:
    """Return the seconds of each kernel in one decode step: the difference of two profiled generations.

    On a CPU, torch operations take the place of kernels.
    """
    device_type = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU

    def run(num_tokens: int) -> dict[str, float]:
        kernels: dict[str, float] = collections.defaultdict(float)
        with profile(activities=[activity]) as profiler:
            generate(draw_prompts(workload, Random(2)), num_tokens)
        for event in profiler.events() or ():
            if event.device_type == device_type and event.cpu_parent is None:
                kernels[event.name] += event.time_range.elapsed_us() / 1e6
        return kernels

    few, many = run(2), run(workload.new_tokens + 1)
    return {name: (many[name] - few.get(name, 0.0)) / (workload.new_tokens - 1) for name in many}
