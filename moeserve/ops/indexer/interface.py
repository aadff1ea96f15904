"""The lightning indexer (DeepSeek-V3.2) as an operation: it chooses the entries of a context that a token attends to.

A cache holds a small key for each entry of a context. An entry is one token, or represents several (DeepSeek-V4). A
token has a query q_h and a weight w_h for each head h of the indexer. The score of an entry with key k is

    sum over h of w_h * max(0, q_h . k)

and the token attends to the `top_k` entries with the highest scores among the entries that it sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.step_inputs import StepInputs

# N heads of the indexer, C places for the entries of a token


@dataclass(frozen=True, kw_only=True)
class IndexerRule:
    """The number of entries that a token attends to, and the tokens that an entry represents."""

    top_k: int
    tokens_per_entry: int = 1  # a token at position p sees the first (p + 1) // tokens_per_entry entries
    # A token attends to the tokens of the chosen entries, and to the last tokens, itself included, that are in no entry
    # yet (GLM-5.3).
    is_expanded: bool = False


@dataclass(frozen=True)
class ChosenEntries:
    """The entries that each token attends to.

    The entries form a block table with blocks of one entry, in which each token is a chunk by itself.
    """

    # int32: block * block_size + offset of each entry, or of each token if entries are expanded, ordered by position.
    # Slots after the last are arbitrary.
    slots_TC: Tensor
    counts_T: Tensor  # int32: number of entries of each token
    starts: Tensor  # [T + 1] int32: 0, 1, 2, ..., the start of each token's chunk

    @classmethod
    def new(cls, query_TNH: Tensor, num_places: int) -> ChosenEntries:
        """Return uninitialised memory for the entries of the tokens of `query_TNH`, `num_places` slots per token."""
        num_tokens = len(query_TNH)
        sizes = (num_tokens, num_places), (num_tokens,), (num_tokens + 1,)
        return cls(*(new_empty(query_TNH, *size, dtype=torch.int32) for size in sizes))


class ChooseEntries(Protocol):
    """Choose the entries that each token of a step attends to."""

    def __call__(self, query_TNH: Tensor, weights_TN: Tensor, key_cache: Tensor, step: StepInputs, /) -> ChosenEntries:
        """Return each token's `top_k` entries with the highest scores, or all entries that the token sees if fewer.

        Scores are float32. Ties go to the lowest position. Rows outside all chunks, or before position 0, get no
        entries.

        Args:
            query_TNH: may be a view of a projection.
            weights_TN: in the dtype of the queries.
            key_cache: [num_blocks, block_size, H], in the dtype of the queries, addressed by `step.block_table`. Each
                position of a block is an entry. If entries are expanded, a block has all tokens of each of its entries.
        """
        ...


def num_places(rule: IndexerRule, key_cache: Tensor, step: StepInputs) -> int:
    """Return the maximum number of slots that a token of the step can choose."""
    num_entries = step.block_table.shape[1] * key_cache.shape[1]
    if not rule.is_expanded:
        return min(rule.top_k, num_entries)
    return min((rule.top_k + 1) * rule.tokens_per_entry - 1, num_entries * rule.tokens_per_entry)
