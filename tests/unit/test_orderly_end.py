"""What ranks hold together is given back when all of them end, by all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from moeserve.executor.multiproc import MultiprocExecutor
from moeserve.worker import process
from moeserve.worker.protocol import Leave
from moeserve.worker.worker import Worker


class Noting:
    """Dispatchers, a worker, a process or its channel: notes what is done with it."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name = name
        self.done = done
        self.channel = self

    def close(self) -> None:
        self.done.append(f"{self.name} closes")

    def send(self, message: object) -> None:
        self.done.append(f"{self.name} is told {message}")


def test_a_worker_closes_its_dispatchers_once() -> None:
    done: list[str] = []
    worker = Worker.__new__(Worker)
    worker._dispatchers = cast(Any, Noting("dispatchers", done))
    worker.close()
    worker.close()
    assert done == ["dispatchers closes"]


def test_all_ranks_of_a_replica_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver does so once it has told the others, which cannot before: closing takes all of them."""
    done: list[str] = []
    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor._workers = cast(Any, [Noting("rank 1", done)])
    executor.worker = cast(Any, Noting("rank 0", done))
    monkeypatch.setattr("moeserve.executor.multiproc.end_all", lambda workers, patience_s: done.append("all end"))
    executor.shutdown()
    assert done == ["rank 1 is told Leave()", "rank 0 closes", "all end"]


def test_a_rank_closes_when_it_is_told_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(process, "join", lambda start: None)
    monkeypatch.setattr(process, "Worker", lambda *arguments, **options: Noting("rank 1", done))
    channel = SimpleNamespace(receive=lambda timeout: [Leave()])
    parent = SimpleNamespace(channel=lambda kind: channel, config=lambda kind: SimpleNamespace(config=None))
    process.run(cast(Any, parent))
    assert done == ["rank 1 closes"]
