"""A config.json that a family cannot honour is refused, before any weights are looked for, with the key and its value.

Each case changes one thing in a good config.json, and says which words the refusal must hold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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
EVERY = ("mixtral", *DEEPSEEK, *GROUPED)


@dataclass(frozen=True)
class Case:
    """A reference's name, what to change in its config.json, and words of the refusal."""

    name: str
    changes: dict[str, Any]
    says: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}-{'-'.join(self.changes)}-{'-'.join(self.says)}"


def wrong(name: str, key: str, value: Any, *says: str, **besides: Any) -> Case:
    """A case whose refusal shows the key with its value, and what else is said."""
    return Case(name, besides | {key: value}, (f"{key}={value!r}", *says))


def missing(name: str, key: str) -> Case:
    return Case(name, {key: ABSENT}, (f"{key} is missing",))


def config_of(name: str) -> dict[str, Any]:
    """A good config.json in the style of the hub."""
    values = SHAPES[name].config().to_dict()
    return in_the_style_of_the_hub(json.loads(json.dumps(values, default=str)) | {"dtype": "float32"})


def num_experts_key(name: str) -> str:
    if name in (*DEEPSEEK, "glm4-moe"):
        return "n_routed_experts"
    return "num_local_experts" if name in ("mixtral", "gpt-oss") else "num_experts"


def expert_width_key(name: str) -> str:
    return "intermediate_size" if name in ("mixtral", "olmoe", "gpt-oss") else "moe_intermediate_size"


SIZES = [
    wrong(name, key, value)
    for name in EVERY
    for key, value in [
        ("hidden_size", -32),
        ("num_hidden_layers", 0),
        ("num_experts_per_tok", 0),
        (num_experts_key(name), 0),
        (expert_width_key(name), -1),
        ("vocab_size", 10.5),
        ("num_attention_heads", "four"),
        ("rms_norm_eps", 0),
        ("tie_word_embeddings", "no"),
    ]
]

EXPERTS = [
    *(wrong(name, "num_experts_per_tok", 99, num_experts_key(name)) for name in EVERY),
    *(missing(name, num_experts_key(name)) for name in EVERY),
    *(missing(name, expert_width_key(name)) for name in EVERY),
]

GROUPS = [
    *(wrong(name, "n_group", 5, "n_routed_experts") for name in (*DEEPSEEK, "glm4-moe-groups")),
    *(wrong(name, "topk_group", 7, "n_group") for name in (*DEEPSEEK, "glm4-moe-groups")),
    *(wrong(name, "topk_group", 0) for name in (*DEEPSEEK, "glm4-moe-groups")),
    # 4 experts in each of 3 groups, 3 in each of 4, and 3 in each of 3
    wrong("deepseek-v2", "num_experts_per_tok", 9, "topk_group"),
    wrong("deepseek-v3", "num_experts_per_tok", 7, "topk_group"),
    wrong("glm4-moe-groups", "num_experts_per_tok", 7, "topk_group"),
    # a group is as good as its two best experts
    wrong("deepseek-v3", "n_group", 12, num_experts_per_tok=2),
    wrong("glm4-moe-groups", "n_group", 9, num_experts_per_tok=2),
    wrong("deepseek-v2", "scoring_func", "sparsemax"),
    wrong("deepseek-v3", "scoring_func", "sparsemax"),
    wrong("deepseek-v2", "topk_method", "roulette"),
    wrong("deepseek-v3", "topk_method", "roulette"),
    *(wrong(name, "routed_scaling_factor", 0) for name in (*DEEPSEEK, "glm4-moe")),
    *(wrong(name, "routed_scaling_factor", "much") for name in (*DEEPSEEK, "glm4-moe")),
    *(wrong(name, "n_shared_experts", -1) for name in (*DEEPSEEK, "glm4-moe")),
    *(wrong(name, "first_k_dense_replace", -1) for name in (*DEEPSEEK, "glm4-moe")),
    *(wrong(name, "norm_topk_prob", "yes") for name in ("deepseek-v3", "qwen2-moe", "qwen3-moe", "olmoe", "glm4-moe")),
]

