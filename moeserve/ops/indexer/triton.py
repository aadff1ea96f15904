"""The lightning indexer with Triton kernels."""

from __future__ import annotations

from torch import Tensor

from moeserve.ops.indexer.interface import ChosenEntries, IndexerRule, num_places
from moeserve.step_inputs import StepInputs
from moeserve.triton_kernels.indexer import choose_entries

# N heads of the indexer


class TritonIndexer:
    """A `ChooseEntries` in Triton. The entries chosen for a row depend only on its own context."""

    def __init__(self, rule: IndexerRule) -> None:
        self._rule = rule

    def __call__(self, query_TNH: Tensor, weights_TN: Tensor, key_cache: Tensor, step: StepInputs) -> ChosenEntries:
        chosen = ChosenEntries.new(query_TNH, num_places(self._rule, key_cache, step))
        choose_entries(
            query_TNH,
            weights_TN,
            key_cache,
            step.block_table,
            step.row_starts,
            step.context_lens,
            chosen.slots_TC,
            chosen.counts_T,
            chosen.starts,
            top_k=self._rule.top_k,
            tokens_per_entry=self._rule.tokens_per_entry,
        )
        return chosen
