"""Grouped-query attention over a paged KV cache."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.distributed.mesh import share_of
from moeserve.kv.layer_cache import CacheDivision, CacheItems, Places
from moeserve.kv.rules import AnyRule, KeepAll, KeepState, KeepWindow, RuleOfBlocks
from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import num_input_chunks, share_inputs
from moeserve.layers.grouped_query.convolution import KeyValueConvolution, TapsSpec
from moeserve.layers.grouped_query.lengths import LengthLimit
from moeserve.layers.grouped_query.relative import RelativeScores, RelativeSpec
from moeserve.layers.linear import Linear, SideBySide
from moeserve.layers.network import AttentionCosts, Build, NetworkSpec, OverTP, Run
from moeserve.layers.norm import NormAfterEmbedding, RMSNorm, RowsForm
from moeserve.layers.rotary import NO_ROTARY, RotarySpec, TemperatureSpec, constant_factor
from moeserve.layers.rows import At, Row, rows_of_heads, some_rows
from moeserve.layers.weights import AnyWeights, QuantizationLimits
from moeserve.ops import attention, rows
from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.ops.products.interface import InputChunks
from moeserve.ops.rows.interface import Rows

# X = N * V


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(NetworkSpec):
    """The shape of one attention layer. Query head n reads key-value head n // (num_heads / num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # size of a query and of a key
    rotary: RotarySpec
    value_dim: int | None = None  # size of a value; None: the size of a key
    value_factor: float = 1.0  # multiplies values (MiMo-V2)
    values_are_keys: bool = False  # values are the projected keys, before norm and rotation (Gemma 4)
    normalizes_values: bool = False  # an RMSNorm without weights normalises the values of each head
    normalizes_outputs: bool = False  # an RMSNorm without weights normalises each head's outputs (Muse Spark)
    # Maximum number of positions that a token attends to, its own included. If negative, positions are divided into
    # chunks of -window, and a token attends only to positions in its own chunk (Llama 4).
    window: int | None = None
    has_bias: bool = False  # the projection of queries, keys and values has a bias
    has_output_bias: bool = False
    # RMSNorm of queries and keys: of each head by itself, or of all of a token's heads together
    normalized: Literal["no", "head", "token"] = "no"
    has_norm_weights: bool = True
    rotates_first: bool = False  # queries and keys are normalised after their rotation (Hunyuan)
    scale: float | None = None  # multiplies the products of queries and keys; None: 1 / sqrt(head_dim)
    clip: float | None = None  # queries, keys and values are clamped to ± this number
    temperature: TemperatureSpec | None = None  # multiplies queries
    has_head_gates: bool = False  # each head's output is multiplied by a sigmoid of its own (Step-3.7)
    has_sinks: bool = False  # a learned score per head that takes a share of the softmax (gpt-oss)
    has_gate: bool = False  # outputs are multiplied by the sigmoid of a projection as wide as the queries
    has_biased_gate: bool = False  # as `has_gate`, with a bias for each head; the gate is named by `gate_name` (Beam)
    has_softplus_gates: bool = False  # both kinds of gates use a softplus instead of a sigmoid (Laguna)
    # Name of the gate's tensor. None: the tensor of queries has, for each head, the query's rows and then the gate's.
    gate_name: str | None = None
    relative: RelativeSpec | None = None  # scores by distance, which are added to attention scores (Inkling)
    taps: TapsSpec | None = None  # convolution of keys and values; None: there is none
    # Maximum Euclidean length of keys, and of queries after a learned scale (Inkling 2). None: no limit.
    length_limit: float | None = None
    has_token_sinks: bool = False  # as `has_sinks`, with scores that each token computes
    has_own_inputs: bool = False  # queries, keys and values read rows of their own: a tuple of three
    follows_embedding: bool = False  # the embedded tokens are normalised before the first layer's norm

    @property
    def value_size(self) -> int:
        """The size of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def kv_sizes(self) -> tuple[int, int]:
        """The sizes of a key and of a value."""
        return self.head_dim, self.value_size

    @property
    def value_rotary(self) -> RotarySpec | None:
        """The rotation by zero that multiplies values by `value_factor`; None: values are not multiplied."""
        return None if self.value_factor == 1.0 else constant_factor(self.value_size, self.value_factor)

    @property
    def rotaries(self) -> tuple[RotarySpec | TemperatureSpec, ...]:
        """The rotary embeddings and temperatures that the layer uses."""
        of_scores = None if self.relative is None else self.relative.temperature
        others = (NO_ROTARY if self.rotates_first else None, self.value_rotary, self.temperature, of_scores)
        return (self.rotary, *(rotary for rotary in others if rotary is not None))

    @property
    def needs(self) -> Needs:
        is_plain = self.relative is None and self.taps is None
        return Needs(without_gpu_kernels=None if is_plain else "attention with scores by distance or with convolutions")

    def key_value_rule(self, block_size: int) -> RuleOfBlocks:
        """Return the rule that determines how long keys and values are kept."""
        return KeepAll() if self.window is None else KeepWindow(abs(self.window), block_size)

    def cache_rules(self, block_size: int) -> tuple[AnyRule, ...]:
        """Return the rules that determine how long keys and values, and states of their convolution, are kept."""
        rule = self.key_value_rule(block_size)
        return (rule,) if self.taps is None else (rule, KeepState.of_blocks(block_size))

    def entry_norm(self, build: Build) -> nn.Module | None:
        if not self.follows_embedding:
            return None
        return NormAfterEmbedding(build.hidden_size, build.norm_epsilon, build.context)

    def can_divide(self, num_ranks: int) -> bool:
        """True if `num_ranks` tp ranks can each have equally many heads with the key-value heads that they read."""
        divides = self.num_kv_heads % num_ranks == 0 or num_ranks % self.num_kv_heads == 0
        return self.num_heads % num_ranks == 0 and divides

    def costs(self, hidden_size: int, tp: int) -> AttentionCosts:
        operations, outputs = self.num_heads / tp * 2 * sum(self.kv_sizes), self.num_heads * self.value_size / tp
        projected = self.num_heads * self.head_dim + self.num_kv_heads * sum(self.kv_sizes)
        return AttentionCosts(
            num_heads=self.num_heads,
            decode_operations=operations,
            prompt_operations=operations,
            positions=None if self.window is None else abs(self.window),  # chunks count as windows: an upper bound
            projected_values=projected / tp,
            output_values=outputs,
            output_parameters=outputs * hidden_size,
        )

    def build(self, build: Build) -> Attention:
        return Attention(self, build.hidden_size, build.norm_epsilon, build.context)


class Attention(OverTP):
    """Attention of each token to the tokens of its own request up to itself, or only to the last `window` tokens.

    Each tp rank has a share of the heads, and computes a part of the sum that is the output.
    """

    def __init__(self, config: AttentionSpec, hidden_size: int, norm_epsilon: float, context: BuildContext) -> None:
        super().__init__(context)
        tp = context.tp
        self.config = config
        self.context = context
        self.heads = share_of(config.num_heads, tp.rank_in_group, tp.world_size)
        self.kv_heads = _kv_heads_of(self.heads, config)
        self.num_heads = num_heads = _length(self.heads)
        self.num_kv_heads = _length(self.kv_heads)
        query_size, key_size = num_heads * config.head_dim, self.num_kv_heads * config.head_dim
        value_size, output_size = self.num_kv_heads * config.value_size, num_heads * config.value_size
        assert not (config.values_are_keys and (config.has_gate or config.value_dim is not None))
        assert not (config.has_own_inputs and config.has_bias)
        self.projected_sizes = [query_size, key_size] + [value_size] * (not config.values_are_keys)
        self.projected_sizes += [output_size] * config.has_gate
        share = share_inputs(config.num_heads * config.value_size, num_input_chunks(config.can_divide), context)
        starts = self.heads.start * config.head_dim, *(self.kv_heads.start * size for size in config.kv_sizes)
        # Errors in scores grow exponentially in the softmax, so queries and keys keep 8 bits.
        limits = QuantizationLimits(8, (*starts, *itertools.accumulate(self.projected_sizes[:3])))
        size, has_bias = sum(self.projected_sizes), config.has_bias
        self.query_key_value: Linear | SideBySide = (
            SideBySide(hidden_size, self.projected_sizes, context)
            if config.has_own_inputs
            else Linear(hidden_size, size, context, has_bias=has_bias, limits=limits)
        )
        self.query_norm = _norm(config, self.heads, config.num_heads, norm_epsilon, context)
        self.key_norm = _norm(config, self.kv_heads, config.num_kv_heads, norm_epsilon, context, is_key=True)
        self.value_norm, self.output_norm = (
            RMSNorm(config.value_size, norm_epsilon, context, has_weight=False) if has_norm else None
            for has_norm in (config.normalizes_values, config.normalizes_outputs)
        )
        self.head_gates = _head_gates(config, self.heads, hidden_size, context)
        self.relative = _relative_scores(config, self.heads, hidden_size, context)
        self.convolution = _convolution(config, self.kv_heads, hidden_size, context)
        gate_rows = rows.make(context.backend).gate_rows
        self._gate_rows = functools.partial(gate_rows, is_softplus=config.has_softplus_gates)
        self.sinks = context.parameter(num_heads, dtype=torch.float32) if config.has_sinks else None
        self.token_sinks = _token_sinks(config, num_heads, hidden_size, context)
        self.output = Linear(
            output_size,
            hidden_size,
            context,
            has_bias=config.has_output_bias and tp.rank_in_group == 0,  # added once: outputs are summed over the ranks
            limits=QuantizationLimits(5, (self.heads.start * config.value_size,)),
            chunks=share.chunks,
        )
        self.shape = AttentionShape(
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=config.head_dim,
            value_size=config.value_dim,
            dtype=context.dtype,
            scale=config.head_dim**-0.5 if config.scale is None else config.scale,
            whole_group_size=config.num_heads // config.num_kv_heads,
            window=config.window,
            has_sinks=config.has_sinks or config.has_token_sinks,
        )
        self.backend = attention.make(context.backend, self.shape)
        self.value_rotary = config.value_rotary
        self._apply_rope = rows.make(context.backend).apply_rope

    @property
    def cache_items(self) -> tuple[CacheItems, ...]:
        items = key_value_items(self.config, self.kv_heads, self.context)
        return items if self.convolution is None else (*items, self.convolution.items)

    def make_cache(self, places: Places) -> KeyValueCache:
        cache = make_key_value_cache(self.config, self.num_kv_heads, places, self.context)
        return cache if self.convolution is None else replace(cache, inputs=self.convolution.make_inputs(places))

    @property
    def gathered_form(self) -> RowsForm:
        if isinstance(self.query_key_value, SideBySide) or not self.query_key_value.weights.is_in_blocks:
            return "plain"
        return "float8" if self.head_gates is None and self.relative is None else "both"

    def rows(self, at: At) -> Iterator[Row]:
        config, size, fused = self.config, self.config.head_dim, self.query_key_value
        queries, num_queries = rows_of_heads(self.heads, size), config.num_heads * size
        keys, values = (rows_of_heads(self.kv_heads, each) for each in config.kv_sizes)
        num_keys, num_values = (config.num_kv_heads * each for each in config.kv_sizes)
        parts: list[tuple[Tensor, AnyWeights | None, str]] = []
        if isinstance(fused, SideBySide):
            of_queries = [(name, queries, num_queries) for name in ("q_proj", config.gate_name) if name is not None]
            of_keys = ("k_proj", keys, num_keys), ("v_proj", values, num_values)
            yield from fused.rows(at, of_queries[0], *of_keys, *of_queries[1:])
        else:
            parts.append((fused.weight, fused.weights, "weight"))
        if isinstance(fused, Linear) and fused.bias is not None:
            parts.append((fused.bias, None, "bias"))
        for memory, owner, kind in parts:
            if at.has(f"qkv_proj.{kind}"):  # queries, keys and values are stored together
                starts = 0, num_queries, num_queries + num_keys
                for part, share, start in zip(
                    memory.split(self.projected_sizes), (queries, keys, values), starts, strict=True
                ):
                    own = slice(start + share.start, start + share.stop)
                    yield at(f"qkv_proj.{kind}"), some_rows(part, own, starts[2] + num_values, owner)
                continue
            query, key, *gate = memory.split(self.projected_sizes)
            yield at(f"k_proj.{kind}"), some_rows(key, keys, num_keys, owner)
            if not config.values_are_keys:
                value, *gate = gate
                yield at(f"v_proj.{kind}"), some_rows(value, values, num_values, owner)
            if not gate or config.gate_name is not None:
                yield at(f"q_proj.{kind}"), some_rows(query, queries, num_queries, owner)
                for each in gate:
                    yield at(f"{config.gate_name}.{kind}"), some_rows(each, queries, num_queries, owner)
                continue
            for slot, head in enumerate(range(self.heads.start, self.heads.stop)):
                for number, part in enumerate((query, *gate)):
                    first = (2 * head + number) * size
                    own = part[slot * size : (slot + 1) * size]
                    yield at(f"q_proj.{kind}"), some_rows(own, slice(first, first + size), 2 * num_queries, owner)
        if self.sinks is not None:
            yield at("sinks"), some_rows(self.sinks, self.heads, config.num_heads)
        if (sinks := self.token_sinks) is not None:
            yield at("sink_proj.weight"), some_rows(sinks.weight, self.heads, config.num_heads, sinks.weights)
        for name, norm in (("q_norm", self.query_norm), ("k_norm", self.key_norm)):
            if not isinstance(norm, nn.Identity):
                yield from norm.rows(at.under(name))
        for part in (self.relative, self.convolution):
            if part is not None:
                yield from part.rows(at)
        outputs, num_outputs = rows_of_heads(self.heads, config.value_size), config.num_heads * config.value_size
        gates = self.head_gates
        if gates is not None and gates.bias is not None:
            yield at(f"{config.gate_name}.weight"), some_rows(gates.weight, outputs, num_outputs, gates.weights)
            for bias_N in gates.bias.view(-1, config.value_size).unbind(1):
                yield at("gate_bias"), some_rows(bias_N, self.heads, config.num_heads)
        elif gates is not None:
            yield at("g_proj.weight"), some_rows(gates.weight, self.heads, config.num_heads, gates.weights)
        yield from self.output.summed_rows(at.under("o_proj"), outputs, num_outputs, has_bias=config.has_output_bias)

    def partial_sum(self, rows: Rows | tuple[Tensor, ...], run: Run, cache: KeyValueCache) -> Tensor:
        query_TNH, projected = self.write(rows, run, cache)
        hidden_TD = rows[0] if isinstance(rows, tuple) else rows
        biases_TNE = None if self.relative is None else self.relative(hidden_TD, run.rotations)
        sinks = self.sinks
        if self.token_sinks is not None:
            sinks = self.token_sinks(self.token_sinks.weights.input_of(hidden_TD))
        step = run.step.of_group(cache.group)
        attended_TNV = self.backend.attend(query_TNH, cache, step, sinks, biases_TNE)
        attended_TX = (attended_TNV if self.output_norm is None else self.output_norm(attended_TNV)).flatten(1)
        if self.head_gates is not None:
            gates = self.head_gates(self.head_gates.weights.input_of(hidden_TD))
            gates = gates.view(-1, gates.shape[1] // self.num_heads)  # a row for each token and head
            attended_TX = self._gate_rows(gates, attended_TX.view(-1, self.config.value_size)).view_as(attended_TX)
        return self.output(self._gate_rows(projected[3], attended_TX) if self.config.has_gate else attended_TX)

    def write(
        self, rows: Rows | tuple[Tensor, ...], run: Run, cache: KeyValueCache
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Write keys and values to the cache. Return the queries [T, N, H], and all projections of the rows.

        The widths of the projections are `projected_sizes`.
        """
        step, rotations = run.step.of_group(cache.group), run.rotations
        if isinstance(rows, tuple):  # gates read the same rows as queries
            together = self.query_key_value((*rows, rows[0])[: len(self.projected_sizes)])
        else:
            together = self.query_key_value(rows)
        projected: tuple[Tensor, ...] = together.split(self.projected_sizes, dim=-1)
        if self.convolution is not None:
            assert cache.inputs is not None
            first, length = self.projected_sizes[0], sum(self.projected_sizes[1:3])
            mixed = self.convolution(together[:, first : first + length], cache.inputs, step, rows)
            projected = (projected[0], *mixed, *projected[3:])
        num_tokens, head_dim = len(together), self.config.head_dim
        query_TNH = projected[0].view(num_tokens, self.num_heads, head_dim)
        key_TGH = projected[1].view(num_tokens, self.num_kv_heads, head_dim)
        projected_value = projected[1 if self.config.values_are_keys else 2]
        value_TGV = projected_value.view(num_tokens, self.num_kv_heads, self.config.value_size)
        if self.value_norm is not None:
            value_TGV = self.value_norm(value_TGV)
        rotation = rotations[self.config.rotary]
        if self.config.rotates_first:
            query_TNH, key_TGH = self._apply_rope(query_TNH, rotation), self._apply_rope(key_TGH, rotation)
            rotation = rotations[NO_ROTARY]
        query_TNH, key_TGH = self.query_norm(query_TNH), self.key_norm(key_TGH)
        if self.config.temperature is not None:
            query_TNH = self._apply_rope(query_TNH, rotations[self.config.temperature])
        if self.config.clip is not None:
            limit = self.config.clip
            query_TNH, key_TGH, value_TGV = (heads.clamp(-limit, limit) for heads in (query_TNH, key_TGH, value_TGV))
        if self.value_rotary is not None:
            value_TGV = self._apply_rope(value_TGV, rotations[self.value_rotary])
        return self.backend.rotate_and_write(query_TNH, key_TGH, value_TGV, rotation, cache, step), projected


