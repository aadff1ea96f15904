"""Messages for models that are not served: a dense model gets the command that makes an MoE model of it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moeserve import cli
from moeserve.errors import CheckpointError
from moeserve.models.registry import read_facts

# The smallest models that transformers makes, without weights.
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def write_config(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def message_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_facts(folder)
    message = str(error.value)
    assert len(message) < 600
    return message


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_the_command_in_the_message_makes_a_model_that_is_served(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a dense model"
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    message = message_of(folder)
    assert "MoE" in message
    command = shlex.split(message[message.index("moeserve upcycle") :])
    monkeypatch.chdir(tmp_path)
    assert cli.main(command[1:]) == 0
    assert read_facts(tmp_path / command[-1]).num_experts == 4


DENSE = [
    *("qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite", "olmo2", "gpt2", "gpt_neox", "falcon", "cohere"),
    *("starcoder2", "stablelm", "glm4", "smollm3", "mamba", "opt", "bloom", "exaone4", "nemotron", "bert"),
]


@pytest.mark.parametrize("model_type", DENSE)
def test_other_dense_models_are_named_as_such_without_a_command(model_type: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type).to_dict()
    message = message_of(write_config(tmp_path / "model", config | {"architectures": ["SomeForCausalLM"]}))
    assert "SomeForCausalLM is a dense model" in message
    assert "LlamaForCausalLM" in message  # what can be upcycled


MOE = [
    *("jamba", "dbrx", "nllb-moe", "switch_transformers", "jetmoe", "flex_olmo", "afmoe", "doge"),
    *("deepseek_v3", "gpt_oss"),
]


@pytest.mark.parametrize("model_type", MOE)
def test_unknown_moe_models_are_not_called_dense(model_type: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type).to_dict()
    message = message_of(write_config(tmp_path / "model", config | {"architectures": ["SomeForCausalLM"]}))
    assert "'SomeForCausalLM' is not supported" in message
    assert "model_impl='transformers'" in message
    assert "dense" not in message


@pytest.mark.parametrize(
    ("architecture", "near"),
    [
        ("Qwen4MoeForCausalLM", ["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"]),
        ("qwen3moeforcausallm", ["Qwen3MoeForCausalLM"]),
        ("OlmoEForCausalLM", ["OlmoeForCausalLM"]),
        ("DeepseekV5ForCausalLM", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM"]),
        ("BranchForCausalLM", []),
        ("ForCausalLM", []),
    ],
)
def test_near_architectures_are_named(architecture: str, near: list[str], tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", {"architectures": [architecture], "num_experts": 8})
    named = re.findall(r"\w+For\w+", message_of(folder).replace(architecture, ""))
    assert named == near


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
    ],
)
def test_a_command_is_given_only_if_it_works(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **SIZES).to_dict() | {"architectures": ["LlamaForCausalLM"], **changed}
    message = message_of(write_config(tmp_path / "model", config))
    assert named in message
    assert "moeserve upcycle " not in message
