"""What a model is, as numbers: every family reads its config.json into this. Knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.expert_placement.eplb import place_experts
from moeserve.expert_placement.placement import Placement
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

    @property
    def first_moe(self) -> MoEConfig | None:
        """The first mixture of experts. All layers that have one have the same."""
        return next((layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MoEConfig)), None)

    @property
    def num_experts(self) -> int:
        """Of each layer that has any."""
        return self.first_moe.router.num_experts if self.first_moe else 0

    @property
    def num_sparse_layers(self) -> int:
        """Those with experts."""
        return sum(isinstance(layer.feed_forward, MoEConfig) for layer in self.layers)

    def place_experts(
        self, num_ranks: int, *, loads: Sequence[Sequence[float]] = (), num_redundant: int = 0
    ) -> tuple[Placement, ...]:
        """Of each layer that has experts, where they live. See `place_experts`."""
        return place_experts(
            loads,
            num_layers=self.num_sparse_layers,
            num_experts=self.num_experts,
            num_ranks=num_ranks,
            num_redundant=num_redundant,
        )

    @property
    def tensor_parallel_sizes(self) -> tuple[int, ...]:
        """Over how many tp ranks the heads can be divided."""
        most = max(layer.attention.num_heads for layer in self.layers)
        return tuple(size for size in range(1, most + 1) if self.refusal_to_divide(size) is None)

    def refusal_to_divide(self, num_ranks: int) -> str | None:
        """Why the heads cannot be divided over so many tp ranks; None if they can."""
        for layer in self.layers:
            attention = layer.attention
            if attention.can_divide(num_ranks):
                continue
            if attention.num_heads % num_ranks:
                return f"{attention.num_heads} attention heads cannot be divided evenly over {num_ranks} ranks"
            assert isinstance(attention, AttentionConfig)
            heads = f"{attention.num_kv_heads} key-value heads"
            return f"{heads} can neither be divided nor copied evenly over {num_ranks} ranks"
        return None
