"""Mixtral (arXiv 2401.04088): grouped-query attention, and in every layer a mixture of experts after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeserve.config import DispatcherName, EngineConfig
from moeserve.layers.attention import Attention, KeyValueCache
from moeserve.layers.linear import Embedding, OutputHead
from moeserve.layers.norm import RMSNorm
from moeserve.layers.rotary import RotaryConfig, Rotation
from moeserve.models.config_json import ConfigJson
from moeserve.models.weights import Destinations
from moeserve.moe.experts import Experts
from moeserve.moe.layer import MoELayer
from moeserve.moe.router import SoftmaxRouter
from moeserve.step_inputs import StepInputs

# T tokens, D model width


@dataclass(frozen=True)
class MixtralConfig:
    """The numbers of a Mixtral checkpoint."""

    vocab_size: int
    hidden_size: int
    expert_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    norm_epsilon: float
    rotary: RotaryConfig
    max_position_embeddings: int
    window: int | None
    tie_word_embeddings: bool

    @classmethod
    def from_json(cls, config: ConfigJson) -> MixtralConfig:
        config.require("hidden_act", "silu")
        hidden_size = config.integer("hidden_size", high=2**18)
        num_heads = config.integer("num_attention_heads", high=2**14)
        num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise config.wrong("num_key_value_heads", f"must divide num_attention_heads={num_heads}")
        head_dim = config.optional_integer("head_dim")
        if head_dim is None and hidden_size % num_heads:
            raise config.wrong("hidden_size", f"must be a multiple of num_attention_heads={num_heads}")
        head_dim = head_dim or hidden_size // num_heads
        num_experts = config.integer("num_local_experts", high=2**14)
        top_k = config.integer("num_experts_per_tok")
        if top_k > num_experts:
            raise config.wrong("num_experts_per_tok", f"is more than num_local_experts={num_experts}")
        return cls(
            vocab_size=config.integer("vocab_size", high=2**24),
            hidden_size=hidden_size,
            expert_width=config.integer("intermediate_size", high=2**20),
            num_layers=config.integer("num_hidden_layers", high=2**12),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_experts=num_experts,
            top_k=top_k,
            norm_epsilon=config.number("rms_norm_eps"),
            rotary=config.rotary(head_dim),
            max_position_embeddings=config.integer("max_position_embeddings"),
            window=config.optional_integer("sliding_window"),
            tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
        )


class MixtralLayer(nn.Module):
    """Attention and experts, each on the normalised residual stream and added back to it."""

    def __init__(
        self, config: MixtralConfig, dispatcher: DispatcherName, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm = RMSNorm(width, config.norm_epsilon, dtype=dtype, device=device)
        self.attention = Attention(
            width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=config.window,
            dtype=dtype,
            device=device,
        )
        self.moe_norm = RMSNorm(width, config.norm_epsilon, dtype=dtype, device=device)
        self.moe = MoELayer(
            SoftmaxRouter(width, config.num_experts, config.top_k, dtype=dtype, device=device),
            Experts(config.num_experts, width, config.expert_width, dtype=dtype, device=device),
            config.num_experts,
            dispatcher,
        )

    def forward(self, hidden_TD: Tensor, rotation: Rotation, cache: KeyValueCache, step: StepInputs) -> Tensor:
        hidden_TD = hidden_TD + self.attention(self.attention_norm(hidden_TD), rotation, cache, step)
        return hidden_TD + self.moe(self.moe_norm(hidden_TD), step)


class Mixtral(nn.Module):
    """The whole model: tokens in, hidden states out, and logits of the rows that want them."""

    def __init__(self, config: MixtralConfig, engine: EngineConfig) -> None:
        super().__init__()
        dtype, device = getattr(torch, engine.dtype), torch.device(engine.device)
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [
            MixtralLayer(config, engine.dispatcher, dtype=dtype, device=device) for _ in range(config.num_layers)
        ]
        self.registered_layers = nn.ModuleList(self.layers)  # so that torch finds their weights
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon, dtype=dtype, device=device)
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.head = OutputHead(config.vocab_size, config.hidden_size, tied_to=tied_to, dtype=dtype, device=device)
        self.frequencies = config.rotary.frequencies().to(device)

    @property
    def cache_bytes_per_token(self) -> int:
        return sum(layer.attention.cache_bytes_per_token for layer in self.layers)

    def make_caches(self, num_blocks: int, block_size: int) -> list[KeyValueCache]:
        return [layer.attention.make_cache(num_blocks, block_size) for layer in self.layers]

    def forward(self, step: StepInputs, caches: list[KeyValueCache]) -> Tensor:
        """Hidden states [T, D] after the last norm."""
        hidden_TD = self.embedding(step.token_ids)
        rotation = Rotation.at(step.positions, self.frequencies)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden_TD = layer(hidden_TD, rotation, cache, step)
        return self.norm(hidden_TD)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, vocab_size] of hidden states."""
        return self.head(hidden_TD)

    def destinations(self, published: Iterable[str]) -> Destinations:
        """Where each tensor of a checkpoint belongs, given the names that it publishes.

        Both layouts of experts are known: a tensor per expert under `block_sparse_moe`, and all experts of a layer
        in one tensor under `mlp`.
        """
        names = set(published)
        into: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embedding.weight,
            "model.norm.weight": self.norm.weight,
        }
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}"
            attention = layer.attention
            query, key, value = attention.query_key_value.weight.split(attention.projected_sizes)
            into |= {
                f"{prefix}.input_layernorm.weight": layer.attention_norm.weight,
                f"{prefix}.self_attn.q_proj.weight": query,
                f"{prefix}.self_attn.k_proj.weight": key,
                f"{prefix}.self_attn.v_proj.weight": value,
                f"{prefix}.self_attn.o_proj.weight": attention.output.weight,
                f"{prefix}.post_attention_layernorm.weight": layer.moe_norm.weight,
            }
            experts = layer.moe.experts
            if f"{prefix}.mlp.experts.gate_up_proj" in names:
                into |= {
                    f"{prefix}.mlp.gate.weight": layer.moe.router.weight,
                    f"{prefix}.mlp.experts.gate_up_proj": experts.gate_up,
                    f"{prefix}.mlp.experts.down_proj": experts.down,
                }
                continue
            into[f"{prefix}.block_sparse_moe.gate.weight"] = layer.moe.router.weight
            for expert in range(self.config.num_experts):
                gate, up = experts.gate_up[expert].chunk(2)
                published_as = f"{prefix}.block_sparse_moe.experts.{expert}"
                into |= {
                    f"{published_as}.w1.weight": gate,
                    f"{published_as}.w3.weight": up,
                    f"{published_as}.w2.weight": experts.down[expert],
                }
        if not self.config.tie_word_embeddings:
            into["lm_head.weight"] = self.head.weight
        frequencies = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(len(self.layers))}
        return Destinations(into, ignored=frozenset(frequencies | {"lm_head.weight"}))
