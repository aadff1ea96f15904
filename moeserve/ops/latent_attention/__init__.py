"""Multi-head latent attention over a paged cache of latent vectors."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.latent_attention.cpu import CpuLatentAttention
from moeserve.ops.latent_attention.interface import LatentAttentionBackend, LatentShape
from moeserve.ops.latent_attention.library import LatentChoice
from moeserve.ops.latent_attention.reference import TorchLatentAttention


def make(backend: Backend, shape: LatentShape) -> LatentAttentionBackend:
    """Return the attention of a layer."""
    return choose(TABLE, backend, shape)


def _triton(backend: Backend, shape: LatentShape) -> LatentAttentionBackend:
    from moeserve.ops.latent_attention.triton import TritonLatentAttention

    return TritonLatentAttention(*shape, splits_contexts=not backend.is_batch_invariant)


def _library(backend: Backend, shape: LatentShape) -> LatentAttentionBackend:
    return backend.library(LatentChoice).attention(TABLE["triton"].make(backend, shape), shape)


TABLE: dict[str, Implementation[LatentShape, LatentAttentionBackend]] = {
    LatentChoice.name: Implementation(_library),
    "triton": Implementation(_triton),
    "cpu": Implementation(lambda backend, shape: CpuLatentAttention(backend.native, shape)),
    "reference": Implementation(lambda backend, shape: TorchLatentAttention(*shape)),
}
