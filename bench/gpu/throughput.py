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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch

from moeserve import LLM
from moeserve.bench.costs import FORMATS, WeightFormat, step_work
from moeserve.bench.decode import Workload, draw_prompts, generate_with, rate_measure
from moeserve.bench.gpu.costs import Bar, GpuLimits
from moeserve.config.settings import QuantizationName
from moeserve.models.registry import describe
from moeserve.models.summary import summarize

BATCHES = (64, 8, 1)  # the first is compared with transformers
PROMPT_TOKENS = 496
NEW_TOKENS = 33  # contexts are 512 long in the middle of these
PREFILL_TOKENS = 4096
NUM_ROUNDS = 3
DEVICE = "cuda"
MEMORY_SHARE = 0.6  # of the GPU, for weights
DECODE_BARS = (Bar("times_transformers", 4.0), Bar("fraction_of_memory_bound", 0.60))

Family = Literal["Mixtral", "DeepseekV2"]


@dataclass(frozen=True)
class Model:
    """A published model's config.json."""

    name: str
    family: Family
    num_layers: int
    settings: dict[str, Any]
    quantization: QuantizationName | None = None

    @property
    def weights(self) -> WeightFormat:
        return FORMATS[self.quantization or "bfloat16"]

    def config(self, num_layers: int) -> dict[str, Any]:
        """Return its config.json with the first `num_layers` layers."""
        model_types = {"Mixtral": "mixtral", "DeepseekV2": "deepseek_v2"}
        return self.settings | {
            "architectures": [f"{self.family}ForCausalLM"],
            "model_type": model_types[self.family],
            "num_hidden_layers": num_layers,
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": None,
        }


PUBLISHED = (
    Model(
        "DeepSeek-V2-Lite",
        "DeepseekV2",
        27,
        dict(
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
            hidden_act="silu",
            rope_theta=10000.0,
            attention_bias=False,
            tie_word_embeddings=False,
        ),
    ),
    Model(
        "Mixtral-8x7B",
        "Mixtral",
        32,
        dict(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
            hidden_act="silu",
            rope_theta=1e6,
            sliding_window=None,
            tie_word_embeddings=False,
        ),
    ),
)
MODELS = (*PUBLISHED, replace(PUBLISHED[0], name="DeepSeek-V2-Lite, fp8", quantization="fp8"))


def write_config(model: Model, num_layers: int, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(model.config(num_layers)))


