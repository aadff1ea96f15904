"""`TokenHistory`: the tokens of a request as an array that can be searched for n-grams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TokenHistory:
    """An append-only array of tokens."""

    def __init__(self) -> None:
        self._memory = np.empty(64, np.int64)
        self.num_tokens = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        end = self.num_tokens + len(token_ids)
        if end > len(self._memory):
            self._memory = np.resize(self._memory, 2 * end)
        self._memory[self.num_tokens : end] = token_ids
        self.num_tokens = end

    def continuation(self, num_tokens: int, shortest: int, longest: int) -> list[int]:
        """Return the tokens that followed an earlier occurrence of the last n-gram; empty if there is none.

        The longest n-gram at the end that has occurred before is used, at its latest occurrence. If fewer tokens than
        `num_tokens` follow it, the text is assumed to repeat from there.

        Args:
            num_tokens: number of tokens to return.
            shortest, longest: minimum and maximum length of the n-gram, at least one.
        """
        tokens = self._memory[: self.num_tokens]
        longest = min(longest, self.num_tokens - 1)
        if longest < shortest:
            return []
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # last positions of all occurrences, in ascending order
        found = ends if shortest == 1 else ends[:0]
        for length in range(2, longest + 1):
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - length + 1] == tokens[-length]]
            if not len(ends):
                break
            if length >= shortest:
                found = ends
        if not len(found):
            return []
        continuation: list[int] = np.resize(tokens[found[-1] + 1 :], num_tokens).tolist()
        return continuation
