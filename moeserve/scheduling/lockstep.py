"""The agreement that all replicas reach before each step, as a pure function of one row of integers per replica.

The experts of every layer are spread over all replicas, so a step is a sequence of collectives that every replica must
enter, with or without requests of its own. A replica that enters one collective more or less than the others leaves
all of them waiting forever. The following rules prevent that:

1. No replica decides alone. Before each step every replica contributes a row of integers to an all-gather. Every
   decision that selects a collective (run or sleep, row counts, placement, shutdown) is `agree`, a function of the
   gathered rows and nothing else. The rows are the same everywhere, so the decisions are.
2. A round is therefore either a gather, or a gather and a step, on all replicas alike. After it, all have entered the
   same collectives, and the next one each of them enters is the next gather. By induction the sequences are always
   equal. The step number in the rows checks this: replicas in different rounds are detected at the first gather.
3. Every replica reaches its next gather without waiting for another replica. Between rounds it only sends updates,
   receives messages and plans. A timer of its own ends its sleep. A lost, late or repeated message changes when the
   next gather happens, not whether it happens.
4. Nothing leaves a round half way: there is no return between the gather and the end of the step. A replica with an
   internal error still enters the next gather to announce it, and all replicas stop after that round. A replica that
   fails inside a collective, or dies, cannot announce it; then the supervisor of the processes ends the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.errors import LockstepError

PROTOCOL_VERSION = 3
ROW_SIZE = 7  # protocol version, step, replica, tokens, decode only, placement epoch, flags

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
    placement_epoch: int = 0  # the newest expert placement whose weights its ranks hold
    flags: IntentFlags = IntentFlags()


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The actions of all replicas in one step. All fields are equal on all replicas."""

    step: int  # counts agreements, idle ones included
    num_tokens: tuple[int, ...]  # by replica
    collects_load: bool  # all ranks exchange their expert loads before they run anything
    is_idle: bool  # no tokens and no collection: no step is executed
    is_decode_only: bool
    is_shutdown: bool  # all replicas requested it, so all stop now
    failed_ranks: tuple[int, ...]  # replicas that announced a failure; if there are any, all stop now
    placement_epoch: int  # the newest that every replica holds
    padded_tokens: int  # the largest count of any replica, to which padded steps are sized


def alone(step: int, num_tokens: int, *, is_decode_only: bool = False, collects_load: bool = False) -> Agreement:
    """Return the agreement of an engine with a single replica."""
    return Agreement(
        step=step,
        num_tokens=(num_tokens,),
        collects_load=collects_load,
        is_idle=num_tokens == 0 and not collects_load,
        is_decode_only=is_decode_only,
        is_shutdown=False,
        failed_ranks=(),
        placement_epoch=0,
        padded_tokens=num_tokens,
    )


class Lockstep:
    """One replica's side of the agreement. A round is `begin`, an all-gather of the rows, `finish`."""

    def __init__(self, *, rank: int, num_replicas: int) -> None:
        """
        Args:
            rank: of this replica among the replicas.
        """
        assert 0 <= rank < num_replicas, (rank, num_replicas)
        self.rank = rank
        self.num_replicas = num_replicas
        self.step = 0  # agreements made

    def begin(self, intent: Intent) -> list[int]:
        """Return the row of ROW_SIZE integers that this replica contributes."""
        flags = intent.flags
        packed_flags = (
            REQUESTS_SHUTDOWN * flags.requests_shutdown
            + HAS_FAILED * flags.has_failed
            + REQUESTS_LOAD * flags.requests_load
        )
        return [
            PROTOCOL_VERSION,
            self.step,
            self.rank,
            intent.num_tokens,
            int(intent.is_decode_only),
            intent.placement_epoch,
            packed_flags,
        ]

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        """Return the agreement that follows from the rows of all replicas, in order of rank.

        Raises:
            LockstepError: the replicas are not in the same step, or not of the same version.
        """
        agreement = agree(rows, step=self.step, num_replicas=self.num_replicas)
        self.step += 1
        return agreement


def agree(rows: Sequence[Sequence[int]], *, step: int, num_replicas: int) -> Agreement:
    """See `Lockstep.finish`. All rows must have this `step`, so the result does not depend on the replica."""
    if len(rows) != num_replicas or set(map(len, rows)) != {ROW_SIZE}:
        raise LockstepError(
            f"{len(rows)} rows of {sorted({len(row) for row in rows})} integers were gathered; "
            f"{num_replicas} replicas exchange {ROW_SIZE} each"
        )
    versions, steps, ranks, num_tokens, decode_only, epochs, packed_flags = zip(*rows, strict=True)
    _require_all("protocol version", versions, PROTOCOL_VERSION, "install the same version of moeserve everywhere")
    _require_all("step", steps, step, "a replica entered an agreement too many or too few")
    if ranks != tuple(range(num_replicas)):
        raise LockstepError(f"the rows of replicas {list(ranks)} were gathered, in this order; it must be ascending")
    flags = set(packed_flags)  # few distinct values, even for hundreds of replicas
    collects_load = any(packed & REQUESTS_LOAD for packed in flags)
    failed_ranks: tuple[int, ...] = ()
    if any(packed & HAS_FAILED for packed in flags):
        failed_ranks = tuple(rank for rank, packed in enumerate(packed_flags) if packed & HAS_FAILED)
    return Agreement(
        step=step,
        num_tokens=num_tokens,
        collects_load=collects_load,
        is_idle=not any(num_tokens) and not collects_load,
        is_decode_only=all(decode_only),
        is_shutdown=all(packed & REQUESTS_SHUTDOWN for packed in flags),
        failed_ranks=failed_ranks,
        placement_epoch=min(epochs),
        padded_tokens=max(num_tokens),
    )


def _require_all(name: str, values: Sequence[int], expected: int, hint: str) -> None:
    if set(values) == {expected}:
        return
    ranks_of_value = {value: [rank for rank, other in enumerate(values) if other == value] for value in set(values)}
    found = "; ".join(f"{value} on replicas {ranks}" for value, ranks in sorted(ranks_of_value.items()))
    raise LockstepError(f"the replicas are not in lockstep: {name} {found} (here {expected}); {hint}")
