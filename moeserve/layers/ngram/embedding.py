"""Embeddings of the last few tokens (Qwen4): hashed n-grams, gated by the streams, and a convolution of the result.

The ids of the tokens before a chunk are kept as the state of a convolution whose outputs are its last inputs. Ids are
stored as differences from the id of the token that separates texts. A new state is zero, which stands for that token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.config.needs import Needs
from moeserve.kv.layer_cache import CacheItems, Places
from moeserve.kv.rules import KeepState
from moeserve.layers.linear import Embedding, Linear
from moeserve.layers.network import Build, Network, NetworkSpec, Run
from moeserve.layers.rows import At, Destination, Row
from moeserve.layers.state_cache import StateCache
from moeserve.layers.streams.gated_streams import StreamsNorm
from moeserve.ops import convolution, rows
from moeserve.ops.convolution.interface import ConvolutionShape, ConvolutionWeights
from moeserve.step_inputs import StepInputs

# S streams, X = S * D, n tokens of the longest n-gram, E tables, F size of all rows of a token, P = T * S
MAX_MULTIPLIER = 2**63 - 1
GAMMA = 0x9E3779B97F4A7C15  # the increment of SplitMix64


@dataclass(frozen=True, kw_only=True)
class NgramSpec(NetworkSpec):
    """The shape of the embedding of one layer. Each length of n-grams from 2 to `max_length` tokens has tables."""

    name = "ple"

    vocab_size: int
    num_streams: int
    max_length: int  # number of tokens of the longest n-gram (n)
    tables_per_length: int
    first_size: int  # sizes of tables are the primes from this number on
    size_multiple: int  # the number of rows of all tables together is rounded up to a multiple of this
    index: int  # number of embeddings in earlier layers, which have smaller primes
    seed: int  # seed of the hash functions
    separator: int  # id of the token that separates texts: n-grams do not reach across it
    embedded_size: int  # size of all rows of a token together (F)
    num_taps: int  # number of taps of the convolution, which are n tokens apart

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="embeddings of n-grams")

    @property
    def num_tables(self) -> int:
        return (self.max_length - 1) * self.tables_per_length

    @property
    def span(self) -> int:
        """Number of tokens from the first to the last tap of the convolution."""
        return (self.num_taps - 1) * self.max_length + 1

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """The number of rows of each table."""
        return primes_from(self.first_size, (self.index + 1) * self.num_tables)[-self.num_tables :]

    @property
    def multipliers(self) -> tuple[int, ...]:
        """The odd factor of each token of an n-gram, the last token's first (SplitMix64)."""
        bound, base = max(1, MAX_MULTIPLIER // self.vocab_size // 2), self.seed + 10007 * self.index
        return tuple(2 * (split_mix(base + GAMMA * (number + 1)) % bound) + 1 for number in range(self.max_length))

    def cache_rules(self, block_size: int) -> tuple[KeepState]:
        """Return the rule that determines how long states of requests are kept."""
        return (KeepState.of_blocks(block_size),)

    def build(self, build: Build) -> NgramEmbedding:
        return NgramEmbedding(self, build)


@functools.cache
def primes_from(first: int, count: int) -> tuple[int, ...]:
    """Return the `count` smallest primes that are not less than `first`."""
    found: list[int] = []
    number = max(first, 2)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return tuple(found)


def split_mix(number: int) -> int:
    """Return a step of SplitMix64 (Steele and others, 2014)."""
    number = (number + GAMMA) % 2**64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


class NgramEmbedding(Network):
    """Embeds the n-grams that end at each token, gates them by the streams, and convolves the result.

    Each tp rank has a share of the tables, embeds its own tokens, and convolves the tokens of all ranks.
    """

    def __init__(self, config: NgramSpec, build: Build) -> None:
        super().__init__()
        self.config, self.context, self.size = config, build.context, build.hidden_size
        context, size, width = self.context, self.size, config.num_streams * self.size
        num_rows = -(-sum(config.table_sizes) // config.size_multiple) * config.size_multiple
        self.num_rows, self.row_size = num_rows, config.embedded_size // config.num_tables
        self.table = Embedding(num_rows, self.row_size, context)
        self.key = Linear(config.embedded_size, width, context)
        self.value = Linear(config.embedded_size, size, context)
        norms = (StreamsNorm(config.num_streams, build) for _ in range(3))
        self.key_norm, self.query_norm, self.convolution_norm = norms
        self.taps = context.parameter(config.num_taps, width, dtype=torch.float32)
        before, device = config.max_length - 1, context.device
        shape = ConvolutionShape(num_channels=width, num_taps=config.span, is_gated=False)
        self._convolve = convolution.make(context.backend, shape)
        # Channel i is the token i + 1 places before.
        of_ids = ConvolutionShape(num_channels=before, num_taps=config.max_length, is_gated=False, is_linear=True)
        taps = torch.cat([torch.eye(before).flip(0), torch.zeros(1, before)])
        self.id_weights = ConvolutionWeights(taps.to(device), None)
        self._shift = convolution.make(context.backend, of_ids)
        sizes = torch.tensor(config.table_sizes)
        self.table_sizes, self.offsets = sizes.to(device), (sizes.cumsum(0) - sizes).to(device)
        self._gate = rows.make(context.backend).gate_rows

    @property
    def cache_items(self) -> tuple[CacheItems, ...]:
        """The cache items: the states, which every tp rank holds in full."""
        num_bytes = sum(tensor.nbytes for tensor in self._empty_cache(1, torch.device("meta")).tensors)
        (rule,) = self.config.cache_rules(self.context.block_size)
        return (CacheItems(rule, num_bytes),)

    def make_cache(self, places: Places) -> StateCache:
        return self._empty_cache(places.num_rows, self.context.device)

    def _empty_cache(self, num_rows: int, device: torch.device) -> StateCache:
        config, before = self.config, self.config.max_length - 1
        inputs = num_rows, config.span - 1, config.num_streams * self.size
        return StateCache(
            torch.empty(inputs, dtype=self.context.dtype, device=device),
            torch.empty(num_rows, before, before, dtype=torch.float32, device=device),  # differences of ids
        )

    def rows(self, at: At) -> Iterator[Row]:
        embedding = at.under("ple_embedding")
        for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"):
            yield embedding(name), None  # computed from the config
        table = embedding.under("ngram_embedding")
        parts = 0
        while table.has(f"shard_{parts}.weight"):
            parts += 1
        names = [f"shard_{part}.weight" for part in range(parts)] or ["weight"]
        whole = (table.stored.get(table(names[0])) or (self.num_rows,))[0]  # rows of each part but the last
        if not (parts - 1) * whole < self.num_rows <= max(parts, 1) * whole:
            whole = -(-self.num_rows // len(names))
        share = self.table.share
        for part, name in enumerate(names):
            start = part * whole
            stop = self.num_rows if part == len(names) - 1 else start + whole
            first, last = max(start, share.start), min(stop, share.stop)
            if first >= last:
                yield table(name), None
                continue
            memory = self.table.weight[first - share.start : last - share.start]
            yield table(name), Destination(memory, (stop - start, self.row_size), (slice(first - start, last - start),))
        yield from self.key.rows(at.under("key_proj"))
        yield from self.value.rows(at.under("value_proj"))
        yield from self.key_norm.rows(at.under("norm_key"))
        yield from self.query_norm.rows(at.under("norm_query"))
        yield from self.convolution_norm.rows(at.under("norm_conv"))
        yield at("conv1d.weight"), Destination(self.taps.T[:, None], (self.taps.shape[1], 1, len(self.taps)), ())

    def forward(self, streams_tX: Tensor, run: Run, cache: StateCache) -> Tensor:
        assert cache.states is not None
        config, step, tp = self.config, run.step, self.context.tp
        num_tables, num_streams = config.num_tables, config.num_streams
        numbers_TE = self._numbers(step, cache.states)
        sizes = [size * num_tables for size in step.tp_sizes]
        embedded_tF = self.table(numbers_TE.flatten(), sizes).view(-1, config.embedded_size)
        key_tX, query_tX = self.key_norm(self.key(embedded_tF)), self.query_norm(streams_tX)
        scores_tS = (key_tX * query_tX).unflatten(1, (num_streams, -1)).sum(dim=-1) / math.sqrt(self.size)
        scores_tS = scores_tS.abs().clamp(min=1e-6).sqrt() * scores_tS.sign()
        joined_tD = torch.cat([self.value(embedded_tF), scores_tS], dim=1)
        joined_TD = tp.all_gather(joined_tD, step.tp_sizes)  # collective: all tp ranks
        value_TD, scores_TS = joined_TD.split([self.size, num_streams], dim=1)
        gated_PD = self._gate(scores_TS.reshape(-1, 1), value_TD.repeat_interleave(num_streams, dim=0))
        gated_TX = gated_PD.view(len(value_TD), num_streams * self.size)
        convolved_TX = self._convolve(self.convolution_norm(gated_TX), self._spread, cache.inputs, step)
        return (gated_TX + convolved_TX.to(gated_TX.dtype))[step.own_rows]

    @functools.cached_property
    def _spread(self) -> ConvolutionWeights:
        """The taps of the convolution, with zeros for tokens between taps. Available after weights are loaded."""
        taps = self.taps.new_zeros(self.config.span, self.taps.shape[1])
        taps[:: self.config.max_length] = self.taps
        return ConvolutionWeights(taps, None)

    def _numbers(self, step: StepInputs, states: Tensor) -> Tensor:
        """Return, for each token and table, the row [T, E] that embeds the token and the tokens before it."""
        config, ids_T = self.config, step.token_ids
        before, separator = config.max_length - 1, config.separator
        codes_Tn = (ids_T - separator).float()[:, None].repeat(1, before)
        codes_Tn = self._shift(codes_Tn, self.id_weights, states, step).long()
        first, *others = config.multipliers
        mixed_T, is_inside_T, mixed = ids_T * first, torch.ones_like(ids_T, dtype=torch.bool), []
        for codes_T, multiplier in zip(codes_Tn.unbind(1), others, strict=True):
            is_inside_T = is_inside_T & (codes_T != 0)
            mixed_T = mixed_T ^ (torch.where(is_inside_T, codes_T + separator, separator) * multiplier)
            mixed.append(mixed_T)
        mixed_TE = torch.stack(mixed, dim=1).repeat_interleave(config.tables_per_length, dim=1)
        return mixed_TE % self.table_sizes + self.offsets
