"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a paged cache of compressed keys and values.

The cache holds one latent vector and one rotated key per token, shared by all heads. A head's keys and values are
linear maps of the latent vector, which can be used in two ways:

- *absorbed*: the map of the keys is applied to the query instead, and the map of the values to the result. All heads
  then attend to the latent vectors. This is cheap for few rows: no keys or values are computed for the context.
- *expanded*: keys and values of all heads are computed for the whole context, and attended to as usual. Each row costs
  less, so that many rows outweigh the cost of the expansion.

The two ways differ in the last bits, so a token's result may depend on the size of its chunk. With a backend that
absorbs chunks of any size (`takes_all_rows`), the result does not depend on the size.

With an indexer (DeepSeek-V3.2), a token attends to a selection of positions only, always in the absorbed way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.distributed.mesh import share_of
from moeserve.kv.layer_cache import CacheItems, Places
from moeserve.kv.rules import KeepAll, KeepWindow, RuleOfBlocks
from moeserve.layers.build_context import BuildContext
from moeserve.layers.chunked_sums import num_input_chunks, share_inputs
from moeserve.layers.latent.indexer import Choice, Indexer, IndexerSpec
from moeserve.layers.latent.learned_temperature import LearnedTemperature
from moeserve.layers.linear import Linear
from moeserve.layers.network import AttentionCosts, Build, NetworkSpec, OverTP, Run
from moeserve.layers.norm import RMSNorm, RowsForm
from moeserve.layers.rotary import RotarySpec, TemperatureSpec
from moeserve.layers.rows import At, Destination, Row, rows_of_heads, some_rows, whole
from moeserve.layers.weights import QuantizationLimits, Weights
from moeserve.memory import new_empty
from moeserve.ops import latent_attention, pairs, products, rows
from moeserve.ops.latent_attention.interface import LatentShape
from moeserve.ops.rows.interface import Rows
from moeserve.step_inputs import StepInputs

# n some heads, K unrotated values and S rotated values of a head's key, Q = K + S, L latent size, P = L + S, R rows of
# one chunk, C positions of its context

