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

from moeserve.ops.compressed_attention import CompressedAttention, CompressedShape
from moeserve.ops.hyper_connections import StreamKernels, StreamsConfig
from moeserve.ops.indexer import ChooseEntries, ChosenEntries, IndexerRule
from moeserve.ops.linear_attention import LinearAttention, LinearAttentionShape
from moeserve.ops.short_convolution import ConvolutionShape, ShortConvolution
from moeserve.protocol import CacheKind
from moeserve.step_inputs import StepInputs

# T tokens, D model width, E experts, K experts per token, P pairs = T * K, R rows, N query heads, G key-value heads,
# H head size, F rotated pairs, S rows of a source or slots of a weight, e weights side by side, I inputs, O outputs,
# C columns: the outputs, or half as many after a gated activation (gates first, then ups), V vocabulary or size of a
# value, W fields of SAMPLING_SETTINGS

Activation = Callable[..., Tensor]  # of gates and ups of one shape, or of ups alone; see `num_parts_of`


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
    """Return the parts of outputs to which an activation is applied: gates and ups, or a single part."""
    return 1 if activation is None or isinstance(activation, SquaredReLU) else 2


@dataclass(frozen=True)
class Rotation:
    """The rotary angles of a step's tokens, shared by all layers that rotate alike."""

    cosines: Tensor  # [T, F] float32
    sines: Tensor  # [T, F] float32
    is_interleaved: bool  # a pair is two neighbours (2f, 2f + 1); otherwise it is (f, f + F)


@dataclass(frozen=True)
class Float8Rows:
    """Rows as 8-bit floats (E4M3) with a scale for each 128 numbers of a row: about codes times scales."""

    codes: Tensor  # [..., I] float8_e4m3fn, rows contiguous
    scales: Tensor  # [..., B] float32, any strides
    dtype: torch.dtype  # of the numbers before they were rounded, and of the results of products
    rows: Tensor | None = None  # [..., I]: those numbers, where something else reads them

    def __len__(self) -> int:
        return len(self.codes)


Rows = Tensor | Float8Rows
FLOAT8_BLOCK = 128  # numbers of a row that share a scale


def plain_rows(rows: Rows) -> Tensor:
    """Return rows as numbers, which are the dequantised ones if no others were kept."""
    if isinstance(rows, Tensor):
        return rows
    if rows.rows is not None:
        return rows.rows
    width = rows.codes.shape[-1]
    scales = rows.scales.repeat_interleave(FLOAT8_BLOCK, dim=-1)[..., :width]
    return (rows.codes.float() * scales).to(rows.dtype)


class ApplyRope(Protocol):
    """Rotate the first 2 * F values of each head, in float32.

    Args:
        heads_TNH: may be overwritten; use only the result. May be a view of a projection.
        out_TNH: memory for the result, which may be the heads themselves; None: the implementation chooses.

    Returns:
        [T, N, H] in the dtype of the heads.
    """

    def __call__(self, heads_TNH: Tensor, rotation: Rotation, out_TNH: Tensor | None = None, /) -> Tensor: ...


