"""The decoder of all families: an embedding, layers of a mixer and a feed-forward network, and an LM head.

A token mixer combines a token with earlier tokens: attention, linear attention or a short convolution.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moeserve.kv.layer_cache import CacheItems, CacheNeeds, Places
from moeserve.layers.context import ModelContext
from moeserve.layers.input_share import num_input_chunks
from moeserve.layers.linear import Embedding, OutputHead
from moeserve.layers.moe.dispatch.factory import DispatcherFactory
from moeserve.layers.moe.layer import MoELayer
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.network import Build, Run, Stages, run_in_turn
from moeserve.layers.rotary import Rotaries, Rotations
from moeserve.layers.rows import At, Row
from moeserve.layers.streams.residual import StreamConfig
from moeserve.layers.weights import allocate_weights
from moeserve.models.draft_layer import DraftInput
from moeserve.models.model_config import Block, ModelConfig
from moeserve.step_inputs import StepInputs


class DecoderBlock(nn.Module):
    """A network of one rank, and its place on the residual stream."""

    def __init__(
        self,
        block: Block,
        layer: int,
        stream: StreamConfig,
        build: Build,
        *,
        is_draft: bool,
        suffix: str,
        norm_name: str,
    ) -> None:
        """
        Args:
            layer: index of its layer in the model.
            suffix: end of the names of its tensors, if the layer has several networks of this kind.
            norm_name: the name of the norm before it.
        """
        super().__init__()
        self.layer, self.is_draft, self.ignores_norm = layer, is_draft, block.ignores_norm
        self.name, self.norm_name = f"{block.network.name}{suffix}", norm_name
        self.output_norm_name = f"{block.network.output_norm_name}{suffix}"
        self.network = block.network.build(build)
        form = self.network.input_form
        self.place = stream.place(
            build,
            form,
            block.network.entry_norm(build) if block.norm is None else block.norm.build(build, form),
            has_norm=block.has_norm,
            is_normed=block.is_normed,
            is_scaled=block.is_scaled,
        )

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the rows of its weights.

        Args:
            at: the place of the layer.
        """
        yield from self.place.rows(at, self.norm_name, self.output_norm_name)
        yield from self.network.rows(at.under(self.name))
        if self.ignores_norm:
            yield at(f"{self.output_norm_name}.weight"), None


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
        self.width = config.stream.width
        size = config.hidden_size
        factor = config.embedding_factor
        assert len(placements) == config.num_sparse_layers, (len(placements), config.num_sparse_layers)
        unused = iter(config.of_stage(placements, self.stage))
        self.blocks: list[DecoderBlock] = []
        for number, layer in zip(self.stage, self.layer_configs, strict=True):
            build = Build(context, size, config.norm_epsilon, num_input_chunks(layer.can_divide), unused, dispatchers)
            is_draft = number >= len(config.layers) - config.num_draft_layers
            self.blocks += [
                DecoderBlock(block, number, config.stream, build, is_draft=is_draft, suffix=suffix, norm_name=norm_name)
                for block, suffix, norm_name in zip(layer.blocks, layer.suffixes, layer.norm_names, strict=True)
            ]
        self.decoder_blocks = [block for block in self.blocks if not block.is_draft]
        has_draft = is_last and config.num_draft_layers > 0
        has_embedding = self.stage.start == 0 or has_draft
        self.embedding = Embedding(config.vocab_size, size, context, factor=factor) if has_embedding else None
        self.draft_input = DraftInput(size, config.norm_epsilon, context) if has_draft else None
        # Register the blocks in modules whose names do not depend on the stages.
        self.registered_layers = nn.ModuleDict(
            {str(n): nn.ModuleList(block for block in self.blocks if block.layer == n) for n in self.stage}
        )
        self.last = config.stream.last(build) if is_last else None
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
        self.rotaries = Rotaries(config.rotaries, context.device, context.max_model_len)
        allocate_weights(self)

    def with_one_layer_of_each_kind(self) -> Decoder:
        """Return the model with one layer of each kind.

        A step needs as much memory with it as with the whole model, because layers run one after another.
        """
        number_of_layer = dict(zip(self.layer_configs, self.stage, strict=True))
        numbers = set(number_of_layer.values())
        shallow = copy.copy(self)
        shallow.decoder_blocks = [block for block in self.decoder_blocks if block.layer in numbers]
        shallow.blocks = [*shallow.decoder_blocks, *self.blocks[len(self.decoder_blocks) :]]
        return shallow

    @property
    def moe_layers(self) -> dict[int, MoELayer]:
        """The mixture-of-experts layers of this rank, by their index in the model."""
        return {block.layer: block.network.moe for block in self.blocks if block.network.moe is not None}

    def is_capturable(self, tokens_per_rank: Sequence[int]) -> bool:
        """Return True if a CUDA graph should run such a step, padded. The result is the same on all ranks."""
        return all(layer.is_capturable(tokens_per_rank) for layer in self.moe_layers.values())

    @property
    def cache_needs(self) -> CacheNeeds:
        """The cache memory that all layers of this rank need together."""
        block_size = self.context.block_size
        return CacheNeeds.of(itertools.chain(*self.cache_items), self.config.cache_rules(block_size), block_size)

    @property
    def layers_of_caches(self) -> list[int]:
        """The index of each block's layer."""
        return [block.layer for block in self.blocks]

    @property
    def cache_items(self) -> list[tuple[CacheItems, ...]]:
        """The items that each block keeps."""
        return [block.network.cache_items for block in self.blocks]

    def make_caches(self, places: Places) -> list[Any]:
        """Return a cache for each block, of the kind that its network needs."""
        return [block.network.make_cache(places) for block in self.blocks]

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
            return embedded_tD if self.width == 1 else embedded_tD.repeat(1, self.width), rotations
        previous = self.groups.previous
        assert previous is not None
        shape = step.tp_sizes[self.tp.rank_in_group], self.width * self.config.hidden_size
        empty_tD = torch.empty(shape, dtype=self.context.dtype, device=step.positions.device)
        return previous.broadcast(empty_tD, 0), rotations  # collective: this rank and that of the stage before

    def run_layers(self, hidden_tD: Tensor, rotations: Rotations, caches: list[Any], step: StepInputs) -> Tensor:
        """Compute the argument of `send` from the result of `receive`."""
        (hidden,) = run_in_turn([self.stages(hidden_tD, rotations, caches, step)])
        return hidden

    def stages(self, hidden_tD: Tensor, rotations: Rotations, caches: list[Any], step: StepInputs) -> Stages[Tensor]:
        """Run the layers as a generator that yields where networks wait, and returns the argument of `send`.

        If a step in halves divides a chunk, the chunk's first rows are in the cache before its later rows attend to
        them, because the first half runs each mixer first.
        """
        run = Run(step, rotations)
        stream, update_tD = yield from self._through(self.decoder_blocks, hidden_tD, run, caches)
        if self.last is None:
            return self.decoder_blocks[-1].place.close(stream, update_tD)
        _, normed_tD = self.last.enter(stream, update_tD)
        return self.tp.all_gather(normed_tD, step.tp_sizes)  # collective: all tp ranks

    def _through(
        self, blocks: Sequence[DecoderBlock], hidden_tD: Tensor, run: Run, caches: Sequence[Any]
    ) -> Stages[tuple[Any, Tensor | None]]:
        """Return the residual stream behind some blocks, and the update that is left to add to it."""
        stream, update_tD = self.config.stream.start(hidden_tD), None
        for block, cache in zip(blocks, caches, strict=False):
            self.groups.set_layer(block.layer)
            place, network = block.place, block.network
            stream, rows = place.enter(stream, update_tD)
            update_tD = None  # free this result: DeepEP's low-latency kernels have memory for only two results
            if network.waits:
                update_tD = yield from network.stages(rows, run, cache)
            else:
                update_tD = network(rows, run, cache)
            stream, update_tD = place.leave(stream, update_tD)
        self.groups.set_layer(None)
        return stream, update_tD

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
        first = len(self.decoder_blocks)
        embedded_tD = self.embedding(next_ids_T, step.tp_sizes)
        hidden_tD = self.draft_input(embedded_tD, hidden_TD[step.own_rows])
        run = Run(step, self.rotaries.at(step.positions))
        ((hidden_tD, update_tD),) = run_in_turn([self._through(self.blocks[first:], hidden_tD, run, caches[first:])])
        _, normed_tD = self.draft_input.norm.after_adding(update_tD, hidden_tD)
        return self.tp.all_gather(normed_tD, step.tp_sizes)  # collective: all tp ranks

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return the logits [T, vocab_size] of hidden states. Last stage only; all tp ranks must pass the same rows."""
        assert self.head is not None
        return self.head(hidden_TD)
