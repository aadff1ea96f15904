"""The text part of ERNIE-4.5-VL: ERNIE-4.5, with additional experts for images, which text tokens never use."""

from __future__ import annotations

import dataclasses

from moeserve.models.config_values import ConfigValues
from moeserve.models.families.ernie4_5_moe import read_experts
from moeserve.models.family import Family, inside_other_model
from moeserve.models.fields import read_attention, read_listed_dense, read_model
from moeserve.models.model_config import Layer, ModelSpec

WIDTHS = "moe_intermediate_size"  # widths of the experts for text and of the experts for images


def read(config: ConfigValues) -> ModelSpec:
    widths = config.get(WIDTHS) or [1536, 512]
    is_list = isinstance(widths, list) and all(type(width) is int and 0 < width <= 2**20 for width in widths)
    if not is_list or len(widths) != 2:
        raise config.wrong(WIDTHS, "must list two widths, of the experts for text and of those for images")
    moe = read_experts(config, widths[0])
    moe = dataclasses.replace(moe, num_unused_experts=moe.router.num_experts)
    # Text has the same position along all axes of the rotary embedding.
    attention = read_attention(config, is_interleaved=True)
    return read_model(config, [Layer.of(attention, feed_forward) for feed_forward in read_listed_dense(config, moe)])


ERNIE4_5_VL_MOE = inside_other_model(
    Family(
        name="ERNIE-4.5-VL",
        architecture="Ernie4_5_VLMoeForConditionalGeneration",
        model_type="ernie4_5_vl_moe_text",
        read=read,
        wrapped=((r"^.*\.mlp\.(?:vision_moe\.|gate\.weight_1$)", "images."),),
        left_out=("images.", "resampler_model."),
        names=(
            (r"\.mlp\.gate\.weight$", ".mlp.gate.transposed"),
            (r"\.mlp\.text_moe\.", ".mlp."),
            (r"\.mlp\.(?:gate\.)?moe_statics\.", ".mlp.gate."),
        ),
    )
)
