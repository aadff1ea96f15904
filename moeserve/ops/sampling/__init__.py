"""The choice of the next tokens from logits."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.sampling.cpu import CpuSampling
from moeserve.ops.sampling.interface import SamplingOperations
from moeserve.ops.sampling.reference import choose_tokens, row_maximum


def make(backend: Backend) -> SamplingOperations:
    """Return the operations of a sampler."""
    return choose(TABLE, backend, None)


def _cpu(backend: Backend, shape: None) -> SamplingOperations:
    kernels = CpuSampling(backend.native)
    return SamplingOperations(kernels.row_maximum, kernels.choose_tokens)


def _triton(backend: Backend, shape: None) -> SamplingOperations:
    from moeserve.triton_kernels import sampling

    return SamplingOperations(sampling.row_maximum, sampling.choose_tokens)


TABLE: dict[str, Implementation[None, SamplingOperations]] = {
    "triton": Implementation(_triton),
    "cpu": Implementation(_cpu),
    "reference": Implementation(lambda backend, _: SamplingOperations(row_maximum, choose_tokens)),
}
