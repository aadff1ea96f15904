"""Model types with experts in transformers, compared with the families: a new version shows what is new."""

from __future__ import annotations

import dataclasses

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moeserve.models.registry import FAMILIES_BY_TYPE

NUMBERS_OF_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config"}
# Encoders, models that read with an encoder or that do not predict the next token of a text
OTHER_MODELS = {
    *("diffusion_gemma_text", "dots3_note_vision_encoder", "nllb-moe", "openai_privacy_filter"),
    *("qwen3_omni_moe_talker_text", "switch_transformers", "vitpose_backbone"),
}
NOT_SERVED = {
    "doge",
    "unlimited_ocr_text",
}


def test_every_model_type_with_experts_is_served_or_named_here() -> None:
    with_experts = {
        name
        for name, config in CONFIG_MAPPING.items()
        if NUMBERS_OF_EXPERTS & {*(field.name for field in dataclasses.fields(config)), *config.attribute_map}
    }
    assert with_experts - FAMILIES_BY_TYPE.keys() == OTHER_MODELS | NOT_SERVED
