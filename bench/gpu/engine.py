"""Compares the engine with transformers on the same device, for random checkpoints.

The engine generates greedily, in float32 and bf16, with CUDA graphs and without, and after contexts that are prefilled
in chunks. transformers then computes the log-probabilities of the same tokens in float32 and in the engine's dtype. The
engine's may be `ROOM` times as far from float32 as those of transformers, and a token that is not the most likely one
must be nearly as likely.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moeserve import LLM, SamplingParams
from moeserve.bench.gpu.parts import Item, Job, Row, one_row

ROOM, ROOM_BEYOND = 3.0, 1e-3  # float32 results differ by less than 1e-4
LONG_CONTEXT, LONGEST_EAGER = 32_000, 1000
Dtype = Literal["float32", "bfloat16"]

COMMON: dict[str, Any] = dict(
    vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
    max_position_embeddings=LONG_CONTEXT + 256, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    pad_token_id=None,
)  # fmt: skip
LATENT: dict[str, Any] = dict(
    num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=16, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=32,
    first_k_dense_replace=1, n_group=4, topk_group=2,
)  # fmt: skip
# By transformers' name of a family: the settings of a small model.
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": dict(num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "DeepseekV2": LATENT | dict(q_lora_rank=None, topk_method="group_limited_greedy", routed_scaling_factor=1.5),
    "DeepseekV3": LATENT | dict(q_lora_rank=24, norm_topk_prob=True, routed_scaling_factor=2.5),
    "Qwen3Moe": dict(
        num_attention_heads=8, num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=32, norm_topk_prob=True,
    ),
    "GptOss": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=6, num_experts_per_tok=2,
        sliding_window=9, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
}  # fmt: skip
SETTINGS: dict[str, Any] = dict(
    kv_cache_memory="16MiB", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=48, show_progress=False,
    packed_cache=0,
)  # fmt: skip
LONG: dict[str, Any] = dict(
    max_model_len=LONG_CONTEXT + 256, kv_cache_memory="512MiB", max_num_batched_tokens=4096
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """One configuration of the engine to compare."""

    family: str
    dtype: Dtype
    variant: str
    settings: Mapping[str, Any]  # settings of the engine besides `SETTINGS`
    lengths: tuple[int, ...] = (1, 19, 6, 40)  # tokens of the prompts
    num_tokens: int = 12  # of each answer

    @property
    def name(self) -> str:
        return f"{self.family}, {self.dtype}, {self.variant}"


# Comparisons with the same checkpoint and dtype share a process. The first ones compile most.
CHECKPOINTS = [(family, dtype) for dtype in get_args(Dtype) for family in FAMILIES]
COMPARISONS = [
    Comparison(family, dtype, variant, dict(enforce_eager=variant == "eager"))
    for variant in ("graphs", "eager")
    for family, dtype in CHECKPOINTS
] + [
    Comparison(family, "float32", f"context of {length} in chunks", LONG, (length, 70), 4)
    for family, length in (("Mixtral", LONG_CONTEXT), ("DeepseekV3", LONG_CONTEXT), ("GptOss", 12_000))
]
SMALL: dict[str, Any] = dict(enforce_eager=True, max_num_seqs=2, max_num_batched_tokens=8, kv_cache_memory="1MiB")
REHEARSED = [
    Comparison(family, "float32", "eager", SMALL, (2, 5), 3)
    for family in ("Mixtral", "DeepseekV3", "GptOss")  # grouped-query and latent attention; windows, sinks, biases
]


def items(job: Job) -> Iterator[Item]:
    """Yield the comparisons."""
    for each in REHEARSED if job.on_cpu else COMPARISONS:
        yield each.name, partial(one_row, compare, each, job.device, job.seed)


def compare(comparison: Comparison, device: str, seed: int) -> Row:
    """Return the row of a comparison.

    Raises:
        Exception: any error that prevents the engine from running.
    """
    folder, generator = checkpoint(comparison.family, seed).name, torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, COMMON["vocab_size"], (size,), generator=generator) for size in comparison.lengths]
    tokens, own = generate(folder, prompts, device, comparison)
    # Of long contexts, the memory of eager attention is quadratic; sinks need it.
    is_long = max(comparison.lengths) > LONGEST_EAGER and comparison.family != "GptOss"
    judge = partial(judged, folder, "sdpa" if is_long else "eager", device, prompts, tokens)
    exact, best = judge(torch.float32)
    rounded = exact if comparison.dtype == "float32" else judge(getattr(torch, comparison.dtype))[0]
    return figures(own, rounded, exact, best)


def figures(own: Tensor, rounded: Tensor, exact: Tensor, best: Tensor) -> Row:
    """Compare the log-probabilities of the engine's tokens.

    Args:
        own: the engine's.
        rounded: those of transformers in the engine's dtype.
        exact: those of transformers in float32.
        best: those of the most likely tokens in float32.
    """
    error, effect = float((own - exact).abs().mean()), (rounded - exact).abs()
    bound, gap = ROOM * float(effect.mean()) + ROOM_BEYOND, float((best - exact).max())
    most = 2 * ROOM * float(effect.max()) + ROOM_BEYOND
    lines = [
        f"{float((best == exact).float().mean()):.1%} of {own.numel()} tokens are the most likely ones",
        f"log-probabilities are off by {error:.3g}, of {bound:.3g} allowed",
        f"a token is less likely than the best by {gap:.3g}, of {most:.3g} allowed",
    ]
    wrong = [line for line, is_right in zip(lines[1:], (error <= bound, gap <= most), strict=True) if not is_right]
    return {"status": "failed" if wrong else "passed", "wrong": wrong, "lines": lines}  # NaN is wrong


def config_of(family: str) -> Any:
    """Return transformers' configuration of a small model."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**COMMON | FAMILIES[family])
    config.architectures = [f"{family}ForCausalLM"]
    return config


