"""Compares the engine's greedy tokens with those of transformers on the same device, for random checkpoints.

- *float32*: the tokens must be equal. Prompts whose tokens depend on rounding are not used (`SMALLEST_GAP`).
- *bf16*: the log-probabilities of the engine's tokens may differ from transformers in float32 by at most `ROOM` times
  as much as those of transformers in bf16.
- Each comparison runs with and without CUDA graphs, and three of them with long contexts, whose prefills are chunked.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from moeserve import LLM, SamplingParams
from moeserve.bench.gpu.parts import Item, Job, Row, one_row

SMALLEST_GAP = 4e-3  # minimum gap of the two largest logits; float32 results differ by less than 1e-4
ROOM = 3.0
ROOM_BEYOND = 1e-3  # additional room for log-probabilities, in case transformers is almost exact
MAX_DRAWS = 60  # maximum prompts drawn to find enough with clear tokens
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


class Truth(NamedTuple):
    """A random checkpoint, prompts, and the tokens of transformers in float32 after each prompt."""

    folder: tempfile.TemporaryDirectory[str]  # removed with this object
    attention: str  # implementation of attention in transformers
    prompts: list[list[int]]
    tokens: list[list[int]]


def items(job: Job) -> Iterator[Item]:
    """Yield the comparisons."""
    for each in REHEARSED if job.on_cpu else COMPARISONS:
        yield each.name, partial(one_row, compare, each, job.device, job.seed)


def compare(comparison: Comparison, device: str, seed: int) -> Row:
    """Return the row of a comparison.

    Raises:
        Exception: any error that prevents the engine from running.
    """
    truth = find_truth(comparison.family, comparison.lengths, comparison.num_tokens, device, seed)
    tokens, logprobs = generate(truth, device, comparison)
    if comparison.dtype == "float32":
        expected = torch.tensor(truth.tokens)
        row: Row = {"wrong": [] if torch.equal(tokens, expected) else ["tokens differ from transformers'"]}
    else:
        exact, _ = judged(truth, device, torch.float32, tokens)
        rounded, expected = judged(truth, device, getattr(torch, comparison.dtype), tokens)
        row = figures(logprobs, rounded, exact)
    line = f"{float((tokens == expected).float().mean()):.1%} of {tokens.numel()} tokens equal"
    return row | {"status": "failed" if row["wrong"] else "passed", "lines": [line, *row.get("lines", [])]}


@functools.cache
@torch.inference_mode()
def find_truth(family: str, lengths: tuple[int, ...], num_tokens: int, device: str, seed: int) -> Truth:
    """Write a checkpoint, and find random prompts with tokens that rounding cannot change."""
    # Of long contexts, the memory of eager attention is quadratic; sinks need it.
    attention = "sdpa" if max(lengths) > LONGEST_EAGER and family != "GptOss" else "eager"
    truth = Truth(tempfile.TemporaryDirectory(), attention, [], [])
    write_checkpoint(family, truth.folder.name, seed)
    model, generator = reference(truth, device, torch.float32), torch.Generator().manual_seed(seed)
    options: dict[str, Any] = dict(max_new_tokens=num_tokens, do_sample=False, use_cache=True)
    options |= dict(output_logits=True, return_dict_in_generate=True)
    for _ in range(MAX_DRAWS):
        prompt = torch.randint(3, COMMON["vocab_size"], (1, lengths[len(truth.prompts)]), generator=generator)
        answer = model.generate(prompt.to(device), **options)
        gaps = -torch.cat(answer.logits).float().topk(2).values.diff()
        if float(gaps.min()) > SMALLEST_GAP:
            truth.prompts.append(prompt[0].tolist())
            truth.tokens.append(answer.sequences[0, prompt.shape[1] :].tolist())
        if len(truth.prompts) == len(lengths):
            return truth
    raise RuntimeError(f"only {len(truth.prompts)} of {MAX_DRAWS} prompts have tokens that do not depend on rounding")


def config_of(family: str) -> Any:
    """Return transformers' configuration of a small model."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**COMMON | FAMILIES[family])
    config.architectures = [f"{family}ForCausalLM"]
    return config


def write_checkpoint(family: str, folder: str, seed: int) -> None:
    """Save a model with random weights, also for norms and biases, which are ones and zeros by default."""
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config_of(family)).eval()
    for name, tensor in model.state_dict().items():
        if tensor.dim() < 2 or name.endswith("bias"):
            tensor.add_(torch.randn_like(tensor), alpha=0.3)
    model.save_pretrained(folder, safe_serialization=True)


def reference(truth: Truth, device: str, dtype: torch.dtype) -> Any:
    """Load transformers' model in its simplest form."""
    import transformers

    options: dict[str, Any] = dict(dtype=dtype, attn_implementation=truth.attention)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(truth.folder.name, **options)
    model.config._experts_implementation = "eager"  # its faster ones refuse some widths
    return model.to(device).eval()


def figures(own: Tensor, rounded: Tensor, exact: Tensor) -> Row:
    """Compare log-probabilities of the same tokens: the engine's, and transformers' in its dtype and in float32."""
    effect, error = (float((each - exact).abs().mean()) for each in (rounded, own))
    bound = ROOM * effect + ROOM_BEYOND
    line = f"log-probabilities are off by {error:.3g}, of {bound:.3g} allowed; roundings change them by {effect:.3g}"
    return {"wrong": [] if error <= bound else [line], "lines": [line]}  # NaN is wrong


@torch.inference_mode()
def judged(truth: Truth, device: str, dtype: torch.dtype, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return transformers' log-probabilities of the tokens, and the most likely token at each position."""
    model, rows = reference(truth, device, dtype), []
    for prompt, answer in zip(truth.prompts, tokens.tolist(), strict=True):
        input_ids = torch.tensor([prompt + answer[:-1]], device=device)
        logits = model(input_ids, use_cache=False, logits_to_keep=len(answer)).logits
        rows.append(logits[0].float().log_softmax(-1).cpu())
    logprobs = torch.stack(rows)
    return logprobs.gather(-1, tokens[..., None])[..., 0], logprobs.argmax(-1)


def generate(truth: Truth, device: str, comparison: Comparison) -> tuple[Tensor, Tensor]:
    """Run all prompts at once, so that steps mix prefill and decode. Return tokens and their log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=len(truth.tokens[0]), ignore_eos=True, logprobs=1)
    settings: dict[str, Any] = SETTINGS | dict(comparison.settings) | {"dtype": comparison.dtype, "device": device}
    with LLM(truth.folder.name, **settings) as llm:
        outputs = [output.outputs[0] for output in llm.generate(truth.prompts, params, use_tqdm=False)]
    logprobs = [
        [place[token].logprob for place, token in zip(output.logprobs or (), output.token_ids, strict=True)]
        for output in outputs
    ]
    return torch.tensor([output.token_ids for output in outputs]), torch.tensor(logprobs)
