"""Ranks as threads of one process, with a group that checks and records its collectives."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Record:
    """One collective as one rank saw it."""

    operation: str
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    sent: tuple[Tensor, ...]  # by rank: the rows that went to it


@dataclass
class Table:
    """Exchanges objects between the ranks."""

    num_ranks: int
    barrier: threading.Barrier = field(init=False)
    places: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.num_ranks, timeout=TIMEOUT_S)
        self.places = [None] * self.num_ranks

    def exchange(self, rank: int, given: Any) -> list[Any]:
        self.places[rank] = given
        self.barrier.wait()
        taken = list(self.places)
        self.barrier.wait()
        return taken


@dataclass(frozen=True)
class Arriving:
    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor


@dataclass
class ThreadGroup:
    """The collectives that dispatchers use, with the contracts of GroupCoordinator."""

    table: Table
    rank_in_group: int
    records: list[Record] = field(default_factory=list)
    num_bytes_sent: int = 0

    @property
    def world_size(self) -> int:
        return self.table.num_ranks

    @property
    def node_of_rank(self) -> tuple[int, ...]:
        return (0,) * self.world_size

    def barrier(self) -> None:
        self.table.barrier.wait()

    def share_memory(self, num_bytes: int) -> Tensor:
        mine = torch.zeros(num_bytes, dtype=torch.uint8)
        first: Tensor = self.table.exchange(self.rank_in_group, mine)[0]
        return first

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        assert len(x) == sizes[self.rank_in_group], "the rows do not match the sizes"
        taken = self._exchange("all_gather", x, tuple(sizes), (x,) * self.world_size)
        assert all(other_sizes == tuple(sizes) for _, other_sizes in taken), "ranks differ in sizes"
        return torch.cat([rows for rows, _ in taken])

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> Arriving:
        return Arriving(self.all_gather(x, sizes))

    def all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Arriving:
        assert len(x) == sum(send_sizes), "the rows do not match the sizes"
        parts = x.split(list(send_sizes))
        taken = self._exchange("all_to_all", x, None, tuple(parts))
        mine = [parts_of_sender[self.rank_in_group] for parts_of_sender, _ in taken]
        assert [len(part) for part in mine] == list(receive_sizes), "the received rows do not match the sizes"
        return Arriving(torch.cat(mine))

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        assert len(x) == sum(sizes), "the rows do not match the sizes"
        taken = self._exchange("reduce_scatter", x, tuple(sizes), tuple(x.split(list(sizes))))
        assert all(other_sizes == tuple(sizes) for _, other_sizes in taken), "ranks differ in sizes"
        parts = [rows.split(list(sizes))[self.rank_in_group].float() for rows, _ in taken]
        return functools.reduce(torch.add, parts).to(dtype or x.dtype)

    def _exchange(self, operation: str, x: Tensor, sizes: Any, sent: tuple[Tensor, ...]) -> list[tuple[Any, Any]]:
        self.records.append(Record(operation, x.dtype, tuple(x.shape[1:]), tuple(rows.clone() for rows in sent)))
        payload = [rows.clone() for rows in sent] if operation == "all_to_all" else x.clone()
        taken = self.table.exchange(self.rank_in_group, (operation, x.dtype, tuple(x.shape[1:]), payload, sizes))
        assert len({each[:3] for each in taken}) == 1, f"ranks differ: {[each[:3] for each in taken]}"
        return [(each[3], each[4]) for each in taken]


def run(num_ranks: int, function: Callable[[ThreadGroup], Result]) -> list[Result]:
    """Return the results of a function on each rank. Raises the first failure."""
    table = Table(num_ranks)
    results: list[Any] = [None] * num_ranks
    failures: list[BaseException] = []

    def run_rank(rank: int) -> None:
        try:
            results[rank] = function(ThreadGroup(table, rank))
        except BaseException as error:
            failures.append(error)
            table.barrier.abort()

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