class ChooseTokens(Protocol):
    """Choose the next token of each row: the most likely one at temperature 0, otherwise a random one.

    Tokens are ordered by probability, ties by id. `min_p`, then `top_k`, then `top_p` each keep a beginning of the row.
    A random number determines the token by its position among their cumulative probabilities. The number is
    counter-based (Philox 4x64-10, Salmon et al. 2011): it depends on the seed and the number of output tokens before.

    Args:
        scores_RV: any floating dtype; minus infinity is never chosen if the row has another number.
        settings_RW: int64, records of `SAMPLING_SETTINGS`.
        positions_R: int64, of the newest token of each row in its request.

    Returns:
        The highest score of each row, in a dtype that holds it exactly, and the tokens [R] int64. NaN is the highest.
        Rows whose highest score is not finite have any token.
    """

    def __call__(self, scores_RV: Tensor, settings_RW: Tensor, positions_R: Tensor, /) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The rule by which logits become experts and weights.

    Logits become scores, the best experts are chosen by score plus correction, and their scores are their weights.
    """

    num_experts: int
    top_k: int
    # softmax over all experts, each expert's own sigmoid, softmax over the chosen experts only, or the square root of
    # each expert's own softplus
    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen", "sqrt_softplus"] = "softmax"
    # Experts are in groups of equal size, and only experts of the best groups can be chosen (arXiv 2405.04434). The
    # rating of a group is the sum of its best one or two experts.
    num_groups: int = 1
    num_chosen_groups: int = 1
    experts_rating_group: Literal[1, 2] = 1
    is_normalized: bool = False  # divide the weights by their sum
    scale: float = 1.0  # multiply the weights by this at the end
    has_bias: bool = False  # add a bias to the logits
    has_correction: bool = False  # a learned number per expert that affects the choice alone (arXiv 2412.19437)
    # The experts of a token are those of its id in a table with as many rows, and scores are weights alone
    # (DeepSeek-V4). None: they are the best.
    table_size: int | None = None
    has_factors: bool = False  # a learned number per expert that multiplies its weight at the end (Gemma 4)


class RouteTokens(Protocol):
    """Choose each token's experts, in float32.

    The kernels break ties between experts and between groups by the lowest index; the reference breaks them as
    torch.topk does, which is unspecified.

    Args:
        hidden_TD: any floating dtype.
        weight_ED: float32, like bias_E and correction_E.
        given_TK: the experts of each token, int64, where logits only determine weights.
        factors_E: float32, of the weights.

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
    """The keys by which pairs are sorted: `num_counted` neighbouring ones of all keys from 0 up. Key -1 is padding."""

    num_counted: int
    first: int = 0
    num_known: int | None = None  # number of all keys; None: the counted keys are the last ones

    @property
    def num_all(self) -> int:
        return self.first + self.num_counted if self.num_known is None else self.num_known


