"""`StepTotals`: sums over the steps of one replica, which it reports with its load."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from moeserve.telemetry.request_stats import Histogram

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens; as in vLLM


class StepTotals(msgspec.Struct, kw_only=True):
    """Sums since the start of a replica. All replicas take part in each step, including those without tokens."""

    num_tokens: int = 0
    # Steps with tokens, counted by size: up to each of STEP_SIZES, and above.
    num_steps_of_size: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))
    num_idle_steps: int = 0  # steps in which other replicas had tokens and this one had none
    num_padding_tokens: int = 0  # padding rows that the ranks of this replica computed
    agreement_seconds: float = 0.0  # time of agreement with other replicas, and waits for slower ones

    @property
    def sizes(self) -> Histogram:
        """Histogram of the tokens of steps with tokens."""
        return Histogram(STEP_SIZES, self.num_steps_of_size, self.num_tokens)

    def add(self, num_tokens: int, num_padding_tokens: int, agreement_seconds: float) -> None:
        """Add a step.

        Args:
            num_tokens: tokens of this replica.
        """
        self.num_tokens += num_tokens
        self.num_padding_tokens += num_padding_tokens
        self.agreement_seconds += agreement_seconds
        if num_tokens:
            self.num_steps_of_size[bisect_left(STEP_SIZES, num_tokens)] += 1
        else:
            self.num_idle_steps += 1
