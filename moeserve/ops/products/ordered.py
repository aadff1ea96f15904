"""Batch-invariant variants of Triton kernels: their order of sums does not depend on batch, chunks or ranks.

The other kernels of the table are batch-invariant too, except the products of torch, which these variants replace.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from moeserve.ops.attention.triton import TritonAttention
from moeserve.ops.kernels import Kernels
from moeserve.ops.latent_attention.triton import TritonLatentAttention
from moeserve.ops.linear_attention.triton import TritonLinearAttention
from moeserve.ops.products.interface import OpenWeights
from moeserve.ops.products.triton import TritonProduct, activated
from moeserve.ops.routing.triton import OrderedRouter
from moeserve.triton_kernels.chunked_matmul import chunked_matmul

# T tokens, R rows, S slots of each weight, e weights side by side, I inputs, C columns, D model width, E experts


class OrderedProduct(TritonProduct):
    """A `TritonProduct` that adds in `InputChunks`, and never uses products of torch."""

    def __init__(self, weights: OpenWeights) -> None:
        assert weights.scales_eGB is None or weights.is_mxfp4, "8-bit floats are refused with batch_invariant"
        super().__init__(weights)

    def multiply(self, input_TI: Tensor) -> Tensor:
        (weight_OI,), bias_eO, chunks = self.weights.weight_eOI, self.weights.bias_eO, self.weights.chunks
        output_TO = chunked_matmul(
            input_TI,
            weight_OI,
            chunk_inputs=None if chunks is None else chunks.size,
            bias_O=None if bias_eO is None else bias_eO[0],
            out_dtype=torch.float32 if chunks is not None and chunks.keeps_float32 else input_TI.dtype,
        )
        return activated(self.weights.activation, output_TO)

    def multiply_each(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        slots_eTI = input_TeI.transpose(0, 1).contiguous()
        counts_e = torch.full(slots_eTI.shape[:1], len(input_TeI), device=input_TeI.device)
        output_TeC = self.multiply_slots(slots_eTI, counts_e).transpose(0, 1)
        return output_TeC.contiguous() if out_TeC is None else out_TeC.copy_(output_TeC)


def batch_invariant_kernels(table: Kernels) -> Kernels:
    """Return the table of the Triton kernels with the variants of this file."""
    assert table.name == "triton"
    return dataclasses.replace(
        table,
        make_product=OrderedProduct,
        make_router=OrderedRouter,
        make_attention=functools.partial(TritonAttention, splits_contexts=False),
        make_latent_attention=functools.partial(TritonLatentAttention, splits_contexts=False),
        make_linear_attention=functools.partial(TritonLinearAttention, uses_tiles=False),
        batch_invariant_dtypes=(torch.float32, torch.bfloat16, torch.float16),
    )
