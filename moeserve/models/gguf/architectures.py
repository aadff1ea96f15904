"""Architectures of GGUF: how metadata become a config.json, and how tensors with other rows become the model's.

A family's reader checks the values of the config.json. Keys of metadata: the gguf package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moeserve.models.config_values import ConfigValues
from moeserve.models.gguf.file import as_written

MAX_ROWS = 2**24  # maximum rows of a projection whose rows are reordered

_SIGMOID = 2  # GGUF's number for the sigmoid gating function

# By key of config.json: the key of the metadata without `<architecture>.`, with a default if files may lack it.
Keys = Mapping[str, str | tuple[str, Any]]


@dataclass(frozen=True)
class Part:
    """A tensor of the model that is a part of one in the file."""

    name: str  # in GGUF's scheme, without the ending `.weight` or `.bias`
    rows: np.ndarray | None = None  # numbers of stored rows, in the model's order; None: all
    columns: np.ndarray | None = None


@dataclass(frozen=True)
class File:
    """Facts of a GGUF file that an architecture is read from."""

    values: ConfigValues  # this architecture's metadata, keyed without the `<architecture>.` prefix
    names: frozenset[str]  # of the tensors
    kinds: frozenset[str]  # names of the tensors, without the numbers of layers
    config: dict[str, Any]  # the entries of config.json that are read in the same way for all architectures

    def layers_with(self, kind: str) -> list[bool]:
        """Return a flag for each decoder layer: True if it has a tensor of this name."""
        return [f"blk.{layer}.{kind}" in self.names for layer in range(self.config["num_hidden_layers"])]

    def sizes_of_layers(self, key: str) -> list[int]:
        """Return the number of each layer. The metadata have one number for all layers, or a list."""
        value, num_layers = self.values.values.get(key), self.values.integer("block_count", high=2**12)
        numbers: list[Any] = value if isinstance(value, list) else [value] * num_layers
        if len(numbers) < num_layers or not all(type(number) is int and number >= 0 for number in numbers):
            raise self.values.wrong(key, f"must be a number, or a number for each of the {num_layers} layers")
        return numbers


def numbers_of_layers(values: ConfigValues, key: str, default: int) -> list[int]:
    """Return the numbers under a key: those of the layers if it is a list, otherwise the only number."""
    numbers = values.values.get(key, default)
    is_list = isinstance(numbers, list) and numbers and all(type(each) is int for each in numbers)
    return list(numbers) if is_list else [values.integer(key, default)]


def _nothing(file: File) -> dict[str, Any]:
    return {}


def _as_stored(values: ConfigValues) -> dict[str, tuple[Part, ...]]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture, and how to translate its metadata and tensors to those of a Hugging Face model."""

    model: str  # the value of `architectures` in config.json
    keys: Keys
    constants: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[File], dict[str, Any]] = _nothing  # further entries of config.json, computed from the file
    parts: Callable[[ConfigValues], Mapping[str, tuple[Part, ...]]] = _as_stored  # by kind of stored tensor

    def config(self, file: File) -> dict[str, Any]:
        """Return the entries of config.json that this architecture defines."""
        found = {"architectures": [self.model], **self.constants}
        for name, key in self.keys.items():
            key, default = key if isinstance(key, tuple) else (key, None)
            value = file.values.values.get(key, default)
            if value is None and not isinstance(self.keys[name], tuple):
                raise file.values.missing(key)
            found[name] = as_written(value) if isinstance(value, float) else value
        return found | self.read(file)


