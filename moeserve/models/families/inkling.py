"""Inkling: attention scores that depend on distance, short convolutions, and shared experts weighted by the router."""

from __future__ import annotations

import dataclasses

from moeserve.layers.grouped_query.attention import AttentionSpec
from moeserve.layers.grouped_query.convolution import TapsSpec
from moeserve.layers.grouped_query.relative import RelativeSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.rotary import NO_ROTARY, TemperatureSpec
from moeserve.layers.streams.chained import ChainedStream
from moeserve.layers.update_convolution.convolution import UpdateConvolutionSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family, Names, inside_other_model
from moeserve.models.fields import feed_forwards_of, read_model, read_num_experts, read_num_layers, read_width
from moeserve.models.model_config import Block, Layer, ModelSpec
from moeserve.ops.convolution.interface import MAX_TAPS
from moeserve.ops.routing.interface import RouterSpec

LAYER_TYPES = ("hybrid", "hybrid_sliding")


def read(config: ConfigValues) -> ModelSpec:
    config = config.replaced(_with_both_widths(config.values) | {"tie_word_embeddings": False})
    num_layers, num_taps = read_num_layers(config), read_num_taps(config)
    is_dense = config.flags_of_layers("mlp_layer_types", ("sparse", "dense"), num_layers)
    if is_dense is None:
        num_dense = config.integer("dense_mlp_idx", 0, low=0)
        is_dense = [index < num_dense for index in range(num_layers)]
    feed_forwards = feed_forwards_of(config, _read_experts(config), is_dense)
    after_mixer = Block(UpdateConvolutionSpec(num_taps=num_taps), has_norm=False)
    after_network = Block(UpdateConvolutionSpec(num_taps=num_taps, is_scaled=True), has_norm=False)
    layers = []
    for index, (is_local, network) in enumerate(zip(read_local_layers(config), feed_forwards, strict=True)):
        attention = read_attention(config, is_local=is_local)
        taps, scale = TapsSpec(num_taps=num_taps), 1.0 / attention.head_dim
        attention = dataclasses.replace(
            attention, normalized="head", scale=scale, taps=taps, follows_embedding=index == 0
        )
        layers.append(Layer((Block(attention), after_mixer, Block(network), after_network)))
    model = read_decoder(config, layers)
    divisor = config.number(config.key_of("logits_mup_width_multiplier", "embedding_multiplier"))
    return dataclasses.replace(model, stream=ChainedStream(), logits_divisor=divisor)


def read_decoder(config: ConfigValues, layers: list[Layer]) -> ModelSpec:
    """Return the shape of a model with these layers. Only the used rows of the vocabulary are loaded."""
    rows = config.optional_integer("unpadded_vocab_size", high=2**24)
    context_key = config.key_of("max_position_embeddings", "model_max_length")
    model = read_model(config, layers, context_key=context_key)
    if rows is not None and rows < model.vocab_size:
        model = dataclasses.replace(model, vocab_size=rows, num_stored_tokens=model.vocab_size)
    return model


def read_num_taps(config: ConfigValues) -> int:
    """Return the number of tokens that a short convolution spans."""
    return config.integer(config.key_of("conv_kernel_size", "sconv_kernel_size"), low=2, high=MAX_TAPS)


def read_local_layers(config: ConfigValues) -> list[bool]:
    """Return a flag for each layer: True if its attention has a window."""
    num_layers = read_num_layers(config)
    has_window = config.flags_of_layers("layer_types", LAYER_TYPES, num_layers)
    if has_window is not None:
        return has_window
    local = frozenset(index for index in range(num_layers) if (index + 1) % 6)
    if config.get("local_layer_ids") is not None:
        local = config.layer_numbers("local_layer_ids", num_layers)
    return [index in local for index in range(num_layers)]


def _with_both_widths(values: dict[str, object]) -> dict[str, object]:
    """Return the config's values, with the widths of experts and dense networks under their usual keys."""
    if values.get("dense_intermediate_size") is None:
        return values
    widths = dict(intermediate_size=values["dense_intermediate_size"])
    return values | {"moe_intermediate_size": values.get("intermediate_size")} | widths


