"""The choice between loading blocks from the store behind the KV cache and computing them, by the rates so far."""

from __future__ import annotations

MIN_PROMPT_TOKENS = 32  # smaller steps are not measured: most of their time is not for prompts
WEIGHT = 0.25  # of the newest measurement
TRIES = 16  # every 16th load that seems slower than computing is made all the same, to measure it again


class LoadRates:
    """The time that a loaded and a computed block take, as averages in which older measurements fade."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size  # tokens
        self._load_seconds = self._compute_seconds = 0.0  # of a block; 0: not measured yet
        self._num_passed = 0  # loads not made since the last one that was made to measure

    def note_load(self, num_blocks: int, seconds: float) -> None:
        """Record a load of whole blocks."""
        if num_blocks:
            self._load_seconds = _average(self._load_seconds, seconds / num_blocks)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Record a step of this many tokens."""
        if num_tokens >= MIN_PROMPT_TOKENS:
            self._compute_seconds = _average(self._compute_seconds, seconds / num_tokens * self._block_size)

    def pays(self) -> bool:
        """Return True if blocks should be loaded now rather than computed."""
        if not self._compute_seconds or self._load_seconds <= self._compute_seconds:
            return True
        self._num_passed = (self._num_passed + 1) % TRIES
        return self._num_passed == 0


def _average(before: float, newest: float) -> float:
    return before + WEIGHT * (newest - before) if before else newest
