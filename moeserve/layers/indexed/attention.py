"""Grouped-query attention to the windows of positions that an indexer chooses for each token (Qwen4).

A window has a fixed number of positions. A window's key is the mean of the index keys of its tokens, normalised and
then rotated by the window's first position. A token attends to the highest-scoring windows among all windows that end
at or before the token, and to the tokens after the last complete window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeserve.config.needs import Needs
from moeserve.kv.layer_cache import CacheDivision, CacheItems, Places
from moeserve.kv.rules import RuleOfBlocks
from moeserve.layers.build_context import BuildContext
from moeserve.layers.grouped_query.attention import Attention, AttentionSpec
from moeserve.layers.linear import Linear
from moeserve.layers.network import AttentionCosts, Build, NetworkSpec, OverTP, Run
from moeserve.layers.norm import RMSNorm
from moeserve.layers.rotary import RotarySpec, TemperatureSpec
from moeserve.layers.rows import At, Row
from moeserve.layers.weights import QuantizationLimits
from moeserve.ops import compressed_attention, indexer, rows
from moeserve.ops.attention.interface import KeyValueCache
from moeserve.ops.compressed_attention.interface import CompressedShape
from moeserve.ops.indexer.interface import IndexerRule
from moeserve.ops.rows.interface import plain_rows
from moeserve.step_inputs import ChunkSpan, StepInputs

# n heads of the indexer, I size of its keys, m positions of a window, B tokens of a block

MIN_DENSE_ROWS = 64  # chunks with this many rows or more, and few positions, are faster with dense attention


@dataclass(frozen=True, kw_only=True)
class IndexedAttentionSpec(NetworkSpec):
    """The shape of one layer."""

    attention: AttentionSpec  # has gated outputs
    num_index_heads: int
    index_size: int  # size of the indexer's queries and keys; the same values are rotated as in attention
    window: int  # number of positions of a window (m)
    top_k: int  # number of positions in all chosen windows together

    @property
    def rotaries(self) -> tuple[RotarySpec | TemperatureSpec, ...]:
        return (*self.attention.rotaries, self.rotary_of_windows)

    @property
    def rotary_of_windows(self) -> RotarySpec:
        """The rotation of a window's key, by the position of its first token."""
        return dataclasses.replace(self.attention.rotary, stride=self.window)

    @property
    def needs(self) -> Needs:
        return Needs(
            block_multiple=self.window,
            fits_float8_cache=False,
            redoes_drafts=True,
            without_gpu_kernels="grouped-query attention with an indexer",
        )

    def cache_rules(self, block_size: int) -> tuple[RuleOfBlocks]:
        return (self.attention.key_value_rule(block_size),)

    def can_divide(self, num_ranks: int) -> bool:
        """True if `num_ranks` tp ranks can divide the heads of attention. Each rank has the whole indexer."""
        return self.attention.can_divide(num_ranks)

    def costs(self, hidden_size: int, tp: int) -> AttentionCosts:
        dense = self.attention.costs(hidden_size, tp)
        return dataclasses.replace(
            dense,
            positions=self.top_k,
            projected_values=dense.projected_values + (self.num_index_heads + 1) * self.index_size,
            index_values=self.index_size,
            index_operations=self.num_index_heads * 2 * self.index_size / self.window,
        )

    def build(self, build: Build) -> IndexedAttention:
        return IndexedAttention(self, build.hidden_size, build.norm_epsilon, build.context)


@dataclass(frozen=True)
class IndexedCache:
    """The cache of one layer."""

    pairs: KeyValueCache  # keys and values in blocks of one token, which can be chosen: [num_blocks * B, G, 1, H]
    index_keys: Tensor  # [num_blocks, B / m, I]
    index_tails: Tensor  # [num_blocks, 3 * I] float32, the state of the window that a block's last token is in

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the cache; their first dimension is the block."""
        num_blocks = len(self.index_keys)
        pairs = (part.squeeze(2).unflatten(0, (num_blocks, -1)) for part in self.pairs.tensors)
        return (*pairs, self.index_keys, self.index_tails)

    @property
    def tensors_of_items(self) -> tuple[tuple[Tensor, ...], ...]:
        """The tensors of each of the layer's `cache_items`."""
        return (self.tensors,)

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()


