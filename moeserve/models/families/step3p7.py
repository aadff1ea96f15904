"""Step-3.7: windowed layers with other heads and frequencies than full ones; gated heads; some clamped activations."""

from __future__ import annotations

import dataclasses
from typing import Any

from moeserve.layers.dense.network import DenseSpec
from moeserve.layers.grouped_query.attention import AttentionSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.fields import (
    LAYER_TYPES,
    read_attention,
    read_model,
    read_num_layers,
    read_router_without_groups,
    read_width,
    with_draft_layer,
)
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.ops.rows.activations import Activation, LimitedSwiGLU, SwiGLU


def read(config: ConfigValues) -> ModelSpec:
    config = _with_usual_names(config)
    config.require("attention_bias", False)
    config.require("mlp_bias", False)
    config.require("use_bidirectional_attention", False)
    num_layers = read_num_layers(config)
    has_window = config.flags_of_layers("layer_types", LAYER_TYPES, num_layers) or [False] * num_layers
    attentions = {is_windowed: _read_attention(config, is_windowed) for is_windowed in set(has_window)}
    is_sparse = _read_sparse_layers(config, num_layers)
    limits = _read_limits(config, "swiglu_limits", num_layers)
    limits_of_shared = _read_limits(config, "swiglu_limits_shared", num_layers)
    layers = [
        Layer.of(
            attentions[has_window[index]],
            _read_experts(config, limits[index], limits_of_shared[index])
            if is_sparse[index]
            else DenseSpec(width=read_width(config, "intermediate_size"), activation=limits_of_shared[index]),
        )
        for index in range(num_layers)
    ]
    model = read_model(config, layers)
    types, kinds = config.values.get("mtp_layer_types"), config.values.get("mtp_mlp_layer_types")
    of_module = types[0] == LAYER_TYPES[1] if isinstance(types, list) and types else False
    if not model.num_skipped_layers or (isinstance(kinds, list) and "sparse" in kinds):
        return model  # no published model has MTP modules with experts
    dense = DenseSpec(width=read_width(config, "intermediate_size"))
    layer = Layer.of(_read_attention(config, of_module), dense)
    return with_draft_layer(model, layer, reads_normed=False, has_heads=True)


def _with_usual_names(config: ConfigValues) -> ConfigValues:
    """Return the config with transformers' names, and with lists that have no entries for prediction layers."""
    values: dict[str, Any] = dict(config.values)
    renamed = {
        "num_attention_groups": "num_key_value_heads",
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "share_expert_dim",
    }
    for old, new in renamed.items():
        if old in values:
            values.setdefault(new, values.pop(old))
    if (of_windows := config.object("attention_other_setting")) is not None:
        values.setdefault("num_sliding_attention_heads", of_windows.values.get("num_attention_heads"))
    num_layers = read_num_layers(config)
    num_padded = num_layers + (config.optional_integer("num_nextn_predict_layers", low=0, high=2**6) or 0)
    for key, value in list(values.items()):
        if isinstance(value, list) and len(value) == num_padded:
            values[key] = value[:num_layers]
            if key in ("layer_types", "mlp_layer_types"):
                values.setdefault(f"mtp_{key}", value[num_layers:])
    if not isinstance(values.get("partial_rotary_factors") or [], list):
        raise config.wrong("partial_rotary_factors", "must be a list")
    _name_rotary_settings(values, num_layers)
    return config.replaced(values)


def _name_rotary_settings(values: dict[str, Any], num_layers: int) -> None:
    """Replace lists of one value per layer by one value per layer type, that of the type's first layer."""
    thetas, fractions = values.get("rope_theta", 1e4), values.get("partial_rotary_factors")
    types = values.get("layer_types") or ["full_attention"] * num_layers
    if isinstance(values.get("rope_parameters"), dict) or not isinstance(types, list):
        return
    if not isinstance(thetas, list):
        thetas = [thetas] * num_layers
    settings: dict[str, Any] = {}
    for index, layer_type in enumerate(types[: len(thetas)]):
        fraction = fractions[index] if isinstance(fractions, list) and index < len(fractions) else 1.0
        of_layer = dict(rope_type="default", rope_theta=thetas[index], partial_rotary_factor=fraction)
        settings.setdefault(str(layer_type), of_layer)
    if isinstance(values.get("rope_scaling"), dict) and "full_attention" in settings:
        settings["full_attention"] |= values["rope_scaling"]
    values["rope_parameters"] = settings


