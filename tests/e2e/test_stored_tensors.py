"""Stored tensors decide: heads that differ from the embedding, tensors without use, shards without an index."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import SHAPES, Reference, make_reference
from safetensors.torch import load_file, save_file

from moeserve import LLM, SamplingParams
from moeserve.errors import CheckpointError
from moeserve.models.dense import DenseFolder

PROMPT = [5, 6, 7, 11]
Tensors = dict[str, torch.Tensor]


def changed_copy(reference: Reference, folder: Path, change: Callable[[Tensors], Tensors], **config: Any) -> Path:
    """Copy a checkpoint, with its tensors changed by a function, and with other values in its config."""
    folder.mkdir()
    for path in reference.folder.glob("*.json"):
        shutil.copyfile(path, folder / path.name)
    tensors = change(load_file(reference.folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, **config)
    return folder


def edit(folder: Path, **config: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def assert_serves(folder: Path, reference: Reference, **settings: Any) -> None:
    with LLM(str(folder), **settings) as llm:
        (result,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert result.outputs[0].token_ids == reference.greedy(PROMPT, 8)


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


# --- heads


def test_a_stored_head_that_differs_is_used_whatever_the_config_says(
    plain: Reference, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = changed_copy(plain, tmp_path / "tied", unchanged, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        assert_serves(folder, plain)
    (message,) = [each for each in caplog.messages if "output head" in each]
    assert f"{folder / 'config.json'} says that the output head is the embedding" in message


@pytest.mark.parametrize("outer", [None, False, True])
def test_the_outer_flag_does_not_replace_that_of_the_text_model(
    reference_named: Callable[[str], Reference], tmp_path: Path, outer: bool | None
) -> None:
    reference = reference_named("mistral4")
    assert not reference.model.config.get_text_config().tie_word_embeddings
    folder = changed_copy(reference, tmp_path / "outer", unchanged)
    config = json.loads((folder / "config.json").read_text())
    inner = config.get("text_config", config) | {"tie_word_embeddings": False}
    edit(folder, text_config=inner, tie_word_embeddings=outer)
    assert_serves(folder, reference)


def test_a_head_that_is_not_stored_is_the_embedding_if_either_flag_says_so(
    reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = reference_named("mixtral-odd")
    folder = changed_copy(reference, tmp_path / "inner", unchanged)
    config = json.loads((folder / "config.json").read_text())
    edit(folder, text_config=config | {"tie_word_embeddings": False}, tie_word_embeddings=True)
    assert_serves(folder, reference)


def test_a_stored_head_that_is_the_embedding_takes_no_memory(
    reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = reference_named("mixtral-odd")
    with_head = changed_copy(
        reference,
        tmp_path / "head",
        lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
    )
    assert_serves(with_head, reference)


def test_a_dense_model_is_upcycled_with_its_stored_head(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).save_pretrained(tmp_path)
    edit(tmp_path, tie_word_embeddings=True)
    assert not DenseFolder(tmp_path).config.tie_word_embeddings
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    assert DenseFolder(tmp_path).config.tie_word_embeddings


# --- tensors without use

QUERY_BIAS = "model.layers.0.self_attn.q_proj.bias"
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


def frequencies_of(reference: Reference) -> torch.Tensor:
    """Return the frequencies of the rotary embedding, computed here from theta: [F] float32, radians per position."""
    config = reference.model.config
    theta, size = config.rope_parameters["rope_theta"], config.hidden_size // config.num_attention_heads
    return torch.tensor([theta ** (-2 * pair / size) for pair in range(size // 2)])


HARMLESS: dict[str, Callable[[Reference], Tensors]] = {
    "zero biases": lambda reference: {QUERY_BIAS: torch.zeros(64), "lm_head.bias": torch.zeros(3)},
    "frequencies": lambda reference: {FREQUENCIES: frequencies_of(reference)},
    "frequencies in bfloat16": lambda reference: {"model.rotary_emb.inv_freq": frequencies_of(reference).bfloat16()},
    "scales of the KV cache": lambda reference: {
        f"model.layers.0.self_attn.{name}": torch.tensor([0.1])
        for name in ("kv_scale", "k_scale", "attn.v_scale", "k_proj.output_scale")
    },
    "nothing": lambda reference: {"model.layers.0.mlp.shared_experts.up_proj.weight": torch.zeros(0, 64)},
    "value head": lambda reference: {
        "v_head.summary.weight": torch.ones(1, 64),
        "v_head.summary.bias": torch.ones(1),
    },
}
HARMFUL: dict[str, Callable[[Reference], Tensors]] = {
    "biases": lambda reference: {QUERY_BIAS: torch.tensor([0.0, 0.5])},
    "other frequencies": lambda reference: {FREQUENCIES: frequencies_of(reference) * 0.5},
    "head of several classes": lambda reference: {"v_head.summary.weight": torch.ones(2, 64)},
    "unknown": lambda reference: {"model.layers.0.self_attn.new_proj.weight": torch.zeros(2, 2)},
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_tensors_that_cannot_change_the_output_are_accepted(kind: str, plain: Reference, tmp_path: Path) -> None:
    more = HARMLESS[kind](plain)
    assert_serves(changed_copy(plain, tmp_path / "more", lambda tensors: tensors | more), plain)


@pytest.mark.parametrize("kind", HARMFUL)
def test_tensors_that_could_change_the_output_are_named(kind: str, plain: Reference, tmp_path: Path) -> None:
    more = HARMFUL[kind](plain)
    folder = changed_copy(plain, tmp_path / "more", lambda tensors: tensors | more)
    with pytest.raises(CheckpointError, match=f"does not account for: {next(iter(more))}") as raised:
        LLM(str(folder))
    assert "fetch" not in str(raised.value)
    assert_serves(folder, plain, ignore_unused_weights=True)


def test_a_missing_tensor_is_named_beside_what_is_there_instead(plain: Reference, tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> Tensors:
        return {name.replace("model.norm.", "model.final."): tensor for name, tensor in tensors.items()}

    folder = changed_copy(plain, tmp_path / "renamed", rename)
    with pytest.raises(CheckpointError, match=r"lacks 1 .*: model\.norm\.weight; it holds 1 others: model\.final") as e:
        LLM(str(folder))
    assert "fetch" not in str(e.value)


# --- shards


def split(folder: Path, num_shards: int = 3) -> None:
    """Divide the tensors of a checkpoint among numbered shards, without an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for number in range(num_shards):
        own = {name: tensors[name] for name in names[number::num_shards]}
        save_file(own, folder / f"model-{number + 1:05}-of-{num_shards:05}.safetensors", {"format": "pt"})


