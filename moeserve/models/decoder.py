"""The decoder of all families: an embedding, layers of a mixer and a feed-forward network, and an LM head.

A token mixer combines a token with earlier tokens: attention, linear attention or a short convolution.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moeserve.distributed.coordinator import GroupCoordinator
from moeserve.kv.layer_cache import CacheDivision, CacheNeeds, CacheSize, NoCache
from moeserve.layers.compressed.attention import CompressedAttentionConfig, CompressedSparseAttention
from moeserve.layers.context import ModelContext
from moeserve.layers.dense.mlp import MLP
from moeserve.layers.grouped_query.attention import Attention, AttentionConfig
from moeserve.layers.input_share import InputShare, num_input_chunks, share_inputs
from moeserve.layers.latent.attention import LatentAttention, LatentAttentionConfig
from moeserve.layers.latent.indexer import Choice
from moeserve.layers.linear import Embedding, OutputHead
from moeserve.layers.linear_attention.attention import LinearAttention, LinearAttentionConfig
from moeserve.layers.moe.beside import ParallelNorms, ParallelOutputs
from moeserve.layers.moe.dispatch.factory import DispatcherFactory
from moeserve.layers.moe.layer import MoEConfig, MoELayer, Stages, run_in_turn
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.norm import LayerNorm, RMSNorm, RowsForm
from moeserve.layers.rotary import Rotaries, Rotations
from moeserve.layers.short_convolution.convolution import GatedConvolution, ShortConvolutionConfig
from moeserve.layers.streams.hyper_connections import HyperConnection, Streams
from moeserve.layers.weights import allocate_weights
from moeserve.models.draft_layer import DraftInput
from moeserve.models.model_config import LayerConfig, MLPConfig, ModelConfig
from moeserve.ops.rows.activations import Activation
from moeserve.ops.rows.interface import Float8Rows, Rows
from moeserve.step_inputs import StepInputs

# T tokens of the replica's step, t this tp rank's share of these tokens, D model width


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward network, each on the normalised residual stream and added back to it.

    One of the two may be absent.

    The addition is fused with the next norm, which reads the stream anyway. A layer therefore receives the stream and
    the previous layer's update separately, and returns the stream and its own update.

    Between layers, each tp rank has a share of the step's tokens. Tokens are gathered before the mixer, and its outputs
    are reduced and scattered after it.
    """

    def __init__(
        self,
        config: LayerConfig,
        model: ModelConfig,
        placements: Iterator[Placement],
        dispatchers: DispatcherFactory,
        context: ModelContext,
    ) -> None:
        super().__init__()
        hidden_size, norm_epsilon = model.hidden_size, model.norm_epsilon
        self.tp = context.tp
        self.sum_dtype = context.sum_dtype
        mixer: Attention | LatentAttention | LinearAttention | GatedConvolution | CompressedSparseAttention | None
        match config.mixer:
            case None:
                mixer = None
            case AttentionConfig():
                mixer = Attention(config.mixer, hidden_size, norm_epsilon, context)
            case LatentAttentionConfig():
                mixer = LatentAttention(config.mixer, hidden_size, context)
            case LinearAttentionConfig():
                mixer = LinearAttention(config.mixer, hidden_size, context)
            case ShortConvolutionConfig():
                mixer = GatedConvolution(config.mixer, hidden_size, context)
            case CompressedAttentionConfig():
                mixer = CompressedSparseAttention(config.mixer, hidden_size, norm_epsilon, context)
        feed_forward: MoELayer | DenseFeedForward | None
        match config.feed_forward:
            case None:
                feed_forward = None
            case MoEConfig() as moe:
                feed_forward = MoELayer(moe, hidden_size, next(placements), dispatchers, context)
            case MLPConfig(width=width, activation=activation):
                share = share_inputs(width, num_input_chunks(config.can_divide), context)
                feed_forward = DenseFeedForward(hidden_size, share, context, activation)
        self.mixer_norm: RMSNorm | LayerNorm | HyperConnection | None = None
        if mixer is not None:
            form = mixer.input_form if self.tp.world_size == 1 else "plain"
            self.mixer_norm = make_norm(model, context, form)
        self.mixer = mixer
        self.is_sparse = isinstance(config.mixer, LatentAttentionConfig) and config.mixer.is_sparse
        self.beside: DenseFeedForward | None = None
        self.parallel_outputs: ParallelOutputs | None = None
        self.feed_forward_norm: RMSNorm | LayerNorm | HyperConnection | ParallelNorms | None = None
        if config.beside is not None:
            share = share_inputs(config.beside.width, num_input_chunks(config.can_divide), context)
            self.beside = DenseFeedForward(hidden_size, share, context, config.beside.activation)
            self.feed_forward_norm = ParallelNorms(hidden_size, norm_epsilon, context)
            self.parallel_outputs = ParallelOutputs(hidden_size, norm_epsilon, context)
        elif feed_forward is not None:
            self.feed_forward_norm = make_norm(model, context, feed_forward.input_form)
        self.mixer_output_norm: RMSNorm | None = None
        self.feed_forward_output_norm: RMSNorm | None = None
        if config.has_output_norms:
            self.mixer_output_norm = RMSNorm(hidden_size, norm_epsilon, context)
            self.feed_forward_output_norm = RMSNorm(hidden_size, norm_epsilon, context)
        self.factor = context.parameter(1, dtype=torch.float32) if config.has_factor else None
        self._add_scaled = context.kernels.add_scaled
        self.feed_forward = feed_forward

    @property
    def cache_needs(self) -> CacheNeeds:
        """The cache memory of the mixer."""
        return CacheNeeds() if self.mixer is None else self.mixer.cache_needs

    @property
    def cache_divisions(self) -> tuple[CacheDivision, ...]:
        """The parts of each tensor of the mixer's cache that this tp rank has; empty: all of it."""
        return () if self.mixer is None else self.mixer.cache_divisions

    def make_cache(self, size: CacheSize) -> Any:
        """Return a cache of the mixer's kind."""
        return NoCache() if self.mixer is None else self.mixer.make_cache(size)

    def mix(
        self,
        hidden_tD: Any,
        update_tD: Tensor | None,
        rotations: Rotations,
        cache: Any,
        step: StepInputs,
        choice: Choice,
    ) -> tuple[Any, Any]:
        """Return the residual stream after the mixer, and the argument of `feed`.

        Args:
            choice: the positions selected by an indexer for this step, passed from layer to layer.
        """
        if self.mixer is not None:
            assert self.mixer_norm is not None
            hidden_tD, normed_tD = self.mixer_norm.after_adding(update_tD, hidden_tD)
            normed_TD = gathered(normed_tD, self.tp, step)
            more = (choice,) if self.is_sparse else ()
            mixed_TD = self.mixer(normed_TD, rotations, cache, step, *more)
            # collective: all tp ranks
            update_tD = self.tp.reduce_scatter(mixed_TD, step.tp_sizes, self.sum_dtype)
            if self.mixer_output_norm is not None:
                update_tD = self.mixer_output_norm(update_tD)
        if self.feed_forward_norm is not None:
            return self.feed_forward_norm.after_adding(update_tD, hidden_tD)
        assert update_tD is not None
        return hidden_tD, update_tD

    def feed(self, input_tD: Any, step: StepInputs) -> Stages[Tensor]:
        """Run the feed-forward network as a generator that returns the update of the residual stream.

        Args:
            input_tD: the normalised stream, or the update of the mixer if the layer has no feed-forward network.
        """
        if self.feed_forward is None:
            update_tD: Tensor = input_tD
        elif self.beside is None:
            update_tD = yield from self.feed_forward.stages(input_tD, step)
        else:
            assert isinstance(self.feed_forward, MoELayer)
            assert self.parallel_outputs is not None
            dense_tD = self.beside(input_tD.dense_tD, step)
            experts_tD = yield from self.feed_forward.stages(input_tD.experts_tD, step, input_tD.router_tD)
            update_tD = self.parallel_outputs(dense_tD, experts_tD)
        return update_tD if self.feed_forward_output_norm is None else self.feed_forward_output_norm(update_tD)

    def scale(self, hidden: Any, update_tD: Tensor) -> tuple[Any, Tensor | None]:
        """Return the residual stream and the update to add to it: None if it was added for the layer's factor."""
        return (hidden, update_tD) if self.factor is None else (self._add_scaled(hidden, update_tD, self.factor), None)


