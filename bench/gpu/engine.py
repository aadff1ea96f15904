"""Compares the engine's greedy tokens with those of transformers on the same device, for random checkpoints.

- *float32*: the tokens must be equal. Prompts whose tokens depend on rounding are not used (`SMALLEST_GAP`).
- *bf16*: the log-probabilities of the engine's tokens may differ from transformers in float32 by at most `ROOM` times
  as much as those of transformers in bf16.
- Each comparison runs with and without CUDA graphs, and three of them with long contexts, whose prefills are chunked.
- With several GPUs, there are also two ranks with each dispatcher, which covers NCCL, sums in symmetric memory, graphs
  with collectives, and DeepEP if it is installed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from moeserve import LLM, SamplingParams

SMALLEST_GAP = 4e-3  # minimum gap of the two largest logits; float32 results differ by less than 1e-4
ROOM = 3.0
ROOM_BEYOND = 1e-3  # additional room for log-probabilities, in case transformers is almost exact
MAX_DRAWS = 60  # maximum prompts drawn to find enough with clear tokens
Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
Attention = Literal["eager", "sdpa"]  # the memory of eager scores is quadratic

COMMON: dict[str, Any] = dict(
    vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=3, max_position_embeddings=256,
    initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
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

# A width that all of DeepEP's kernels support.
WIDE: dict[str, Any] = dict(
    hidden_size=2048, num_attention_heads=16, num_key_value_heads=2, num_hidden_layers=2, initializer_range=0.03
)
# Experts whose slices suit each device.
SLICED: dict[str, Any] = dict(intermediate_size=1536, moe_intermediate_size=1536)
LONG_CONTEXT = 32_000
# Sinks need eager attention in transformers.
LONG_PROMPTS: tuple[tuple[str, int, Attention], ...] = (
    ("Mixtral", LONG_CONTEXT, "sdpa"), ("DeepseekV3", LONG_CONTEXT, "sdpa"), ("GptOss", 12_000, "eager"),
)  # fmt: skip
LONG: dict[str, Any] = dict(max_position_embeddings=LONG_CONTEXT + 256)


@dataclass(frozen=True)
class Prompts:
    """The lengths of an engine's prompts, and of its answers."""

    lengths: tuple[int, ...] = (1, 19, 6, 40)
    num_tokens: int = 12


PROMPTS = Prompts()


@dataclass(frozen=True)
class Comparison:
    """One configuration of the engine to compare."""

    family: str
    dtype: Dtype
    variant: str
    settings: Mapping[str, Any]  # settings of the engine
    prompts: Prompts = PROMPTS
    model: Mapping[str, Any] = field(default_factory=dict)  # settings of the model besides those of its family
    attention: Attention = "eager"  # attention implementation of transformers

    @property
    def name(self) -> str:
        return f"{self.family}, {self.dtype}, {self.variant}"


