"""The `Kernels` table of the Triton kernels. Importing this module requires triton."""

from __future__ import annotations

import dataclasses

from moeserve.ops.attention.triton import TritonAttention
from moeserve.ops.compressed_attention.triton import TritonCompressedAttention
from moeserve.ops.convolution.triton import TritonShortConvolution
from moeserve.ops.indexer.triton import TritonIndexer
from moeserve.ops.latent_attention.triton import TritonLatentAttention
from moeserve.ops.linear_attention.triton import TritonLinearAttention
from moeserve.ops.pairs.triton import TritonPairs
from moeserve.ops.products.triton import make_product, quantize_rows
from moeserve.ops.routing.triton import TritonRouter
from moeserve.ops.rows.triton import apply_rope, quantize_rms_norm
from moeserve.ops.streams.triton import TritonStreams
from moeserve.ops.torch.table import TORCH_KERNELS
from moeserve.triton_kernels import rms_norm as norms
from moeserve.triton_kernels.sampling import choose_tokens, row_maximum

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
