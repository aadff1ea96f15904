"""Cores and memory, with and without a container around the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moeserve import machine


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cgroup of version 2 inside another, as if this process were in it."""
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    read_text = Path.read_text

    def pretend(path: Path, *arguments: str, **options: str) -> str:
        return "0::/outer/inner\n" if str(path) == "/proc/self/cgroup" else read_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", pretend)
    return folder


def limit(folder: Path, maximum: str, current: int, cached: int) -> None:
    (folder / "memory.max").write_text(f"{maximum}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon {current - cached}\ninactive_file {cached}\n")


def test_without_a_container_the_limits_are_those_of_the_machine() -> None:
    assert 2**20 < machine.free_memory() < 2**50
    assert 1 <= machine.usable_cores() <= (os.cpu_count() or 1)


def test_files_cached_for_reading_are_free(cgroup: Path) -> None:
    limit(cgroup, "30000000", current=29_000_000, cached=20_000_000)
    assert machine.free_memory() == 21_000_000


def test_the_tightest_of_nested_limits_counts(cgroup: Path) -> None:
    limit(cgroup, "max", current=0, cached=0)
    limit(cgroup.parent, "5000000", current=4_000_000, cached=0)
    assert machine.free_memory() == 1_000_000
    limit(cgroup, "4100000", current=4_000_000, cached=0)
    assert machine.free_memory() == 100_000


def test_a_container_over_its_limit_has_nothing_left(cgroup: Path) -> None:
    limit(cgroup, "1000", current=2000, cached=0)
    assert machine.free_memory() == 0


def test_a_container_limits_the_cores(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert machine.usable_cores() == 8
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert machine.usable_cores() == 8
    (cgroup / "cpu.max").write_text("250000 100000\n")
    assert machine.usable_cores() == 2
    (cgroup / "cpu.max").write_text("50000 100000\n")
    assert machine.usable_cores() == 1