def make_norm(
    model: ModelConfig, context: ModelContext, form: RowsForm = "plain", *, num_kinds: int = 3
) -> RMSNorm | LayerNorm | HyperConnection:
    """Return the norm before a sublayer, or after the last one. It also adds the previous sublayer's output.

    Args:
        num_kinds: see `HyperConnection`.
    """
    size, epsilon = model.hidden_size, model.norm_epsilon
    if model.has_layer_norms:
        return LayerNorm(size, epsilon, context)
    if model.streams is None:
        return RMSNorm(size, epsilon, context, form)
    return HyperConnection(model.streams, size, epsilon, context, form, num_kinds=num_kinds)


def gathered(rows_tD: Rows, tp: GroupCoordinator, step: StepInputs) -> Rows:
    """Return the rows [T, D] of all tp ranks. FP8 rows occur only with a single tp rank."""
    if isinstance(rows_tD, Float8Rows):
        return rows_tD
    return tp.all_gather(rows_tD, step.tp_sizes)  # collective: all tp ranks


class DenseFeedForward(nn.Module):
    """The feed-forward network of a layer without experts. Each tp rank has a share of its width."""

    def __init__(self, hidden_size: int, share: InputShare, context: ModelContext, activation: Activation) -> None:
        super().__init__()
        self.tp = context.tp
        self.sum_dtype = context.sum_dtype
        self.mlp = MLP(hidden_size, share, context, activation)

    @property
    def input_form(self) -> RowsForm:
        """The form of rows that `forward` expects."""
        return "float8" if self.mlp.gate_up.is_in_blocks and self.tp.world_size == 1 else "plain"

    def forward(self, hidden_tD: Rows, step: StepInputs) -> Tensor:
        hidden_TD = gathered(hidden_tD, self.tp, step)
        # collective: all tp ranks
        return self.tp.reduce_scatter(self.mlp(hidden_TD), step.tp_sizes, self.sum_dtype)

    def stages(self, hidden_tD: Rows, step: StepInputs) -> Stages[Tensor]:
        """Run the network as a generator with a single stage; see `MoELayer.stages`."""
        yield from ()
        output_tD: Tensor = self(hidden_tD, step)
        return output_tD


