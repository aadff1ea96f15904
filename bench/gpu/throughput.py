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
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from moeserve import LLM
from moeserve.bench.costs import FORMATS, step_work
from moeserve.bench.decode import Generate, Workload, draw_prompts, generate_with, rate_measure
from moeserve.bench.gpu.inputs import Chunks, attended_positions
from moeserve.bench.gpu.limits import measure_limits
from moeserve.bench.gpu.models import PUBLISHED, described, published, write_config
from moeserve.bench.gpu.parts import Item, Job, Row, SecondsLeft, bar, left_out
from moeserve.bench.gpu.rehearsal import SMALL_MODEL
from moeserve.bench.limits import Work
from moeserve.config.settings import QuantizationName
from moeserve.models.registry import describe
from moeserve.models.summary import summarize

MEMORY_SHARE = 0.75  # fraction of the GPU's memory for weights
WAITS = "the device waits"


class Model(NamedTuple):
    """A published model, maybe with a quantization."""

    published: str
    quantization: QuantizationName | None = None

    @property
    def name(self) -> str:
        return f"{self.published}, {self.quantization}" if self.quantization else self.published


# The most important come first.
MODELS = (
    Model("Qwen3-30B-A3B"),
    Model("Qwen3-30B-A3B", "fp8"),
    Model("DeepSeek-V2-Lite"),
    Model("DeepSeek-V2-Lite", "fp8"),
    Model("Mixtral-8x7B"),
)
REHEARSED_MODEL = Model("DeepSeek-V2-Lite")  # has latent attention and shared experts


class Measure(NamedTuple):
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


MEASURES = (
    Measure(1, 496, least=0.6),
    Measure(8, 496, least=0.75),
    Measure(64, 496, least=0.85),
    Measure(1, 4096, 1),
    Measure(64, 496, is_sampled=True),
    Measure(16, 4080),
    Measure(1, 32000, 1),
)
SMALL_MEASURES = Measure(2, 2, 3, is_sampled=True), Measure(1, 5, 1)
CHUNK_TOKENS, SMALL_CHUNK_TOKENS = 8192, 4  # prompt tokens in one step
NUM_ROUNDS = 3
ON_CPU: dict[str, Any] = dict(device="cpu", dtype="float32", kv_cache_memory="1MiB", packed_cache=0)