def layers_that_fit(model: Model, memory_bytes: float) -> int:
    """Return the number of layers that fit, at least two: one of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = []
        for num_layers in (2, 3):
            write_config(model, num_layers, Path(folder))
            sizes.append(summarize(describe(folder), "bfloat16").weight_bytes)
    per_layer = sizes[1] - sizes[0]
    fitting = 2 + int((memory_bytes - sizes[0]) // per_layer)
    return max(2, min(model.num_layers, fitting))


def decode_bytes(folder: Path, batch: int, context: int, weights: WeightFormat = FORMATS["bfloat16"]) -> float:
    """Return the bytes that a step reads: weights, and the keys and values of all contexts."""
    read = step_work(folder, num_tokens=batch, num_logits=batch, weights=weights).num_bytes
    return read + batch * context * summarize(describe(folder), "bfloat16").cache_bytes_per_token


def measure(model: Model, limits: GpuLimits, seconds_left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Yield rows of one model: decode with each batch, and prefill.

    Raises:
        Exception: whatever prevents the engine from running.
    """
    num_layers = layers_that_fit(model, MEMORY_SHARE * total_memory())
    facts = {"num_layers": num_layers, "layers_of_the_published": model.num_layers}
    vocab_size = model.settings["vocab_size"]
    workloads = {
        f"{model.name}, decode, batch {batch}": Workload(batch, PROMPT_TOKENS, NEW_TOKENS, vocab_size)
        for batch in BATCHES
    }
    workloads[f"{model.name}, prefill of {PREFILL_TOKENS}"] = Workload(1, PREFILL_TOKENS, 1, vocab_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(model, num_layers, folder)
        reference = None if model.quantization else transformers_rate(folder, seconds_left)
        settings: dict[str, Any] = dict(device=DEVICE, dtype="bfloat16", load_format="dummy", show_progress=False)
        settings |= dict(max_num_seqs=max(BATCHES), max_model_len=2 * PREFILL_TOKENS, enable_prefix_caching=False)
        with LLM(folder, quantization=model.quantization, **settings) as llm:
            for title, workload in workloads.items():
                row: dict[str, Any] = {"name": title, **facts}
                if seconds_left() <= 0:
                    yield row | {"status": "left out", "reason": "no time was left"}
                    continue
                kind = "prefill" if workload.new_tokens == 1 else "decode"
                row |= {"status": "measured"} | rate_row(folder, model, kind, llm, workload, limits, seconds_left)
                if reference is not None and workload.batch == BATCHES[0]:
                    row["transformers"] = reference
                    if "rate" in reference:
                        row["times_transformers"] = row["rate"] / reference["rate"]
                    row["bars"] = [bar.verdict(row) for bar in DECODE_BARS]
                yield row
    _free()


def rate_row(
    folder: Path,
    model: Model,
    kind: str,
    llm: LLM,
    workload: Workload,
    limits: GpuLimits,
    seconds_left: Callable[[], float],
) -> dict[str, Any]:
    """Return the median rate of some rounds in tokens per second, beside its bound."""
    generate = generate_with(llm)
    generate(draw_prompts(workload, Random(1)), workload.new_tokens)  # compiles kernels for this batch
    measure_rate = rate_measure(kind, generate, workload)
    rates = [measure_rate()]
    while len(rates) < NUM_ROUNDS and seconds_left() > 0:
        rates.append(measure_rate())
    if kind == "decode":
        context = workload.prompt_tokens + workload.new_tokens // 2
        num_bytes = decode_bytes(folder, workload.batch, context, model.weights)
        return {"rounds": rates} | decode_figures(rates, workload.batch, num_bytes, limits)
    work = step_work(folder, num_tokens=workload.prompt_tokens, num_logits=1, weights=model.weights)
    product_rate = limits.rate("fp8" if model.quantization else "bf16")
    bound = workload.prompt_tokens / max(work.operations / product_rate, work.num_bytes / limits.copy_bandwidth)
    rate = statistics.median(rates)
    return {"rounds": rates, "rate": rate, "bound": bound, "fraction_of_bound": rate / bound}


def decode_figures(rates: list[float], batch: int, num_bytes: float, limits: GpuLimits) -> dict[str, Any]:
    rate, bound = statistics.median(rates), batch * limits.copy_bandwidth / num_bytes
    fraction = rate / bound
    return {
        "rate": rate,
        "bytes_per_step": num_bytes,
        "bound": bound,
        "fraction_of_bound": fraction,
        "fraction_of_memory_bound": fraction,
    }


@torch.inference_mode()
def transformers_rate(folder: Path, seconds_left: Callable[[], float]) -> dict[str, Any]:
    """Return the decode rate of transformers with the largest batch, or why there is none."""
    import transformers

    if seconds_left() <= 0:
        return {"error": "no time was left"}
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device(DEVICE):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

        def generate(prompts: list[list[int]], num_tokens: int) -> float:
            prompt_ids = torch.tensor(prompts, device=DEVICE)
            synchronize()
            start = time.perf_counter()
            model.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            synchronize()
            return time.perf_counter() - start

        workload = Workload(BATCHES[0], PROMPT_TOKENS, NEW_TOKENS, config.vocab_size)
        generate(draw_prompts(workload, Random(1)), 2)  # initialises libraries
        return {"rate": rate_measure("decode", generate, workload)()}
    except Exception as error:  # for example, it does not fit into memory
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        _free()


def total_memory() -> int:
    """Return the bytes of the GPU's memory."""
    return int(torch.cuda.get_device_properties(0).total_memory)


def synchronize() -> None:
    torch.cuda.synchronize()


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
