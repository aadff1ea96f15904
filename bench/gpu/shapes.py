"""The shapes of published models whose kernels are checked and measured. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ExpertActivation = Literal["swiglu", "clamped_swiglu"]


@dataclass(frozen=True)
class MoEShape:
    """One layer's routed experts."""

    num_experts: int
    hidden: int
    width: int  # of an expert
    top_k: int
    activation: ExpertActivation = "swiglu"
    has_bias: bool = False


@dataclass(frozen=True)
class AttentionShape:
    """One layer's grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    has_sinks: bool = False


@dataclass(frozen=True)
class LatentShape:
    """One layer's latent attention."""

    num_heads: int
    latent_size: int = 512
    rotary_size: int = 64


MOE_SHAPES = {
    "Mixtral-8x7B": MoEShape(8, 4096, 14336, 2),
    "DeepSeek-V2-Lite": MoEShape(64, 2048, 1408, 6),
    "Qwen3-30B-A3B": MoEShape(128, 2048, 768, 8),
    "gpt-oss-20b": MoEShape(32, 2880, 2880, 4, "clamped_swiglu", has_bias=True),
}
ATTENTION_SHAPES = {
    "Mixtral-8x7B": AttentionShape(32, 8, 128),
    "Qwen3-30B-A3B": AttentionShape(32, 4, 128),
    "gpt-oss-20b": AttentionShape(64, 8, 64, window=128, has_sinks=True),
}
LATENT_SHAPES = {"DeepSeek-V2-Lite": LatentShape(16), "DeepSeek-V3": LatentShape(128)}
VOCAB_SIZES = {"Mixtral-8x7B": 32000, "Qwen3-30B-A3B": 151936}
