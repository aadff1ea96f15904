"""A run of the GPU benchmark on a CPU that was killed is continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_killed_run_is_continued(tmp_path: Path) -> None:
    """A run is killed when its first row is there. The second run completes the items that had not ended."""
    path = tmp_path / "gpu.jsonl"
    options = ["--rehearse", "--parts", "checks:300", "--match", "or", "--json", str(path), "--commit", "abc123"]
    command = [sys.executable, "-m", "moeserve.bench.gpu.run", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert any("passed" in line for line in process.stdout)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    before = lines_of(path)
    start, first, *_ = before
    assert first["status"] == "passed"
    assert start["commit"] == start["environment"]["commit"] == "abc123"
    assert {"torch", "triton", "transformers"} <= set(start["environment"]["versions"])
    ended = {line["finished"] for line in before if line["kind"] == "finished"}
    assert subprocess.run(command, capture_output=True, timeout=400, check=False).returncode == 0
    lines = lines_of(path)
    assert lines[: len(before)] == before
    rows = [line for line in lines[len(before) :] if line["kind"] == "row"]
    assert {row["name"] for row in rows} == {"norms", "short convolutions"} - ended
    assert {line["finished"] for line in lines if line["kind"] == "finished"} == {"norms", "short convolutions"}
