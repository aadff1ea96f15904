"""The operations that a rank's model calls, as protocols, and the plain data that they take.

`Kernels` is the table of all of them for one device. Each of the packages `torch`, `cpu` and `triton` fills one. The
file is long because it is the complete contract between the layers and every implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.cache_kind import CacheKind
from moeserve.ops.compressed_attention.interface import CompressedAttention, CompressedShape
from moeserve.ops.convolution.interface import ConvolutionShape, ShortConvolution
from moeserve.ops.indexer.interface import ChooseEntries, ChosenEntries, IndexerRule
from moeserve.ops.linear_attention.interface import LinearAttention, LinearAttentionShape
from moeserve.ops.streams.interface import StreamKernels, StreamsConfig
from moeserve.step_inputs import StepInputs

# T tokens, D model width, E experts, K experts per token, P pairs = T * K, R rows, N query heads, G key-value heads,
# H head size, F rotated pairs, S rows of a source or slots of a weight, e weights side by side, I inputs, O outputs,
# C columns: the outputs, or half as many after a gated activation (gates first, then ups), V vocabulary or size of a
# value, W fields of SAMPLING_SETTINGS, B scales of a row

Activation = Callable[..., Tensor]  # called with gates and ups of one shape, or only with ups; see `num_parts_of`


@dataclass(frozen=True)
class SwiGLU:
    """silu(gate) * up (arXiv 2002.05202)."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and up within ± `limit` (gpt-oss)."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up.clamp(-self.limit, self.limit) + 1)


@dataclass(frozen=True)
class LimitedSwiGLU:
    """min(silu(gate), limit) * up, with up within ± `limit` (Step-3.7)."""

    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


@dataclass(frozen=True)
class CutSwiGLU:
    """silu(gate) * up, with gate at most `limit` and up within ± `limit` (DeepSeek-V4)."""

    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


@dataclass(frozen=True)
class GeGLU:
    """gelu(gate) * up (arXiv 2002.05202), with the approximation of gelu by tanh (Gemma 4)."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.gelu(gate, approximate="tanh") * up


@dataclass(frozen=True)
class SquaredReLU:
    """max(up, 0) ** 2, without a gate (arXiv 2109.08668)."""

    def __call__(self, up: Tensor) -> Tensor:
        return functional.relu(up).square()


def num_parts_of(activation: Activation | None) -> int:
    """Return the number of parts of the outputs that an activation combines: two (gates and ups), or one."""
    return 1 if activation is None or isinstance(activation, SquaredReLU) else 2


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of a step's rotary angles, shared by all layers with the same rotary embedding."""

    cosines: Tensor  # [T, F] float32
    sines: Tensor  # [T, F] float32
    is_interleaved: bool  # a pair is two neighbours (2f, 2f + 1); otherwise it is (f, f + F)


@dataclass(frozen=True)
class Float8Rows:
    """Rows quantised to 8-bit floats (E4M3), with a scale for each 128 numbers of a row: codes times scales."""

    codes: Tensor  # [..., I] float8_e4m3fn, rows contiguous
    scales: Tensor  # [..., B] float32, any strides
    dtype: torch.dtype  # dtype of the numbers before quantisation, and of the results of products
    rows: Tensor | None = None  # [..., I]: the numbers before quantisation, if another operation reads them

    def __len__(self) -> int:
        return len(self.codes)


Rows = Tensor | Float8Rows
FLOAT8_BLOCK = 128  # numbers of a row that share a scale


def plain_rows(rows: Rows) -> Tensor:
    """Return rows before quantisation if they were kept, otherwise dequantised rows."""
    if isinstance(rows, Tensor):
        return rows
    if rows.rows is not None:
        return rows.rows
    width = rows.codes.shape[-1]
    scales = rows.scales.repeat_interleave(FLOAT8_BLOCK, dim=-1)[..., :width]
    return (rows.codes.float() * scales).to(rows.dtype)


class ApplyRope(Protocol):
    """Apply a rotary embedding to the first 2 * F values of each head, in float32.

    Args:
        heads_TNH: may be overwritten; use only the result. May be a view of a projection.
        out_TNH: memory for the result, which may be that of the heads; None: the implementation chooses.

    Returns:
        [T, N, H] in the dtype of the heads.
    """

    def __call__(self, heads_TNH: Tensor, rotation: Rotation, out_TNH: Tensor | None = None, /) -> Tensor: ...


