"""The engine's greedy tokens on this device beside transformers' on the same, for random checkpoints of five families.

- *float32*: the tokens must be transformers', one by one. Prompts after which a token is a matter of rounding are not
  used: see `SMALLEST_GAP`.
- *bf16*: both are told the same tokens and say how likely each is. What transformers says in float32 is the truth; the
  engine may be `ROOM` times as far from it as transformers is in bf16. The share of tokens that both find likeliest,
  and the largest difference, are told.
- Each with CUDA graphs and layer by layer: in float32 both must give transformers' tokens, so the same.

Each comparison is judged by itself, once it has ended: an engine's first start on a machine is mostly compiling.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from moeserve import LLM, SamplingParams

PROMPT_LENGTHS = (1, 19, 6, 40)
NUM_TOKENS = 12
SMALLEST_GAP = 4e-3  # between the two largest logits; float32 results differ by less than 1e-4
ROOM = 3.0
ROOM_BEYOND = 1e-3  # of log-probabilities, where transformers happens to be almost exact
MAX_DRAWS = 60  # of prompts, until there are enough whose tokens are clear
Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]

COMMON: dict[str, Any] = dict(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    max_position_embeddings=256,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
LATENT: dict[str, Any] = dict(
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)
# transformers' name of a family, and what its smallest interesting model is like
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": dict(num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "DeepseekV2": LATENT
    | dict(q_lora_rank=None, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=1.5),
    "DeepseekV3": LATENT
    | dict(q_lora_rank=24, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5),
    "Qwen3Moe": dict(
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
    "GptOss": dict(
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=9,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
}

# Of a width that all of DeepEP's kernels take.
WIDE: dict[str, Any] = dict(
    hidden_size=2048, num_attention_heads=16, num_key_value_heads=2, num_hidden_layers=2, initializer_range=0.03
)


@dataclass(frozen=True)
class Comparison:
    """One way of running the engine, beside transformers."""

    family: str
    dtype: Dtype
    way: str  # in words
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the engine
    is_wide: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}, {self.dtype}, {self.way}"


# Those of one checkpoint and dtype use the same kernels. The first of them, which compile most, come first.
COMPARISONS = tuple(
    Comparison(family, dtype, way, dict(enforce_eager=way == "layer by layer"))
    for way, dtype, family in itertools.product(("graphs", "layer by layer"), get_args(Dtype), FAMILIES)
)


@dataclass(frozen=True)
class Answer:
    """Greedy tokens after a prompt, and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Truth:
    """A random checkpoint, prompts, and what transformers appends to each in float32."""

    folder: tempfile.TemporaryDirectory[str]  # goes when this does
    prompts: list[list[int]]
    tokens: list[list[int]]

    @property
    def path(self) -> Path:
        return Path(self.folder.name)


def compare(comparison: Comparison, device: Device, seed: int) -> dict[str, Any]:
    """The row of a comparison.

    Raises:
        Exception: whatever keeps the engine from running.
    """
    truth = find_truth(comparison.family, comparison.is_wide, device, seed)
    answers = answers_of(truth.path, device, comparison.dtype, truth.prompts, **comparison.settings)
    tokens = [answer.tokens for answer in answers]
    if comparison.dtype == "float32":
        figures = {"equal_tokens": _equal_tokens(tokens, truth.tokens)}
        wrong = [] if figures["equal_tokens"] == 1 else ["tokens are not transformers'"]
    else:
        figures = _figures_of_bf16(truth, device, answers)
        wrong = why_wrong(figures)
    row = {"name": comparison.name, "status": "failed" if wrong else "passed", "wrong": wrong}
    return row | {"num_tokens": sum(map(len, tokens))} | figures


@functools.cache
def find_truth(family: str, is_wide: bool, device: Device, seed: int) -> Truth:
    folder = tempfile.TemporaryDirectory()
    write_checkpoint(family, Path(folder.name), seed, is_wide=is_wide)
    return Truth(folder, *clear_prompts(Path(folder.name), device, seed))


def write_checkpoint(family: str, folder: Path, seed: int, *, is_wide: bool) -> None:
    """Random weights, those too that begin as zeros and ones and would hide that they are left out."""
    import transformers

    settings = COMMON | FAMILIES[family] | (WIDE if is_wide else {})
    config = getattr(transformers, f"{family}Config")(**settings)
    config.architectures = [f"{family}ForCausalLM"]
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name not in model.state_dict():
                continue
            if "norm" in name and tensor.dim() == 1:
                tensor.normal_(1.0, 0.2)
            elif name.endswith("sinks"):
                tensor.normal_(0.0, 1.0)
            elif name.endswith("bias"):
                tensor.normal_(0.0, 0.3)
    model.save_pretrained(folder, safe_serialization=True)


