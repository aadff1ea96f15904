"""`moeserve bench day`: no request is lost while an engine is replaced, and what it counts."""

from __future__ import annotations

import collections
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import save_tiny_model

from moeserve.bench import day

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_requests_are_eight_times_as_many_at_the_busiest_hour() -> None:
    hours = day.draw_hours(100_000, random.Random(0))
    assert hours == sorted(hours)
    assert 0 <= hours[0] < hours[-1] < day.HOURS
    # Two hours around each extreme, over which the rate hardly changes.
    busy, quiet = (sum(abs(hour - extreme) < 1 for hour in hours) for extreme in (15, 3))
    assert busy / quiet == pytest.approx(8, rel=0.1)


def test_what_a_tree_of_processes_holds() -> None:
    program = """
import subprocess, sys, threading
files = [open("/dev/null") for _ in range(40)]
for _ in range(5):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
block = bytearray(b"x") * 2**25
if len(sys.argv) == 1:
    command = [sys.executable, "-c", sys.orig_argv[2], "child"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
print(flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        parts = [day.holdings(folder) for folder in day.process_tree(process.pid)]
        process.kill()
    assert len(parts) == 2
    for part in parts:
        assert part.threads == 6
        assert 43 <= part.files <= 43 + 5
        assert 2**25 < part.memory < 2**25 + 2**26


@pytest.mark.slow
def test_no_request_is_lost_while_an_engine_is_replaced(tmp_path: Path) -> None:
    model, path, picture = save_tiny_model(tmp_path / "model"), tmp_path / "rows.jsonl", tmp_path / "day.svg"
    load = ["--traffic", "20:1500", "--requests", "120", "--minutes", "0.6", "--vocab-size", "200"]
    assert day.main(["--model", str(model), *load, "--json", str(path), "--plot", str(picture)]) == 0
    row = json.loads(path.read_text())
    assert (row["requests"], row["failures"]) == (120, [])
    assert sum(hour["requests"] for hour in row["hours"]) == 120
    held = collections.Counter(
        name for hour in row["hours"] for name in hour if name in ("router", "engine 1", "engine 2")
    )
    assert held["router"] == held["engine 2"] == day.HOURS
    assert "engine 1" in row["hours"][0]
    assert "<svg" in picture.read_text()
