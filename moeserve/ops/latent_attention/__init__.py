"""Multi-head latent attention over a paged cache of latent vectors."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.latent_attention.cpu import CpuLatentAttention
from moeserve.ops.latent_attention.interface import LatentAttentionBackend, LatentShape
from moeserve.ops.latent_attention.reference import TorchLatentAttention


def make(backend: Backend, shape: LatentShape) -> LatentAttentionBackend:
    """Return the attention of a layer."""
    return choose(TABLE, backend, shape)


def _triton(backend: Backend, shape: LatentShape) -> LatentAttentionBackend:
    from moeserve.ops.latent_attention.triton import TritonLatentAttention

    assert shape.window is None, "these kernels have no windows"
    return TritonLatentAttention(*shape[:3], splits_contexts=not backend.is_batch_invariant)


def _flashinfer(backend: Backend, shape: LatentShape) -> LatentAttentionBackend:
    from moeserve.ops.latent_attention.flashinfer import FlashInferLatent

    return backend.library(FlashInferLatent).attention(TABLE["triton"].make(backend, shape), shape)


TABLE: dict[str, Implementation[LatentShape, LatentAttentionBackend]] = {
    "flashinfer latent": Implementation(_flashinfer),
    "triton": Implementation(_triton),
    "cpu": Implementation(lambda backend, shape: CpuLatentAttention(backend.native, shape)),
    "reference": Implementation(lambda backend, shape: TorchLatentAttention(*shape)),
}
