"""Products of rows with weights."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.products.cpu import CpuPacking
from moeserve.ops.products.interface import OpenWeights, Product, WeightPacking
from moeserve.ops.products.reference import TorchProduct


def make(backend: Backend, weights: OpenWeights) -> Product:
    """Return the product of open weights."""
    return choose(TABLE, backend, weights)


def make_packing(backend: Backend) -> WeightPacking | None:
    """Return the packing of weights for kernels that read them in another order; None: products read open weights."""
    return choose(PACKING, backend, None)


def _triton(backend: Backend, weights: OpenWeights) -> Product:
    from moeserve.ops.products.triton import OrderedProduct, TritonBlockProduct, TritonProduct

    if backend.is_batch_invariant:
        return OrderedProduct(weights)
    has_blocks = weights.scales_eGB is not None and not weights.is_mxfp4
    return TritonBlockProduct(weights) if has_blocks else TritonProduct(weights)


def _deep_gemm(backend: Backend, weights: OpenWeights) -> Product:
    from moeserve.ops.products.deep_gemm import DeepGemm

    return backend.library(DeepGemm).product(weights, lambda: _triton(backend, weights))


def _why_not_deep_gemm(weights: OpenWeights) -> str | None:
    from moeserve.ops.products.deep_gemm import why_unavailable

    return why_unavailable(weights)


TABLE: dict[str, Implementation[OpenWeights, Product]] = {
    "deep_gemm": Implementation(_deep_gemm, _why_not_deep_gemm),
    "triton": Implementation(_triton),
    "reference": Implementation(lambda backend, weights: TorchProduct(weights)),
}
PACKING: dict[str, Implementation[None, WeightPacking | None]] = {
    "cpu": Implementation(lambda backend, _: CpuPacking(backend.native)),
    "reference": Implementation(lambda backend, _: None),
}
