"""`StepTotals`: sums over the steps of one replica, which the replica reports together with its load."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from moeserve.telemetry.request_stats import Histogram

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens; as in vLLM


class StepTotals(msgspec.Struct, kw_only=True):
    """Sums since the start of a replica. All replicas take part in every step, even replicas without tokens."""

    num_tokens: int = 0
    # Number of steps with tokens, by size: up to each of STEP_SIZES, and above the last.
    num_steps_of_size: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))
    num_idle_steps: int = 0  # steps in which other replicas had tokens and this replica had none
    num_padding_tokens: int = 0  # padding rows that the ranks of this replica computed
    agreement_seconds: float = 0.0  # time to agree with other replicas, including waits for slower replicas

    @property
    def sizes(self) -> Histogram:
        """Histogram of the number of tokens per step, over the steps with tokens."""
        return Histogram(STEP_SIZES, self.num_steps_of_size, self.num_tokens)

    def add(self, num_tokens: int, num_padding_tokens: int, agreement_seconds: float) -> None:
        """Add a step to the totals.

        Args:
            num_tokens: tokens of this replica.
            num_padding_tokens: padding rows of this replica's ranks.
            agreement_seconds: time of the agreement with other replicas.
        """
        self.num_tokens += num_tokens
        self.num_padding_tokens += num_padding_tokens
        self.agreement_seconds += agreement_seconds
        if num_tokens:
            self.num_steps_of_size[bisect_left(STEP_SIZES, num_tokens)] += 1
        else:
            self.num_idle_steps += 1
