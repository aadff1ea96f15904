"""The `Kernels` table of the reference in plain torch."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from moeserve.ops.attention.reference import TorchAttention
from moeserve.ops.compressed_attention.reference import TorchCompressedAttention
from moeserve.ops.convolution.reference import TorchShortConvolution
from moeserve.ops.indexer.reference import TorchIndexer
from moeserve.ops.kernels import Kernels
from moeserve.ops.latent_attention.reference import TorchLatentAttention
from moeserve.ops.linear_attention.reference import TorchLinearAttention
from moeserve.ops.pairs.reference import TorchPairs
from moeserve.ops.products.reference import TorchProduct
from moeserve.ops.routing.reference import TorchRouter, choose_expert_copies
from moeserve.ops.rows import reference as elementwise
from moeserve.ops.sampling.reference import choose_tokens, row_maximum
from moeserve.ops.side_stream import InlineStream
from moeserve.ops.streams.reference import TorchStreams


def allocate_weights(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


TORCH_KERNELS = Kernels(
    name="torch",
    add=torch.add,
    add_scaled=elementwise.add_scaled,
    gate_rows=elementwise.gate_rows,
    rms_norm=elementwise.rms_norm,
    rms_norm_in_place=elementwise.rms_norm_in_place,
    layer_norm=elementwise.layer_norm,
    layer_norm_in_place=elementwise.layer_norm_in_place,
    add_rms_norm=elementwise.add_rms_norm,
    apply_rope=elementwise.apply_rope,
    row_maximum=row_maximum,
    choose_tokens=choose_tokens,
    choose_expert_copies=choose_expert_copies,
    pairs=TorchPairs(),
    side_stream=InlineStream(),
    make_router=TorchRouter,
    make_attention=TorchAttention,
    make_latent_attention=TorchLatentAttention,
    make_indexer=TorchIndexer,
    make_short_convolution=TorchShortConvolution,
    make_linear_attention=TorchLinearAttention,
    make_compressed_attention=TorchCompressedAttention,
    make_streams=TorchStreams,
    make_product=TorchProduct,
    make_step_graph=None,
    packing=None,
    allocate_weights=allocate_weights,
    measure_memory_only=contextlib.nullcontext,
)
