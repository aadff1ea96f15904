"""The shape of a model, which every family reads from its config.json into a `ModelSpec`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from moeserve.config.expert_layout import ExpertShape
from moeserve.config.needs import Needs, of_all
from moeserve.config.routes import RouteShape
from moeserve.kv.rules import CacheRules, groups_of
from moeserve.layers.chunked_sums import keeps_bytes, num_expert_chunks, num_input_chunks
from moeserve.layers.moe.layer import MoESpec
from moeserve.layers.moe.placement.eplb import place_experts
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.network import AttentionCosts, NetworkSpec
from moeserve.layers.rotary import LongRopeScaling, RotarySpec, TemperatureSpec
from moeserve.layers.streams.residual import NormSpec, PlainStream, StreamSpec
from moeserve.ops.rows.activations import num_parts_of

MAX_TENSOR_PARALLEL = 2**10  # more than any layout has
Item = TypeVar("Item")


@dataclass(frozen=True)
class Block:
    """A network, and how it reads from and adds to the residual stream."""

    network: NetworkSpec
    norm: NormSpec | None = None  # norm before the network; None: the default of the network or of the stream
    has_norm: bool = True  # True: the network reads the normalised stream; False: the stream itself
    is_normed: bool = False  # the network's output is normalised before it is added
    ignores_norm: bool = False  # checkpoints may store a norm of the output, which is not used
    is_scaled: bool = False  # the stream is multiplied by a learned number after the network


@dataclass(frozen=True)
class Layer:
    """The blocks of one layer, in order: usually a token mixer and a feed-forward network."""

    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, *networks: NetworkSpec) -> Layer:
        """Return a layer of these networks. Their outputs are added to the residual stream without a norm."""
        return cls(tuple(map(Block, networks)))

    @property
    def networks(self) -> tuple[NetworkSpec, ...]:
        return tuple(block.network for block in self.blocks)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """For each block, the end of its tensors' names: a number if networks have the same name, else empty."""
        names = [network.name for network in self.networks]
        numbers = [names[:index].count(name) for index, name in enumerate(names)]
        return tuple(f".{number}" if names.count(name) > 1 else "" for name, number in zip(names, numbers, strict=True))

    @property
    def norm_names(self) -> tuple[str, ...]:
        """For each block, the name of the norm before it. The norm of a layer's only block is named like a mixer's."""
        if len(self.blocks) == 1:
            return ("input_layernorm",)
        return tuple(f"{network.norm_name}{end}" for network, end in zip(self.networks, self.suffixes, strict=True))

    @property
    def moes(self) -> tuple[MoESpec, ...]:
        """The mixtures of experts among the layer's networks."""
        return tuple(network.moe for network in self.networks if network.moe is not None)

    @property
    def rotaries(self) -> tuple[RotarySpec | TemperatureSpec, ...]:
        """The functions of positions that the layer reads: rotary embeddings or temperatures."""
        return tuple(rotary for network in self.networks for rotary in network.rotaries)

    def can_divide(self, num_ranks: int) -> bool:
        """Return True if all networks can be divided evenly over `num_ranks` tp ranks."""
        return all(network.can_divide(num_ranks) for network in self.networks)


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """The modules for multi-token prediction (MTP) of a checkpoint. Module i drafts the token i + 2 ahead."""

    layers: tuple[Layer, ...]  # the decoder layer of each module
    stream: StreamSpec = PlainStream()
    shares_norm: bool = False  # the norm behind a module is the decoder's norm (ERNIE)
    reads_normed: bool = True  # a module reads hidden states after the last norm before it; False: before this norm
    has_heads: bool = False  # each module has an LM head of its own
    has_embeddings: bool = False  # each module has an embedding of its own


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder: token embedding, layers, norm and output head."""

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_epsilon: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    embedding_factor: float = 1.0  # multiplies the token embeddings
    stream: StreamSpec = PlainStream()
    logits_divisor: float = 1.0
    logits_cap: float | None = None  # see OutputHead
    has_head_bias: bool = False
    num_stored_tokens: int | None = None  # rows of stored embedding and perhaps head, if more than `vocab_size`
    num_skipped_layers: int = 0  # MTP layers after the last decoder layer in the checkpoint, as its config counts them
    draft: DraftSpec | None = None  # the checkpoint's MTP modules; None if there are none, or they are not supported
    num_draft_layers: int = 0  # layers of MTP modules at the end of `layers`, which only draft tokens

    def with_draft_layers(self, num_drafts: int) -> ModelSpec:
        """Return the model with the layers of its MTP modules appended, of at most `num_drafts` modules."""
        assert self.draft is not None
        drafting = self.draft.layers[:num_drafts]
        return dataclasses.replace(self, layers=(*self.layers, *drafting), num_draft_layers=len(drafting))

    @property
    def num_decoder_layers(self) -> int:
        """Number of layers without those for multi-token prediction."""
        return len(self.layers) - self.num_draft_layers

    @property
    def first_moe(self) -> MoESpec | None:
        """The mixture of experts of the first layer that has one. All such layers have the same shape."""
        return next((moe for layer in self.layers for moe in layer.moes), None)

    def costs_of_attention(self, tp: int, layers: range | None = None) -> list[AttentionCosts]:
        """Return the costs, on one of `tp` ranks, of the networks in `layers` that cache an entry per token."""
        chosen = self.layers if layers is None else self.layers[layers.start : layers.stop]
        costs = (network.costs(self.hidden_size, tp) for layer in chosen for network in layer.networks)
        return [each for each in costs if each is not None]

    @property
    def rotaries(self) -> frozenset[RotarySpec | TemperatureSpec]:
        """The functions of positions that the layers read: rotary embeddings or temperatures."""
        return frozenset(rotary for layer in self.layers for rotary in layer.rotaries)

    @property
    def num_experts(self) -> int:
        """Number of experts of each layer with experts; 0 if there are none."""
        return self.first_moe.router.num_experts if self.first_moe else 0

    @property
    def num_expert_groups(self) -> int:
        """Number of groups of experts, if a token uses experts of only some groups; 1 if a token may use any expert."""
        router = self.first_moe.router if self.first_moe else None
        return router.num_groups if router and router.num_chosen_groups < router.num_groups else 1

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
            has_output_norm=moe.output_norm_epsilon is not None,
        )

    @property
    def route_shape(self) -> RouteShape | None:
        """The shape of a token's routes; None if there are no experts."""
        if self.first_moe is None:
            return None
        router = self.first_moe.router
        decoder = self.layers[: self.num_decoder_layers]
        return RouteShape(
            num_layers=len(decoder),
            layers=tuple(number for number, layer in enumerate(decoder) if layer.moes),
            top_k=router.top_k,
            num_experts=router.num_experts + router.num_zero_experts,
        )

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts; a layer with two networks of experts is there twice."""
        return tuple(number for number, layer in enumerate(self.layers) for _ in layer.moes)

    @property
    def num_sparse_layers(self) -> int:
        """Number of layers with experts."""
        return len(self.sparse_layers)

    @property
    def needs(self) -> Needs:
        """Demands of all networks and of the residual stream on the engine's settings."""
        networks = (network.needs for layer in self.layers for network in layer.networks)
        needs = of_all([self.stream.needs, *networks])
        return dataclasses.replace(needs, keeps_state=self.cache_rules(needs.block_size).rows is not None)

    def has_long_rotations(self, max_model_len: int) -> bool:
        """Return True if requests of up to `max_model_len` tokens need LongRoPE's factors for long contexts."""
        scalings = (each.scaling for each in self.rotaries if isinstance(each, RotarySpec))
        return any(each.is_long(max_model_len) for each in scalings if isinstance(each, LongRopeScaling))

    def cache_rules(self, block_size: int) -> CacheRules:
        """Return the rules by which all layers of the model, on all ranks, keep cache blocks and states."""
        networks = (network for layer in self.layers for network in layer.networks)
        return groups_of(rule for network in networks for rule in network.cache_rules(block_size))

    @property
    def first_layers(self) -> frozenset[int]:
        """Indices of layers that may start a pipeline stage.

        Such a layer reads nothing that an earlier layer has chosen. All MTP modules must be on the last stage, so only
        the first of their layers may start a stage.
        """
        first = self.layers[: self.num_decoder_layers + 1]
        needs = enumerate(of_all(network.needs for network in layer.networks) for layer in first)
        return frozenset(number for number, each in needs if not each.reads_earlier_layer)

    def of_stage(self, of_sparse_layers: Sequence[Item], stage: range) -> Sequence[Item]:
        """Return the items for the layers of `stage`. `of_sparse_layers` has one item for each layer with experts."""
        before, last = (sum(len(layer.moes) for layer in self.layers[:end]) for end in (stage.start, stage.stop))
        return of_sparse_layers[before:last]

    def place_experts(
        self,
        num_ranks: int,
        *,
        loads: Sequence[Sequence[float]] = (),
        num_redundant: int = 0,
        node_of_rank: Sequence[int] = (),
    ) -> tuple[Placement, ...]:
        """Return the placement of each layer with experts, computed by `place_experts`."""
        return place_experts(
            loads,
            num_layers=self.num_sparse_layers,
            num_experts=self.num_experts,
            num_ranks=num_ranks,
            num_redundant=num_redundant,
            node_of_rank=node_of_rank,
            num_groups=self.num_expert_groups,
        )

    def slice_experts(self, num_ranks: int) -> tuple[Placement, ...]:
        """Return a placement for each layer with experts, by which every rank has a slice of each expert."""
        return (Placement.sliced(self.num_experts, num_ranks),) * self.num_sparse_layers

    @property
    def tensor_parallel_sizes(self) -> tuple[int, ...]:
        """All numbers of tp ranks over which the heads can be divided."""
        return tuple(size for size in range(1, MAX_TENSOR_PARALLEL + 1) if self.refusal_to_divide(size) is None)

    def keeps_bytes(self, num_ranks: int) -> bool:
        """Return True if batch-invariant kernels give the same bytes on `num_ranks` tp ranks as on one."""
        return all(keeps_bytes(num_input_chunks(layer.can_divide), num_ranks) for layer in self.layers)

    def refusal_to_divide(self, num_ranks: int) -> str | None:
        """Return why the heads cannot be divided over `num_ranks` tp ranks; None if they can."""
        for layer in self.layers:
            if not layer.can_divide(num_ranks):
                return f"the attention heads or key-value heads cannot be divided evenly over {num_ranks} ranks"
        return None
