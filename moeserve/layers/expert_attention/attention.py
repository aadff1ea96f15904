"""Mixture of attention heads (arXiv 2210.05144), as JetMoE has it: experts project queries and outputs.

A router chooses experts for each token. Each chosen expert projects the token to a query for every key-value head, and
the results of these queries back to the model's width. All experts share the keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.distributed.mesh import share_of
from moeserve.kv.layer_cache import CacheItems, Places
from moeserve.kv.rules import RuleOfBlocks
from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import num_input_chunks, share_inputs
from moeserve.layers.grouped_query.attention import AttentionSpec, key_value_items, make_key_value_cache
from moeserve.layers.linear import Linear
from moeserve.layers.moe.router import Router
from moeserve.layers.network import AttentionCosts, Build, Network, NetworkPart, NetworkSpec, Run, gathered
from moeserve.layers.rotary import NO_ROTARY, RotarySpec
from moeserve.layers.rows import At, Destination, Row, rows_of_heads, whole
from moeserve.layers.rows_of_parts import Part, joined
from moeserve.layers.weights import QuantizationLimits, Weights
from moeserve.ops import attention, pairs, products, rows
from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.ops.pairs.interface import Keys
from moeserve.ops.products.interface import RowGroups
from moeserve.ops.routing.interface import RouterSpec
from moeserve.ops.rows.interface import plain_rows

# G key-value heads of this rank, K experts of a token, Q = G * H values of an expert's queries, E experts, P pairs of a
# token and one of its experts


@dataclass(frozen=True, kw_only=True)
class ExpertAttentionSpec(NetworkSpec):
    """The shape of one layer. Query head k * num_kv_heads + g, of a token's expert k, reads key-value head g."""

    router: RouterSpec  # the weights of a token's experts sum to one
    num_kv_heads: int
    head_dim: int
    rotary: RotarySpec

    @property
    def heads(self) -> AttentionSpec:
        """Grouped-query attention with the same heads and the same cache."""
        num_heads = self.router.top_k * self.num_kv_heads
        return AttentionSpec(
            num_heads=num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, rotary=self.rotary
        )

    @property
    def rotaries(self) -> tuple[RotarySpec, ...]:
        return self.rotary, NO_ROTARY

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="experts of attention")

    def cache_rules(self, block_size: int) -> tuple[RuleOfBlocks]:
        """Return the rule that determines how long keys and values are kept."""
        return (self.heads.key_value_rule(block_size),)

    def can_divide(self, num_ranks: int) -> bool:
        """True if the key-value heads can be divided evenly over `num_ranks` tp ranks."""
        return self.num_kv_heads % num_ranks == 0

    def costs(self, hidden_size: int, tp: int) -> AttentionCosts:
        return self.heads.costs(hidden_size, tp)

    def build(self, build: Build) -> ExpertAttention:
        return ExpertAttention(self, build.hidden_size, build.context)


