"""Hyper-connections: the operations before and after a network on several residual streams."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.streams.cpu import CpuStreams
from moeserve.ops.streams.interface import StreamKernels, StreamsSpec
from moeserve.ops.streams.reference import TorchStreams

ConfigAndEpsilon = tuple[StreamsSpec, float]


def make(backend: Backend, config: StreamsSpec, norm_epsilon: float) -> StreamKernels:
    """Return the operations around the networks of a model."""
    return choose(TABLE, backend, (config, norm_epsilon))


def _triton(backend: Backend, shape: ConfigAndEpsilon) -> StreamKernels:
    from moeserve.ops.streams.triton import TritonStreams

    return TritonStreams(*shape)


TABLE: dict[str, Implementation[ConfigAndEpsilon, StreamKernels]] = {
    "triton": Implementation(_triton),
    "cpu": Implementation(lambda backend, shape: CpuStreams(backend.native, *shape)),
    "reference": Implementation(lambda backend, shape: TorchStreams(*shape)),
}
