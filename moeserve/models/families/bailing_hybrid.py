"""Ling 3: Kimi delta attention with bounded decays in most layers, latent attention with gated heads in the others."""

from __future__ import annotations

from moeserve.layers.latent.attention import LatentAttentionSpec
from moeserve.layers.linear_attention.attention import LinearAttentionSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.families.kimi_linear import LAYER_TYPES, read_experts
from moeserve.models.family import Family
from moeserve.models.fields import read_listed_dense, read_model, read_num_layers, with_draft_layer
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.convolution.interface import MAX_TAPS
from moeserve.ops.linear_attention.interface import MAX_HEAD


def read(config: ConfigValues) -> ModelSpec:
    config.require("attention_bias", False)
    num_layers = read_num_layers(config)
    attention, delta = _read_latent_attention(config), _read_delta_attention(config)
    is_full = config.flags_of_layers("layer_types", LAYER_TYPES, num_layers)
    if is_full is None:
        group_size = config.integer("layer_group_size")
        is_full = [number % group_size == 0 for number in range(1, num_layers + 1)]
    experts = read_experts(config)
    feed_forwards = read_listed_dense(config, experts)
    layers = [
        Layer.of(attention if full else delta, feed_forward)
        for full, feed_forward in zip(is_full, feed_forwards, strict=True)
    ]
    model = read_model(config, layers, context_key=config.key_of("model_max_length", "max_position_embeddings"))
    return with_draft_layer(model, Layer.of(attention, experts))


def _read_latent_attention(config: ConfigValues) -> LatentAttentionSpec:
    return LatentAttentionSpec(
        num_heads=config.integer("num_attention_heads", high=2**14),
        query_rank=None,
        latent_size=config.integer("kv_lora_rank", high=2**18),
        key_dim=config.integer("qk_nope_head_dim", high=2**14),
        rotary=config.rotary(
            config.integer("qk_rope_head_dim", high=2**14), head_dim_key="qk_rope_head_dim", is_interleaved=True
        ),
        value_dim=config.integer("v_head_dim", high=2**14),
        has_head_gates=True,
    )


def _read_delta_attention(config: ConfigValues) -> LinearAttentionSpec:
    num_heads = config.integer("num_attention_heads", high=2**14)
    head_dim = config.integer("head_dim", high=MAX_HEAD)
    floor = None
    if config.flag("kda_safe_gate", default=True):
        floor = config.number("kda_lower_bound", -5.0, above=-1e3)
        if floor >= 0:
            raise config.wrong("kda_lower_bound", "must be negative")
    return LinearAttentionSpec(
        num_heads=num_heads,
        num_key_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        num_taps=config.integer("short_conv_kernel_size", low=2, high=MAX_TAPS),
        norm_epsilon=config.number("rms_norm_eps"),
        has_channel_decays=True,
        decay_floor=floor,
        gate="sigmoid",
    )


BAILING_HYBRID = Family(
    name="Ling 3",
    models="Ling 3.0 Flash",
    architecture="BailingHybridForCausalLM",
    other_architectures=("BailingMoeV3ForCausalLM",),  # name in published checkpoints
    model_type="bailing_hybrid",
    read=read,
    names=(
        (r"^model\.word_embeddings\.", "model.embed_tokens."),
        (r"\.attention\.dense\.", ".self_attn.o_proj."),
        (r"\.attention\.", ".self_attn."),
        (r"\.self_attn\.forget_gate\.", ".self_attn."),
        (r"\.self_attn\.o_norm\.", ".self_attn.norm."),
        (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    ),
)