def key_value_items(config: AttentionSpec, kv_heads: slice, context: BuildContext) -> tuple[CacheItems, ...]:
    """Return the cache items of a layer for this rank's key-value heads."""
    num_elements, num_bytes = sum(config.kv_sizes), context.dtype.itemsize
    bytes_of_head = num_elements + 2 * torch.bfloat16.itemsize if context.has_float8_cache else num_elements * num_bytes
    rule = config.key_value_rule(context.block_size)
    heads = CacheDivision(1, (range(kv_heads.start, kv_heads.stop),))
    divisions = (heads,) * (4 if context.has_float8_cache else 2)
    return (CacheItems(rule, context.block_size * _length(kv_heads) * bytes_of_head, divisions),)


def make_key_value_cache(
    config: AttentionSpec, num_kv_heads: int, places: Places, context: BuildContext
) -> KeyValueCache:
    """Return the cache of a layer with `num_kv_heads` on this rank."""
    rule = config.key_value_rule(context.block_size)
    group = places.group_of(rule)
    shape = (places.tables[group].num_places, num_kv_heads, context.block_size)
    dtype = torch.uint8 if context.has_float8_cache else context.dtype
    keys, values = (torch.empty(*shape, head_size, dtype=dtype, device=context.device) for head_size in config.kv_sizes)
    if not context.has_float8_cache:
        return KeyValueCache(keys, values, group=group)
    key_scales, value_scales = (torch.empty(shape, dtype=torch.bfloat16, device=context.device) for _ in range(2))
    return KeyValueCache(keys, values, key_scales, value_scales, group=group)


