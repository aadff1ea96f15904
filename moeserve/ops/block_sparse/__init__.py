"""Block-sparse attention over a paged cache of keys and values, with an indexer (MiniMax-M3)."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.block_sparse.cpu import CpuBlockSparse
from moeserve.ops.block_sparse.interface import BlockSparseAttention, BlockSparseShape
from moeserve.ops.block_sparse.reference import TorchBlockSparse


def make(backend: Backend, shape: BlockSparseShape) -> BlockSparseAttention:
    """Return the block-sparse attention of a layer."""
    return choose(TABLE, backend, shape)


TABLE: dict[str, Implementation[BlockSparseShape, BlockSparseAttention]] = {
    "cpu": Implementation(lambda backend, shape: CpuBlockSparse(backend.native, shape)),
    "reference": Implementation(lambda backend, shape: TorchBlockSparse(shape)),
}
