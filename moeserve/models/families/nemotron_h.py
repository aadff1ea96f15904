"""Nemotron-H (Nemotron 3): a layer is a Mamba-2 mixer, attention without positions, or a feed-forward network.

Experts have no gates. In the larger models, they work in a latent space.
"""

from __future__ import annotations

from moeserve.layers.dense.network import DenseSpec
from moeserve.layers.linear_attention.attention import LinearAttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.layers.rotary import NO_ROTARY
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    read_attention,
    read_corrected_router,
    read_model,
    read_step_limit,
    read_width,
    with_draft_layer,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.convolution.interface import MAX_TAPS
from moeserve.ops.linear_attention.interface import MAX_HEAD
from moeserve.ops.rows.activations import SquaredReLU

# The kinds of layers in a pattern, each with its names in transformers before version 5 and since.
KINDS = {
    "M": ("mamba", "linear_attention"),
    "*": ("attention", "full_attention"),
    "E": ("moe",),
    "-": ("mlp",),
}
MODULE = "*E"  # the layers of the only supported module for multi-token prediction (MTP)


def read(config: ConfigValues) -> ModelSpec:
    config.require("mlp_hidden_act", "relu2")
    for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32"):
        config.require(key, False)
    config.refuse("sliding_window")
    read_of = {"M": _read_mamba, "*": _read_attention, "E": _read_moe, "-": _read_dense}
    pattern = _read_pattern(config)
    kinds = {kind: read_of[kind](config) for kind in set(pattern)}
    layers = [kinds[kind] for kind in pattern]
    model = read_model(config, layers, epsilon_key="layer_norm_epsilon", hidden_act="relu2")
    if not model.num_skipped_layers or _read_pattern(config, "mtp_", MODULE) != MODULE:
        return model
    return with_draft_layer(model, Layer(_read_attention(config).blocks + _read_moe(config).blocks), count=1)


def _read_pattern(config: ConfigValues, prefix: str = "", default: str = "ME*-") -> str:
    """Return the kinds of all layers as a text, with one letter of `KINDS` for each layer."""
    names = config.values.get(key := f"{prefix}layers_block_type")
    if names is not None:
        kind_of = {name: kind for kind, of_kind in KINDS.items() for name in of_kind}
        if not isinstance(names, list) or not names or any(name not in kind_of for name in names):
            raise config.wrong(key, f"must list {', '.join(map(repr, kind_of))}")
        return "".join(kind_of[name] for name in names)
    pattern = config.values.get(key := f"{prefix}hybrid_override_pattern", default)
    if not isinstance(pattern, str) or not pattern or set(pattern) - KINDS.keys():
        raise config.wrong(key, f"must be a text of {' '.join(KINDS)}")
    return pattern


def _read_mamba(config: ConfigValues) -> Layer:
    config.require("mamba_hidden_act", "silu")
    # As in the authors' code, only `time_step_limit` bounds step sizes. In prompts, transformers also raises step sizes
    # to `time_step_min`, which is meant only for the initialisation of new models.
    read_step_limit(config)
    num_heads = config.integer("mamba_num_heads", high=2**14)
    num_groups = config.integer("n_groups", high=2**14)
    if num_heads % num_groups:
        raise config.wrong("n_groups", f"must divide mamba_num_heads={num_heads}")
    mixer = LinearAttentionSpec(
        num_heads=num_heads,
        num_key_heads=num_groups,
        key_dim=config.integer("ssm_state_size", high=MAX_HEAD),
        value_dim=config.integer("mamba_head_dim", high=MAX_HEAD),
        num_taps=config.integer("conv_kernel", low=2, high=MAX_TAPS),
        norm_epsilon=config.number("layer_norm_epsilon"),
        is_delta=False,
        has_convolution_bias=config.flag("use_conv_bias", default=True),
    )
    return Layer.of(mixer)


def _read_attention(config: ConfigValues) -> Layer:
    return Layer.of(read_attention(config, rotary=NO_ROTARY))


def _read_moe(config: ConfigValues) -> Layer:
    config.require("n_shared_experts", 1)
    moe = MoESpec(
        router=read_corrected_router(config),
        expert_width=read_width(config, "moe_intermediate_size"),
        activation=SquaredReLU(),
        shared=SharedExpertsSpec(
            width=read_width(config, "moe_shared_expert_intermediate_size"), activation=SquaredReLU()
        ),
        latent_size=config.optional_integer("moe_latent_size", high=2**18),
    )
    return Layer.of(moe)


def _read_dense(config: ConfigValues) -> Layer:
    width = read_width(config, "intermediate_size")
    return Layer.of(DenseSpec(width=width, activation=SquaredReLU()))


FEED_FORWARD = (
    r"(?=gate\.|experts\.|shared_experts\.|to_latent\.|from_latent\.|fc[12]_latent_proj\.|up_proj\.|down_proj\.)"
)
NEMOTRON_H = Family(
    name="Nemotron-H",
    models="Nemotron 3 Nano and Super",
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    read=read,
    names=(
        (r"^mtp\.layers\.0\.(?=(?:enorm|hnorm|eh_proj)\.)", "draft.0."),
        (r"^mtp\.layers\.1\.final_layernorm\.", "draft.0.norm."),
        (r"^mtp\.layers\.0\.norm\.", "draft.0.layer.input_layernorm."),
        (r"^mtp\.layers\.1\.norm\.", "draft.0.layer.post_attention_layernorm."),
        (rf"^mtp\.layers\.1\.mixer\.{FEED_FORWARD}", "draft.0.layer.mlp."),
        (r"^mtp\.layers\.0\.mixer\.(?=[qkvo]_proj\.)", "draft.0.layer.self_attn."),
        (r"^mtp\.", "draft.0.copy."),
        (r"^(?:backbone|model)\.embeddings\.", "model.embed_tokens."),
        (r"^(?:backbone|model)\.norm_f\.", "model.norm."),
        (r"^backbone\.", "model."),
        (r"(\blayers\.[^.]+)\.norm\.", r"\1.input_layernorm."),
        (r"\.fc1_latent_proj\.", ".to_latent."),
        (r"\.fc2_latent_proj\.", ".from_latent."),
        (rf"\.mixer\.{FEED_FORWARD}", ".mlp."),
        (r"\.mixer\.out_proj\.", ".self_attn.o_proj."),
        (r"\.mixer\.", ".self_attn."),
    ),
)