class ExpertAttention(Network):
    """Attention of each token, with the queries of its experts, to the tokens of its own request up to itself.

    Each tp rank has a share of the key-value heads, and each expert's rows and columns for these heads. Ranks add the
    outputs of each pair of a token and an expert before the outputs are weighted, so that sums always have one order.
    """

    def __init__(self, config: ExpertAttentionSpec, hidden_size: int, context: BuildContext) -> None:
        super().__init__()
        self.config, self.context, self.tp = config, context, context.tp
        tp, num_experts = context.tp, config.router.num_experts
        self.kv_heads = share_of(config.num_kv_heads, tp.rank_in_group, tp.world_size)
        self.num_kv_heads = self.kv_heads.stop - self.kv_heads.start
        size = self.num_kv_heads * config.head_dim
        share = share_inputs(config.num_kv_heads * config.head_dim, num_input_chunks(config.can_divide), context)
        self.router = Router(config.router, hidden_size, context)
        # Errors in scores grow exponentially in the softmax, so queries and keys keep 8 bits.
        limits = QuantizationLimits(8, (self.kv_heads.start * config.head_dim, size))
        self.key_value = Linear(hidden_size, 2 * size, context, limits=limits)
        kind = products.GROUPED
        self.queries = Weights(kind, (num_experts, size, hidden_size), context, limits=limits)
        self.outputs = Weights(
            kind,
            (num_experts, hidden_size, size),
            context,
            has_bias=tp.rank_in_group == 0,  # added once: outputs are summed over the ranks
            limits=QuantizationLimits(5, limits.cuts),
            chunks=share.chunks,
        )
        shape = AttentionShape(
            num_heads=config.router.top_k * self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=config.head_dim,
            dtype=context.dtype,
            scale=config.head_dim**-0.5,
        )
        self.backend = attention.make(context.backend, shape)
        self.pairs = pairs.make(context.backend)
        self._apply_rope = rows.make(context.backend).apply_rope

    @property
    def cache_items(self) -> tuple[CacheItems, ...]:
        return key_value_items(self.config.heads, self.kv_heads, self.context)

    def make_cache(self, places: Places) -> KeyValueCache:
        return make_key_value_cache(self.config.heads, self.num_kv_heads, places, self.context)

    def parts(self) -> Iterator[NetworkPart]:
        yield NetworkPart("routers", self.router)
        yield NetworkPart("attention", self.key_value)
        experts = nn.ModuleList([self.queries, self.outputs])
        yield NetworkPart("experts of attention", experts, self.config.router.top_k, self.config.router.num_experts)

    def rows(self, at: At) -> Iterator[Row]:
        heads, num_heads, size = self.kv_heads, self.config.num_kv_heads, self.config.head_dim
        yield from self.router.rows(at.under("gate"))
        both, owner = self.key_value.weight.chunk(2), self.key_value.weights
        yield from joined(at("kv_proj.weight"), [Part.of_heads(part, heads, num_heads, owner) for part in both])
        num_experts, hidden_size, _ = self.outputs.shape
        own, every = rows_of_heads(heads, size), slice(0, hidden_size)
        for expert in range(num_experts):
            one = slice(expert, expert + 1)
            query_1QD, output_1DQ = (weights.open.weight_eOI[one] for weights in (self.queries, self.outputs))
            shape = num_experts, num_heads * size, hidden_size
            yield at("experts.q_proj"), Destination(query_1QD, shape, (one, own), self.queries)
            shape = num_experts, hidden_size, num_heads * size
            yield at("experts.o_proj"), Destination(output_1DQ, shape, (one, every, own), self.outputs)
        yield at("experts.bias"), None
        for bias_D in () if self.outputs.bias is None else self.outputs.bias:
            yield at("experts.bias"), whole(bias_D)

    def forward(self, rows: Tensor, run: Run, cache: KeyValueCache) -> Tensor:
        step, top_k = run.step, self.config.router.top_k
        hidden_TD = plain_rows(gathered(rows, self.tp, step))
        routing = self.router(hidden_TD)
        pair_of_row_P, counts_E = self.pairs.sort(routing.experts_TK, Keys(self.config.router.num_experts))
        groups = RowGroups(counts_E)
        query_PQ = self.queries.product.multiply(self.pairs.gather(hidden_TD, pair_of_row_P, top_k), groups)
        query_PQ = self.pairs.scatter(query_PQ, pair_of_row_P, len(pair_of_row_P))
        attended_PQ = self._attend(query_PQ, self.key_value(hidden_TD), run, cache)
        output_PD = self.outputs.product.multiply(self.pairs.gather(attended_PQ, pair_of_row_P), groups)
        if self.tp.world_size > 1:
            output_PD = self.pairs.scatter(output_PD, pair_of_row_P, len(pair_of_row_P))
            sizes = [top_k * size for size in step.tp_sizes]
            output_PD = self.tp.reduce_scatter(output_PD, sizes, self.context.sum_dtype)  # collective: all tp ranks
            pair_of_row_P = torch.arange(len(output_PD), device=output_PD.device)
        weights_TK = routing.weights_TK[step.own_rows]
        return self.pairs.weighted_sum(output_PD, pair_of_row_P, weights_TK, hidden_TD.dtype)

    def _attend(self, query_PQ: Tensor, key_value_TX: Tensor, run: Run, cache: Any) -> Tensor:
        """Return the results of attention, [P, Q]: Q values for each of P pairs of a token and an expert."""
        num_tokens, num_heads, size = len(key_value_TX), self.num_kv_heads, self.config.head_dim
        top_k = self.config.router.top_k
        key_TGH, value_TGH = key_value_TX.view(num_tokens, 2, num_heads, size).unbind(1)
        step = run.step.of_group(cache.group)
        query_TGKH = self._exchanged(query_PQ.view(num_tokens, top_k, num_heads, size), run)
        query_TNH = self.backend.rotate_and_write(
            query_TGKH.flatten(1, 2), key_TGH, value_TGH, run.rotations[self.config.rotary], cache, step
        )
        attended_TNH = self.backend.attend(query_TNH, cache, step)
        return self._exchanged(attended_TNH.view(num_tokens, num_heads, top_k, size), run).view_as(query_PQ)

    def _exchanged(self, heads_TXYH: Tensor, run: Run) -> Tensor:
        """Return heads [T, X, Y, H] as contiguous [T, Y, X, H].

        A rotation by zero makes the copy, because graphs can capture the kernel for rotations.
        """
        first, second = heads_TXYH.shape[1:3]
        out_TYXH = heads_TXYH.new_empty(len(heads_TXYH), second, first, heads_TXYH.shape[3])
        for x in range(first) if first < second else ():
            self._apply_rope(heads_TXYH[:, x], run.rotations[NO_ROTARY], out_TYXH[:, :, x])
        for y in range(second) if first >= second else ():
            self._apply_rope(heads_TXYH[:, :, y], run.rotations[NO_ROTARY], out_TYXH[:, y])
        return out_TYXH
