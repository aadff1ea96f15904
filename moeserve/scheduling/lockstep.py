"""What the replicas agree on before each step. Knows counts and flags; never requests, tensors or a transport.

The experts of every layer are spread over all replicas, so each step is a sequence of collectives that every replica
must enter, though one has a hundred requests and another none. A replica that enters one more or one less than the
others leaves all of them waiting for ever. This is why that cannot happen:

1. Nobody decides alone. Before each step every replica contributes one row of integers to an all-gather, and every
   decision that chooses a collective (run or sleep, how many rows, which placement, leave) is `agree`, a function of
   the gathered rows and of nothing else. The rows are the same everywhere, so the decisions are.
2. So there are two kinds of rounds, the same for all: gather, or gather and execute. After a round all replicas have
   entered the same collectives, and the next thing each of them enters is the next gather. By induction they are the
   same for ever. The step number in the rows is this induction, checked: replicas in different rounds are told apart
   at the first gather, and the error names them.
3. Every replica reaches its next gather without waiting for another replica. All that it does in between is its own:
   hand out news, take in messages, plan. Where it sleeps, a timer of its own ends the sleep. A message that is lost,
   late or doubled changes when that is, not whether.
4. Nothing leads out of the middle of a round: between the gather and the end of the step there is no return, whether a
   replica has something to run or not. A replica whose own books fail still enters the next gather, to say so, and
   then all leave after the same round. One that fails inside a collective, or dies, cannot say so; then whoever watches
   the processes ends the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.errors import LockstepError

PROTOCOL_VERSION = 3
ROW_SIZE = 7  # protocol version, step, replica, tokens, decode only, placement epoch, flags


@dataclass(frozen=True, kw_only=True)
class IntentFlags:
    """What a replica has to say beside what it would run."""

    wants_shutdown: bool = False
    has_failed: bool = False  # outside any collective: it can still say so, and nothing else
    wants_load: bool = False  # that all ranks tell what their experts were given


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What one replica would do in the next step."""

    num_tokens: int  # of its plan; 0 without one
    is_decode_only: bool  # no chunk of its plan is longer than a token
    placement_epoch: int = 0  # the newest placement of experts whose weights it holds
    flags: IntentFlags = IntentFlags()


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all replicas do in this step. The same object, field by field, on each of them."""

    step: int  # counts agreements, also those to do nothing
    num_tokens: tuple[int, ...]  # by replica
    collects_load: bool  # all ranks tell what their experts were given, before they run anything
    is_idle: bool  # nobody has a token to run, and nothing is collected: no step is executed
    is_decode_only: bool
    is_shutdown: bool  # all want to leave, so all leave now
    failed_ranks: tuple[int, ...]  # replicas that cannot go on; with any, all end
    placement_epoch: int  # the newest that every replica has
    padded_tokens: int  # the largest count of any replica, to which layouts of one size pad


def alone(step: int, num_tokens: int, *, is_decode_only: bool = False, collects_load: bool = False) -> Agreement:
    """What a single replica agrees on with itself."""
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
    """One replica's side of the agreement: `begin`, an all-gather of the rows, `finish`, and so on."""

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
        """The row of ROW_SIZE integers that this replica contributes."""
        return [
            PROTOCOL_VERSION,
            self.step,
            self.rank,
            intent.num_tokens,
            int(intent.is_decode_only),
            intent.placement_epoch,
            _packed(intent.flags),
        ]

    def finish(self, rows: Sequence[Sequence[int]]) -> Agreement:
        """What the rows of all replicas, in order of rank, mean for all of them.

        Raises:
            LockstepError: the replicas are not in the same step, or not of the same version.
        """
        agreement = agree(rows, step=self.step, num_replicas=self.num_replicas)
        self.step += 1
        return agreement


def agree(rows: Sequence[Sequence[int]], *, step: int, num_replicas: int) -> Agreement:
    """See `Lockstep.finish`. That `step` is everyone's is checked, so nothing of the result is one replica's own."""
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
    flags = set(packed_flags)  # few are different, of however many replicas
    has_failures = any(packed & HAS_FAILED for packed in flags)
    collects_load = any(packed & WANTS_LOAD for packed in flags)
    return Agreement(
        step=step,
        num_tokens=num_tokens,
        collects_load=collects_load,
        is_idle=not any(num_tokens) and not collects_load,
        is_decode_only=all(decode_only),
        is_shutdown=all(packed & WANTS_SHUTDOWN for packed in flags),
        failed_ranks=tuple(rank for rank, packed in enumerate(packed_flags) if packed & HAS_FAILED)
        if has_failures
        else (),
        placement_epoch=min(epochs),
        padded_tokens=max(num_tokens),
    )


WANTS_SHUTDOWN, HAS_FAILED, WANTS_LOAD = 1, 2, 4  # bits of a row's last integer


def _packed(flags: IntentFlags) -> int:
    return WANTS_SHUTDOWN * flags.wants_shutdown + HAS_FAILED * flags.has_failed + WANTS_LOAD * flags.wants_load


def _require_all(name: str, values: Sequence[int], expected: int, hint: str) -> None:
    if set(values) == {expected}:
        return
    ranks_of_value = {value: [rank for rank, other in enumerate(values) if other == value] for value in set(values)}
    found = "; ".join(f"{value} on replicas {ranks}" for value, ranks in sorted(ranks_of_value.items()))
    raise LockstepError(f"the replicas are not in lockstep: {name} {found} (here {expected}); {hint}")
