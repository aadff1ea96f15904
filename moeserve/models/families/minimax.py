"""MiniMax-01 and MiniMax-M1: lightning attention in most layers, and outputs added to normalised rows."""

from __future__ import annotations

import dataclasses

from moeserve.layers.lightning.attention import LightningAttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.streams.normed import NormedStream
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import BLOCK_SPARSE, Family
from moeserve.models.fields import read_attention, read_model, read_num_experts, read_num_layers, read_width
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.linear_attention.interface import MAX_HEAD
from moeserve.ops.routing.interface import RouterSpec

LAYER_TYPES = ("full_attention", "linear_attention")
# Keys of the factors of full attention, lightning attention and experts: each transformers' name, then an older name.
FACTORS = [(f"{kind}_attn_{{}}_factor", f"layernorm_{kind}_attention_{{}}") for kind in ("full", "linear")]
FACTORS += [("mlp_{}_factor", "layernorm_mlp_{}")]


def read(config: ConfigValues) -> ModelSpec:
    config.require("postnorm", True)
    config.require("shared_intermediate_size", 0)
    # A network's output is multiplied by beta, and added to alpha times its normalised input. If a norm reads the sum,
    # the whole sum may be divided by alpha instead.
    keys = [config.key_of(*(name.format("alpha") for name in names)) for names in FACTORS]
    alpha, *others = (config.number(key, 1.0) for key in keys)
    if any(other != alpha for other in others):
        raise config.wrong(keys[0], f"must equal {keys[1]} and {keys[2]}")
    keys = [config.key_of(*(name.format("beta") for name in names)) for names in FACTORS]
    full, linear, of_experts = (config.number(key, 1.0) / alpha for key in keys)
    num_experts, top_k = read_num_experts(config, "num_local_experts", "num_experts")
    moe = MoESpec(
        router=RouterSpec(num_experts=num_experts, top_k=top_k, is_normalized=True, scale=of_experts),
        expert_width=read_width(config, "intermediate_size"),
    )
    rotary_dim = config.optional_integer("rotary_dim", high=config.integer("head_dim", MAX_HEAD, high=MAX_HEAD))
    fraction = None if rotary_dim is None else rotary_dim / config.integer("head_dim")
    window = config.optional_integer("sliding_window")
    attention = read_attention(config, window=window, value_factor=full, default_fraction=fraction)
    num_heads, head_dim, num_layers = attention.num_heads, attention.head_dim, read_num_layers(config)
    if head_dim > MAX_HEAD:
        raise config.wrong("num_attention_heads", f"must be more, because heads have at most {MAX_HEAD} values")
    flags = config.flags_of_layers("attn_type_list", (1, 0), num_layers)
    is_linear = flags or config.flags_of_layers("layer_types", LAYER_TYPES, num_layers)
    layers = []
    for index in range(num_layers):
        factor = 1 - index / (num_layers - 1 + 1e-5) + 1e-5
        lightning = LightningAttentionSpec(
            num_heads=num_heads, head_dim=head_dim, decay_factor=factor, output_factor=linear
        )
        has_state = index % 2 == 1 if is_linear is None else is_linear[index]
        layers.append(Layer.of(lightning if has_state else attention, moe))
    model = read_model(config, layers)
    epsilon, factor = model.norm_epsilon / alpha**2, 1 / alpha
    return dataclasses.replace(model, stream=NormedStream(), norm_epsilon=epsilon, embedding_factor=factor)


MINIMAX = Family(
    name="MiniMax-01",
    models="MiniMax-Text-01, MiniMax-M1",
    architecture="MiniMaxForCausalLM",
    other_architectures=("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
    model_type="minimax",
    read=read,
    names=(*BLOCK_SPARSE, (r"\.self_attn\.out_proj\.", ".self_attn.o_proj.")),
)
