"""A config.json that a family cannot honour is refused by key and value, before any weights are looked for."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from reference_models import EVERY_SHAPE, SHAPES, in_the_style_of_the_hub
from transformers import PreTrainedConfig

from moeserve import LLM, CheckpointError
from moeserve.models.registry import describe, read_facts

ABSENT = object()

DEEPSEEK = ("deepseek-v2", "deepseek-v3")
IN_GROUPS = (*DEEPSEEK, "glm4-moe-groups")
NEWER_GROUPED = ("minimax-m2", "ernie", "dots1", "hunyuan", "hy-v3", "granite", "llama4")
EVERY = ("mixtral", *DEEPSEEK, "qwen2-moe", "qwen3-moe", "olmoe", "glm4-moe", "gpt-oss", "glm4-moe-lite", "kimi-k25")
EVERY += ("mistral4", *NEWER_GROUPED)


def config_of(name: str) -> dict[str, Any]:
    """A good config.json in the style of the hub."""
    values = SHAPES[name].config().to_dict()
    return in_the_style_of_the_hub(json.loads(json.dumps(values, default=str)) | {"dtype": "float32"})


NOT_AN_INTEGER, NOT_A_NUMBER = (0, -1, 10.5, "four", True), (0, -1.0, "much", True)

# Keys of all configs of transformers, most of which no family reads.
COMMON = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
# Integers that may be 0, numbers below 0, and keys whose values may be of several kinds.
MAY_BE_ZERO = re.compile(
    "(attn|expert)_layer_offset|first_k_dense_replace|index_local_blocks|moe_layer_(start|end)_index|num_dense_layers|"
    "num_nextn_predict_layers|shared_intermediate_size|zero_expert_num|seed|(n|num|moe_num)_shared_experts"
)
NEGATIVE = ("kda_lower_bound", "linear_lower_bound")
SEVERAL_KINDS = {"query_pre_attn_scalar", "rope_theta", "moe_topk", "model_type", "eos_token_id", "layers_block_type"}
SEVERAL_KINDS |= {"moe_layers", "partial_rotary_factors"}
SEVERAL_KINDS |= {
    f"layernorm_{part}_{word}" for part in ("full_attention", "linear_attention", "mlp") for word in ("alpha", "beta")
}
LAYERNORM_FACTORS = ("full_attention_alpha", "full_attention_beta", "linear_attention_beta", "mlp_beta")
RENAMED = {
    "compress_rope_theta": "rope_theta",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "num_attention_groups": "num_key_value_heads",
}


def values_of_other_kinds(key: str, value: Any, num_layers: int) -> tuple[Any, ...]:
    """Return values that cannot stand in the place of this one."""
    match value:
        case bool():
            return ("yes", 7)
        case int():
            return NOT_AN_INTEGER[MAY_BE_ZERO.fullmatch(key) is not None :]
        case float():
            return ("much", True) if key in NEGATIVE else NOT_A_NUMBER
        case str():
            return ("roulette",)
        case list():
            return ("all", 5, value[:1]) if len(value) == num_layers > 1 else ("all", 5)
        case dict():
            return (5,)
    return ()


# References, a key of their config.json, and values of the right kind that are refused with key and value.
WRONG: list[tuple[tuple[str, ...], str, tuple[Any, ...]]] = [
    (tuple(name for name in EVERY if name not in ("ernie", "hunyuan")), "num_experts_per_tok", (99,)),
    (("ernie",), "moe_k", (99,)),
    (("hunyuan",), "moe_topk", (0, -1, 10.5, "four", True, 99)),
    (("dots1",), "n_routed_experts", (ABSENT,)),
    ((*EVERY, "minimax-m3"), "hidden_act", ("gelu",)),
    (EVERY, "rope_theta", NOT_A_NUMBER),
    (("aria",), "moe_topk", NOT_AN_INTEGER),
    *((("minimax",), f"layernorm_{part}", NOT_A_NUMBER) for part in LAYERNORM_FACTORS),
    (("aria",), "moe_num_shared_experts", (0,)),
    (("dots3-note", "inkling"), "n_shared_experts", (0,)),
    (("minimax-m3",), "shared_intermediate_size", (0,)),
    (("hunyuan",), "num_shared_expert", (2,)),
    (("hunyuan",), "moe_intermediate_size", (20,)),
    (("ernie-vl",), "moe_intermediate_size", (17,)),
    (("ernie",), "moe_layer_end_index", (-2,)),
    (("granite-swa",), "layer_rope_theta", ([10000.0],)),
    (("muse-spark",), "layer_rope_theta", (200.0,)),
    (EVERY, "quantization_config", ({"quant_method": "awq"},)),
    (EVERY, "compression_config", ({"format": "int-quantized"},)),
    (("deepseek-v2",), "num_experts_per_tok", (9,)),
    (("deepseek-v3", "glm4-moe-groups", "deepseek-ocr2"), "num_experts_per_tok", (7,)),
    (("deepseek-v2", "deepseek-v3", "glm4-moe-groups", "axk2", "beam"), "n_group", (5,)),
    (IN_GROUPS, "topk_group", (7,)),
    (("deepseek-v2",), "norm_topk_prob", (True,)),
    (DEEPSEEK, "scoring_func", ("sparsemax",)),
    (("glm4-moe", "minimax-m2", "dots1", "axk1", "inkling2"), "scoring_func", ("softmax",)),
    (DEEPSEEK, "topk_method", ("roulette",)),
    (("glm4-moe", "glm4-moe-lite"), "topk_method", ("greedy",)),
    (DEEPSEEK, "moe_layer_freq", (2,)),
    (DEEPSEEK, "index_topk", (2048,)),
    (("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "glm4-moe", "gpt-oss", "laguna"), "num_key_value_heads", (5,)),
    (("mixtral", "qwen3-moe", "gpt-oss"), "head_dim", (9,)),
    (("deepseek-v2", "deepseek-v3", "glm4-moe-lite", "kimi-k25", "mistral4", "deepseek-v4"), "qk_rope_head_dim", (7,)),
    (("qwen2-moe",), "qkv_bias", (1, "yes")),
    (("qwen3-next",), "linear_num_key_heads", (3,)),
    (("qwen3-next",), "linear_conv_kernel_dim", (1, 17)),
    (("qwen3-next",), "linear_key_head_dim", (257,)),
    (("deepseek-v4",), "o_groups", (3,)),
    (("deepseek-v4", "minimax-m3"), "index_head_dim", (5,)),
    (("deepseek-v4", "hy-v4", "glm5-next"), "hc_mult", (9,)),
    (("deepseek-v4",), "layer_types", ([["sliding_attention"]] * 4,)),
    (("deepseek-v4",), "compress_ratios", ([0, 4, 4], [0, 4, 128, 5], [False, False, False, False])),
    (("deepseek-v4",), "scoring_func", ("sigmoid",)),
    (("glm4-moe",), "partial_rotary_factor", (0.25, 1.5)),
    (("longcat-flash",), "router_bias", (True,)),
    (("longcat-flash",), "zero_expert_type", ("zero",)),
    (("longcat-flash", "axk2", "hy-v4", "dots3-note", "deepseek-v32"), "q_lora_rank", (None,)),
    (("flex-olmo",), "clip_qkv", (0.8,)),
    (("laguna",), "gating", (False, "per-token")),
    (("laguna",), "moe_apply_router_weight_on_input", (True,)),
    (("laguna",), "moe_router_logit_softcapping", (30.0,)),
    (("laguna",), "num_attention_heads_per_layer", ([6, 4], [6, 4, 4, 6.0])),
    (("laguna-odd", "zaya", "gemma4", "muse-spark"), "attention_bias", (True,)),
    (("aria", "deepseek-ocr2", "hy-v3", "nemotron-h"), "mlp_bias", (True,)),
    (("deepseek-ocr2",), "topk_method", ("noaux_tc",)),
    (("deepseek-ocr2", "exaone-moe"), "n_group", (3,)),
    (("axk2",), "n_group", (None,)),
    (("axk2", "hy-v4"), "layer_types", (["full_attention"] * 3,)),
    (("axk2", "deepseek-v32"), "index_head_dim", (7,)),
    (("hy-v4",), "indexer_types", (["shared", "full", "full"],)),
    (("dots3-note", "qwen2-moe-window", "gpt-oss"), "layer_types", (["linear_attention"] * 4,)),
    (("dots3-note",), "per_layer_config", ([],)),
    (("beam",), "rope_parameters", ({"rope_type": "default", "rope_theta": 10000.0}, {"sliding_attention": None})),
    (("cohere2-moe",), "expert_selection_fn", ("softplus",)),
    (("cohere2-moe",), "shared_expert_combination_strategy", ("concatenate",)),
    (("cohere2-moe",), "prefix_dense_intermediate_size", (ABSENT,)),
    (("minimax-m3",), "index_n_heads", (3, 16)),
    (("minimax-m3",), "index_local_blocks", (4,)),
    (("minimax-m3", "llama4"), "layer_types", (["sliding_attention"] * 4,)),
    (("mixtral",), "sliding_window", (0, -7)),
    (("gpt-oss",), "layer_types", (["full_attention"], "full")),
    (("qwen2-moe", "qwen3-moe"), "mlp_only_layers", ([3], [-1], ["first"])),
    (("qwen2-moe", "qwen3-moe"), "dual_chunk_attention_config", ({"chunk_size": 8},)),
    (("glm4-moe-lite", "mellum", "hy-v3"), "mlp_layer_types", (["sparse", "dense", "moe"],)),
    (NEWER_GROUPED, "num_key_value_heads", (7,)),
    (("zaya", "llama4"), "num_experts_per_tok", (2,)),
    (("zaya",), "layer_types", (["hybrid", "full_attention", "hybrid"],)),
    (("zaya",), "cca_time0", (9,)),
    (("zaya",), "cca_time1", (9,)),
    (("zaya",), "head_dim", (513,)),
    (("jetmoe",), "activation_function", ("gelu",)),
    (("jetmoe",), "kv_channels", (7,)),
    (("minimax",), "layernorm_full_attention_alpha", (2.5,)),
    (("minimax",), "attn_type_list", ([0, 1], [0, 0, 1, 2])),
    (("minimax",), "head_dim", (258,)),
    (("minimax",), "rotary_dim", (12,)),
    (("minimax",), "postnorm", (False,)),
    (("minimax", "minimax-m2"), "shared_intermediate_size", (64,)),
    (("minimax-m2", "hunyuan"), "use_qk_norm", (False,)),
    (("minimax-m2",), "qk_norm_type", ("per_head",)),
    (("minimax-m2",), "rotary_dim", (13, 99)),
    (("ernie", "ernie-vl"), "use_bias", (True,)),
    (("ernie-vl",), "moe_intermediate_size", ([17], [0, 11], [17, 11, 11])),
    (("ernie-vl",), "moe_k", (7,)),
    (("dots1-window", "step3p7"), "layer_types", (["chunked_attention"] * 4,)),
    (("solar-open",), "use_qk_norm", (True,)),
    (("flint",), "mlp_only_layers", ([5],)),
    (("granite-swa",), "layer_rope_theta", ([0, 0.5, 10000.0, 10000.0], [0, 0, 0, "1e4"])),
    (("afmoe",), "score_func", ("softmax",)),
    (("hunyuan",), "use_cla", (True,)),
    (("hunyuan",), "num_shared_expert", ([1, 2],)),
    (("hunyuan",), "moe_intermediate_size", ([21, 20],)),
    (("mistral4",), "n_group", (2,)),
    (("mistral-large4",), "kv_source_layers", ([0, 1, 2, 2],)),
    (("mistral-large4", "llama4"), "no_rope_layers", ([1, 0], [1, 1, 2, 1])),
    (("mistral-large4",), "index_head_dim", (3,)),
    (("mistral-large4",), "indexer_types", (["shared", "full", "full", "full"],)),
    (("step3p7",), "moe_layers_enum", ("1,two", 3)),
    (("step3p7",), "swiglu_limits", ([0.0, -1, 0.0, 0.0],)),
    (("step3p7",), "swiglu_limits_shared", ([0.0, "x", 0.0, 0.0],)),
    (("step3p7",), "sliding_window", (ABSENT,)),
    (("step3p7",), "use_bidirectional_attention", (True,)),
    (("mimo-v2-flash",), "swa_v_head_dim", NOT_AN_INTEGER),
    (("mimo-v2-flash",), "swa_head_dim", NOT_AN_INTEGER),
    (("mimo-v2-flash",), "v_head_dim", (13, 7)),
    (("mimo-v2-flash",), "hybrid_layer_pattern", ([0, 1], [0, 1, 2, 0])),
    (("mimo-v2-flash",), "n_shared_experts", (1,)),
    (("gemma4",), "enable_moe_block", (False,)),
    (("gemma4",), "hidden_activation", ("silu",)),
    (("gemma4",), "hidden_size_per_layer_input", (256,)),
    (("gemma4",), "num_kv_shared_layers", (1,)),
    (("gemma4",), "use_bidirectional_attention", ("all",)),
    (("gemma4",), "top_k_experts", (99,)),
    (("gemma4",), "num_global_key_value_heads", NOT_AN_INTEGER),
    (("phimoe",), "num_experts_per_tok", (3,)),
    (("nemotron-h",), "layers_block_type", (["moe", "dense"], [])),
    (("nemotron-h",), "mlp_hidden_act", ("silu",)),
    (("nemotron-h",), "n_shared_experts", (2,)),
    (("nemotron-h",), "n_groups", (4,)),
    (("nemotron-h",), "time_step_limit", ([0.001, 0.1],)),
    (("jamba",), "attn_layer_offset", (3,)),
    (("jamba",), "expert_layer_offset", (3,)),
    (("jamba",), "mamba_d_state", (257,)),
    (("jamba",), "mamba_d_conv", (1, 17)),
    (("jamba",), "mamba_proj_bias", (True,)),
    (("jamba",), "mamba_inner_layernorms", (False,)),
    (("jamba",), "sliding_window", (4096,)),
    (("deepseek-v32",), "indexer_rope_interleave", (True,)),
    (("glm5",), "indexer_rope_interleave", (False,)),
    (
        ("glm5",),
        "indexer_types",
        (["shared", "full", "full", "full", "full"], ["full", "dense", "full", "full", "full"]),
    ),
    (("glm5-next",), "index_topk", (9,)),
    (("glm5-next",), "index_kpool_always_select_tail", (False,)),
    (("glm5-next",), "indexer_types", (["full", "full", "full", "shared"],)),
    (("glm5-next",), "qk_rope_head_dim", (8,)),
    (("glm5-next",), "num_key_value_heads", (2,)),
    (("glm5-next",), "linear_lower_bound", (1.0,)),
    (("inkling",), "swa_num_key_value_heads", (4,)),
    (("inkling",), "d_rel", (7,)),
    (("inkling",), "conv_kernel_size", (1, 17)),
    (("inkling",), "shared_expert_sink", (False,)),
    (("inkling",), "unpadded_vocab_size", (0, "all")),
    (("muse-spark",), "layer_rope_theta", ([200.0, 0], [200.0, 0, 300.0])),
    (("qwen4-exp",), "hc_count", (1, 9)),
    (("qwen4-exp",), "output_gate_type", ("gelu",)),
    (("qwen4-exp",), "indexer_kv_heads", (2,)),
    (("qwen4-exp",), "indexer_budget", (9,)),
    (("qwen4-exp",), "indexer_head_dim", (3,)),
    (("qwen4-exp",), "ple_layer_ids", ([0], [5])),
    (("qwen4-exp",), "ple_embed_dim", (22, "wide")),
    (("qwen4-exp",), "ple_conv_kernel_size", (1, 7)),
    (("qwen4-exp",), "ngram_size", (1, 9)),
    (("qwen4-exp",), "eos_token_id", (None, [], "end")),
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


@pytest.mark.parametrize("name", EVERY_SHAPE)
def test_unchanged_configs_are_read(name: str, tmp_path: Path) -> None:
    facts = read_facts(folder_with(tmp_path, name, {}))
    config = SHAPES[name].config().get_text_config()
    assert (facts.vocab_size, facts.max_position_embeddings) == (config.vocab_size, config.max_position_embeddings)


@pytest.mark.parametrize("name", EVERY_SHAPE)
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


@pytest.mark.parametrize("tries_all", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EVERY_SHAPE)
def test_values_of_other_kinds_are_refused_unless_the_key_is_ignored(
    name: str, tries_all: bool, tmp_path: Path
) -> None:
    """A key is ignored if the description stays the same."""
    values, unchanged = config_of(name), describe(folder_with(tmp_path, name, {}))
    text = values.get("text_config", values)
    for key in text.keys() - COMMON - SEVERAL_KINDS:
        wrong = values_of_other_kinds(key, text[key], len(unchanged.model.layers))
        chance = random.Random(f"{name} {key}")
        for value in wrong if tries_all else chance.sample(wrong, min(len(wrong), 1)):
            try:
                assert describe(folder_with(tmp_path, name, {key: value})) == unchanged, (key, value)
            except CheckpointError as error:
                said = str(error)
                assert "config.json" in said
                assert key in said or RENAMED[key] in said, said
                assert isinstance(value, list) or str(value) in said, said


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
