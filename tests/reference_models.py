"""Tiny random checkpoints of every family, and their results in transformers in float32.

Most of the file is the table of shapes, which tests of all folders name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.overrides import TorchFunctionMode

import moeserve

# Disturbances that must not change a reference's tokens: see Reference.is_clear.
SMALLEST_GAP = 4e-3  # between the two largest logits; float32 results differ by less than 1e-4
ROUTER_NOISE = 3e-5  # relative to each value that a router sees; float32 results differ by about 1e-6

# Chunked forms of recurrences differ by up to 1e-3 from the recurrences themselves, which are in the same modules.
EXACT_FORMS = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}

DEFAULTS: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    max_position_embeddings=512,
    initializer_range=0.25,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


def import_transformers() -> Any:
    """Return the package, whose import takes seconds: many tests read only the table of shapes."""
    return importlib.import_module("transformers")


@dataclass(frozen=True)
class Shape:
    """One configuration of a family, and the seed of its weights."""

    family: str  # transformers' name of the configuration, without Config
    settings: dict[str, Any]
    seed: int = 0
    beside_text: dict[str, Any] | None = None  # settings beside those of the text part; None: there is only text

    @property
    def architecture(self) -> str:
        end = "ForCausalLM" if self.beside_text is None else "ForConditionalGeneration"
        return self.family.removesuffix("Text") + end

    def config(self) -> Any:
        settings = DEFAULTS | self.settings
        if self.beside_text is not None:
            settings = dict(text_config=settings, **self.beside_text)
        config = getattr(import_transformers(), f"{self.family}Config")(**settings)
        config.architectures = [self.architecture]
        return config

    def model(self) -> Any:
        model_class = getattr(import_transformers(), self.architecture)
        modeling = sys.modules[model_class.__module__]
        for chunked, exact in EXACT_FORMS.items():
            if hasattr(modeling, chunked):
                setattr(modeling, chunked, getattr(modeling, exact))
        return model_class(self.config())


def shape(
    family: str,
    *parts: dict[str, Any],
    seed: int = 0,
    beside_text: dict[str, Any] | None = None,
    **settings: Any,
) -> Shape:
    """Return a shape with the settings of all parts."""
    merged: dict[str, Any] = {}
    for part in (*parts, settings):
        assert not merged.keys() & part.keys(), (family, merged.keys() & part.keys())
        merged |= part
    return Shape(family, merged, seed, beside_text)


def sizes(hidden: int = 32, layers: int = 2, vocab: int = 101) -> dict[str, Any]:
    return dict(hidden_size=hidden, num_hidden_layers=layers, vocab_size=vocab)


def heads(num: int, kv: int, dim: int | None = None) -> dict[str, Any]:
    """Grouped-query attention."""
    return dict(num_attention_heads=num, num_key_value_heads=kv) | ({} if dim is None else dict(head_dim=dim))


def latent(num: int, *, query: int | None, kv: int, key: int, rotary: int, value: int) -> dict[str, Any]:
    """Multi-head latent attention: ranks of queries and of keys and values, and values of a head."""
    return heads(num, num) | dict(
        q_lora_rank=query, kv_lora_rank=kv, qk_nope_head_dim=key, qk_rope_head_dim=rotary, v_head_dim=value
    )


def grouped_experts(
    num: int,
    top_k: int,
    *,
    shared: int,
    width: int,
    dense: int | None = None,
    groups: tuple[int, int],
    scale: float,
) -> dict[str, Any]:
    """Experts of DeepSeek and GLM: the first `dense` layers have none; a token uses some groups of all groups."""
    return ({} if dense is None else dict(first_k_dense_replace=dense)) | dict(
        n_routed_experts=num,
        num_experts_per_tok=top_k,
        n_shared_experts=shared,
        moe_intermediate_size=width,
        n_group=groups[0],
        topk_group=groups[1],
        routed_scaling_factor=scale,
    )


def experts(num: int, top_k: int, width: int | None = None, key: str = "num_experts") -> dict[str, Any]:
    return {key: num, "num_experts_per_tok": top_k} | ({} if width is None else dict(moe_intermediate_size=width))


def local_experts(num: int, top_k: int) -> dict[str, Any]:
    return experts(num, top_k, key="num_local_experts")


def rope(rope_type: str = "default", rope_theta: float = 10000.0, **settings: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type=rope_type, rope_theta=rope_theta, **settings))


def yarn(rope_theta: float = 10000.0, **settings: Any) -> dict[str, Any]:
    """YaRN over a context of 32. Small thetas put some of the few frequencies between its two ends."""
    return rope("yarn", rope_theta, original_max_position_embeddings=32, **settings)


def step(*parts: dict[str, Any], seed: int, **settings: Any) -> Shape:
    """Return a shape of Step-3.7, whose layers with windows rotate whole heads."""
    rotary = {
        "full_attention": dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5),
        "sliding_attention": dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0),
    }
    vision = dict(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16)
    beside = dict(vision_config=vision, tie_word_embeddings=False)
    return shape(
        "Step3p7",
        *parts,
        seed=seed,
        beside_text=beside,
        rope_parameters=rotary,
        num_nextn_predict_layers=0,
        pad_token_id=1,
        **settings,
    )


def laguna(*parts: dict[str, Any], **settings: Any) -> Shape:
    """Return a shape of Laguna, whose layers with windows rotate whole heads."""
    rotary = {
        FULL: dict(rope_type="default", rope_theta=5e5, partial_rotary_factor=0.5),
        SLIDING: dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0),
    }
    return shape("Laguna", *parts, rope_parameters=rotary, **settings)


ARIA_IMAGES: dict[str, Any] = dict(
    vision_config=dict(
        model_type="idefics3_vision",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    ),
    projector_patch_to_query_dict={4: 2},
    initializer_range=0.25,  # of the output head
)


def ocr_images(**encoder: Any) -> dict[str, Any]:
    """A model for images of DeepSeek-OCR 2 or Unlimited OCR. The last convolution has as many outputs as `encoder`."""
    of_pixels = dict(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, image_size=32, patch_size=8)
    sam = of_pixels | dict(output_channels=16, mlp_dim=16, global_attn_indexes=[0], downsample_channels=[16, 16])
    of_patches = dict(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16) | encoder
    return dict(vision_config=dict(sam_config=sam, encoder_config=of_patches), initializer_range=0.25)


def ernie_experts(num: int, top_k: int, *, shared: int, width: int | list[int]) -> dict[str, Any]:
    return dict(moe_num_experts=num, moe_k=top_k, moe_num_shared_experts=shared, moe_intermediate_size=width)


def ernie_vl(*parts: dict[str, Any], theta: float, sections: list[int], **settings: Any) -> Shape:
    """Return a shape of ERNIE-4.5-VL. Sections are the frequencies for height, width and time."""
    is_tied = settings.get("tie_word_embeddings", True)
    vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16)
    beside = dict(vision_config=vision, tie_word_embeddings=is_tied, initializer_range=0.25)
    rotary = rope(rope_theta=theta, mrope_section=sections)
    return shape("Ernie4_5_VLMoe", *parts, rotary, beside_text=beside, **settings)


def minimax_m3(*parts: dict[str, Any], blocks: tuple[int, int, int, int, int], **settings: Any) -> Shape:
    """Return a shape of MiniMax-M3.

    Args:
        blocks: heads and size of the indexer, positions in a block, chosen blocks, and local ones.
    """
    names = ("n_heads", "head_dim", "block_size", "topk_blocks", "local_blocks")
    indexer = {f"index_{name}": value for name, value in zip(names, blocks, strict=True)}
    return shape("MiniMaxM3VLText", *parts, indexer, **settings)


def gemma_experts(num: int, top_k: int, width: int) -> dict[str, Any]:
    return dict(
        enable_moe_block=True,
        num_experts=num,
        top_k_experts=top_k,
        moe_intermediate_size=width,
        hidden_size_per_layer_input=0,
        tie_word_embeddings=True,
    )


# A model for images that is as small as can be, and untied embeddings
SMALL_VISION: dict[str, Any] = dict(
    vision_config=dict(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16),
    tie_word_embeddings=False,
)


def mamba_heads(num: int, dim: int, *, groups: int, state: int) -> dict[str, Any]:
    """Mamba-2 of Nemotron-H, without a smallest step size: transformers applies it to the tokens of prompts alone."""
    sizes_of_heads = dict(mamba_num_heads=num, mamba_head_dim=dim, n_groups=groups, ssm_state_size=state)
    return sizes_of_heads | dict(chunk_size=16, time_step_min=1e-30)


def mistral_large4(*parts: dict[str, Any], **settings: Any) -> Shape:
    """Mistral Large 4, beside a model for images."""
    of_images = dict(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, head_dim=8, intermediate_size=16)
    vision = dict(model_type="pixtral", patch_size=4, image_size=16, **of_images)
    beside = dict(vision_config=vision, tie_word_embeddings=False)
    return shape("MistralLarge4", *parts, initializer_range=0.2, beside_text=beside, **settings)


GRANITE_MULTIPLIERS: dict[str, Any] = dict(
    embedding_multiplier=0.5, residual_multiplier=0.45, attention_multiplier=0.2, logits_scaling=2.0
)
FULL, SLIDING, LINEAR, INDEXED = "full_attention", "sliding_attention", "linear_attention", "indexed_attention"
SPARSE = "minimax_m3_sparse"
DEEPSEEK_YARN: dict[str, Any] = dict(factor=40, beta_fast=32, beta_slow=1)

SHAPES = {
    "mixtral": shape("Mixtral", local_experts(4, 2), heads(4, 2), seed=5),
    # 5 experts top-3, 6 heads with 2 key-value heads, tied embeddings, heads of 20 values where 48 / 6 would be 8
    "mixtral-odd": shape(
        "Mixtral",
        sizes(hidden=48, vocab=131),
        local_experts(5, 3),
        heads(6, 2, 20),
        intermediate_size=37,
        tie_word_embeddings=True,
        seed=5,
    ),
    "mixtral-window": shape(
        "Mixtral",
        sizes(hidden=36, layers=3),
        local_experts(3, 1),
        heads(3, 3),
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
        sliding_window=11,
        seed=13,
    ),
    # V2-Lite: queries are not compressed; experts are chosen from all groups
    "deepseek-v2-lite": shape(
        "DeepseekV2",
        sizes(hidden=36, layers=3),
        latent(3, query=None, kv=20, key=10, rotary=6, value=14),
        grouped_experts(8, 3, shared=2, width=13, dense=1, groups=(2, 1), scale=1.0),
        yarn(mscale=0.707, mscale_all_dim=0.707, **DEEPSEEK_YARN),
        topk_method="greedy",
        max_position_embeddings=1280,
        initializer_range=0.2,
        seed=3,
    ),
    # V2: compressed queries, experts of the best 2 of 3 groups, and cosines and sines that are scaled as well
    "deepseek-v2": shape(
        "DeepseekV2",
        sizes(hidden=40),
        latent(5, query=18, kv=24, key=12, rotary=8, value=9),
        grouped_experts(12, 4, shared=1, width=17, dense=0, groups=(3, 2), scale=2.5),
        yarn(200.0, mscale=1.0, mscale_all_dim=0.707, **DEEPSEEK_YARN),
        topk_method="group_limited_greedy",
        max_position_embeddings=1280,
        seed=5,
    ),
    # V3 and R1: experts of the best 2 of 4 groups, 3 dense layers in front
    "deepseek-v3": shape(
        "DeepseekV3",
        sizes(hidden=40, layers=4),
        latent(5, query=18, kv=28, key=12, rotary=8, value=10),
        grouped_experts(12, 5, shared=1, width=19, dense=3, groups=(4, 2), scale=2.5),
        yarn(100.0, mscale=1.0, mscale_all_dim=1.0, **DEEPSEEK_YARN),
        norm_topk_prob=True,
        max_position_embeddings=1280,
        initializer_range=0.2,
        seed=1,
    ),
    # Kimi and Moonlight: one group, queries that are not compressed, and a ramp of rotary frequencies without a width
    "kimi": shape(
        "DeepseekV3",
        sizes(hidden=36, layers=3),
        latent(3, query=None, kv=21, key=9, rotary=6, value=11),
        grouped_experts(12, 5, shared=1, width=15, dense=1, groups=(1, 1), scale=2.827),
        yarn(50.0, factor=32.0, mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0, beta_slow=1.0),
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=0.2,
        seed=8,
    ),
    # half-split rotary embedding, biases, weights that do not sum to one
    "deepseek-v3-odd": shape(
        "DeepseekV3",
        sizes(hidden=33, vocab=127),
        latent(4, query=16, kv=19, key=8, rotary=10, value=13),
        grouped_experts(6, 2, shared=2, width=18, dense=0, groups=(2, 1), scale=1.5),
        rope(rope_theta=500.0),
        norm_topk_prob=False,
        rope_interleave=False,
        attention_bias=True,
        rms_norm_eps=0.01,
        tie_word_embeddings=True,
    ),
    # two attentions and two dense networks in each layer, experts on a shortcut, and zero experts
    "longcat-flash": shape(
        "LongcatFlash",
        latent(4, query=18, kv=28, key=12, rotary=8, value=10),
        rope(rope_theta=100.0),
        hidden_size=40,
        vocab_size=101,
        num_hidden_layers=4,
        head_dim=8,
        ffn_hidden_size=33,
        expert_ffn_hidden_size=19,
        n_routed_experts=6,
        zero_expert_num=3,
        moe_topk=3,
        routed_scaling_factor=2.5,
        max_position_embeddings=1280,
        initializer_range=0.2,
        seed=3,
    ),
    # one layer, heads and widths that do not divide, no zero experts, YaRN
    "longcat-flash-odd": shape(
        "LongcatFlash",
        latent(3, query=15, kv=19, key=9, rotary=6, value=13),
        yarn(50.0, factor=32.0, mscale=1.0, mscale_all_dim=1.0),
        hidden_size=33,
        vocab_size=127,
        num_hidden_layers=2,
        head_dim=6,
        ffn_hidden_size=27,
        expert_ffn_hidden_size=14,
        n_routed_experts=7,
        zero_expert_num=0,
        moe_topk=2,
        routed_scaling_factor=1.5,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=True,
        seed=5,
    ),
    "qwen2-moe": shape(
        "Qwen2Moe",
        sizes(layers=3),
        heads(4, 2),
        experts(6, 2, 21),
        rope(rope_theta=1e6),
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
        norm_topk_prob=False,
        qkv_bias=True,
        seed=8,
    ),
    # every second layer has experts, and the second and third a window
    "qwen2-moe-window": shape(
        "Qwen2Moe",
        sizes(hidden=36, layers=4, vocab=131),
        heads(6, 3),
        experts(7, 3, 18),
        rope(),
        shared_expert_intermediate_size=27,
        decoder_sparse_step=2,
        norm_topk_prob=True,
        qkv_bias=True,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=[FULL, SLIDING, SLIDING, FULL],
        tie_word_embeddings=True,
    ),
    # two layers with states of three; key heads of 10, value heads of 6
    "qwen3-next": shape(
        "Qwen3Next",
        sizes(hidden=40, layers=3),
        heads(4, 2, 16),
        experts(9, 4, 17),
        rope(),
        shared_expert_intermediate_size=27,
        layer_types=["linear_attention", FULL, "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=10,
        linear_value_head_dim=6,
        linear_conv_kernel_dim=4,
        initializer_range=0.2,
        seed=2,
    ),
    # its projections are joined otherwise than those of Qwen3-Next; a model for images beside it
    "qwen3.5-moe": shape(
        "Qwen3_5Moe",
        sizes(hidden=36, layers=4, vocab=131),
        heads(6, 2, 16),
        experts(7, 3, 15),
        rope(),
        shared_expert_intermediate_size=21,
        layer_types=["linear_attention", "linear_attention", FULL, "linear_attention"],
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=6,
        linear_value_head_dim=11,
        linear_conv_kernel_dim=3,
        initializer_range=0.15,
        rms_norm_eps=1e-3,  # with less, small outputs of a head are magnified so much that rounding shows
        beside_text=SMALL_VISION,
        seed=1,
    ),
    # short convolutions of three tokens; the first layer is dense
    "lfm2-moe": shape(
        "Lfm2Moe",
        sizes(hidden=40, layers=4),
        heads(4, 2),
        experts(8, 3, 17),
        rope(rope_theta=1e6),
        layer_types=["conv", FULL, "conv", "conv"],
        num_dense_layers=1,
        norm_eps=1e-3,
    ),
    # convolutions of five tokens with biases; the weights of experts are not normalised
    "lfm2-moe-odd": shape(
        "Lfm2Moe",
        sizes(hidden=36, layers=3, vocab=131),
        heads(6, 2),
        experts(5, 2, 22),
        rope(rope_theta=500.0),
        layer_types=["conv", "conv", FULL],
        num_dense_layers=0,
        conv_L_cache=5,
        conv_bias=True,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        tie_word_embeddings=False,
    ),
    # three layers with states of four; queries are not rotated
    "kimi-linear": shape(
        "KimiLinear",
        sizes(hidden=40, layers=4),
        latent(4, query=None, kv=20, key=10, rotary=6, value=9),
        layer_types=["linear_attention", "linear_attention", FULL, "linear_attention"],
        num_experts=9,
        num_experts_per_token=3,
        num_shared_experts=1,
        num_expert_group=3,
        topk_group=2,
        moe_intermediate_size=17,
        routed_scaling_factor=1.5,
        linear_num_heads=2,
        linear_head_dim=12,
        rms_norm_eps=1e-3,
        initializer_range=0.2,
        seed=1,
    ),
    "kimi-linear-odd": shape(
        "KimiLinear",
        sizes(hidden=36, layers=3, vocab=131),
        latent(3, query=None, kv=18, key=9, rotary=8, value=11),
        layer_types=[FULL, "linear_attention", "linear_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"],
        num_experts=7,
        num_experts_per_token=2,
        num_shared_experts=2,
        num_expert_group=1,
        topk_group=1,
        moe_intermediate_size=15,
        linear_num_heads=3,
        linear_head_dim=7,
        linear_conv_kernel_dim=3,
        moe_renormalize=False,
        rms_norm_eps=1e-3,
        initializer_range=0.2,
        seed=2,
    ),
    # decays of at least e^-3; the third layer has attention, whose heads have gates
    "ling3": shape(
        "BailingHybrid",
        sizes(hidden=36, layers=4),
        dict(num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=20),
        # transformers 5.23 saves the former as the latter
        dict(qk_rope_head_dim=12, head_dim=12, qk_nope_head_dim=10, v_head_dim=9),
        rope(rope_theta=1e4),
        layer_types=["linear_attention", "linear_attention", FULL, "linear_attention"],
        first_k_dense_replace=1,
        num_experts=9,
        num_experts_per_token=3,
        num_shared_experts=1,
        num_expert_group=3,
        topk_group=2,
        moe_intermediate_size=17,
        routed_scaling_factor=1.5,
        kda_lower_bound=-3.0,
        num_nextn_predict_layers=0,
        rms_norm_eps=1e-3,
        initializer_range=0.2,
    ),
    "ling3-unbounded": shape(
        "BailingHybrid",
        sizes(hidden=40, layers=3, vocab=131),
        dict(num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=18),
        dict(qk_rope_head_dim=8, head_dim=8, qk_nope_head_dim=9, v_head_dim=11),
        rope(rope_theta=500.0),
        layer_group_size=2,
        first_k_dense_replace=0,
        num_experts=7,
        num_experts_per_token=2,
        num_shared_experts=2,
        num_expert_group=1,
        topk_group=1,
        moe_intermediate_size=15,
        short_conv_kernel_size=3,
        kda_safe_gate=False,
        num_nextn_predict_layers=0,
        moe_renormalize=False,
        rms_norm_eps=1e-3,
        initializer_range=0.2,
    ),
    # states of two groups of three heads; attention without positions
    "granite-hybrid": shape(
        "GraniteMoeHybrid",
        sizes(hidden=36, layers=4),
        heads(4, 2),
        local_experts(6, 3),
        GRANITE_MULTIPLIERS,
        intermediate_size=19,
        shared_intermediate_size=27,
        layer_types=["linear_attention", FULL, "linear_attention", "linear_attention"],
        mamba_n_heads=6,
        mamba_d_head=12,
        mamba_n_groups=2,
        mamba_d_state=10,
        mamba_chunk_size=16,
        seed=7,
    ),
    # Nemotron 3 Nano, with layers of one network in an order of their own.
    "nemotron-h": shape(
        "NemotronH",
        sizes(36, 7),
        heads(6, 2, 10),
        grouped_experts(7, 3, shared=1, width=19, groups=(1, 1), scale=1.7),
        mamba_heads(6, 10, groups=2, state=14),
        layers_block_type=[LINEAR, "moe", LINEAR, FULL, "moe", LINEAR, "moe"],
        moe_shared_expert_intermediate_size=22,
        seed=1,
    ),
    # Nemotron 3 Super: experts of a latent size. Expert groups, a dense network, and a mixer at the end.
    "nemotron-h-latent": shape(
        "NemotronH",
        sizes(33, 6, 97),
        heads(4, 2, 8),
        grouped_experts(8, 3, shared=1, width=26, groups=(4, 2), scale=0.6),
        mamba_heads(4, 9, groups=2, state=6),
        layers_block_type=["moe", LINEAR, "mlp", FULL, "moe", LINEAR],
        moe_latent_size=21,
        moe_shared_expert_intermediate_size=35,
        norm_topk_prob=False,
        use_conv_bias=False,
        seed=3,
    ),
    "granite-hybrid-rope": shape(
        "GraniteMoeHybrid",
        sizes(hidden=40, layers=3, vocab=127),
        heads(4, 2),
        local_experts(5, 2),
        rope(rope_theta=500.0),
        GRANITE_MULTIPLIERS,
        intermediate_size=22,
        shared_intermediate_size=15,
        layer_types=["linear_attention", "linear_attention", FULL],
        position_embedding_type="rope",
        mamba_n_heads=5,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=7,
        mamba_chunk_size=16,
        mamba_d_conv=3,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
    ),
    # Mamba-1 or attention, each with a dense network or experts
    "jamba": shape(
        "Jamba",
        sizes(hidden=36, layers=5),
        heads(6, 2),
        experts(5, 2),
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=11,
        rms_norm_eps=1e-3,
    ),
    # one layer, a state wider than a vector, and 99 channels
    "jamba-odd": shape(
        "Jamba",
        sizes(hidden=33, layers=1, vocab=127),
        heads(3, 1),
        experts(7, 3),
        expert_layer_period=1,
        expert_layer_offset=0,
        intermediate_size=19,
        mamba_d_state=19,
        mamba_d_conv=2,
        mamba_expand=3,
        mamba_dt_rank=7,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
        use_cache=False,  # transformers' cache needs an attention layer
    ),
    "qwen3-moe": shape(
        "Qwen3Moe",
        sizes(hidden=40, layers=3),
        heads(6, 2, 10),
        experts(9, 4, 17),
        yarn(500.0, factor=16.0),
        mlp_only_layers=[1],
        norm_topk_prob=True,
        attention_bias=False,
    ),
    "qwen3-moe-window": shape(
        "Qwen3Moe",
        sizes(hidden=36, vocab=127),
        heads(3, 1, 16),
        experts(5, 2, 22),
        rope(),
        rms_norm_eps=0.01,
        norm_topk_prob=False,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=9,
        tie_word_embeddings=True,
    ),
    # queries, keys and values beyond 0.8 are clipped
    "olmoe": shape(
        "Olmoe",
        heads(4, 2),
        experts(7, 3),
        rope(),
        intermediate_size=19,
        norm_topk_prob=False,
        clip_qkv=0.8,
        seed=6,
    ),
    "olmoe-odd": shape(
        "Olmoe",
        sizes(hidden=30, layers=3, vocab=131),
        heads(3, 3),
        experts(5, 2),
        rope(rope_theta=500.0),
        rms_norm_eps=0.01,
        intermediate_size=26,
        norm_topk_prob=True,
        attention_bias=True,
        tie_word_embeddings=True,
        seed=1,
    ),
    "flex-olmo": shape("FlexOlmo", heads(4, 2), experts(7, 3), rope(), intermediate_size=19, rms_norm_eps=1e-3, seed=6),
    "flex-olmo-odd": shape(
        "FlexOlmo",
        sizes(hidden=30, layers=3, vocab=131),
        heads(3, 3),
        experts(5, 2),
        rope(rope_theta=500.0),
        intermediate_size=26,
        norm_topk_prob=True,
        attention_bias=True,
        tie_word_embeddings=True,
        seed=1,
    ),
    "kolibri1": shape(
        "Kolibri1",
        sizes(hidden=40, layers=3),
        heads(6, 2, 10),
        experts(9, 4, 17),
        rope(rope_theta=500.0),
        layer_types=[SLIDING, FULL, SLIDING],
        sliding_window=9,
        shared_expert_intermediate_size=23,
        seed=1,
    ),
    "kolibri1-odd": shape(
        "Kolibri1",
        sizes(hidden=33, vocab=127),
        heads(3, 1, 12),
        experts(7, 2, 14),
        rope(),
        layer_types=[FULL, SLIDING],
        sliding_window=5,
        shared_expert_intermediate_size=11,
        norm_topk_prob=True,
        rms_norm_eps=0.01,
        tie_word_embeddings=True,
        seed=2,
    ),
    "laguna": laguna(
        sizes(hidden=40, layers=4),
        heads(6, 2, 12),
        experts(9, 4, 17),
        num_attention_heads_per_layer=[6, 4, 4, 6],
        layer_types=[FULL, SLIDING, SLIDING, FULL],
        sliding_window=9,
        shared_expert_intermediate_size=23,
        moe_routed_scaling_factor=2.5,
        seed=1,
    ),
    # gates of values, without windows
    "laguna-odd": laguna(
        sizes(hidden=33, vocab=127),
        heads(3, 1, 12),
        experts(7, 2, 14),
        gating="per-element",
        mlp_layer_types=["sparse", "sparse"],
        shared_expert_intermediate_size=11,
        rms_norm_eps=0.01,
        tie_word_embeddings=True,
        seed=2,
    ),
    "beam": shape(
        "Beam",
        sizes(hidden=40, layers=4),
        heads(6, 2, 12),
        experts(12, 5, 17),
        n_group=4,
        topk_group=2,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        sliding_window=9,
        rms_norm_eps=0.01,
        final_logit_softcapping=4.0,
        seed=3,
    ),
    # biases, layers with windows that are not rotated and others that are, weights that do not sum to one, no cap
    "beam-odd": shape(
        "Beam",
        sizes(hidden=33, layers=3, vocab=127),
        heads(3, 1, 14),
        experts(6, 2, 19),
        n_group=1,
        topk_group=1,
        layer_types=[FULL, SLIDING, FULL],
        mlp_layer_types=["sparse"] * 3,
        rope_parameters={SLIDING: None, FULL: dict(rope_type="default", rope_theta=500.0)},
        sliding_window=7,
        attention_bias=True,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        final_logit_softcapping=None,
        tie_word_embeddings=True,
        seed=1,
    ),
    "aria": shape(
        "Aria",
        sizes(hidden=40),
        heads(4, 2),
        rope(rope_theta=500.0),
        intermediate_size=17,
        moe_num_experts=6,
        moe_topk=3,
        beside_text=ARIA_IMAGES,
        seed=7,
    ),
    "aria-odd": shape(
        "Aria",
        sizes(hidden=30, layers=3, vocab=131),
        heads(3, 3, 12),
        rope(),
        intermediate_size=15,  # gates and ups together are as wide as hidden states
        moe_num_experts=7,
        moe_topk=2,
        moe_num_shared_experts=1,
        attention_bias=True,
        rms_norm_eps=0.01,
        beside_text=ARIA_IMAGES,
        seed=2,
    ),
    "deepseek-ocr2": shape(
        "DeepseekOcr2",
        sizes(hidden=40, layers=3),
        heads(4, 2),
        rope(rope_theta=500.0),
        grouped_experts(8, 3, shared=1, width=17, groups=(4, 2), scale=1.5),
        topk_method="group_limited_greedy",
        mlp_layer_types=["dense", "sparse", "sparse"],
        beside_text=ocr_images(num_key_value_heads=2),
        seed=2,
    ),
    "deepseek-ocr2-odd": shape(
        "DeepseekOcr2",
        sizes(hidden=42, vocab=131),
        heads(3, 3),
        grouped_experts(7, 2, shared=2, width=13, groups=(1, 1), scale=1.0),
        rope(),
        topk_method="greedy",
        mlp_layer_types=["sparse", "sparse"],
        attention_bias=True,
        rms_norm_eps=0.01,
        beside_text=ocr_images(num_key_value_heads=2),
        seed=1,
    ),
    "cohere2-moe": shape(
        "Cohere2Moe",
        sizes(hidden=40, layers=4),
        heads(4, 2, 12),
        experts(6, 3),
        intermediate_size=17,
        prefix_dense_intermediate_size=21,
        layer_types=[FULL, SLIDING, SLIDING, FULL],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        sliding_window=9,
        num_shared_experts=2,
        logit_scale=0.25,
        seed=57,
    ),
    # RMSNorms, sigmoids, shared experts added as they are; dense layers have windows and positions like others
    "cohere2-moe-odd": shape(
        "Cohere2Moe",
        sizes(hidden=33, layers=3, vocab=127),
        heads(3, 1, 10),
        experts(7, 2),
        intermediate_size=14,
        prefix_dense_intermediate_size=19,
        prefix_dense_sliding_window_pattern=3,
        layer_types=[FULL, SLIDING, FULL],
        mlp_layer_types=["dense", "sparse", "sparse"],
        sliding_window=5,
        num_shared_experts=1,
        shared_expert_combination_strategy="sum",
        expert_selection_fn="sigmoid",
        attention_bias=True,
        rms_norm_eps=0.01,
        logit_scale=1.0,
        tie_word_embeddings=False,
        seed=3,
    ),
    "glm4-moe": shape(
        "Glm4Moe",
        sizes(hidden=40, layers=3),
        heads(6, 2, 12),
        grouped_experts(8, 3, shared=1, width=17, dense=1, groups=(1, 1), scale=2.5),
        rope(rope_theta=1e6, partial_rotary_factor=0.5),
        norm_topk_prob=True,
        use_qk_norm=True,
        attention_bias=True,
        seed=11,
    ),
    "glm4-moe-groups": shape(
        "Glm4Moe",
        sizes(hidden=36, layers=4, vocab=127),
        heads(3, 1, 16),
        grouped_experts(9, 4, shared=2, width=14, dense=2, groups=(3, 2), scale=1.25),
        rope(partial_rotary_factor=0.25),
        rms_norm_eps=0.01,
        initializer_range=0.2,
        norm_topk_prob=False,
        use_qk_norm=False,
        attention_bias=False,
        tie_word_embeddings=True,
        seed=1,
    ),
    "gpt-oss": shape(
        "GptOss",
        sizes(layers=3),
        heads(4, 2, 10),
        local_experts(5, 2),
        yarn(150.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False),
        intermediate_size=24,
        sliding_window=7,
        swiglu_limit=2.0,
        max_position_embeddings=1024,
        seed=1,
    ),
    "gpt-oss-odd": shape(
        "GptOss",
        sizes(hidden=36, layers=3, vocab=131),
        heads(6, 3, 8),
        local_experts(4, 3),
        rope(),
        intermediate_size=21,
        sliding_window=7,
        layer_types=[FULL, SLIDING, FULL],
        swiglu_limit=1.5,
        tie_word_embeddings=True,
        seed=20,
    ),
}

SHAPES |= {
    "glm4-moe-lite": shape(
        "Glm4MoeLite",
        sizes(hidden=40, layers=3),
        latent(5, query=18, kv=28, key=9, rotary=8, value=11),
        grouped_experts(12, 4, shared=1, width=19, groups=(1, 1), scale=1.8),
        rope(rope_theta=1e6),
        initializer_range=0.2,
        seed=0,
    ),
    # the second layer is dense; half-split rotary embedding, biases, queries that are not compressed
    "glm4-moe-lite-odd": shape(
        "Glm4MoeLite",
        sizes(hidden=33, layers=3, vocab=127),
        latent(4, query=None, kv=19, key=8, rotary=10, value=13),
        grouped_experts(9, 3, shared=2, width=14, groups=(3, 2), scale=1.25),
        rope(rope_theta=500.0),
        mlp_layer_types=["sparse", "dense", "sparse"],
        norm_topk_prob=False,
        rope_interleave=False,
        attention_bias=True,
        tie_word_embeddings=True,
        seed=3,
    ),
    "kimi-k25": shape(
        "Kimi_K25",
        sizes(hidden=36, layers=3),
        latent(3, query=15, kv=21, key=9, rotary=6, value=11),
        grouped_experts(12, 5, shared=1, width=15, dense=1, groups=(1, 1), scale=2.827),
        yarn(50.0, factor=64.0, mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0),
        norm_topk_prob=True,
        max_position_embeddings=2048,
        initializer_range=0.2,
        beside_text=SMALL_VISION,
        seed=8,
    ),
    "kimi-k25-tied": shape(
        "Kimi_K25",
        sizes(hidden=40, vocab=131),
        latent(4, query=None, kv=18, key=11, rotary=8, value=9),
        grouped_experts(7, 2, shared=2, width=13, dense=0, groups=(1, 1), scale=1.5),
        rope(rope_theta=500.0),
        norm_topk_prob=True,
        initializer_range=0.2,
        beside_text=SMALL_VISION | dict(tie_word_embeddings=True),
        seed=0,
    ),
    "minimax-m2": shape(
        "MiniMaxM2",
        sizes(layers=3),
        heads(4, 2, 12),
        local_experts(6, 2),
        rope(rope_theta=5e6, partial_rotary_factor=0.5),
        intermediate_size=21,
        seed=0,
    ),
    "minimax-m2-odd": shape(
        "MiniMaxM2",
        sizes(hidden=36, vocab=131),
        heads(6, 3, 10),
        local_experts(9, 4),
        rope(rope_theta=500.0),
        intermediate_size=17,
        rms_norm_eps=0.01,
        tie_word_embeddings=True,
        seed=2,
    ),
    "ernie": shape(
        "Ernie4_5_Moe",
        sizes(hidden=40, layers=3),
        heads(5, 1),
        ernie_experts(6, 2, shared=2, width=17),
        rope(rope_theta=5e5),
        seed=1,
    ),
    # every second of the layers 1 to 3 has experts; none is shared
    "ernie-odd": shape(
        "Ernie4_5_Moe",
        sizes(hidden=36, layers=5, vocab=127),
        heads(6, 2, 10),
        ernie_experts(7, 3, shared=0, width=19),
        rope(),
        moe_layer_end_index=3,
        moe_layer_interval=2,
        tie_word_embeddings=False,
        rms_norm_eps=0.01,
        initializer_range=0.2,
        seed=1,
    ),
    # more heads of the indexer than key-value heads; all pieces of a block of the cache are in one block of the indexer
    "minimax-m3": minimax_m3(
        sizes(hidden=40, layers=4),
        heads(8, 2, 12),
        local_experts(6, 3),
        rope(rope_theta=5e3, partial_rotary_factor=0.5),
        blocks=(4, 10, 8, 3, 1),
        layer_types=[FULL, SPARSE, SPARSE, SPARSE],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        intermediate_size=17,
        dense_intermediate_size=23,
        shared_intermediate_size=19,
        routed_scaling_factor=1.5,
        swiglu_limit=2.0,
        seed=4,
    ),
    # several key-value heads for each of the indexer's; no local blocks, whose size has no factor with the cache's
    "minimax-m3-odd": minimax_m3(
        sizes(hidden=33, layers=2, vocab=127),
        heads(6, 6, 10),
        local_experts(7, 2),
        rope(),
        blocks=(3, 14, 5, 4, 0),
        layer_types=[SPARSE, FULL],
        intermediate_size=15,
        dense_intermediate_size=15,
        shared_intermediate_size=14,
        rms_norm_eps=0.01,
        tie_word_embeddings=True,
        seed=2,
    ),
    "minimax-m3-local": minimax_m3(
        sizes(hidden=36, layers=2),
        heads(4, 2, 8),
        local_experts(5, 2),
        rope(partial_rotary_factor=0.75),
        blocks=(2, 6, 6, 4, 3),
        layer_types=[SPARSE, SPARSE],
        intermediate_size=15,
        dense_intermediate_size=15,
        shared_intermediate_size=13,
        seed=3,
    ),
    "ernie-vl": ernie_vl(
        sizes(hidden=40, layers=3),
        heads(5, 1),
        ernie_experts(6, 2, shared=2, width=[17, 11]),
        theta=5e5,
        sections=[1, 1, 2],
        seed=2,
    ),
    # as many experts as values of a hidden state; none is shared
    "ernie-vl-odd": ernie_vl(
        sizes(hidden=18, layers=4, vocab=127),
        heads(6, 2, 10),
        ernie_experts(18, 3, shared=0, width=[19, 19]),
        theta=1e4,
        sections=[2, 2, 1],
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        tie_word_embeddings=False,
        rms_norm_eps=0.01,
        seed=5,
    ),
    "dots1": shape(
        "Dots1",
        sizes(hidden=40, layers=3),
        heads(6, 6, 10),
        grouped_experts(8, 3, shared=2, width=17, dense=1, groups=(1, 1), scale=2.5),
        rope(rope_theta=1e7),
        norm_topk_prob=True,
        seed=0,
    ),
    "dots1-window": shape(
        "Dots1",
        sizes(hidden=33, layers=4, vocab=127),
        heads(4, 2, 12),
        grouped_experts(9, 4, shared=1, width=14, dense=2, groups=(3, 2), scale=1.25),
        rope(),
        sliding_window=9,
        layer_types=[FULL, SLIDING, SLIDING, FULL],
        attention_bias=True,
        tie_word_embeddings=True,
        initializer_range=0.2,
        seed=2,
    ),
    "hunyuan": shape(
        "HunYuanMoEV1",
        sizes(hidden=40, layers=2),
        heads(4, 2, 12),
        rope("dynamic", factor=1.0, alpha=1000.0),
        num_experts=6,
        moe_topk=3,
        intermediate_size=21,
        tie_word_embeddings=True,
        seed=1,
    ),
    "hunyuan-odd": shape(
        "HunYuanMoEV1",
        sizes(hidden=36, layers=3, vocab=131),
        heads(6, 3, 10),
        rope(rope_theta=500.0),
        num_experts=5,
        moe_topk=2,
        intermediate_size=17,
        attention_bias=True,
        rms_norm_eps=0.01,
        seed=1,
    ),
    "hy-v3": shape(
        "HYV3",
        sizes(hidden=40, layers=3),
        heads(6, 2, 10),
        experts(8, 3, 17),
        rope(rope_theta=11158840.0),
        num_shared_experts=1,
        router_scaling_factor=2.826,
        initializer_range=0.25,
        seed=1,
    ),
    "hy-v3-odd": shape(
        "HYV3",
        sizes(hidden=33, layers=4, vocab=127),
        heads(3, 1, 16),
        experts(5, 2, 22),
        rope(),
        num_shared_experts=2,
        router_scaling_factor=1.5,
        mlp_layer_types=["sparse", "dense", "dense", "sparse"],
        attention_bias=True,
        tie_word_embeddings=True,
        seed=0,
    ),
    "granite": shape(
        "GraniteMoe",
        sizes(layers=3),
        heads(4, 2),
        local_experts(6, 3),
        rope(),
        GRANITE_MULTIPLIERS,
        intermediate_size=19,
        tie_word_embeddings=True,
        seed=2,
    ),
    "granite-shared": shape(
        "GraniteMoeShared",
        sizes(hidden=36, layers=3, vocab=127),
        heads(6, 2),
        local_experts(5, 2),
        rope(rope_theta=500.0),
        GRANITE_MULTIPLIERS,
        intermediate_size=22,
        shared_intermediate_size=27,
        attention_bias=True,
        rms_norm_eps=0.01,
        seed=0,
    ),
}

SHAPES |= {
    # three layers with convolutions of 3 and 2 taps, a window, and a key-value head that is half delayed
    "zaya": shape(
        "Zaya",
        sizes(hidden=36, layers=3),
        heads(6, 3, 12),
        experts(5, 1, 19),
        layer_types=["hybrid", "hybrid_sliding", "hybrid"],
        sliding_window=11,
        router_hidden_size=13,
        cca_time0=3,
        cca_time1=2,
        lm_head_bias=True,
        tie_word_embeddings=False,
        seed=7,
    ),
    "zaya-odd": shape(
        "Zaya",
        sizes(hidden=33, layers=2, vocab=127),
        heads(4, 2, 8),
        experts(7, 1, 23),
        router_hidden_size=16,
        seed=1,
    ),
    # two experts of attention and of each network for a token; another epsilon of the last norm
    "jetmoe": shape(
        "JetMoe",
        sizes(hidden=36, layers=3),
        local_experts(5, 2),
        rope(),
        num_key_value_heads=4,
        kv_channels=10,
        intermediate_size=19,
        rms_norm_eps=0.05,
        tie_word_embeddings=False,
        seed=1,
    ),
    # more experts for a token than key-value heads
    "jetmoe-odd": shape(
        "JetMoe",
        sizes(hidden=33, layers=2, vocab=127),
        local_experts(7, 4),
        rope(rope_theta=500.0),
        num_key_value_heads=3,
        kv_channels=6,
        intermediate_size=23,
        tie_word_embeddings=True,
        seed=1,
    ),
    # outputs added to multiples of normalised rows; blocks of transformers' prompts shorter than the prompts
    "minimax": shape(
        "MiniMax",
        sizes(hidden=36, layers=4),
        heads(6, 2, 10),
        local_experts(5, 2),
        rope(),
        layer_types=[LINEAR, LINEAR, FULL, LINEAR],
        block_size=16,
        intermediate_size=19,
        full_attn_alpha_factor=3.5,
        linear_attn_alpha_factor=3.5,
        mlp_alpha_factor=3.5,
        full_attn_beta_factor=1.5,
        linear_attn_beta_factor=0.7,
        mlp_beta_factor=2.0,
        rms_norm_eps=0.01,
        seed=1,
    ),
    # one state, five heads, a window
    "minimax-odd": shape(
        "MiniMax",
        sizes(hidden=35, layers=3, vocab=127),
        heads(5, 1, 14),
        local_experts(7, 3),
        rope(),
        sliding_window=11,
        intermediate_size=23,
        tie_word_embeddings=True,
        seed=1,
    ),
    # clipped queries, keys and values; LayerNorms
    "dbrx": shape(
        "Dbrx",
        sizes(hidden=36, layers=3, vocab=131),
        rope(rope_theta=500.0),
        num_attention_heads=6,
        attn_config=dict(kv_n_heads=2, clip_qkv=0.8, rope_theta=500.0),
        ffn_config=dict(hidden_size=36, ffn_hidden_size=19, moe_num_experts=7, moe_top_k=3),
        d_model=36,
        seed=2,
    ),
    # weights of experts that are not normalised, one layer
    "dbrx-odd": shape(
        "Dbrx",
        sizes(hidden=40, layers=1, vocab=127),
        rope(rope_theta=10000.0),
        num_attention_heads=5,
        attn_config=dict(kv_n_heads=5, clip_qkv=2.0, rope_theta=10000.0),
        ffn_config=dict(
            hidden_size=40, ffn_hidden_size=23, moe_num_experts=5, moe_top_k=2, moe_normalize_expert_weights=None
        ),
        d_model=40,
        seed=8,
    ),
    # all layers have experts
    "solar-open": shape(
        "SolarOpen",
        sizes(hidden=36, layers=3, vocab=131),
        heads(6, 2, 10),
        grouped_experts(9, 3, shared=2, width=17, groups=(3, 2), scale=1.5),
        rope(rope_theta=500.0),
        attention_bias=True,
        seed=1,
    ),
    # layers with windows have frequencies of their own; the second network is dense
    "mellum": shape(
        "Mellum",
        sizes(hidden=36, layers=3, vocab=127),
        heads(6, 2, 10),
        experts(7, 3, 19),
        layer_types=[FULL, SLIDING, SLIDING],
        mlp_layer_types=["sparse", "dense", "sparse"],
        sliding_window=9,
        rope_parameters={
            FULL: dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=32),
            SLIDING: dict(rope_type="default", rope_theta=100.0),
        },
        seed=1,
    ),
    # attention sinks; layers of full attention without rotary embedding
    "flint": shape(
        "Flint",
        sizes(hidden=36, layers=5),
        heads(6, 2, 10),
        experts(7, 3, 19),
        rope(rope_theta=500.0),
        shared_expert_intermediate_size=23,
        sliding_window=9,
        mlp_only_layers=[1],
        seed=2,
    ),
    # the first network is dense; layers of full attention without rotary embedding
    "exaone-moe": shape(
        "ExaoneMoe",
        sizes(hidden=36, layers=5, vocab=131),
        heads(6, 3, 10),
        experts(8, 3, 19),
        rope(rope_theta=500.0),
        num_shared_experts=2,
        n_group=4,
        topk_group=2,
        sliding_window=9,
        routed_scaling_factor=1.5,
        seed=5,
    ),
    # a norm behind experts; the first network is dense
    "axk1": shape(
        "AXK1",
        sizes(hidden=40, layers=3),
        latent(5, query=18, kv=28, key=12, rotary=8, value=10),
        grouped_experts(12, 5, shared=1, width=19, dense=1, groups=(4, 2), scale=2.5),
        rope(rope_theta=500.0),
        seed=1,
    ),
    # windows, sinks, and layers with thetas of their own or without a rotary embedding
    "granite-swa": shape(
        "GraniteMoeSWA",
        sizes(hidden=36, layers=4, vocab=127),
        heads(6, 2),
        local_experts(5, 2),
        rope(rope_theta=500.0),
        GRANITE_MULTIPLIERS,
        intermediate_size=22,
        shared_intermediate_size=27,
        sliding_window=9,
        layer_rope_theta=[0, 100.0, 500.0, 100.0],
        seed=1,
    ),
    # gated outputs, norms behind networks, scaled embeddings; the first network is dense
    "afmoe": shape(
        "Afmoe",
        sizes(hidden=36, layers=4, vocab=131),
        heads(6, 2, 10),
        experts(7, 3, 19),
        rope(rope_theta=500.0),
        num_shared_experts=2,
        sliding_window=9,
        route_scale=1.7,
        mup_enabled=True,
        seed=6,
    ),
}

SHAPES |= {
    # queries grow at positions 16, 32 and so on
    "mistral4": shape(
        "Mistral4",
        sizes(hidden=40, layers=3),
        latent(4, query=18, kv=28, key=12, rotary=8, value=10),
        grouped_experts(9, 3, shared=1, width=19, dense=1, groups=(3, 2), scale=1.5),
        yarn(100.0, factor=4.0, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1, llama_4_scaling_beta=0.7),
        initializer_range=0.2,
        seed=1,
    ),
    "mistral4-images": shape(
        "Mistral3",
        sizes(hidden=36, layers=2, vocab=127),
        latent(3, query=None, kv=21, key=10, rotary=6, value=11),
        grouped_experts(8, 4, shared=2, width=15, dense=0, groups=(1, 1), scale=1.0),
        yarn(500.0, factor=2.0, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1, llama_4_scaling_beta=0.3),
        model_type="mistral4",
        norm_topk_prob=False,
        initializer_range=0.2,
        beside_text=dict(
            vision_config=dict(
                model_type="pixtral",
                num_hidden_layers=1,
                hidden_size=16,
                num_attention_heads=2,
                head_dim=8,
                intermediate_size=16,
            ),
            tie_word_embeddings=False,
        ),
        seed=0,
    ),
    # the second layer has no rotary embedding
    "mistral-large4": mistral_large4(
        sizes(hidden=32, layers=4),
        heads(4, 4),
        grouped_experts(9, 3, shared=1, width=13, dense=1, groups=(3, 2), scale=1.5),
        yarn(100.0, factor=4.0, attention_factor=1.0, beta_fast=32.0, beta_slow=1.0),
        kv_lora_rank=20,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=7,
        index_topk=9,
        index_n_heads=11,
        index_head_dim=10,
        no_rope_layers=[1, 0, 1, 1],
        final_logit_softcapping=9.0,
        seed=1,
    ),
    # the second layer attends to the positions of the first, without a rotary embedding of its own
    "mistral-large4-shared": mistral_large4(
        sizes(hidden=36, layers=3, vocab=127),
        heads(2, 2),
        grouped_experts(6, 2, shared=2, width=17, dense=0, groups=(1, 1), scale=1.0),
        rope(rope_theta=500.0),
        kv_lora_rank=22,
        qk_nope_head_dim=5,
        qk_rope_head_dim=6,
        v_head_dim=9,
        index_topk=17,
        index_n_heads=9,
        index_head_dim=6,
        indexer_types=["full", "shared", "full"],
        no_rope_layer_interval=2,
        seed=1,
    ),
    # chunks of 7 positions, which no block size divides; the third layer has no rotary embedding
    "llama4": shape(
        "Llama4Text",
        sizes(hidden=40, layers=4),
        heads(4, 2, 12),
        local_experts(5, 1),
        rope(rope_theta=5e5),
        intermediate_size=19,
        intermediate_size_mlp=27,
        no_rope_layers=[1, 1, 0, 1],
        attention_chunk_size=7,
        floor_scale=8,
        attn_scale=0.6,
        seed=1,
    ),
    # every second layer has experts; all are rotated alike, and the last one attends to all positions
    "llama4-odd": shape(
        "Llama4Text",
        sizes(hidden=36, layers=4, vocab=127),
        heads(6, 3, 10),
        local_experts(4, 1),
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
        intermediate_size=21,
        intermediate_size_mlp=33,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=4,
        attention_chunk_size=13,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        attention_bias=True,
        tie_word_embeddings=True,
        seed=0,
    ),
    "step3p7": step(
        sizes(hidden=40, layers=4),
        heads(4, 2, 12),
        experts(6, 2, 17),
        n_routed_experts=6,
        num_sliding_attention_heads=6,
        layer_types=[FULL, SLIDING, SLIDING, FULL],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        sliding_window=9,
        share_expert_dim=23,
        moe_router_scaling_factor=1.5,
        swiglu_limits=[0.0, 0.0, 0.4, 0.0],
        swiglu_limits_shared=[0.3, 0.0, 0.0, 0.5],
        seed=1,
    ),
    "step3p7-odd": step(
        sizes(hidden=33, layers=3, vocab=127),
        heads(3, 1, 12),
        experts(9, 4, 14),
        n_routed_experts=9,
        layer_types=[SLIDING, FULL, SLIDING],
        mlp_layer_types=["sparse", "sparse", "dense"],
        sliding_window=5,
        share_expert_dim=16,
        query_pre_attn_scalar=20,
        rms_norm_eps=0.01,
        seed=0,
    ),
    # layers with windows have twice the key-value heads; values are narrower than keys; one dense layer in front
    "mimo-v2-flash": shape(
        "MiMoV2Flash",
        sizes(hidden=40, layers=4),
        heads(4, 2, 12),
        grouped_experts(6, 2, shared=0, width=20, groups=(1, 1), scale=1.0),
        v_head_dim=8,
        sliding_window=9,
        seed=0,
    ),
    "mimo-v2-flash-odd": shape(
        "MiMoV2Flash",
        sizes(hidden=33, layers=3, vocab=127),
        heads(6, 3, 19),
        grouped_experts(9, 4, shared=0, width=15, groups=(3, 2), scale=1.7),
        v_head_dim=11,
        layer_types=[SLIDING, FULL, SLIDING],
        mlp_layer_types=["sparse", "sparse", "dense"],
        sliding_window=5,
        attention_value_scale=None,
        attention_bias=True,
        rms_norm_eps=0.01,
        seed=0,
    ),
    # larger heads without windows, whose keys are also values; the published layout beside a model for images
    "gemma4": shape(
        "Gemma4",
        gemma_experts(6, 2, 24),
        sizes(hidden=40, layers=3),
        heads(4, 2, 8),
        beside_text=dict(
            vision_config=SMALL_VISION["vision_config"]
            | dict(num_key_value_heads=2, head_dim=8, patch_size=4, position_embedding_size=16),
            audio_config=None,
        ),
        layer_types=[SLIDING, SLIDING, FULL],
        global_head_dim=16,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        sliding_window=9,
        final_logit_softcapping=30.0,
        pad_token_id=1,
        seed=0,
    ),
    "gemma4-odd": shape(
        "Gemma4Text",
        gemma_experts(9, 4, 15),
        sizes(hidden=33, layers=3, vocab=127),
        heads(6, 3, 10),
        layer_types=[FULL, SLIDING, FULL],
        global_head_dim=12,
        sliding_window=5,
        rms_norm_eps=0.01,
        seed=0,
    ),
    # all biases; factors that show in the first positions, and noise for which some but not all experts are near
    "phimoe": shape(
        "Phimoe",
        sizes(hidden=40),
        local_experts(6, 2),
        heads(4, 2),
        rope(
            "longrope",
            short_factor=[1.0, 1.2, 1.5, 2.0, 3.0],
            long_factor=[1.0, 2.0, 4.0, 8.0, 16.0],
            short_mscale=1.2,
            long_mscale=1.5,
            original_max_position_embeddings=512,
        ),
        router_jitter_noise=0.3,
        attention_bias=True,
        lm_head_bias=True,
        seed=1,
    ),
    "phimoe-window": shape(
        "Phimoe",
        sizes(hidden=42, layers=3, vocab=131),
        local_experts(5, 2),
        heads(3, 1),
        rope(),
        intermediate_size=37,
        router_jitter_noise=0.05,
        sliding_window=9,
        tie_word_embeddings=True,
        lm_head_bias=True,
        rms_norm_eps=0.01,
        seed=9,
    ),
}


def indexed(heads: int, dim: int, top_k: int) -> dict[str, Any]:
    """Sparse attention: heads of the indexer, size of its keys, and the number of positions."""
    return dict(index_n_heads=heads, index_head_dim=dim, index_topk=top_k)


# With few heads of an indexer, many scores are zero, and transformers' choice among equal ones is undefined.
SHAPES |= {
    "deepseek-v32": shape(
        "DeepseekV32",
        sizes(hidden=40, layers=3),
        latent(4, query=18, kv=28, key=12, rotary=8, value=10),
        grouped_experts(12, 5, shared=1, width=19, dense=1, groups=(4, 2), scale=2.5),
        indexed(12, 20, 11),
        yarn(100.0, mscale=1.0, mscale_all_dim=1.0, **DEEPSEEK_YARN),
        norm_topk_prob=True,
        max_position_embeddings=1280,
        initializer_range=0.2,
        seed=7,
    ),
    # fewer positions than a block has, keys of an odd size, the second layer dense
    "deepseek-v32-odd": shape(
        "DeepseekV32",
        sizes(hidden=33, layers=3, vocab=127),
        latent(3, query=15, kv=19, key=9, rotary=6, value=13),
        grouped_experts(9, 3, shared=2, width=14, groups=(3, 2), scale=1.25),
        indexed(17, 13, 3),
        rope(rope_theta=500.0),
        mlp_layer_types=["sparse", "dense", "sparse"],
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.01,
        seed=2,
    ),
    "axk2": shape(
        "AXK2",
        sizes(hidden=40, layers=3),
        latent(4, query=18, kv=28, key=12, rotary=8, value=10),
        indexed(13, 12, 11),
        grouped_experts(12, 3, shared=1, width=19, dense=1, groups=(4, 2), scale=2.5),
        rope(rope_theta=100.0),
        gated_norm_rank=5,
        norm_topk_prob=True,
        initializer_range=0.2,
        seed=1,
    ),
    # no groups, and a dense network between experts
    "axk2-odd": shape(
        "AXK2",
        sizes(hidden=33, layers=3, vocab=127),
        latent(3, query=17, kv=19, key=8, rotary=10, value=13),
        indexed(15, 11, 7),
        yarn(50.0, factor=4.0, mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0, beta_slow=1.0),
        n_routed_experts=7,
        num_experts_per_tok=3,
        n_shared_experts=2,
        moe_intermediate_size=18,
        mlp_layer_types=["sparse", "dense", "sparse"],
        gated_norm_rank=4,
        norm_topk_prob=False,
        attention_bias=True,
        rms_norm_eps=0.01,
        tie_word_embeddings=True,
        seed=19,
    ),
    "dots3-note": shape(
        "Dots3NoteText",
        sizes(hidden=40, layers=4),
        latent(4, query=18, kv=28, key=12, rotary=8, value=10),
        indexed(13, 12, 11),
        grouped_experts(12, 5, shared=1, width=19, groups=(4, 2), scale=2.5),
        layer_types=["indexed_attention", SLIDING, "full_attention", SLIDING],
        use_dsa=None,
        head_dim=16,
        swa_num_attention_heads=6,
        swa_num_key_value_heads=6,
        swa_q_lora_rank=21,
        swa_kv_lora_rank=17,
        swa_head_dim=16,
        swa_qk_nope_head_dim=10,
        swa_v_head_dim=9,
        sliding_window=9,
        shared_experts_intermediate_size=23,
        rms_norm_eps=0.01,
        initializer_range=0.2,
        seed=8,
    ),
    # inside of a model for pictures and sound; layers without windows attend to all positions
    "dots3-note-images": shape(
        "Dots3Note",
        sizes(hidden=32, layers=3, vocab=127),
        latent(3, query=17, kv=19, key=8, rotary=10, value=13),
        indexed(3, 12, 11),
        grouped_experts(6, 2, shared=2, width=14, groups=(1, 1), scale=1.5),
        layer_types=["full_attention", SLIDING, SLIDING],
        mlp_layer_types=["sparse", "dense", "sparse"],
        use_dsa=False,
        head_dim=20,
        swa_num_attention_heads=2,
        swa_num_key_value_heads=2,
        swa_q_lora_rank=9,
        swa_kv_lora_rank=21,
        swa_head_dim=16,
        swa_qk_nope_head_dim=8,
        swa_v_head_dim=7,
        sliding_window=7,
        shared_experts_intermediate_size=11,
        norm_topk_prob=False,
        attention_bias=True,
        beside_text=dict(
            vision_config=dict(
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=16,
                mlp_layer_types=["dense"],
                adapter_in_dim=16,
                adapter_out_dim=32,
            ),
            audio_config=dict(
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=16,
                downsample_hidden_size=8,
                adapter_input_size=16,
                adapter_out_dim=32,
            ),
        ),
        seed=1,
    ),
    # the third layer attends to the positions that the second chose
    "hy-v4": shape(
        "HYV4",
        sizes(hidden=40, layers=3),
        latent(4, query=18, kv=28, key=12, rotary=8, value=10),
        indexed(13, 12, 11),
        grouped_experts(12, 5, shared=1, width=19, groups=(1, 1), scale=2.5),
        rope(rope_theta=100.0),
        indexer_types=["full", "full", "shared"],
        hc_mult=3,
        swiglu_limit=0.5,
        initializer_range=0.2,
        rms_norm_eps=1e-3,
        seed=2,
    ),
    # other numbers of streams and their weights, a dense network between experts
    "hy-v4-odd": shape(
        "HYV4",
        sizes(hidden=33, layers=3, vocab=127),
        latent(3, query=17, kv=19, key=8, rotary=10, value=13),
        indexed(15, 11, 7),
        grouped_experts(7, 3, shared=2, width=14, groups=(1, 1), scale=1.25),
        rope(rope_theta=500.0),
        mlp_layer_types=["sparse", "dense", "sparse"],
        hc_mult=2,
        hc_magnitude=1.5,
        hc_eps=0.01,
        attention_bias=True,
        norm_topk_prob=False,
        tie_word_embeddings=True,
        seed=4,
    ),
    # the second and third layer attend to the positions that the first chose, the fifth to those of the fourth
    "glm5": shape(
        "GlmMoeDsa",
        sizes(hidden=40, layers=5),
        latent(4, query=20, kv=24, key=10, rotary=8, value=14),
        grouped_experts(8, 3, shared=1, width=17, groups=(1, 1), scale=2.5),
        indexed(14, 16, 9),
        rope(rope_theta=1e6),
        mlp_layer_types=["dense", "sparse", "sparse", "sparse", "sparse"],
        indexer_types=["full", "shared", "shared", "full", "shared"],
        norm_topk_prob=True,
        initializer_range=0.2,
        seed=4,
    ),
    "glm5-odd": shape(
        "GlmMoeDsa",
        sizes(hidden=36, layers=3, vocab=131),
        latent(6, query=13, kv=21, key=8, rotary=10, value=9),
        grouped_experts(7, 2, shared=1, width=15, groups=(1, 1), scale=1.5),
        indexed(16, 10, 17),
        rope(rope_theta=500.0),
        mlp_layer_types=["sparse"] * 3,
        index_topk_freq=1,
        tie_word_embeddings=True,
        seed=3,
    ),
}


def entries(sparse: int, dense: int, types: str, *, window: int, indexer: tuple[int, int, int]) -> dict[str, Any]:
    """Compressed attention: tokens of an entry of either type, the types of the layers, and the indexer."""
    names = dict(w="sliding_attention", c="compressed_sparse_attention", h="heavily_compressed_attention")
    num_heads, size, top_k = indexer
    return dict(
        layer_types=[names[letter] for letter in types],
        compress_rates={names["c"]: sparse, names["h"]: dense},
        sliding_window=window,
        index_n_heads=num_heads,
        index_head_dim=size,
        index_topk=top_k,
    )


SHAPES |= {
    # windows of 10 tokens cross the ends of blocks; most tokens see more entries than they attend to
    "deepseek-v4": shape(
        "DeepseekV4",
        sizes(hidden=40, layers=4),
        heads(4, 1, 16),
        entries(4, 10, "wchc", window=7, indexer=(12, 14, 5)),
        experts(7, 3, 21, key="n_routed_experts"),
        dict(q_lora_rank=18, o_groups=2, o_lora_rank=9, qk_rope_head_dim=6),
        rope_scaling=dict(type="yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1),
        intermediate_size=21,
        mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"],
        swiglu_limit=1.5,
        initializer_range=0.2,
        seed=1,
    ),
    "deepseek-v4-odd": shape(
        "DeepseekV4",
        sizes(hidden=33, layers=3, vocab=127),
        heads(3, 1, 20),
        entries(2, 7, "chw", window=5, indexer=(17, 11, 3)),
        experts(5, 2, 14, key="n_routed_experts"),
        dict(q_lora_rank=13, o_groups=3, o_lora_rank=7, qk_rope_head_dim=10),
        dict(hc_mult=3, hc_sinkhorn_iters=5, hc_eps=1e-3, routed_scaling_factor=2.5),
        intermediate_size=14,
        mlp_layer_types=["moe"] * 3,
        rms_norm_eps=0.01,
        tie_word_embeddings=True,
        initializer_range=0.2,
        seed=0,
    ),
}


def glm5_next(*parts: dict[str, Any], **settings: Any) -> Shape:
    """Return a shape of GLM-5.3, beside a model for images."""
    vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=16)
    beside = dict(vision_config=vision, tie_word_embeddings=False)
    return shape("Glm5Next", *parts, initializer_range=0.2, beside_text=beside, **settings)


SHAPES |= {
    # most tokens choose 2 of the windows of 4 tokens before them; the first indexer's choice serves two layers
    "glm5-next": glm5_next(
        sizes(hidden=40, layers=4),
        latent(4, query=20, kv=24, key=10, rotary=0, value=14),
        grouped_experts(8, 3, shared=1, width=17, groups=(1, 1), scale=2.5),
        indexed(14, 16, 8),
        layer_types=[INDEXED, INDEXED, LINEAR, INDEXED],
        indexer_types=["full", "shared", "full", "full"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        index_kpool=4,
        swiglu_limit=1.5,
        linear_num_heads=2,
        linear_head_dim=12,
        rms_norm_eps=1e-3,
        seed=3,
    ),
    # windows of 2 tokens, three streams, decays without a bound
    "glm5-next-odd": glm5_next(
        sizes(hidden=33, layers=3, vocab=127),
        latent(3, query=13, kv=19, key=9, rotary=0, value=11),
        grouped_experts(7, 2, shared=2, width=15, groups=(1, 1), scale=1.5),
        indexed(17, 11, 10),
        dict(hc_mult=3, hc_sinkhorn_iters=5, hc_eps=1e-3),
        layer_types=[INDEXED, LINEAR, INDEXED],
        mlp_layer_types=["sparse"] * 3,
        index_kpool=2,
        linear_num_heads=3,
        linear_head_dim=7,
        linear_conv_kernel_dim=3,
        linear_lower_bound=None,
        rms_norm_eps=0.01,
        seed=13,
    ),
}


def inkling(*parts: dict[str, Any], **settings: Any) -> Shape:
    """Return a shape of Inkling, as the language model that transformers has alone."""
    return shape("InklingText", *parts, initializer_range=0.2, logits_mup_width_multiplier=2.0, **settings)


def window_heads(num: int, kv: int, dim: int) -> dict[str, Any]:
    return dict(swa_num_attention_heads=num, swa_num_key_value_heads=kv, swa_head_dim=dim)


SHAPES |= {
    # scores by distance for less than the context, and temperatures of queries and of these scores
    "inkling": inkling(
        sizes(hidden=40, layers=3),
        heads(4, 2, 12),
        window_heads(6, 2, 10),
        experts(7, 2, 17, key="n_routed_experts"),
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        sliding_window_size=9,
        d_rel=6,
        rel_extent=13,
        log_scaling_n_floor=8,
        log_scaling_alpha=0.5,
        n_shared_experts=2,
        route_scale=2.5,
        rms_norm_eps=1e-3,
        seed=3,
    ),
    # inside of a model for images and sound
    "inkling-odd": shape(
        "Inkling",
        sizes(hidden=33, layers=2, vocab=127),
        heads(3, 1, 11),
        window_heads(5, 5, 7),
        experts(6, 3, 13, key="n_routed_experts"),
        layer_types=["hybrid", "hybrid_sliding"],
        mlp_layer_types=["dense", "sparse"],
        sliding_window_size=5,
        d_rel=3,
        rel_extent=70,
        conv_kernel_size=3,
        n_shared_experts=1,
        route_scale=1.5,
        logits_mup_width_multiplier=2.0,
        initializer_range=0.2,
        beside_text=dict(
            vision_config=dict(hidden_size=16, num_hidden_layers=4, num_attention_heads=2, patch_size=4),
            audio_config=dict(n_mel_bins=4, mel_vocab_size=5),
        ),
        seed=7,
    ),
}


def soft_caps(gate: float, up: float, logits: float) -> dict[str, Any]:
    return dict(mlp_gate_softcap=gate, mlp_up_softcap=up, final_logit_softcapping=logits)


SHAPES |= {
    # blocks of one and of two layers, full attention after other layers, and temperatures
    "inkling2": shape(
        "Inkling2Text",
        sizes(hidden=40, layers=4),
        heads(4, 2, 12),
        window_heads(6, 2, 10),
        experts(7, 2, 17, key="n_routed_experts"),
        soft_caps(1.0, 1.5, 6.0),
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        n_layers_per_attn_res_block=2,
        sliding_window_size=9,
        d_rel=6,
        rel_extent=13,
        log_scaling_n_floor=8,
        log_scaling_alpha=0.5,
        route_scale=2.5,
        rms_norm_eps=1e-3,
        qk_l2_clip_threshold=4.0,
        rel_l2_clip_threshold=2.5,
        initializer_range=0.2,
        seed=5,
    ),
    # full attention to the embedded tokens, more taps than others have, inside of a model for images
    "inkling2-odd": shape(
        "Inkling2",
        sizes(hidden=34, layers=3, vocab=127),
        heads(3, 1, 22),
        window_heads(5, 5, 7),
        experts(6, 3, 13, key="n_routed_experts"),
        soft_caps(0.7, 2.0, 9.0),
        layer_types=["hybrid", "hybrid_sliding", "hybrid_sliding"],
        n_layers_per_attn_res_block=1,
        sliding_window_size=5,
        d_rel=4,
        rel_extent=70,
        conv_kernel_size=5,
        route_scale=1.5,
        qk_l2_clip_threshold=3.0,
        rel_l2_clip_threshold=2.0,
        initializer_range=0.2,
        beside_text=dict(
            vision_config=dict(
                hidden_size=16, num_hidden_layers=2, num_attention_heads=2, patch_size=4, text_hidden_size=34
            ),
        ),
        seed=1,
    ),
}


def qwen4(*parts: dict[str, Any], indexer: tuple[int, int, int, int], **settings: Any) -> Shape:
    """Return a shape of Qwen4-Exp.

    Args:
        indexer: heads, their size, positions in a window, and positions of all chosen windows.
    """
    names = ("n_heads", "head_dim", "compress_ratio", "budget")
    chosen = {f"indexer_{name}": value for name, value in zip(names, indexer, strict=True)}
    return shape("Qwen4Exp", *parts, chosen, indexer_kv_heads=1, beside_text=SMALL_VISION, **settings)


SHAPES |= {
    # n-grams of two and three tokens in two layers; most tokens choose 2 of the windows of 4 tokens before them
    "qwen4-exp": qwen4(
        sizes(hidden=36, layers=3),
        heads(4, 2, 16),
        experts(7, 3, 15),
        rope(partial_rotary_factor=0.25),
        indexer=(5, 12, 4, 8),
        shared_expert_intermediate_size=21,
        layer_types=[LINEAR, INDEXED, LINEAR],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=11,
        linear_conv_kernel_dim=3,
        hc_count=2,
        hc_lowrank=10,
        ple_layer_ids=[1, 3],
        ple_embed_dim=24,
        heads_per_ngram=2,
        ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=5,
        eos_token_id=[7, 9],
        initializer_range=0.25,
        rms_norm_eps=1e-3,  # with less, small outputs of a head are magnified so much that rounding shows
        seed=10,
    ),
    # windows of 2 tokens, pairs of tokens alone, three streams, a gate of linear attention by sigmoids
    "qwen4-exp-odd": qwen4(
        sizes(hidden=33, layers=2, vocab=127),
        heads(3, 1, 10),
        experts(6, 2, 13),
        rope(partial_rotary_factor=0.6),
        indexer=(7, 9, 2, 10),
        shared_expert_intermediate_size=11,
        layer_types=[INDEXED, LINEAR],
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=7,
        linear_value_head_dim=5,
        output_gate_type="sigmoid",
        hc_count=3,
        hc_lowrank=7,
        ple_layer_ids=[2],
        ple_conv_kernel_size=3,
        ngram_size=2,
        heads_per_ngram=3,
        ngram_vocab_size_base=31,
        make_ngram_vocab_size_divisible_by=1,
        split_ngram_parts=1,
        eos_token_id=11,
        tie_word_embeddings=False,
        initializer_range=0.2,
        rms_norm_eps=1e-3,
        seed=13,
    ),
}


def muse_spark(*parts: dict[str, Any], hidden: int, vocab: int, thetas: list[float], **settings: Any) -> Shape:
    """Return a shape of Muse Spark, beside models for images and sound."""
    layers = len(thetas)
    beside = dict(
        vision_config=dict(
            num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, pos_emb_height=4,
            pos_emb_width=4,
        ),
        audio_config=dict(
            num_hidden_layers=1, patch_sizes=[4], hidden_sizes=[8], depths=[1], out_hidden_size=hidden
        ),
        out_hidden_size=16,
        projector_hidden_size=16,
    )  # fmt: skip
    of_text = sizes(hidden=hidden, layers=layers, vocab=vocab) | dict(layer_rope_theta=thetas)
    return shape("MuseSpark", of_text, *parts, beside_text=beside, tie_word_embeddings=False, **settings)


SHAPES |= {
    # a layer with a rotary embedding that sees all positions, and one with a window without
    "muse-spark": muse_spark(
        heads(4, 2, 10),
        local_experts(7, 3),
        rope(rope_theta=200.0),
        hidden=40,
        vocab=101,
        thetas=[200.0, 0, 200.0],
        layer_types=[FULL, SLIDING, FULL],
        mlp_layer_types=["dense", "sparse", "sparse"],
        sliding_window=9,
        moe_intermediate_size=15,
        moe_hidden_size=22,
        routed_scaling_factor=1.5,
        qk_scale_factor=2.5,
        output_multiplier=0.4,
        final_logit_softcapping=9.0,
        residual_gate_temperature=0.4,
        rms_norm_eps=1e-3,
        post_norm_eps=1e-2,
        initializer_range=0.25,
        seed=6,
    ),
    # types and rotary embeddings that follow from the number of layers
    "muse-spark-odd": muse_spark(
        heads(3, 1, 12),
        local_experts(5, 2),
        rope(rope_theta=500.0),
        hidden=33,
        vocab=127,
        thetas=[0, 500.0],
        sliding_window=6,
        moe_intermediate_size=13,
        moe_hidden_size=45,
        initializer_range=0.3,
        seed=10,
    ),
}

# Divisible where those of their families above are not: heads over 4 tp ranks, layers into 3 pipeline stages.
DIVISIBLE = {
    "mixtral-three-layers": Shape("Mixtral", SHAPES["mixtral"].settings | dict(num_hidden_layers=3), seed=5),
    "deepseek-v3-four-heads": Shape(
        "DeepseekV3",
        SHAPES["deepseek-v3"].settings | heads(4, 4) | dict(num_hidden_layers=3, first_k_dense_replace=1),
        seed=1,
    ),
    "qwen3-moe-eight-heads": Shape("Qwen3Moe", SHAPES["qwen3-moe"].settings | heads(8, 2), seed=1),
    # Experts wide enough to be sliced: 4, 2, 2 and 2 chunks, none of which has a full last one
    "mixtral-wide": shape(
        "Mixtral", sizes(hidden=20), local_experts(5, 2), heads(4, 2, 6), intermediate_size=1547, seed=5
    ),
    "qwen3-moe-wide": Shape("Qwen3Moe", SHAPES["qwen3-moe"].settings | heads(8, 2) | experts(9, 4, 803), seed=1),
    "nemotron-h-wide": Shape(
        "NemotronH",
        SHAPES["nemotron-h"].settings | dict(moe_intermediate_size=770, layers_block_type=[LINEAR, "moe", FULL]),
        seed=1,
    ),
    "granite-wide": Shape("GraniteMoe", SHAPES["granite"].settings | dict(intermediate_size=770), seed=1),
    "gpt-oss-wide": Shape("GptOss", SHAPES["gpt-oss"].settings | dict(intermediate_size=770), seed=1),
}


# Every shape as a parameter of tests. `make test` runs the first of each family; the others are marked slow
_FIRST = {shape.family: name for name, shape in reversed(SHAPES.items())}
EVERY_SHAPE = [name if name in _FIRST.values() else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES]


class Call(NamedTuple):
    """A call of a part of a model."""

    module: Any
    given: tuple[Any, ...]
    named: dict[str, Any]
    output: Any


class _ForcedChoice(TorchFunctionMode):
    """Lets `torch.topk` over all experts return the experts that are given."""

    def __init__(self, num_experts: int, given_TK: torch.Tensor) -> None:
        super().__init__()
        self._num_experts, self._given_TK = num_experts, given_TK

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, torch.Tensor.topk) and args[0].shape[-1] == self._num_experts:
            return args[0].gather(-1, self._given_TK), self._given_TK
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Forward:
    """The results of a model on a text: logits [T, vocab_size], and the calls of its routers and indexers."""

    logits: torch.Tensor
    calls: list[Call]


class Reference:
    """A checkpoint on disk and the transformers model that wrote it."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder = folder
        self.model = model
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._continuations: dict[tuple[int, ...], list[int]] = {}
        self._forwards: dict[tuple[int, ...], Forward] = {}

    @functools.cached_property
    def llm(self) -> moeserve.LLM:
        """An engine for tests that change nothing. It proposes continuations too."""
        return moeserve.LLM(
            self.folder,
            dtype="float32",
            block_size=8,
            enable_prefix_caching=False,
            kv_cache_memory="8MiB",
            packed_cache=0,
        )

    def close(self) -> None:
        if "llm" in self.__dict__:
            self.llm.shutdown()

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the continuation of transformers' greedy search."""
        return self.continuations([prompt], num_tokens)[0]

    def continuations(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        """Return the continuations of transformers' greedy search.

        transformers decides each token, but moeserve proposes them, because a model reads many tokens at once in the
        time in which it writes one.
        """
        keys = [(num_tokens, *prompt) for prompt in prompts]
        begun = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self._continuations}
        found: dict[tuple[int, ...], list[int]] = {key: [] for key in begun}
        while missing := [key for key in begun if len(found[key]) < num_tokens]:
            texts = [begun[key] + found[key] for key in missing]
            for key, text, proposed in zip(missing, texts, self._propose(texts, num_tokens), strict=True):
                proposed = proposed[: num_tokens - len(found[key])]
                tokens = self.logits(text + proposed)[len(text) - 1 : -1].argmax(dim=-1).tolist()
                wrong = [
                    index for index, (own, theirs) in enumerate(zip(proposed, tokens, strict=True)) if own != theirs
                ]
                found[key] += tokens[: wrong[0] + 1] if wrong else tokens
        self._continuations |= found
        return [self._continuations[key] for key in keys]

    def _propose(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = moeserve.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in self.llm.generate(prompts, params, use_tqdm=False)]

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return logits [T, vocab_size] float32."""
        return self._forward(token_ids).logits

    def _forward(self, token_ids: list[int]) -> Forward:
        """Run the model on a text, or return the result of an earlier run. The last few are kept."""
        if tuple(token_ids) not in self._forwards:
            calls: list[Call] = []
            hooks = [
                module.register_forward_hook(lambda *call: calls.append(Call(*call)), with_kwargs=True)
                for module in (*self._routers(), *self._indexers())
            ]
            with torch.no_grad():
                logits = self.model(torch.tensor([token_ids])).logits[0]
            for hook in hooks:
                hook.remove()
            self._forwards[tuple(token_ids)] = Forward(logits, calls)
            if len(self._forwards) > 8:
                del self._forwards[next(iter(self._forwards))]
        return self._forwards[tuple(token_ids)]

    def smallest_gap(self, prompt: list[int], continuation: list[int]) -> float:
        """Return the smallest difference between the two largest logits of a continuation."""
        largest = self.logits(prompt + continuation)[len(prompt) - 1 : -1].topk(2, dim=-1)
        assert largest.indices[:, 0].tolist() == continuation
        return float((largest.values[:, 0] - largest.values[:, 1]).min())

    def expert_counts(self, sequences: Sequence[list[int]]) -> list[list[int]]:
        """Return the number of tokens that chose each expert, by layer that has experts."""
        of_attention = {id(each) for name, each in self.model.named_modules() if ".self_attention." in name}
        counts: dict[int, torch.Tensor] = {}
        for sequence in sequences:
            for (router, *_), chosen in self._routed(sequence):
                if id(router) in of_attention:
                    continue
                num_experts = len(next(weight for weight in router.parameters() if weight.dim() == 2))
                if hasattr(router, "router_mlp"):  # Zaya, whose last expert computes nothing
                    num_experts = router.num_experts
                count = chosen.flatten().bincount(minlength=num_experts)[:num_experts]
                counts[id(router)] = counts.get(id(router), 0) + count
        return [count.tolist() for count in counts.values()]

    def routes(self, token_ids: list[int]) -> torch.Tensor:
        """Return the experts [T, layers, K] that each token chooses, in the layers with experts."""
        return torch.stack([chosen for _, chosen in self._routed(token_ids)], dim=1)

    def logits_of_routes(self, token_ids: list[int], routes_TLK: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab_size] if tokens use other experts than those that routers choose.

        Args:
            routes_TLK: the experts to use, in the layers with experts.
        """
        routers = self._routers()
        with contextlib.ExitStack() as stack:
            for router, given_TK in zip(routers, routes_TLK.unbind(1), strict=True):
                forced = _ForcedChoice(router.num_experts, given_TK)
                for hook in (
                    router.register_forward_pre_hook(lambda *_, forced=forced: forced.__enter__() and None),
                    router.register_forward_hook(lambda *_, forced=forced: forced.__exit__(None, None, None)),
                ):
                    stack.callback(hook.remove)
            with torch.no_grad():
                return self.model(torch.tensor([token_ids])).logits[0]

    def _routed(self, token_ids: list[int]) -> list[tuple[Call, torch.Tensor]]:
        """Return each call of a router, of which the first argument are inputs [T, D], and the experts [T, K]."""
        routers = self._routers()
        assert routers
        calls = [call for call in self._forward(token_ids).calls if call.module in routers]
        return [(call, chosen_by(call.module, call.output)) for call in calls]

    def _routers(self) -> list[nn.Module]:
        ends = ("Router", "HunYuanMoEV1Gate", "JetMoeTopKGating")
        return [
            module
            for name, module in self.model.named_modules()
            if type(module).__name__.endswith(ends) and ".vision_moe." not in name
        ]

    def _indexers(self) -> list[nn.Module]:
        return [module for module in self.model.modules() if type(module).__name__.endswith("Indexer")]

    def num_undecided(self, token_ids: list[int]) -> int:
        """Return how many tokens would change experts, or the positions that an indexer chooses, in all layers.

        The inputs of routers and indexers are off by ROUTER_NOISE.
        """
        generator, num_undecided = torch.Generator().manual_seed(0), self._num_undecided_positions(token_ids)
        for (router, (hidden, *others_given), named, _), chosen in self._routed(token_ids):
            for _ in range(8):
                noise = ROUTER_NOISE * torch.randn(hidden.shape, generator=generator)
                with torch.no_grad():
                    others = chosen_by(router, router.forward(hidden * (1 + noise), *others_given, **named))
                num_undecided += int((chosen.sort(dim=-1).values != others.sort(dim=-1).values).any(-1).sum())
        return num_undecided

    def _num_undecided_positions(self, token_ids: list[int]) -> int:
        """Return how many tokens would change the positions that they attend to."""
        indexers = self._indexers()
        called = [call for call in self._forward(token_ids).calls if call.module in indexers]
        generator, num_undecided = torch.Generator().manual_seed(1), 0
        seen = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool).tril()

        def chosen(indices: torch.Tensor) -> torch.Tensor:
            if indices.dtype == torch.bool:  # flags of all positions: Qwen4-Exp
                return indices[0, 0]
            none = len(seen)  # the column of choices of -1
            columns = indices[0].long().where(indices[0] >= 0, none)
            flags = torch.zeros(*columns.shape[:-1], none + 1, dtype=torch.bool)  # of blocks, for each head: MiniMax-M3
            return flags.scatter(-1, columns, True)[..., :none] & seen

        cache = import_transformers().Cache
        for indexer, given, named, indices in called:
            # Without the cache, which would get the keys a second time.
            named = {key: None if isinstance(each, cache) else each for key, each in named.items()}
            first = [named.pop(key) for key in ("hidden_states", "q_resid") if key in named]
            hidden, *others = (None if isinstance(each, cache) else each for each in (*first, *given))
            for _ in range(8):
                noise = 1 + ROUTER_NOISE * torch.randn(hidden.shape, generator=generator)
                inputs = list(others)
                if isinstance(others[0], torch.Tensor):  # queries; otherwise they are made of the hidden states
                    inputs[0] = others[0] * (1 + ROUTER_NOISE * torch.randn(others[0].shape, generator=generator))
                again = indexer.forward(hidden * noise, *inputs, **named)
                num_undecided += int((chosen(indices) != chosen(again)).any(-1).sum())
        return num_undecided

    def prompts(self, *lengths: int, seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(3, self.vocab_size, (length,), generator=generator).tolist() for length in lengths]

    def is_clear(self, prompt: list[int], num_tokens: int) -> bool:
        """Return True if neither its greedy tokens nor its experts depend on rounding."""
        continuation = self.greedy(prompt, num_tokens)
        is_separated = self.smallest_gap(prompt, continuation) > SMALLEST_GAP
        return is_separated and self.num_undecided(prompt + continuation) == 0

    def clear_prompts(
        self, lengths: Sequence[int], num_tokens: int, *, beginning: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return clear prompts of these lengths. Those longer than `beginning` begin with it."""
        prompts: list[list[int]] = []
        for seed in range(100 + 20 * len(lengths)):
            if len(prompts) == len(lengths):
                return prompts
            length = lengths[len(prompts)]
            (rest,) = self.prompts(length, seed=seed)
            prompt = ([*beginning, *rest] if length > len(beginning) else rest)[:length]
            if self.is_clear(prompt, num_tokens):
                prompts.append(prompt)
        raise AssertionError("hardly any prompt is clear")


def chosen_by(router: Any, output: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the experts [T, K] in a router's output. That of Llama 4 has scores and logits, DBRX's only logits."""
    if isinstance(output, torch.Tensor):
        return output.topk(router.top_k, dim=-1).indices
    if hasattr(router, "balancing_biases"):  # Zaya, whose last expert computes nothing
        return (output[0].softmax(dim=-1) + router.balancing_biases).topk(router.top_k, dim=-1).indices
    if len(output) == 5:  # JetMoE, whose last are the logits
        return output[4].topk(router.top_k, dim=-1).indices
    return output[2] if len(output) >= 3 else output[1].topk(router.top_k, dim=-1).indices


def fill_what_transformers_leaves_plain(model: nn.Module) -> None:
    """Set norms, biases and sinks to random values: as ones and zeros they would hide their absence."""
    state = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()
    }
    with torch.no_grad():
        for name, tensor in state.items():
            if name.endswith("softmax_scaling.bias"):
                tensor.normal_(1.0, 0.2)
            elif name.endswith(("softmax_scaling.scale", "rotary_emb.alpha")):
                tensor.normal_(0.0, 0.2)
            elif "norm" in name and tensor.dim() == 1:
                # Zeros are the initial weights of norms that are stored as differences from one.
                tensor.normal_(1.0 if tensor.any() else 0.0, 0.2)
            elif name.endswith(
                (
                    "layer_scalar",
                    "router.scale",
                    "per_expert_scale",
                    "states_scale",
                    "residual_scale",
                    "global_scale",
                    "l2_clip.scale",
                )
            ):
                tensor.normal_(1.0, 0.2)
            elif name.endswith(("sinks", ".D", "_input.query")) or (name.endswith("A_log") and tensor.dim() == 2):
                tensor.normal_(0.0, 1.0)
            elif name.endswith(("hc.scale", "hc_scale")) and model.config.model_type == "hy_v4":
                tensor.normal_(0.5, 0.2)
            elif name.endswith(
                (
                    "bias",
                    "balancing_biases",
                    "hc.base",
                    "hc_base",
                    "index_kpool_compress_ape",
                    "static_weight",
                    "ple.conv1d.weight",
                )
            ):
                tensor.normal_(0.0, 0.3)
            elif name.endswith("residual_gate.gate"):
                tensor.normal_(0.0, 0.4)
            elif name.endswith("index_kpool_compress_gate"):
                tensor.normal_(0.0, model.config.get_text_config().initializer_range)
            elif name.endswith("tid2eid"):
                num_experts = model.config.n_routed_experts
                tensor.copy_(torch.rand(len(tensor), num_experts).argsort(dim=1)[:, : tensor.shape[1]])


