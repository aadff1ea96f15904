"""Weighted sums of rows, GELU, mixing and limiting of heads, and attention to sums."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.mixing.cpu import CpuMixing
from moeserve.ops.mixing.interface import Mixing
from moeserve.ops.mixing.reference import TorchMixing


def make(backend: Backend) -> Mixing:
    """Return the mixing operations of a backend."""
    return choose(TABLE, backend, None)


TABLE: dict[str, Implementation[None, Mixing]] = {
    "cpu": Implementation(lambda backend, _: CpuMixing(backend.native)),
    "reference": Implementation(lambda backend, _: TorchMixing()),
}
