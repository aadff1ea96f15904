"""Finds the processes of an engine's ranks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable

import psutil

from moeserve import LLM


def is_rank(process: psutil.Process) -> bool:
    """True if it is the process of an engine's rank: those are named "rank 3", or as Ray names their actors."""
    return process.name().startswith(("rank ", "ray::RankActor"))


def living_ranks(of: int | None = None) -> list[psutil.Process]:
    """Return the living processes of ranks that descend from a process (None: from this one)."""
    found = []
    for process in psutil.Process(of).children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and is_rank(process):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def shared_memory_of(pids: Iterable[int]) -> list[str]:
    """Return the files in /dev/shm that belong to moeserve or to these processes, and stay there."""
    numbers = set(map(str, pids))  # whole ones: the names of Ray's files have long numbers

    def found() -> set[str]:
        # An OpenMP library leaves files of killed processes, whose numbers others may get.
        names = [name for name in os.listdir("/dev/shm") if not name.startswith("__KMP_")]
        return {name for name in names if "moeserve" in name or numbers & set(re.findall(r"\d+", name))}

    left = found()
    if left:
        time.sleep(1.0)  # ranks of other tests that run now have files with names for a moment
        left &= found()
    return sorted(left)


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(processes: list[psutil.Process], seconds: float = 60.0) -> None:
    """A process that has ended may take a moment until the last of its threads has."""
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if lives(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def free_blocks(llm: LLM, expected: int) -> list[int]:
    """Return the free blocks of each replica, once all have `expected` or much time has passed."""
    assert not llm.core.has_work
    deadline = time.monotonic() + 200
    while True:
        free: list[int] = llm.core.num_free_blocks  # type: ignore[attr-defined]
        if {*free} == {expected} or time.monotonic() > deadline:
            return free
        time.sleep(0.02)
