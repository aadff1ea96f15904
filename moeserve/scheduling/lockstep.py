"""The agreement that all replicas reach before each step, as a pure function of one row of integers per replica.

The experts of every layer are spread over all replicas, so a step is a sequence of collectives that every rank must
enter, with or without requests of its own. A rank that enters one collective more or less than the others leaves all
of them waiting forever. The following rules prevent that:

1. No replica decides alone. A replica sends its ranks rounds: a row of integers, and a plan if it has tokens to run. In
   each round every rank all-gathers its replica's row with the ranks of the same tp index in the other replicas. Every
   decision that selects a collective (run or sleep, row counts, shutdown) is `agree`, a function of the gathered rows
   and nothing else. The rows are the same everywhere, so the decisions are. Ranks that move experts decide by the
   loads that all of them have gathered, and by the steps run since.
2. A round is therefore either a gather, or a gather and a step, on all ranks alike. After it, all have entered the
   same collectives, and the next one each of them enters is the next gather. By induction the sequences are always
   equal. The round's number in the rows checks this: ranks in different rounds are detected at the first gather.
3. Every replica sends its next round without waiting for another replica. It may send several before the outcome of the
   first is known; ranks run them in order. A timer of its own ends its sleep. A lost, late or repeated message changes
   when the next gather happens, not whether it happens.
4. Nothing leaves a round half way: there is no return between the gather and the end of the step. A replica with an
   internal error still sends a round to announce it, and all ranks stop in that round; rounds that were sent after it
   are not run anywhere. A rank that fails inside a collective, or dies, cannot announce it; then the supervisor of the
   processes ends the others.

With pipeline stages, the rules hold for the ranks of each stage. A replica sends the same row and plan to all of them,
so all stages reach the same agreement. In a step a rank receives from the stage before, computes, and sends to the
next; a send ends when the next stage receives. Sort these operations by round, then by stage: each waits only for
operations before it, a send for the earlier rounds of its receiver. So the first operation that is not done can always
proceed. Expert loads are exchanged between all stages before the operations of a round, so they wait for earlier
rounds only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from moeserve.errors import LockstepError
from moeserve.protocol import RankReport, StepPlan, StepResult

PROTOCOL_VERSION = 8
# Protocol version, round, replica, tokens, sampling requests, decode only, decoding requests, prefill tokens, flags.
ROW_SIZE = 9
LEAST_PREFILL_BUDGET = 128  # tokens
PREFILL_ROUNDS = 4  # that the waiting prefills would take with constant budgets, if all replicas had equally many

REQUESTS_SHUTDOWN, HAS_FAILED, REQUESTS_LOAD = 1, 2, 4  # bits of a row's last integer


@dataclass(frozen=True, kw_only=True)
class IntentFlags:
    """Announcements of a replica besides its plan."""

    requests_shutdown: bool = False
    has_failed: bool = False  # outside of any collective
    requests_load: bool = False  # the ranks' expert loads are to be collected


@dataclass(frozen=True, kw_only=True)
class Intent:
    """One replica's contribution to the next agreement."""

    num_tokens: int  # of its plan; 0 without one
    is_decode_only: bool  # no chunk of its plan is longer than a token
    num_sampling: int = 0  # requests of its plan that sample a token
    num_decoding: int = 0  # its requests that decode, in this round or later
    num_prefill_tokens: int = 0  # tokens of its prompts that no plan computes yet
    flags: IntentFlags = IntentFlags()


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The actions of all replicas in one step. All fields are equal on all replicas."""

    number: int  # of the round, counted from 0, idle ones included
    num_tokens: tuple[int, ...]  # by replica
    num_sampling: tuple[int, ...]  # requests that sample a token, by replica
    collects_load: bool  # all ranks exchange their expert loads before they run anything
    is_idle: bool  # no tokens and no collection: no step is executed
    has_requests: bool  # a replica has requests, even if none of them runs in this round: none may sleep
    is_decode_only: bool
    is_shutdown: bool  # all replicas requested it, so all stop now
    failed_ranks: tuple[int, ...]  # replicas that announced a failure; if there are any, all stop now
    prefill_budget: int | None  # most prompt tokens of each replica in a later round; None: no limit
    padded_tokens: int  # the largest count of any replica, to which padded steps are sized

    @property
    def ends_all(self) -> bool:
        """True if all replicas stop now. No later round takes place."""
        return self.is_shutdown or bool(self.failed_ranks)


class Round(msgspec.Struct, frozen=True, kw_only=True, tag="round"):
    """The part of one replica in one round. Sent to each of its ranks."""

    row: list[int]  # from `make_row`
    plan: StepPlan | None  # None: the replica has nothing to run, but its ranks take part in the step


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """The end of a round, as the rank that samples reports it."""

    agreement: Agreement
    result: StepResult | None = None  # None: there was no step
    error: str = ""  # of a step that failed on the only rank, which can go on; the result is then empty
    num_padding_tokens: int = 0  # rows that this rank computed beside the tokens of its replica
    agreement_seconds: float = 0.0  # until the rows of all replicas were there
    step_seconds: float = 0.0  # of the step after that
    reports: list[RankReport] = []  # of this rank, then of all ranks of the replica; empty unless they are requested


def gathered(answers: Sequence[Outcome]) -> Outcome:
    """Return the outcome of a round from the answers of several ranks, the one that samples first."""
    reports = [report for answer in answers for report in answer.reports]
    return msgspec.structs.replace(answers[0], reports=reports)


def make_row(intent: Intent, *, number: int, replica: int) -> list[int]:
    """Return the row of ROW_SIZE integers that a replica contributes.

    Args:
        number: of the round, counted from 0.
    """
    flags = intent.flags
    packed_flags = (
        REQUESTS_SHUTDOWN * flags.requests_shutdown
        + HAS_FAILED * flags.has_failed
        + REQUESTS_LOAD * flags.requests_load
    )
    return [
        PROTOCOL_VERSION,
        number,
        replica,
        intent.num_tokens,
        intent.num_sampling,
        int(intent.is_decode_only),
        intent.num_decoding,
        intent.num_prefill_tokens,
        packed_flags,
    ]


def agree(rows: Sequence[Sequence[int]], *, number: int, num_replicas: int) -> Agreement:
    """Return the agreement that follows from the rows of all replicas, in order of replica.

    Raises:
        LockstepError: the rows are not of the round with this number, or not of the same version.
    """
    if len(rows) != num_replicas or set(map(len, rows)) != {ROW_SIZE}:
        raise LockstepError(
            f"{len(rows)} rows of {sorted({len(row) for row in rows})} integers were gathered; "
            f"{num_replicas} replicas exchange {ROW_SIZE} each"
        )
    versions, numbers, ranks, num_tokens, num_sampling, *others = zip(*rows, strict=True)
    decode_only, num_decoding, num_prefill, packed_flags = others
    _require_all("protocol version", versions, PROTOCOL_VERSION, "install the same version of moeserve everywhere")
    _require_all("round", numbers, number, "a replica entered a round too many or too few")
    if ranks != tuple(range(num_replicas)):
        raise LockstepError(f"the rows of replicas {list(ranks)} were gathered, in this order; it must be ascending")
    flags = set(packed_flags)  # few distinct values, even for hundreds of replicas
    collects_load = any(packed & REQUESTS_LOAD for packed in flags)
    failed_ranks: tuple[int, ...] = ()
    if any(packed & HAS_FAILED for packed in flags):
        failed_ranks = tuple(rank for rank, packed in enumerate(packed_flags) if packed & HAS_FAILED)
    return Agreement(
        number=number,
        num_tokens=num_tokens,
        num_sampling=num_sampling,
        collects_load=collects_load,
        is_idle=not any(num_tokens) and not collects_load,
        has_requests=any(num_tokens) or any(num_decoding) or any(num_prefill),
        is_decode_only=all(decode_only),
        is_shutdown=all(packed & REQUESTS_SHUTDOWN for packed in flags),
        failed_ranks=failed_ranks,
        prefill_budget=_prefill_budget(num_decoding, num_prefill),
        padded_tokens=max(num_tokens),
    )


def _prefill_budget(num_decoding: Sequence[int], num_prefill_tokens: Sequence[int]) -> int | None:
    """Return the prompt tokens that each replica may compute in a round.

    A step takes as long as its longest prefill, on all replicas. The mean over the replicas keeps the delay of all in
    proportion to the work of all: a long prompt on one of many replicas proceeds in small chunks, and when prompts wait
    everywhere the chunks are large, which costs least per token.

    Args:
        num_decoding: requests, by replica.
        num_prefill_tokens: that wait, by replica.
    """
    num_replicas = len(num_decoding)
    if num_replicas == 1 or not any(num_decoding):
        return None
    return max(LEAST_PREFILL_BUDGET, sum(num_prefill_tokens) // (num_replicas * PREFILL_ROUNDS))


def _require_all(name: str, values: Sequence[int], expected: int, hint: str) -> None:
    if set(values) == {expected}:
        return
    ranks_of_value = {value: [rank for rank, other in enumerate(values) if other == value] for value in set(values)}
    found = "; ".join(f"{value} on replicas {ranks}" for value, ranks in sorted(ranks_of_value.items()))
    raise LockstepError(f"the replicas are not in lockstep: {name} {found} (here {expected}); {hint}")
