"""`TokenHistory`: the tokens of a request as an array, in which n-grams are found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TokenHistory:
    """Tokens that only grow."""

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
        """Return the tokens that followed the last ones when they occurred before; empty if they did not.

        The longest run of last tokens that has occurred counts, at its latest occurrence. If fewer tokens follow it
        than are asked for, the text is taken to repeat itself from there.

        Args:
            num_tokens: of the continuation.
            shortest, longest: tokens of a run, at least one.
        """
        tokens = self._memory[: self.num_tokens]
        longest = min(longest, self.num_tokens - 1)
        if longest < shortest:
            return []
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # of the occurrences of a run, in ascending order
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