def make_reference(folder: Path, shape: Shape) -> Reference:
    """Save a random checkpoint in the layout in which its family is published."""
    torch.manual_seed(shape.seed)
    model = shape.model().eval()
    fill_what_transformers_leaves_plain(model)
    model.config._experts_implementation = "eager"  # transformers' faster ones refuse odd widths
    model.config._attn_implementation = "eager"
    model.generation_config.eos_token_id = None  # or else `generate` suppresses the first tokens that end a text
    if shape.family == "Dbrx":
        for layer in model.transformer.blocks:
            layer.ffn.router.top_k = layer.ffn.top_k
    model.save_pretrained(folder)
    if shape.family == "KimiLinear":
        tensors = load_file(folder / "model.safetensors")
        save_file(with_dense_names(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    if shape.family == "Kimi_K25":
        save_file(kimi_k25_tensors(model, folder), folder / "model.safetensors", metadata={"format": "pt"})
    return Reference(folder, model)


def with_dense_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of Kimi-Linear by their published names: transformers 5.23 renames dense networks as well."""
    names = {name: re.sub(r"block_sparse_moe\.((gate|up|down)_proj)", r"mlp.\1", name) for name in tensors}
    return {names[name]: tensor for name, tensor in tensors.items()}


def kimi_k25_tensors(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors by their published names: transformers 5.23 saves those of the text part by wrong ones."""
    text = import_transformers().DeepseekV3ForCausalLM(model.config.text_config)
    text.model.load_state_dict(model.model.language_model.state_dict())
    text.lm_head.load_state_dict(model.lm_head.state_dict())
    text.save_pretrained(folder / "text")
    tensors = load_file(folder / "text" / "model.safetensors")
    shutil.rmtree(folder / "text")
    beside = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()} | {
        name: tensor for name, tensor in beside.items() if name.startswith(("vision_tower.", "mm_projector."))
    }


def save_large_mixtral(folder: Path, *, hidden_size: int, expert_width: int, **saving: Any) -> None:
    """Save a bfloat16 checkpoint of 8 layers with 8 experts, for tests that measure memory."""
    transformers = import_transformers()
    config = transformers.MixtralConfig(
        vocab_size=1000,
        hidden_size=hidden_size,
        intermediate_size=expert_width,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=8,
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        transformers.MixtralForCausalLM(config).save_pretrained(folder, **saving)
    finally:
        torch.set_default_dtype(torch.float32)


def in_the_style_of_the_hub(values: dict[str, Any]) -> dict[str, Any]:
    """Convert a config.json of transformers 5 to the style of the hub: older names, and keys that only some have."""
    if "text_config" in values:
        family = {
            "deepseek_v3": "DeepseekV3",
            "mistral4": "Mistral4",
            "mistral_large4_text": "MistralLarge4",
            "step3p5": "Step3p7",
            "qwen3_5_moe_text": "Qwen3_5Moe",
            "gemma4_text": "Gemma4",
            "aria_text": "AriaText",
            "dots3_note_text": "Dots3Note",
            "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeText",
            "deepseek_ocr2_text": "DeepseekOcr2Text",
            "glm5_next_text": "Glm5Next",
            "inkling_text": "InklingText",
            "inkling2_text": "Inkling2Text",
            "qwen4_exp_text": "Qwen4Exp",
            "muse_spark_text": "MuseSpark",
        }
        of_text = f"{family[values['text_config']['model_type']]}ForCausalLM"
        text = in_the_style_of_the_hub(values["text_config"] | dict(architectures=[of_text]))
        architecture = values["architectures"][0].replace("Kimi_", "Kimi")
        return values | dict(architectures=[architecture], torch_dtype=values["dtype"], text_config=text)
    values = {key: value for key, value in values.items() if key not in ("qk_head_dim", "transformers_version")}
    family = values["architectures"][0].removesuffix("ForCausalLM")
    if family == "Gemma4":
        (of_full,) = {json.dumps(each) for each in values.pop("per_layer_config").values()}
        names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        return values | {names[key]: value for key, value in json.loads(of_full).items()}
    scaling = values.pop("rope_parameters", dict(rope_type="default", rope_theta=10000.0))  # Kimi-Linear has none
    if family == "DeepseekV4":
        of_entries = {key: value for key, value in scaling["compress"].items() if key != "attention_factor"}
        values["rope_scaling"] = None if of_entries["rope_type"] == "default" else of_entries
        for key in ("rope_type", "rope_theta", "partial_rotary_factor"):
            of_entries.pop(key)
        return values | dict(torch_dtype=values.pop("dtype", "float32"))
    if family == "Step3p7":
        types = values["layer_types"]
        values["rope_theta"] = [scaling[name]["rope_theta"] for name in types]
        values["partial_rotary_factors"] = [scaling[name]["partial_rotary_factor"] for name in types]
        numbers = [index for index, name in enumerate(values.pop("mlp_layer_types")) if name == "sparse"]
        values["moe_layers_enum"] = ",".join(map(str, numbers))
        values["attention_other_setting"] = dict(num_attention_heads=values.pop("num_sliding_attention_heads"))
        values["num_attention_groups"] = values.pop("num_key_value_heads")
        values["moe_num_experts"] = values.pop("n_routed_experts")
        values["moe_top_k"] = values.pop("num_experts_per_tok")
        return {key: value for key, value in values.items() if key != "per_layer_config"}
    if family == "Laguna":
        return values | dict(rope_parameters=scaling, torch_dtype=values.pop("dtype", "float32"))
    if family == "MiMoV2Flash":
        values["hybrid_layer_pattern"] = [int(name == SLIDING) for name in values.pop("layer_types")]
        values["moe_layer_freq"] = [int(name == "sparse") for name in values.pop("mlp_layer_types")]
        values["swa_num_key_value_heads"] = 2 * values["num_key_value_heads"]
        values["sliding_window_size"] = values["sliding_window"] - 1
        values["swa_rope_theta"] = scaling[SLIDING]["rope_theta"]
        values |= {key: scaling[FULL][key] for key in ("rope_theta", "partial_rotary_factor")}
        return values
    if family in ("Mellum", "Beam", "Zaya", "Dots3Note", "MuseSpark"):
        return values | dict(rope_parameters=scaling)
    if family == "Glm5Next":
        types = [FULL if name == INDEXED else name for name in values["layer_types"]]
        return values | dict(layer_types=types, torch_dtype=values.pop("dtype", "float32"))
    values["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        values["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    is_default = scaling["rope_type"] == "default" and family not in (
        "GptOss",
        "MistralLarge4",
    )  # their default is YaRN
    values["rope_scaling"] = None if is_default else scaling
    values["torch_dtype"] = values.pop("dtype", "float32")

    if family.startswith("Deepseek"):
        if values["rope_scaling"]:
            scaling["type"] = scaling.pop("rope_type")
        is_v2 = family in ("DeepseekV2", "DeepseekOcr2Text")
        values["scoring_func"] = "softmax" if is_v2 else "sigmoid"
        values["topk_method"] = values.get("topk_method") if is_v2 else "noaux_tc"
        values |= dict(moe_layer_freq=1, ep_size=1, aux_loss_alpha=0.001, seq_aux=True)
        values["auto_map"] = {"AutoModelForCausalLM": f"modeling_deepseek.{family}ForCausalLM"}
        absent = ["head_dim", "mlp_bias"]
        if values.get("rope_interleave"):
            absent.append("rope_interleave")
    elif family == "Qwen2Moe":
        values |= dict(max_window_layers=21)
        absent = ["qkv_bias"]
        if not values["use_sliding_window"]:
            values["sliding_window"] = 32768
            absent.append("layer_types")
    elif family == "Qwen3Moe":
        values |= dict(num_experts=values.pop("num_local_experts"), max_window_layers=48)
        absent = []
    elif family == "GptOss":
        values |= dict(experts_per_token=values["num_experts_per_tok"], initial_context_length=32)
        absent = ["swiglu_alpha"]
        if values["layer_types"] == (["sliding_attention", "full_attention"] * 99)[: values["num_hidden_layers"]]:
            absent.append("layer_types")  # transformers' default
    elif family == "MiniMaxM2":
        if "partial_rotary_factor" in values:
            values["rotary_dim"] = int(values["head_dim"] * values.pop("partial_rotary_factor"))
        values |= dict(use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True)
        absent = []
    elif family == "MiniMax":
        values["attn_type_list"] = [int(name == FULL) for name in values.pop("layer_types")]
        for kind, long_name in (("full_attn", FULL), ("linear_attn", LINEAR), ("mlp", "mlp")):
            for name in ("alpha", "beta"):
                values[f"layernorm_{long_name}_{name}"] = values.pop(f"{kind}_{name}_factor")
        values |= dict(architectures=["MiniMaxM1ForCausalLM"], postnorm=True, shared_intermediate_size=0)
        values["rotary_dim"] = values["head_dim"]
        absent = []
    elif family == "Dots1":
        values["scoring_func"] = "noaux_tc"
        absent = []
    elif family == "HunYuanMoEV1":
        num_layers = values["num_hidden_layers"]
        width = values["intermediate_size"]
        values |= dict(moe_topk=[values["moe_topk"]] * num_layers, moe_intermediate_size=[width] * num_layers)
        values |= dict(num_shared_expert=[1] * num_layers, use_qk_norm=True, use_cla=False)
        if values["rope_scaling"]:
            scaling["type"] = scaling.pop("rope_type")
        absent = []
    else:
        absent = []
    return {key: value for key, value in values.items() if key not in absent}