LONG_SETTINGS: dict[str, Any] = dict(max_model_len=LONG_CONTEXT + 256, kv_cache_memory="512MiB")
# Comparisons with the same checkpoint and dtype share a process. The first ones compile most.
CHECKPOINTS = [(family, dtype) for dtype in get_args(Dtype) for family in FAMILIES]
COMPARISONS = (
    *(
        Comparison(family, dtype, variant, dict(enforce_eager=variant == "eager"))
        for variant in ("graphs", "eager")
        for family, dtype in CHECKPOINTS
    ),
    *(
        Comparison(
            family,
            "float32",
            f"context of {length} in chunks",
            LONG_SETTINGS | dict(max_num_batched_tokens=4096),
            Prompts(lengths=(length, 70), num_tokens=4),
            LONG,
            attention,
        )
        for family, length, attention in LONG_PROMPTS
    ),
)
LAYOUTS: dict[str, dict[str, Any]] = {"tp=2": dict(tensor_parallel_size=2), "dp=2": dict(data_parallel_size=2)}
EXCHANGES: dict[str, dict[str, Any]] = {
    **{
        f"{layout}, {dispatcher}": settings | dict(dispatcher=dispatcher, expert_parallel=True)
        for layout, settings in LAYOUTS.items()
        for dispatcher in ("allgather", "all_to_all")
    },
    "tp=2, sliced experts": LAYOUTS["tp=2"] | dict(expert_parallel=False),
    "dp=2, in halves": LAYOUTS["dp=2"] | dict(overlap_decode_tokens=2, overlap_prefill_tokens=2),
    "dp=2, rebalanced": LAYOUTS["dp=2"]
    | dict(rebalance="auto", rebalance_horizon=100_000, expert_load_window=2, num_redundant_experts=2),
}
RANK_COMPARISONS = (
    *(
        Comparison(family, "float32", exchange, settings, model=SLICED if "sliced" in exchange else {})
        for exchange, settings in EXCHANGES.items()
        for family in ("Mixtral", "DeepseekV3")
    ),
    *(
        Comparison(
            "Mixtral",
            "bfloat16",
            f"{layout}, deepep, {api}",
            settings | dict(dispatcher="deepep", deepep_api=api, expert_parallel=True),
            model=WIDE,
        )
        for layout, settings in LAYOUTS.items()
        for api in ("legacy", "elastic")
    ),
)


@dataclass(frozen=True)
class Truth:
    """A random checkpoint, prompts, and the tokens of transformers in float32 after each prompt."""

    folder: tempfile.TemporaryDirectory[str]  # removed with this object
    prompts: list[list[int]]
    tokens: list[list[int]]
    num_tokens: int  # tokens of each answer
    attention: Attention

    @property
    def path(self) -> Path:
        return Path(self.folder.name)


def compare(comparison: Comparison, device: Device, seed: int) -> dict[str, Any]:
    """Return the row of a comparison.

    Raises:
        Exception: any error that prevents the engine from running.
    """
    if comparison.settings.get("dispatcher") == "deepep" and importlib.util.find_spec("deep_ep") is None:
        return {"status": "left out", "reason": "the package deep_ep is not installed"}
    model = json.dumps(comparison.model)  # is hashable
    truth = find_truth(comparison.family, model, comparison.prompts, comparison.attention, device, seed)
    tokens, logprobs = generate(truth, device, comparison.dtype, comparison.settings)
    row: dict[str, Any]
    if comparison.dtype == "float32":
        expected = torch.tensor(truth.tokens)
        row = {"wrong": [] if torch.equal(tokens, expected) else ["tokens differ from transformers'"]}
    else:
        exact, _ = judged(truth, device, torch.float32, tokens)
        rounded, expected = judged(truth, device, getattr(torch, comparison.dtype), tokens)
        row = figures(logprobs, rounded, exact)
    share = float((tokens == expected).float().mean())
    lines = [f"{share:.1%} of {tokens.numel()} tokens equal", *row.pop("lines", [])]
    return {"status": "failed" if row["wrong"] else "passed", "equal_tokens": share, "lines": lines} | row


@functools.cache
def find_truth(family: str, model: str, prompts: Prompts, attention: Attention, device: Device, seed: int) -> Truth:
    """Write a checkpoint, and find prompts. `model` holds additional settings of the model, as JSON."""
    folder = tempfile.TemporaryDirectory()
    write_checkpoint(family, Path(folder.name), seed, json.loads(model))
    transformers = reference(Path(folder.name), device, torch.float32, attention)
    return Truth(folder, *clear_prompts(transformers, prompts, device, seed), prompts.num_tokens, attention)


