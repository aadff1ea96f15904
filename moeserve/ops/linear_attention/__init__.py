"""Linear attention with a state for each request."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.linear_attention.cpu import CpuLinearAttention
from moeserve.ops.linear_attention.interface import LinearAttention, LinearAttentionShape
from moeserve.ops.linear_attention.reference import TorchLinearAttention


def make(backend: Backend, shape: LinearAttentionShape) -> LinearAttention:
    """Return the attention of a layer."""
    return choose(TABLE, backend, shape)


def _triton(backend: Backend, shape: LinearAttentionShape) -> LinearAttention:
    from moeserve.ops.linear_attention.triton import TritonLinearAttention

    return TritonLinearAttention(shape, uses_tiles=not backend.is_batch_invariant)


TABLE: dict[str, Implementation[LinearAttentionShape, LinearAttention]] = {
    "triton": Implementation(_triton),
    "cpu": Implementation(lambda backend, shape: CpuLinearAttention(backend.native, shape)),
    "reference": Implementation(lambda backend, shape: TorchLinearAttention(shape)),
}
