"""Tokens per second of the engine on models of published shapes with random weights, beside transformers.

- *decode*: `decode.py` describes the rate.
- *prefill*: of one prompt, the longer one in chunks.
- The bounds are those of `roofline.py`, at the measured limits.
- *step*: where the time of a decode step goes (`profiling.py`).
- *transformers*: `generate` with a batch of equal length and random weights of its own, with sdpa attention.
- Models that do not fit have fewer layers; the row says how many.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
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

MEMORY_SHARE = 0.75  # of the GPU, for weights
# Of transformers, which needs them; our files of published shapes do without.
MODEL_TYPES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
DECODE_BARS = (Bar("times_transformers", 4.0), Bar("fraction_of_bound", 0.9))


@dataclass(frozen=True)
class Sizes:
    """The batches and lengths to measure, on a device."""

    device: Literal["cpu", "cuda"] = "cuda"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    batches: tuple[int, ...] = (64, 8, 1)  # the first is compared with transformers
    prompt_tokens: int = 496
    new_tokens: int = 33  # contexts are 512 long in the middle of these
    prompts: tuple[int, ...] = (4096, 32000)
    chunk_tokens: int = 8192  # of prompts in one step
    num_rounds: int = 3


@dataclass(frozen=True)
class Model:
    """A published model's config.json."""

    name: str
    config: dict[str, Any]
    quantization: QuantizationName | None = None

    def write(self, folder: Path, num_layers: int) -> None:
        """Write its config.json with the first `num_layers` layers."""
        common: dict[str, Any] = {
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": None,
            "hidden_act": "silu",
        }
        common |= {"tie_word_embeddings": False, "num_hidden_layers": num_layers}
        (folder / "config.json").write_text(json.dumps(self.config | common))


def published(name: str, quantization: QuantizationName | None = None) -> Model:
    config = json.loads(PUBLISHED.read_text())[name]
    config["model_type"] = MODEL_TYPES[config["architectures"][0]]
    return Model(f"{name}, {quantization}" if quantization else name, config, quantization)


MODELS = (
    published("Qwen3-30B-A3B"),
    published("DeepSeek-V2-Lite"),
    published("Qwen3-30B-A3B", "fp8"),
    published("DeepSeek-V2-Lite", "fp8"),
    published("Mixtral-8x7B"),
)


def layers_that_fit(model: Model, memory_bytes: float) -> int:
    """Return the number of layers that fit, at least two: one of each kind."""
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
    limits: GpuLimits | None = None,
    sizes: Sizes = Sizes(),
) -> Iterator[Row]:
    """Yield rows of one model: limits, decode with each batch, and prefill.

    Args:
        num_remaining: models with which it shares the time, itself included.
        limits: of this GPU; None: measured here.

    Raises:
        Exception: whatever prevents the engine from running.
    """
    reserved = seconds_left() * (1 - 1 / num_remaining)
    limits = limits or measure_limits()
    yield {"name": f"limits before {model.name}"} | limits_row(limits)
    num_layers = layers_that_fit(model, MEMORY_SHARE * total_memory())
    vocab_size = model.config["vocab_size"]
    workloads = [Workload(batch, sizes.prompt_tokens, sizes.new_tokens, vocab_size) for batch in sizes.batches]
    workloads += [Workload(1, num_tokens, 1, vocab_size) for num_tokens in sizes.prompts]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.write(folder, num_layers)
        other: Row = {} if model.quantization else transformers_figures(folder, workloads[0], sizes)
        settings: dict[str, Any] = dict(
            device=sizes.device, dtype=sizes.dtype, load_format="dummy", show_progress=False
        )
        settings |= dict(
            max_num_seqs=max(sizes.batches),
            max_model_len=max(sizes.prompts) + sizes.new_tokens,
            max_num_batched_tokens=sizes.chunk_tokens,
            enable_prefix_caching=False,
        )
        with LLM(folder, quantization=model.quantization, **settings) as llm:
            for workload in workloads:
                is_decode = workload.new_tokens > 1
                name = f"{model.name}, " + (
                    f"decode, batch {workload.batch}" if is_decode else f"prefill of {workload.prompt_tokens}"
                )
                if seconds_left() <= reserved:
                    yield left_out(name, "no time was left")
                    continue
                steps = [
                    roofline(Case(name, "", spans, model.quantization), read_config(folder), limits)
                    for spans in spans_of(workload, sizes.chunk_tokens)
                ]
                row = rate_row(generate_with(llm), workload, steps, sizes.num_rounds)
                row["lines"][0] = f"{num_layers} of {model.config['num_hidden_layers']} layers, {row['lines'][0]}"
                if other and workload is workloads[0]:
                    row |= {"transformers": other}
                    row["lines"].append(f"transformers: {other}")
                    if "rate" in other:
                        row["times_transformers"] = row["rate"] / other["rate"]
                    row["bars"] = [bar.verdict(row) for bar in DECODE_BARS]
                if is_decode:
                    row["step"] = step_terms(profile_step(generate_with(llm), workload, sizes.device), steps[0])
                    row["lines"].append(step_text(row["step"]))
                yield {"name": name, "status": "measured", "num_layers": num_layers} | row
    free_memory()


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def spans_of(workload: Workload, chunk_tokens: int) -> list[list[ChunkSpan]]:
    """Return the steps whose bounds are added: one decode step in the middle, or all chunks of a prompt."""
    if workload.new_tokens > 1:
        return [decode(workload.batch, workload.prompt_tokens + workload.new_tokens // 2)]
    ends = [*range(chunk_tokens, workload.prompt_tokens, chunk_tokens), workload.prompt_tokens]
    return [prefill(end - start, end) for start, end in zip([0, *ends], ends, strict=False)]


def rate_row(generate: Generate, workload: Workload, steps: Sequence[Roofline], num_rounds: int) -> Row:
    """Return the median rate of some rounds in tokens per second, beside its bound."""
    generate(draw_prompts(workload, Random(1)), workload.new_tokens)  # compiles kernels for this batch
    is_decode = workload.new_tokens > 1
    measure_rate = rate_measure("decode" if is_decode else "prefill", generate, workload)
    rates = [measure_rate() for _ in range(num_rounds)]
    num_tokens = workload.batch if is_decode else workload.batch * workload.prompt_tokens
    rate = statistics.median(rates)
    bound = num_tokens / sum(sum(step.bounds().values()) for step in steps)
    return {
        "rounds": rates,
        "rate": rate,
        "bound": bound,
        "fraction_of_bound": rate / bound,
        "lines": [f"{rate:,.0f} tokens/s, {rate / bound:.0%} of the bound"],
    }


@torch.inference_mode()
def transformers_figures(folder: Path, workload: Workload, sizes: Sizes) -> Row:
    """Return the decode rate of transformers, or why there is none."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device(sizes.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, sizes.dtype)).eval()

        def generate(prompts: list[list[int]], num_tokens: int) -> float:
            prompt_ids = torch.tensor(prompts, device=sizes.device)
            options = dict(max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
            synchronize()
            start = time.perf_counter()
            model.generate(prompt_ids, attention_mask=torch.ones_like(prompt_ids), **options)
            synchronize()
            return time.perf_counter() - start

        generate(draw_prompts(workload, Random(1)), 2)  # initialises libraries
        return {"rate": rate_measure("decode", generate, workload)()}
    except Exception as error:  # for example, it does not fit into memory
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        free_memory()


def total_memory() -> int:
    """Return the bytes of the GPU's memory."""
    return int(torch.cuda.get_device_properties(0).total_memory)


def synchronize() -> None:
    torch.cuda.synchronize()


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
