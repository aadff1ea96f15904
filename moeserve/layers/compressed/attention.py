"""Attention to a window of the last tokens and to compressed entries of all earlier tokens (DeepSeek-V4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.distributed.mesh import share_of
from moeserve.kv.layer_cache import CacheItems, Places
from moeserve.kv.rules import CacheGroup, KeepAll, KeepWindow, RuleOfBlocks
from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import num_input_chunks, share_inputs
from moeserve.layers.linear import Linear
from moeserve.layers.network import AttentionCosts, Build, NetworkSpec, OverTP, Run
from moeserve.layers.norm import RMSNorm
from moeserve.layers.rotary import RotarySpec, Rotations
from moeserve.layers.rows import At, Row, rows_of_heads, some_columns, some_rows, whole
from moeserve.layers.weights import QuantizationLimits, Weights
from moeserve.ops import compressed_attention, indexer, products, rows
from moeserve.ops.compressed_attention.interface import CompressedAttention, CompressedCache, CompressedShape
from moeserve.ops.indexer.interface import ChosenEntries, IndexerRule
from moeserve.step_inputs import StepInputs

# G groups of heads of this rank, I size of an indexer's head, m tokens of a window, X values and gates of a token, Y
# = X / 2

EIGHT_BITS = QuantizationLimits(8)


@dataclass(frozen=True, kw_only=True)
class IndexerShape:
    """The shape of an indexer, which chooses entries by a key of each entry. Windows of neighbouring keys overlap."""

    num_heads: int
    head_size: int
    top_k: int


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionSpec(NetworkSpec):
    """The shape of one layer. Heads in a group share the first part of the output projection."""

    num_heads: int
    head_dim: int
    query_rank: int  # size that queries are compressed to
    num_groups: int
    group_rank: int  # size that the outputs of a group are compressed to
    rotary: RotarySpec  # applied to the last values of a head
    window: int  # number of last tokens that a token attends to
    ratio: int | None = None  # number of tokens of an entry; None: there are no entries
    indexer: IndexerShape | None = None

    def cache_rules(self, block_size: int) -> tuple[RuleOfBlocks, RuleOfBlocks]:
        """Return two rules that determine how long the cache keeps tokens, and entries with tails."""
        return KeepWindow(self.window, block_size), KeepAll()

    def can_divide(self, num_ranks: int) -> bool:
        """True if `num_ranks` tp ranks can each have equally many groups of heads."""
        return self.num_groups % num_ranks == 0

    @property
    def needs(self) -> Needs:
        has_indexer = self.ratio is not None and self.indexer is not None
        return Needs(
            block_size=128,  # every block also holds a tail
            block_multiple=self.ratio if has_indexer and self.ratio is not None else 1,
            fits_float8_cache=False,
            redoes_drafts=True,
        )

    def costs(self, hidden_size: int, tp: int) -> AttentionCosts:
        """Return the costs of the window and of the entries that an indexer selects.

        The indexer's scores, and the few entries of layers without an indexer, are not counted.
        """
        outputs = self.num_heads * self.head_dim
        return AttentionCosts(
            num_heads=self.num_heads,
            decode_operations=self.num_heads / tp * 4 * self.head_dim,
            prompt_operations=self.num_heads / tp * 4 * self.head_dim,
            positions=self.window + (0 if self.indexer is None else self.indexer.top_k),
            projected_values=(outputs + self.query_rank + self.head_dim) / tp,
            output_values=outputs / tp,
            output_parameters=(outputs / tp + self.num_groups / tp * hidden_size) * self.group_rank,
        )

    def build(self, build: Build) -> CompressedSparseAttention:
        return CompressedSparseAttention(self, build.hidden_size, build.norm_epsilon, build.context)

    @property
    def rotaries(self) -> tuple[RotarySpec, ...]:
        """The rotary embeddings and temperatures that the layer uses."""
        entries = () if self.ratio is None else (self.rotary_of_entries,)
        return self.rotary, self.reversed_rotary, *entries

    @property
    def reversed_rotary(self) -> RotarySpec:
        """The rotation of outputs by the negative angle. Values are also keys, so they are rotated by their positions.

        After this rotation, outputs depend only on distances between positions.
        """
        return dataclasses.replace(self.rotary, is_reversed=True)

    @property
    def rotary_of_entries(self) -> RotarySpec:
        """The rotation of an entry, by the position of the first token of its window."""
        assert self.ratio is not None
        return dataclasses.replace(self.rotary, stride=self.ratio)


class Pooling(nn.Module):
    """Pools the tokens of each window to an entry, or to the indexer's key of an entry."""

    def __init__(
        self, size: int, num_series: int, ratio: int, hidden_size: int, norm_epsilon: float, context: BuildContext
    ) -> None:
        super().__init__()
        width = num_series * size
        self.sizes = [width, width]  # values and gates
        self.project = Linear(hidden_size, 2 * width, context, limits=QuantizationLimits(8, None))
        self.bias = context.parameter(ratio, width, dtype=torch.float32)
        self.norm = RMSNorm(size, norm_epsilon, context)

    def forward(
        self, hidden_TD: Tensor, tails: Tensor, cache: CompressedCache, step: StepInputs, backend: CompressedAttention
    ) -> Tensor:
        """Return unrotated entries [T, size]. The entry of a window is in the row of the window's last token."""
        projected_TX = self.project(hidden_TD)
        return self.norm(backend.pool(projected_TX, self.bias, tails, cache.block_size, step))

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module."""
        values, gates = self.project.weight.split(self.sizes)
        yield at("wkv.weight"), whole(values, self.project.weights)
        yield at("wgate.weight"), whole(gates, self.project.weights)
        yield at("ape"), whole(self.bias)
        yield at("norm.weight"), whole(self.norm.weight)


class Indexer(nn.Module):
    """Chooses entries by products of queries with the entries' keys. Every tp rank has all heads of the indexer."""

    def __init__(
        self, shape: IndexerShape, config: CompressedAttentionSpec, hidden_size: int, epsilon: float,
        context: BuildContext,
    ) -> None:  # fmt: skip
        super().__init__()
        assert config.ratio is not None
        self.shape = shape
        self.keys = Pooling(shape.head_size, 2, config.ratio, hidden_size, epsilon, context)
        self.query = Linear(config.query_rank, shape.num_heads * shape.head_size, context, limits=EIGHT_BITS)
        self.weights = Linear(hidden_size, shape.num_heads, context, limits=QuantizationLimits(8, None))
        self.choose = indexer.make(context.backend, IndexerRule(top_k=shape.top_k, tokens_per_entry=config.ratio))