def _read_attention(config: ConfigValues, is_windowed: bool) -> AttentionSpec:
    own = config.of_layer_type(LAYER_TYPES[is_windowed])
    if is_windowed and config.values.get("num_sliding_attention_heads") is not None:
        num_heads = config.integer("num_sliding_attention_heads", high=2**14)
        own = own.replaced(own.values | {"num_attention_heads": num_heads})
    attention = read_attention(
        own,
        default_fraction=1.0,
        normalized="head",
        has_head_gates=True,
        window=config.integer("sliding_window") if is_windowed else None,
    )
    scalar = config.optional_number("query_pre_attn_scalar")
    if scalar is not None and scalar != attention.head_dim:
        attention = dataclasses.replace(attention, scale=scalar**-0.5)
    return attention


def _read_experts(config: ConfigValues, activation: Activation, of_shared: Activation) -> MoESpec:
    return MoESpec(
        router=read_router_without_groups(
            config, "n_routed_experts", "num_local_experts", scale=config.number("moe_router_scaling_factor", 1.0)
        ),
        expert_width=read_width(config, "moe_intermediate_size"),
        activation=activation,
        shared=SharedExpertsSpec(width=read_width(config, "share_expert_dim"), activation=of_shared),
    )


def _read_sparse_layers(config: ConfigValues, num_layers: int) -> list[bool]:
    """Return a flag for each layer: True if it has experts."""
    listed = config.flags_of_layers("mlp_layer_types", ("dense", "sparse"), num_layers)
    if listed is not None:
        return listed
    numbers = config.values.get("moe_layers_enum")
    if numbers is None:
        return [index >= 3 for index in range(num_layers)]
    items = numbers.split(",") if isinstance(numbers, str) else numbers
    if not isinstance(items, list) or not all(str(item).strip().isdigit() for item in items):
        raise config.wrong("moe_layers_enum", "must list the numbers of layers")
    return [index in {int(item) for item in items} for index in range(num_layers)]


def _read_limits(config: ConfigValues, key: str, num_layers: int) -> list[Activation]:
    """Return the activation of each layer. A limit of null or 0 means no limit."""
    limits = config.values.get(key) or [None] * num_layers
    if not isinstance(limits, list) or len(limits) != num_layers:
        raise config.wrong(key, f"must list a limit for each of the {num_layers} layers")
    if not all(limit is None or (type(limit) in (int, float) and limit >= 0) for limit in limits):
        raise config.wrong(key, "must list numbers of at least 0, or null")
    return [LimitedSwiGLU(float(limit)) if limit else SwiGLU() for limit in limits]


STEP3P7 = Family(
    name="Step-3.7",
    models="Step-3.7-Flash, Step-3.5-Flash",
    architecture="Step3p7ForConditionalGeneration",
    other_architectures=("Step3p5ForCausalLM",),
    model_type="step3p5",
    read=read,
    wrapped=((r"^model\.language_model\.", "model."),),
    left_out=("vision_model.", "vit_large_projector.", "multi_modal_projector."),
    names=(
        (r"^model\.layers\.draft(\d+)\.transformer\.", r"draft.\1."),
        (r"^(?:model\.layers\.draft|draft\.)(\d+)\.shared_head\.(?:output|head)\.", r"draft.\1.head."),
        (r"\.moe\.router_bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.moe\.gate\.", ".mlp.gate."),
        (r"\.moe\.", ".mlp.experts."),
        (r"\.share_expert\.", ".mlp.shared_experts."),
    ),
    norm_offset=1.0,
)
