"""The agreement of all replicas before each step, computed as a pure function of one row of integers per replica.

The experts of every layer are spread over all replicas, so a step is a sequence of collectives that every rank must
enter, even if its replica has no requests. If a rank entered one collective more or less than the others, all ranks
would wait forever. The following rules prevent this:

1. No replica decides alone. A replica sends its ranks rounds: a row of integers, and a plan if it has tokens to run. In
   each round every rank all-gathers its replica's row with the ranks of the same tp index in the other replicas. Every
   decision that selects a collective (run or sleep, row counts, shutdown) is made by `agree`, a function of only the
   gathered rows. The rows are the same on all ranks, so the decisions are too. Ranks that move experts decide by the
   loads that all of them have gathered, and by the number of steps since.
2. A round is therefore a gather, a gather and a step, or a gather and a control, and it is the same on all ranks. After
   a round, all ranks have entered the same collectives, and their next collective is the next gather. By induction, the
   sequences are always equal. Rows contain the number of the round, so that ranks in different rounds are detected at
   the first gather.
3. Every replica sends its next round without waiting for another replica. A replica may send several rounds before the
   result of the first is known; ranks run them in order. Each replica ends its sleep by its own timer. A lost, late or
   repeated message only changes the time of the next gather.
4. A round is always completed: the code does not return between the gather and the end of the step. A replica with an
   internal error sends another round to announce it, and all ranks stop in that round; no rank runs later rounds. A
   rank that fails inside a collective, or exits, cannot announce it; the supervisor of the processes then terminates
   the other ranks.
5. A control is a command that all ranks run between the same two steps. A replica that has received a control announces
   the control's number, without a plan, and has no later round in flight. When all replicas announce the same number in
   one round, all ranks run the control in this round, exactly once. Until then, the other replicas run steps.

With pipeline stages, the rules hold for the ranks of each stage. A replica sends the same row and plan to all of them,
so all stages reach the same agreement. In a step, a rank receives from the previous stage, computes, and sends to the
next stage; a send ends when the next stage receives. If these operations are sorted by round, then by stage, each waits
only for earlier operations: a send waits for the previous rounds of its receiver. The first unfinished operation can
therefore always proceed. Expert loads are exchanged between all stages before the operations of a round, so this
exchange waits only for previous rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from moeserve.controls import Command, Outcome
from moeserve.errors import LockstepError
from moeserve.protocol import RankReport, StepPlan, StepResult

PROTOCOL_VERSION = 9
# Protocol version, round, replica, tokens, sampling requests, decode only, decoding requests, prefill tokens, control,
# flags.
ROW_SIZE = 10
CONTROL = 8  # index of the control in a row
LEAST_PREFILL_BUDGET = 128  # tokens
PREFILL_ROUNDS = 4  # rounds for the waiting prefills at a constant budget, if all replicas had equally many tokens

REQUESTS_SHUTDOWN, HAS_FAILED, REQUESTS_LOAD = 1, 2, 4  # bits of a row's last integer


@dataclass(frozen=True, kw_only=True)
class IntentFlags:
    """Announcements of a replica besides its plan."""

    requests_shutdown: bool = False
    has_failed: bool = False  # an error occurred outside of a collective
    requests_load: bool = False  # the expert loads of the ranks must be collected


@dataclass(frozen=True, kw_only=True)
class Intent:
    """One replica's contribution to the next agreement."""

    num_tokens: int  # tokens of the replica's plan; 0 without a plan
    is_decode_only: bool  # every chunk of the plan has one token
    num_sampling: int = 0  # requests of the plan that sample a token
    num_decoding: int = 0  # requests of the replica that decode, in this round or later
    num_prefill_tokens: int = 0  # prompt tokens that are not in any plan yet
    control: int = 0  # number of the control that the replica is ready to run, without a plan; 0: none
    flags: IntentFlags = IntentFlags()


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The actions of all replicas in one step. All fields are equal on all replicas."""

    number: int  # number of the round, counted from 0, including idle rounds
    num_tokens: tuple[int, ...]  # tokens of each replica
    num_sampling: tuple[int, ...]  # requests of each replica that sample a token
    collects_load: bool  # all ranks exchange their expert loads before the step
    control: int  # number of the control that all ranks run in this round, which has no tokens; 0: none
    is_idle: bool  # no tokens, no collection and no control: the ranks do nothing
    has_requests: bool  # a replica has requests, even if none runs in this round; no replica may sleep
    is_decode_only: bool
    is_shutdown: bool  # all replicas requested a shutdown, so all stop now
    failed_ranks: tuple[int, ...]  # replicas that announced a failure; if there are any, all replicas stop now
    prefill_budget: int | None  # maximum prompt tokens of each replica in a later round; None: no limit
    padded_tokens: int  # maximum number of tokens of any replica, which determines the size of padded steps

    @property
    def ends_all(self) -> bool:
        """True if all replicas stop now, and this round is the last one."""
        return self.is_shutdown or bool(self.failed_ranks)


class Round(msgspec.Struct, frozen=True, kw_only=True, tag="round"):
    """One replica's part of a round, which is sent to each of its ranks."""

    row: list[int]  # from `make_row`
    plan: StepPlan | None  # None: the replica has no tokens, but its ranks take part in the step
    command: Command | None = None  # command of the control that the row announces


