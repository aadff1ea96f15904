"""The shape of a model, which every family reads from its config.json into a `ModelConfig`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from moeserve.config.expert_layout import ExpertShape
from moeserve.layers.compressed.attention import CompressedAttentionConfig
from moeserve.layers.grouped_query.attention import AttentionConfig
from moeserve.layers.input_share import keeps_bytes, num_expert_chunks, num_input_chunks
from moeserve.layers.latent.attention import LatentAttentionConfig
from moeserve.layers.linear_attention.attention import LinearAttentionConfig
from moeserve.layers.moe.layer import MoEConfig
from moeserve.layers.moe.placement.eplb import place_experts
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.rotary import RotaryConfig, TemperatureConfig
from moeserve.layers.short_convolution.convolution import ShortConvolutionConfig
from moeserve.ops.rows.activations import Activation, SwiGLU, num_parts_of
from moeserve.ops.streams.interface import StreamsConfig

Item = TypeVar("Item")
CachedAttention = AttentionConfig | LatentAttentionConfig | CompressedAttentionConfig  # mixers that cache tokens


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """The shape of a dense feed-forward network."""

    width: int
    activation: Activation = SwiGLU()


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The shape of one layer: a mixer followed by a feed-forward network, or only one of them (Nemotron-H)."""

    mixer: CachedAttention | LinearAttentionConfig | ShortConvolutionConfig | None
    feed_forward: MoEConfig | MLPConfig | None
    beside: MLPConfig | None = None  # a dense network that reads the residual stream beside the experts (Gemma 4)
    has_output_norms: bool = False  # the outputs of the mixer and of the feed-forward network are normalised
    has_factor: bool = False  # the residual stream is multiplied by a learned number behind the layer

    def __post_init__(self) -> None:
        assert self.mixer is not None or self.feed_forward is not None

    @property
    def rotaries(self) -> tuple[RotaryConfig | TemperatureConfig, ...]:
        """The functions of positions that the layer reads: rotary embeddings or temperatures."""
        return () if self.mixer is None else tuple(self.mixer.rotaries)

    def can_divide(self, num_ranks: int) -> bool:
        """Return True if the heads of the mixer can be divided evenly over this number of tp ranks."""
        return self.mixer is None or self.mixer.can_divide(num_ranks)


