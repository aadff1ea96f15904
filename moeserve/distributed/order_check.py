"""Finds ranks that are about to join different collectives, before they wait for each other. Used for debugging.

Before each collective its ranks tell each other what they are about to do, over connections that serve for nothing else
and are the same for all groups: so a rank that joins another group's collective is found as well. Knows no payload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from moeserve.distributed import gloo
from moeserve.distributed.transport import TransportError

Operation = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_reduce_minimum", "barrier"
]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
GROUPS = ("world", "tp", "dp", "ep")
DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
MAX_DIMS = 6
NO_STEP = -1


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """What a rank is about to join, as it tells one other rank. All but the last two must be equal on both."""

    group: str
    operation: Operation
    number: int  # counts the collectives of the group
    step: int = NO_STEP
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()  # without the first dimension where that may differ
    sizes: tuple[int, ...] = ()  # rows of each rank, where all ranks must know them; of a broadcast, the source
    num_sent: int = 0  # rows from the teller to the other
    num_expected: int = 0  # rows from the other to the teller

    def fits(self, other: Announcement) -> bool:
        """Whether both can join: the same collective, and what one sends is what the other expects."""
        return other == replace(self, num_sent=self.num_expected, num_expected=self.num_sent)

    def __str__(self) -> str:
        parts = [f"number {self.number}", f"{self.dtype} {list(self.shape)}"]
        if self.step != NO_STEP:
            parts.insert(0, f"step {self.step}")
        if self.sizes:
            parts.append(f"source {self.sizes[0]}" if self.operation == "broadcast" else f"sizes {list(self.sizes)}")
        if self.operation == "all_to_all":
            parts.append(f"sends the other {self.num_sent} rows and expects {self.num_expected}")
        return f"{self.operation} of group {self.group!r} ({', '.join(parts)})"

    def to_row(self, num_ranks: int) -> Tensor:
        """As int64 of a size that depends on the number of ranks alone."""
        head = [GROUPS.index(self.group), OPERATIONS.index(self.operation), DTYPES.index(self.dtype)]
        head += [self.number, self.step, self.num_sent, self.num_expected, len(self.shape), len(self.sizes)]
        shape = [*self.shape, *[0] * (MAX_DIMS - len(self.shape))]
        sizes = [*self.sizes, *[0] * (num_ranks - len(self.sizes))]
        return torch.tensor([*head, *shape, *sizes])

    @classmethod
    def from_row(cls, row: Tensor) -> Announcement:
        group, operation, dtype, number, step, num_sent, num_expected, num_dims, num_sizes, *rest = row.tolist()
        return cls(
            group=GROUPS[group],
            operation=OPERATIONS[operation],
            number=number,
            step=step,
            dtype=DTYPES[dtype],
            shape=tuple(rest[:num_dims]),
            sizes=tuple(rest[MAX_DIMS : MAX_DIMS + num_sizes]),
            num_sent=num_sent,
            num_expected=num_expected,
        )


class OrderCheck:
    """One rank's side of the check. Ranks are numbered as in the world."""

    def __init__(self, rank: int, process_group: ProcessGroupGloo, timeout_s: float) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self.num_ranks = process_group.size()
        self.process_group = process_group
        self._sends: list[object] = []  # kept, so that ranks which come later still hear of a disagreement

    def disagreement(self, mine: Mapping[int, Announcement]) -> str | None:
        """Tell each other rank what it must know, wait for the same from it, and say what does not fit, if anything.

        TransportError when a rank does not answer in time, or has died.
        """
        try:
            return self._disagreement(mine)
        except RuntimeError as error:
            raise TransportError(gloo.cause(error, self.timeout_s)) from error

    def _disagreement(self, mine: Mapping[int, Announcement]) -> str | None:
        rows = {rank: announcement.to_row(self.num_ranks) for rank, announcement in mine.items()}
        received = {rank: torch.empty_like(row) for rank, row in rows.items()}
        receives = {rank: gloo.receive(self.process_group, row, rank) for rank, row in received.items()}
        sends = {rank: gloo.send(self.process_group, row, rank) for rank, row in rows.items()}
        self._sends = [sends, rows]
        for rank, receive in receives.items():
            receive.wait()
            theirs = Announcement.from_row(received[rank])
            if not mine[rank].fits(theirs):
                sends[rank].wait()
                return f"rank {self.rank} was about to join {mine[rank]}, but rank {rank} {theirs}"
        for send in sends.values():
            send.wait()
        return None
