"""Tokens per second of the engine on models of published shapes with random weights, beside transformers on the same.

- *decode*: two runs are timed, of N new tokens and of 1, and the difference counts: `decode.py`. The bound is the bytes
  of the weights that a step of so many tokens reads, with routing at random, and of all contexts' keys and values, at
  the bandwidth that copies were measured to have.
- *prefill*: prompt tokens over the time until the first new token; its bound is the multiply-adds of weights at the
  rate of dense products, of 8-bit floats where weights are, or the bytes.
- *transformers*: `generate` with a batch of equal prompts and random weights of its own, with the fastest of the
  implementations of attention and experts that it has here.
- Layers are left out where all of them do not fit: the row says how many there are.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from torch import nn

from moeserve import LLM
from moeserve.bench.costs import FORMATS, WeightFormat, step_work
from moeserve.bench.decode import Workload, decode_rate, draw_prompts, generate_with, prefill_rate
from moeserve.bench.gpu.costs import Bar, GpuLimits
from moeserve.bench.gpu.limits import gpu_memory, synchronize
from moeserve.config.settings import QuantizationName
from moeserve.models.registry import describe
from moeserve.models.summary import summarize

BATCHES = (64, 8, 1)  # the one with the bars first
PROMPT_TOKENS = 496
NEW_TOKENS = 33  # contexts are 512 long in the middle of these
PREFILL_TOKENS = 4096
NUM_ROUNDS = 3  # of which the median counts
COMPARED_BATCH = 64
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
        """With fewer layers, the first ones."""
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
    """As many as there are, or as have place: at least two, so that every kind is there."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = []
        for num_layers in (2, 3):
            write_config(model, num_layers, Path(folder))
            sizes.append(summarize(describe(folder), "bfloat16").weight_bytes)
    per_layer = sizes[1] - sizes[0]
    fitting = 2 + int((memory_bytes - sizes[0]) // per_layer)
    return max(2, min(model.num_layers, fitting))


def decode_bytes(folder: Path, batch: int, context: int, weights: WeightFormat = FORMATS["bfloat16"]) -> float:
    """Of one step: weights, and keys and values of so many contexts."""
    read = step_work(folder, num_tokens=batch, num_logits=batch, weights=weights).num_bytes
    return read + batch * context * summarize(describe(folder), "bfloat16").cache_bytes_per_token


def measure(model: Model, limits: GpuLimits, seconds_left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Rows of one model: prefill, and decode of each batch. What does not run fails its row."""
    num_layers = layers_that_fit(model, MEMORY_SHARE * gpu_memory())
    facts = {"num_layers": num_layers, "layers_of_the_published": model.num_layers}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(model, num_layers, folder)
        peer: dict[str, Any] | None = None if model.quantization else {"error": "no time was left"}
        if peer is not None and seconds_left() > 0:
            peer = transformers_rate(folder, seconds_left)
            _free()
        try:
            with start(folder, model.quantization) as llm:
                vocab_size = model.settings["vocab_size"]
                for batch in BATCHES:
                    title = f"{model.name}, decode, batch {batch}"
                    if seconds_left() <= 0:
                        yield {"name": title, "status": "left out", "reason": "no time was left"} | facts
                        continue
                    workload = Workload(batch, PROMPT_TOKENS, NEW_TOKENS, vocab_size)
                    own_peer = peer if batch == COMPARED_BATCH else None
                    yield (
                        {"name": title}
                        | facts
                        | _decode_row(folder, llm, workload, limits, model, own_peer, seconds_left)
                    )
                title = f"{model.name}, prefill of {PREFILL_TOKENS}"
                if seconds_left() <= 0:
                    yield {"name": title, "status": "left out", "reason": "no time was left"} | facts
                else:
                    workload = Workload(1, PREFILL_TOKENS, 1, vocab_size)
                    yield {"name": title} | facts | _prefill_row(folder, llm, workload, limits, model)
        except Exception as error:
            yield {
                "name": f"{model.name}, engine",
                "status": "failed",
                "error": f"{type(error).__name__}: {error}"[:2000],
                "trace": traceback.format_exc(limit=-4),
            } | facts
    _free()


def start(folder: Path, quantization: QuantizationName | None) -> LLM:
    settings: dict[str, Any] = dict(device=DEVICE, dtype="bfloat16", load_format="dummy", show_progress=False)
    settings |= dict(quantization=quantization)
    settings |= dict(max_num_seqs=max(BATCHES), max_model_len=2 * PREFILL_TOKENS, enable_prefix_caching=False)
    return LLM(folder, **settings)


def _decode_row(
    folder: Path,
    llm: LLM,
    workload: Workload,
    limits: GpuLimits,
    model: Model,
    peer: dict[str, Any] | None,
    seconds_left: Callable[[], float],
) -> dict[str, Any]:
    generate = generate_with(llm)
    generate(draw_prompts(workload, Random(1)), workload.new_tokens)  # compiles what is compiled for this batch
    source = Random(0)
    rates = [decode_rate(generate, workload, source)]
    while len(rates) < NUM_ROUNDS and seconds_left() > 0:
        rates.append(decode_rate(generate, workload, source))
    num_bytes = decode_bytes(folder, workload.batch, workload.prompt_tokens + workload.new_tokens // 2, model.weights)
    row = decode_figures(rates, workload.batch, num_bytes, limits)
    if peer is not None:
        row["transformers"] = peer
        if "rate" in peer:
            row["times_transformers"] = row["rate"] / peer["rate"]
        row["bars"] = [bar.verdict(row) for bar in DECODE_BARS]
    return {"status": "told"} | row


def decode_figures(rates: list[float], batch: int, num_bytes: float, limits: GpuLimits) -> dict[str, Any]:
    """What tokens per second of all requests together say beside the bandwidth."""
    rate = sorted(rates)[len(rates) // 2]
    bound = batch * limits.copy_bandwidth / num_bytes
    return {
        "rate": rate,
        "unit": "tokens/s",
        "rounds": rates,
        "bytes_per_step": num_bytes,
        "bound": bound,
        "fraction_of_memory_bound": rate / bound,
    }


def _prefill_row(folder: Path, llm: LLM, workload: Workload, limits: GpuLimits, model: Model) -> dict[str, Any]:
    generate = generate_with(llm)
    generate(draw_prompts(workload, Random(1)), 1)
    source = Random(0)
    rates = [prefill_rate(generate, workload, source) for _ in range(NUM_ROUNDS)]
    work = step_work(folder, num_tokens=workload.prompt_tokens, num_logits=1, weights=model.weights)
    product_rate = limits.rate("fp8" if model.quantization else "bf16")
    bound_seconds = max(work.operations / product_rate, work.num_bytes / limits.copy_bandwidth)
    rate = sorted(rates)[len(rates) // 2]
    return {
        "status": "told",
        "rate": rate,
        "unit": "tokens/s",
        "rounds": rates,
        "bound": workload.prompt_tokens / bound_seconds,
        "fraction_of_bound": rate * bound_seconds / workload.prompt_tokens,
    }


@torch.inference_mode()
def transformers_rate(folder: Path, seconds_left: Callable[[], float]) -> dict[str, Any]:
    """Decoded tokens per second of the batch that is compared, in its fastest form here; or why there are none."""
    rates: dict[str, float] = {}
    errors: dict[str, str] = {}
    model: nn.Module | None = None
    try:
        model = _random_transformers(folder)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    attentions = ["sdpa"]
    if importlib.util.find_spec("flash_attn") is not None:
        attentions.append("flash_attention_2")
    forms = [(attention, experts) for attention in attentions for experts in ("grouped_mm", "eager")]
    for attention, experts in forms:
        name = f"{attention}, {experts}"
        if rates and seconds_left() <= 0:
            errors[name] = "no time was left"
            continue
        try:
            model.set_attn_implementation(attention)  # type: ignore[operator]
            model.set_experts_implementation(experts)  # type: ignore[operator]
            rates[name] = _generated_per_second(model)
        except Exception as error:  # a form that this version does not have, or that does not fit
            errors[name] = f"{type(error).__name__}: {error}"[:300]
            torch.cuda.empty_cache()
    found: dict[str, Any] = {"rates": rates, "errors": errors}
    if rates:
        best = max(rates, key=rates.__getitem__)
        return found | {"form": best, "rate": rates[best]}
    return found | {"error": "none of its forms could run"}


def _random_transformers(folder: Path) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    own: nn.Module = model.eval()
    return own


def _generated_per_second(model: Any) -> float:
    """As `decode_rate` of moeserve: the time of more tokens less that of one."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    vocab_size = model.config.vocab_size

    def seconds(num_tokens: int) -> float:
        shape = (COMPARED_BATCH, PROMPT_TOKENS)
        prompts = torch.randint(3, vocab_size, shape, generator=generator, device=DEVICE)
        synchronize()
        start = time.perf_counter()
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        synchronize()
        return time.perf_counter() - start

    seconds(2)  # sets libraries up
    longer, shorter = seconds(NEW_TOKENS), seconds(1)
    if longer <= shorter:
        raise RuntimeError(f"{NEW_TOKENS} tokens took {longer:.3g} s, and one {shorter:.3g} s")
    return COMPARED_BATCH * (NEW_TOKENS - 1) / (longer - shorter)


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