class TokenNorm(nn.Module):
    """RMSNorm over all heads of a token together (OLMoE), including the heads of other tp ranks."""

    def __init__(self, heads: slice, num_heads: int, head_dim: int, epsilon: float, context: BuildContext) -> None:
        """
        Args:
            heads: the heads of this rank. Every rank has equally many heads; several ranks may have the same heads.
            num_heads: number of heads of all ranks.
        """
        super().__init__()
        self.heads = heads
        self.norm = RMSNorm(num_heads * head_dim, epsilon, context)
        self.tp = context.tp
        self.num_holders = _length(heads) * self.tp.world_size // num_heads  # ranks that have the same heads

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module."""
        return self.norm.rows(at)

    def forward(self, heads_TNH: Tensor) -> Tensor:
        """Return the normalised heads [T, N, H]. Each rank normalises all ranks' heads, so sums have one order."""
        if self.tp.world_size == 1:
            return self.norm(heads_TNH.flatten(1)).view_as(heads_TNH)
        num_tokens, num_ranks = len(heads_TNH), self.tp.world_size
        gathered = self.tp.all_gather(heads_TNH, [num_tokens] * num_ranks)  # collective: all tp ranks
        of_ranks = gathered.view(num_ranks, *heads_TNH.shape)[:: self.num_holders]
        normed_TS = self.norm(rearrange(of_ranks, "r T N H -> T (r N H)"))
        return rearrange(normed_TS, "T (N H) -> T N H", H=heads_TNH.shape[2])[:, self.heads].contiguous()


