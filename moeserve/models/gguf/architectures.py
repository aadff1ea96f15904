"""The supported architectures of GGUF, by name. A family's reader checks the values of the resulting config.json.

The gguf package defines the keys of metadata.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moeserve.models.config_values import ConfigValues
from moeserve.models.gguf import recurrent, windows
from moeserve.models.gguf.architecture import (
    MAX_ROWS,
    SIGMOID,
    Architecture,
    File,
    Keys,
    Part,
    numbers_of_layers,
    rows_of_heads,
)
from moeserve.models.gguf.file import as_written


def _paired_heads(values: ConfigValues) -> dict[str, tuple[Part, ...]]:
    """Reorder queries and keys. GGUF rotates pairs (0, 1), (2, 3), ... of a head; the model rotates i with i + half."""
    num_heads = values.integer("attention.head_count")
    num_kv_heads = max(numbers_of_layers(values, "attention.head_count_kv", num_heads))
    size = values.integer("attention.key_length", values.integer("embedding_length") // num_heads)
    if size % 2 or max(num_heads, num_kv_heads) * size > MAX_ROWS:
        raise values.wrong("attention.key_length", f"must be even, and have at most {MAX_ROWS} rows with all heads")
    order = np.arange(size).reshape(-1, 2).T.reshape(-1)
    return {
        kind: (Part(kind, rows_of_heads(np.arange(num), size, order)),)
        for kind, num in (("attn_q", num_heads), ("attn_k", num_kv_heads))
    }


def _read_latent(file: File) -> dict[str, Any]:
    """Read the sizes of latent attention."""
    values = file.values
    rotary = values.integer("rope.dimension_count")
    # Files from before 2025-04 have no `*_mla` keys. In these, `key_length` and `value_length` are the sizes of a head.
    key_size = values.integer("attention.key_length_mla", values.values.get("attention.key_length"))
    value_size = values.integer("attention.value_length_mla", values.values.get("attention.value_length"))
    return {
        "kv_lora_rank": values.integer("attention.kv_lora_rank"),
        "q_lora_rank": values.integer("attention.q_lora_rank", 0, low=0) or None,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key_size - rotary,
        "v_head_dim": value_size,
        # These files count the latent vector as one key-value head. In the model, each head has its own keys and
        # values.
        "num_key_value_heads": values.integer("attention.head_count"),
        "head_dim": None,
    }


def _read_deepseek(file: File) -> dict[str, Any]:
    is_v3 = file.values.integer("expert_gating_func", 1) == SIGMOID
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


def _read_hy_v3(file: File) -> dict[str, Any]:
    width = file.values.integer("expert_shared_feed_forward_length")
    return {
        "num_shared_experts": width // file.values.integer("expert_feed_forward_length"),
        "mlp_layer_types": windows.feed_forward_types(file),
    }


def _read_deepseek_ocr(file: File) -> dict[str, Any]:
    num_groups = file.values.integer("expert_group_count", 1)
    return {
        "topk_method": "group_limited_greedy" if num_groups > 1 else "greedy",
        "partial_rotary_factor": 1.0,  # the file may say 0, a head size of latent attention, which the model lacks
    }


def _read_minimax_m3(file: File) -> dict[str, Any]:
    has_indexer = file.layers_with("indexer.q_proj.weight")
    return {
        "layer_types": ["minimax_m3_sparse" if has else "full_attention" for has in has_indexer],
        "mlp_layer_types": windows.feed_forward_types(file),
        "dense_intermediate_size": file.width_of("ffn_gate.weight") or file.values.integer("feed_forward_length"),
        "shared_intermediate_size": file.width_of("ffn_gate_shexp.weight"),
    }


def _read_dbrx(file: File) -> dict[str, Any]:
    usual, values = file.config, file.values
    return {
        "d_model": usual["hidden_size"],
        "n_heads": usual["num_attention_heads"],
        "n_layers": usual["num_hidden_layers"],
        "max_seq_len": usual["max_position_embeddings"],
        "attn_config": {
            "kv_n_heads": usual["num_key_value_heads"],
            "rope_theta": usual["rope_theta"],
            "clip_qkv": as_written(values.number("attention.clamp_kqv")),
        },
        "ffn_config": {
            "ffn_hidden_size": values.integer("feed_forward_length"),
            "moe_num_experts": values.integer("expert_count"),
            "moe_top_k": usual["num_experts_per_tok"],
        },
    }


def _read_phimoe(file: File) -> dict[str, Any]:
    return {
        "router_jitter_noise": 0.01,  # value of the published model, because the file has no key for it
        "sliding_window": file.values.integer("attention.sliding_window", 0, low=0) or None,
        "lm_head_bias": "output.bias" in file.kinds,
    }


def _read_llama4(file: File) -> dict[str, Any]:
    # The file has no keys for these settings. Of the two published models, the one with 128 experts has no norms.
    return {"use_qk_norm": file.values.integer("expert_count") != 128, "attention_chunk_size": 8192}


def _read_kimi_linear(file: File) -> dict[str, Any]:
    return _read_latent(file) | {
        "linear_num_heads": file.values.integer("attention.head_count"),
        "layer_types": recurrent.mixer_types(file, "linear_attention", "full_attention"),
        "model_max_length": file.config["max_position_embeddings"],
    }


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
_SHARED_EXPERTS: Keys = {**_DENSE, **_EXPERTS, "num_shared_experts": ("expert_shared_count", 1)}
_EXAONE: Keys = {
    **_SHARED_EXPERTS,
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
    "norm_topk_prob": ("expert_weights_norm", True),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
}
_AFMOE: Keys = {
    **_SHARED_EXPERTS,
    "num_dense_layers": ("leading_dense_block_count", 0),
    "route_scale": ("expert_weights_scale", 1.0),
    "route_norm": ("expert_weights_norm", True),
    "sliding_window": "attention.sliding_window",
}
_LAGUNA: Keys = {
    **_DENSE,
    **_EXPERTS,
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_routed_scaling_factor": ("expert_weights_scale", 1.0),
}
_STEP: Keys = {
    **_DENSE,
    "n_routed_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "share_expert_dim": "expert_shared_feed_forward_length",
    "moe_router_scaling_factor": ("expert_weights_scale", 1.0),
}
_JAMBA: Keys = {
    **_DENSE,
    "num_experts": "expert_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_dt_rank": "ssm.time_step_rank",
}
_HY_V3: Keys = {
    **_DENSE,
    **_EXPERTS,
    "router_scaling_factor": ("expert_weights_scale", 1.0),
    "route_norm": ("expert_weights_norm", True),
}
_GEMMA4: Keys = {
    **_DENSE,
    **_EXPERTS,
    "top_k_experts": "expert_used_count",
    "final_logit_softcapping": ("final_logit_softcapping", None),
    "num_kv_shared_layers": ("attention.shared_kv_layers", 0),
    "hidden_size_per_layer_input": ("embedding_length_per_layer_input", 0),
}
_COHERE2: Keys = {
    "num_experts": "expert_count",
    "intermediate_size": "expert_feed_forward_length",
    "num_shared_experts": ("expert_shared_count", 0),
    "logit_scale": "logit_scale",
}
_MINIMAX_M3: Keys = {
    "num_local_experts": "expert_count",
    "intermediate_size": "expert_feed_forward_length",
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk_blocks": "attention.indexer.top_k",
    "index_block_size": "attention.indexer.block_size",
    "index_local_blocks": "attention.indexer.local_blocks",
}
_CORRECTED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}

ARCHITECTURES = {
    "llama": Architecture("MixtralForCausalLM", _WITH_WINDOW, parts=_paired_heads),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _QWEN, {"norm_topk_prob": False}),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _QWEN, {"norm_topk_prob": True}),
    "qwen3vlmoe": Architecture("Qwen3MoeForCausalLM", _QWEN, {"norm_topk_prob": True}),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM", _QWEN_DELTA, read=recurrent.read_delta, parts=recurrent.qwen3_next_parts
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForConditionalGeneration", _QWEN_DELTA, read=recurrent.read_delta, parts=recurrent.qwen3_5_parts
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
        "GraniteMoeHybridForCausalLM", _GRANITE_MAMBA, read=recurrent.read_granite_hybrid, parts=_paired_heads
    ),
    "llama4": Architecture("Llama4ForCausalLM", _LLAMA4, read=_read_llama4),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", _LFM2, read=recurrent.read_lfm2),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", _HUNYUAN, {"num_shared_expert": 1}),
    "phimoe": Architecture("PhiMoEForCausalLM", _LOCAL_EXPERTS, read=_read_phimoe),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM",
        _NEMOTRON_H,
        {"hidden_act": "relu2", "mlp_hidden_act": "relu2"},
        read=recurrent.read_nemotron_h,
    ),
    "exaone-moe": Architecture("ExaoneMoeForCausalLM", _EXAONE, read=windows.read_types),
    "afmoe": Architecture("AfmoeForCausalLM", _AFMOE, {"mup_enabled": True}, parts=windows.parts_with_output_norms),
    "laguna": Architecture("LagunaForCausalLM", _LAGUNA, read=windows.read_laguna),
    "mellum": Architecture("MellumForCausalLM", _QWEN, {"norm_topk_prob": True}, read=windows.read_windows),
    "mimo2": Architecture("MiMoV2FlashForCausalLM", _DEEPSEEK_EXPERTS, _CORRECTED, windows.read_mimo),
    "step35": Architecture("Step3p7ForConditionalGeneration", _STEP, read=windows.read_step),
    "jamba": Architecture("JambaForCausalLM", _JAMBA, read=recurrent.read_jamba, parts=recurrent.jamba_parts),
    "dbrx": Architecture("DbrxForCausalLM", {}, read=_read_dbrx),
    "hy_v3": Architecture("HYV3ForCausalLM", _HY_V3, read=_read_hy_v3),
    "deepseek32": Architecture("DeepseekV32ForCausalLM", _INDEXED, _CORRECTED, _read_latent),
    "deepseek2-ocr": Architecture("DeepseekOCRForCausalLM", _DEEPSEEK_EXPERTS, read=_read_deepseek_ocr),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        _GEMMA4,
        {"enable_moe_block": True},
        read=windows.read_gemma4,
        parts=windows.parts_with_output_norms,
        own_scales=("ffn_gate_inp", "ffn_down_exps"),
    ),
    "cohere2moe": Architecture("Cohere2MoeForCausalLM", _COHERE2, read=windows.read_cohere2),
    "minimax-m3": Architecture("MiniMaxM3SparseForConditionalGeneration", _MINIMAX_M3, read=_read_minimax_m3),
    "minimax-01": Architecture("MiniMaxText01ForCausalLM", _LOCAL_EXPERTS, read=recurrent.read_minimax),
    "kimi-linear": Architecture("KimiLinearForCausalLM", _KIMI_LINEAR, read=_read_kimi_linear),
}
