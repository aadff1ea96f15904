"""The choice between loading blocks from the store behind the KV cache and computing them, by measured rates."""

from __future__ import annotations

MIN_PROMPT_TOKENS = 32  # smaller steps are not measured, because most of their time is not spent on prompts
WEIGHT = 0.25  # weight of the newest measurement in the moving average
TRIES = 16  # every 16th load is performed even if it seems slower than computing, to measure it again


class LoadRates:
    """Exponential moving averages of the time to load and to compute a token."""

    def __init__(self) -> None:
        self._load_seconds = self._compute_seconds = 0.0  # seconds per token; 0: not measured yet
        self._num_passed = 0  # loads skipped since the last load that was performed as a measurement

    def note_load(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a load of blocks with `num_tokens` tokens."""
        if num_tokens:
            self._load_seconds = _average(self._load_seconds, seconds / num_tokens)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a step of `num_tokens` tokens."""
        if num_tokens >= MIN_PROMPT_TOKENS:
            self._compute_seconds = _average(self._compute_seconds, seconds / num_tokens)

    def pays(self) -> bool:
        """Return True if blocks should be loaded now rather than computed."""
        if not self._compute_seconds or self._load_seconds <= self._compute_seconds:
            return True
        self._num_passed = (self._num_passed + 1) % TRIES
        return self._num_passed == 0


def _average(before: float, newest: float) -> float:
    return before + WEIGHT * (newest - before) if before else newest