NORM_EPSILON = 1e-6  # epsilon of this layer's norms, usually independent of the model's epsilon
# If no context has more than `top_k` positions, and the longest chunk has at least this many rows, a step skips the
# indexer and runs dense attention. Captured steps have shorter chunks, because a replay must not depend on contexts.
MIN_DENSE_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(NetworkSpec):
    """The configuration of one layer of latent attention."""

    num_heads: int
    query_rank: int | None  # size that queries are compressed to; None: queries are not compressed
    latent_size: int
    key_dim: int  # size of a head's key without the rotated part
    rotary: RotarySpec  # applied to the rotated part; `NO_ROTATED_PART` if there is none
    value_dim: int
    temperature: TemperatureSpec | None = None  # multiplies queries
    has_learned_temperature: bool = False
    normalizes_rotated_key: bool = False  # an RMSNorm normalises the rotated key before its rotation (dots3)
    query_norm_epsilon: float = NORM_EPSILON
    latent_norm_epsilon: float = NORM_EPSILON
    score_factor: float = 1.0  # see RotarySpec
    latent_factor: float = 1.0  # multiplies the normalised latent vectors (LongCat-Flash)
    has_bias: bool = False  # the compressing projections and the output projection have biases
    has_head_gates: bool = False  # each head's output is multiplied by a sigmoid of its own (Ling 3)
    gate_name: str | None = None  # name of a projection to a gate per output value; sigmoids multiply outputs (HY-V4)
    window: int | None = None  # maximum number of positions that a token attends to, its own included (dots3)
    has_sinks: bool = False  # a learned score per head that takes a share of the softmax (HY-V4)
    # Queries are projected from compressed queries before and after the norm. The projection also has a gate for each
    # value of a head, behind the head's query. Outputs are multiplied by the sigmoids of the gates (A.X K2).
    has_query_gate: bool = False
    top_k: int | None = None  # maximum number of positions that a token attends to; None: all
    indexer: IndexerSpec | None = None  # selects positions; None with `top_k`: reuse the previous layer's selection

    @property
    def is_sparse(self) -> bool:
        """True if a token attends only to the positions that an indexer selects."""
        return self.top_k is not None

    @property
    def shares_choice(self) -> bool:
        """True if the layer attends to the positions that were selected for the previous layer."""
        return self.is_sparse and self.indexer is None

    def cache_rules(self, block_size: int) -> tuple[RuleOfBlocks]:
        """Return the rule that determines how long latent vectors stay in the cache."""
        return (KeepAll() if self.window is None else KeepWindow(self.window, block_size),)

    def can_divide(self, num_ranks: int) -> bool:
        """True if `num_ranks` tp ranks can each have equally many heads."""
        return self.num_heads % num_ranks == 0

    @property
    def needs(self) -> Needs:
        tokens_per_key = None if self.indexer is None else self.indexer.tokens_per_key
        is_pooled = tokens_per_key is not None
        windows = None if self.window is None else "sliding windows of latent attention"
        part = "an indexer of pooled keys" if is_pooled else windows
        return Needs(
            block_multiple=tokens_per_key or 1,
            fits_float8_cache=False,
            redoes_drafts=is_pooled,
            reads_earlier_layer=self.shares_choice,
            without_gpu_kernels="attention sinks of latent attention" if self.has_sinks else part,
        )

    def costs(self, hidden_size: int, tp: int) -> AttentionCosts:
        absorbed = self.cached_size + self.latent_size
        expanded = absorbed if self.is_sparse else self.query_dim + self.value_dim
        outputs = self.num_heads * self.value_dim
        return AttentionCosts(
            num_heads=self.num_heads,
            decode_operations=self.num_heads / tp * 2 * absorbed,
            prompt_operations=self.num_heads / tp * 2 * expanded,
            positions=self.window or self.top_k,
            projected_values=(outputs + self.num_heads * 2 * self.query_dim) / tp,
            output_values=outputs / tp,
            output_parameters=outputs / tp * hidden_size,
            index_values=0 if self.indexer is None else self.indexer.key_dim,
            index_operations=0 if self.indexer is None else self.indexer.num_heads * 2 * self.indexer.key_dim,
        )

    def build(self, build: Build) -> LatentAttention:
        return LatentAttention(self, build.hidden_size, build.context)

    @property
    def rotaries(self) -> tuple[RotarySpec | TemperatureSpec, ...]:
        """The rotary embeddings and temperatures that the layer uses."""
        rotary = self.rotary if self.rotary_dim else None
        of_all = (rotary, self.temperature, None if self.indexer is None else self.indexer.rotary)
        return tuple(each for each in of_all if each is not None)

    @property
    def rotary_dim(self) -> int:
        return self.rotary.dim

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.rotary_dim

    @property
    def projected_dim(self) -> int:
        """The number of values that the projection of queries computes for each head."""
        return self.query_dim + self.value_dim * self.has_query_gate

    @property
    def cached_size(self) -> int:
        """The size of a token's vector in the cache."""
        return self.latent_size + self.rotary_dim

    @property
    def max_absorbed_rows(self) -> int:
        """The maximum number of rows in a chunk for which absorbing takes fewer multiplications than expanding.

        For each head and position of the context, each row takes P + L multiplications if absorbed, and Q + V if
        expanded. The expansion takes L * (K + V) multiplications, once for all rows.
        """
        more_per_row = self.cached_size + self.latent_size - self.query_dim - self.value_dim
        expansion = self.latent_size * (self.key_dim + self.value_dim)
        return expansion // more_per_row if more_per_row > 0 else 2**31


@dataclass(frozen=True)
class LatentCache:
    """Normalised latent vectors and rotated keys of one layer in blocks, [num_blocks, block_size, P]."""

    latents: Tensor
    index_keys: Tensor | None = None  # [num_blocks, block_size, size of an indexer's key]; or pooled, see `PooledKeys`
    index_tails: Tensor | None = None  # states of unfinished pooled keys, see `PooledKeys`
    group: int = field(default=0, kw_only=True)  # index of the layer's cache group

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the cache; their first dimension is the block."""
        every = self.latents, self.index_keys, self.index_tails
        return tuple(tensor for tensor in every if tensor is not None)

    @property
    def tensors_of_items(self) -> tuple[tuple[Tensor, ...], ...]:
        """The tensors of each of the layer's `cache_items`."""
        return (self.tensors,)

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()


