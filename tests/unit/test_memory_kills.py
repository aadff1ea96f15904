"""Ends by SIGKILL: which of them the kernel has caused for lack of memory, by the count that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_cgroups import V2, lay_out, v2_memory

from moeserve.processes.memory_kills import MemoryKills

CAUSE = "the kernel killed it for lack of memory (limit 1.00 GiB)"


@pytest.fixture
def set_count(tmp_path: Path) -> Callable[[int], None]:
    def set_count(num_kills: int, limit: str = str(2**30)) -> None:
        files = v2_memory("unified/a", limit, 700, high="800")  # which kills no process
        lay_out(tmp_path, files | {"unified/a/memory.events": f"oom 9\noom_kill {num_kills}"}, ["0::/a"], [V2])

    set_count(3)
    return set_count


def test_each_kill_is_the_cause_of_one_end(set_count: Callable[[int], None], tmp_path: Path) -> None:
    kills = MemoryKills(tmp_path)
    older = kills.count()
    assert kills.take_cause(older) == ""
    set_count(5)
    assert kills.take_cause(kills.count()) == ""  # it was started after both kills
    assert [kills.take_cause(older) for _ in range(3)] == [CAUSE, CAUSE, ""]
    set_count(6)
    assert [kills.take_cause(older) for _ in range(2)] == [CAUSE, ""]


def test_kills_of_the_processes_of_others_are_forgotten(set_count: Callable[[int], None], tmp_path: Path) -> None:
    kills = MemoryKills(tmp_path)
    older = kills.count()
    set_count(4)
    kills.forget()
    assert kills.take_cause(older) == ""
    set_count(5)
    assert kills.take_cause(older) == CAUSE


def test_a_limit_is_named_only_if_there_is_one(set_count: Callable[..., None], tmp_path: Path) -> None:
    kills = MemoryKills(tmp_path)
    older = kills.count()
    set_count(4, "max")
    assert kills.take_cause(older) == "the kernel killed it for lack of memory"
