"""The lightning indexer (DeepSeek-V3.2), which chooses the entries that a token attends to."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.indexer.cpu import CpuIndexer
from moeserve.ops.indexer.interface import ChooseEntries, IndexerRule
from moeserve.ops.indexer.reference import TorchIndexer


def make(backend: Backend, rule: IndexerRule) -> ChooseEntries:
    """Return the indexer of a layer."""
    return choose(TABLE, backend, rule)


def _triton(backend: Backend, rule: IndexerRule) -> ChooseEntries:
    from moeserve.ops.indexer.triton import TritonIndexer

    return TritonIndexer(rule)


TABLE: dict[str, Implementation[IndexerRule, ChooseEntries]] = {
    "triton": Implementation(_triton),
    "cpu": Implementation(lambda backend, rule: CpuIndexer(backend.native, rule)),
    "reference": Implementation(lambda backend, rule: TorchIndexer(rule)),
}