ATTENTION = [
    *(wrong(name, "num_key_value_heads", 5, "num_attention_heads") for name in ("mixtral", *GROUPED)),
    *(wrong(name, "num_key_value_heads", 0) for name in GROUPED),
    *(wrong(name, "head_dim", 9) for name in ("mixtral", "qwen3-moe", "gpt-oss")),
    *(wrong(name, "qk_rope_head_dim", 7) for name in DEEPSEEK),
    *(missing(name, key) for name in DEEPSEEK for key in LATENT),
    *(wrong(name, key, 0) for name in DEEPSEEK for key in LATENT),
    *(wrong(name, "q_lora_rank", 0) for name in DEEPSEEK),
    *(wrong(name, "q_lora_rank", "none") for name in DEEPSEEK),
    # 12 values a head: a quarter of them is 3, and more than all of them there are not
    wrong("glm4-moe", "partial_rotary_factor", 0.25),
    wrong("glm4-moe", "partial_rotary_factor", 1.5),
    wrong("glm4-moe", "partial_rotary_factor", 0),
    wrong("glm4-moe", "use_qk_norm", 1),
    *(wrong(name, "attention_bias", "no") for name in ("deepseek-v3", "qwen3-moe", "glm4-moe")),
    wrong("qwen2-moe", "qkv_bias", "no"),
    wrong("olmoe", "clip_qkv", 0),
    wrong("olmoe", "clip_qkv", -8.0),
    wrong("olmoe", "clip_qkv", "tight"),
]

WINDOWS = [
    *(wrong(name, "sliding_window", 0) for name in ("mixtral", "qwen2-moe-window", "qwen3-moe-window", "gpt-oss")),
    *(wrong(name, "sliding_window", -7) for name in ("qwen2-moe-window", "qwen3-moe-window", "gpt-oss")),
    *(wrong(name, "use_sliding_window", "yes") for name in ("qwen2-moe-window", "qwen3-moe-window")),
    *(Case(name, {"layer_types": ["full_attention"]}, ("layer_types=",)) for name in ("qwen2-moe-window", "gpt-oss")),
    *(
        Case(name, {"layer_types": ["linear_attention"] * layers}, ("layer_types", "linear_attention"))
        for name, layers in (("qwen2-moe-window", 4), ("gpt-oss", 3))
    ),
    *(Case(name, {"layer_types": "full"}, ("layer_types='full'",)) for name in ("qwen2-moe-window", "gpt-oss")),
]

FEED_FORWARD = [
    *(Case(name, {"hidden_act": "gelu"}, ("hidden_act='gelu'", "silu")) for name in EVERY),
    *(wrong(name, "mlp_only_layers", [3]) for name in ("qwen2-moe", "qwen3-moe")),
    *(wrong(name, "mlp_only_layers", [-1]) for name in ("qwen2-moe", "qwen3-moe")),
    *(wrong(name, "mlp_only_layers", ["first"]) for name in ("qwen2-moe", "qwen3-moe")),
    *(wrong(name, "mlp_only_layers", 1) for name in ("qwen2-moe", "qwen3-moe")),
    *(wrong(name, "decoder_sparse_step", 0) for name in ("qwen2-moe", "qwen3-moe")),
    wrong("qwen2-moe", "shared_expert_intermediate_size", 0),
    missing("qwen2-moe", "shared_expert_intermediate_size"),
    wrong("gpt-oss", "swiglu_limit", 0),
    wrong("gpt-oss", "swiglu_limit", -7.0),
]

YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 32}

