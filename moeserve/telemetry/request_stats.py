"""Statistics of requests: how many ended and how, their tokens, and the distribution of their latencies."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKENS = tuple(2.0**power for power in range(20))


@dataclass
class Histogram:
    """Counts of values in buckets, each up to a bound that belongs to it. The last bucket has no bound."""

    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class RequestStats:
    """Totals since the start. One thread at a time may add to them; times are in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()  # outputs by finish reason
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.first_token = Histogram(SHORT_S + LONG_S[-8:])
        self.between_tokens = Histogram(SHORT_S)
        self.whole = Histogram(LONG_S)
        self.prompt_tokens = Histogram(TOKENS)
        self.generated_tokens = Histogram(TOKENS)

    def note_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Add a prompt whose first token has come."""
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached
        self.prompt_tokens.add(num_tokens)

    def note_tokens(self, num_tokens: int, seconds: float, *, is_first: bool) -> None:
        """Add new tokens of an output.

        Args:
            seconds: since the tokens before them, or since the request came.
        """
        self.num_generated_tokens += num_tokens
        if is_first:
            self.first_token.add(seconds)
        else:
            self.between_tokens.add(seconds / num_tokens, num_tokens)

    def note_end(self, reason: str, num_tokens: int, seconds: float) -> None:
        """Add the end of an output, some time after its request came."""
        self.ends[reason] += 1
        self.generated_tokens.add(num_tokens)
        self.whole.add(seconds)
