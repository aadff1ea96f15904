"""Architectures of GGUF whose layers differ in windows, heads and rotary settings."""

from __future__ import annotations

from typing import Any

from moeserve.models.config_values import ConfigValues
from moeserve.models.gguf.architecture import SIGMOID, File, Part
from moeserve.models.gguf.file import as_written


def feed_forward_types(file: File) -> list[str]:
    return ["sparse" if has else "dense" for has in file.layers_with("ffn_gate_inp.weight")]


def _has_window(file: File) -> list[bool]:
    """Return a flag for each layer: True if the layer's attention has a window."""
    key, num_layers = "attention.sliding_window_pattern", file.config["num_hidden_layers"]
    flags = file.values.values.get(key)
    if not isinstance(flags, list) or len(flags) < num_layers or not all(flag in (0, 1) for flag in flags):
        raise file.values.wrong(key, f"must be a flag for each of the {num_layers} layers")
    return [bool(flag) for flag in flags[:num_layers]]


def read_windows(file: File, full_fraction: float | None = None, fraction: float | None = None) -> dict[str, Any]:
    """Return the windows, and the rotary settings of layers with and without windows.

    Args:
        full_fraction, fraction: rotated fraction of a head in layers without and with windows; None: the file's value.
    """
    theta, usual = file.config["rope_theta"], file.config["partial_rotary_factor"]
    in_windows = as_written(file.values.number("rope.freq_base_swa", theta))
    dim = file.values.optional_integer("rope.dimension_count_swa")
    of_window = usual if dim is None else dim / file.values.integer("attention.key_length_swa", file.config["head_dim"])
    full = {"partial_rotary_factor": full_fraction or usual} | (file.config["rope_scaling"] or {"rope_type": "default"})
    return {
        "sliding_window": file.values.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if has else "full_attention" for has in _has_window(file)],
        "mlp_layer_types": feed_forward_types(file),
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": full | {"rope_theta": theta},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": in_windows,
                "partial_rotary_factor": fraction or of_window,
            },
        },
    }


def read_types(file: File) -> dict[str, Any]:
    """Return the windows. Only layers with a window are rotated, so there is one rotary setting."""
    found = read_windows(file)
    return {key: found[key] for key in ("sliding_window", "layer_types", "mlp_layer_types")}


def read_cohere2(file: File) -> dict[str, Any]:
    has_layer_norms = "attention.layer_norm_epsilon" in file.values.values
    return read_types(file) | {
        "prefix_dense_intermediate_size": file.width_of("ffn_gate.weight")
        or file.values.integer("feed_forward_length"),
        "norm_topk_prob": file.values.flag("expert_weights_norm", default=False),
        "expert_selection_fn": "sigmoid"
        if file.values.integer("expert_gating_func", SIGMOID) == SIGMOID
        else "softmax",
        **({"rms_norm_eps": None, "layer_norm_eps": file.config["rms_norm_eps"]} if has_layer_norms else {}),
    }


def read_gemma4(file: File) -> dict[str, Any]:
    heads, heads_in_windows = _sizes_by_window(file, "attention.head_count_kv")
    return read_windows(file) | {
        "global_head_dim": file.config["head_dim"],
        "head_dim": file.values.integer("attention.key_length_swa"),
        "num_global_key_value_heads": heads,
        "num_key_value_heads": heads_in_windows,
        "attention_k_eq_v": not all(file.layers_with("attn_v.weight")),
    }


def _sizes_by_window(file: File, key: str) -> tuple[int, int]:
    """Return the number under `key` of layers without windows, and of layers with windows."""
    of_layers = list(zip(file.sizes_of_layers(key), _has_window(file), strict=False))
    by_type = [{size for size, has in of_layers if has == is_windowed} for is_windowed in (False, True)]
    if any(len(numbers) > 1 for numbers in by_type) or not any(by_type):
        raise file.values.wrong(key, "differs between layers of the same type")
    full, windowed = (next(iter(numbers), None) for numbers in by_type)
    return full or windowed or 1, windowed or full or 1


def read_mimo(file: File) -> dict[str, Any]:
    heads, heads_in_windows = _sizes_by_window(file, "attention.head_count_kv")
    has_sinks = list(zip(file.layers_with("attn_sinks.weight"), _has_window(file), strict=True))
    return read_windows(file) | {
        "num_key_value_heads": heads,
        "swa_num_key_value_heads": heads_in_windows,
        "v_head_dim": file.values.integer("attention.value_length"),
        "attention_value_scale": as_written(file.values.number("attention.value_scale", 1.0)),
        "add_full_attention_sink_bias": (True, False) in has_sinks,
        "add_swa_attention_sink_bias": (True, True) in has_sinks,
    }


def read_step(file: File) -> dict[str, Any]:
    heads, heads_in_windows = _sizes_by_window(file, "attention.head_count")
    # llama.cpp's converter refuses other fractions, so files have no key for them.
    return read_windows(file, full_fraction=0.5, fraction=1.0) | {
        "num_attention_heads": heads,
        "num_sliding_attention_heads": heads_in_windows,
        # The lists go on with limits of layers for multi-token prediction, which the family's reader drops.
        **{
            name: [as_written(limit) if isinstance(limit, float) else limit for limit in limits]
            for name, key in (("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp"))
            if isinstance(limits := file.values.values.get(key), list)
        },
    }


def read_laguna(file: File) -> dict[str, Any]:
    num_heads = file.sizes_of_layers("attention.head_count")
    is_per_head = file.shapes.get("blk.0.attn_gate.weight", (0,))[0] == num_heads[0]
    has_windows = "attention.sliding_window" in file.values.values
    types = read_windows(file) if has_windows else {"mlp_layer_types": feed_forward_types(file)}
    return types | {
        "num_attention_heads_per_layer": num_heads,
        "gating": "per-head" if is_per_head else "per-element",
    }


def parts_with_output_norms(values: ConfigValues) -> dict[str, tuple[Part, ...]]:
    return {"post_attention_norm": (Part("attn_output_norm_of_stream"),)}