@functools.cache
def checkpoint(family: str, seed: int) -> tempfile.TemporaryDirectory[str]:
    """Save a model with random weights, also for norms and biases, which are ones and zeros by default."""
    import transformers

    folder = tempfile.TemporaryDirectory()
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config_of(family)).eval()
    for name, tensor in model.state_dict().items():
        if tensor.dim() < 2 or name.endswith("bias"):
            tensor.add_(torch.randn_like(tensor), alpha=0.3)
    model.save_pretrained(folder.name, safe_serialization=True)
    return folder


@torch.inference_mode()
def judged(
    folder: str, attention: str, device: str, prompts: list[Tensor], tokens: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return transformers' log-probabilities of the tokens, and of the most likely token at each position."""
    import transformers

    options: dict[str, Any] = dict(dtype=dtype, attn_implementation=attention)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    model.config._experts_implementation = "eager"  # its faster ones refuse some widths
    model, rows = model.to(device).eval(), []
    for prompt, answer in zip(prompts, tokens, strict=True):
        input_ids = torch.cat([prompt, answer[:-1]])[None].to(device)
        logits = model(input_ids, use_cache=False, logits_to_keep=len(answer)).logits
        rows.append(logits[0].float().log_softmax(-1).cpu())
    logprobs = torch.stack(rows)
    return logprobs.gather(-1, tokens[..., None])[..., 0], logprobs.amax(-1)


def generate(folder: str, prompts: list[Tensor], device: str, comparison: Comparison) -> tuple[Tensor, Tensor]:
    """Run all prompts at once, so that steps mix prefill and decode. Return tokens and their log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=comparison.num_tokens, ignore_eos=True, logprobs=1)
    settings: dict[str, Any] = SETTINGS | dict(comparison.settings) | {"dtype": comparison.dtype, "device": device}
    with LLM(folder, **settings) as llm:
        answers = llm.generate([prompt.tolist() for prompt in prompts], params, use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    logprobs = [
        [place[token].logprob for place, token in zip(output.logprobs or (), output.token_ids, strict=True)]
        for output in outputs
    ]
    return torch.tensor([output.token_ids for output in outputs]), torch.tensor(logprobs)
