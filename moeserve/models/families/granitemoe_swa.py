"""Granite MoE with sliding windows, attention sinks, and rotary frequencies that may differ between layers."""

from __future__ import annotations

import dataclasses

from moeserve.layers.grouped_query.attention import AttentionSpec
from moeserve.layers.rotary import NO_ROTARY, RotarySpec
from moeserve.models.config_values import ConfigValues
from moeserve.models.families.granitemoe import NAMES, read_with_shared
from moeserve.models.family import Family
from moeserve.models.fields import read_windows
from moeserve.models.model_config import Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    model = read_with_shared(config, has_sinks=True)
    windows = read_windows(config, default=[index % 4 != 0 for index in range(len(model.layers))])
    layers = []
    for number, (layer, window) in enumerate(zip(model.layers, windows, strict=True)):
        attention, moe = layer.networks
        assert isinstance(attention, AttentionSpec)
        rotary = _rotary_of_layer(config, attention.rotary, number, len(windows))
        layers.append(Layer.of(dataclasses.replace(attention, window=window, rotary=rotary), moe))
    return dataclasses.replace(model, layers=tuple(layers))


def _rotary_of_layer(config: ConfigValues, of_model: RotarySpec, number: int, num_layers: int) -> RotarySpec:
    """Return a layer's rotary embedding. The config may list a theta for each layer, 0 for no rotary embedding."""
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        return of_model
    if not isinstance(thetas, list) or len(thetas) != num_layers:
        raise config.wrong("layer_rope_theta", f"must list a number for each of the {num_layers} layers")
    theta = thetas[number]
    if type(theta) not in (int, float) or not (theta == 0 or 1 < theta < 2**60):
        raise config.wrong("layer_rope_theta", "must list numbers above 1, or 0 for layers without rotary embedding")
    return dataclasses.replace(of_model, theta=float(theta)) if theta else NO_ROTARY


GRANITE_MOE_SWA = Family(
    name="Granite MoE with windows",
    models="Granite MoE with sliding windows",
    architecture="GraniteMoeSWAForCausalLM",
    model_type="granitemoe_swa",
    read=read,
    names=NAMES,
)
