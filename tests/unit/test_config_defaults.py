"""Missing keys of a config.json: transformers' defaults, or an error where a default could give wrong tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from moeserve.errors import CheckpointError
from moeserve.models.registry import describe, read_facts

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())


def described(tmp_path: Path, config: dict[str, Any]) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return describe(tmp_path).model


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("DeepSeek-V3", "norm_topk_prob"),
        ("DeepSeek-V3", "attention_bias"),
        ("DeepSeek-V3", "rope_interleave"),
        ("DeepSeek-V3", "tie_word_embeddings"),
        ("Qwen1.5-MoE-A2.7B", "norm_topk_prob"),
        ("Qwen1.5-MoE-A2.7B", "decoder_sparse_step"),
        ("Qwen1.5-MoE-A2.7B", "mlp_only_layers"),
        ("Qwen1.5-MoE-A2.7B", "qkv_bias"),
        ("Qwen1.5-MoE-A2.7B", "use_sliding_window"),
        ("Qwen3-30B-A3B", "norm_topk_prob"),
        ("Qwen3-30B-A3B", "attention_bias"),
        ("Qwen3-30B-A3B", "decoder_sparse_step"),
        ("Qwen3-30B-A3B", "use_sliding_window"),
        ("OLMoE-1B-7B", "norm_topk_prob"),
        ("OLMoE-1B-7B", "attention_bias"),
        ("OLMoE-1B-7B", "clip_qkv"),
        ("GLM-4.5", "norm_topk_prob"),
        ("GLM-4.5", "use_qk_norm"),
        ("GLM-4.5", "attention_bias"),
        ("gpt-oss-20b", "swiglu_limit"),
        ("gpt-oss-20b", "swiglu_alpha"),
        ("gpt-oss-20b", "attention_bias"),
        ("gpt-oss-20b", "layer_types"),
    ],
)
def test_a_missing_key_means_what_it_means_to_transformers(model: str, key: str, tmp_path: Path) -> None:
    config = {name: value for name, value in PUBLISHED[model].items() if name != key}
    family = config["architectures"][0].removesuffix("ForCausalLM")
    sizes = {"num_hidden_layers": config["num_hidden_layers"]}
    default = getattr(getattr(transformers, f"{family}Config")(**sizes), key)
    assert described(tmp_path, config) == described(tmp_path, config | {key: default})


def test_the_rotated_part_of_a_head_is_half_where_glm_does_not_say(tmp_path: Path) -> None:
    config = {name: value for name, value in PUBLISHED["GLM-4.5"].items() if name != "partial_rotary_factor"}
    assert (
        described(tmp_path, config).layers[0].mixer.rotary.dim
        == 64
        == transformers.Glm4MoeConfig().rope_parameters["partial_rotary_factor"] * config["head_dim"]
    )


@pytest.mark.parametrize(
    ("model", "key"),
    [
        *((model, key) for model in ("DeepSeek-V3", "GLM-4.5") for key in ("n_group", "topk_group")),
        *(
            (model, key)
            for model in ("DeepSeek-V2", "DeepSeek-V3", "GLM-4.5")
            for key in ("routed_scaling_factor", "n_shared_experts", "first_k_dense_replace")
        ),
        ("DeepSeek-V3", "q_lora_rank"),
        ("Qwen2-57B-A14B", "shared_expert_intermediate_size"),
        ("Mixtral-8x7B", "rope_theta"),
    ],
)
def test_no_guess_where_one_could_give_wrong_tokens(model: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        described(tmp_path, {name: value for name, value in PUBLISHED[model].items() if name != key})


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    """As Qwen3's model card has it: rope_scaling is added, and max_position_embeddings stays."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-30B-A3B"] | {"rope_scaling": scaling}))
    assert read_facts(tmp_path).max_position_embeddings == 131072


def test_two_names_for_one_number_must_agree(tmp_path: Path) -> None:
    config = PUBLISHED["Qwen3-30B-A3B"]
    assert described(tmp_path, config | {"num_local_experts": 128}) == described(tmp_path, config)
    with pytest.raises(CheckpointError, match="num_local_experts=64 contradicts num_experts=128"):
        described(tmp_path, config | {"num_local_experts": 64})
