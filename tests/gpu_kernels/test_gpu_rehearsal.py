"""The GPU benchmark on a CPU: its checks name planted faults of kernels, and a run that was killed is continued."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from triton.runtime.interpreter import InterpretedFunction

from moeserve.bench.gpu import items
from moeserve.bench.gpu.parts import Job
from moeserve.bench.gpu.rehearsal import rehearsing

JOB = Job("checks", 1, on_cpu=True, is_small=True)


# A kernel's module, the text of the right kernel, that of the wrong one, the check, and a result that it must name.
KERNEL_FAULTS = {
    "wrong scale of rows": (
        *("fp8", "scales = tl.div_rn(largest, largest_code)", "scales = tl.div_rn(largest, largest_code) * 1.0625"),
        *("products, fp8, Mixtral-8x7B", "multiply_rows"),
    ),
    "no causal mask": (
        *("online_softmax", "is_visible = columns[None, :] <= positions[:, None]"),
        *("is_visible = columns[None, :] < end + 0 * positions[:, None]", "attention", "attend"),
    ),
    "no mask of unread positions": (
        *("online_softmax", "is_read = (columns >= first) & (columns < end)", "is_read = columns >= 0"),
        *("attention", "attend"),
    ),
    "another sign of the sine": (
        *("rotary", "rotated = second * cosines + first * sines", "rotated = second * cosines - first * sines"),
        *("rotary embedding and cache writes", "rotate_and_write"),
    ),
    "weights with the correction of the choice": (
        *("routing", "tl.sum(tl.where(is_best, scores, 0.0)), weights)"),
        *("tl.sum(tl.where(is_best, ranked, 0.0)), weights)", "routing", "route, DeepSeek-V3"),
    ),
    "an addition that is not in the norm": (
        *("rms_norm", "x = rounded.to(tl.float32)", "x = x", "norms", "add_rms_norm"),
    ),
}  # fmt: skip


def plant(module: ModuleType, right: str, wrong: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels of a module by those of its changed source."""
    text = Path(str(module.__file__)).read_text()
    assert right in text, "the kernel has changed: plant another fault"
    path = folder / f"planted_{module.__name__.rpartition('.')[2]}.py"
    path.write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, changed)
    spec.loader.exec_module(changed)
    for name, value in list(vars(module).items()):
        if isinstance(value, InterpretedFunction) and value.fn.__module__ == module.__name__:
            for other in [each for key, each in sys.modules.items() if key.startswith("moeserve.triton_kernels")]:
                if getattr(other, name, None) is value:
                    monkeypatch.setattr(other, name, getattr(changed, name))


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_fault_of_a_kernel_fails_its_check(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, right, wrong, checked, named = KERNEL_FAULTS[fault]
    plant(importlib.import_module(f"moeserve.triton_kernels.{name}"), right, wrong, tmp_path, monkeypatch)
    with rehearsing():
        row = items.check(JOB, checked)
    assert row["status"] == "failed"
    assert any(named in each for each in row["wrong"]), row


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