class Indexer(nn.Module):
    """Chooses windows by the sum over heads of max(0, query . key). Every tp rank has all heads of the indexer."""

    def __init__(self, config: IndexedAttentionSpec, hidden_size: int, epsilon: float, context: BuildContext) -> None:
        super().__init__()
        self.config, size = config, config.index_size
        self.sizes = [config.num_index_heads * size, size]
        # The same limit as for the queries and keys of attention
        self.query_key = Linear(hidden_size, sum(self.sizes), context, limits=QuantizationLimits(8))
        self.query_norm, self.key_norm = (RMSNorm(size, epsilon, context) for _ in range(2))
        self.bias = torch.zeros(config.window, size, device=context.device)  # added to the gates, which are equal
        shape = CompressedShape(
            num_heads=1, whole_num_heads=1, head_size=size, scale=1.0, window=1, ratio=config.window, index_size=None
        )
        self.pooling = compressed_attention.make(context.backend, shape)
        rule = IndexerRule(top_k=config.top_k // config.window, tokens_per_entry=config.window, is_expanded=True)
        self._choose = indexer.make(context.backend, rule)
        self._apply_rope = rows.make(context.backend).apply_rope

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module."""
        yield from self.query_key.rows(at.under("index_qk_proj"))
        yield from self.query_norm.rows(at.under("q_layernorm"))
        yield from self.key_norm.rows(at.under("k_layernorm"))

    def forward(self, hidden_TD: Tensor, run: Run, cache: IndexedCache, *, chooses: bool) -> StepInputs:
        """Store the keys of windows. Return the step with each token as a chunk whose context is the chosen windows.

        Args:
            chooses: False: each token attends to all positions up to itself.
        """
        config, step, size = self.config, run.step, self.config.index_size
        query_TX, key_TI = self.query_key(hidden_TD).split(self.sizes, dim=1)
        block_size = cache.index_keys.shape[1] * config.window
        key_TX = functional.pad(key_TI, (0, size))  # gates of zero: all tokens of a window have the same weight
        pooled_TI = self.key_norm(self.pooling.pool(key_TX, self.bias, cache.index_tails, block_size, step))
        pooled_TI = self._apply_rope(pooled_TI[:, None], run.rotations[config.rotary_of_windows])[:, 0]
        self.pooling.write_entries(block_size, step, (pooled_TI, cache.index_keys))
        if not chooses:
            offsets = torch.arange(block_size, dtype=torch.int32, device=step.block_table.device)
            table = (step.block_table[..., None] * block_size + offsets).flatten(1)
            return dataclasses.replace(step, block_table=table)
        query_TnI = self.query_norm(query_TX.unflatten(1, (-1, size)))
        query_TnI = self._apply_rope(query_TnI, run.rotations[config.attention.rotary])
        weights_Tn = query_TnI.new_ones(query_TnI.shape[:2])
        chosen = self._choose(query_TnI, weights_Tn, cache.index_keys, step)
        return dataclasses.replace(
            step,
            block_table=chosen.slots_TC,
            row_starts=chosen.starts,
            context_lens=chosen.counts_T,
            spans=tuple(ChunkSpan(row, 1, count) for row, count in enumerate(chosen.counts_T.tolist())),
        )


class IndexedAttention(OverTP):
    """Attention of each token to the windows that its indexer chooses. Each tp rank has a share of the heads."""

    def __init__(
        self, config: IndexedAttentionSpec, hidden_size: int, norm_epsilon: float, context: BuildContext
    ) -> None:
        super().__init__(context)
        self.config, self.context = config, context
        self.attention = Attention(config.attention, hidden_size, norm_epsilon, context)
        self.indexer = Indexer(config, hidden_size, norm_epsilon, context)
        self._gate_rows = rows.make(context.backend).gate_rows

    @property
    def cache_items(self) -> tuple[CacheItems, ...]:
        """The cache items: keys and values, and the indexer's keys and tails, which every tp rank holds in full."""
        (pairs,) = self.attention.cache_items
        size, block_size = self.config.index_size, self.context.block_size
        num_bytes = block_size // self.config.window * size * self.context.dtype.itemsize
        num_bytes += 3 * size * torch.float32.itemsize
        divisions = *(dataclasses.replace(each, axis=2) for each in pairs.divisions), *(CacheDivision(0, ()),) * 2
        return (CacheItems(pairs.rule, pairs.num_bytes + num_bytes, divisions),)

    def make_cache(self, places: Places) -> IndexedCache:
        pairs = self.attention.make_cache(places)
        keys, values = (part.view(-1, part.shape[1], 1, part.shape[3]) for part in pairs.tensors)
        num_blocks, size, block_size = len(pairs.keys), self.config.index_size, self.context.block_size
        device = self.context.device
        return IndexedCache(
            dataclasses.replace(pairs, keys=keys, values=values),
            torch.empty(num_blocks, block_size // self.config.window, size, dtype=self.context.dtype, device=device),
            torch.empty(num_blocks, 3 * size, dtype=torch.float32, device=device),
        )

    def rows(self, at: At) -> Iterator[Row]:
        yield from self.attention.rows(at)
        yield from self.indexer.rows(at.under("indexer"))

    def partial_sum(self, hidden_TD: Tensor, run: Run, cache: IndexedCache) -> Tensor:
        hidden_TD = plain_rows(hidden_TD)
        query_TNH, projected = self.attention.write(hidden_TD, run, cache.pairs)
        step = self.indexer(hidden_TD, run, cache, chooses=not self._sees_all(run.step))
        attended_TX = self.attention.backend.attend(query_TNH, cache.pairs, step).flatten(1)
        return self.attention.output(self._gate_rows(projected[3], attended_TX))

    def _sees_all(self, step: StepInputs) -> bool:
        """Return True for a prefill step whose tokens attend to all positions, in which dense attention is faster."""
        longest = max((span.context_len for span in step.spans), default=0)
        return step.max_rows_per_chunk >= MIN_DENSE_ROWS and longest <= self.config.top_k
