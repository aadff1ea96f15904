"""The text part of DeepSeek-OCR 2: the experts of DeepSeek-V2, with grouped-query attention."""

from __future__ import annotations

from moeserve.layers.moe.layer import MoESpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.families.deepseek import read_v2_router
from moeserve.models.family import Family, inside_other_model
from moeserve.models.fields import read_attention, read_listed_dense, read_model, read_shared_experts, read_width
from moeserve.models.model_config import Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    config.require("mlp_bias", False)
    expert_width = read_width(config, "moe_intermediate_size")
    moe = MoESpec(
        router=read_v2_router(config), expert_width=expert_width, shared=read_shared_experts(config, expert_width)
    )
    has_bias = config.flag("attention_bias", default=False)
    # As in transformers, head_dim in the config is ignored: heads divide the hidden size evenly.
    values = {key: value for key, value in config.values.items() if key != "head_dim"}
    attention = read_attention(config.replaced(values), has_bias=has_bias, has_output_bias=has_bias)
    return read_model(config, [Layer.of(attention, feed_forward) for feed_forward in read_listed_dense(config, moe)])


DEEPSEEK_OCR2 = inside_other_model(
    Family(
        name="DeepSeek-OCR 2",
        models="DeepSeek-OCR and DeepSeek-OCR 2",
        architecture="DeepseekOcr2ForConditionalGeneration",
        model_type="deepseek_ocr2_text",
        other_architectures=("DeepseekOCR2ForCausalLM", "DeepseekOCRForCausalLM"),  # names in published checkpoints
        read=read,
        left_out=("sam_model.", "qwen2_model.", "view_sep"),
    )
)
