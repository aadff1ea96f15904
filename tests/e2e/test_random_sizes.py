"""Every family with sizes drawn at random gives the log-probabilities of transformers, whole and in chunks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from reference_models import SHAPES, Shape, make_reference

from moeserve import LLM, SamplingParams

NUM_SEEDS = 3
WIDTHS = (  # in this order: each takes the next number of the seeded generator
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
    *("expert_ffn_hidden_size", "share_expert_dim", "moe_shared_expert_intermediate_size", "intermediate_size_mlp"),
    *("prefix_dense_intermediate_size",),
)
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
LATENT_SIZES = ("kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_nope_head_dim")
# Sizes that these families derive from others or list settings for, such as a factor for each rotated pair
FIXED = {
    "BailingHybrid": {"head_dim", "qk_rope_head_dim"},
    "Dbrx": {"hidden_size"},
    "DeepseekV2": {"hidden_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"},
    "Dots3Note": {"hidden_size"},
    "Ernie4_5_VLMoe": {"hidden_size"},
    "Gemma4": {"head_dim"},
    "Gemma4Text": {"head_dim"},
    "GraniteMoeHybrid": {"hidden_size"},
    "Inkling2": {"hidden_size"},
    "LongcatFlash": {"head_dim", "qk_rope_head_dim"},
    "MiMoV2Flash": {"v_head_dim"},
    "Mistral3": {"qk_nope_head_dim", "qk_rope_head_dim"},
    "Mistral4": {"qk_nope_head_dim", "qk_rope_head_dim"},
    "MuseSpark": {"hidden_size"},
    "Phimoe": {"hidden_size"},
    "Qwen3_5Moe": {"head_dim"},
}


def with_random_sizes(shape: Shape, dice: Random) -> Shape:
    """Return a shape with other widths, heads, ranks, windows, experts and vocabulary, odd where they may be."""
    old = shape.settings
    new: dict[str, Any] = {"vocab_size": dice.randint(90, 200)}
    new |= {key: dice.randint(9, 40) for key in WIDTHS if isinstance(old.get(key), int)}
    if max(old.get("n_group") or 1, old.get("num_expert_group") or 1) == 1:
        new |= {key: old[key] + dice.randint(0, 5) for key in NUMBERS_OF_EXPERTS if key in old}
    new |= {key: old[key] + dice.randint(0, 7) for key in LATENT_SIZES if old.get(key)}
    if old.get("qk_rope_head_dim"):
        new["qk_rope_head_dim"] = old["qk_rope_head_dim"] + 2 * dice.randint(0, 2)
    if old.get("sliding_window"):
        new["sliding_window"] = dice.randint(3, 12)
    if "head_dim" in old:
        new["head_dim"] = old["head_dim"] + 8 * dice.randint(0, 1)  # of which a quarter may be rotated
    if {"head_dim", "kv_lora_rank", "kv_channels"} & old.keys():
        new["hidden_size"] = dice.randint(25, 50)
    else:
        new["hidden_size"] = 2 * old["num_attention_heads"] * dice.randint(3, 6)
    kept = {key: value for key, value in new.items() if key not in FIXED.get(shape.family, ())}
    return dataclasses.replace(shape, settings=old | kept, seed=dice.randrange(2**16))


def first_of_each_family() -> list[str]:
    found: dict[str, str] = {}
    for name, shape in SHAPES.items():
        found.setdefault(shape.family, name)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize("name", first_of_each_family())
def test_log_probabilities_are_those_of_transformers(name: str, seed: int, tmp_path: Path) -> None:
    dice = Random(f"{name} {seed}")
    reference = make_reference(tmp_path, with_random_sizes(SHAPES[name], dice))
    prompts = (reference.prompts(37, seed=prompt_seed)[0] for prompt_seed in range(100))
    prompt = next(each for each in prompts if reference.num_undecided(each) == 0)
    expected = reference.logits(prompt).log_softmax(dim=-1)[torch.arange(36), prompt[1:]]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for most_tokens in (64, 7):
        with LLM(tmp_path, dtype="float32", kv_cache_memory="8MiB", max_num_batched_tokens=most_tokens) as llm:
            (output,) = llm.generate([prompt], params)
        entries = (output.prompt_logprobs or [])[1:]
        found = [entry[token].logprob for entry, token in zip(entries, prompt[1:], strict=True) if entry is not None]
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)
