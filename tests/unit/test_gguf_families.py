"""GGUF files of every architecture give the tokens of the checkpoints from which they were made.

llama.cpp read files of the same writer, and gave transformers' tokens.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from gguf_families import write_family
from reference_models import SHAPES, make_reference

from moeserve import LLM, SamplingParams

# What files have no keys for is as in published models.
CHANGES: dict[str, dict[str, Any]] = {
    "gpt-oss": dict(swiglu_limit=7.0),
    "granite-hybrid": dict(num_attention_heads=6),
    "granite-hybrid-rope": {},
    "granite": {},
    "granite-shared": {},
    "minimax-m2": {},
    "glm4-moe": {},
    "dots1": {},
    "olmoe": dict(num_key_value_heads=4),
    "ernie": {},
    "lfm2-moe": {},
    "hunyuan": {},
    "kimi-linear": dict(linear_num_heads=4),
    "mistral4": {},
    "llama4": dict(no_rope_layers=[1, 1, 1, 0], attention_chunk_size=8192, floor_scale=8192, attn_scale=0.1),
    "glm5": {},
    "glm5-odd": {},
    "phimoe": dict(router_jitter_noise=0.01),
    "nemotron-h": {},
    "nemotron-h-latent": dict(layers_block_type=["moe", "linear_attention", "moe", "full_attention", "moe", "moe"]),
    "qwen3-next": dict(linear_value_head_dim=10),
    "exaone-moe": {},
    "afmoe": {},
    "laguna": {},
    "laguna-odd": {},
    "mellum": dict(norm_topk_prob=True),
    "mimo-v2-flash": {},
    "mimo-v2-flash-odd": {},
    "step3p7": {},
    "step3p7-odd": dict(query_pre_attn_scalar=12),
    "jamba": {},
    "dbrx": {},
    "hy-v3": {},
    "hy-v3-odd": {},
    "solar-open": {},
    "glm4-moe-lite": {},
    "deepseek-v32": {},
    "deepseek-ocr2": dict(routed_scaling_factor=1.5),
    "deepseek-ocr2-odd": {},
    "gemma4": {},
    "gemma4-odd": {},
    "cohere2-moe": dict(expert_selection_fn="sigmoid"),
    "minimax-m3": dict(swiglu_limit=7.0),
    "minimax-m3-odd": {},
    "minimax": dict(full_attn_beta_factor=1.0, linear_attn_beta_factor=1.0, mlp_beta_factor=1.0),
    "qwen3.5-moe": dict(linear_num_value_heads=6, linear_value_head_dim=6),
}


@pytest.mark.slow_but("gpt-oss", "minimax-m2", "jamba", "deepseek", "qwen3")
@pytest.mark.parametrize("name", CHANGES)
def test_tokens_are_those_of_the_checkpoint(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    shape = SHAPES[name]
    reference = make_reference(tmp_path / "hf", dataclasses.replace(shape, settings=shape.settings | CHANGES[name]))
    path = write_family(reference.folder, tmp_path / "model.gguf")
    prompt = {"prompt_token_ids": list(range(2, 25))}
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
    found = []
    for model in (path, reference.folder):
        with LLM(model, dtype="float32") as llm:
            found.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0])
    assert found[0].token_ids == found[1].token_ids == reference.greedy(prompt["prompt_token_ids"], 8)
    for of_file, of_folder in zip(found[0].logprobs or [], found[1].logprobs or [], strict=True):
        for token, entry in of_folder.items():
            assert of_file[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
