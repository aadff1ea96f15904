"""Grouped-query attention to blocks of positions, which an indexer chooses for each token (MiniMax-M3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.kv.layer_cache import CacheDivision, CacheItems, Places
from moeserve.kv.rules import RuleOfBlocks
from moeserve.layers.build_context import BuildContext
from moeserve.layers.grouped_query.attention import Attention, AttentionSpec
from moeserve.layers.linear import Linear
from moeserve.layers.network import AttentionCosts, Build, NetworkSpec, OverTP, Run
from moeserve.layers.norm import RMSNorm
from moeserve.layers.rotary import RotarySpec, TemperatureSpec
from moeserve.layers.rows import At, Row, rows_of_heads, some_rows
from moeserve.layers.weights import QuantizationLimits
from moeserve.ops import block_sparse, rows
from moeserve.ops.attention.interface import KeyValueCache
from moeserve.ops.block_sparse.interface import BlockSparseShape
from moeserve.ops.rows.interface import plain_rows
from moeserve.step_inputs import StepInputs

# n heads of the indexer, I size of its keys

MIN_DENSE_ROWS = 64  # chunks with this many rows or more, and few blocks, are faster with dense attention


@dataclass(frozen=True, kw_only=True)
class BlockSparseSpec(NetworkSpec):
    """The shape of block-sparse attention. Query head i reads the blocks that index head i // (N / n) chooses."""

    attention: AttentionSpec  # has norms of each head, and no gates
    num_index_heads: int  # divides the number of key-value heads, or is a multiple of it
    index_size: int  # size of the indexer's queries and keys; the same values are rotated as in attention
    block_size: int  # positions in a block
    top_k: int  # number of blocks that a token attends to
    num_local: int  # number of blocks, up to the token's own, that a token always attends to; at most top_k

    @property
    def rotaries(self) -> tuple[RotarySpec | TemperatureSpec, ...]:
        return self.attention.rotaries

    @property
    def needs(self) -> Needs:
        return Needs(fits_float8_cache=False, without_gpu_kernels="block-sparse attention")

    def cache_rules(self, block_size: int) -> tuple[RuleOfBlocks]:
        return (self.attention.key_value_rule(block_size),)

    def can_divide(self, num_ranks: int) -> bool:
        """True if `num_ranks` tp ranks can divide the heads, each query head together with its head of the indexer."""
        divides = self.num_index_heads % num_ranks == 0 or num_ranks % self.num_index_heads == 0
        return divides and self.attention.can_divide(num_ranks)

    def costs(self, hidden_size: int, tp: int) -> AttentionCosts:
        dense, keys = self.attention.costs(hidden_size, tp), max(1, self.num_index_heads // tp)
        return AttentionCosts(
            num_heads=dense.num_heads,
            decode_operations=dense.decode_operations,
            prompt_operations=dense.prompt_operations,
            positions=self.top_k * self.block_size,
            projected_values=dense.projected_values + (keys + 1) * self.index_size,
            output_values=dense.output_values,
            output_parameters=dense.output_parameters,
            index_values=self.index_size,
            index_operations=keys * 2 * self.index_size,
        )

    def build(self, build: Build) -> BlockSparse:
        return BlockSparse(self, build.hidden_size, build.norm_epsilon, build.context)


@dataclass(frozen=True)
class BlockSparseCache:
    """The paged keys and values of one layer, and the indexer's keys [num_blocks, block_size, I]."""

    pairs: KeyValueCache
    index_keys: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the cache; their first dimension is the block."""
        return (*self.pairs.tensors, self.index_keys)

    @property
    def tensors_of_items(self) -> tuple[tuple[Tensor, ...], ...]:
        """The tensors of each of the layer's `cache_items`."""
        return (self.tensors,)

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()


class Indexer(nn.Module):
    """Computes index queries, and one key for each token. A tp rank has the index heads that its query heads use."""

    def __init__(
        self, config: BlockSparseSpec, heads: slice, hidden_size: int, epsilon: float, context: BuildContext
    ) -> None:
        super().__init__()
        self.heads, self.num_heads, self.size = heads, config.num_index_heads, config.index_size
        # The same limit as for the queries and keys of attention
        limits = QuantizationLimits(8, (heads.start * self.size,))
        self.query = Linear(hidden_size, (heads.stop - heads.start) * self.size, context, limits=limits)
        self.key = Linear(hidden_size, self.size, context, limits=QuantizationLimits(8))
        self.query_norm, self.key_norm = (RMSNorm(self.size, epsilon, context) for _ in range(2))

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module."""
        own = rows_of_heads(self.heads, self.size)
        yield at("q_proj.weight"), some_rows(self.query.weight, own, self.num_heads * self.size, self.query.weights)
        yield from self.key.rows(at.under("k_proj"))
        yield from self.query_norm.rows(at.under("q_norm"))
        yield from self.key_norm.rows(at.under("k_norm"))

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [T, n, I] and keys [T, 1, I], not yet rotated."""
        query_TnI = self.query(hidden_TD).unflatten(1, (-1, self.size))
        return self.query_norm(query_TnI), self.key_norm(self.key(hidden_TD)[:, None])


class BlockSparse(OverTP):
    """Attention of each token to the tokens of its request up to itself, in the blocks that an indexer chooses.

    Each tp rank has a share of the heads, and computes a part of the sum that is the output.
    """

    def __init__(self, config: BlockSparseSpec, hidden_size: int, norm_epsilon: float, context: BuildContext) -> None:
        super().__init__(context)
        self.config, self.context = config, context
        self.attention = attention = Attention(config.attention, hidden_size, norm_epsilon, context)
        group = config.attention.num_heads // config.num_index_heads
        heads = slice(attention.heads.start // group, -(-attention.heads.stop // group))
        self.indexer = Indexer(config, heads, hidden_size, norm_epsilon, context)
        self.backend = block_sparse.make(
            context.backend,
            BlockSparseShape(
                attention=attention.shape,
                num_index_heads=heads.stop - heads.start,
                block_size=config.block_size,
                top_k=config.top_k,
                num_local=config.num_local,
            ),
        )
        self._apply_rope = rows.make(context.backend).apply_rope

    @property
    def cache_items(self) -> tuple[CacheItems, ...]:
        """The cache items: keys and values, and the indexer's keys, which every tp rank holds in full."""
        (pairs,) = self.attention.cache_items
        index_bytes = self.context.block_size * self.config.index_size * self.context.dtype.itemsize
        whole = CacheDivision(0, ())
        return (CacheItems(pairs.rule, pairs.num_bytes + index_bytes, (*pairs.divisions, whole)),)

    def make_cache(self, places: Places) -> BlockSparseCache:
        pairs = self.attention.make_cache(places)
        shape = len(pairs.keys), self.context.block_size, self.config.index_size
        return BlockSparseCache(pairs, torch.empty(shape, dtype=self.context.dtype, device=self.context.device))

    def rows(self, at: At) -> Iterator[Row]:
        yield from self.attention.rows(at)
        yield from self.indexer.rows(at.under("indexer"))

    def partial_sum(self, hidden_TD: Tensor, run: Run, cache: BlockSparseCache) -> Tensor:
        hidden_TD = plain_rows(hidden_TD)
        query_TNH, _ = self.attention.write(hidden_TD, run, cache.pairs)
        index_query_TnI, index_key_T1I = self.indexer(hidden_TD)
        rotation, step = run.rotations[self.config.attention.rotary], run.step
        index_key_T1I = self._apply_rope(index_key_T1I, rotation)
        self.backend.write(index_key_T1I[:, 0], cache.index_keys, step)
        if self._sees_all(step):
            attended_TNV = self.attention.backend.attend(query_TNH, cache.pairs, step)
        else:
            index_query_TnI = self._apply_rope(index_query_TnI, rotation)
            attended_TNV = self.backend.attend(query_TNH, index_query_TnI, cache.pairs, cache.index_keys, step)
        return self.attention.output(attended_TNV.flatten(1))

    def _sees_all(self, step: StepInputs) -> bool:
        """Return True for a prefill step whose tokens attend to all blocks, in which dense attention is faster."""
        longest = max((span.context_len for span in step.spans), default=0)
        return step.max_rows_per_chunk >= MIN_DENSE_ROWS and longest <= self.config.top_k * self.config.block_size
