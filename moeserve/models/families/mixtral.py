"""Mixtral (arXiv 2401.04088): grouped-query attention and a mixture of experts in every layer."""

from __future__ import annotations

from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import BLOCK_SPARSE, Family
from moeserve.models.fields import read_attention, read_model, read_num_experts, read_num_layers, read_width
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.routing.interface import RouterSpec


def read(config: ConfigValues) -> ModelSpec:
    num_experts, top_k = read_num_experts(config, "num_local_experts")
    attention = read_attention(config, window=config.optional_integer("sliding_window"))
    layer = Layer.of(
        attention,
        MoESpec(
            router=RouterSpec(num_experts=num_experts, top_k=top_k, is_normalized=True),
            expert_width=read_width(config, "intermediate_size"),
        ),
    )
    return read_model(config, [layer] * read_num_layers(config))


MIXTRAL = Family(
    name="Mixtral",
    models="Mixtral-8x7B, 8x22B",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    read=read,
    names=BLOCK_SPARSE,
)
