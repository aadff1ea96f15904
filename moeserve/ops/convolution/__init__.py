"""Causal depthwise convolutions over the last few tokens."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.convolution.cpu import CpuShortConvolution
from moeserve.ops.convolution.interface import ConvolutionShape, ShortConvolution
from moeserve.ops.convolution.reference import TorchShortConvolution


def make(backend: Backend, shape: ConvolutionShape) -> ShortConvolution:
    """Return the convolution of a layer."""
    return choose(TABLE, backend, shape)


def _triton(backend: Backend, shape: ConvolutionShape) -> ShortConvolution:
    from moeserve.ops.convolution.triton import TritonShortConvolution

    return TritonShortConvolution(shape)


TABLE: dict[str, Implementation[ConvolutionShape, ShortConvolution]] = {
    "triton": Implementation(_triton, lambda shape: "linear convolutions run in torch" if shape.is_linear else None),
    "cpu": Implementation(lambda backend, shape: CpuShortConvolution(backend.native, shape)),
    "reference": Implementation(lambda backend, shape: TorchShortConvolution(shape)),
}
