"""The model that every family is: layers of attention and feed-forward networks between an embedding and a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moeserve.config import DispatcherName
from moeserve.layers.attention import Attention, AttentionConfig
from moeserve.layers.linear import Embedding, OutputHead
from moeserve.layers.mla import LatentAttention, LatentAttentionConfig
from moeserve.layers.mlp import GatedMLP
from moeserve.layers.norm import RMSNorm
from moeserve.layers.rotary import Rotary, Rotation
from moeserve.models.model_config import LayerConfig, MLPConfig, ModelConfig
from moeserve.moe.layer import MoEConfig, MoELayer
from moeserve.step_inputs import StepInputs

# T tokens, D model width


class DecoderLayer(nn.Module):
    """Attention and a feed-forward network, each on the normalised residual stream and added back to it."""

    def __init__(
        self,
        config: LayerConfig,
        hidden_size: int,
        norm_epsilon: float,
        dispatcher: DispatcherName,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden_size, norm_epsilon, dtype=dtype, device=device)
        self.attention: Attention | LatentAttention
        match config.attention:
            case AttentionConfig() as attention:
                self.attention = Attention(attention, hidden_size, norm_epsilon, dtype=dtype, device=device)
            case LatentAttentionConfig() as attention:
                self.attention = LatentAttention(attention, hidden_size, dtype=dtype, device=device)
        self.feed_forward_norm = RMSNorm(hidden_size, norm_epsilon, dtype=dtype, device=device)
        self.feed_forward: MoELayer | DenseFeedForward
        match config.feed_forward:
            case MoEConfig() as moe:
                self.feed_forward = MoELayer(moe, hidden_size, dispatcher, dtype=dtype, device=device)
            case MLPConfig(width=width):
                self.feed_forward = DenseFeedForward(hidden_size, width, dtype=dtype, device=device)

    def forward(self, hidden_TD: Tensor, rotation: Rotation, cache: Any, step: StepInputs) -> Tensor:
        hidden_TD = hidden_TD + self.attention(self.attention_norm(hidden_TD), rotation, cache, step)
        return hidden_TD + self.feed_forward(self.feed_forward_norm(hidden_TD), step)


class DenseFeedForward(nn.Module):
    """The feed-forward network of a layer without experts. It needs nothing of the step."""

    def __init__(self, hidden_size: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.mlp = GatedMLP(hidden_size, width, dtype=dtype, device=device)

    def forward(self, hidden_TD: Tensor, step: StepInputs) -> Tensor:
        return self.mlp(hidden_TD)


class Decoder(nn.Module):
    """The whole model: tokens in, hidden states out, and logits of the rows that want them."""

    def __init__(
        self, config: ModelConfig, dispatcher: DispatcherName, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.config = config
        size, epsilon = config.hidden_size, config.norm_epsilon
        self.embedding = Embedding(config.vocab_size, size, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(layer, size, epsilon, dispatcher, dtype=dtype, device=device) for layer in config.layers
        ]
        self.registered_layers = nn.ModuleList(self.layers)  # so that torch finds their weights
        self.norm = RMSNorm(size, epsilon, dtype=dtype, device=device)
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.head = OutputHead(config.vocab_size, size, tied_to=tied_to, dtype=dtype, device=device)
        self.rotary = Rotary(config.rotary, device)

    @property
    def cache_bytes_per_token(self) -> int:
        return sum(layer.attention.cache_bytes_per_token for layer in self.layers)

    def make_caches(self, num_blocks: int, block_size: int) -> list[Any]:
        """One cache per layer, of the kind that its attention writes and reads."""
        return [layer.attention.make_cache(num_blocks, block_size) for layer in self.layers]

    def forward(self, step: StepInputs, caches: list[Any]) -> Tensor:
        """Hidden states [T, D] after the last norm."""
        hidden_TD = self.embedding(step.token_ids)
        rotation = self.rotary.at(step.positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden_TD = layer(hidden_TD, rotation, cache, step)
        return self.norm(hidden_TD)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, vocab_size] of hidden states."""
        return self.head(hidden_TD)