ROTARY = [
    *(Case(name, {"rope_scaling": {"type": "spiral", "factor": 2.0}}, ("rope_scaling=", "'spiral'")) for name in EVERY),
    *(Case(name, {"rope_theta": ABSENT}, ("rope_theta is missing",)) for name in EVERY),
    *(wrong(name, "rope_theta", -1) for name in EVERY),
    *(
        Case(name, {"rope_scaling": YARN | change}, says)
        for name in (*DEEPSEEK, "qwen3-moe", "gpt-oss")
        for change, says in [
            ({"factor": 0}, ("rope_scaling.factor=0",)),
            ({"factor": "forty"}, ("rope_scaling.factor='forty'",)),
            ({"original_max_position_embeddings": 0}, ("rope_scaling.original_max_position_embeddings=0",)),
            ({"beta_fast": -1}, ("rope_scaling.beta_fast=-1",)),
            ({"factor": 0.5}, ("factor=0.5", "at least 1")),
            ({"beta_fast": 1, "beta_slow": 2}, ("beta_fast of at least beta_slow",)),
        ]
    ),
    *(
        Case(
            name,
            {"rope_scaling": {key: value for key, value in YARN.items() if key != "factor"}},
            ("rope_scaling=", "lacks 'factor'"),
        )
        for name in (*DEEPSEEK, "qwen3-moe", "gpt-oss")
    ),
]

QUANTIZATION = [
    *(Case(name, {"quantization_config": {"quant_method": "awq"}}, ("quantization_config=", "awq")) for name in EVERY),
    *(wrong(name, "compression_config", {"format": "int-quantized"}) for name in EVERY),
]

# What these families have in some checkpoints, and nobody runs here.
UNSUPPORTED = [
    wrong("deepseek-v2", "norm_topk_prob", True),
    *(wrong(name, "moe_layer_freq", 2) for name in DEEPSEEK),
    *(wrong(name, "index_topk", 2048) for name in DEEPSEEK),
    *(wrong(name, "dual_chunk_attention_config", {"chunk_size": 8}) for name in ("qwen2-moe", "qwen3-moe")),
    wrong("glm4-moe", "scoring_func", "softmax"),
    wrong("glm4-moe", "topk_method", "greedy"),
    Case("qwen2-moe", {"use_sliding_window": True, "sliding_window": 4}, ("use_sliding_window=True", "layer_types")),
]

CASES = [*UNSUPPORTED, *SIZES, *EXPERTS, *GROUPS, *ATTENTION, *WINDOWS, *FEED_FORWARD, *ROTARY, *QUANTIZATION]


def folder_with(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    values = config_of(name) | changes
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in values.items() if value is not ABSENT})
    )
    return folder


@pytest.mark.parametrize("name", list(SHAPES))
def test_unchanged_configs_are_read(name: str, tmp_path: Path) -> None:
    facts = read_facts(folder_with(tmp_path, name, {}))
    config = SHAPES[name].config()
    assert (facts.vocab_size, facts.max_position_embeddings) == (config.vocab_size, config.max_position_embeddings)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wrong_configs_are_refused(case: Case, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        read_facts(folder_with(tmp_path, case.name, case.changes))
    message = str(error.value)
    assert "config.json" in message
    assert [words for words in case.says if words not in message] == [], message


def test_the_engine_refuses_before_it_looks_for_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_experts_per_tok=99"):
        LLM(folder_with(tmp_path, "mixtral", {"num_experts_per_tok": 99}))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2-moe", {"use_sliding_window": False, "sliding_window": 0}),  # as transformers 5 writes it
        ("qwen3-moe", {"use_sliding_window": False, "sliding_window": 0}),
        ("deepseek-v2-lite", {"n_group": ABSENT, "topk_group": ABSENT}),
        ("kimi", {"num_nextn_predict_layers": 0}),
        ("olmoe", {"clip_qkv": None}),
        ("qwen3-moe", {"rope_scaling": None}),
    ],
)
def test_what_looks_wrong_but_is_not(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert read_facts(folder_with(tmp_path, name, changes)).vocab_size == SHAPES[name].config().vocab_size
