"""The harness of bench/gpu on a CPU: planted faults fail its checks, which name them, and a lost device fails one item.

Faults are small changes of kernels, of tables of operations, and of the code around graphs. The checks run as in
`python -m moeserve.bench.gpu.run --rehearse`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from moeserve.bench.gpu import fake_device
from moeserve.bench.gpu.items import Setting, items_of, rehearsing
from moeserve.bench.gpu.parts import Part, run_part
from moeserve.ops import side_stream
from moeserve.ops.interfaces import Kernels
from moeserve.worker.cuda_graphs import TorchCapture

SETTING = Setting(1, lambda: 1.0, on_cpu=True)


@pytest.fixture
def table() -> Iterator[Kernels]:
    with rehearsing() as kernels:
        yield kernels


def check(name: str, kernels: Kernels) -> dict[str, Any]:
    return dataclasses.replace(SETTING, table=kernels).check(name, is_small=True)


# A kernel's module, the text of the right kernel, that of the wrong one, the check, and a result that it must name.
KERNEL_FAULTS = {
    "wrong scale of rows": (
        *("fp8", "scales = tl.div_rn(largest, largest_code)", "scales = tl.div_rn(largest, largest_code) * 1.0625"),
        *("products, fp8, Mixtral-8x7B", "multiply_rows"),
    ),
    "another expert's scales": (
        *("grouped_matmul", "weight_scale_ptr + expert.to(tl.int64)", "weight_scale_ptr + 0 * expert.to(tl.int64)"),
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
    "a window of one position more": (
        *("online_softmax", "tl.maximum(positions - WINDOW + 1, 0)"),
        *("tl.maximum(positions - WINDOW, 0)", "attention", "attend, small, windowed"),
    ),
    "a sink that is not in the sum": (
        *("online_softmax", "return share, total * share + tl.exp2(sink - shift)", "return share, total * share"),
        *("attention", "attend, small, windowed"),
    ),
    "another sign of the sine": (
        *("rotary", "rotated = second * cosines + first * sines", "rotated = second * cosines - first * sines"),
        *("rotary embedding and cache writes", "rotate_and_write"),
    ),
    "weights with the correction of the choice": (
        *("routing", "tl.sum(tl.where(is_best, scores, 0.0)), weights)"),
        *("tl.sum(tl.where(is_best, ranked, 0.0)), weights)", "routing", "route, DeepSeek-V3"),
    ),
    "one weight for all rows": (
        *("pairs", "tl.load(weights_ptr + row)", "tl.load(weights_ptr)", "pairs", "weigh"),
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
def test_fault_of_a_kernel_fails_its_check(
    fault: str, table: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, right, wrong, checked, named = KERNEL_FAULTS[fault]
    plant(importlib.import_module(f"moeserve.triton_kernels.{name}"), right, wrong, tmp_path, monkeypatch)
    row = check(checked, table)
    assert row["status"] == "failed"
    assert any(named in each for each in row["wrong"]), row


class Changed:
    """An object with one method that gets the original's as its first argument."""

    def __init__(self, right: Any, method: str, change: Callable[..., Any]) -> None:
        self._right = right
        setattr(self, method, lambda *args, **options: change(getattr(right, method), *args, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)


def stale_input(table: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Attention that keeps the lengths of the first step that it gets in some memory."""
    kept: dict[int, Tensor] = {}

    def attend(original: Any, query: Tensor, cache: Any, step: Any, sinks: Any = None) -> Tensor:
        lengths = kept.setdefault(id(step), step.context_lens.clone())
        result: Tensor = original(query, cache, dataclasses.replace(step, context_lens=lengths), sinks)
        return result

    make = table.make_attention
    return dataclasses.replace(table, make_attention=lambda shape: Changed(make(shape), "attend", attend))


def host_read(table: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """An order of pairs whose counts are read on the host."""

    def order(original: Any, *args: Any) -> tuple[Tensor, Tensor]:
        ordered, counts = original(*args)
        return ordered, torch.tensor(counts.tolist())

    return dataclasses.replace(table, pairs=Changed(table.pairs, "order", order))


def host_wait(table: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    def order(original: Any, *args: Any) -> tuple[Tensor, Tensor]:
        torch.cuda.synchronize()
        found: tuple[Tensor, Tensor] = original(*args)
        return found

    return dataclasses.replace(table, pairs=Changed(table.pairs, "order", order))


def wrong_stream(table: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """A side stream that does not wait for its input."""

    def start(self: Any, compute: Callable[[Tensor], Tensor], input: Tensor) -> side_stream.InStream:
        with torch.cuda.stream(self._stream):
            return side_stream.InStream(compute(input), self._stream)

    monkeypatch.setattr(side_stream.CudaSideStream, "start", start)
    return table


def early_wait(table: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """A side stream that waits for the stream of the capture before its input is computed, and not after."""

    def rms_norm(*args: Any, **options: Any) -> Tensor:
        table.side_stream._stream.wait_stream(torch.cuda.current_stream())  # type: ignore[attr-defined]
        return table.rms_norm(*args, **options)

    return wrong_stream(dataclasses.replace(table, rms_norm=rms_norm), monkeypatch)


def no_wait_for_a_result(table: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    monkeypatch.setattr(side_stream.InStream, "wait", lambda self: self.result)
    return table


def stale_output(table: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """A capture that returns a copy of the result, which replays do not write to."""
    capture = TorchCapture.__call__

    def copied(self: TorchCapture, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        replay, result = capture(self, run)
        return replay, dataclasses.replace(result, hidden_TD=result.hidden_TD.clone())

    monkeypatch.setattr(TorchCapture, "__call__", copied)
    return table


GRAPH_FAULTS: dict[Callable[[Kernels, pytest.MonkeyPatch], Kernels], str] = {
    stale_input: "replay",
    stale_output: "replay",
    host_read: "Tensor.tolist reads a tensor on the host",
    host_wait: "the host waits for the device",
    wrong_stream: "not part of the capture",
    early_wait: "uses memory of another stream without waiting for it",
    no_wait_for_a_result: "uses memory of another stream without waiting for it",
}


@pytest.mark.parametrize("fault", GRAPH_FAULTS, ids=lambda fault: fault.__name__)
def test_fault_around_a_graph_fails_its_check(
    fault: Callable[[Kernels, pytest.MonkeyPatch], Kernels], table: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = fault(table, monkeypatch)
    try:
        row = check("graphs", kernels)
    except RuntimeError as error:  # a CUDA error, after which a process is started again
        row = {"status": "failed", "wrong": [], "error": str(error)}
    assert row["status"] == "failed"
    assert GRAPH_FAULTS[fault] in " ".join([*row["wrong"], row.get("error", "")]), row


def test_right_graph_passes(table: Kernels) -> None:
    assert check("graphs", table)["status"] == "passed"


def test_streams_may_read_the_same_memory(table: Kernels) -> None:
    """Two streams read one tensor, and write to their own."""
    rows, side = torch.ones(3), fake_device.FakeStream()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            beside = rows + 1
        own = rows * 2
        torch.cuda.current_stream().wait_stream(side)
        total = own + beside
    rows.fill_(5)
    graph.replay()
    assert total.tolist() == [16.0] * 3


def test_stream_that_is_never_joined_is_refused(table: Kernels) -> None:
    rows, side = torch.ones(3), fake_device.FakeStream()

    def run() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                rows.add_(1)

    with pytest.raises(RuntimeError, match="unjoined"):
        run()


LOST_DEVICE = """
from moeserve.bench.gpu import cases, fake_device, parts
from moeserve.bench.gpu.check import Operation

def lost(source):
    fake_device.DEVICE.fail("an illegal memory access was encountered")

chosen = {"norms": cases.CASES["norms"], "lost": [Operation(lost, [()])], "routing": cases.CASES["routing"]}
cases.CASES.clear()
cases.CASES.update(chosen)
parts.main()
"""


def test_lost_device_fails_only_the_item_that_lost_it(tmp_path: Path) -> None:
    """Everything after the error would fail as well, so another process continues."""
    program = tmp_path / "program.py"
    program.write_text(LOST_DEVICE)
    lines: list[dict[str, Any]] = []
    command = [sys.executable, str(program), "--rehearse"]
    run_part(Part("checks", 1.0, num_processes=1), 200.0, 3, lines.append, (), command, dict(os.environ))
    rows = [line for line in lines if "name" in line]
    assert {row["name"]: row["status"] for row in rows} == {"norms": "passed", "lost": "failed", "routing": "passed"}
    (lost,) = (row for row in rows if row["name"] == "lost")
    assert "illegal memory access" in lost["log"]


def test_throughput_of_a_small_model(table: Kernels) -> None:
    """Time goes to kernels of ours that have a bound, in a model with latent attention, shared experts and graphs."""
    ((_, measure),) = items_of("throughput", SETTING)
    _, decode, prefill = measure()
    assert [row["status"] for row in (decode, prefill)] == ["measured"] * 2
    assert decode["bound"] > prefill["rate"] > 0
    named = {name for name in decode["step"]["bounds"] if name != "torch"}
    assert {"grouped_matmul_kernel", "attend_split_kernel"} <= named
    assert "the device is busy for" in decode["lines"][1]


def test_sticky_error_fails_every_later_launch(table: Kernels) -> None:
    with pytest.raises(RuntimeError, match="misaligned"):
        fake_device.DEVICE.fail("misaligned address")
    for name in ("norms", "graphs"):
        with pytest.raises(RuntimeError, match="misaligned"):
            check(name, table)


def test_cut_run_leaves_valid_lines(tmp_path: Path) -> None:
    """A run that is killed when its first row is there has written the environment and this row."""
    path = tmp_path / "gpu.jsonl"
    command = [sys.executable, "-m", "moeserve.bench.gpu.run", "--rehearse", "--only", "checks", "--json", str(path)]
    process = subprocess.Popen(
        [*command, "--commit", "abc123"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert any("passed" in line for line in process.stdout)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    start, *rows = map(json.loads, path.read_text().splitlines())
    assert {row["kind"] for row in rows} <= {"row", "finished"}
    assert rows[0]["status"] == "passed"
    found = start["environment"]
    assert found["commit"] == "abc123"
    assert found["gpu"]["isa"] == "sm_90"
    assert {"torch", "triton", "transformers"} <= set(found["versions"])
