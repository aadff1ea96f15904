"""Language models inside of models for images and sound, of which only the language model is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from reference_models import DEFAULTS, SHAPES, Reference, fill_what_transformers_leaves_plain, rope
from safetensors.torch import load_file, save_file

from moeserve import LLM, CheckpointError, SamplingParams
from moeserve.models.checkpoint.names import translated
from moeserve.models.checkpoint.shards import open_checkpoint
from moeserve.models.model_config import ModelSpec
from moeserve.models.registry import describe

NUM_TOKENS = 12
CLIP: dict[str, Any] = dict(
    model_type="clip_vision_model",
    num_hidden_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    intermediate_size=16,
    image_size=16,
    patch_size=8,
)
VISION: dict[str, Any] = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16)
AUDIO: dict[str, Any] = dict(
    d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, num_mel_bins=16
)
TEXT: dict[str, Any] = DEFAULTS | dict(
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=20,
    num_experts_per_tok=2,
    initializer_range=0.2,
)


def shapes_of_families() -> list[str]:
    """Return the first shape of each family that is a language model alone."""
    seen: dict[str, str] = {}
    for shape_name, shape in SHAPES.items():
        if shape.beside_text is None:
            seen.setdefault(shape.family, shape_name)
    # The outer model has no bias of the head (Phi, Zaya). transformers has no names for DeepSeek-V4 inside of a model.
    # The names inside of Inkling's own outer models are those of shapes of theirs.
    left_out = "phimoe", "zaya", "deepseek-v4", "inkling", "inkling2"
    return [each for each in seen.values() if each not in left_out]


def read(folder: Path) -> tuple[ModelSpec, set[str]]:
    """Return a model's shape and the names of its tensors."""
    description = describe(folder)
    checkpoint = open_checkpoint(folder, description.weight_format)
    return description.model, set(translated(checkpoint, description.family, len(description.model.layers)).names)


@pytest.mark.parametrize("name", shapes_of_families())
def test_every_family_is_read_inside_of_a_model_for_images(name: str, tmp_path: Path) -> None:
    """transformers saves the model alone, and inside of LLaVA, whose text part may be any model."""
    shape = SHAPES[name]
    shape.model().save_pretrained(tmp_path / "alone")
    config = shape.config()
    outer = transformers.LlavaConfig(
        text_config=config.to_dict(), vision_config=CLIP, tie_word_embeddings=config.tie_word_embeddings
    )
    transformers.LlavaForConditionalGeneration(outer).save_pretrained(tmp_path / "inside")
    assert read(tmp_path / "inside") == read(tmp_path / "alone")


def llava() -> Any:
    config = transformers.LlavaConfig(
        text_config=SHAPES["qwen3-moe"].config().to_dict(), vision_config=CLIP, tie_word_embeddings=False
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen3_vl() -> Any:
    vision = VISION | dict(out_hidden_size=32, deepstack_visual_indexes=[0])
    config = transformers.Qwen3VLMoeConfig(text_config=TEXT | dict(num_experts=6), vision_config=vision)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def qwen3_omni() -> Any:
    config = transformers.Qwen3OmniMoeThinkerConfig(
        text_config=TEXT | dict(num_experts=6, norm_topk_prob=True),
        vision_config=VISION | dict(out_hidden_size=32, deepstack_visual_indexes=[0]),
        audio_config=AUDIO | dict(output_dim=32, downsample_hidden_size=16),
    )
    config.vision_start_token_id = 100  # transformers reads it, but has no default
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config)


def glm4v() -> Any:
    text = TEXT | dict(n_routed_experts=6, n_group=1, topk_group=1, first_k_dense_replace=1)
    text |= rope(partial_rotary_factor=0.5, mrope_section=[1, 1, 2])
    config = transformers.Glm4vMoeConfig(text_config=text, vision_config=VISION | dict(out_hidden_size=32))
    return transformers.Glm4vMoeForConditionalGeneration(config)


def saved(make: Callable[[], Any], folder: Path) -> Reference:
    torch.manual_seed(3)
    model = make().eval()
    fill_what_transformers_leaves_plain(model)
    for each in (model.config, model.config.get_text_config()):
        each._experts_implementation = each._attn_implementation = "eager"
    model.save_pretrained(folder)
    return Reference(folder, model)


def assert_same_tokens(reference: Reference) -> None:
    prompts = reference.prompts(5, 17, 40)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(reference.folder, dtype="float32", kv_cache_memory="8MiB") as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert found == reference.continuations(prompts, NUM_TOKENS)


@pytest.mark.parametrize("make", [llava, qwen3_vl, qwen3_omni, glm4v])
def test_tokens_of_text_are_those_of_transformers(make: Callable[[], Any], tmp_path: Path) -> None:
    assert_same_tokens(saved(make, tmp_path))


def test_published_experts_of_qwen3_vl_are_transposed(tmp_path: Path) -> None:
    reference = saved(qwen3_vl, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()}
    save_file(turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_tokens(reference)


def test_a_thinker_inside_of_qwen3_omni(tmp_path: Path) -> None:
    """The published checkpoint also has a model for speech, and the config of the text inside of two others."""
    reference = saved(qwen3_omni, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    beside = {f"{name}.weight": torch.ones(2, 2) for name in ("talker.codec_head", "code2wav.conv")}
    save_file(tensors | beside, tmp_path / "model.safetensors", metadata={"format": "pt"})
    thinker = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": thinker, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert_same_tokens(reference)


def test_a_dense_language_model_is_refused_by_the_name_of_its_class(tmp_path: Path) -> None:
    transformers.LlavaConfig(architectures=["LlavaForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="LlavaForConditionalGeneration"):
        describe(tmp_path)
