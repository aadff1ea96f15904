"""The `Kernels` table of the reference in plain torch."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from moeserve.ops.interfaces import Kernels
from moeserve.ops.side_stream import InlineStream
from moeserve.ops.torch import elementwise
from moeserve.ops.torch.attention import TorchAttention, TorchLatentAttention
from moeserve.ops.torch.compressed_attention import TorchCompressedAttention
from moeserve.ops.torch.hyper_connections import TorchStreams
from moeserve.ops.torch.indexer import TorchIndexer
from moeserve.ops.torch.linear_attention import TorchLinearAttention
from moeserve.ops.torch.pairs import TorchPairs
from moeserve.ops.torch.products import TorchProduct
from moeserve.ops.torch.routing import TorchRouter
from moeserve.ops.torch.sampling import choose_tokens
from moeserve.ops.torch.short_convolution import TorchShortConvolution


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
    row_maximum=elementwise.row_maximum,
    choose_tokens=choose_tokens,
    choose_expert_copies=elementwise.choose_expert_copies,
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