def config_of(family: str, more: Mapping[str, Any] | None = None) -> Any:
    """Return transformers' configuration of a small model."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**COMMON | FAMILIES[family] | dict(more or {}))
    config.architectures = [f"{family}ForCausalLM"]
    return config


def write_checkpoint(family: str, folder: Path, seed: int, more: Mapping[str, Any]) -> None:
    """Save a model with random weights, also for weights that are zeros or ones by default."""
    import transformers

    config = config_of(family, more)
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


def reference(folder: Path, device: Device, dtype: torch.dtype, attention: Attention) -> nn.Module:
    """Load transformers' model in its simplest form."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    model.config._experts_implementation = "eager"  # its faster ones refuse some widths
    loaded: nn.Module = model.to(device).eval()
    return loaded


@torch.inference_mode()
def clear_prompts(
    model: nn.Module, wanted: Prompts, device: Device, seed: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return random prompts with their tokens by transformers in float32, which rounding cannot change."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    for _ in range(MAX_DRAWS):
        length = wanted.lengths[len(prompts)]
        prompt = torch.randint(3, COMMON["vocab_size"], (length,), generator=generator).tolist()
        tokens: list[int] = []
        smallest = float("inf")
        while len(tokens) < wanted.num_tokens and smallest > SMALLEST_GAP:
            largest = _logits(model, prompt + tokens, device, 1)[-1].topk(2)
            smallest = min(smallest, float(largest.values[0] - largest.values[1]))
            tokens.append(int(largest.indices[0]))
        if smallest > SMALLEST_GAP:
            prompts.append(prompt)
            answers.append(tokens)
        if len(prompts) == len(wanted.lengths):
            return prompts, answers
    raise RuntimeError(f"only {len(prompts)} of {MAX_DRAWS} prompts have tokens that do not depend on rounding")


def _logits(model: nn.Module, token_ids: list[int], device: Device, num_kept: int) -> Tensor:
    """Return the logits of the last positions, [num_kept, vocab_size] float32."""
    input_ids = torch.tensor([token_ids], device=device)
    logits: Tensor = model(input_ids, use_cache=False, logits_to_keep=num_kept).logits
    return logits[0].float()


def figures(own: Tensor, rounded: Tensor, exact: Tensor) -> dict[str, Any]:
    """Compare log-probabilities of the same tokens: the engine's, and transformers' in its dtype and in float32."""
    effect, error = (float((each - exact).abs().mean()) for each in (rounded, own))
    bound = ROOM * effect + ROOM_BEYOND
    line = f"log-probabilities are off by {error:.3g}, of {bound:.3g} allowed; roundings change them by {effect:.3g}"
    wrong = [] if error <= bound else [line]  # NaN is wrong
    return {"mean_error": error, "effect_of_rounding": effect, "wrong": wrong, "lines": [line]}


@torch.inference_mode()
def judged(truth: Truth, device: Device, dtype: torch.dtype, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return transformers' log-probabilities of the tokens, and the most likely token at each position."""
    model = reference(truth.path, device, dtype, truth.attention)
    rows = [
        _logits(model, prompt + answer[:-1], device, len(answer)).log_softmax(-1).cpu()
        for prompt, answer in zip(truth.prompts, tokens.tolist(), strict=True)
    ]
    logprobs = torch.stack(rows)
    return logprobs.gather(-1, tokens[..., None])[..., 0], logprobs.argmax(-1)


def generate(truth: Truth, device: Device, dtype: Dtype, more: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Run all prompts at once, so that steps mix prefill and decode. Return tokens and their log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=truth.num_tokens, ignore_eos=True, logprobs=1)
    settings: dict[str, Any] = dict(dtype=dtype, device=device, show_progress=False, packed_cache=0)
    settings |= dict(kv_cache_memory="16MiB", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=48)
    with LLM(truth.path, **(settings | dict(more))) as llm:
        outputs = [output.outputs[0] for output in llm.generate(truth.prompts, params, use_tqdm=False)]
    logprobs = [
        [place[token].logprob for place, token in zip(output.logprobs or (), output.token_ids, strict=True)]
        for output in outputs
    ]
    return torch.tensor([output.token_ids for output in outputs]), torch.tensor(logprobs)
