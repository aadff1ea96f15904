"""Cores and memory of this machine, with and without limits on the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moeserve import machine


def test_without_a_container_the_limits_are_those_of_the_machine() -> None:
    assert 2**20 < machine.free_memory() < 2**50
    assert machine.free_memory(4) < machine.free_memory()
    assert 1 <= machine.usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(("quota", "num_cores"), [(None, 8), (12.0, 8), (7.65, 7), (2.0, 2), (0.5, 1)])
def test_a_quota_limits_the_cores(quota: float | None, num_cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert machine.usable_cores() == num_cores


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_resource_limit_of_the_process_is_a_limit_on_its_memory(limit: str) -> None:
    """Half of what is left is allocated, and counts afterwards. Ranks do not share the limit, so it is not divided."""
    code = f"""if True:
        import resource
        from moeserve.machine import free_memory, resource_limits
        assert resource_limits() == []
        resource.setrlimit(resource.{limit}, (300 * 2**20, 300 * 2**20))
        before = free_memory(1)
        held = bytearray(before // 2)
        print(before, free_memory(1), free_memory(2), *resource_limits())
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    before, after, of_two, *shown = run.stdout.split()
    assert 100 * 2**20 < int(before) < 300 * 2**20
    assert int(after) == int(of_two) == pytest.approx(int(before) / 2, rel=0.1)
    assert f"({limit})" in shown
