"""A debugging check that all ranks of a group call the same collective.

Before each collective, ranks exchange descriptions of the collective over connections that only the check uses. All
groups share these connections, so a rank that calls a collective of another group is detected as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from moeserve.distributed import gloo
from moeserve.distributed.transport import TransportError

Operation = Literal["all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_reduce_minimum", "barrier"]
NO_STEP = -1


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """A description of the collective that a rank is about to call, for one other rank.

    All fields but the last two must be equal on both ranks.
    """

    group: str
    operation: Operation
    number: int  # number of the collective within the group
    step: int = NO_STEP
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()  # without the first dimension where it may differ between ranks
    sizes: tuple[int, ...] = ()  # rows of each rank, if ranks must agree on them; for a broadcast, the source
    num_sent: int = 0  # number of rows from this rank to the other rank
    num_expected: int = 0  # number of rows from the other rank to this rank

    def matches(self, other: CollectiveCall) -> bool:
        """True if both calls join the same collective, and each rank sends as many rows as the other expects."""
        return other == replace(self, num_sent=self.num_expected, num_expected=self.num_sent)

    def __str__(self) -> str:
        parts = [f"collective {self.number}", f"{self.dtype} {list(self.shape)}"]
        if self.step != NO_STEP:
            parts.insert(0, f"step {self.step}")
        if self.sizes:
            parts.append(f"source {self.sizes[0]}" if self.operation == "broadcast" else f"sizes {list(self.sizes)}")
        if self.operation == "all_to_all":
            parts.append(f"sends {self.num_sent} rows and expects {self.num_expected}")
        return f"{self.operation} of group {self.group!r} ({', '.join(parts)})"

    def to_row(self, num_ranks: int) -> Tensor:
        """Return the call encoded as uint8. The length depends only on `num_ranks`."""
        encoded = msgspec.json.encode(self).ljust(512 + 16 * num_ranks)
        return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)

    @classmethod
    def from_row(cls, row: Tensor) -> CollectiveCall:
        return msgspec.json.decode(row.numpy().tobytes(), type=cls)


class OrderCheck:
    """One rank's side of the check. Ranks have their numbers in the world."""

    def __init__(self, rank: int, process_group: ProcessGroupGloo, timeout_s: float) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self.num_ranks = process_group.size()
        self.process_group = process_group
        self._sends: list[object] = []  # kept alive, so that late ranks still receive the descriptions

    def find_mismatch(self, calls: Mapping[int, CollectiveCall]) -> str | None:
        """Exchange descriptions of this call with other ranks. Return a description of the first mismatch, or None.

        Args:
            calls: this rank's call as described to each other rank, by that rank.

        Raises:
            TransportError: a rank does not answer in time, or has died.
        """
        try:
            return self._find_mismatch(calls)
        except RuntimeError as error:
            raise TransportError(gloo.cause_of(error, self.timeout_s)) from error

    def _find_mismatch(self, calls: Mapping[int, CollectiveCall]) -> str | None:
        rows = {rank: call.to_row(self.num_ranks) for rank, call in calls.items()}
        received = {rank: torch.empty_like(row) for rank, row in rows.items()}
        receives = {rank: gloo.receive(self.process_group, row, rank) for rank, row in received.items()}
        sends = {rank: gloo.send(self.process_group, row, rank) for rank, row in rows.items()}
        self._sends = [sends, rows]
        for rank, receive in receives.items():
            receive.wait()
            theirs = CollectiveCall.from_row(received[rank])
            if not calls[rank].matches(theirs):
                sends[rank].wait()
                return f"rank {self.rank} calls {calls[rank]}, but rank {rank} calls {theirs}"
        for send in sends.values():
            send.wait()
        return None
