"""K-EXAONE: windows in most layers, no rotary embedding in the other layers, and DeepSeek-V3's routing."""

from __future__ import annotations

import dataclasses

from moeserve.layers.dense.network import DenseSpec
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.layers.rotary import NO_ROTARY
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import ONE_MODULE, Family
from moeserve.models.fields import (
    read_attention,
    read_corrected_router,
    read_listed_dense,
    read_model,
    read_module_window,
    read_num_layers,
    read_width,
    read_windows,
    with_draft_layer,
)
from moeserve.models.model_config import Layer, ModelSpec


def read(config: ConfigValues) -> ModelSpec:
    expert_width = read_width(config, "moe_intermediate_size")
    num_shared = config.integer("num_shared_experts", 1, high=2**10)
    moe = MoESpec(
        router=read_corrected_router(config, "num_experts"),
        expert_width=expert_width,
        shared=SharedExpertsSpec(width=num_shared * expert_width),
    )
    rotated = read_attention(config, normalized="head", default_fraction=1.0)
    windows = _read_windows(config)
    # If the config has no window size, all layers have a rotary embedding.
    full = rotated if config.values.get("sliding_window", 0) is None else dataclasses.replace(rotated, rotary=NO_ROTARY)
    layers = [
        Layer.of(full if window is None else dataclasses.replace(rotated, window=window), feed_forward)
        for window, feed_forward in zip(windows, read_listed_dense(config, moe), strict=True)
    ]
    model = read_model(config, layers)
    if not model.num_skipped_layers:
        return model
    window = read_module_window(config, default=windows[0] is not None)
    attention = full if window is None else dataclasses.replace(rotated, window=window)
    dense = DenseSpec(width=read_width(config, "intermediate_size"))
    return with_draft_layer(model, Layer.of(attention, dense), count=1)


def _read_windows(config: ConfigValues) -> list[int | None]:
    """Return the window of each layer, None for full attention. The config lists the layers or has a period."""
    num_layers = read_num_layers(config)
    if config.get("layer_types") is not None or config.values.get("sliding_window", 0) is None:
        return read_windows(config, default=[False] * num_layers)
    pattern = config.values.get("sliding_window_pattern")
    if isinstance(pattern, str):  # such as "LLLG": a letter for each layer of a period, where L stands for local
        if not pattern or set(pattern) - {"L", "G"}:
            raise config.wrong("sliding_window_pattern", "must be a number, or a text of L and G")
        return read_windows(config, default=[pattern[index % len(pattern)] == "L" for index in range(num_layers)])
    period = config.integer("sliding_window_pattern", 4)
    return read_windows(config, default=[(index + 1) % period != 0 for index in range(num_layers)])


EXAONE_MOE = Family(
    name="K-EXAONE",
    models="K-EXAONE-236B-A23B",
    architecture="ExaoneMoeForCausalLM",
    other_architectures=("ExaoneMoEForCausalLM",),  # name in published checkpoints
    model_type="exaone_moe",
    read=read,
    names=((r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"), *ONE_MODULE),
)