class CompressedSparseAttention(OverTP):
    """Attention of each token to the last `window` tokens, and to entries of `ratio` earlier tokens each.

    Each tp rank has a share of the groups of heads and the whole cache, and computes a part of the sum that is the
    output.
    """

    def __init__(
        self, config: CompressedAttentionSpec, hidden_size: int, norm_epsilon: float, context: BuildContext
    ) -> None:
        super().__init__(context)
        tp = context.tp
        self.config = config
        self.context = context
        self.groups = share_of(config.num_groups, tp.rank_in_group, tp.world_size)
        num_groups = int(self.groups.stop - self.groups.start)
        heads_per_group = config.num_heads // config.num_groups
        self.heads = slice(self.groups.start * heads_per_group, self.groups.stop * heads_per_group)
        num_heads, size = num_groups * heads_per_group, config.head_dim
        self.compressed_sizes = [config.query_rank, size]
        # Errors in scores grow exponentially in the softmax, so queries and keys keep 8 bits.
        self.compress = Linear(
            hidden_size, config.query_rank + size, context, limits=QuantizationLimits(8, (config.query_rank,))
        )
        self.query_norm = RMSNorm(config.query_rank, norm_epsilon, context)
        self.query = Linear(
            config.query_rank, num_heads * size, context, limits=QuantizationLimits(8, (self.heads.start * size,))
        )
        self.head_norm = RMSNorm(size, norm_epsilon, context, has_weight=False)
        self.key_norm = RMSNorm(size, norm_epsilon, context)
        self.sinks = context.parameter(num_heads, dtype=torch.float32)
        self.shape = CompressedShape(
            num_heads=num_heads,
            whole_num_heads=config.num_heads,
            head_size=size,
            scale=size**-0.5,
            window=config.window,
            ratio=config.ratio,
            index_size=None if config.indexer is None else config.indexer.head_size,
        )
        self.entries: Pooling | None = None
        if config.ratio is not None:
            self.entries = Pooling(size, self.shape.num_series, config.ratio, hidden_size, norm_epsilon, context)
        self.indexer: Indexer | None = None
        if config.indexer is not None:
            self.indexer = Indexer(config.indexer, config, hidden_size, norm_epsilon, context)
        # No kernel multiplies 8-bit blocks with an input of its own for each group.
        group_shape = num_groups, config.group_rank, heads_per_group * size
        self.group_maps = Weights(products.PER_HEAD, group_shape, context, limits=QuantizationLimits(8, None))
        first_column = self.groups.start * config.group_rank
        num_inputs = config.num_groups * config.group_rank
        self.output = Linear(
            num_groups * config.group_rank,
            hidden_size,
            context,
            limits=QuantizationLimits(5, (first_column,)),
            chunks=share_inputs(num_inputs, num_input_chunks(config.can_divide), context).chunks,
        )
        self.backend = compressed_attention.make(context.backend, self.shape)
        self._apply_rope = rows.make(context.backend).apply_rope

    @property
    def cache_items(self) -> tuple[CacheItems, ...]:
        """The cache items of tokens, and of entries and tails. Every tp rank holds all items."""
        rules = self.config.cache_rules(self.context.block_size)
        one = self._empty_cache(Places((CacheGroup(KeepAll(), 1),)), torch.device("meta"))
        return tuple(
            CacheItems(rule, sum(tensor.nbytes for tensor in tensors))
            for rule, tensors in zip(rules, one.tensors_of_items, strict=True)
        )

    def make_cache(self, places: Places) -> CompressedCache:
        return self._empty_cache(places, self.context.device)

    def _empty_cache(self, places: Places, device: torch.device) -> CompressedCache:
        group = places.group_of(self.config.cache_rules(self.context.block_size)[0])
        return CompressedCache.empty(
            self.shape,
            num_blocks=places.tables[0].num_places,
            num_window_blocks=places.tables[group].num_places,
            block_size=self.context.block_size,
            dtype=self.context.dtype,
            device=device,
            group=group,
        )

    def rows(self, at: At) -> Iterator[Row]:
        config, heads = self.config, self.heads
        query, key = self.compress.weight.split(self.compressed_sizes)
        yield at("wq_a.weight"), whole(query, self.compress.weights)
        yield at("wkv.weight"), whole(key, self.compress.weights)
        yield at("q_norm.weight"), whole(self.query_norm.weight)
        yield at("kv_norm.weight"), whole(self.key_norm.weight)
        num_rows = config.num_heads * config.head_dim
        share = rows_of_heads(heads, config.head_dim)
        yield at("wq_b.weight"), some_rows(self.query.weight, share, num_rows, self.query.weights)
        yield at("attn_sink"), some_rows(self.sinks, heads, config.num_heads)
        ranks, num_ranks = rows_of_heads(self.groups, config.group_rank), config.num_groups * config.group_rank
        maps_OI = self.group_maps.open.weight_eOI.flatten(0, 1)
        yield at("wo_a.weight"), some_rows(maps_OI, ranks, num_ranks, self.group_maps)
        yield at("wo_b.weight"), some_columns(self.output.weight, ranks, num_ranks, self.output.weights)
        if self.entries is not None:
            yield from self.entries.rows(at.under("compressor"))
        if self.indexer is not None:
            yield from self.indexer.keys.rows(at.under("indexer.compressor"))
            yield from self.indexer.query.rows(at.under("indexer.wq_b"))
            yield from self.indexer.weights.rows(at.under("indexer.weights_proj"))

    def partial_sum(self, hidden_TD: Tensor, run: Run, cache: CompressedCache) -> Tensor:
        config, step, rotations = self.config, run.step, run.rotations
        query_TQ, key_TH = self.compress(hidden_TD).split(self.compressed_sizes, dim=1)
        query_TQ, key_TH = self.query_norm(query_TQ), self.key_norm(key_TH)
        query_TNH = self.head_norm(rearrange(self.query(query_TQ), "T (N H) -> T N H", H=config.head_dim))
        query_TNH = self._rotate(query_TNH, config.rotary, rotations)
        key_TH = self._rotate(key_TH[:, None], config.rotary, rotations)[:, 0]

        entry_TH = index_key_TI = None
        if self.entries is not None:
            assert cache.tails is not None
            entry_TH = self.entries(hidden_TD, cache.tails, cache, step, self.backend)
            entry_TH = self._rotate(entry_TH[:, None], config.rotary_of_entries, rotations)[:, 0]
        if self.indexer is not None:
            assert cache.index_tails is not None
            index_key_TI = self.indexer.keys(hidden_TD, cache.index_tails, cache, step, self.backend)
            index_key_TI = self._rotate(index_key_TI[:, None], config.rotary_of_entries, rotations)[:, 0]
        windows = step.of_group(cache.group)
        self.backend.write(key_TH, entry_TH, index_key_TI, cache, step, windows)

        chosen: ChosenEntries | None = None
        if self.indexer is not None:
            size = self.indexer.shape.head_size
            index_query_TnI = rearrange(self.indexer.query(query_TQ), "T (n I) -> T n I", I=size)
            index_query_TnI = self._rotate(index_query_TnI, config.rotary, rotations)
            assert cache.index_keys is not None
            chosen = self.indexer.choose(index_query_TnI, self.indexer.weights(hidden_TD), cache.index_keys, step)
        attended_TNH = self.backend.attend(query_TNH, chosen, self.sinks, cache, step, windows)
        attended_TNH = self._rotate(attended_TNH, config.reversed_rotary, rotations)
        in_groups = rearrange(attended_TNH, "T (G n) H -> T G (n H)", G=self.group_maps.shape[0])
        return self.output(rearrange(self.group_maps.product.multiply(in_groups), "T G r -> T (G r)"))

    def _rotate(self, heads_TNH: Tensor, rotary: RotarySpec, rotations: Rotations) -> Tensor:
        """Return heads with their last values rotated. The argument may be overwritten."""
        last_TNF = heads_TNH[..., heads_TNH.shape[-1] - rotary.dim :]
        self._apply_rope(last_TNF, rotations[rotary], last_TNF)
        return heads_TNH