def attentions_of(layers: Iterable[LayerConfig]) -> tuple[CachedAttention, ...]:
    """Return the mixers of some layers that have a cache with an entry for each token."""
    mixers = (layer.mixer for layer in layers)
    return tuple(mixer for mixer in mixers if isinstance(mixer, CachedAttention))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder: token embedding, layers, norm and output head."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_epsilon: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    embedding_factor: float = 1.0  # multiplies the token embeddings
    streams: StreamsConfig | None = None  # hyper-connections; None: there is one residual stream
    logits_divisor: float = 1.0
    logits_cap: float | None = None  # see OutputHead
    has_head_bias: bool = False
    has_layer_norms: bool = False  # the norms are LayerNorms
    num_skipped_layers: int = 0  # multi-token prediction (MTP) layers after the last one, which are not loaded
    draft_layer: LayerConfig | None = None  # the first MTP layer, if it is supported; see `with_draft_layer`
    num_draft_layers: int = 0  # MTP layers at the end of `layers`, which only draft tokens

    def with_draft_layer(self) -> ModelConfig:
        """Return the model with its MTP layer appended to the layers."""
        assert self.draft_layer is not None
        return dataclasses.replace(
            self,
            layers=(*self.layers, self.draft_layer),
            num_skipped_layers=max(self.num_skipped_layers - 1, 0),
            draft_layer=None,
            num_draft_layers=1,
        )

    @property
    def first_moe(self) -> MoEConfig | None:
        """The mixture of experts of the first layer that has one. All such layers have the same shape."""
        return next((layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MoEConfig)), None)

    @property
    def rotaries(self) -> frozenset[RotaryConfig | TemperatureConfig]:
        """The functions of positions that the layers read: rotary embeddings or temperatures."""
        return frozenset(rotary for layer in self.layers for rotary in layer.rotaries)

    @property
    def num_experts(self) -> int:
        """Number of experts of each layer with experts; 0 if there are none."""
        return self.first_moe.router.num_experts if self.first_moe else 0

    @property
    def expert_shape(self) -> ExpertShape | None:
        """The shape of the experts of each layer with experts; None if there are none."""
        moe = self.first_moe
        if moe is None:
            return None
        num_chunks = num_expert_chunks(moe.expert_width)
        return ExpertShape(
            num_experts=moe.router.num_experts,
            top_k=moe.router.top_k,
            hidden_size=moe.latent_size or self.hidden_size,
            width=moe.expert_width,
            num_matrices=num_parts_of(moe.activation) + 1,
            slices_alike=tuple(number for number in range(1, num_chunks + 1) if keeps_bytes(num_chunks, number)),
        )

    @property
    def num_sparse_layers(self) -> int:
        """Number of layers with experts."""
        return sum(isinstance(layer.feed_forward, MoEConfig) for layer in self.layers)

    @property
    def has_latent_attention(self) -> bool:
        """True if a layer caches vectors that are both keys and values."""
        kinds = LatentAttentionConfig, CompressedAttentionConfig
        return any(isinstance(layer.mixer, kinds) for layer in self.layers)

    @property
    def has_entries(self) -> bool:
        """True if a layer keeps compressed entries."""
        return any(isinstance(layer.mixer, CompressedAttentionConfig) for layer in self.layers)

    @property
    def without_gpu_kernels(self) -> str | None:
        """The part of the model that has no kernels for GPUs; None if all have."""
        if any(layer.beside is not None for layer in self.layers):
            return "a dense network beside the experts"
        if self.first_moe is not None and self.first_moe.router.scoring == "sparse_mixer":
            return "routing by a sparse mixer"
        return "LayerNorm" if self.has_layer_norms else None

    @property
    def block_multiple(self) -> int:
        """The number of which block sizes must be multiples: the tokens of an entry that an indexer chooses from."""
        compressed = (each for each in self.attentions if isinstance(each, CompressedAttentionConfig))
        return math.lcm(*(each.ratio for each in compressed if each.ratio is not None and each.indexer is not None))

    @property
    def has_states(self) -> bool:
        """True if a layer keeps a state for each request."""
        return any(isinstance(layer.mixer, LinearAttentionConfig | ShortConvolutionConfig) for layer in self.layers)

    @property
    def attentions(self) -> tuple[CachedAttention, ...]:
        """The mixers that have a cache with an entry for each token. Every model has some."""
        return attentions_of(self.layers)

    @property
    def first_layers(self) -> frozenset[int]:
        """Indices of layers that may start a pipeline stage, because they do not reuse positions selected before."""
        kinds = enumerate(layer.mixer for layer in self.layers)
        return frozenset(
            number for number, kind in kinds if not (isinstance(kind, LatentAttentionConfig) and kind.shares_choice)
        )

    def of_stage(self, of_sparse_layers: Sequence[Item], stage: range) -> Sequence[Item]:
        """Return the items for a stage from `of_sparse_layers`, which has one for each layer with experts."""
        before, last = (
            sum(isinstance(layer.feed_forward, MoEConfig) for layer in self.layers[:end])
            for end in (stage.start, stage.stop)
        )
        return of_sparse_layers[before:last]

    def place_experts(
        self, num_ranks: int, *, loads: Sequence[Sequence[float]] = (), num_redundant: int = 0
    ) -> tuple[Placement, ...]:
        """Return the placement of each layer with experts, computed by `place_experts`."""
        return place_experts(
            loads,
            num_layers=self.num_sparse_layers,
            num_experts=self.num_experts,
            num_ranks=num_ranks,
            num_redundant=num_redundant,
        )

    def slice_experts(self, num_ranks: int) -> tuple[Placement, ...]:
        """Return the placement of each layer with experts in which every rank has a slice of each expert."""
        return (Placement.sliced(self.num_experts, num_ranks),) * self.num_sparse_layers

    @property
    def tensor_parallel_sizes(self) -> tuple[int, ...]:
        """All numbers of tp ranks over which the heads can be divided."""
        most = max(layer.mixer.num_heads for layer in self.layers if layer.mixer is not None)
        return tuple(size for size in range(1, most + 1) if self.refusal_to_divide(size) is None)

    def keeps_bytes(self, num_ranks: int) -> bool:
        """Return True if batch-invariant kernels give the same bytes on `num_ranks` tp ranks as on one."""
        return all(keeps_bytes(num_input_chunks(layer.can_divide), num_ranks) for layer in self.layers)

    def refusal_to_divide(self, num_ranks: int) -> str | None:
        """Return why the heads cannot be divided over `num_ranks` tp ranks; None if they can."""
        for layer in self.layers:
            if not layer.can_divide(num_ranks):
                return f"the attention heads or key-value heads cannot be divided evenly over {num_ranks} ranks"
        return None
