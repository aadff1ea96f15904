"""The selective scan of Mamba-1, with a state for each request."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.selective_scan.cpu import CpuSelectiveScan
from moeserve.ops.selective_scan.reference import SelectiveScan, torch_selective_scan


def make(backend: Backend) -> SelectiveScan:
    """Return the scan of a layer."""
    return choose(TABLE, backend, None)


TABLE: dict[str, Implementation[None, SelectiveScan]] = {
    "cpu": Implementation(lambda backend, _: CpuSelectiveScan(backend.native)),
    "reference": Implementation(lambda backend, _: torch_selective_scan),
}
