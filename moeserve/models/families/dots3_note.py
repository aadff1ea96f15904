"""dots3-note's text part: latent attention with windows in some layers, and over selected positions in the others."""

from __future__ import annotations

import dataclasses

from moeserve.layers.dense.network import DenseSpec
from moeserve.layers.latent.attention import LatentAttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.families.deepseek_v32 import read_sparse_attention
from moeserve.models.family import Family, inside_other_model
from moeserve.models.fields import (
    read_corrected_router,
    read_hidden_size,
    read_latent_attention,
    read_listed_dense,
    read_model,
    read_num_layers,
    read_width,
)
from moeserve.models.model_config import DraftSpec, Layer, ModelSpec

SPARSE, FULL, WINDOW = LAYER_TYPES = ("indexed_attention", "full_attention", "sliding_attention")
# Sizes of layers with windows. Published configs have these names with a prefix.
SIZES = dict(num_attention_heads=64, q_lora_rank=1024, kv_lora_rank=1024, head_dim=256, qk_nope_head_dim=192)
SIZES |= dict(v_head_dim=128)


def read(config: ConfigValues) -> ModelSpec:
    width = read_width(config, config.key_of("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"))
    moe = MoESpec(
        router=read_corrected_router(config),
        expert_width=read_width(config, "moe_intermediate_size"),
        shared=SharedExpertsSpec(width=width * config.integer("n_shared_experts", high=2**10)),
    )
    types = _read_types(config)
    mixers = [_read_attention(config, index, name) for index, name in enumerate(types)]
    model = read_model(config, [Layer.of(*pair) for pair in zip(mixers, read_listed_dense(config, moe), strict=True)])
    if WINDOW not in types:
        return model
    # The config does not count the module for multi-token prediction, which has a window and no experts.
    layer = Layer.of(mixers[types.index(WINDOW)], DenseSpec(width=read_width(config, "intermediate_size")))
    return dataclasses.replace(model, draft=DraftSpec(layers=(layer,), has_embeddings=True))


def _read_types(config: ConfigValues) -> list[str]:
    num_layers, types = read_num_layers(config), config.values.get("layer_types")
    if types is None:
        has_windows = config.flag("use_sliding_window", default=True)
        types = [WINDOW if has_windows and layer > 1 and layer % 4 != 1 else SPARSE for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not all(name in LAYER_TYPES for name in types):
        raise config.wrong("layer_types", f"must list one of {LAYER_TYPES} for each of the {num_layers} layers")
    if config.values.get("use_dsa") is None and "per_layer_config" in config.values:
        return types
    dense = SPARSE if config.flag("use_dsa", default=True) else FULL  # published configs give both kinds the same name
    return [name if name == WINDOW else dense for name in types]


def _read_attention(config: ConfigValues, index: int, layer_type: str) -> LatentAttentionSpec:
    own, values = config.object("per_layer_config"), {}
    if own is not None:  # transformers 5 writes an object of the values that differ from those of the model
        found = own.object(str(index))
        values = {} if found is None else dict(found.values)
    elif layer_type == WINDOW:
        values = {key: config.integer(f"swa_{key}", size) for key, size in SIZES.items()}
        rotated = values["head_dim"] - values["qk_nope_head_dim"]
        values["qk_rope_head_dim"] = config.integer("swa_qk_rope_head_dim", rotated)
    if layer_type == WINDOW and all(config.values.get(key) is None for key in ("rope_parameters", "rope_scaling")):
        values["rope_theta"] = config.number("swa_rope_theta", 50_000.0)
    rotary = config.of_layer_type(layer_type)
    layer = rotary.replaced(rotary.values | values)
    if layer_type == SPARSE:
        attention = read_sparse_attention(layer, indexer_is_interleaved=True)[True]
    else:
        attention = read_latent_attention(layer, is_interleaved=True)
    if attention.query_rank is None:
        raise layer.wrong("q_lora_rank", "must be set")
    hidden_size, epsilon = read_hidden_size(config), config.number("rms_norm_eps")
    window = config.key_of("sliding_window", "sliding_window_size")
    return dataclasses.replace(
        attention,
        window=config.integer(window, 512) if layer_type == WINDOW else None,
        score_factor=(hidden_size / attention.query_rank) ** 0.5,
        latent_factor=(hidden_size / attention.latent_size) ** 0.5,
        query_norm_epsilon=epsilon,
        latent_norm_epsilon=epsilon,
        normalizes_rotated_key=True,
        has_head_gates=True,
    )


DOTS3_NOTE = inside_other_model(
    Family(
        name="dots3-note",
        architecture="Dots3NoteForConditionalGeneration",
        other_architectures=("Dots3NoteForCausalLM",),
        model_type="dots3_note_text",
        read=read,
        left_out=("audio_encoder.", "audio_adapter."),
        names=((r"^model\.mtp\.embed_tokens\.", "draft.0.embedding."), (r"^model\.mtp\.", "draft.0.copy.")),
    )
)