def test_shards_need_no_index(plain: Reference, tmp_path: Path) -> None:
    folder = changed_copy(plain, tmp_path / "shards", unchanged)
    split(folder)
    assert_serves(folder, plain)


def test_a_missing_shard_is_named(plain: Reference, tmp_path: Path) -> None:
    folder = changed_copy(plain, tmp_path / "shards", unchanged)
    split(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds 2 of 3 shards; fetch number 2"):
        LLM(str(folder))


def test_a_shard_that_an_index_names_must_be_there(plain: Reference, tmp_path: Path) -> None:
    folder = changed_copy(plain, tmp_path / "shards", unchanged)
    names = sorted(load_file(folder / "model.safetensors"))
    split(folder)
    shards = [f"model-{number + 1:05}-of-00003.safetensors" for number in range(3)]
    index = {"weight_map": {name: shards[place % 3] for place, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is missing"):
        LLM(str(folder))


def test_shards_of_two_checkpoints_are_refused(plain: Reference, tmp_path: Path) -> None:
    folder = changed_copy(plain, tmp_path / "shards", unchanged)
    split(folder)
    shutil.copyfile(folder / "model-00001-of-00003.safetensors", folder / "old-00001-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"old-00001-of-00003\.safetensors and other shards hold the same"):
        LLM(str(folder))


def test_a_whole_file_is_used_beside_an_index_of_shards_that_are_gone(
    plain: Reference, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = changed_copy(plain, tmp_path / "stale", unchanged)
    index = {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_serves(folder, plain)
    assert any("names shards that are not there" in each for each in caplog.messages)


def test_rows_of_embedding_and_head_beyond_the_vocabulary_are_not_used(tmp_path: Path) -> None:
    shape = SHAPES["inkling"]
    shape = dataclasses.replace(shape, settings=shape.settings | dict(unpadded_vocab_size=90))
    reference = make_reference(tmp_path, shape)
    assert_serves(tmp_path, reference, dtype="float32")


# --- forms that transformers saves


OWN_FORMS = [
    "aria",
    "cohere2-moe",
    "afmoe",
    "axk1",
    "axk2",
    "beam",
    "dbrx",
    "deepseek-ocr2",
    "exaone-moe",
    "flint",
    "granite-swa",
    "mellum",
    "mixtral",
    "solar-open",
    "deepseek-v2",
    "deepseek-v3",
    "deepseek-v32",
    "deepseek-v4",
    "deepseek-v4-odd",
    "dots1",
    "dots3-note",
    "dots3-note-images",
    "ernie",
    "ernie-vl",
    "ernie-vl-odd",
    "flex-olmo",
    "gemma4",
    "glm4-moe",
    "glm4-moe-lite",
    "glm5",
    "glm5-next",
    "gpt-oss",
    "granite",
    "granite-hybrid",
    "granite-shared",
    "hunyuan",
    "hy-v3",
    "hy-v4",
    "inkling",
    "inkling2",
    "inkling2-odd",
    "jamba",
    "jetmoe",
    "kimi-k25",
    "kimi-linear",
    "kolibri1",
    "laguna",
    "lfm2-moe",
    "ling3",
    "llama4",
    "mimo-v2-flash",
    "minimax",
    "minimax-m2",
    "minimax-m3",
    "mistral-large4",
    "mistral-large4-shared",
    "mistral4-images",
    "muse-spark",
    "nemotron-h",
    "nemotron-h-latent",
    "olmoe",
    "phimoe",
    "qwen2-moe",
    "qwen3-moe",
    "qwen3-next",
    "qwen3.5-moe",
    "qwen4-exp",
    "step3p7",
    "zaya",
]


@pytest.mark.slow_but("mixtral", "deepseek-v3", "qwen3", "gpt-oss")
@pytest.mark.parametrize("name", OWN_FORMS)
def test_the_form_of_transformers_is_read(
    name: str, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Experts are stacked, and some families have other names than where they were published."""
    reference = reference_named(name)
    reference.model.save_pretrained(tmp_path, save_original_format=False)
    assert_serves(tmp_path, reference, dtype="float32")


@pytest.mark.parametrize("name", ["kimi-linear", "kimi-linear-odd", "kimi-k25"])
def test_what_transformers_saves_by_default_is_read(
    name: str, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    """The references of all other families are saved so; these have the names of published checkpoints."""
    reference = reference_named(name)
    reference.model.save_pretrained(tmp_path)
    assert_serves(tmp_path, reference, dtype="float32")


def test_axk1_as_it_is_published(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    """A norm of the dense network is stored that is not used, and no correction of routers."""
    model = copy.deepcopy(reference_named("axk1").model)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("e_score_correction_bias")}
    tensors["model.layers.0.mlp.post_mlp_layernorm.weight"] = torch.ones(model.config.hidden_size)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_serves(tmp_path, Reference(tmp_path, model), dtype="float32")


# --- a text model without the models beside it


def test_the_text_model_alone_has_a_name_of_its_own(
    reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = reference_named("qwen3.5-moe")

    def text_alone(tensors: Tensors) -> Tensors:
        prefix = "model.language_model."
        own = {name.replace(prefix, "model."): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        return own | {name: tensor for name, tensor in tensors.items() if name == "lm_head.weight"}

    folder = changed_copy(reference, tmp_path / "text", text_alone)
    config = json.loads((folder / "config.json").read_text())["text_config"]
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3_5MoeForCausalLM"]}))
    assert_serves(folder, reference)
