"""The decoder of all families: an embedding, layers of a mixer and a feed-forward network, and an LM head.

A token mixer combines a token with earlier tokens: attention, linear attention or a short convolution.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moeserve.kv.layer_cache import CacheItems, CacheNeeds, Places
from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import num_input_chunks
from moeserve.layers.linear import Embedding, OutputHead
from moeserve.layers.moe.dispatch.factory import DispatcherFactory
from moeserve.layers.moe.layer import MoELayer
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.network import Build, Run, Stages, run_in_turn
from moeserve.layers.rotary import Rotaries, Rotations
from moeserve.layers.rows import At, Row
from moeserve.layers.streams.residual import Place, PlaceSpec, StreamSpec
from moeserve.layers.weights import allocate_weights
from moeserve.models.draft_module import DraftModule
from moeserve.models.model_config import Block, ModelSpec
from moeserve.step_inputs import StepInputs


class DecoderBlock(nn.Module):
    """One network of a layer on one rank, and the `Place` that connects it to the residual stream."""

    def __init__(
        self,
        block: Block,
        layer: int,
        stream: StreamSpec,
        build: Build,
        *,
        module: int | None,
        suffix: str,
        norm_name: str,
    ) -> None:
        """
        Args:
            layer: index in the model of the network's layer.
            module: index of the network's MTP module; None: the network is part of the decoder.
            suffix: end of the names of the network's tensors, if the layer has several networks of this kind.
            norm_name: name of the norm before the network.
        """
        super().__init__()
        self.layer, self.module, self.ignores_norm = layer, module, block.ignores_norm
        self.name, self.norm_name = f"{block.network.name}{suffix}", norm_name
        self.output_norm_name = f"{block.network.output_norm_name}{suffix}"
        self.network = block.network.build(build)
        form = self.network.input_form
        spec = PlaceSpec(
            entry_norm=block.network.entry_norm(build) if block.norm is None else block.norm.build(build, form),
            has_norm=block.has_norm,
            is_normed=block.is_normed,
            is_scaled=block.is_scaled,
        )
        self.place = stream.place(build, form, spec)

    def rows(self, at: At) -> Iterator[Row]:
        """Yield this block's rows of the weight mapping.

        Args:
            at: the place of the layer in the names of tensors.
        """
        yield from self.place.rows(at, self.norm_name, self.output_norm_name)
        yield from self.network.rows(at.under(self.name))
        if self.ignores_norm:
            yield at(f"{self.output_norm_name}.weight"), None


class Decoder(nn.Module):
    """One rank's part of the model, which computes hidden states from token ids, and logits from hidden states.

    With several pipeline stages, a rank has the layers of its stage. The first stage has the embedding, and the last
    stage the final norm and the LM head. Every stage except the first receives the residual stream from the previous
    stage. MTP modules are on the last stage, which then has an embedding too.

    Args:
        placements: for each layer with experts, in order, the placement over the ep group; see `place_experts`.
        dispatchers: factory of the dispatchers that send tokens to experts of other ranks; closed by the worker.
        stage: indices of the layers of this rank; None: all layers.
    """

    def __init__(
        self,
        config: ModelSpec,
        placements: Sequence[Placement],
        dispatchers: DispatcherFactory,
        context: BuildContext,
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
        # True: `forward` and `draft` return normalised hidden states. False: they return the residual stream.
        self.returns_normed = not config.num_draft_layers or config.draft is None or config.draft.reads_normed
        size = config.hidden_size
        assert len(placements) == config.num_sparse_layers, (len(placements), config.num_sparse_layers)
        unused = iter(config.of_stage(placements, self.stage))
        self.blocks: list[DecoderBlock] = []
        self.draft_modules: list[DraftModule] = []
        for number, layer in zip(self.stage, self.layer_configs, strict=True):
            of_layer, chunks = context.of_layer(number, len(config.layers)), num_input_chunks(layer.can_divide)
            build = Build(of_layer, size, config.norm_epsilon, chunks, unused, dispatchers)
            module, stream = None, config.stream
            if number >= config.num_decoder_layers:
                assert config.draft is not None
                module, stream = number - config.num_decoder_layers, config.draft.stream
                own_head = _make_head(config, context, None) if config.draft.has_heads else None
                own_embedding = _make_embedding(config, context) if config.draft.has_embeddings else None
                self.draft_modules.append(DraftModule(config.draft, build, own_embedding, own_head))
            self.blocks += [
                DecoderBlock(block, number, stream, build, module=module, suffix=suffix, norm_name=norm_name)
                for block, suffix, norm_name in zip(layer.blocks, layer.suffixes, layer.norm_names, strict=True)
            ]
        self.decoder_blocks = [block for block in self.blocks if block.module is None]
        has_embedding = self.stage.start == 0 or len(self.draft_modules) > 0
        self.embedding = _make_embedding(config, context) if has_embedding else None
        # Register the blocks in modules whose names do not depend on the stages.
        self.registered_layers = nn.ModuleDict(
            {str(n): nn.ModuleList(block for block in self.blocks if block.layer == n) for n in self.stage}
        )
        self.registered_modules = nn.ModuleList(self.draft_modules)
        self.last = config.stream.last(build) if is_last else None
        # If the last stage has no embedding, it loads a copy of tied weights.
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.head = _make_head(config, context, tied_to) if is_last else None
        self.rotaries = Rotaries(config.rotaries, context.device, context.max_model_len)
        allocate_weights(self)

    def with_one_layer_of_each_kind(self) -> Decoder:
        """Return the model with only one layer of each kind.

        A step of the returned model needs as much memory as a step of the whole model, because layers run one after
        another.
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
        """Return True if a padded step with these token counts should run as a CUDA graph; the same on all ranks."""
        return all(layer.is_capturable(tokens_per_rank) for layer in self.moe_layers.values())

    @property
    def cache_needs(self) -> CacheNeeds:
        """The cache memory that all layers of this rank need together."""
        block_size = self.context.block_size
        return CacheNeeds.of(itertools.chain(*self.cache_items), self.config.cache_rules(block_size), block_size)

    @property
    def layers_of_caches(self) -> list[int]:
        """For each block, the index of its layer in the model."""
        return [block.layer for block in self.blocks]

    @property
    def cache_items(self) -> list[tuple[CacheItems, ...]]:
        """For each block, the cache items of its network: blocks of keys and values, or states."""
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
        """Run this rank's layers on the result of `receive`, and return the hidden states for `send`."""
        (hidden,) = run_in_turn([self.stages(hidden_tD, rotations, caches, step)])
        return hidden

    def stages(self, hidden_tD: Tensor, rotations: Rotations, caches: list[Any], step: StepInputs) -> Stages[Tensor]:
        """Run the layers as a generator that yields before each wait for other ranks.

        The generator's return value is the argument of `send`.

        If the two halves of an overlapped step divide a prefill chunk, the chunk's first rows are in the cache before
        its later rows attend to them, because the first half runs each mixer first.
        """
        run = Run(step, rotations)
        blocks = zip(self.decoder_blocks, caches, strict=False)
        stream, update_tD = yield from self._through(blocks, self.config.stream.start(hidden_tD), run)
        if self.last is None:
            return self.decoder_blocks[-1].place.close(stream, update_tD)
        return self._end(self.last, stream, update_tD, step)

    def _end(self, last: Place, stream: Any, update_tD: Tensor | None, step: StepInputs) -> Tensor:
        """Return the hidden states [T, D] after the last network, normalised if `returns_normed`.

        Collective: all tp ranks.
        """
        hidden_tD = last.enter(stream, update_tD)[1] if self.returns_normed else last.close(stream, update_tD)
        return self.tp.all_gather(hidden_tD, step.tp_sizes)

    def _through(
        self, blocks: Iterable[tuple[DecoderBlock, Any]], stream: Any, run: Run
    ) -> Stages[tuple[Any, Tensor | None]]:
        """Run blocks with their caches.

        Returns:
            The residual stream, and the last network's output that has yet to be added; None: the stream has it.
        """
        update_tD = None
        for block, cache in blocks:
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

    def draft(self, number: int, step: StepInputs, later_ids_T: Tensor, hidden_TD: Tensor, caches: list[Any]) -> Tensor:
        """Return hidden states [T, D] of an MTP module, from which `logits` predicts the token after `later_ids_T`.

        Collective: all ranks.

        Args:
            number: index of the module.
            step: the step; it runs as a whole even if it has halves.
            later_ids_T: for the first module, the token that follows each row's token; for the second, the token after
                it, and so on.
            hidden_TD: the result of `forward` for the first module, else of `draft` for the module before.
        """
        assert self.config.draft is not None
        module = self.draft_modules[number]
        embedding = module.embedding or self.embedding
        assert embedding is not None
        hidden_tD = module(embedding(later_ids_T, step.tp_sizes), hidden_TD[step.own_rows])
        blocks = [each for each in zip(self.blocks, caches, strict=True) if each[0].module == number]
        run = Run(step, self.rotaries.at(step.positions))
        through = self._through(blocks, self.config.draft.stream.start(hidden_tD), run)
        ((stream, update_tD),) = run_in_turn([through])
        return self._end(module.last, stream, update_tD, step)

    def logits(self, hidden_TD: Tensor, number: int | None = None) -> Tensor:
        """Return the logits [T, vocab_size] of hidden states. Last stage only; all tp ranks must pass the same rows.

        Args:
            number: index of the MTP module that returned the hidden states; None: the decoder returned them.
        """
        head, last, stream = self.head, self.last, self.config.stream
        if number is not None:
            assert self.config.draft is not None
            module = self.draft_modules[number]
            head, last, stream = module.head or head, module.last, self.config.draft.stream
        assert head is not None
        assert last is not None
        if not self.returns_normed:
            _, hidden_TD = last.enter(stream.start(hidden_TD), None)
        return head(hidden_TD)


def _make_embedding(config: ModelSpec, context: BuildContext) -> Embedding:
    return Embedding(config.vocab_size, config.hidden_size, context, factor=config.embedding_factor)


def _make_head(config: ModelSpec, context: BuildContext, tied_to: Embedding | None) -> OutputHead:
    return OutputHead(
        config.vocab_size,
        config.hidden_size,
        context,
        tied_to=tied_to,
        divisor=config.logits_divisor,
        cap=config.logits_cap,
        has_bias=config.has_head_bias,
    )
