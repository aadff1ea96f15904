"""Tokens per second of the engine on models of published shapes with random weights, beside transformers.

- *decode*: `decode.py` describes the rate. The bound is the bytes of the weights that a step reads, with random
  routing, and of the keys and values of all contexts, at the measured bandwidth of copies.
- *prefill*: the bound is the multiply-adds of the weights at the rate of dense products, or the bytes.
- *transformers*: `generate` with a batch of equal length and random weights of its own, with sdpa attention.
- Models that do not fit have fewer layers; the row says how many.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch

from moeserve import LLM
from moeserve.bench.costs import FORMATS, step_work
from moeserve.bench.decode import Generate, Workload, draw_prompts, generate_with, rate_measure
from moeserve.bench.gpu.costs import Bar, GpuLimits
from moeserve.bench.gpu.limits import limits_row, measure_limits
from moeserve.bench.gpu.parts import Row, SecondsLeft, left_out
from moeserve.config.settings import QuantizationName
from moeserve.models.registry import describe
from moeserve.models.summary import summarize

MEMORY_SHARE = 0.6  # of the GPU, for weights
DECODE_BARS = (Bar("times_transformers", 4.0), Bar("fraction_of_memory_bound", 0.60))


@dataclass(frozen=True)
class Sizes:
    """The batches and lengths to measure, on a device."""

    device: Literal["cpu", "cuda"] = "cuda"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    batches: tuple[int, ...] = (64, 8, 1)  # the first is compared with transformers
    prompt_tokens: int = 496
    new_tokens: int = 33  # contexts are 512 long in the middle of these
    prefill_tokens: int = 4096
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


DEEPSEEK = Model(
    "DeepSeek-V2-Lite",
    dict(
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        num_hidden_layers=27,
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        topk_method="greedy",
        scoring_func="softmax",
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        attention_bias=False,
    ),
)
MIXTRAL = Model(
    "Mixtral-8x7B",
    dict(
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        num_hidden_layers=32,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        sliding_window=None,
    ),
)
MODELS = (DEEPSEEK, MIXTRAL, replace(DEEPSEEK, name="DeepSeek-V2-Lite, fp8", quantization="fp8"))


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
    workloads = {
        f"decode, batch {batch}": Workload(batch, sizes.prompt_tokens, sizes.new_tokens, vocab_size)
        for batch in sizes.batches
    }
    workloads[f"prefill of {sizes.prefill_tokens}"] = Workload(1, sizes.prefill_tokens, 1, vocab_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.write(folder, num_layers)
        first = next(iter(workloads.values()))
        other: Row = {} if model.quantization else transformers_figures(folder, first, sizes)
        settings: dict[str, Any] = dict(
            device=sizes.device, dtype=sizes.dtype, load_format="dummy", show_progress=False
        )
        settings |= dict(
            max_num_seqs=max(sizes.batches), max_model_len=2 * sizes.prefill_tokens, enable_prefix_caching=False
        )
        with LLM(folder, quantization=model.quantization, **settings) as llm:
            for title, workload in workloads.items():
                name = f"{model.name}, {title}"
                if seconds_left() <= reserved:
                    yield left_out(name, "no time was left")
                    continue
                row = rate_row(folder, model, generate_with(llm), workload, limits, sizes.num_rounds)
                row["lines"][0] = f"{num_layers} of {model.config['num_hidden_layers']} layers, {row['lines'][0]}"
                if other and workload is first:
                    row |= {"transformers": other}
                    row["lines"].append(f"transformers: {other}")
                    if "rate" in other:
                        row["times_transformers"] = row["rate"] / other["rate"]
                    row["bars"] = [bar.verdict(row) for bar in DECODE_BARS]
                yield {"name": name, "status": "measured", "num_layers": num_layers} | row
    free_memory()


def rate_row(
    folder: Path, model: Model, generate: Generate, workload: Workload, limits: GpuLimits, num_rounds: int
) -> Row:
    """Return the median rate of some rounds in tokens per second, beside its bound."""
    generate(draw_prompts(workload, Random(1)), workload.new_tokens)  # compiles kernels for this batch
    is_decode = workload.new_tokens > 1
    measure_rate = rate_measure("decode" if is_decode else "prefill", generate, workload)
    rates = [measure_rate() for _ in range(num_rounds)]
    num_tokens = workload.batch if is_decode else workload.batch * workload.prompt_tokens
    num_bytes, operations = work_of(folder, model, workload, num_tokens)
    product_rate = limits.rate("fp8" if model.quantization else "bf16")
    rate, memory_bound = statistics.median(rates), num_tokens * limits.copy_bandwidth / num_bytes
    bound = memory_bound if is_decode else min(memory_bound, num_tokens * product_rate / operations)
    return {
        "rounds": rates,
        "rate": rate,
        "bound": bound,
        "fraction_of_bound": rate / bound,
        "fraction_of_memory_bound": rate / memory_bound,
        "lines": [f"{rate:,.0f} tokens/s, {rate / bound:.0%} of the bound"],
    }


def work_of(folder: Path, model: Model, workload: Workload, num_tokens: int) -> tuple[float, float]:
    """Return bytes and operations of a step: those of the weights, and keys and values of all contexts."""
    weights = FORMATS[model.quantization or "bfloat16"]
    work = step_work(folder, num_tokens=num_tokens, num_logits=workload.batch, weights=weights)
    context = workload.prompt_tokens + workload.new_tokens // 2 if workload.new_tokens > 1 else 0
    cache_bytes = workload.batch * context * summarize(describe(folder), "bfloat16").cache_bytes_per_token
    return work.num_bytes + cache_bytes, work.operations


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
