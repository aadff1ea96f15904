"""Shared resources of ranks are closed by all ranks when the engine ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from moeserve.executor.multiproc import MultiprocExecutor
from moeserve.worker import process
from moeserve.worker.protocol import Leave


class Recorder:
    """Stands for a worker, a process or its channel, and records calls."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name = name
        self.done = done
        self.channel = self

    def close(self) -> None:
        self.done.append(f"{self.name} closes")

    def send(self, message: object) -> None:
        self.done.append(f"{self.name} receives {message}")


def test_all_ranks_of_a_replica_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver closes after it has sent `Leave` to the others: closing is a collective operation."""
    done: list[str] = []
    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor._workers = cast(Any, [Recorder("rank 1", done)])
    executor.worker = cast(Any, Recorder("rank 0", done))
    monkeypatch.setattr("moeserve.executor.multiproc.end_all", lambda workers, patience_s: done.append("all end"))
    executor.shutdown()
    assert done == ["rank 1 receives Leave()", "rank 0 closes", "all end"]


def test_a_rank_closes_when_it_receives_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(process, "join", lambda start: None)
    monkeypatch.setattr(process, "Worker", lambda *arguments, **options: Recorder("rank 1", done))
    channel = SimpleNamespace(receive=lambda timeout: [Leave()])
    parent = SimpleNamespace(channel=lambda kind: channel, config=lambda kind: SimpleNamespace(config=None))
    process.run(cast(Any, parent))
    assert done == ["rank 1 closes"]