def layers_that_fit(name: str, memory_bytes: float) -> int:
    """Return the number of layers of a model that fit; at least two, one of each kind."""
    two, three = (summarize(described(published(name, count)), "bfloat16").weight_bytes for count in (2, 3))
    fitting = 2 + int((memory_bytes - two) // (three - two))
    return max(2, min(PUBLISHED[name]["num_hidden_layers"], fitting))


def items(job: Job) -> Iterator[Item]:
    """Yield the measurements of models."""
    for model in (REHEARSED_MODEL,) if job.on_cpu else MODELS:
        yield model.name, partial(measure, model, job.seconds_left, job.on_cpu)


def measure(wanted: Model, seconds_left: SecondsLeft, on_cpu: bool = False) -> Iterator[Row]:
    """Yield the rows of one of `MODELS`: limits, then rates.

    Raises:
        Exception: any error that prevents the engine from running.
    """
    (model, quantization), name = wanted, wanted.name
    limits = measure_limits("cpu" if on_cpu else "cuda")
    yield {"name": f"limits before {name}"} | limits.row
    memory = 0 if on_cpu else MEMORY_SHARE * torch.cuda.get_device_properties(0).total_memory
    num_layers, most_layers = layers_that_fit(model, memory), PUBLISHED[model]["num_hidden_layers"]
    measures = SMALL_MEASURES if on_cpu else MEASURES
    chunk_tokens = SMALL_CHUNK_TOKENS if on_cpu else CHUNK_TOKENS
    settings: dict[str, Any] = dict(
        quantization=quantization,
        load_format="dummy",
        show_progress=False,
        max_num_seqs=max(each.batch for each in measures),
        max_model_len=max(each.prompt_tokens + each.new_tokens + 1 for each in measures),
        max_num_batched_tokens=chunk_tokens,
        enable_prefix_caching=False,
        **ON_CPU if on_cpu else dict(device="cuda", dtype="bfloat16"),
    )
    with tempfile.TemporaryDirectory() as folder:
        config = published(model, num_layers, SMALL_MODEL if on_cpu else None)
        write_config(folder, config)
        with LLM(folder, **settings) as llm:
            for each in measures:
                title = f"{name}, {each.name}"
                if seconds_left() <= 0:
                    yield left_out(title, "no time was left") | {"item": name}
                    continue
                works = [work_of(Path(folder), chunks, quantization) for chunks in each.steps(chunk_tokens)]
                bound = sum(limits.seconds(work, is_fp8=quantization == "fp8") for work in works)
                workload = Workload(each.batch, each.prompt_tokens, each.new_tokens, config["vocab_size"])
                sampling: dict[str, Any] = dict(temperature=0.7, top_p=0.95) if each.is_sampled else {}
                row = rate_row(generate_with(llm, **sampling), workload, bound, each.least, on_cpu)
                row["lines"][0] = f"{num_layers} of {most_layers} layers, {row['lines'][0]}"
                yield {"name": title, "status": "measured"} | row
    gc.collect()
    torch.cuda.empty_cache()


def work_of(folder: Path, chunks: Chunks, quantization: QuantizationName | None) -> Work:
    """Return the work of a step: weights with rows and visible caches, read once; products and attention."""
    num_tokens, description = sum(num_rows for num_rows, _ in chunks), describe(folder)
    weights = FORMATS[quantization or "bfloat16"]
    products = step_work(folder, num_tokens=num_tokens, num_logits=len(chunks), weights=weights)
    cache, operations = summarize(description, "bfloat16").cache, products.operations
    cached = sum(cache.bytes_of_tokens(context) for _, context in chunks)
    for costs in description.model.costs_of_attention(1):
        for num_rows, context in chunks:
            of_pair = costs.prompt_operations if num_rows > 1 else costs.decode_operations
            operations += of_pair * attended_positions(num_rows, context, costs.positions)
    return Work(products.num_bytes + cached, operations)


def rate_row(generate: Generate, workload: Workload, bound: float, least: float | None, on_cpu: bool) -> Row:
    """Return the median rate of several rounds in tokens per second, its bound, and the kernels of a decode step.

    Args:
        bound: minimum seconds of the measured steps.
        least: minimum fraction of the bound.
    """
    generate(draw_prompts(workload, Random(1)), workload.new_tokens)  # compiles kernels for this batch
    is_decode = workload.new_tokens > 1
    measure_rate = rate_measure("decode" if is_decode else "prefill", generate, workload)
    rate = statistics.median(measure_rate() for _ in range(1 if on_cpu else NUM_ROUNDS))
    num_tokens = workload.batch if is_decode else workload.batch * workload.prompt_tokens
    row: Row = {"rate": rate, "bound": num_tokens / bound, "fraction_of_bound": rate * bound / num_tokens}
    row["lines"] = [f"{rate:,.0f} tokens/s, {row['fraction_of_bound']:.0%} of the bound"]
    row |= {} if least is None else bar(row, "fraction_of_bound", least)
    if is_decode:
        seconds, kernels = num_tokens / rate, kernel_seconds(generate, workload, "CPU" if on_cpu else "CUDA")
        terms = {WAITS: max(0.0, seconds - sum(kernels.values()))} | kernels
        row["step"] = {"seconds": seconds, "terms": terms}
        largest = sorted(terms.items(), key=lambda term: -term[1])[:5]
        shown = ", ".join(f"{name} {1e3 * each:.2f}" for name, each in largest)
        row["lines"].append(f"a step takes {1e3 * seconds:.2f} ms; of these: {shown}")
    return row


def kernel_seconds(generate: Generate, workload: Workload, kind: str) -> dict[str, float]:
    """Return the seconds of each kernel in one decode step: the difference of two profiled generations.

    Args:
        kind: "CUDA"; or "CPU" in a rehearsal, where the profiler sees nothing of the engine's thread.
    """

    def run(num_tokens: int) -> dict[str, float]:
        kernels: dict[str, float] = collections.defaultdict(float)
        with profile(activities=[getattr(ProfilerActivity, kind)]) as profiler:
            generate(draw_prompts(workload, Random(2)), num_tokens)
        for event in profiler.events() or ():
            if event.device_type == getattr(DeviceType, kind) and event.cpu_parent is None:
                kernels[event.name] += event.time_range.elapsed_us() / 1e6
        return kernels

    few, many = run(2), run(workload.new_tokens + 1)
    return {name: (many[name] - few.get(name, 0.0)) / (workload.new_tokens - 1) for name in many}