def _norm(
    config: AttentionSpec,
    heads: slice,
    num_heads: int,
    epsilon: float,
    context: BuildContext,
    *,
    is_key: bool = False,
) -> nn.Identity | RMSNorm | TokenNorm | LengthLimit:
    """Return the norm of queries or keys: over each head, or over all `num_heads` heads of a token together."""
    if config.length_limit is not None:
        size = config.head_dim
        return LengthLimit(config.length_limit, heads, num_heads, size, context, has_scale=not is_key)
    if config.normalized == "no":
        return nn.Identity()
    if config.normalized == "head":
        return RMSNorm(config.head_dim, epsilon, context, has_weight=config.has_norm_weights)
    return TokenNorm(heads, num_heads, config.head_dim, epsilon, context)


def _relative_scores(
    config: AttentionSpec, heads: slice, hidden_size: int, context: BuildContext
) -> RelativeScores | None:
    if config.relative is None:
        return None
    return RelativeScores(config.relative, heads, config.num_heads, hidden_size, context)


def _head_gates(config: AttentionSpec, heads: slice, hidden_size: int, context: BuildContext) -> Linear | None:
    if config.has_head_gates:  # never in 8-bit blocks: tp ranks divide its few outputs anywhere
        return Linear(hidden_size, _length(heads), context, limits=QuantizationLimits(cuts=None))
    if not config.has_biased_gate:
        return None
    limits = QuantizationLimits(cuts=(heads.start * config.value_size,))
    return Linear(hidden_size, _length(heads) * config.value_size, context, has_bias=True, limits=limits)


def _token_sinks(config: AttentionSpec, num_heads: int, hidden_size: int, context: BuildContext) -> Linear | None:
    if not config.has_token_sinks:
        return None
    limits, chunks = QuantizationLimits(8, None), InputChunks(hidden_size, keeps_float32=True)
    return Linear(hidden_size, num_heads, context, limits=limits, chunks=chunks)


def _convolution(
    config: AttentionSpec, kv_heads: slice, hidden_size: int, context: BuildContext
) -> KeyValueConvolution | None:
    if config.taps is None:
        return None
    return KeyValueConvolution(config.taps, kv_heads, config.num_kv_heads, config.kv_sizes, hidden_size, context)


def _kv_heads_of(heads: slice, config: AttentionSpec) -> slice:
    """Return the key-value heads that the query heads `heads` read."""
    group = config.num_heads // config.num_kv_heads
    return slice(heads.start // group, -(-heads.stop // group))


def _length(part: slice) -> int:
    return int(part.stop - part.start)
