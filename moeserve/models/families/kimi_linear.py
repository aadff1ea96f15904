"""Kimi-Linear: Kimi delta attention in most layers, latent attention without position embeddings in the others."""

from __future__ import annotations

from moeserve.layers.latent.attention import LatentAttentionSpec
from moeserve.layers.linear_attention.attention import LinearAttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.layers.rotary import NoScaling, RotarySpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import BLOCK_SPARSE, Family
from moeserve.models.fields import (
    read_groups,
    read_listed_dense,
    read_model,
    read_num_experts,
    read_num_layers,
    read_width,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.convolution.interface import MAX_TAPS
from moeserve.ops.linear_attention.interface import MAX_HEAD
from moeserve.ops.routing.interface import RouterSpec

LAYER_TYPES = ("linear_attention", "full_attention")


def read(config: ConfigValues) -> ModelSpec:
    config.require("mla_use_nope", True)
    config.require("moe_router_activation_func", "sigmoid")
    config.require("attention_bias", False)
    moe = read_experts(config)
    attention, delta = _read_latent_attention(config), _read_delta_attention(config)
    layers = [
        Layer.of(attention if is_full else delta, feed_forward)
        for is_full, feed_forward in zip(_read_is_full(config), read_listed_dense(config, moe), strict=True)
    ]
    return read_model(config, layers, context_key=config.key_of("model_max_length", "max_position_embeddings"))


def read_experts(config: ConfigValues) -> MoESpec:
    """Read the experts. The config's keys differ from those of DeepSeek."""
    num_experts, top_k = read_num_experts(
        config,
        "num_experts",
        "num_local_experts",
        top_k_key=config.key_of("num_experts_per_token", "num_experts_per_tok"),
    )
    num_groups, num_chosen_groups = read_groups(
        config, num_experts, top_k, key=config.key_of("num_expert_group", "n_group")
    )
    expert_width = read_width(config, "moe_intermediate_size")
    num_shared = config.integer(config.key_of("num_shared_experts", "n_shared_experts"), low=0, high=2**10)
    return MoESpec(
        router=RouterSpec(
            num_experts=num_experts,
            top_k=top_k,
            scoring="sigmoid",
            num_groups=num_groups,
            num_chosen_groups=num_chosen_groups,
            experts_rating_group=2,
            is_normalized=config.flag(config.key_of("moe_renormalize", "norm_topk_prob"), default=True),
            scale=config.number("routed_scaling_factor"),
            has_correction=True,
        ),
        expert_width=expert_width,
        shared=SharedExpertsSpec(width=num_shared * expert_width) if num_shared else None,
    )


def _read_latent_attention(config: ConfigValues) -> LatentAttentionSpec:
    return LatentAttentionSpec(
        num_heads=config.integer("num_attention_heads", high=2**14),
        query_rank=config.optional_integer("q_lora_rank", high=2**18),
        latent_size=config.integer("kv_lora_rank", high=2**18),
        key_dim=config.integer("qk_nope_head_dim", high=2**14),
        # Nothing is rotated, not even the part of the keys that all heads share.
        rotary=RotarySpec(dim=config.integer("qk_rope_head_dim", high=2**14), theta=2.0, scaling=NoScaling()),
        value_dim=config.integer("v_head_dim", high=2**14),
    )


def _read_delta_attention(config: ConfigValues) -> LinearAttentionSpec:
    nested = config.object("linear_attn_config")  # transformers writes the same values at the top level
    source, prefix = (config, "linear_") if nested is None else (nested, "")
    taps = "linear_conv_kernel_dim" if nested is None else "short_conv_kernel_size"
    num_heads = source.integer(f"{prefix}num_heads", high=2**14)
    head_dim = source.integer(f"{prefix}head_dim", high=MAX_HEAD)
    return LinearAttentionSpec(
        num_heads=num_heads,
        num_key_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        num_taps=source.integer(taps, low=2, high=MAX_TAPS),
        norm_epsilon=config.number("rms_norm_eps"),
        has_channel_decays=True,
        gate="sigmoid",
        low_rank=head_dim,
    )


def _read_is_full(config: ConfigValues) -> list[bool]:
    """Return a flag for each layer: True if it has latent attention."""
    num_layers = read_num_layers(config)
    is_full = config.flags_of_layers("layer_types", LAYER_TYPES, num_layers)
    if is_full is not None:
        return is_full
    nested = config.object("linear_attn_config")
    if nested is None:
        return [index > 0 and index % 4 == 0 for index in range(num_layers)]
    full = nested.layer_numbers("full_attn_layers", num_layers, first=1)
    return [number in full for number in range(1, num_layers + 1)]


KIMI_LINEAR = Family(
    name="Kimi-Linear",
    models="Kimi-Linear-48B-A3B",
    architecture="KimiLinearForCausalLM",
    model_type="kimi_linear",
    read=read,
    names=(
        (r"\.self_attn\.forget_gate\.", ".self_attn."),
        (r"\.self_attn\.([fg])_b_proj\.", r".self_attn.\1_proj."),
        (r"\.self_attn\.o_norm\.", ".self_attn.norm."),
        *BLOCK_SPARSE,
    ),
)
