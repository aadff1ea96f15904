"""The table of all operations for one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from moeserve.ops.attention.interface import AttentionBackend, AttentionShape
from moeserve.ops.compressed_attention.interface import CompressedAttention, CompressedShape
from moeserve.ops.convolution.interface import ConvolutionShape, ShortConvolution
from moeserve.ops.indexer.interface import ChooseEntries, IndexerRule
from moeserve.ops.latent_attention.interface import LatentAttentionBackend
from moeserve.ops.linear_attention.interface import LinearAttention, LinearAttentionShape
from moeserve.ops.pairs.interface import PairKernels
from moeserve.ops.products.interface import OpenWeights, Product, WeightPacking
from moeserve.ops.routing.interface import RouterConfig, RouteTokens
from moeserve.ops.rows.interface import ApplyRope, Float8Rows, Rows
from moeserve.ops.sampling.interface import ChooseTokens
from moeserve.ops.side_stream import SideStream
from moeserve.ops.streams.interface import StreamKernels, StreamsConfig

# T tokens, D model width, E experts, K experts per token, R rows, V vocabulary, W copies of an expert at most


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
