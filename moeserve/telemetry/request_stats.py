"""Statistics of requests: finish reasons, tokens, and the distribution of latencies.

The statistics are plain data, so that those of several processes can be sent and added.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKENS = tuple(2.0**power for power in range(20))
FINISH_REASONS = ("stop", "length", "abort")


class Histogram(msgspec.Struct):
    """Counts of values in buckets. A bucket includes its upper bound; the last bucket has no bound."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0  # sum of the values

    @classmethod
    def empty(cls, bounds: Sequence[float]) -> Histogram:
        """Return a histogram without values."""
        return cls(tuple(bounds), [0] * (len(bounds) + 1))

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def __add__(self, other: Histogram) -> Histogram:
        counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts, self.total + other.total)


class RequestStats(msgspec.Struct):
    """Totals since the start. Only one thread at a time may add to them. All times come from one clock, in seconds."""

    ends: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))  # number of outputs
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    first_token: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(SHORT_S + LONG_S[-8:]))
    between_tokens: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(SHORT_S))
    whole: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(LONG_S))
    prompt_tokens: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(TOKENS))
    generated_tokens: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(TOKENS))

    def __add__(self, other: RequestStats) -> RequestStats:
        ends = {reason: number + other.ends[reason] for reason, number in self.ends.items()}
        _, *others = self.__struct_fields__
        return RequestStats(ends, *(getattr(self, name) + getattr(other, name) for name in others))

    def note_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Add a prompt whose first output token has arrived."""
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached
        self.prompt_tokens.add(num_tokens)

    def note_tokens(self, num_tokens: int, seconds: float, *, is_first: bool) -> None:
        """Count new tokens of an output.

        Args:
            seconds: time since the output's previous tokens; for the first tokens, since the request arrived.
        """
        self.num_generated_tokens += num_tokens
        if is_first:
            self.first_token.add(seconds)
        else:
            self.between_tokens.add(seconds / num_tokens, num_tokens)

    def note_end(self, reason: str, num_tokens: int, seconds: float) -> None:
        """Count the end of an output, `seconds` after its request arrived."""
        self.ends[reason] += 1
        self.generated_tokens.add(num_tokens)
        self.whole.add(seconds)
