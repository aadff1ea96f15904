"""Grouped-query attention over a paged cache of keys and values."""

from __future__ import annotations

from moeserve.ops.attention.cpu import CpuAttention
from moeserve.ops.attention.interface import AttentionBackend, AttentionShape
from moeserve.ops.attention.reference import TorchAttention
from moeserve.ops.backend import Backend, Implementation, choose


def make(backend: Backend, shape: AttentionShape) -> AttentionBackend:
    """Return the attention of a layer."""
    return choose(TABLE, backend, shape)


def _triton(backend: Backend, shape: AttentionShape) -> AttentionBackend:
    from moeserve.ops.attention.triton import TritonAttention

    return TritonAttention(shape, splits_contexts=not backend.is_batch_invariant)


def _flashinfer(backend: Backend, shape: AttentionShape) -> AttentionBackend:
    from moeserve.ops.attention.flashinfer import FlashInfer

    return backend.library(FlashInfer).attention(TABLE["triton"].make(backend, shape), shape)


TABLE: dict[str, Implementation[AttentionShape, AttentionBackend]] = {
    "flashinfer": Implementation(_flashinfer),
    "triton": Implementation(_triton),
    "cpu": Implementation(lambda backend, shape: CpuAttention(backend.native, shape)),
    "reference": Implementation(lambda backend, shape: TorchAttention(shape)),
}