def _paired_heads(values: ConfigValues) -> dict[str, tuple[Part, ...]]:
    """Reorder queries and keys. GGUF rotates pairs (0, 1), (2, 3), ... of a head; the model rotates i with i + half."""
    num_heads = values.integer("attention.head_count")
    num_kv_heads = max(numbers_of_layers(values, "attention.head_count_kv", num_heads))
    size = values.integer("attention.key_length", values.integer("embedding_length") // num_heads)
    if size % 2 or max(num_heads, num_kv_heads) * size > MAX_ROWS:
        raise values.wrong("attention.key_length", f"must be even, and have at most {MAX_ROWS} rows with all heads")
    order = np.arange(size).reshape(-1, 2).T.reshape(-1)
    return {
        kind: (Part(kind, _rows_of_heads(np.arange(num), size, order)),)
        for kind, num in (("attn_q", num_heads), ("attn_k", num_kv_heads))
    }


def _rows_of_heads(heads: np.ndarray, size: int, order: np.ndarray | None = None) -> np.ndarray:
    """Return the row numbers of heads that have `size` rows each. `order` reorders the rows within each head."""
    return (heads[:, None] * size + (np.arange(size) if order is None else order)).reshape(-1)


def _read_latent(file: File) -> dict[str, Any]:
    """Read the sizes of latent attention."""
    values = file.values
    rotary = values.integer("rope.dimension_count")
    # Files written before 2025-04 have no `*_mla` keys; there, `key_length` and `value_length` are the sizes of a head.
    key_size = values.integer("attention.key_length_mla", values.values.get("attention.key_length"))
    value_size = values.integer("attention.value_length_mla", values.values.get("attention.value_length"))
    return {
        "kv_lora_rank": values.integer("attention.kv_lora_rank"),
        "q_lora_rank": values.integer("attention.q_lora_rank", 0, low=0) or None,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key_size - rotary,
        "v_head_dim": value_size,
        # These files count the latent as one key-value head, but in the model each head has its own keys and values.
        "num_key_value_heads": values.integer("attention.head_count"),
        "head_dim": None,
    }


def _read_deepseek(file: File) -> dict[str, Any]:
    is_v3 = file.values.integer("expert_gating_func", 1) == _SIGMOID
    num_groups = file.values.integer("expert_group_count", 1)
    return _read_latent(file) | {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "topk_method": "noaux_tc" if is_v3 else "group_limited_greedy" if num_groups > 1 else "greedy",
    }


def _read_glm5(file: File) -> dict[str, Any]:
    has_indexer = file.layers_with("indexer.attn_k.weight")
    return _read_latent(file) | {"indexer_types": ["full" if has else "shared" for has in has_indexer]}


def _read_mistral4(file: File) -> dict[str, Any]:
    scale = file.values.optional_number("attention.temperature_scale")
    settings = dict(file.config["rope_scaling"] or {})
    if scale is not None:
        settings["llama_4_scaling_beta"] = as_written(scale)
        settings.setdefault(
            "original_max_position_embeddings", file.values.integer("rope.scaling.original_context_length")
        )
    return _read_latent(file) | {"rope_scaling": settings or None}


def _read_gpt_oss(file: File) -> dict[str, Any]:
    settings = file.config["rope_scaling"]
    return {"rope_scaling": settings and settings | {"truncate": False}}


def _read_granite_hybrid(file: File) -> dict[str, Any]:
    inner = file.values.integer("ssm.inner_size")
    is_rotated = file.values.flag("rope.scaling.finetuned", default=True)
    return {
        "mamba_d_head": inner // file.values.integer("ssm.time_step_rank"),
        "mamba_expand": inner // file.config["hidden_size"],
        "mamba_conv_bias": "ssm_conv1d.bias" in file.kinds,
        "position_embedding_type": "rope" if is_rotated else "nope",
        "layer_types": _layer_types(file, "mamba", "attention"),
    }


def _layer_types(file: File, recurrent: str, attention: str) -> list[str]:
    """Return the types of the layers. Those with a state have no heads of keys."""
    return [attention if size else recurrent for size in file.sizes_of_layers("attention.head_count_kv")]


def _read_lfm2(file: File) -> dict[str, Any]:
    return {
        "norm_eps": file.config["rms_norm_eps"],
        "layer_types": _layer_types(file, "conv", "full_attention"),
        "use_expert_bias": "exp_probs_b.bias" in file.kinds,
        "conv_bias": "shortconv.conv.bias" in file.kinds,
    }


def _read_phimoe(file: File) -> dict[str, Any]:
    return {
        "router_jitter_noise": 0.01,  # of the published model: the file has no key for it
        "sliding_window": file.values.integer("attention.sliding_window", 0, low=0) or None,
        "lm_head_bias": "output.bias" in file.kinds,
    }


def _read_nemotron_h(file: File) -> dict[str, Any]:
    mixers = _layer_types(file, "mamba", "attention")
    widths = file.sizes_of_layers("feed_forward_length")
    return {
        "layer_norm_epsilon": file.config["rms_norm_eps"],
        "layers_block_type": ["moe" if width else mixer for width, mixer in zip(widths, mixers, strict=True)],
        "mamba_head_dim": file.values.integer("ssm.inner_size") // file.values.integer("ssm.time_step_rank"),
        "use_conv_bias": "ssm_conv1d.bias" in file.kinds,
    }


def _read_llama4(file: File) -> dict[str, Any]:
    # The file has no keys for these. Of the two published models, the one with 128 experts has no norms.
    return {"use_qk_norm": file.values.integer("expert_count") != 128, "attention_chunk_size": 8192}


def _read_kimi_linear(file: File) -> dict[str, Any]:
    return _read_latent(file) | {
        "linear_num_heads": file.values.integer("attention.head_count"),
        "layer_types": _layer_types(file, "linear_attention", "full_attention"),
        "model_max_length": file.config["max_position_embeddings"],
    }


def _read_delta(file: File) -> dict[str, Any]:
    """Read gated delta networks."""
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


def _qwen3_next_parts(values: ConfigValues) -> dict[str, tuple[Part, ...]]:
    """Divide the projections that hold the rows of several projections, grouped by key head.

    All files store rates and decays in this way; older files also queries, keys, values and gates.
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


def _qwen3_5_parts(values: ConfigValues) -> dict[str, tuple[Part, ...]]:
    """Reorder value heads. Files store the first value head of every key head, then the second ones, and so on."""
    sizes = _DeltaSizes.read(values)
    ratio = sizes.num_heads // sizes.num_key_heads
    heads = np.arange(sizes.num_heads).reshape(ratio, sizes.num_key_heads).T.reshape(-1)
    of_values = _rows_of_heads(heads, sizes.value_dim)
    num_keys = 2 * sizes.num_key_heads * sizes.key_dim
    all_rows = np.concatenate([np.arange(num_keys), num_keys + of_values])
    orders = {"attn_qkv": all_rows, "ssm_conv1d": all_rows, "attn_gate": of_values}
    orders |= dict.fromkeys(("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"), heads)
    parts: dict[str, tuple[Part, ...]] = {kind: (Part(kind, order),) for kind, order in orders.items()}
    return parts | {"ssm_out": (Part("ssm_out", columns=of_values),)}


_DENSE: Keys = {"intermediate_size": "feed_forward_length"}
_EXPERTS: Keys = {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"}
_LOCAL_EXPERTS: Keys = {**_DENSE, "num_local_experts": "expert_count"}
_DEEPSEEK_EXPERTS: Keys = {
    **_DENSE,
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_routed_experts": "expert_count",
    "n_shared_experts": ("expert_shared_count", 0),
    "first_k_dense_replace": ("leading_dense_block_count", 0),
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
    "norm_topk_prob": ("expert_weights_norm", False),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
}
_INDEXED: Keys = {
    **_DEEPSEEK_EXPERTS,
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}
_QWEN: Keys = {
    **_EXPERTS,
    "intermediate_size": ("feed_forward_length", None),
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length", 0),
}
_QWEN_DELTA: Keys = {
    **_QWEN,
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "full_attention_interval": ("full_attention_interval", 4),
}
_GRANITE: Keys = {
    **_LOCAL_EXPERTS,
    "attention_multiplier": ("attention.scale", 1.0),
    "embedding_multiplier": ("embedding_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
    "logits_scaling": ("logit_scale", 1.0),
    "shared_intermediate_size": ("expert_shared_feed_forward_length", 0),
}
_GRANITE_MAMBA: Keys = {
    **_GRANITE,
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
}
_NEMOTRON_H: Keys = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_latent_size": ("moe_latent_size", None),
    "n_routed_experts": "expert_count",
    "n_shared_experts": ("expert_shared_count", 1),
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
    "norm_topk_prob": ("expert_weights_norm", True),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
    "mamba_num_heads": "ssm.time_step_rank",
    "n_groups": "ssm.group_count",
    "ssm_state_size": "ssm.state_size",
    "conv_kernel": "ssm.conv_kernel",
}
_ERNIE: Keys = {
    **_DENSE,
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_num_shared_experts": ("expert_shared_count", 0),
    "moe_layer_start_index": ("leading_dense_block_count", 0),
    "moe_layer_interval": ("interleave_moe_layer_step", 1),
}
_LLAMA4: Keys = {
    "num_local_experts": "expert_count",
    "intermediate_size": "expert_feed_forward_length",
    "intermediate_size_mlp": "feed_forward_length",
    "interleave_moe_layer_step": ("interleave_moe_layer_step", 1),
}
_LFM2: Keys = {
    **_DENSE,
    **_EXPERTS,
    "num_dense_layers": ("leading_dense_block_count", 0),
    "conv_L_cache": "shortconv.l_cache",
}
_KIMI_LINEAR: Keys = {
    **_DENSE,
    **_EXPERTS,
    "num_experts_per_token": "expert_used_count",
    "num_shared_experts": ("expert_shared_count", 0),
    "first_k_dense_replace": ("leading_dense_block_count", 1),
    "num_expert_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
    "moe_renormalize": ("expert_weights_norm", True),
    "linear_head_dim": "kda.head_dim",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
}
_WITH_WINDOW: Keys = {**_LOCAL_EXPERTS, "sliding_window": ("attention.sliding_window", None)}
_OLMOE: Keys = {**_DENSE, "num_experts": "expert_count", "clip_qkv": ("attention.clamp_kqv", None)}
_HUNYUAN: Keys = {**_DENSE, **_EXPERTS, "moe_topk": "expert_used_count"}
_CORRECTED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}

ARCHITECTURES = {
    "llama": Architecture("MixtralForCausalLM", _WITH_WINDOW, parts=_paired_heads),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _QWEN, {"norm_topk_prob": False}),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _QWEN, {"norm_topk_prob": True}),
    "qwen3vlmoe": Architecture("Qwen3MoeForCausalLM", _QWEN, {"norm_topk_prob": True}),
    "qwen3next": Architecture("Qwen3NextForCausalLM", _QWEN_DELTA, read=_read_delta, parts=_qwen3_next_parts),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForConditionalGeneration", _QWEN_DELTA, read=_read_delta, parts=_qwen3_5_parts
    ),
    "deepseek2": Architecture("DeepseekV3ForCausalLM", _DEEPSEEK_EXPERTS, read=_read_deepseek),
    "mistral4": Architecture("Mistral4ForCausalLM", _DEEPSEEK_EXPERTS, {"model_type": "mistral4"}, _read_mistral4),
    "glm4moe": Architecture("Glm4MoeForCausalLM", _DEEPSEEK_EXPERTS, _CORRECTED),
    "glm-dsa": Architecture("GlmMoeDsaForCausalLM", _INDEXED, _CORRECTED, _read_glm5),
    "dots1": Architecture("Dots1ForCausalLM", _DEEPSEEK_EXPERTS, {"scoring_func": "sigmoid"}),
    "gpt-oss": Architecture("GptOssForCausalLM", _WITH_WINDOW, read=_read_gpt_oss),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", _LOCAL_EXPERTS),
    "olmoe": Architecture("OlmoeForCausalLM", _OLMOE, {"norm_topk_prob": False}),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", _ERNIE),
    "granitemoe": Architecture("GraniteMoeSharedForCausalLM", _GRANITE, parts=_paired_heads),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM", _GRANITE_MAMBA, read=_read_granite_hybrid, parts=_paired_heads
    ),
    "llama4": Architecture("Llama4ForCausalLM", _LLAMA4, read=_read_llama4),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", _LFM2, read=_read_lfm2),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", _HUNYUAN, {"num_shared_expert": 1}),
    "phimoe": Architecture("PhiMoEForCausalLM", _LOCAL_EXPERTS, read=_read_phimoe),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM",
        _NEMOTRON_H,
        {"hidden_act": "relu2", "mlp_hidden_act": "relu2"},
        read=_read_nemotron_h,
    ),
    "kimi-linear": Architecture("KimiLinearForCausalLM", _KIMI_LINEAR, read=_read_kimi_linear),
}
