"""The lightning indexer (DeepSeek-V3.2) as an operation: which entries of its context a token attends to.

A cache holds a small key for each entry of a context, which is a token, or stands for several (DeepSeek-V4). For the
queries q_h of a token, one for each head of the indexer, and its weights w_h, the score of an entry with key k is

    sum over h of w_h * max(0, q_h . k)

and the token attends to the `top_k` entries with the highest scores among those that it sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.step_inputs import StepInputs

# T tokens, N heads of the indexer, H size of a key, C places for the entries of a token


@dataclass(frozen=True, kw_only=True)
class IndexerRule:
    """The number of entries that a token attends to."""

    top_k: int
    tokens_per_entry: int = 1  # a token at position p sees the first (p + 1) // tokens_per_entry entries


@dataclass(frozen=True)
class ChosenEntries:
    """The entries that each token attends to.

    They have the form of a block table with blocks of one entry, in which each token is a chunk of its own.
    """

    slots_TC: Tensor  # int32: block * block_size + offset of each entry, ascending by position; any after the last
    counts_T: Tensor  # int32: the number of entries
    starts: Tensor  # [T + 1] int32: the numbers from 0 up

    @classmethod
    def new(cls, query_TNH: Tensor, num_places: int) -> ChosenEntries:
        """Return memory for the entries of the tokens of some queries, with room for `num_places` each."""
        num_tokens = len(query_TNH)
        sizes = (num_tokens, num_places), (num_tokens,), (num_tokens + 1,)
        return cls(*(new_empty(query_TNH, *size, dtype=torch.int32) for size in sizes))


class ChooseEntries(Protocol):
    """Choose the entries that each token of a step attends to."""

    def __call__(self, query_TNH: Tensor, weights_TN: Tensor, key_cache: Tensor, step: StepInputs, /) -> ChosenEntries:
        """Return all entries that a token sees if there are at most `top_k`, otherwise those with the highest scores.

        Scores are float32. Among equal ones, the lower positions are chosen. Rows outside of all chunks, or before
        position 0, get no entries.

        Args:
            query_TNH: may be a view of a projection.
            weights_TN: in the dtype of the queries.
            key_cache: [num_blocks, block_size, H], in the dtype of the queries; block b of a chunk's context is that of
                `step.block_table`. A position of a block is an entry.
        """
        ...


def num_places(rule: IndexerRule, key_cache: Tensor, step: StepInputs) -> int:
    """Return the largest number of entries of a token of the step."""
    return min(rule.top_k, step.block_table.shape[1] * key_cache.shape[1])