def read_attention(config: ConfigValues, *, is_local: bool) -> AttentionSpec:
    """Return the attention of layers with a window (`is_local`) or without, before convolutions and norms are added."""
    prefix = "swa_" if is_local else ""
    num_heads = config.integer(f"{prefix}num_attention_heads", high=2**14)
    num_kv_heads = config.integer(f"{prefix}num_key_value_heads", high=2**14)
    if num_heads % num_kv_heads:
        raise config.wrong(f"{prefix}num_key_value_heads", f"must divide {prefix}num_attention_heads={num_heads}")
    head_dim = config.integer(f"{prefix}head_dim", high=2**14)
    size = config.integer("d_rel", high=2**10)
    window = config.integer(config.key_of("sliding_window_size", "sliding_window"), high=2**20)
    relative = RelativeSpec(size=size, num_distances=window if is_local else config.integer("rel_extent", high=2**20))
    temperature = None
    if not is_local and config.get("log_scaling_n_floor") is not None:
        for key, value in ((f"{prefix}head_dim", head_dim), ("d_rel", size)):
            if value % 2:
                raise config.wrong(key, "must be even for log_scaling_n_floor")
        length, weight = config.integer("log_scaling_n_floor"), config.number("log_scaling_alpha")
        temperature = TemperatureSpec(dim=head_dim, weight=weight, length=length, offset=1, is_continuous=True)
        relative = dataclasses.replace(relative, temperature=dataclasses.replace(temperature, dim=size))
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary=NO_ROTARY,
        window=window if is_local else None,
        temperature=temperature,
        relative=relative,
    )


def _read_experts(config: ConfigValues) -> MoESpec:
    config.require("shared_expert_sink", True)
    num_experts, top_k = read_num_experts(config, "n_routed_experts", "num_local_experts")
    num_shared = config.integer("n_shared_experts", high=2**10)
    return MoESpec(
        router=RouterSpec(
            num_experts=num_experts + num_shared,
            top_k=top_k + num_shared,
            scoring="sigmoid",
            is_normalized=True,
            scale=config.number("route_scale"),
            has_correction=True,
        ),
        expert_width=read_width(config, "moe_intermediate_size"),
        num_fixed=num_shared,
    )


# Published names of the parts of attention, of the experts and of the embedding.
NAMES: Names = (
    (r"^model\.embed\.", "model.embed_tokens."),
    (r"^model\.embed(?:_tokens\.embed)?_norm\.", "model.layers.0.input_layernorm.embedding."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.w([qkvr])_d[uv]\.", r".\1_proj."),
    (r"\.wo_ud\.", ".o_proj."),
    (r"_sconv\.weight$", "_sconv.conv1d.weight"),
    (r"\.(?:attn_sconv|post_attention_convolution)\.", ".update_convolution.0."),
    (r"\.(?:mlp_sconv|post_mlp_convolution)\.", ".update_convolution.1."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.mlp\.experts\.w13_weight$", ".mlp.experts.in_turns.gate_up_proj"),
)

INKLING = inside_other_model(
    Family(
        name="Inkling",
        architecture="InklingForConditionalGeneration",
        model_type="inkling_text",
        other_architectures=("InklingForCausalLM",),
        read=read,
        wrapped=((r"^model\.llm\.unembed\.", "lm_head."), (r"^model\.llm\.", "model.")),
        left_out=("mtp.", "audio.", "visual."),
        names=(
            *NAMES,
            (r"\.mlp\.(?:gate\.)?global_scale$", ".update_convolution.1.scale"),
            (r"\.mlp\.w13_dn\.weight$", ".mlp.in_turns.gate_up_proj.weight"),
            (r"\.mlp\.w2_md\.", ".mlp.down_proj."),
            (r"\.mlp\.experts\.w2_weight$", ".mlp.experts.in_turns.down_proj"),
            (r"\.mlp\.shared_experts\.shared_w13_weight$", ".mlp.experts.fixed.in_turns.gate_up_proj"),
            (r"\.mlp\.shared_experts\.shared_w2_weight$", ".mlp.experts.fixed.in_turns.down_proj"),
            (r"\.mlp\.shared_experts\.", ".mlp.experts.fixed."),
        ),
    )
)
