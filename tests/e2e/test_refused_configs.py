"""A config.json that a family cannot honour is refused by key and value, before any weights are looked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reference_models import SHAPES, in_the_style_of_the_hub

from moeserve import LLM, CheckpointError
from moeserve.models.registry import read_facts

ABSENT = object()

DEEPSEEK = ("deepseek-v2", "deepseek-v3")
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
GROUPED = ("qwen2-moe", "qwen3-moe", "olmoe", "glm4-moe", "gpt-oss")
NEWER_LATENT = ("glm4-moe-lite", "kimi-k25", "mistral4")
NEWER_GROUPED = ("minimax-m2", "ernie", "dots1", "hunyuan", "hy-v3", "granite", "llama4")
EVERY = ("mixtral", *DEEPSEEK, *GROUPED, *NEWER_LATENT, *NEWER_GROUPED)
IN_GROUPS = (*DEEPSEEK, "glm4-moe-groups")
QWEN = ("qwen2-moe", "qwen3-moe")
WINDOWED = ("qwen2-moe-window", "qwen3-moe-window")


def config_of(name: str) -> dict[str, Any]:
    """A good config.json in the style of the hub."""
    values = SHAPES[name].config().to_dict()
    return in_the_style_of_the_hub(json.loads(json.dumps(values, default=str)) | {"dtype": "float32"})


def num_experts_key(name: str) -> str:
    if name in (*DEEPSEEK, *NEWER_LATENT, "glm4-moe", "dots1"):
        return "n_routed_experts"
    if name == "ernie":
        return "moe_num_experts"
    return "num_local_experts" if name in ("mixtral", "gpt-oss", "minimax-m2", "granite", "llama4") else "num_experts"


def top_k_key(name: str) -> str:
    return {"ernie": "moe_k", "hunyuan": "moe_topk"}.get(name, "num_experts_per_tok")


def expert_width_key(name: str) -> str:
    named_so = ("mixtral", "olmoe", "gpt-oss", "minimax-m2", "hunyuan", "granite", "llama4")
    return "intermediate_size" if name in named_so else "moe_intermediate_size"


NOT_AN_INTEGER, NOT_A_NUMBER, NOT_A_FLAG = (0, -1, 10.5, "four", True), (0, -1.0, "much", True), (1, "yes")

# References, a key of their config.json, and values that are refused with key and value.
WRONG: list[tuple[tuple[str, ...], str, tuple[Any, ...]]] = [
    (EVERY, "hidden_size", NOT_AN_INTEGER),
    (EVERY, "num_hidden_layers", NOT_AN_INTEGER),
    (EVERY, "vocab_size", NOT_AN_INTEGER),
    (EVERY, "num_attention_heads", NOT_AN_INTEGER),
    *(((name,), top_k_key(name), (*NOT_AN_INTEGER, 99)) for name in EVERY),
    *(((name,), num_experts_key(name), NOT_AN_INTEGER) for name in EVERY),
    (("dots1",), "n_routed_experts", (ABSENT,)),
    *(((name,), expert_width_key(name), NOT_AN_INTEGER) for name in EVERY),
    (EVERY, "rms_norm_eps", NOT_A_NUMBER),
    (EVERY, "rope_theta", NOT_A_NUMBER),
    (EVERY, "tie_word_embeddings", NOT_A_FLAG),
    (EVERY, "hidden_act", ("gelu",)),
    (EVERY, "quantization_config", ({"quant_method": "awq"},)),
    (EVERY, "compression_config", ({"format": "int-quantized"},)),
    # 4 experts in each of 3 groups, 3 in each of 4, and 3 in each of 3
    (("deepseek-v2",), "num_experts_per_tok", (9,)),
    (("deepseek-v3", "glm4-moe-groups"), "num_experts_per_tok", (7,)),
    (IN_GROUPS, "n_group", (*NOT_AN_INTEGER, 5)),
    (IN_GROUPS, "topk_group", (*NOT_AN_INTEGER, 7)),
    (IN_GROUPS, "routed_scaling_factor", NOT_A_NUMBER),
    (IN_GROUPS, "n_shared_experts", (-1, "two")),
    (IN_GROUPS, "first_k_dense_replace", (-1, "two")),
    (("deepseek-v3", "qwen2-moe", "qwen3-moe", "olmoe", "glm4-moe"), "norm_topk_prob", NOT_A_FLAG),
    (("deepseek-v2",), "norm_topk_prob", (True,)),
    (DEEPSEEK, "scoring_func", ("sparsemax",)),
    (("glm4-moe",), "scoring_func", ("softmax",)),
    (DEEPSEEK, "topk_method", ("roulette",)),
    (("glm4-moe",), "topk_method", ("greedy",)),
    (DEEPSEEK, "moe_layer_freq", (2,)),
    (DEEPSEEK, "index_topk", (2048,)),
    (("mixtral", *GROUPED), "num_key_value_heads", (*NOT_AN_INTEGER, 5)),
    (("mixtral", "qwen3-moe", "gpt-oss"), "head_dim", (9,)),
    ((*DEEPSEEK, *NEWER_LATENT), "qk_rope_head_dim", (7,)),
    *(((*DEEPSEEK, *NEWER_LATENT), key, NOT_AN_INTEGER) for key in LATENT),
    ((*DEEPSEEK, *NEWER_LATENT), "q_lora_rank", NOT_AN_INTEGER),
    (("deepseek-v3", "qwen3-moe", "glm4-moe"), "attention_bias", NOT_A_FLAG),
    (("qwen2-moe",), "qkv_bias", NOT_A_FLAG),
    (("qwen3-next",), "linear_num_key_heads", (*NOT_AN_INTEGER, 3)),
    (("qwen3-next",), "linear_conv_kernel_dim", (*NOT_AN_INTEGER, 1, 9)),
    (("qwen3-next",), "linear_key_head_dim", (*NOT_AN_INTEGER, 257)),
    (("deepseek-v4",), "o_groups", (*NOT_AN_INTEGER, 3)),
    (("deepseek-v4",), "index_head_dim", (*NOT_AN_INTEGER, 5)),
    *((("deepseek-v4",), key, NOT_AN_INTEGER) for key in ("head_dim", "q_lora_rank", "index_topk")),
    (("deepseek-v4",), "hc_mult", (*NOT_AN_INTEGER, 9)),
    (("deepseek-v4",), "layer_types", (["sliding_attention"], [["sliding_attention"]] * 4, "all")),
    (("deepseek-v4",), "compress_ratios", ([0, 4, 4], [0, 4, 128, 5], [False] * 4)),
    (("deepseek-v4",), "mlp_layer_types", (["moe"], "moe")),
    (("deepseek-v4",), "compress_rates", (4,)),
    (("deepseek-v4",), "scoring_func", ("sigmoid",)),
    (("deepseek-v4",), "qk_rope_head_dim", (*NOT_AN_INTEGER, 7)),
    # 12 values a head: a quarter of them is 3, and more than all of them there are not
    (("glm4-moe",), "partial_rotary_factor", (*NOT_A_NUMBER, 0.25, 1.5)),
    (("glm4-moe",), "use_qk_norm", NOT_A_FLAG),
    (("longcat-flash",), "router_bias", (True,)),
    (("longcat-flash",), "zero_expert_type", ("zero",)),
    (("longcat-flash",), "q_lora_rank", (None,)),
    *((("longcat-flash",), key, NOT_AN_INTEGER) for key in ("num_layers", "ffn_hidden_size")),
    (("longcat-flash",), "zero_expert_num", NOT_AN_INTEGER[1:]),
    (("olmoe",), "clip_qkv", NOT_A_NUMBER),
    (("flex-olmo",), "clip_qkv", (0.8,)),
    (("flex-olmo", "kolibri1"), "norm_topk_prob", NOT_A_FLAG),
    (("kolibri1",), "sliding_window", NOT_AN_INTEGER),
    (("kolibri1",), "shared_expert_intermediate_size", NOT_AN_INTEGER),
    (("kolibri1",), "layer_types", (["full_attention"], "full")),
    (("laguna",), "gating", (False, "per-token")),
    (("laguna",), "moe_apply_router_weight_on_input", (True,)),
    (("laguna",), "moe_router_logit_softcapping", (30.0,)),
    (("laguna",), "moe_routed_scaling_factor", NOT_A_NUMBER),
    (("laguna",), "num_attention_heads_per_layer", ([6, 4], [6, 4, 4, 6.0], 6)),
    (("laguna",), "num_key_value_heads", (*NOT_AN_INTEGER, 5)),
    (("laguna",), "shared_expert_intermediate_size", NOT_AN_INTEGER),
    (("laguna-odd",), "attention_bias", (True,)),
    (("aria", "deepseek-ocr2"), "mlp_bias", (True,)),
    (("deepseek-ocr2",), "topk_method", ("noaux_tc",)),
    (("deepseek-ocr2",), "n_group", (*NOT_AN_INTEGER, 3)),
    (("deepseek-ocr2",), "num_experts_per_tok", (*NOT_AN_INTEGER, 7)),
    (("deepseek-ocr2",), "mlp_layer_types", (["dense"], "sparse")),
    (("axk2",), "gated_norm_rank", NOT_AN_INTEGER),
    (("axk2",), "q_lora_rank", (None,)),
    (("axk2",), "n_group", (*NOT_AN_INTEGER, None, 5)),
    (("axk2",), "layer_types", (["full_attention"] * 3,)),
    (("axk2",), "index_head_dim", (*NOT_AN_INTEGER, 7)),
    (("hy-v4",), "indexer_types", (["shared", "full", "full"], ["full"], "full")),
    (("hy-v4",), "hc_mult", (*NOT_AN_INTEGER, 9)),
    *((("hy-v4",), key, NOT_A_NUMBER) for key in ("hc_magnitude", "hc_eps", "swiglu_limit")),
    (("hy-v4",), "layer_types", (["full_attention"] * 3,)),
    (("hy-v4",), "q_lora_rank", (None,)),
    (("dots3-note",), "layer_types", (["sliding_attention"], ["linear_attention"] * 4, "full")),
    (("dots3-note",), "sliding_window", NOT_AN_INTEGER),
    (("dots3-note",), "q_lora_rank", (None,)),
    (("dots3-note",), "per_layer_config", (1, [])),
    (("dots3-note",), "n_shared_experts", NOT_AN_INTEGER),
    (("beam",), "rope_parameters", (dict(rope_type="default", rope_theta=1e4), {"sliding_attention": None})),
    (("beam",), "mlp_layer_types", (["dense"], "sparse")),
    (("beam",), "final_logit_softcapping", NOT_A_NUMBER),
    (("beam",), "attention_bias", NOT_A_FLAG),
    (("beam",), "n_group", (*NOT_AN_INTEGER, 5)),
    *((("aria",), key, NOT_AN_INTEGER) for key in ("moe_num_experts", "moe_topk", "moe_num_shared_experts")),
    (("cohere2-moe",), "expert_selection_fn", ("softplus",)),
    (("cohere2-moe",), "shared_expert_combination_strategy", ("concatenate",)),
    (("cohere2-moe",), "num_shared_experts", (-1, "two")),
    (("cohere2-moe",), "mlp_layer_types", (["dense"], "sparse")),
    (("cohere2-moe",), "layer_types", (["full_attention"], "full")),
    (("cohere2-moe",), "prefix_dense_sliding_window_pattern", NOT_AN_INTEGER),
    (("cohere2-moe",), "prefix_dense_intermediate_size", (*NOT_AN_INTEGER, ABSENT)),
    (("cohere2-moe"), "tie_word_embeddings", NOT_A_FLAG),
    (("minimax-m3",), "index_n_heads", (*NOT_AN_INTEGER, 3, 16)),
    (("minimax-m3",), "index_head_dim", (*NOT_AN_INTEGER, 5)),
    (("minimax-m3",), "index_local_blocks", (-1, 4, "two")),
    *((("minimax-m3",), f"index_{key}", NOT_AN_INTEGER) for key in ("block_size", "topk_blocks")),
    (("minimax-m3",), "layer_types", (["full_attention"], ["sliding_attention"] * 4, "full")),
    (("minimax-m3",), "mlp_layer_types", (["dense"], "sparse")),
    (("minimax-m3",), "hidden_act", ("gelu",)),
    *((("minimax-m3",), key, NOT_A_NUMBER) for key in ("swiglu_alpha", "swiglu_limit", "routed_scaling_factor")),
    *((("minimax-m3",), f"{part}_intermediate_size", NOT_AN_INTEGER) for part in ("dense", "shared")),
    *((("cohere2-moe",), key, NOT_A_NUMBER) for key in ("logit_scale", "layer_norm_eps")),
    (("mixtral", "gpt-oss", *WINDOWED), "sliding_window", (0, -7)),
    (WINDOWED, "use_sliding_window", NOT_A_FLAG),
    (("qwen2-moe-window", "gpt-oss"), "layer_types", (["full_attention"], ["linear_attention"] * 4, "full")),
    (QWEN, "mlp_only_layers", ([3], [-1], ["first"], 1)),
    (QWEN, "decoder_sparse_step", NOT_AN_INTEGER),
    (QWEN, "dual_chunk_attention_config", ({"chunk_size": 8},)),
    (("qwen2-moe",), "shared_expert_intermediate_size", NOT_AN_INTEGER),
    (("gpt-oss",), "swiglu_limit", NOT_A_NUMBER),
    (("glm4-moe-lite",), "mlp_layer_types", (["dense"], ["sparse", "dense", "moe"], "dense")),
    (("glm4-moe-lite",), "topk_method", ("greedy",)),
    (NEWER_GROUPED, "num_key_value_heads", (*NOT_AN_INTEGER, 7)),
    (("zaya",), "attention_bias", (True,)),
    (("zaya",), "num_experts_per_tok", (2,)),
    (("zaya",), "layer_types", (["hybrid"], ["hybrid", "full_attention", "hybrid"])),
    (("zaya",), "router_hidden_size", NOT_AN_INTEGER),
    *((("zaya",), key, (*NOT_AN_INTEGER, 5)) for key in ("cca_time0", "cca_time1")),
    (("zaya",), "head_dim", (*NOT_AN_INTEGER, 513)),
    (("jetmoe",), "activation_function", ("gelu",)),
    (("jetmoe",), "kv_channels", (*NOT_AN_INTEGER, 7)),
    (("minimax",), "layernorm_full_attention_alpha", (*NOT_A_NUMBER, 2.5)),
    *((("minimax",), f"layernorm_{part}_beta", NOT_A_NUMBER) for part in ("full_attention", "linear_attention", "mlp")),
    (("minimax",), "attn_type_list", ([0, 1], [0, 0, 1, 2], 1)),
    (("minimax",), "head_dim", (*NOT_AN_INTEGER, 258)),
    (("minimax",), "rotary_dim", (*NOT_AN_INTEGER, 12)),
    (("minimax",), "postnorm", (False,)),
    (("minimax",), "shared_intermediate_size", (64,)),
    (("minimax-m2",), "scoring_func", ("softmax",)),
    (("minimax-m2",), "use_qk_norm", (False,)),
    (("minimax-m2",), "qk_norm_type", ("per_head",)),
    (("minimax-m2",), "rotary_dim", (0, 13, 99)),
    (("minimax-m2",), "shared_intermediate_size", (64,)),
    (("ernie", "ernie-vl"), "use_bias", (True,)),
    (("ernie-vl",), "moe_intermediate_size", ([17], [0, 11], 17, [17, 11, 11])),
    (("ernie-vl",), "mlp_layer_types", (["dense"], "sparse")),
    (("ernie-vl",), "moe_k", (*NOT_AN_INTEGER, 7)),
    (("ernie",), "moe_layer_interval", NOT_AN_INTEGER),
    (("ernie",), "moe_layer_end_index", (-2, "two")),
    (("dots1",), "scoring_func", ("softmax",)),
    (("dots1-window",), "layer_types", (["full_attention"], ["chunked_attention"] * 4)),
    (("dots1", "hunyuan", "hy-v3", "granite"), "attention_bias", NOT_A_FLAG),
    (("solar-open",), "use_qk_norm", (True,)),
    (("dbrx",), "d_model", NOT_AN_INTEGER),
    (("dbrx",), "attn_config", (5,)),
    (("mellum",), "mlp_layer_types", (["dense"], ["sparse", "dense", "moe"])),
    (("flint",), "mlp_only_layers", ([5], "1")),
    (("exaone-moe",), "n_group", (3,)),
    (("axk1",), "scoring_func", ("softmax",)),
    (("granite-swa",), "layer_rope_theta", ([1e4], [0, 0.5, 1e4, 1e4], [0, 0, 0, "1e4"])),
    (("afmoe",), "score_func", ("softmax",)),
    (("afmoe",), "global_attn_every_n_layers", NOT_AN_INTEGER),
    (("hunyuan",), "use_qk_norm", (False,)),
    (("hunyuan",), "use_cla", (True,)),
    (("hunyuan",), "num_shared_expert", ([1, 2], 2)),
    (("hunyuan",), "moe_intermediate_size", (20, [21, 20])),
    (("hy-v3",), "mlp_layer_types", (["dense"], ["sparse", "dense", "moe"], "dense")),
    (("hy-v3",), "router_scaling_factor", NOT_A_NUMBER),
    (("hy-v3",), "mlp_bias", (True,)),
    *((("granite",), key, NOT_A_NUMBER) for key in ("embedding_multiplier", "attention_multiplier")),
    *((("granite",), key, NOT_A_NUMBER) for key in ("residual_multiplier", "logits_scaling")),
    (("mistral4",), "n_group", (*NOT_AN_INTEGER, 2)),
    (("mistral4",), "norm_topk_prob", NOT_A_FLAG),
    (("mistral-large4",), "kv_source_layers", ([0, 1, 2, 2], "all")),
    (("mistral-large4",), "no_rope_layers", ([1, 0], [1, 1, 2, 1], "all")),
    (("mistral-large4",), "final_logit_softcapping", NOT_A_NUMBER),
    (("mistral-large4",), "index_head_dim", (*NOT_AN_INTEGER, 3)),
    (("mistral-large4",), "indexer_types", (["full"], ["shared"] + ["full"] * 3, "full")),
    (("llama4",), "num_experts_per_tok", (2,)),
    (("llama4",), "attention_chunk_size", (0, -7)),
    (("llama4",), "no_rope_layers", ([1, 0], [1, 1, 2, 1], "all")),
    (("llama4",), "layer_types", (["full_attention"], ["sliding_attention"] * 4)),
    (("llama4",), "attn_temperature_tuning", (7,)),
    (("llama4",), "floor_scale", NOT_AN_INTEGER),
    (("llama4",), "attn_scale", NOT_A_NUMBER),
    (("llama4-odd",), "interleave_moe_layer_step", NOT_AN_INTEGER),
    (("llama4-odd",), "intermediate_size_mlp", NOT_AN_INTEGER),
    (("step3p7",), "moe_layers_enum", ("1,two", 3)),
    (("step3p7",), "swiglu_limits", ([0.0], [0.0, -1, 0.0, 0.0], 7.0)),
    (("step3p7",), "swiglu_limits_shared", ([0.0, "x", 0.0, 0.0],)),
    (("step3p7",), "layer_types", (["full_attention"], ["chunked_attention"] * 4)),
    (("step3p7",), "share_expert_dim", NOT_AN_INTEGER),
    (("step3p7",), "sliding_window", (*NOT_AN_INTEGER, ABSENT)),
    (("step3p7",), "use_bidirectional_attention", (True,)),
    (("mimo-v2-flash",), "sliding_window_size", NOT_AN_INTEGER),
    *((("mimo-v2-flash",), f"swa_{key}", NOT_AN_INTEGER) for key in ("num_key_value_heads", "v_head_dim", "head_dim")),
    (("mimo-v2-flash",), "v_head_dim", (13, 7)),
    (("mimo-v2-flash",), "attention_value_scale", NOT_A_NUMBER),
    (("mimo-v2-flash",), "hybrid_layer_pattern", ([0, 1], [0, 1, 2, 0], "all")),
    (("mimo-v2-flash",), "moe_layer_freq", ([0], 1)),
    (("mimo-v2-flash",), "n_shared_experts", (1,)),
    (("gemma4",), "enable_moe_block", (False,)),
    (("gemma4",), "attention_bias", (True,)),
    (("gemma4",), "hidden_activation", ("silu",)),
    (("gemma4",), "hidden_size_per_layer_input", (256,)),
    (("gemma4",), "num_kv_shared_layers", (1,)),
    (("gemma4",), "use_bidirectional_attention", ("all",)),
    (("gemma4",), "top_k_experts", (*NOT_AN_INTEGER, 99)),
    *((("gemma4",), key, NOT_AN_INTEGER) for key in ("global_head_dim", "num_global_key_value_heads")),
    (("gemma4",), "final_logit_softcapping", NOT_A_NUMBER),
    (("phimoe",), "num_experts_per_tok", (*NOT_AN_INTEGER, 3)),
    (("phimoe",), "router_jitter_noise", NOT_A_NUMBER),
    *((("phimoe",), key, NOT_A_FLAG) for key in ("attention_bias", "lm_head_bias")),
    (("granite-shared",), "shared_intermediate_size", (-1, "two")),
    (("nemotron-h",), "layers_block_type", (["moe", "dense"], [], "moe")),
    (("nemotron-h",), "mlp_hidden_act", ("silu",)),
    (("nemotron-h",), "mlp_bias", (True,)),
    (("nemotron-h",), "n_shared_experts", (2,)),
    (("nemotron-h",), "n_groups", (*NOT_AN_INTEGER, 4)),
    (("nemotron-h",), "time_step_limit", ([0.001, 0.1],)),
    (("nemotron-h",), "moe_shared_expert_intermediate_size", NOT_AN_INTEGER),
    (("nemotron-h-latent",), "moe_latent_size", NOT_AN_INTEGER),
    *((("jamba",), f"{part}_layer_period", NOT_AN_INTEGER) for part in ("attn", "expert")),
    *((("jamba",), f"{part}_layer_offset", (-1, 3, "two")) for part in ("attn", "expert")),
    (("jamba",), "mamba_d_state", (*NOT_AN_INTEGER, 257)),
    (("jamba",), "mamba_d_conv", (*NOT_AN_INTEGER, 1, 9)),
    *((("jamba",), f"mamba_{key}", NOT_AN_INTEGER) for key in ("expand", "dt_rank")),
    (("jamba",), "mamba_conv_bias", NOT_A_FLAG),
    (("jamba",), "mamba_proj_bias", (True,)),
    (("jamba",), "mamba_inner_layernorms", (False,)),
    (("jamba",), "sliding_window", (4096,)),
    *((("deepseek-v32", "glm5"), f"index_{key}", NOT_AN_INTEGER) for key in ("topk", "n_heads", "head_dim")),
    (("deepseek-v32",), "index_head_dim", (7,)),
    (("deepseek-v32",), "q_lora_rank", (None,)),
    (("deepseek-v32",), "indexer_rope_interleave", (True,)),
    (("glm5",), "indexer_rope_interleave", (False,)),
    (("glm5",), "indexer_types", (["full"], ["shared"] + ["full"] * 4, ["full", "dense"] + ["full"] * 3, "full")),
    *((("glm5-next",), f"index_{key}", NOT_AN_INTEGER) for key in ("topk", "n_heads", "head_dim", "kpool")),
    (("glm5-next",), "index_topk", (9,)),
    (("glm5-next",), "index_kpool_always_select_tail", (False,)),
    (("glm5-next",), "indexer_types", (["full", "full", "full", "shared"], "full")),
    (("glm5-next",), "layer_types", (["linear_attention"], "full")),
    (("glm5-next",), "mlp_layer_types", (["dense"], "sparse")),
    (("glm5-next",), "hc_mult", (*NOT_AN_INTEGER, 9)),
    (("glm5-next",), "qk_rope_head_dim", (8,)),
    (("glm5-next",), "num_key_value_heads", (2,)),
    (("glm5-next",), "linear_lower_bound", (0, 1.0, "low")),
    *((("glm5-next",), f"linear_{key}", NOT_AN_INTEGER) for key in ("num_heads", "head_dim", "conv_kernel_dim")),
    (("glm5-next",), "swiglu_limit", NOT_A_NUMBER),
    *(
        (("inkling",), key, NOT_AN_INTEGER)
        for key in ("d_rel", "rel_extent", "sliding_window_size", "n_shared_experts")
    ),
    *((("inkling",), f"swa_{key}", NOT_AN_INTEGER) for key in ("num_attention_heads", "head_dim")),
    (("inkling",), "swa_num_key_value_heads", (*NOT_AN_INTEGER, 4)),
    (("inkling",), "d_rel", (7,)),
    (("inkling",), "conv_kernel_size", (*NOT_AN_INTEGER, 1, 9)),
    (("inkling",), "layer_types", (["hybrid"], "hybrid")),
    (("inkling",), "mlp_layer_types", (["dense"], "sparse")),
    (("inkling",), "shared_expert_sink", (False,)),
    *((("inkling",), key, NOT_A_NUMBER) for key in ("route_scale", "log_scaling_alpha", "logits_mup_width_multiplier")),
    (("inkling",), "unpadded_vocab_size", (0, "all")),
]

# Values of rope_scaling.
YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 32, "low_freq_factor": 4}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 32, "short_mscale": 1.2, "long_mscale": 1.5}
SCALINGS: list[tuple[dict[str, Any], str]] = [
    ({"type": "spiral", "factor": 2.0}, "rope_type='spiral'"),
    ({"type": "linear"}, "rope_scaling.factor is missing"),
    (LLAMA3 | {"high_freq_factor": 3}, "high_freq_factor=3"),
    (YARN | {"factor": None}, "rope_scaling.factor is missing"),
    *((YARN | {"factor": value}, f"rope_scaling.factor={value!r}") for value in (*NOT_A_NUMBER, 0.5)),
    (YARN | {"original_max_position_embeddings": 0}, "rope_scaling.original_max_position_embeddings=0"),
    (YARN | {"beta_fast": -1}, "rope_scaling.beta_fast=-1"),
    (YARN | {"beta_fast": 1, "beta_slow": 2}, "rope_scaling.beta_fast=1"),
    (YARN | {"truncate": "no"}, "rope_scaling.truncate='no'"),
    *((LONGROPE | {"short_factor": factors}, "rope_scaling.short_factor=") for factors in (None, [1.0], [0.0] * 512)),
]

# Values that are wrong only together.
COMBINED = [
    ("dbrx", {"attn_config": {"kv_n_heads": 2, "rope_theta": 7.0}}, "attn_config.rope_theta=7.0"),
    ("dbrx", {"ffn_config": {"moe_num_experts": 2, "moe_top_k": 3}}, "ffn_config.moe_top_k=3"),
    ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "ffn_config.ffn_act_fn.name='gelu'"),
    ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2}}, "ffn_config.moe_normalize_expert_weights=2"),
    ("minimax-m3", {"sparse_attention_config": {"sparse_topk_blocks": 0}}, "index_topk_blocks=0"),
    (
        "minimax-m3",
        {"layer_types": ABSENT, "sparse_attention_config": {"sparse_attention_freq": [0, 2, 1, 1]}},
        "sparse_attention_config.sparse_attention_freq=[0, 2, 1, 1]",
    ),
    ("deepseek-v3", {"n_group": 12, "num_experts_per_tok": 2}, "n_group=12"),  # a group is as good as its best two
    ("minimax", {"attn_type_list": ABSENT, "layer_types": ["full_attention"]}, "layer_types=['full_attention']"),
    ("minimax", {"hidden_size": 1548, "head_dim": ABSENT, "rotary_dim": ABSENT}, "num_attention_heads=6"),
    ("glm4-moe-groups", {"n_group": 9, "num_experts_per_tok": 2}, "n_group=9"),
    ("nemotron-h", {"layers_block_type": ABSENT, "hybrid_override_pattern": "ME*X"}, "hybrid_override_pattern='ME*X'"),
    ("glm5", {"indexer_types": None, "index_topk_pattern": "FSX"}, "index_topk_pattern="),
    ("glm5", {"indexer_types": None, "index_topk_pattern": "SFFSF"}, "index_topk_pattern="),
    ("glm5", {"indexer_types": None, "index_topk_freq": 0}, "index_topk_freq=0"),
    ("glm5-next", {"linear_attn_config": {"num_heads": 0}}, "linear_num_heads=0"),
    ("phimoe", {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 4 + [0]}}, "rope_scaling.short_factor="),
    ("phimoe", {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 5, "short_mscale": 0}}, "short_mscale=0"),
    ("phimoe", {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 5}}, "rope_scaling.long_factor=None"),
    *((name, {"rope_scaling": scaling}, says) for name in EVERY for scaling, says in SCALINGS),
]


def folder_with(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    values = config_of(name)
    if "text_config" in values:
        beside = {key: value for key, value in changes.items() if key in values}
        changes = dict(text_config=without_absent(values["text_config"] | changes), **beside)
    (folder / "config.json").write_text(json.dumps(without_absent(values | changes)))
    return folder


def without_absent(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not ABSENT}


@pytest.mark.parametrize("name", list(SHAPES))
def test_unchanged_configs_are_read(name: str, tmp_path: Path) -> None:
    facts = read_facts(folder_with(tmp_path, name, {}))
    config = SHAPES[name].config().get_text_config()
    assert (facts.vocab_size, facts.max_position_embeddings) == (config.vocab_size, config.max_position_embeddings)


@pytest.mark.parametrize("name", list(SHAPES))
def test_wrong_configs_are_refused_by_key_and_value(name: str, tmp_path: Path) -> None:
    cases = [
        ({key: value}, f"{key} is missing" if value is ABSENT else f"{key}={value!r:.50}")
        for names, key, values in WRONG
        for value in values
        if name in names
    ]
    cases += [(changes, says) for shape, changes, says in COMBINED if shape == name]
    for changes, says in cases:
        with pytest.raises(CheckpointError) as error:
            read_facts(folder_with(tmp_path, name, changes))
        assert "config.json" in str(error.value)
        assert says in str(error.value), changes


def test_the_engine_refuses_before_it_looks_for_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_experts_per_tok=99"):
        LLM(folder_with(tmp_path, "mixtral", {"num_experts_per_tok": 99}))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2-moe", {"use_sliding_window": False, "sliding_window": 0}),  # as transformers 5 writes it
        ("deepseek-v2-lite", {"n_group": ABSENT, "topk_group": ABSENT}),
        ("kimi", {"num_nextn_predict_layers": 0}),
        ("olmoe", {"clip_qkv": None}),
        ("qwen3-moe", {"rope_scaling": None}),
    ],
)
def test_what_looks_wrong_but_is_not(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert read_facts(folder_with(tmp_path, name, changes)).vocab_size == SHAPES[name].config().vocab_size
