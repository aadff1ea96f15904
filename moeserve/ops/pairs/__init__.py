"""Pairs of a token and one of its experts: sorting, moving rows, and summing outputs."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.pairs.cpu import CpuPairs
from moeserve.ops.pairs.interface import PairKernels
from moeserve.ops.pairs.reference import TorchPairs


def make(backend: Backend) -> PairKernels:
    """Return the operations on pairs."""
    return choose(TABLE, backend, None)


def _triton(backend: Backend, shape: None) -> PairKernels:
    from moeserve.ops.pairs.triton import TritonPairs

    return TritonPairs()


TABLE: dict[str, Implementation[None, PairKernels]] = {
    "triton": Implementation(_triton),
    "cpu": Implementation(lambda backend, _: CpuPairs(backend.native)),
    "reference": Implementation(lambda backend, _: TorchPairs()),
}
