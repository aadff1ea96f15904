"""The `Kernels` table of the C++ kernels."""

from __future__ import annotations

import functools
from types import ModuleType

from moeserve.ops.attention.cpu import CpuAttention
from moeserve.ops.compressed_attention.cpu import CpuCompressedAttention, CpuStreams
from moeserve.ops.convolution.cpu import CpuShortConvolution
from moeserve.ops.indexer.cpu import CpuIndexer
from moeserve.ops.kernels import Kernels
from moeserve.ops.latent_attention.cpu import CpuLatentAttention
from moeserve.ops.linear_attention.cpu import CpuLinearAttention
from moeserve.ops.measured_step import measure_memory_only
from moeserve.ops.native import NATIVE_DTYPES
from moeserve.ops.pairs.cpu import CpuPairs
from moeserve.ops.products.cpu import CpuPacking
from moeserve.ops.products.reference import TorchProduct
from moeserve.ops.routing.cpu import CpuRouter
from moeserve.ops.rows.cpu import RowKernels
from moeserve.ops.side_stream import InlineStream


def cpu_kernels(native: ModuleType) -> Kernels:
    rows, packing = RowKernels(native), CpuPacking(native)
    return Kernels(
        name="cpu",
        add=rows.add,
        add_scaled=rows.add_scaled,
        gate_rows=rows.gate_rows,
        rms_norm=rows.rms_norm,
        rms_norm_in_place=rows.rms_norm_in_place,
        layer_norm=rows.layer_norm,
        layer_norm_in_place=rows.layer_norm_in_place,
        add_rms_norm=rows.add_rms_norm,
        apply_rope=rows.apply_rope,
        row_maximum=rows.row_maximum,
        choose_tokens=rows.choose_tokens,
        choose_expert_copies=rows.choose_expert_copies,
        pairs=CpuPairs(native),
        side_stream=InlineStream(),
        make_router=functools.partial(CpuRouter, native),
        make_attention=functools.partial(CpuAttention, native),
        make_latent_attention=functools.partial(CpuLatentAttention, native),
        make_indexer=functools.partial(CpuIndexer, native),
        make_short_convolution=functools.partial(CpuShortConvolution, native),
        make_linear_attention=functools.partial(CpuLinearAttention, native),
        make_compressed_attention=functools.partial(CpuCompressedAttention, native),
        make_streams=functools.partial(CpuStreams, native),
        make_product=TorchProduct,
        make_step_graph=native.CpuGraph,
        packing=packing,
        allocate_weights=packing.allocate_weights,
        measure_memory_only=measure_memory_only,
        batch_invariant_dtypes=NATIVE_DTYPES,
        instruction_set=native.isa(),
    )
