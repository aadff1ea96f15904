"""Random shapes of every family, whose heads several numbers of ranks can divide."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from reference_models import (
    FULL,
    LINEAR,
    SLIDING,
    Shape,
    experts,
    grouped_experts,
    heads,
    latent,
    local_experts,
    rope,
    shape,
    sizes,
)


def _sizes(dice: Random) -> dict[str, Any]:
    return sizes(hidden=4 * dice.randint(6, 24), layers=dice.randint(2, 3), vocab=dice.randint(90, 200))


def _num_heads(dice: Random) -> int:
    return dice.choice([2, 4, 4, 8, 8, 8, 12, 16, 3, 5])


def _heads(dice: Random) -> dict[str, Any]:
    num_heads = _num_heads(dice)
    num_kv_heads = dice.choice([number for number in range(1, num_heads + 1) if num_heads % number == 0])
    return heads(num_heads, num_kv_heads, 4 * dice.randint(2, 6))


def _latent(dice: Random) -> dict[str, Any]:
    return latent(
        _num_heads(dice),
        query=dice.choice([None, dice.randint(10, 40)]),
        kv=dice.randint(12, 40),
        key=dice.randint(6, 20),
        rotary=2 * dice.randint(2, 6),
        value=dice.randint(5, 20),
    )


def _experts(dice: Random, make: Callable[..., dict[str, Any]] = experts, **options: Any) -> dict[str, Any]:
    num_experts = dice.randint(2, 9)
    return make(num_experts, dice.randint(1, min(4, num_experts)), **options)


def _grouped_experts(dice: Random) -> dict[str, Any]:
    num_groups = dice.randint(1, 3)
    num_chosen = dice.randint(1, num_groups)
    in_group = dice.randint(2, 4)
    return grouped_experts(
        num_groups * in_group,
        dice.randint(1, num_chosen * in_group),
        shared=dice.randint(1, 2),
        width=_width(dice),
        dense=1,
        groups=(num_groups, num_chosen),
        scale=2.5,
    )


def _width(dice: Random) -> int:
    """Return an inner width. Chunks do not divide most of them, and of the smallest not every rank gets one."""
    return dice.randint(9, 90)


def _mixtral(dice: Random) -> Shape:
    window = dice.choice([None, dice.randint(5, 30)])
    return shape(
        "Mixtral", _sizes(dice), _experts(dice, local_experts), _heads(dice), intermediate_size=_width(dice),
        sliding_window=window,
    )  # fmt: skip


def _deepseek_v2(dice: Random) -> Shape:
    """Return a shape whose hidden size is a multiple of the number of heads, as in transformers."""
    latents = _latent(dice)
    own_sizes = sizes(hidden=latents["num_attention_heads"] * dice.randint(4, 8), layers=3, vocab=101)
    return shape(
        "DeepseekV2", own_sizes, latents, _grouped_experts(dice), rope(), intermediate_size=_width(dice),
        topk_method=dice.choice(["greedy", "group_limited_greedy"]),
    )  # fmt: skip


def _deepseek_v3(dice: Random) -> Shape:
    return shape(
        "DeepseekV3", _sizes(dice), _latent(dice), _grouped_experts(dice), rope(), intermediate_size=_width(dice),
        norm_topk_prob=True, attention_bias=dice.random() < 0.5,
    )  # fmt: skip


def _qwen2_moe(dice: Random) -> Shape:
    return shape(
        "Qwen2Moe", _sizes(dice), _heads(dice), _experts(dice, width=_width(dice)), rope(),
        shared_expert_intermediate_size=_width(dice), intermediate_size=_width(dice), mlp_only_layers=[1],
    )  # fmt: skip


def _qwen3_moe(dice: Random) -> Shape:
    return shape(
        "Qwen3Moe", _sizes(dice), _heads(dice), _experts(dice, width=_width(dice)), rope(),
        intermediate_size=_width(dice), mlp_only_layers=[0], attention_bias=dice.random() < 0.5,
        tie_word_embeddings=dice.random() < 0.5,
    )  # fmt: skip


def _olmoe(dice: Random) -> Shape:
    """Return a shape whose heads have hidden size / number of heads values each."""
    given = _heads(dice)
    hidden_size = given["num_attention_heads"] * given.pop("head_dim")
    return shape(
        "Olmoe", sizes(hidden=hidden_size, layers=2, vocab=101), given, _experts(dice), rope(),
        intermediate_size=_width(dice), clip_qkv=dice.choice([None, 0.8]),
    )  # fmt: skip


def _glm4_moe(dice: Random) -> Shape:
    return shape(
        "Glm4Moe", _sizes(dice), _heads(dice), _grouped_experts(dice), rope(partial_rotary_factor=0.5),
        intermediate_size=_width(dice), use_qk_norm=dice.random() < 0.5, attention_bias=dice.random() < 0.5,
    )  # fmt: skip


def _gpt_oss(dice: Random) -> Shape:
    return shape(
        "GptOss", sizes(hidden=4 * dice.randint(6, 24), layers=2, vocab=101), _heads(dice),
        _experts(dice, local_experts), rope(), intermediate_size=_width(dice), sliding_window=dice.randint(5, 20),
        layer_types=[FULL, SLIDING], swiglu_limit=2.0,
    )  # fmt: skip


def _jamba(dice: Random) -> Shape:
    """Return a shape whose channels and heads the same numbers of ranks can divide."""
    num_heads = dice.choice([2, 4, 8])
    return shape(
        "Jamba", sizes(hidden=num_heads * dice.randint(4, 12), layers=3, vocab=101), _experts(dice),
        heads(num_heads, dice.choice([1, num_heads])), intermediate_size=_width(dice), attn_layer_period=2,
        attn_layer_offset=1, mamba_d_state=dice.randint(3, 18), mamba_dt_rank=dice.randint(2, 9),
    )  # fmt: skip


def _minimax(dice: Random) -> Shape:
    own_sizes = _sizes(dice)
    return shape(
        "MiniMax", own_sizes, _heads(dice), _experts(dice, local_experts), rope(), intermediate_size=_width(dice),
        layer_types=[LINEAR, FULL, LINEAR][: own_sizes["num_hidden_layers"]], block_size=dice.randint(3, 30),
    )  # fmt: skip


def _jetmoe(dice: Random) -> Shape:
    return shape(
        "JetMoe", _sizes(dice), _experts(dice, local_experts), rope(), num_key_value_heads=_num_heads(dice),
        kv_channels=4 * dice.randint(2, 6), intermediate_size=_width(dice), tie_word_embeddings=False,
    )  # fmt: skip


def _zaya(dice: Random) -> Shape:
    return shape(
        "Zaya", _sizes(dice), _heads(dice), experts(dice.randint(2, 9), 1, _width(dice)),
        router_hidden_size=dice.randint(8, 30), cca_time0=dice.randint(1, 3), cca_time1=dice.randint(1, 3),
        tie_word_embeddings=False,
    )  # fmt: skip


FAMILIES: dict[str, Callable[[Random], Shape]] = {
    "mixtral": _mixtral,
    "deepseek-v2": _deepseek_v2,
    "deepseek-v3": _deepseek_v3,
    "qwen2-moe": _qwen2_moe,
    "qwen3-moe": _qwen3_moe,
    "olmoe": _olmoe,
    "glm4-moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "jamba": _jamba,
    "jetmoe": _jetmoe,
    "minimax": _minimax,
    "zaya": _zaya,
}