class PairKernels(Protocol):
    """Sort pairs of token and expert, move their rows, and sum outputs. Pair t * K + k is token t's k-th expert."""

    def sort(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """Return the pairs [R] ordered by key, ascending within a key, and the number of pairs of each key. Both int64.

        Args:
            keys_TK: int64 or int32, [T, K] or [P].
            keys: the keys that count. Pairs with other keys are left out.
        """
        ...

    def order(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """Return what `sort` returns, with the pairs padded by -1 to [P], so that no shape depends on the keys."""
        ...

    def count(self, counts: Tensor, totals: Tensor) -> None:
        """Add the counts of `sort` to the totals."""
        ...

    def gather(self, source_SD: Tensor, indices_R: Tensor, divisor: int = 1) -> Tensor:
        """Return [R, D]: row r is row indices_R[r] // divisor of the source. Indices may be pairs, with K as divisor.

        A row whose index is -1 is undefined.
        """
        ...

    def scatter(self, rows_RD: Tensor, indices_R: Tensor, num_rows: int) -> Tensor:
        """Return [num_rows, D]: row indices_R[r] is row r, except for indices of -1; all other rows are zeros."""
        ...

    def join(self, *parts_TX: Tensor) -> Tensor:
        """Return the bytes of all side by side, row by row, as values of the last one's dtype."""
        ...

    def weighted_sum(self, output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """Return each token's outputs times their weights, summed in float32 in the order of k: [T, D] of `dtype`.

        A pair without a row adds nothing, and neither does a row with pair -1. `weights_TK` is float32.
        """
        ...

    def weigh(self, rows_RD: Tensor, weights_R: Tensor, num_counted: Tensor) -> Tensor:
        """Return [R, D]: each row times its weight, computed in float32 and rounded once to the dtype of the rows.

        Args:
            weights_R: float32.
            num_counted: [1] int32 or int64: the number of leading rows that count; later rows are undefined.
        """
        ...


@dataclass(frozen=True)
class Gather:
    """The rows of a product that are still in their source: row r is row indices_R[r] // divisor of it."""

    indices_R: Tensor
    divisor: int


@dataclass(frozen=True)
class InputChunks:
    """The order in which a product adds its inputs, where ranks divide them.

    Each chunk is summed by itself, in float32, and the sums of the chunks are added in a tree, neighbours first. So the
    sum does not depend on the number of ranks. A bias is added to the sum of the first chunk.

    Only kernels with `Kernels.batch_invariant_dtypes` keep to chunks; the others add inputs in any order.
    """

    size: int  # inputs of each chunk but the last, which may have fewer
    keeps_float32: bool  # results are not rounded: logits, or sums of some chunks that the ranks add


@dataclass(frozen=True)
class OpenWeights:
    """Weights [e, O, I] in plain memory, as a checkpoint fills them.

    Weights in MXFP4 are codes [e, O, I / 2] uint8, the first of two inputs in the low half of a byte, and exponents
    [e, O, I / MXFP4_GROUP] uint8 as scales (OCP Microscaling formats specification).
    """

    weight_eOI: Tensor
    bias_eO: Tensor | None = None
    activation: Activation | None = None
    scales_eGB: Tensor | None = None  # of weights in MXFP4, or in 8-bit blocks: see weight_blocks.py
    chunks: InputChunks | None = None  # None: a product adds all inputs in one chunk
    feeds_blocks: bool = False  # the results are rows of a product of 8-bit blocks, and of nothing else
    # [e, O, G] float16, for each INT4_GROUP inputs: weights that are integers times these scales, with less than 16
    # integers in a group, are packed as int4 without loss. None: scales are chosen.
    int4_scales_eOG: Tensor | None = None

    @property
    def is_mxfp4(self) -> bool:
        return self.weight_eOI.dtype == torch.uint8

    @property
    def num_inputs(self) -> int:
        return self.weight_eOI.shape[2] * (2 if self.is_mxfp4 else 1)

    @property
    def num_parts(self) -> int:
        """Parts of a weight's outputs: gates and ups before a gated activation, otherwise one."""
        return num_parts_of(self.activation)


class Product(Protocol):
    """activation(input @ weight.T + bias) for e weights of one shape.

    Inputs and results are tensors, results in the dtype of the input (float32 with partial `InputChunks`) and with
    contiguous rows. Products of 8-bit blocks also take `Float8Rows`, and return them with `OpenWeights.feeds_blocks`.
    """

    def multiply(self, input_TI: Any) -> Any:
        """Return [T, C], with the only weight."""
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
            counts_e: int64, R in all; with spare rows R or less, and results of the spare rows are undefined.
            gather: only where `Kernels.products_gather_rows`.
            expected_rows: about how many rows count, where most are spare; None: all. Affects speed alone.
            out_RC: memory for the results, on CPUs; None: new memory.
        """
        ...

    def multiply_slots(self, slots_eSI: Any, counts_e: Tensor, expected_rows: int | None = None) -> Any:
        """Return [e, S, C]: the first counts_e[i] slots of weight i hold rows; results of the others are undefined.

        Args:
            expected_rows: about how many rows there are in all; None: as many as slots. Affects speed alone.
        """
        ...

    def multiply_each(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        """Return [T, e, C]: each weight with its own input of every token.

        Args:
            out_TeC: memory for the results, which may be a view of something wider; None: new memory.
        """
        ...


PackedFormat = Literal["float32", "bfloat16", "int8", "int4", "mxfp4"]
INT4_GROUP = 32  # inputs of int4 weights that share a scale and a zero point
MXFP4_GROUP = 32  # inputs of weights in MXFP4 that share a scale


@dataclass(frozen=True)
class PackedWeights:
    """Weights in the order in which a product's kernels read them (csrc/cpu/packed_weight.h)."""

    format: PackedFormat
    panels: Tensor  # [e, bytes] uint8
    num_outputs: int
    num_inputs: int
    bias_eO: Tensor | None
    activation: Activation | None
    chunks: InputChunks | None = None

    @classmethod
    def from_panels(cls, weights: OpenWeights, packed_format: PackedFormat, panels: Tensor) -> PackedWeights:
        """Return panels that were packed from weights of this shape, with the bias of these weights."""
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
    """Repacks open weights for kernels that read them in an order of their own."""

    def supports(self, weights: OpenWeights) -> bool: ...

    def num_bytes(self, weights: OpenWeights, packed_format: PackedFormat) -> int:
        """Return the bytes of each packed weight."""
        ...

    def fits_in_place(self, weights: OpenWeights, packed_format: PackedFormat) -> bool:
        """Return True if the packed weights have the size and type of the open ones."""
        ...

    def pack(self, weights: OpenWeights, packed_format: PackedFormat, *, in_place: bool) -> PackedWeights:
        """Return the weights packed, in new memory or in their own, where they then are open no more."""
        ...

    def product(self, packed: PackedWeights) -> Product: ...


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One layer's part of grouped-query attention on one rank."""

    num_heads: int
    num_kv_heads: int
    head_size: int  # of queries and keys
    dtype: torch.dtype
    scale: float  # of the products of queries and keys
    # Query heads of all tp ranks that read one key-value head, on which the order of sums depends; None: N / G.
    whole_group_size: int | None = None
    value_size: int | None = None  # at most head_size; None: as large
    # Positions that a token attends to at most, its own included; None: all up to its own. If negative, positions are
    # divided into chunks of -window, and a token attends to those of its own chunk.
    window: int | None = None
    has_sinks: bool = False


@dataclass(frozen=True)
class KeyValueCache:
    """Keys [num_blocks, G, block_size, H] and values [num_blocks, G, block_size, V] of one layer in blocks.

    They are in the model's dtype, or codes in uint8 with a scale for each token and head; see `float8_rows.py`.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None  # [num_blocks, G, block_size] bfloat16
    value_scales: Tensor | None = None
    has_window: bool = field(default=False, kw_only=True)  # its blocks are those of layers with windows

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that a block holds; the first dimension is the block, the second the head."""
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

        A slot of -1 stores nothing. Queries and keys may be overwritten.
        """
        ...

    def attend(
        self, query_TNH: Tensor, cache: KeyValueCache, step: StepInputs, sinks_N: Tensor | None = None
    ) -> Tensor:
        """Attend from row i of a chunk, at position p = context_len - num_rows + i, to the positions up to p.

        With a window, only to those after p - window. Rows of no chunk, or before position 0, get zeros.

        Args:
            sinks_N: float32, one more score of each query head without a value (gpt-oss, arXiv 2508.10925): each row
                is scaled by sum(exp(scores)) / (sum(exp(scores)) + exp(sink)).

        Returns:
            [T, N, V] in the dtype of the queries.
        """
        ...


class ExpandLatents(Protocol):
    """Return the keys [n, C, K] and values [n, C, V] of some heads, contiguous, from latent vectors [C, L]."""

    def __call__(self, latent_CL: Tensor, heads: slice = ..., /) -> tuple[Tensor, Tensor]: ...


class LatentAttentionBackend(Protocol):
    """Multi-head latent attention (arXiv 2405.04434) of one layer, with the weights of keys and values absorbed.

    All heads read one vector [P] per position. It is the key, and its first L elements are the value. The cache is
    [num_blocks, block_size, P], in the dtype of vectors and queries.
    """

    @property
    def takes_all_rows(self) -> bool:
        """True if long chunks must also run here, so that a row's bytes do not depend on its chunk.

        Otherwise it is faster to expand the keys and values of chunks with many rows, and to attend to those.
        """
        ...

    def write(self, latent_TP: Tensor, cache: Tensor, step: StepInputs) -> None:
        """Store each token's vector at `step.cache_slots`; a slot of -1 stores nothing."""
        ...

    def attend(self, query_TNP: Tensor, cache: Tensor, step: StepInputs, max_rows: int | None = None) -> Tensor:
        """Attend from row i of a chunk, at position context_len - num_rows + i, to the positions up to it.

        Args:
            max_rows: chunks of more rows get zeros. Must be None if `takes_all_rows`.

        Returns:
            [T, N, L] in the dtype of the queries: the values weighted by the softmax of the scaled scores. Rows of no
            chunk, or before position 0, get zeros.
        """
        ...

    def attend_chosen(self, query_TNP: Tensor, cache: Tensor, chosen: ChosenEntries) -> Tensor:
        """Attend from each row to the vectors at its slots.

        Returns:
            [T, N, L] in the dtype of the queries; zeros for rows without entries. If `takes_all_rows`, a row that
            attends to all positions up to its own has the bytes that `attend` would give it.
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
        """Attend from the chunks of more than `max_rows` rows that have a position, with keys and values of each head.

        A head's key is its own part [K], beside the last E elements of the vector, which all heads share. Must not be
        called if `takes_all_rows`.

        Args:
            query_TNK, query_TNE: the parts of the queries for the two parts of the keys.
            out_TNV: contiguous, in the dtype of the queries; only the rows of these chunks that have a position are
                written.
        """
        ...


class Pending(Protocol):
    """A result that may still be being computed."""

    def wait(self) -> Tensor:
        """Return the result, ready for the caller's stream."""
        ...


class SideStream(Protocol):
    """Computes beside the caller's own work where the device can."""

    def start(self, compute: Callable[[Any], Tensor], input: Any) -> Pending:
        """Start compute(input). It may run until `wait` is called on the result."""
        ...


class StepGraph(Protocol):
    """A CPU graph: the native kernels called between `begin_capture` and `end_capture`, replayed by one call."""

    def begin_capture(self) -> None: ...

    def end_capture(self) -> None: ...

    def replay(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The operations for one device, and the facts about them that callers depend on.

    `select_kernels` picks the table once per rank; constructors take from it what they call.
    """

    name: Literal["cpu", "triton", "torch"]  # for messages
    add: Callable[[Tensor, Tensor], Tensor]  # (a_TD, b_TD) -> their sum; both contiguous and of one dtype
    add_scaled: Callable[[Tensor, Tensor, Tensor], Tensor]  # (a_TD, b_TD, factor [1] float32) -> (a + b) * factor
    gate_rows: Callable[[Tensor, Tensor], Tensor]  # (gates_T1 or gates_TD, rows_TD) -> sigmoid(gate) * row
    # (x_TD, weight_D, epsilon) -> [T, D] in the dtype of x; T may be several dimensions. In place: written to x.
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rms_norm_in_place: Callable[[Tensor, Tensor, float], None]
    # (x_TD, weight_D, bias_D, epsilon): LayerNorm, written to x.
    layer_norm_in_place: Callable[[Tensor, Tensor, Tensor, float], None]
    # (x_TD, update_TD, weight_D, epsilon) -> their sum, and the sum normalised. Neither input is changed.
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
    # For products of 8-bit blocks; None: there are none. Rows in 8 bits are returned as they are. The second takes
    # (x_TD, update_TD or None, weight_D, epsilon, whether the rows are kept beside their codes), and returns the sum,
    # or x, and that normalised.
    quantize_rows: Callable[[Rows], Float8Rows] | None = None
    quantize_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float, bool], tuple[Tensor, Float8Rows]] | None = None
    make_step_graph: Callable[[int, int], StepGraph] | None  # (address and bytes of an Arena); None: no CPU graphs
    packing: WeightPacking | None  # None: products read open weights
    allocate_weights: Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
    measure_memory_only: Callable[[], AbstractContextManager[None]]  # inside, results may be zeros

    products_gather_rows: bool = False  # products take a `Gather`, and the host never reads the counts
    compiles_on_first_use: bool = False  # run every range of sizes once before serving
    supports_cuda_graphs: bool = False
    needs_finite_caches: bool = False  # caches must hold finite numbers even where nothing was written
    batch_invariant_dtypes: tuple[torch.dtype, ...] = ()  # in which a row's bytes do not depend on its batch
    instruction_set: str = "none"  # decides the bytes of packed weights
