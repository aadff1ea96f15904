"""Architectures of GGUF with recurrent states: state spaces, gated delta networks, short convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moeserve.models.config_values import ConfigValues
from moeserve.models.gguf.architecture import File, Part, rows_of_heads
from moeserve.models.gguf.file import as_written

_NETWORKS = ("full_attn", "linear_attn", "mlp")  # of MiniMax-01


def mixer_types(file: File, recurrent: str, attention: str) -> list[str]:
    """Return the type of each layer: `attention` if the layer has key-value heads, else `recurrent`."""
    return [attention if size else recurrent for size in file.sizes_of_layers("attention.head_count_kv")]


def read_granite_hybrid(file: File) -> dict[str, Any]:
    inner = file.values.integer("ssm.inner_size")
    is_rotated = file.values.flag("rope.scaling.finetuned", default=True)
    return {
        "mamba_d_head": inner // file.values.integer("ssm.time_step_rank"),
        "mamba_expand": inner // file.config["hidden_size"],
        "mamba_conv_bias": "ssm_conv1d.bias" in file.kinds,
        "position_embedding_type": "rope" if is_rotated else "nope",
        "layer_types": mixer_types(file, "mamba", "attention"),
    }


def read_lfm2(file: File) -> dict[str, Any]:
    return {
        "norm_eps": file.config["rms_norm_eps"],
        "layer_types": mixer_types(file, "conv", "full_attention"),
        "use_expert_bias": "exp_probs_b.bias" in file.kinds,
        "conv_bias": "shortconv.conv.bias" in file.kinds,
    }


def read_nemotron_h(file: File) -> dict[str, Any]:
    mixers = mixer_types(file, "mamba", "attention")
    widths = file.sizes_of_layers("feed_forward_length")
    return {
        "layer_norm_epsilon": file.config["rms_norm_eps"],
        "layers_block_type": ["moe" if width else mixer for width, mixer in zip(widths, mixers, strict=True)],
        "mamba_head_dim": file.values.integer("ssm.inner_size") // file.values.integer("ssm.time_step_rank"),
        "use_conv_bias": "ssm_conv1d.bias" in file.kinds,
    }


def _period(flags: list[bool], name: str) -> dict[str, Any]:
    """Return the period and the offset of flags that are True once in each period."""
    numbers = [index for index, flag in enumerate(flags) if flag] or [len(flags)]
    period = numbers[1] - numbers[0] if len(numbers) > 1 else len(flags) + 1
    return {f"{name}_layer_period": period, f"{name}_layer_offset": numbers[0]}


def read_jamba(file: File) -> dict[str, Any]:
    return {
        **_period([size > 0 for size in file.sizes_of_layers("attention.head_count_kv")], "attn"),
        **_period(file.layers_with("ffn_gate_inp.weight"), "expert"),
        "mamba_expand": file.values.integer("ssm.inner_size") // file.config["hidden_size"],
        "mamba_conv_bias": "ssm_conv1d.bias" in file.kinds,
    }


def jamba_parts(values: ConfigValues) -> dict[str, tuple[Part, ...]]:
    return {"ssm_out": (Part("ssm_out_proj"),)}


def read_minimax(file: File) -> dict[str, Any]:
    alpha = as_written(file.values.number("residual_scale"))
    return {
        "layer_types": ["full_attention" if has else "linear_attention" for has in file.layers_with("attn_q.weight")],
        # The converter refuses other factors of outputs than 1.
        **{f"{kind}_{part}_factor": value for kind in _NETWORKS for part, value in (("alpha", alpha), ("beta", 1.0))},
    }


def read_delta(file: File) -> dict[str, Any]:
    """Return the entries of config.json for gated delta networks."""
    num_heads = file.values.integer("ssm.time_step_rank")
    return {"linear_value_head_dim": file.values.integer("ssm.inner_size") // num_heads}


@dataclass(frozen=True)
class _DeltaSizes:
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def read(cls, values: ConfigValues) -> _DeltaSizes:
        num_heads = values.integer("ssm.time_step_rank")
        return cls(
            num_heads=num_heads,
            num_key_heads=values.integer("ssm.group_count"),
            key_dim=values.integer("ssm.state_size"),
            value_dim=values.integer("ssm.inner_size") // num_heads,
        )


def qwen3_next_parts(values: ConfigValues) -> dict[str, tuple[Part, ...]]:
    """Divide stored projections that each hold the rows of several projections, grouped by key head.

    All files store rates and decays in this way. Older files also store queries, keys, values and gates in this way.
    """
    sizes = _DeltaSizes.read(values)
    ratio = sizes.num_heads // sizes.num_key_heads
    heads = np.arange(sizes.num_key_heads)

    def rows_of(first: int, size: int, of_all: int) -> np.ndarray:
        return (heads[:, None] * of_all + first + np.arange(size)).reshape(-1)

    values_of_head = ratio * sizes.value_dim
    of_all = 2 * sizes.key_dim + 2 * values_of_head
    starts = (0, sizes.key_dim, 2 * sizes.key_dim)
    widths = (sizes.key_dim, sizes.key_dim, values_of_head)
    joined = np.concatenate([rows_of(first, size, of_all) for first, size in zip(starts, widths, strict=True)])
    gates = rows_of(of_all - values_of_head, values_of_head, of_all)
    return {
        "ssm_ba": (Part("ssm_beta", rows_of(0, ratio, 2 * ratio)), Part("ssm_alpha", rows_of(ratio, ratio, 2 * ratio))),
        "ssm_in": (Part("attn_qkv", joined), Part("attn_gate", gates)),
    }


def qwen3_5_parts(values: ConfigValues) -> dict[str, tuple[Part, ...]]:
    """Reorder value heads. Files store the first value head of all key heads, then the second of all, and so on."""
    sizes = _DeltaSizes.read(values)
    ratio = sizes.num_heads // sizes.num_key_heads
    heads = np.arange(sizes.num_heads).reshape(ratio, sizes.num_key_heads).T.reshape(-1)
    of_values = rows_of_heads(heads, sizes.value_dim)
    num_keys = 2 * sizes.num_key_heads * sizes.key_dim
    all_rows = np.concatenate([np.arange(num_keys), num_keys + of_values])
    orders = {"attn_qkv": all_rows, "ssm_conv1d": all_rows, "attn_gate": of_values}
    orders |= dict.fromkeys(("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"), heads)
    parts: dict[str, tuple[Part, ...]] = {kind: (Part(kind, order),) for kind, order in orders.items()}
    return parts | {"ssm_out": (Part("ssm_out", columns=of_values),)}
