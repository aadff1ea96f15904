"""Inkling 2: attention to sums of blocks of layers, taps and sinks of tokens, limits of lengths, soft-capped SwiGLU."""

from __future__ import annotations

import dataclasses
import math

from moeserve.layers.grouped_query.attention import AttentionSpec
from moeserve.layers.grouped_query.convolution import TapsSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.streams.sums import SumsNormSpec, SumsStream
from moeserve.layers.update_convolution.convolution import UpdateConvolutionSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.families.inkling import NAMES, read_attention, read_decoder, read_local_layers, read_num_taps
from moeserve.models.family import Family, inside_other_model
from moeserve.models.fields import read_router_without_groups, read_width
from moeserve.models.model_config import Block, Layer, ModelSpec
from moeserve.ops.mixing.interface import MAX_SUMS
from moeserve.ops.rows.activations import CappedSwiGLU


def read(config: ConfigValues) -> ModelSpec:
    config.require("scoring_func", "sigmoid")
    config = config.replaced(config.values | {"tie_word_embeddings": False})
    moe = MoESpec(
        router=read_router_without_groups(
            config, "n_routed_experts", "num_local_experts", scale=config.number("route_scale")
        ),
        expert_width=read_width(config, config.key_of("moe_intermediate_size", "intermediate_size")),
        activation=CappedSwiGLU(alpha=config.number("mlp_gate_softcap"), limit=config.number("mlp_up_softcap")),
    )
    is_local = read_local_layers(config)
    size, num_taps = config.integer("n_layers_per_attn_res_block"), read_num_taps(config)
    num_sums = -(-len(is_local) // size) + 1
    if num_sums > MAX_SUMS:
        raise config.wrong("n_layers_per_attn_res_block", f"gives more than {MAX_SUMS - 1} blocks of layers")
    convolution = Block(UpdateConvolutionSpec(num_taps=num_taps, factor=(num_taps + 1) ** -0.5), has_norm=False)
    layers = []
    for index, has_window in enumerate(is_local):
        before = SumsNormSpec(
            num_sums=-(-index // size) + 1,
            names=() if has_window else ("q", "k", "v"),
            follows_embedding=index == 0,
        )
        between = SumsNormSpec(num_sums=index // size + 2, begins_sum=index % size == 0)
        attention = Block(_read_attention(config, num_taps, has_window), norm=before)
        layers.append(Layer((attention, convolution, Block(moe, norm=between), convolution)))
    model = read_decoder(config, layers)
    cap = config.number("final_logit_softcapping")
    return dataclasses.replace(model, stream=SumsStream(width=num_sums), logits_cap=cap)


def _read_attention(config: ConfigValues, num_taps: int, has_window: bool) -> AttentionSpec:
    attention = read_attention(config, is_local=has_window)
    assert attention.relative is not None
    num_terms = num_taps + 1 if has_window else 2 * num_taps + 1
    return dataclasses.replace(
        attention,
        relative=dataclasses.replace(attention.relative, length_limit=config.number("rel_l2_clip_threshold")),
        length_limit=config.number("qk_l2_clip_threshold"),
        normalizes_values=True,
        taps=TapsSpec(num_taps=num_taps, factor=1.0 / math.sqrt(num_terms), has_token_taps=not has_window),
        has_token_sinks=True,
        has_own_inputs=not has_window,
        has_gate=True,
        gate_name="gate_proj",
    )


INKLING2 = inside_other_model(
    Family(
        name="Inkling 2",
        models="Inkling-2-Small",
        architecture="Inkling2ForConditionalGeneration",
        model_type="inkling2_text",
        other_architectures=("Inkling2ForCausalLM",),
        read=read,
        wrapped=((r"^model\.llm\.unembed\.", "lm_head."), (r"^model\.llm\.", "model.")),
        names=(
            *NAMES,
            (r"^model\.attn_res\.attn_queries\.([^.]+)$", r"model.layers.\1+.attention_input.query"),
            (r"^model\.attn_res\.mlp_queries\.([^.]+)$", r"model.layers.\1.mlp_input.query"),
            (r"^model\.(?:attn_res\.output_query|final_input\.query)$", "model.norm.query"),
            (r"\.attention_input\.query$", ".input_layernorm.query"),
            (r"\.mlp_input\.query$", ".post_attention_layernorm.query"),
            (r"\.([qkv])_input_(?:layer)?norm\.", r".input_layernorm.\1."),
            (r"\.gate_attn\.", ".gate_proj."),
            (r"\.attn_sink_proj\.", ".sink_proj."),
            (r"\.q_l2_clip\.", ".q_norm."),
            (r"\.rel_l2_clip\.", ".r_norm."),
            (r"_sconv\.static_w$", "_sconv.static_weight"),
            (r"_sconv\.weight_proj$", "_sconv.weight_proj.weight"),
            (r"\.mlp\.experts\.w2_weight$", ".mlp.experts.in_turns.down_proj"),
        ),
    )
)