class RoundResult(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """The result of a round, reported by the rank that samples."""

    agreement: Agreement
    result: StepResult | None = None  # None: there was no step
    outcome: Outcome | None = None  # outcome of a `WeightCommand` that the ranks have run
    error: str = ""  # error of a step that failed on the only rank, which can continue; the result is then empty
    num_padding_tokens: int = 0  # padding rows that this rank computed in addition to its replica's tokens
    agreement_seconds: float = 0.0  # seconds until the rows of all replicas had arrived
    step_seconds: float = 0.0  # seconds of the step, after the agreement
    reports: list[RankReport] = []  # reports of this rank, or of all ranks after `gathered`; empty by default


def gathered(answers: Sequence[RoundResult]) -> RoundResult:
    """Return the result of a round from the answers of several ranks. The first answer is from a rank that samples."""
    reports = [report for answer in answers for report in answer.reports]
    return msgspec.structs.replace(answers[0], reports=reports)


def make_row(intent: Intent, *, number: int, replica: int) -> list[int]:
    """Return the row of ROW_SIZE integers that a replica contributes.

    Args:
        number: number of the round, counted from 0.
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
        intent.control,
        packed_flags,
    ]


def agree(rows: Sequence[Sequence[int]], *, number: int, num_replicas: int) -> Agreement:
    """Return the agreement for the rows of all replicas, in order of replica.

    Raises:
        LockstepError: the rows belong to another round, or to another version of the protocol.
    """
    if len(rows) != num_replicas or set(map(len, rows)) != {ROW_SIZE}:
        raise LockstepError(
            f"{len(rows)} rows of {sorted({len(row) for row in rows})} integers were gathered; "
            f"{num_replicas} replicas exchange {ROW_SIZE} each"
        )
    versions, numbers, ranks, num_tokens, num_sampling, *others = zip(*rows, strict=True)
    decode_only, num_decoding, num_prefill, controls, packed_flags = others
    _require_all("protocol version", versions, PROTOCOL_VERSION, "install the same version of moeserve everywhere")
    _require_all("round", numbers, number, "a replica entered a round too many or too few")
    if ranks != tuple(range(num_replicas)):
        raise LockstepError(f"the rows of replicas {list(ranks)} were gathered, in this order; it must be ascending")
    flags = set(packed_flags)  # few distinct values, even for hundreds of replicas
    collects_load = any(packed & REQUESTS_LOAD for packed in flags)
    failed_ranks: tuple[int, ...] = ()
    if any(packed & HAS_FAILED for packed in flags):
        failed_ranks = tuple(rank for rank, packed in enumerate(packed_flags) if packed & HAS_FAILED)
    control = controls[0] if len(set(controls)) == 1 else 0
    if len(set(controls) - {0}) > 1 or (control and any(num_tokens)):
        raise LockstepError(
            f"the replicas announce the controls {list(controls)} with {list(num_tokens)} tokens in one round; they "
            "run controls in the same order, without tokens"
        )
    return Agreement(
        number=number,
        num_tokens=num_tokens,
        num_sampling=num_sampling,
        collects_load=collects_load,
        control=control,
        is_idle=not any(num_tokens) and not collects_load and not control,
        has_requests=any(num_tokens) or any(num_decoding) or any(num_prefill),
        is_decode_only=all(decode_only),
        is_shutdown=all(packed & REQUESTS_SHUTDOWN for packed in flags),
        failed_ranks=failed_ranks,
        prefill_budget=_prefill_budget(num_decoding, num_prefill),
        padded_tokens=max(num_tokens),
    )


def _prefill_budget(num_decoding: Sequence[int], num_prefill_tokens: Sequence[int]) -> int | None:
    """Return the maximum number of prompt tokens that each replica may compute in a round.

    A step takes as long as its longest prefill on any replica. The budget follows the mean over the replicas, so that
    the delay is proportional to the total work: a long prompt on one of many replicas is computed in small chunks; if
    prompts wait on all replicas, chunks are large, which costs the least per token.

    Args:
        num_decoding: decoding requests of each replica.
        num_prefill_tokens: waiting prompt tokens of each replica.
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
