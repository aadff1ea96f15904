"""Operations on single rows: norms, rotary embedding, sums and gates."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.rows.cpu import CpuRows
from moeserve.ops.rows.interface import RowOperations
from moeserve.ops.rows.reference import OPERATIONS


def make(backend: Backend) -> RowOperations:
    """Return the operations on rows."""
    return choose(TABLE, backend, None)


def _triton(backend: Backend, shape: None) -> RowOperations:
    from moeserve.ops.rows.triton import OPERATIONS

    return OPERATIONS


TABLE: dict[str, Implementation[None, RowOperations]] = {
    "triton": Implementation(_triton),
    "cpu": Implementation(lambda backend, _: CpuRows(backend.native).operations()),
    "reference": Implementation(lambda backend, _: OPERATIONS),
}