class ChooseTokens(Protocol):
    """Choose the next token of each row: the most likely one at temperature 0, otherwise a random one.

    Tokens are ordered by probability, ties by id. `min_p`, then `top_k`, then `top_p` each keep a prefix of this order.
    A random number selects a token by the cumulative probabilities of the kept ones. It comes from a counter-based
    generator (Philox 4x64-10, Salmon et al. 2011), so it depends only on the seed and the number of previous output
    tokens.

    Args:
        scores_RV: any floating dtype; a token with minus infinity is never chosen if the row has another number.
        settings_RW: int64, records of `SAMPLING_SETTINGS`.
        positions_R: int64, position of the newest token of each row in its request.

    Returns:
        The highest score of each row, in a dtype that holds it exactly, and the tokens [R] int64. NaN counts as the
        highest score. The token of a row whose highest score is not finite is arbitrary.
    """

    def __call__(self, scores_RV: Tensor, settings_RW: Tensor, positions_R: Tensor, /) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The rule by which a router computes experts and weights from logits.

    Scores are computed from logits. The experts with the highest score plus correction are chosen, and their scores are
    their weights.
    """

    num_experts: int
    top_k: int
    # Scores are the softmax over all experts, the sigmoid of each logit, the softmax over the chosen experts only, the
    # square root of the softplus of each logit, or for each chosen expert the softmax over itself and those experts
    # near it that were not chosen before it.
    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen", "sqrt_softplus", "sparse_mixer"] = "softmax"
    # For "sparse_mixer" (arXiv 2409.12136): an expert is near a better one if the difference of their logits is at most
    # this fraction of the larger of the better logit and the absolute value of its own.
    tolerance: float = 0.0
    # Experts form groups of equal size, and only experts of the best groups can be chosen (arXiv 2405.04434). A group
    # is rated by the sum of the scores of its best one or two experts.
    num_groups: int = 1
    num_chosen_groups: int = 1
    experts_rating_group: Literal[1, 2] = 1
    is_normalized: bool = False  # divide the weights by their sum
    scale: float = 1.0  # multiply the weights by this at the end
    has_bias: bool = False  # add a bias to the logits
    has_correction: bool = False  # a learned number per expert that affects only the choice (arXiv 2412.19437)
    # Number of rows of a table that gives the experts of each token id; scores then only determine weights
    # (DeepSeek-V4). None: experts are chosen by score.
    table_size: int | None = None
    has_factors: bool = False  # a learned number per expert that multiplies its weight at the end (Gemma 4)


class RouteTokens(Protocol):
    """Choose each token's experts, in float32.

    The kernels break ties between experts and between groups by the lowest index; the reference breaks them as
    torch.topk does, which is unspecified.

    Args:
        hidden_TD: any floating dtype.
        weight_ED: float32, like bias_E and correction_E.
        given_TK: the experts of each token, int64, if logits only determine weights.
        factors_E: float32, multiply the weights.

    Returns:
        Experts [T, K] int64, best first, and their weights [T, K] float32.
    """

    def __call__(
        self,
        hidden_TD: Tensor,
        weight_ED: Tensor,
        bias_E: Tensor | None,
        correction_E: Tensor | None,
        given_TK: Tensor | None = None,
        factors_E: Tensor | None = None,
        /,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Keys:
    """The range of keys, such as expert numbers, by which pairs are sorted. Key -1 is padding."""

    num_counted: int  # consecutive keys from `first` on; pairs with other keys are left out
    first: int = 0
    num_known: int | None = None  # number of all keys, which start at 0; None: the counted keys are the last ones

    @property
    def num_all(self) -> int:
        return self.first + self.num_counted if self.num_known is None else self.num_known


class PairKernels(Protocol):
    """Operations that sort pairs of token and expert, move their rows, and sum outputs.

    Pair t * K + k is token t and its k-th expert.
    """

    def sort(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """Return the pairs [R] ordered by key, then by pair, and the number of pairs of each key, both int64.

        Args:
            keys_TK: int64 or int32, [T, K] or [P].
            keys: the keys to count. Pairs with other keys are left out.
        """
        ...

    def order(self, keys_TK: Tensor, keys: Keys, load: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the results of `sort`, with the pairs padded by -1 to [P], so that no shape depends on the keys.

        Args:
            load: int64, to which the counts are added.
        """
        ...

    def count(self, counts: Tensor, totals: Tensor) -> None:
        """Add the counts of `sort` to the totals."""
        ...

    def gather(self, source_SD: Tensor, indices_R: Tensor, divisor: int = 1) -> Tensor:
        """Return [R, D]: row r is row indices_R[r] // divisor of the source.

        Indices may be pairs, with K as the divisor. Rows with index -1 are undefined.
        """
        ...

    def scatter(self, rows_RD: Tensor, indices_R: Tensor, num_rows: int) -> Tensor:
        """Return [num_rows, D]: row r of the input is row indices_R[r] of the result. All other rows are zeros.

        Rows with index -1 are left out.
        """
        ...

    def join(self, *parts_TX: Tensor) -> Tensor:
        """Return the parts concatenated row by row as bytes, viewed in the dtype of the last part."""
        ...

    def weighted_sum(self, output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weighted sum of each token's outputs, [T, D] of `dtype`, added in float32 in the order of k.

        Pairs without a row and rows with pair -1 are skipped. `weights_TK` is float32.
        """
        ...

    def weigh(self, rows_RD: Tensor, weights_R: Tensor, num_counted: Tensor) -> Tensor:
        """Return [R, D]: each row times its weight, computed in float32 and rounded once to the dtype of the rows.

        Args:
            weights_R: float32.
            num_counted: [1] int32 or int64: number of leading rows that are used; results of later rows are undefined.
        """
        ...


@dataclass(frozen=True)
class Gather:
    """Indices by which a product gathers its rows: row r is row indices_R[r] // divisor of the source."""

    indices_R: Tensor
    divisor: int


@dataclass(frozen=True)
class InputChunks:
    """The order in which a product adds its inputs if they are divided over ranks.

    Each chunk is summed separately, in float32, and the sums of the chunks are added in a tree, neighbours first. The
    total therefore does not depend on the number of ranks. A bias is added to the sum of the first chunk.

    Only kernels with `Kernels.batch_invariant_dtypes` use chunks; the others add inputs in any order.
    """

    size: int  # inputs per chunk; the last chunk may have fewer
    keeps_float32: bool  # results are not rounded, because they are logits, or partial sums that the ranks add


@dataclass(frozen=True)
class OpenWeights:
    """Weights [e, O, I] in the row-major layout of checkpoints, not packed.

    Weights in MXFP4 are codes [e, O, I / 2] uint8, with the first of two inputs in the low half of a byte, and
    exponents [e, O, I / MXFP4_GROUP] uint8 as scales (OCP Microscaling formats specification).
    """

    weight_eOI: Tensor
    bias_eO: Tensor | None = None
    activation: Activation | None = None
    scales_eGB: Tensor | None = None  # scales of weights in MXFP4 or in 8-bit blocks, see weight_blocks.py
    chunks: InputChunks | None = None  # None: a product adds all inputs in one chunk
    feeds_blocks: bool = False  # the results are read only by another product of weights in 8-bit blocks
    # [e, O, G] float16: a scale for each INT4_GROUP inputs. Weights that are integers times these scales, with fewer
    # than 16 distinct integers in a group, are packed as int4 without loss. None: packing chooses scales.
    int4_scales_eOG: Tensor | None = None

    @property
    def is_mxfp4(self) -> bool:
        return self.weight_eOI.dtype == torch.uint8

    @property
    def num_inputs(self) -> int:
        return self.weight_eOI.shape[2] * (2 if self.is_mxfp4 else 1)

    @property
    def num_parts(self) -> int:
        """Number of parts of a weight's outputs: two before a gated activation (gates and ups), otherwise one."""
        return num_parts_of(self.activation)


class Product(Protocol):
    """The operation activation(input @ weight.T + bias) for e weights of one shape.

    Inputs and results are tensors. Results have contiguous rows and the dtype of the input, or float32 if
    `InputChunks.keeps_float32`. Products of weights in 8-bit blocks also accept `Float8Rows`, and return them if
    `OpenWeights.feeds_blocks`.
    """

    def multiply(self, input_TI: Any) -> Any:
        """Return [T, C]: the products with the only weight."""
        ...

    def multiply_rows(
        self,
        rows_RI: Any,
        counts_e: Tensor,
        has_spare_rows: bool = False,
        gather: Gather | None = None,
        expected_rows: int | None = None,
        out_RC: Tensor | None = None,
    ) -> Any:
        """Return [R, C]: the first counts_e[0] rows with the first weight, and so on.

        Args:
            rows_RI: the rows, or the source of `gather`.
            counts_e: int64, rows of each weight. Their sum is R; with spare rows it may be less.
            has_spare_rows: rows beyond the sum of the counts are spare, and their results are undefined.
            gather: allowed only if `Kernels.products_gather_rows`.
            expected_rows: estimate of the number of rows that are not spare; None: all. It affects only speed.
            out_RC: memory for the results, on CPUs only; None: new memory.
        """
        ...

    def multiply_slots(self, slots_eSI: Any, counts_e: Tensor, expected_rows: int | None = None) -> Any:
        """Return [e, S, C]. The first counts_e[i] slots of weight i hold rows; results of other slots are undefined.

        Args:
            expected_rows: estimate of the total number of rows; None: all slots. It affects only speed.
        """
        ...

    def multiply_each(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        """Return [T, e, C]: the products of each weight with its own input of every token.

        Args:
            out_TeC: memory for the results, which may be a view of a wider tensor; None: new memory.
        """
        ...


PackedFormat = Literal["float32", "bfloat16", "int8", "int4", "mxfp4"]
INT4_GROUP = 32  # inputs of int4 weights that share a scale and a zero point
MXFP4_GROUP = 32  # inputs of weights in MXFP4 that share a scale


@dataclass(frozen=True)
class PackedWeights:
    """Weights packed in the order in which CPU kernels read them (csrc/cpu/packed_weight.h)."""

    format: PackedFormat
    panels: Tensor  # [e, bytes] uint8
    num_outputs: int
    num_inputs: int
    bias_eO: Tensor | None
    activation: Activation | None
    chunks: InputChunks | None = None

    @classmethod
    def from_panels(cls, weights: OpenWeights, packed_format: PackedFormat, panels: Tensor) -> PackedWeights:
        """Return packed weights of the given panels, with bias, activation and shape of the open weights."""
        return cls(
            packed_format,
            panels,
            weights.weight_eOI.shape[1],
            weights.num_inputs,
            weights.bias_eO,
            weights.activation,
            weights.chunks,
        )

    @property
    def num_parts(self) -> int:
        return num_parts_of(self.activation)


class WeightPacking(Protocol):
    """Packing of open weights for kernels that read them in another order."""

    def supports(self, weights: OpenWeights) -> bool: ...

    def num_bytes(self, weights: OpenWeights, packed_format: PackedFormat) -> int:
        """Return the bytes of each packed weight."""
        ...

    def fits_in_place(self, weights: OpenWeights, packed_format: PackedFormat) -> bool:
        """Return True if packed weights have the size and number format of the open ones."""
        ...

    def pack(self, weights: OpenWeights, packed_format: PackedFormat, *, in_place: bool) -> PackedWeights:
        """Return the packed weights, in new memory or, if `in_place`, in the memory of the open weights."""
        ...

    def product(self, packed: PackedWeights) -> Product: ...


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One layer's part of grouped-query attention on one rank."""

    num_heads: int
    num_kv_heads: int
    head_size: int  # of queries and keys
    dtype: torch.dtype
    scale: float  # factor of the products of queries and keys
    # Query heads of all tp ranks that read one key-value head. The order of sums depends on it. None: N / G.
    whole_group_size: int | None = None
    value_size: int | None = None  # at most head_size; None: head_size
    # Maximum number of positions that a token attends to, including its own; None: all up to its own. If negative,
    # positions are divided into chunks of -window, and a token attends to those of its own chunk.
    window: int | None = None
    has_sinks: bool = False


@dataclass(frozen=True)
class KeyValueCache:
    """Paged keys [num_blocks, G, block_size, H] and values [num_blocks, G, block_size, V] of one layer.

    They have the model's dtype, or are uint8 codes with a scale for each token and head; see `float8_rows.py`.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None  # [num_blocks, G, block_size] bfloat16
    value_scales: Tensor | None = None
    has_window: bool = field(default=False, kw_only=True)  # its blocks are those of layers with windows

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the cache. Their first dimension is the block, the second the head."""
        if self.key_scales is None or self.value_scales is None:
            return self.keys, self.values
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def tensors_of_items(self) -> dict[CacheKind, tuple[Tensor, ...]]:
        """The tensors by the kind of their items."""
        return {CacheKind.WINDOW_BLOCK if self.has_window else CacheKind.BLOCK: self.tensors}

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()


class AttentionBackend(Protocol):
    """Grouped-query attention of one layer. Query head n reads key-value head n // (N // G)."""

    def rotate_and_write(
        self,
        query_TNH: Tensor,
        key_TGH: Tensor,
        value_TGV: Tensor,
        rotation: Rotation,
        cache: KeyValueCache,
        step: StepInputs,
    ) -> Tensor:
        """Store each token's rotated key and value at `step.cache_slots`, and return the rotated queries.

        A token with slot -1 is not stored. Queries and keys may be overwritten.
        """
        ...

    def attend(
        self, query_TNH: Tensor, cache: KeyValueCache, step: StepInputs, sinks_N: Tensor | None = None
    ) -> Tensor:
        """Attend from row i of a chunk, at position p = context_len - num_rows + i, to the positions up to p.

        With a window, rows attend only to positions after p - window. Rows outside all chunks, or before position 0,
        get zeros.

        Args:
            sinks_N: float32, an additional score of each query head that has no value (gpt-oss, arXiv 2508.10925):
                each row is scaled by sum(exp(scores)) / (sum(exp(scores)) + exp(sink)).

        Returns:
            [T, N, V] in the dtype of the queries.
        """
        ...


class ExpandLatents(Protocol):
    """Compute the keys [n, C, K] and values [n, C, V] of n heads from latent vectors [C, L]. Results are contiguous."""

    def __call__(self, latent_CL: Tensor, heads: slice = ..., /) -> tuple[Tensor, Tensor]: ...


class LatentAttentionBackend(Protocol):
    """Multi-head latent attention (arXiv 2405.04434) of one layer, with absorbed key and value projections.

    All heads read one vector [P] per position. It is the key, and its first L elements are the value. The cache
    [num_blocks, block_size, P] has the dtype of vectors and queries.
    """

    @property
    def takes_all_rows(self) -> bool:
        """True if this backend must also run long chunks, to stay batch-invariant.

        Otherwise it is faster to expand the keys and values of chunks with many rows, and to attend to these.
        """
        ...

    def write(self, latent_TP: Tensor, cache: Tensor, step: StepInputs) -> None:
        """Store each token's vector at `step.cache_slots`. A token with slot -1 is not stored."""
        ...

    def attend(self, query_TNP: Tensor, cache: Tensor, step: StepInputs, max_rows: int | None = None) -> Tensor:
        """Attend from row i of a chunk, at position p = context_len - num_rows + i, to the positions up to p.

        Args:
            max_rows: chunks with more rows get zeros. Must be None if `takes_all_rows`.

        Returns:
            [T, N, L] in the dtype of the queries: the values weighted by the softmax of the scaled scores. Rows outside
            all chunks, or before position 0, get zeros.
        """
        ...

    def attend_chosen(self, query_TNP: Tensor, cache: Tensor, chosen: ChosenEntries) -> Tensor:
        """Attend from each row to the vectors at its slots.

        Returns:
            [T, N, L] in the dtype of the queries; zeros for rows without entries. If `takes_all_rows`, a row that
            attends to all positions up to its own has the same bytes as with `attend`.
        """
        ...

    def attend_expanded(
        self,
        query_TNK: Tensor,
        query_TNE: Tensor,
        cache: Tensor,
        step: StepInputs,
        max_rows: int,
        expand: ExpandLatents,
        out_TNV: Tensor,
    ) -> None:
        """Attend from the chunks with more than `max_rows` rows, with keys and values expanded for each head.

        A head's key is its own part [K] followed by the last E elements of the vector, which all heads share. Must not
        be called if `takes_all_rows`.

        Args:
            query_TNK, query_TNE: the parts of the queries for the two parts of the keys.
            max_rows: only rows with a position, that is, within the context, are counted.
            expand: computes keys and values from latent vectors.
            out_TNV: contiguous, in the dtype of the queries; only rows of these chunks that have a position are
                written.
        """
        ...


class Pending(Protocol):
    """A result whose computation may not have finished."""

    def wait(self) -> Tensor:
        """Return the result, ready for the caller's stream."""
        ...


class SideStream(Protocol):
    """An executor that overlaps computations with the caller's work if the device supports it."""

    def start(self, compute: Callable[[Any], Tensor], input: Any) -> Pending:
        """Start compute(input). Call `wait` on the returned object before using the result."""
        ...


class StepGraph(Protocol):
    """A CPU graph: the native kernels called between `begin_capture` and `end_capture`, replayed by one call."""

    def begin_capture(self) -> None: ...

    def end_capture(self) -> None: ...

    def replay(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The operations for one device, and their properties on which callers depend.

    `select_kernels` chooses the table once per rank. Constructors take the operations that they need from it.
    """

    name: Literal["cpu", "triton", "torch"]  # for messages
    add: Callable[[Tensor, Tensor], Tensor]  # (a_TD, b_TD) -> their sum; both contiguous and of one dtype
    add_scaled: Callable[[Tensor, Tensor, Tensor], Tensor]  # (a_TD, b_TD, factor [1] float32) -> (a + b) * factor
    gate_rows: Callable[[Tensor, Tensor], Tensor]  # (gates_T1 or gates_TD, rows_TD) -> sigmoid(gate) * row
    # (x_TD, weight_D, epsilon) -> [T, D] in the dtype of x; T may be several dimensions. The second one writes to x.
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rms_norm_in_place: Callable[[Tensor, Tensor, float], None]
    # (x_TD, weight_D, bias_D, epsilon) -> LayerNorm of x. The second one writes to x.
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    layer_norm_in_place: Callable[[Tensor, Tensor, Tensor, float], None]
    # (x_TD, update_TD, weight_D, epsilon) -> x + update, and this sum normalised. Inputs are not modified.
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    apply_rope: ApplyRope
    # rows_RV -> the largest number of each row [R], in a dtype that holds it exactly, and its index [R] int64. Ties go
    # to the lowest index, and NaN is larger than any number.
    row_maximum: Callable[[Tensor], tuple[Tensor, Tensor]]
    choose_tokens: ChooseTokens
    # (experts_TK, copies_EW, num_copies_E, first_token) -> the physical expert of each choice [T, K], int64: token t
    # gets copy (first_token + t) % num_copies_E[e] of expert e. Expert -1 is padding and stays -1.
    choose_expert_copies: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    pairs: PairKernels
    side_stream: SideStream

    make_router: Callable[[RouterConfig], RouteTokens]
    make_attention: Callable[[AttentionShape], AttentionBackend]
    # (scale, latent size L, query heads of all tp ranks)
    make_latent_attention: Callable[[float, int, int], LatentAttentionBackend]
    make_indexer: Callable[[IndexerRule], ChooseEntries]
    make_short_convolution: Callable[[ConvolutionShape], ShortConvolution]
    make_linear_attention: Callable[[LinearAttentionShape], LinearAttention]
    make_compressed_attention: Callable[[CompressedShape], CompressedAttention]
    make_streams: Callable[[StreamsConfig, float], StreamKernels]  # the second argument is the epsilon of norms
    make_product: Callable[[OpenWeights], Product]
    # Quantisation for products of weights in 8-bit blocks; None: they are not supported. Rows that are already in
    # 8 bits are returned unchanged. The second function takes (x_TD, update_TD or None, weight_D, epsilon, True to keep
    # the rows beside their codes), and returns the sum of x and the update, and this sum normalised and quantised.
    quantize_rows: Callable[[Rows], Float8Rows] | None = None
    quantize_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float, bool], tuple[Tensor, Float8Rows]] | None = None
    make_step_graph: Callable[[int, int], StepGraph] | None  # (address, bytes of an Arena); None: no CPU graphs
    packing: WeightPacking | None  # None: products read open weights
    allocate_weights: Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
    measure_memory_only: Callable[[], AbstractContextManager[None]]  # results may be zeros inside this context

    products_gather_rows: bool = False  # products accept a `Gather`, and never copy the counts to the host
    compiles_on_first_use: bool = False  # run every range of sizes once before serving
    supports_cuda_graphs: bool = False
    needs_finite_caches: bool = False  # caches must hold finite numbers even where nothing was written
    batch_invariant_dtypes: tuple[torch.dtype, ...] = ()  # a row's bytes do not depend on its batch in these dtypes
    instruction_set: str = "none"  # the layout of packed weights depends on it
