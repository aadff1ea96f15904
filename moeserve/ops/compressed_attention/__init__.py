"""Attention to a window of tokens and to compressed entries (DeepSeek-V4)."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.compressed_attention.cpu import CpuCompressedAttention
from moeserve.ops.compressed_attention.interface import CompressedAttention, CompressedShape
from moeserve.ops.compressed_attention.reference import TorchCompressedAttention


def make(backend: Backend, shape: CompressedShape) -> CompressedAttention:
    """Return the attention of a layer."""
    return choose(TABLE, backend, shape)


def _triton(backend: Backend, shape: CompressedShape) -> CompressedAttention:
    from moeserve.ops.compressed_attention.triton import TritonCompressedAttention

    return TritonCompressedAttention(shape)


TABLE: dict[str, Implementation[CompressedShape, CompressedAttention]] = {
    "triton": Implementation(_triton),
    "cpu": Implementation(lambda backend, shape: CpuCompressedAttention(backend.native, shape)),
    "reference": Implementation(lambda backend, shape: TorchCompressedAttention(shape)),
}
