"""The lightning indexer in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.indexer.interface import ChosenEntries, IndexerRule, num_places
from moeserve.step_inputs import StepInputs

# N heads of the indexer, E entries of a context, R rows of one chunk, K chosen entries

MAX_PRODUCTS = 2**24  # maximum number of products of queries and keys in memory at a time


class TorchIndexer:
    """A `ChooseEntries` in plain torch."""

    def __init__(self, rule: IndexerRule) -> None:
        self.rule = rule

    def __call__(self, query_TNH: Tensor, weights_TN: Tensor, key_cache: Tensor, step: StepInputs) -> ChosenEntries:
        rule, device = self.rule, query_TNH.device
        num_tokens, num_heads = query_TNH.shape[:2]
        chosen = ChosenEntries.new(query_TNH, num_places(rule, key_cache, step))
        torch.arange(num_tokens + 1, out=chosen.starts)
        chosen.slots_TC.zero_()
        chosen.counts_T.zero_()
        for span, blocks in zip(step.spans, step.block_table, strict=True):
            num_rows = min(span.num_rows, span.context_len)
            num_entries = span.context_len // rule.tokens_per_entry
            if num_rows == 0 or (num_entries == 0 and not rule.is_expanded):
                continue
            entries_E = torch.arange(num_entries, device=device)
            block_size = key_cache.shape[1]
            slots_E = blocks[entries_E // block_size].long() * block_size + entries_E % block_size
            keys_EH = key_cache.flatten(0, 1)[slots_E]
            rows_at_once = max(1, MAX_PRODUCTS // max(1, num_entries * num_heads))
            for first in range(span.last_row + 1 - num_rows, span.last_row + 1, rows_at_once):
                rows = slice(first, min(first + rows_at_once, span.last_row + 1))
                before = span.context_len - (span.last_row + 1 - first)  # positions before the first row
                positions_R = torch.arange(rows.stop - first, device=device) + before
                seen_R = (positions_R + 1) // rule.tokens_per_entry
                scores_RE = score_entries(query_TNH[rows], weights_TN[rows], keys_EH)
                scores_RE.masked_fill_(entries_E >= seen_R[:, None], float("-inf"))
                best_RK = scores_RE.sort(dim=1, descending=True, stable=True).indices[:, : rule.top_k]
                # Entries that a row does not see sort last, also when the chosen entries are ordered by position.
                best_RK = torch.where(best_RK < seen_R[:, None], best_RK, num_entries).sort(dim=1).values
                if rule.is_expanded:
                    size = block_size * rule.tokens_per_entry
                    for row in range(first, rows.stop):
                        best_K = best_RK[row - first]
                        tokens = _tokens_of(best_K[best_K < num_entries], before + row - first, rule.tokens_per_entry)
                        chosen.slots_TC[row, : len(tokens)] = (blocks[tokens // size] * size + tokens % size).int()
                        chosen.counts_T[row] = len(tokens)
                    continue
                slots_RK = slots_E[best_RK.clamp(max=num_entries - 1)]
                chosen.slots_TC[rows, : slots_RK.shape[1]] = slots_RK.int()
                chosen.counts_T[rows] = seen_R.clamp(max=rule.top_k).int()
        return chosen


def score_entries(query_RNH: Tensor, weights_RN: Tensor, keys_EH: Tensor) -> Tensor:
    """Return the score [R, E] float32 of each entry for each row."""
    products_RNE = functional.relu(query_RNH.float() @ keys_EH.float().T)
    return (weights_RN.float()[:, None] @ products_RNE)[:, 0] + 0.0  # no negative zeros


def _tokens_of(entries_K: Tensor, position: int, tokens_per_entry: int) -> Tensor:
    """Return the positions of the tokens of some entries, and of the tokens up to `position` that are in no entry."""
    of_entries = entries_K[:, None] * tokens_per_entry + torch.arange(tokens_per_entry, device=entries_K.device)
    first = (position + 1) // tokens_per_entry * tokens_per_entry
    return torch.cat([of_entries.flatten(), torch.arange(first, position + 1, device=entries_K.device)])
