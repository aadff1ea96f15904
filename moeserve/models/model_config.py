"""What a model is, as numbers: every family reads its config.json into this. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.layers.attention import AttentionConfig
from moeserve.layers.mla import LatentAttentionConfig
from moeserve.layers.rotary import RotaryConfig
from moeserve.moe.layer import MoEConfig


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """A dense feed-forward network, which every token passes."""

    width: int


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Attention, and what comes after it."""

    attention: AttentionConfig | LatentAttentionConfig
    feed_forward: MoEConfig | MLPConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder: token embedding, layers, norm and output head."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_epsilon: float
    rotary: RotaryConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_skipped_layers: int = 0  # after the last: multi-token prediction, which a checkpoint holds and nobody runs here
