"""FlexOlmo (arXiv 2507.07024): OLMoE with norms on the outputs of networks instead of their inputs."""

from __future__ import annotations

import dataclasses

from moeserve.models.config_values import ConfigValues
from moeserve.models.families import olmoe
from moeserve.models.family import Family
from moeserve.models.model_config import Block, Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    config.refuse("clip_qkv")
    model = olmoe.read(config)
    layers = (
        Layer(tuple(Block(each, has_norm=False, is_normed=True) for each in layer.networks)) for layer in model.layers
    )
    return dataclasses.replace(model, layers=tuple(layers))


FLEX_OLMO = Family(
    name="FlexOlmo",
    models="FlexOlmo-7x7B-1T",
    architecture="FlexOlmoForCausalLM",
    model_type="flex_olmo",
    read=read,
    names=(
        (r"\.post_attention_layernorm\.", ".self_attn_output_norm."),
        (r"\.post_feedforward_layernorm\.", ".mlp_output_norm."),
    ),
)
