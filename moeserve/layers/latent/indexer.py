"""The lightning indexer of sparse attention (DeepSeek-V3.2): the positions that each token attends to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from einops import rearrange
from torch import Tensor, nn

from moeserve.layers.build_context import BuildContext
from moeserve.layers.latent.learned_temperature import LearnedTemperature
from moeserve.layers.latent.pooled_keys import PooledKeys
from moeserve.layers.linear import Linear
from moeserve.layers.rotary import RotarySpec, Rotations
from moeserve.layers.rows import At, Row, whole
from moeserve.layers.weights import QuantizationLimits
from moeserve.ops import indexer, rows
from moeserve.ops.indexer.interface import ChosenEntries, IndexerRule
from moeserve.ops.rows.interface import Rows, plain_rows
from moeserve.step_inputs import StepInputs

# I size of a compressed query, N heads of the indexer, H key size

NORM_EPSILON = 1e-6  # epsilon of the indexer's LayerNorms, independent of the model's epsilon


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """The shape of an indexer. All of its heads share one key for each token, or for several tokens."""

    num_heads: int
    key_dim: int
    rotary: RotarySpec | None  # applied to the first elements of queries and keys; None: no rotation
    rotates_last: bool = False  # `rotary` is applied to the last elements instead (HY-V4)
    norm_epsilon: float = NORM_EPSILON  # epsilon of the norm of keys
    reads_hidden: bool = False  # queries are projected from normalised hidden states (Mistral Large 4)
    has_learned_temperature: bool = False  # queries are multiplied by a learned temperature
    tokens_per_key: int | None = None  # number of tokens whose keys are pooled to one (GLM-5.3); None: no pooling

    def cached_shapes(self, num_blocks: int, block_size: int) -> tuple[tuple[int, ...], ...]:
        """Return the shape of the cache of keys and, if keys are pooled, the shape of the cache of unfinished keys."""
        if self.tokens_per_key is None:
            return ((num_blocks, block_size, self.key_dim),)
        return (num_blocks, block_size // self.tokens_per_key, self.key_dim), (num_blocks, 3 * self.key_dim)


@dataclass
class Choice:
    """The positions that the last layer with an indexer selected in a step, for later layers without an indexer."""

    entries: ChosenEntries | None = None  # None: all positions


class Indexer(nn.Module):
    """Selects the positions with the highest scores: the sum over heads of weight * max(0, query . key).

    The published inference code scales these scores, and rotates queries and keys by a Hadamard matrix before it rounds
    them to 8 bits. In exact arithmetic, neither the scale nor the rotation changes the order of scores. Every tp rank
    computes all heads.
    """

    def __init__(
        self, config: IndexerSpec, hidden_size: int, query_rank: int | None, top_k: int, context: BuildContext
    ) -> None:
        """
        Args:
            query_rank: size of attention's compressed queries. None: attention does not compress queries, and the
                indexer reads hidden states.
        """
        super().__init__()
        self.config = config
        self.query_norm_weight = context.parameter(hidden_size) if config.reads_hidden else None
        self.query_norm_bias = context.parameter(hidden_size) if config.reads_hidden else None
        query_size = hidden_size if config.reads_hidden else query_rank
        assert query_size is not None
        limits = QuantizationLimits(8)  # the same limit as for the queries and keys of attention
        self.query = Linear(query_size, config.num_heads * config.key_dim, context, limits=limits)
        # If keys are pooled, they come before the gates of pooling.
        num_parts = 1 if config.tokens_per_key is None else 2
        self.key = Linear(hidden_size, num_parts * config.key_dim, context, limits=limits)
        self.key_norm_weight = context.parameter(config.key_dim)
        self.key_norm_bias = context.parameter(config.key_dim)
        # FP8 checkpoints also store this projection in bfloat16.
        self.head_weights = Linear(hidden_size, config.num_heads, context, limits=QuantizationLimits(8, None))
        num_heads = config.num_heads
        self.learned_temperature = LearnedTemperature(num_heads, context) if config.has_learned_temperature else None
        row_operations = rows.make(context.backend)
        self._norm = row_operations.layer_norm
        self._norm_in_place = row_operations.layer_norm_in_place
        self._apply_rope = row_operations.apply_rope
        self.pooled_keys: PooledKeys | None = None
        rule = IndexerRule(top_k=top_k)
        if config.tokens_per_key is not None:
            size = config.tokens_per_key
            self.pooled_keys = PooledKeys(config.key_dim, size, context)
            rule = IndexerRule(top_k=top_k // size, tokens_per_entry=size, is_expanded=True)
        self._choose = indexer.make(context.backend, rule)

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module, whose weights are whole on every rank."""
        if self.query_norm_weight is not None:
            assert self.query_norm_bias is not None
            yield at("q_input_norm.weight"), whole(self.query_norm_weight)
            yield at("q_input_norm.bias"), whole(self.query_norm_bias)
        if self.learned_temperature is not None:
            for name, memory_N in self.learned_temperature.memories:
                yield at(f"ssmax_scaling.{name}"), whole(memory_N)
        yield from self.query.rows(at.under("wq_b"))
        if self.pooled_keys is None:
            yield from self.key.rows(at.under("wk"))
        else:
            key, gate = self.key.weight.chunk(2)
            yield at("wk.weight"), whole(key, self.key.weights)
            yield at("index_kpool_compress_gate"), whole(gate, self.key.weights)
            yield from self.pooled_keys.rows(at)
        yield at("k_norm.weight"), whole(self.key_norm_weight)
        yield at("k_norm.bias"), whole(self.key_norm_bias)
        yield from self.head_weights.rows(at.under("weights_proj"))

    def keys(self, hidden_TD: Rows, rotations: Rotations) -> Tensor:
        """Return the keys to store, [T, H]. If keys are pooled, return keys and gates side by side, [T, 2 * H]."""
        key_TX = self.key(self.key.weights.input_of(hidden_TD))
        key_TH = key_TX[:, : self.config.key_dim]
        self._norm_in_place(key_TH, self.key_norm_weight, self.key_norm_bias, self.config.norm_epsilon)
        self._rotate(key_TH[:, None], rotations)
        return key_TX

    def _rotate(self, heads_TNH: Tensor, rotations: Rotations) -> None:
        """Apply the rotary embedding in place, if there is one."""
        rotary = self.config.rotary
        if rotary is None:
            return
        part = heads_TNH[..., self.config.key_dim - rotary.dim :] if self.config.rotates_last else heads_TNH
        self._apply_rope(part, rotations[rotary], part)

    def choose(
        self, hidden_TD: Rows, query_TI: Rows, rotations: Rotations, key_cache: Tensor, step: StepInputs
    ) -> ChosenEntries:
        """Return the positions that each token attends to. The cache must already hold the keys of the step's tokens.

        Args:
            query_TI: the compressed queries of attention. Not used if the indexer reads hidden states.
            key_cache: [num_blocks, block_size, H]; if keys are pooled, [num_blocks, block_size / tokens_per_key, H].
        """
        if self.query_norm_weight is not None:
            assert self.query_norm_bias is not None
            hidden_TD = plain_rows(hidden_TD)
            query_TI = self._norm(hidden_TD, self.query_norm_weight, self.query_norm_bias, NORM_EPSILON)
        query_TX = self.query(self.query.weights.input_of(query_TI))
        query_TNH = rearrange(query_TX, "T (N H) -> T N H", H=self.config.key_dim)
        if self.learned_temperature is not None:
            query_TNH = self.learned_temperature(query_TNH, step.positions)
        self._rotate(query_TNH, rotations)
        weights_TN = self.head_weights(plain_rows(hidden_TD))
        return self._choose(query_TNH, weights_TN, key_cache, step)
