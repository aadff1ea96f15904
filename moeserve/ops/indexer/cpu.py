"""The lightning indexer with C++ kernels.

The entries chosen for a row depend only on its request, not on the chunk, the batch or the number of threads.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from moeserve.ops.indexer.interface import ChosenEntries, IndexerRule, num_places
from moeserve.ops.native import is_measured
from moeserve.step_inputs import StepInputs

# N heads of the indexer


class CpuIndexer:
    """A `ChooseEntries` in C++."""

    def __init__(self, native: ModuleType, rule: IndexerRule) -> None:
        self._native = native
        self._rule = rule

    def __call__(self, query_TNH: Tensor, weights_TN: Tensor, key_cache: Tensor, step: StepInputs) -> ChosenEntries:
        rule = self._rule
        chosen = ChosenEntries.new(query_TNH, num_places(rule, key_cache, step))
        if is_measured():
            chosen.slots_TC.zero_()  # so that its memory is measured
            return chosen
        context = step.block_table, step.row_starts, step.context_lens
        results = chosen.slots_TC, chosen.counts_T, chosen.starts
        self._native.choose_entries(
            query_TNH,
            weights_TN,
            key_cache,
            *context,
            *results,
            top_k=rule.top_k,
            tokens_per_entry=rule.tokens_per_entry,
            is_expanded=rule.is_expanded,
        )
        return chosen
