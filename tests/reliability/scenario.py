"""Scenarios of the simulator, their reports, and the outputs that their requests must have."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from moeserve.protocol import Request

Fault: TypeAlias = Literal["none", "kill", "raise", "internal"]

HEARTBEAT_S = 1.0
DETECTION_S = 1.0  # a death is noticed within
MAX_STALL_S = 3.0
MAX_LATE_S = 20.0
BLOCK_SIZE = 4
MAX_MODEL_LEN = 40
MAX_NUM_BATCHED_TOKENS = 8
END_TOKEN = 0
LOAD_WINDOW = 5  # steps
MAX_PAUSE_S = 2.0
COLLECTED_SHARE = 0.05  # of requests, with which the figures of experts are asked for
_QUIET_S = 4 * HEARTBEAT_S  # between the last end and the shutdown


class InvariantViolation(AssertionError):
    """Something that must always hold did not."""

    def __init__(self, invariant: str, message: str, last_events: Sequence[str] = ()) -> None:
        super().__init__("\n".join([f"{invariant}: {message}", *last_events]))
        self.invariant = invariant


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything that determines a run. Shares and probabilities are from 0 to 1, times are virtual seconds."""

    num_replicas: int
    seed: int
    max_rounds: int = 2
    plans_ahead: bool = True
    num_requests: int = 40
    num_busy_replicas: int = 8  # replicas that get requests; the others run padding
    span_s: float = 3.0  # in which requests arrive,
    num_bursts: int = 2  # in this number of bursts
    abort_share: float = 0.2
    refused_share: float = 0.05  # requests that every scheduler refuses
    wake_loss: float = 0.0
    stall_probability: float = 0.0  # per effect
    row_failure_probability: float = 0.0  # per step of a replica: one request gets an error
    fault: Fault = "none"  # kill: the process dies; raise: an error in a forward pass; internal: in its own code
    fault_s: float = 0.0
    fault_replica: int = 0
    num_late: int = 0  # replicas that start up to MAX_LATE_S later
    shutdown_s: float | None = None  # None: when all requests have ended
    num_pauses: int = 0  # each followed by a resume

    @classmethod
    def drawn(cls, num_replicas: int, seed: int, num_requests: int) -> Scenario:
        """Return a random scenario that follows from the seed."""
        dice = random.Random(f"{num_replicas} {seed}")
        span_s = dice.choice([0.5, 3.0, 12.0])
        num_late = dice.choice([0, 0, 1, num_replicas // 2])
        end_s = span_s + (MAX_LATE_S if num_late else 0.0)
        return cls(
            num_replicas=num_replicas,
            seed=seed,
            max_rounds=dice.choice([1, 2, 2, 3]),
            plans_ahead=dice.random() < 0.7,
            num_requests=num_requests,
            num_busy_replicas=dice.choice([1, max(1, num_replicas // 4), num_replicas]),
            span_s=span_s,
            num_bursts=dice.choice([1, 3, 10]),
            abort_share=dice.choice([0.0, 0.2, 0.6]),
            refused_share=dice.choice([0.0, 0.1]),
            wake_loss=dice.choice([0.0, 0.3, 1.0]),
            stall_probability=dice.choice([0.0, 0.0, 1 / (50 * num_replicas)]),
            row_failure_probability=dice.choice([0.0, 0.0, 0.02]),
            fault=dice.choice(["none", "none", "kill", "raise", "internal"]),
            fault_s=dice.uniform(0.0, end_s),
            fault_replica=dice.randrange(num_replicas),
            num_late=num_late,
            shutdown_s=dice.choice([None, None, dice.uniform(0.0, end_s)]),
            num_pauses=dice.choice([0, 0, 1, 3]),
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """The counts of a run without a violation."""

    num_events: int
    num_steps: int  # executed by the worker group
    num_idle_rounds: int
    num_preemptions: int
    ends: dict[str, int]  # requests by how they ended: "stop", "length", "abort", "error"
    virtual_s: float
    slowest_first_token_s: float  # from sending a request to its first token, over all requests
    trace_digest: str  # SHA-256 over all events


def sampled_token(seed: int, position: int) -> int:
    """Return the token that the simulated model samples. One in 30 ends its output."""
    return zlib.crc32(b"%d at %d" % (seed, position)) % 30


def whole_output(request: Request) -> tuple[list[int], str]:
    """Return tokens and finish reason of a request that is not aborted, without a scheduler."""
    most = min(request.params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - len(request.prompt_token_ids))
    output = [sampled_token(request.seed, position) for position in range(most)]
    if END_TOKEN in output:
        return output[: output.index(END_TOKEN) + 1], "stop"
    return output, "length"


def most_steps(request: Request) -> int:
    """Return the maximum number of steps in which a request can be the oldest of its replica.

    After a preemption it is computed again once, and then advances in each step.
    """
    num_output = len(whole_output(request)[0])
    return -(-(len(request.prompt_token_ids) + num_output) // MAX_NUM_BATCHED_TOKENS) + num_output