@contextmanager
def reference(folder: Path, device: Device, dtype: torch.dtype) -> Iterator[nn.Module]:
    """transformers' model, in its plainest form."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.config._experts_implementation = "eager"  # its faster ones refuse some widths
    yield model.to(device).eval()
    del model


@torch.inference_mode()
def clear_prompts(folder: Path, device: Device, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Random prompts, and what transformers appends to each in float32, by more than rounding could change."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    with reference(folder, device, torch.float32) as model:
        for _ in range(MAX_DRAWS):
            length = PROMPT_LENGTHS[len(prompts)]
            prompt = torch.randint(3, COMMON["vocab_size"], (length,), generator=generator).tolist()
            tokens: list[int] = []
            smallest = float("inf")
            while len(tokens) < NUM_TOKENS and smallest > SMALLEST_GAP:
                logits = _logits(model, prompt + tokens, device)[-1]
                largest = logits.topk(2)
                smallest = min(smallest, float(largest.values[0] - largest.values[1]))
                tokens.append(int(largest.indices[0]))
            if smallest > SMALLEST_GAP:
                prompts.append(prompt)
                answers.append(tokens)
            if len(prompts) == len(PROMPT_LENGTHS):
                return prompts, answers
    raise RuntimeError(f"of {MAX_DRAWS} prompts, only {len(prompts)} have tokens that are no matter of rounding")


def _logits(model: nn.Module, token_ids: list[int], device: Device) -> Tensor:
    """[T, vocab_size] float32"""
    logits: Tensor = model(torch.tensor([token_ids], device=device), use_cache=False).logits
    return logits[0].float()


@torch.inference_mode()
def _figures_of_bf16(truth: Truth, device: Device, answers: list[Answer]) -> dict[str, float]:
    tokens = [answer.tokens for answer in answers]
    own = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    exact, _ = _judged(truth.path, device, torch.float32, truth.prompts, tokens)
    rounded, likeliest = _judged(truth.path, device, torch.bfloat16, truth.prompts, tokens)
    flat = torch.tensor([token for each in tokens for token in each])
    return bf16_figures(own, rounded, exact) | {"equal_tokens": float((likeliest == flat).float().mean())}


def bf16_figures(own: Tensor, rounded: Tensor, exact: Tensor) -> dict[str, float]:
    """Log-probabilities of the same tokens: the engine's, transformers' in bf16, and transformers' in float32."""
    return {
        "max_logprob_difference": float((own - rounded).abs().max()),
        "mean_error": float((own - exact).abs().mean()),
        "mean_error_of_transformers": float((rounded - exact).abs().mean()),
    }


def why_wrong(figures: dict[str, float]) -> list[str]:
    """Nothing, if the engine is about as near to float32 as transformers is."""
    bound = ROOM * figures["mean_error_of_transformers"] + ROOM_BEYOND
    if figures["mean_error"] <= bound:
        return []
    return [f"log-probabilities are off by {figures['mean_error']:.3g} on average, and may be by {bound:.3g}"]


def _judged(
    folder: Path, device: Device, dtype: torch.dtype, prompts: list[list[int]], tokens: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """What transformers says of given tokens: log-probabilities, and the likeliest tokens in their places."""
    logprobs, likeliest = [], []
    with reference(folder, device, dtype) as model:
        for prompt, answer in zip(prompts, tokens, strict=True):
            rows = _logits(model, prompt + answer[:-1], device)[len(prompt) - 1 :].log_softmax(-1).cpu()
            logprobs.append(rows.gather(1, torch.tensor(answer)[:, None])[:, 0])
            likeliest.append(rows.argmax(-1))
    return torch.cat(logprobs), torch.cat(likeliest)


def answers_of(folder: Path, device: Device, dtype: Dtype, prompts: list[list[int]], **more: Any) -> list[Answer]:
    """All prompts at a time, so that steps have prefills and decodes side by side."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
    settings: dict[str, Any] = dict(dtype=dtype, device=device, show_progress=False) | more
    settings |= dict(kv_cache_memory="16MiB", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=48)
    with LLM(folder, packed_cache=0, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    answers = []
    for output in outputs:
        (completion,) = output.outputs
        assert completion.logprobs is not None
        logprobs = [
            place[token].logprob for place, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        answers.append(Answer(completion.token_ids, logprobs))
    return answers


def _equal_tokens(actual: list[list[int]], expected: list[list[int]]) -> float:
    """The share of tokens that are equal, place by place."""
    pairs = [
        (own, other)
        for tokens, others in zip(actual, expected, strict=True)
        for own, other in zip(tokens, others, strict=True)
    ]
    return sum(own == other for own, other in pairs) / len(pairs)
