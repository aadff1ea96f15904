"""Products of rows with weights. Each kind of product has a table of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Generic, TypeVar

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.products.cpu import CpuGroupedProduct, CpuHeadProduct, CpuProduct
from moeserve.ops.products.interface import GroupedProduct, HeadProduct, OpenWeights, PackedWeights, Product
from moeserve.ops.products.reference import TorchGroupedProduct, TorchHeadProduct, TorchProduct

AnyProduct = TypeVar("AnyProduct")


@dataclass(frozen=True)
class Kind(Generic[AnyProduct]):
    """The implementations of one kind of product."""

    table: dict[str, Implementation[OpenWeights, AnyProduct]]
    of_packed: Callable[[ModuleType, PackedWeights], AnyProduct]  # makes the product of packed weights in C++

    def make(self, backend: Backend, weights: OpenWeights) -> AnyProduct:
        """Return the product of open weights."""
        return choose(self.table, backend, weights)


def _triton(backend: Backend, weights: OpenWeights) -> Product:
    from moeserve.ops.products.triton import OrderedProduct, TritonProduct
    from moeserve.ops.products.triton_blocks import TritonBlockProduct

    if weights.is_in_blocks:
        return TritonBlockProduct(weights)
    return OrderedProduct(weights) if backend.is_batch_invariant else TritonProduct(weights)


def _grouped_triton(backend: Backend, weights: OpenWeights) -> GroupedProduct:
    from moeserve.ops.products.triton import TritonGroupedProduct
    from moeserve.ops.products.triton_blocks import TritonBlockGroupedProduct

    return TritonBlockGroupedProduct(weights) if weights.is_in_blocks else TritonGroupedProduct(weights)


def _heads_triton(backend: Backend, weights: OpenWeights) -> HeadProduct:
    from moeserve.ops.products.triton import OrderedHeadProduct

    return OrderedHeadProduct(weights) if backend.is_batch_invariant else TorchHeadProduct(weights)


def _deep_gemm(backend: Backend, weights: OpenWeights) -> Product:
    from moeserve.ops.products.deep_gemm import DeepGemm

    return backend.library(DeepGemm).product(weights, lambda: _triton(backend, weights))


def _grouped_deep_gemm(backend: Backend, weights: OpenWeights) -> GroupedProduct:
    from moeserve.ops.products.deep_gemm import DeepGemm

    return backend.library(DeepGemm).grouped_product(weights, lambda: _grouped_triton(backend, weights))


def _why_not_deep_gemm(weights: OpenWeights) -> str | None:
    from moeserve.ops.products.deep_gemm import why_unavailable

    return why_unavailable(weights)


SINGLE: Kind[Product] = Kind(
    {
        "deep_gemm": Implementation(_deep_gemm, _why_not_deep_gemm),
        "triton": Implementation(_triton),
        "reference": Implementation(lambda backend, weights: TorchProduct(weights)),
    },
    CpuProduct,
)
GROUPED: Kind[GroupedProduct] = Kind(
    {
        "deep_gemm": Implementation(_grouped_deep_gemm, _why_not_deep_gemm),
        "triton": Implementation(_grouped_triton),
        "reference": Implementation(lambda backend, weights: TorchGroupedProduct(weights)),
    },
    CpuGroupedProduct,
)
PER_HEAD: Kind[HeadProduct] = Kind(
    {
        "triton": Implementation(_heads_triton),
        "reference": Implementation(lambda backend, weights: TorchHeadProduct(weights)),
    },
    CpuHeadProduct,
)