class Decoder(nn.Module):
    """One rank's part of the model, which computes hidden states from token ids, and logits from hidden states.

    With several pipeline stages, a rank has the layers of its stage. The first stage has the embedding, and the last
    stage the final norm and the LM head. Every stage except the first receives the residual stream from the previous
    stage. An MTP layer is on the last stage, which then has an embedding too.

    Args:
        placements: for each layer with experts, in order, the placement over the ep group; see `place_experts`.
        dispatchers: factory of the dispatchers that send tokens to experts of other ranks. The worker closes them.
        stage: indices of the layers of this rank; None: all layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        placements: Sequence[Placement],
        dispatchers: DispatcherFactory,
        context: ModelContext,
        stage: range | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.stage = range(len(config.layers)) if stage is None else stage
        assert self.stage.start in config.first_layers
        self.layer_configs = config.layers[self.stage.start : self.stage.stop]
        is_last = self.stage.stop == len(config.layers)
        self.groups = context.groups
        self.dispatchers = dispatchers
        self.tp = context.tp
        size = config.hidden_size
        self.num_streams = 1 if config.streams is None else config.streams.num_streams
        factor = config.embedding_factor
        assert len(placements) == config.num_sparse_layers, (len(placements), config.num_sparse_layers)
        unused = iter(config.of_stage(placements, self.stage))
        self.layers = [DecoderLayer(layer, config, unused, dispatchers, context) for layer in self.layer_configs]
        self.decoder_layers = self.layers[: len(self.layers) - config.num_draft_layers] if is_last else self.layers
        has_draft = is_last and config.num_draft_layers > 0
        has_embedding = self.stage.start == 0 or has_draft
        self.embedding = Embedding(config.vocab_size, size, context, factor=factor) if has_embedding else None
        self.draft_input = DraftInput(size, config.norm_epsilon, context) if has_draft else None
        # Register the layers in a module, so that torch finds their weights by names that do not depend on the stages.
        self.registered_layers = nn.ModuleDict({str(n): each for n, each in zip(self.stage, self.layers, strict=True)})
        last_norm = self.layers[-1].feed_forward_norm
        self.add = last_norm.add if isinstance(last_norm, HyperConnection) else context.kernels.add
        self.norm = make_norm(config, context, num_kinds=1) if is_last else None
        # If the last stage has no embedding, it loads a copy of tied weights.
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.head: OutputHead | None = None
        if is_last:
            self.head = OutputHead(
                config.vocab_size,
                size,
                context,
                tied_to=tied_to,
                divisor=config.logits_divisor,
                cap=config.logits_cap,
                has_bias=config.has_head_bias,
            )
        self.rotaries = Rotaries(config.rotaries, context.device)
        allocate_weights(self)

    def with_one_layer_of_each_kind(self) -> Decoder:
        """Return the model with one layer of each kind.

        A step needs as much memory with it as with the whole model, because layers run one after another.
        """
        layer_of_config = dict(zip(self.layer_configs, self.decoder_layers, strict=False))
        shallow = copy.copy(self)
        shallow.decoder_layers = list(layer_of_config.values())
        shallow.layers = [*shallow.decoder_layers, *self.layers[len(self.decoder_layers) :]]
        return shallow

    @property
    def moe_layers(self) -> dict[int, MoELayer]:
        """The mixture-of-experts layers of this rank, by their index in the model."""
        return {
            number: layer.feed_forward
            for number, layer in enumerate(self.layers, self.stage.start)
            if isinstance(layer.feed_forward, MoELayer)
        }

    def is_capturable(self, tokens_per_rank: Sequence[int]) -> bool:
        """Return True if a CUDA graph should run such a step, padded. The result is the same on all ranks."""
        return all(layer.is_capturable(tokens_per_rank) for layer in self.moe_layers.values())

    @property
    def cache_needs(self) -> CacheNeeds:
        """The cache memory that all layers of this rank need together."""
        return sum((layer.cache_needs for layer in self.layers), CacheNeeds())

    @property
    def has_states(self) -> bool:
        """True if at least one layer of this rank keeps a state for each request."""
        return self.cache_needs.state_bytes > 0

    def make_caches(self, size: CacheSize) -> list[Any]:
        """Return a cache for each layer, of the kind that its mixer needs."""
        return [layer.make_cache(size) for layer in self.layers]

    def forward(self, step: StepInputs, caches: list[Any]) -> Tensor:
        """Return the hidden states [T, D] of all tokens of the replica, after the final norm on the last stage."""
        parts = step.halves or (step,)
        inputs = [self.receive(part) for part in parts]
        running = [self.stages(*of_part, caches, part) for of_part, part in zip(inputs, parts, strict=True)]
        del inputs
        sent = [self.send(hidden) for hidden in run_in_turn(running)]
        return sent[0] if len(sent) == 1 else torch.cat(sent)

    def receive(self, step: StepInputs) -> tuple[Tensor, Rotations]:
        """Return the input of this rank's first layer, and the rotary angles of the step.

        The input is the embedded tokens, or the residual stream of the previous stage. Several residual streams are
        concatenated.
        """
        rotations = self.rotaries.at(step.positions)
        if self.stage.start == 0:
            assert self.embedding is not None
            embedded_tD = self.embedding(step.token_ids, step.tp_sizes)
            return embedded_tD if self.num_streams == 1 else embedded_tD.repeat(1, self.num_streams), rotations
        previous = self.groups.previous
        assert previous is not None
        shape = step.tp_sizes[self.tp.rank_in_group], self.num_streams * self.config.hidden_size
        empty_tD = torch.empty(shape, dtype=self.context.dtype, device=step.positions.device)
        return previous.broadcast(empty_tD, 0), rotations  # collective: this rank and that of the stage before

    def run_layers(self, hidden_tD: Tensor, rotations: Rotations, caches: list[Any], step: StepInputs) -> Tensor:
        """Compute the argument of `send` from the result of `receive`."""
        (hidden,) = run_in_turn([self.stages(hidden_tD, rotations, caches, step)])
        return hidden

    def stages(self, hidden_tD: Tensor, rotations: Rotations, caches: list[Any], step: StepInputs) -> Stages[Tensor]:
        """Run the layers as a generator that yields in each layer with experts, and returns the argument of `send`.

        If a step in halves divides a chunk, the chunk's first rows are in the cache before its later rows attend to
        them, because the first half runs the mixer of each layer first.
        """
        update_tD: Tensor | None = None
        residual: Any = hidden_tD if self.config.streams is None else Streams(hidden_tD)
        choice = Choice()
        for number, (layer, cache) in enumerate(zip(self.decoder_layers, caches, strict=False), self.stage.start):
            self.groups.set_layer(number)
            residual, input_tD = layer.mix(residual, update_tD, rotations, cache, step, choice)
            update_tD = None  # free this result: DeepEP's low-latency kernels have memory for only two results
            residual, update_tD = layer.scale(residual, (yield from layer.feed(input_tD, step)))
        self.groups.set_layer(None)
        if self.norm is None:
            if update_tD is None:
                return residual
            return self.add(residual, update_tD)  # gives the same bytes as the addition in the next layer's norm
        _, normed_tD = self.norm.after_adding(update_tD, residual)
        return self.tp.all_gather(normed_tD, step.tp_sizes)  # collective: all tp ranks

    def send(self, hidden: Tensor) -> Tensor:
        """Send the residual stream to the next stage. On the last stage, return the hidden states unchanged."""
        following = self.groups.next
        return hidden if following is None else following.broadcast(hidden, 0)  # collective: this rank and the next's

    def draft(self, step: StepInputs, next_ids_T: Tensor, hidden_TD: Tensor, caches: list[Any]) -> Tensor:
        """Return hidden states [T, D] from which `logits` predicts the token after the next one.

        Collective: all ranks.

        Args:
            step: the step; it runs as a whole even if it has halves.
            next_ids_T: the token that follows each row's token.
            hidden_TD: the result of `forward`.
        """
        assert self.draft_input is not None
        assert self.embedding is not None
        layer, cache = self.layers[-1], caches[-1]
        self.groups.set_layer(self.stage.stop - 1)
        embedded_tD = self.embedding(next_ids_T, step.tp_sizes)
        hidden_tD = self.draft_input(embedded_tD, hidden_TD[step.own_rows])
        rotations = self.rotaries.at(step.positions)
        hidden_tD, input_tD = layer.mix(hidden_tD, None, rotations, cache, step, Choice())
        (update_tD,) = run_in_turn([layer.feed(input_tD, step)])
        self.groups.set_layer(None)
        _, normed_tD = self.draft_input.norm.after_adding(update_tD, hidden_tD)
        return self.tp.all_gather(normed_tD, step.tp_sizes)  # collective: all tp ranks

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return the logits [T, vocab_size] of hidden states. Last stage only; all tp ranks must pass the same rows."""
        assert self.head is not None
        return self.head(hidden_TD)
