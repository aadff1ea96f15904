"""The `Kernels` table of the Triton kernels. Importing this module requires triton."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.arguments import router_arguments
from moeserve.ops.attention.triton import TritonAttention, TritonLatentAttention
from moeserve.ops.compressed_attention.triton import TritonCompressedAttention
from moeserve.ops.convolution.triton import TritonShortConvolution
from moeserve.ops.indexer.triton import TritonIndexer
from moeserve.ops.interfaces import Float8Rows, Rotation, RouterConfig
from moeserve.ops.linear_attention.triton import TritonLinearAttention
from moeserve.ops.pairs.triton import TritonPairs
from moeserve.ops.products.triton import make_product, quantize_rows
from moeserve.ops.routing.reference import TorchRouter
from moeserve.ops.streams.triton import TritonStreams
from moeserve.ops.torch.table import TORCH_KERNELS
from moeserve.triton_kernels import rms_norm as norms
from moeserve.triton_kernels.rotary import rotary
from moeserve.triton_kernels.routing import MAX_WEIGHED_TOKENS, can_weigh, route
from moeserve.triton_kernels.sampling import choose_tokens, row_maximum

# T tokens, D model width, E experts, N heads, H head size


def apply_rope(heads_TNH: Tensor, rotation: Rotation, out_TNH: Tensor | None = None) -> Tensor:
    return rotary(heads_TNH, rotation.cosines, rotation.sines, rotation.is_interleaved, out_TNH)


def quantize_rms_norm(
    x_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor, epsilon: float, keeps_rows: bool
) -> tuple[Tensor, Float8Rows]:
    normed = norms.quantize_rms_norm(x_TD, update_TD, weight_D, epsilon, keeps_rows)
    return normed.sum_TD, Float8Rows(normed.codes_TD, normed.scales_TB, x_TD.dtype, normed.rows_TD)


class TritonRouter:
    """A `RouteTokens` in Triton. One kernel computes everything for few tokens, or everything except logits for many.

    Its programs count arrivals in memory of this object, so calls must not overlap.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._rules: dict[str, Any] = {"top_k": config.top_k, **router_arguments(config)}
        self._arrivals_T: Tensor | None = None
        self._reference = TorchRouter(config)

    def __call__(
        self,
        hidden_TD: Tensor,
        weight_ED: Tensor,
        bias_E: Tensor | None,
        correction_E: Tensor | None,
        given_TK: Tensor | None = None,
        factors_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert factors_E is None, "models with factors of experts run on CPUs"
        if given_TK is not None:  # only in a few layers of a model
            return self._reference(hidden_TD, weight_ED, bias_E, correction_E, given_TK)
        if not can_weigh(hidden_TD, weight_ED):
            return route(functional.linear(hidden_TD.float(), weight_ED, bias_E), correction_E, **self._rules)
        if self._arrivals_T is None:
            self._arrivals_T = hidden_TD.new_zeros(MAX_WEIGHED_TOKENS, dtype=torch.int32)
        given: dict[str, Any] = {"weight_ED": weight_ED, "bias_E": bias_E, "arrivals_T": self._arrivals_T}
        return route(hidden_TD, correction_E, **given, **self._rules)


TRITON_KERNELS = dataclasses.replace(
    TORCH_KERNELS,
    name="triton",
    rms_norm=norms.rms_norm,
    rms_norm_in_place=norms.rms_norm_in_place,
    add_rms_norm=norms.add_rms_norm,
    apply_rope=apply_rope,
    row_maximum=row_maximum,
    choose_tokens=choose_tokens,
    pairs=TritonPairs(),
    make_router=TritonRouter,
    make_attention=TritonAttention,
    make_latent_attention=TritonLatentAttention,
    make_indexer=TritonIndexer,
    make_compressed_attention=TritonCompressedAttention,
    make_streams=TritonStreams,
    make_short_convolution=TritonShortConvolution,
    make_linear_attention=TritonLinearAttention,
    make_product=make_product,
    quantize_rows=quantize_rows,
    quantize_rms_norm=quantize_rms_norm,
    products_gather_rows=True,
    needs_finite_caches=True,
)