class LatentAttention(OverTP):
    """Attention of each token to the tokens of its own request up to itself.

    Each tp rank has a share of the heads and the whole cache, and computes a part of the sum that is the output.
    """

    def __init__(self, config: LatentAttentionSpec, hidden_size: int, context: BuildContext) -> None:
        super().__init__(context)
        tp = context.tp
        self.config = config
        self.context = context
        self.heads = share_of(config.num_heads, tp.rank_in_group, tp.world_size)
        self.num_heads = num_heads = int(self.heads.stop - self.heads.start)
        query_size = num_heads * config.projected_dim
        # Errors in scores grow exponentially in the softmax, so queries and keys keep 8 bits.
        query_limits = QuantizationLimits(8, (self.heads.start * config.projected_dim,))
        self.query: Linear | CompressedQuery
        if config.query_rank is None:
            self.query = Linear(hidden_size, query_size, context, limits=query_limits)
        else:
            self.query = CompressedQuery(config, hidden_size, query_size, query_limits, context)
        self.compress = Linear(
            hidden_size, config.cached_size, context, has_bias=config.has_bias, limits=QuantizationLimits(8)
        )
        self.latent_norm = RMSNorm(config.latent_size, config.latent_norm_epsilon, context)
        self.key_norm: RMSNorm | None = None
        if config.normalizes_rotated_key:
            self.key_norm = RMSNorm(config.rotary_dim, config.latent_norm_epsilon, context)
        self.head_maps = HeadMaps(config, num_heads, context)
        num_chunks = num_input_chunks(config.can_divide)
        self.output = Linear(
            num_heads * config.value_dim,
            hidden_size,
            context,
            has_bias=config.has_bias and tp.rank_in_group == 0,  # added once: outputs are summed over the ranks
            limits=QuantizationLimits(5, (self.heads.start * config.value_dim,)),
            chunks=share_inputs(config.num_heads * config.value_dim, num_chunks, context).chunks,
        )
        self.head_gates: Linear | None = None
        if config.has_head_gates:  # never in 8-bit blocks: tp ranks divide its few outputs anywhere
            self.head_gates = Linear(hidden_size, num_heads, context, limits=QuantizationLimits(cuts=None))
        elif config.gate_name is not None:
            limits = QuantizationLimits(cuts=(self.heads.start * config.value_dim,))
            self.head_gates = Linear(hidden_size, num_heads * config.value_dim, context, limits=limits)
        self.sinks = context.parameter(num_heads, dtype=torch.float32) if config.has_sinks else None
        row_operations = rows.make(context.backend)
        self._gate_rows = row_operations.gate_rows
        self.indexer: Indexer | None = None
        if config.indexer is not None:
            assert config.top_k is not None
            assert config.query_rank is not None or config.indexer.reads_hidden
            self.indexer = Indexer(config.indexer, hidden_size, config.query_rank, config.top_k, context)
        self.learned_temperature = LearnedTemperature(num_heads, context) if config.has_learned_temperature else None
        self.scale = config.query_dim**-0.5 * config.score_factor
        shape = LatentShape(self.scale, config.latent_size, config.num_heads, config.window)
        self.backend = latent_attention.make(context.backend, shape)
        self._apply_rope = row_operations.apply_rope
        first = self.query.down if isinstance(self.query, CompressedQuery) else self.query
        self.reads_float8 = first.weights.is_in_blocks and self.compress.weights.is_in_blocks
        self._quantize = row_operations.quantize if self.reads_float8 else None
        is_absorbed = self.backend.takes_all_rows or config.has_sinks or config.window is not None
        self._attend = self._attend_absorbed if is_absorbed else self._attend_either_way

    @property
    def cache_items(self) -> tuple[CacheItems, ...]:
        """The cache items: latent vectors, which every tp rank holds in full."""
        one = self._empty_cache(1, torch.device("meta"), group=0)
        (rule,) = self.config.cache_rules(self.context.block_size)
        return (CacheItems(rule, sum(tensor.nbytes for tensor in one.tensors)),)

    def make_cache(self, places: Places) -> LatentCache:
        group = places.group_of(*self.config.cache_rules(self.context.block_size))
        return self._empty_cache(places.tables[group].num_places, self.context.device, group)

    def _empty_cache(self, num_blocks: int, device: torch.device, group: int) -> LatentCache:
        config, dtype, block_size = self.config, self.context.dtype, self.context.block_size
        shapes: list[tuple[int, ...]] = [(num_blocks, block_size, config.cached_size)]
        if config.indexer is not None:
            shapes += config.indexer.cached_shapes(num_blocks, block_size)
        dtypes = dtype, dtype, torch.float32  # dtypes of latents, keys and tails
        return LatentCache(
            *(torch.empty(shape, dtype=kind, device=device) for shape, kind in zip(shapes, dtypes, strict=False)),
            group=group,
        )

    @property
    def gathered_form(self) -> RowsForm:
        if not self.reads_float8:
            return "plain"
        return "float8" if self.indexer is None and self.head_gates is None else "both"

    def rows(self, at: At) -> Iterator[Row]:
        config, heads = self.config, self.heads
        yield at("kv_a_layernorm.weight"), whole(self.latent_norm.weight, factor=config.latent_factor)
        if self.key_norm is not None:
            yield from self.key_norm.rows(at.under("k_rope_only_layernorm"))
        yield from self.compress.rows(at.under("kv_a_proj_with_mqa"))
        yield from self.head_maps.rows(at("kv_b_proj.weight"), config, heads)
        size = config.projected_dim
        query_rows, num_query_rows = rows_of_heads(heads, size), config.num_heads * size
        if isinstance(self.query, CompressedQuery):
            yield from self.query.down.rows(at.under("q_a_proj"))
            yield at("q_a_layernorm.weight"), whole(self.query.norm.weight)
            up = self.query.up
            yield at("q_b_proj.weight"), some_rows(up.weight, query_rows, num_query_rows, up.weights)
        else:
            yield at("q_proj.weight"), some_rows(self.query.weight, query_rows, num_query_rows, self.query.weights)
        if self.indexer is not None:
            yield from self.indexer.rows(at.under("indexer"))
        if self.learned_temperature is not None:
            for name, memory_N in self.learned_temperature.memories:
                yield at(f"ssmax_scaling.{name}"), some_rows(memory_N, heads, config.num_heads)
        value_columns, num_value_columns = rows_of_heads(heads, config.value_dim), config.num_heads * config.value_dim
        gates = self.head_gates
        if gates is not None and config.has_head_gates:
            yield at("g_proj.weight"), some_rows(gates.weight, heads, config.num_heads, gates.weights)
        elif gates is not None:
            name = f"{config.gate_name}.weight"
            yield at(name), some_rows(gates.weight, value_columns, num_value_columns, gates.weights)
        if self.sinks is not None:
            yield at("sinks"), some_rows(self.sinks, heads, config.num_heads)
        yield from self.output.summed_rows(
            at.under("o_proj"), value_columns, num_value_columns, has_bias=config.has_bias
        )

    def partial_sum(self, hidden_TD: Rows, run: Run, cache: LatentCache) -> Tensor:
        config, step, rotations = self.config, run.step.of_group(cache.group), run.rotations
        # The positions that tokens attend to: layers with an indexer write them, and other layers read them.
        choice = run.shared(Choice) if config.is_sparse else None
        given_TD = hidden_TD
        if self._quantize is not None:  # once for both projections, unless the norm has quantised the rows
            hidden_TD = self._quantize(hidden_TD)
        if isinstance(self.query, CompressedQuery):
            compressed_TI, query_TX = self.query(hidden_TD)
        else:
            compressed_TI, query_TX = hidden_TD, self.query(hidden_TD)
        query_TNX = query_TX.view(len(hidden_TD), self.num_heads, config.projected_dim)
        query_TNQ = query_TNX[..., : config.query_dim]
        if config.temperature is not None:
            query_TNQ = self._apply_rope(query_TNQ, rotations[config.temperature])
        if self.learned_temperature is not None:
            query_TNQ = self.learned_temperature(query_TNQ, step.positions)
        query_TNK, query_TNS = query_TNQ.split([config.key_dim, config.rotary_dim], dim=-1)
        query_TNP = new_empty(query_TNQ, *query_TNQ.shape[:2], config.cached_size)
        latent_TP = self.compress(hidden_TD)
        latent_TL, key_TS = latent_TP.split([config.latent_size, config.rotary_dim], dim=-1)
        self.latent_norm.in_place(latent_TL)
        if self.key_norm is not None:
            self.key_norm.in_place(key_TS)
        if config.rotary_dim:
            rotation = rotations[config.rotary]
            self._apply_rope(query_TNS, rotation, query_TNP[..., config.latent_size :])
            self._apply_rope(key_TS[:, None], rotation, key_TS[:, None])
        self.backend.write(latent_TP, cache.latents, step)

        if self.indexer is not None:
            assert choice is not None
            assert cache.index_keys is not None
            key_TX = self.indexer.keys(given_TD, rotations)
            if self.indexer.pooled_keys is None:
                self.backend.write(key_TX, cache.index_keys, step)
            else:
                assert cache.index_tails is not None
                block_size = cache.latents.shape[1]
                self.indexer.pooled_keys.write(key_TX, cache.index_keys, cache.index_tails, block_size, step)
            choice.entries = None
            if not self._sees_all(step):
                choice.entries = self.indexer.choose(given_TD, compressed_TI, rotations, cache.index_keys, step)
        if choice is None or choice.entries is None:
            attended_TNV = self._attend(query_TNK, query_TNP, cache, step)
        else:
            self.head_maps.absorb(query_TNK, out_TNL=query_TNP[..., : config.latent_size])
            attended_TNL = self.backend.attend_chosen(query_TNP, cache.latents, choice.entries, self.sinks)
            attended_TNV = self.head_maps.project(attended_TNL)
        if self.head_gates is not None:
            gates = self.head_gates(self.head_gates.weights.input_of(given_TD))
            gates = gates.view(-1, gates.shape[1] // self.num_heads)  # a row for each token and head
            attended_TNV = self._gate_rows(gates, attended_TNV.flatten(0, 1)).view_as(attended_TNV)
        if config.has_query_gate:
            gates_PV = query_TNX.flatten(0, 1)[:, config.query_dim :]
            attended_TNV = self._gate_rows(gates_PV, attended_TNV.flatten(0, 1)).view_as(attended_TNV)
        return self.output(attended_TNV.flatten(1))

    def _sees_all(self, step: StepInputs) -> bool:
        """Return True for a prefill step without a context longer than `top_k`, in which dense attention is faster."""
        assert self.config.top_k is not None
        longest = max((span.context_len for span in step.spans), default=0)
        return step.max_rows_per_chunk >= MIN_DENSE_ROWS and longest <= self.config.top_k

    def _attend_absorbed(
        self,
        query_TNK: Tensor,
        query_TNP: Tensor,
        cache: LatentCache,
        step: StepInputs,
        max_rows: int | None = None,
    ) -> Tensor:
        """Return the results of attention [T, N, V], with zeros in the rows of chunks of more than `max_rows` rows.

        Args:
            query_TNP: ends with the rotated part of the queries. This function overwrites the part before it.
        """
        self.head_maps.absorb(query_TNK, out_TNL=query_TNP[..., : self.config.latent_size])
        return self.head_maps.project(self.backend.attend(query_TNP, cache.latents, step, max_rows, self.sinks))

    def _attend_either_way(self, query_TNK: Tensor, query_TNP: Tensor, cache: LatentCache, step: StepInputs) -> Tensor:
        """Return the results of attention [T, N, V]. Each chunk is computed in the way with fewer multiplications."""
        max_rows = self.config.max_absorbed_rows
        is_long = [min(span.num_rows, span.context_len) > max_rows for span in step.spans]
        if all(is_long):
            new = query_TNK.new_empty if step.rows_have_positions else query_TNK.new_zeros
            attended_TNV = new(*query_TNK.shape[:2], self.config.value_dim)
        else:
            attended_TNV = self._attend_absorbed(query_TNK, query_TNP, cache, step, max_rows)
        if any(is_long):
            query_TNS = query_TNP[..., self.config.latent_size :]
            self.backend.attend_expanded(
                query_TNK, query_TNS, cache.latents, step, max_rows, self.head_maps.expand, attended_TNV
            )
        return attended_TNV


class HeadMaps(nn.Module):
    """The linear maps from a latent vector to each head's key and value, applied to queries and results if absorbed."""

    def __init__(self, config: LatentAttentionSpec, num_heads: int, context: BuildContext) -> None:
        super().__init__()
        # Errors in scores grow exponentially in the softmax, so the keys' map keeps 8 bits. The values' map, as small,
        # keeps 8 bits too. No kernel multiplies 8-bit blocks with an input of its own for each head.
        limits = QuantizationLimits(min_bits=8, cuts=None)
        shapes = (num_heads, config.latent_size, config.key_dim), (num_heads, config.value_dim, config.latent_size)
        self.keys, self.values = (Weights(products.PER_HEAD, shape, context, limits=limits) for shape in shapes)

    def rows(self, name: str, config: LatentAttentionSpec, heads: slice) -> Iterator[Row]:
        """Yield the weight mapping. For each head, the tensor has the key's map [K, L], then the value's map [V, L]."""
        size = config.key_dim + config.value_dim
        shape = (config.num_heads * size, config.latent_size)
        for slot, head in enumerate(range(heads.start, heads.stop)):
            start, middle, stop = head * size, head * size + config.key_dim, (head + 1) * size
            keys_KL, values_VL = self.keys.open.weight_eOI[slot].T, self.values.open.weight_eOI[slot]
            yield name, Destination(keys_KL, shape, (slice(start, middle),), self.keys)
            yield name, Destination(values_VL, shape, (slice(middle, stop),), self.values)

    def absorb(self, query_TNK: Tensor, out_TNL: Tensor) -> None:
        """Write absorbed queries, whose products with latent vectors equal the products of queries and keys."""
        self.keys.product.multiply(query_TNK, out_TNL)

    def project(self, attended_TNL: Tensor) -> Tensor:
        """Map the sum of latent vectors of each head to its sum of values, [T, N, V]."""
        return self.values.product.multiply(attended_TNL)

    def expand(self, latent_CL: Tensor, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return some heads' keys [n, C, K] and values [n, C, V]. The weights must be open."""
        key_nLK, value_nVL = self.keys.open.weight_eOI[heads], self.values.open.weight_eOI[heads]
        latent_nCL = latent_CL.expand(len(key_nLK), -1, -1)
        return torch.bmm(latent_nCL, key_nLK), torch.bmm(latent_nCL, value_nVL.transpose(1, 2))


class CompressedQuery(nn.Module):
    """Queries through a narrow layer: up(norm(down(x))), or with gates up(norm(down(x)), down(x))"""

    def __init__(
        self,
        config: LatentAttentionSpec,
        hidden_size: int,
        query_size: int,
        limits: QuantizationLimits,
        context: BuildContext,
    ) -> None:
        super().__init__()
        assert config.query_rank is not None
        self.down = Linear(
            hidden_size, config.query_rank, context, has_bias=config.has_bias, limits=QuantizationLimits(8)
        )
        self.reads_both = config.has_query_gate
        up = Linear(config.query_rank * (1 + self.reads_both), query_size, context, limits=limits)
        form: RowsForm = "float8" if up.weights.is_in_blocks and not self.reads_both else "plain"
        self.norm = RMSNorm(config.query_rank, config.query_norm_epsilon, context, form)
        self.up = up
        self._join = pairs.make(context.backend).join

    def forward(self, hidden_TD: Rows) -> tuple[Rows, Tensor]:
        """Return the normalised compressed queries [T, query_rank], and the queries [T, query_size]."""
        down_TI = self.down(hidden_TD)
        _, normed_TI = self.norm.after_adding(None, down_TI)
        return normed_TI, self.up(self._join(normed_TI, down_TI) if self.reads_both else normed_TI)
