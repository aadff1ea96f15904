"""The GPU benchmark without a GPU: bounds of steps, comparisons of engines, processes of parts, runs, and the page."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moeserve.bench.gpu import engine, limits, models, page, run, throughput
from moeserve.bench.gpu.parts import PARTS, Job, Part, run_part
from moeserve.config.validation import parse_settings

JOB = Job("checks", 7)


def test_work_of_steps_of_mixtral_by_hand(tmp_path: Path) -> None:
    """A token reads 2 of 8 experts; 4096 tokens read all, and attend to half of the pairs."""
    models.write_config(tmp_path, models.published("Mixtral-8x7B", 2))
    attention, expert, router = 4096 * (2 * 4096 + 2 * 1024), 3 * 4096 * 14336, 8 * 4096
    position, head, norms = 2 * 8 * 128 * 2, 32000 * 4096, 5 * 4096
    work = throughput.work_of(tmp_path, [(1, 8192)], None)
    weights = 2 * (attention + 2 * expert + router) + head + norms
    assert work.num_bytes == pytest.approx(2 * weights + 2 * 8192 * position, rel=1e-6)
    work = throughput.work_of(tmp_path, [(4096, 4096)], "fp8")
    products = 2 * (4096 * 2 * (attention + 2 * expert + router) + head)
    assert work.operations == pytest.approx(products + 2 * 4 * 32 * 128 * 4096 * 4097 / 2, rel=1e-3)


def test_layers_are_left_out_where_they_do_not_fit() -> None:
    layer = 2 * (8 * 3 * 4096 * 14336 + 4096 * (2 * 4096 + 2 * 1024) + 2 * 4096) + 4 * 8 * 4096  # float32 routers
    outside = 2 * (2 * 32000 * 4096 + 4096)
    fitting = {outside + 5 * layer: 5, outside + 5 * layer - 1: 4, 0: 2, 10**15: 32}
    assert {size: throughput.layers_that_fit("Mixtral-8x7B", size) for size in fitting} == fitting


def test_engine_may_be_as_far_from_float32_as_transformers_is() -> None:
    exact = torch.tensor([-1.0, -2.0])
    rounded, best = exact + torch.tensor([0.01, -0.01]), exact + torch.tensor([0.0, 0.05])
    assert engine.figures(exact + 0.02, rounded, exact, best)["wrong"] == []
    for wrong in (exact + 0.04, exact * float("nan")):
        assert len(engine.figures(wrong, rounded, exact, best)["wrong"]) == 1
    assert engine.figures(exact, rounded, exact, best + 0.05)["wrong"], "another token is more likely"
    assert engine.figures(exact, exact, exact, best)["wrong"], "in float32 the tokens must be the best"


def test_comparisons_are_valid_and_each_process_has_one_checkpoint_and_dtype() -> None:
    comparisons = engine.COMPARISONS
    assert len({comparison.name for comparison in comparisons}) == len(comparisons)
    for share in range(PARTS["engine"].num_processes):
        of_process = comparisons[share :: PARTS["engine"].num_processes]
        assert len({(each.family, each.dtype) for each in of_process if len(each.lengths) == 4}) == 1
    for each in comparisons:
        parse_settings(dict(each.settings))
    assert {each.family for each in engine.COMPARISONS} == set(engine.FAMILIES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_is_compared_with_transformers(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (comparison,) = (each for each in engine.COMPARISONS if each.name == f"Mixtral, {dtype}, graphs")
    found = []
    generate = engine.generate
    monkeypatch.setattr(engine, "generate", lambda *args: found.append(generate(*args)) or found[0])
    row = engine.compare(comparison, "cpu", 3)
    assert (row["status"], row["wrong"]) == ("passed", []), row
    tokens, logprobs = found[0]
    assert tokens.shape == (len(comparison.lengths), comparison.num_tokens)
    tokens[0] = (tokens[0] + 1) % 160
    monkeypatch.setattr(engine, "generate", lambda *args: (tokens, logprobs))
    assert engine.compare(comparison, "cpu", 3)["status"] == "failed"


# Items of processes 0 to 7. Each fault is one of an item, except the last one.
PROGRAM = """
import json, os, signal, subprocess, sys, time
from moeserve.bench.gpu.parts import Job, work_through

job = Job(**json.loads(sys.stdin.readline()))

def passes():
    yield {"status": "passed", "seed": job.seed}

def fails(error, before=()):
    def run():
        yield from before
        raise error
    return run

def dies():
    print("a fault", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    yield

def exits():
    os._exit(0)
    yield

def hangs_with_a_process():
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)
    yield

def is_wrong():
    yield {"status": "failed", "wrong": ["rms_norm, 1 x 4096"]}

shares = [
    {"plain error": fails(ValueError("oh")), "wrong result": is_wrong},
    {"killed": dies},
    {"device lost": fails(RuntimeError("CUDA error: misaligned address"))},
    {"competitor lost the device": fails(RuntimeError("CUDA error: illegal"), [{"status": "measured"}])},
    {"hangs": hangs_with_a_process},
    {"error after another row": fails(KeyError("key"), [{"name": "another row", "status": "passed"}])},
    {"exits": exits},
    {},
]
if job.share == 7:
    raise ImportError("no such module")
own = [*shares[job.share].items(), (f"after {job.share}", passes)]
items = [("", None)] * job.num_shares * len(own)
items[job.share :: job.num_shares] = own
work_through([item for item in items if job.match in item[0]] if job.match else items, job)
"""
FAULTS = {  # an item, and what its row must say
    "plain error": "ValueError: oh",
    "wrong result": "rms_norm, 1 x 4096",
    "killed": "exit code -9",
    "device lost": "misaligned address",
    "competitor lost the device, after its result": "illegal",
    "hangs": "did not end within 3 s",
    "error after another row": "KeyError",
    "exits": "exit code 0",
    "a process of checks": "no such module",
}


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return sys.executable, str(path)


def test_each_fault_is_named_and_fails_one_item(program: tuple[str, ...]) -> None:
    found: list[dict[str, Any]] = []
    part = Part("checks", "cases", 60, num_processes=8, item_seconds=3)
    run_part(part, 60.0, JOB, found.append, program)
    rows = {row["name"]: row for row in found if "name" in row}
    failed = {name: row for name, row in rows.items() if row["status"] == "failed"}
    assert set(failed) == set(FAULTS)
    for name, reason in FAULTS.items():
        assert reason in json.dumps(failed[name]), name
    passed = {name for name, row in rows.items() if row["status"] == "passed"}
    assert passed == {*(f"after {share}" for share in range(7)), "another row"}
    assert rows["competitor lost the device"]["status"] == "measured"
    assert rows["after 0"]["seed"] == 7
    ended = {row["finished"] for row in found if "finished" in row}
    assert ended == {row["item"] for row in found if "item" in row} - {"a process of checks"}
    found.clear()
    run_part(part, 60.0, dataclasses.replace(JOB, finished=tuple(ended - {"after 1"})), found.append, program)
    assert [row["name"] for row in found if row.get("status") == "passed"] == ["after 1"]


@pytest.mark.slow
def test_items_that_do_not_begin_are_left_out(program: tuple[str, ...]) -> None:
    found: list[dict[str, Any]] = []
    run_part(Part("checks", "cases", 8, 5, item_seconds=60), 8.0, JOB, found.append, program)
    rows = {row["name"]: row for row in found if "name" in row}
    assert {rows[name]["status"] for name in ("hangs", "after 4")} == {"left out"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_one_sentence() -> None:
    command = [sys.executable, "-m", "moeserve.bench.gpu.run"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(("name", "version"), [("torch", "2.10.1"), ("triton", ""), ("transformers", "4.57.1")])
def test_why_it_cannot_run(name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.11.0+cu130", "triton": "3.5.0", "transformers": "5.0.0"}
    monkeypatch.setattr(run, "installed_version", versions.__getitem__)
    monkeypatch.setattr(run, "count_gpus", lambda: 0)
    assert "is_available" in str(run.why_not(needs_gpu=True))
    assert run.why_not(needs_gpu=False) is None, "compiling needs no GPU"
    versions[name] = version
    assert f"{name} {version}".strip() in str(run.why_not(needs_gpu=False))


class Runs:
    """Runs of the benchmark whose parts are played."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.asked: list[Job] = []
        self.seconds: dict[str, float] = {}
        self.results: dict[str, list[dict[str, Any]]] = {}  # rows by item of `checks`; `steps` has the first one
        self.environment: dict[str, Any] = {"gpu": {"name": "No GPU 9000"}, "versions": {}, "commit": "abc"}
        monkeypatch.setattr(run, "why_not", lambda needs_gpu: None)
        monkeypatch.setattr(limits, "gpu_environment", lambda commit, has_gpu: self.environment)
        monkeypatch.setattr(run, "run_part", self._take)

    def _take(self, part: Part, seconds: float, job: Job, report: Any, **_: Any) -> None:
        self.asked.append(job)
        self.seconds[part.name] = seconds
        items = {"checks": list(self.results), "steps": list(self.results)[:1]}.get(part.name, [])
        for item in [item for item in items if item not in job.finished]:
            for row in self.results[item]:
                report({"name": item, "item": item} | row)
            if not all(row["status"] == "left out" for row in self.results[item]):
                report({"finished": item})

    def __call__(self, *arguments: str) -> int:
        self.asked.clear()
        return run.main([*arguments, "--json", str(self.path)])

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path / "gpu.jsonl", monkeypatch)


def test_later_runs_repeat_failures_and_measurements(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = {"status": "passed", "lines": ["4 cases"]}, {"status": "failed", "wrong": ["rms_norm, 1 x 4096"]}
    late = {"status": "left out", "reason": "no time was left"}
    runs.results = {"good": [good], "bad": [good, {"name": "second row"} | bad], "late": [late]}
    assert runs("--seed", "5", "--seconds", "350") == 1
    assert [job.part for job in runs.asked] == list(PARTS)
    for name, part in PARTS.items():  # parts that end early leave their time to later ones
        assert runs.seconds[name] >= part.seconds / 2 - 1
    printed = capsys.readouterr().out
    for fact in ("4 cases", "rms_norm, 1 x 4096", "No GPU 9000, commit abc, seed 5", "failed: second row", "late"):
        assert fact in printed
    assert runs() == 1, "an earlier failure counts"
    assert {job.seed for job in runs.asked} == {5}
    assert runs.asked[1].finished == ("bad", "good")

    runs.environment["commit"] = "mended"
    runs.results |= {"bad": [good], "late": [good]}
    assert runs("--retry") == 0
    finished = {job.part: job.finished for job in runs.asked}
    assert finished["checks"] == ("good",), "of another commit"
    assert finished["steps"] == ()
    assert "failed: nothing" in capsys.readouterr().out
    runs("--only", "steps", "--only", "checks", "--seconds", "18")
    assert {job.part: job.finished for job in runs.asked} == {"steps": ("good",), "checks": ("bad", "late")}, (
        "of this commit"
    )
    runs("--retry", "--seed", "6")
    assert not any(job.finished for job in runs.asked), "another seed repeats everything"
    start = runs.lines()[0]
    assert (start["kind"], start["environment"]["gpu"]) == ("start", runs.environment["gpu"])


@pytest.mark.slow
def test_run_that_is_killed_at_any_moment_is_continued(tmp_path: Path) -> None:
    """Runs are killed after some lines of output, and their last line is cut off. The last run completes the items."""
    path, draw, before = tmp_path / "gpu.jsonl", random.Random(1), []
    options = [
        "--rehearse",
        "--only",
        "checks",
        "--seconds",
        "300",
        "--match",
        "or",
        "--json",
        str(path),
        "--commit",
        "abc123",
    ]
    command = [sys.executable, "-m", "moeserve.bench.gpu.run", *options]
    for awaited in ("checks: ", "passed", "passed"):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        assert any(awaited in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        text = path.read_text()
        assert text.splitlines()[: len(before)] == before, "the file was valid, and is continued"
        path.write_text(text[: -draw.randrange(1, 30)])
        before = path.read_text().splitlines()[:-1]
    assert subprocess.run(command, capture_output=True, timeout=400, check=False).returncode == 0
    assert path.read_text().splitlines()[: len(before)] == before
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = {line["name"]: line["status"] for line in lines if line["kind"] == "row"}
    assert rows == {"norms": "passed", "short convolutions": "passed"}
    ended = [line["finished"] for line in lines if line["kind"] == "finished"]
    assert sorted(ended) == sorted(rows), "each item ended once"
    assert {line["commit"] for line in lines} == {"abc123"}
    assert {"torch", "triton", "transformers"} <= set(lines[0]["environment"]["versions"])


@pytest.mark.parametrize("content", ["", "no JSON"])
def test_page_reads_files_of_any_kind(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    assert page.main([str(path)]) == 1
    path.write_text(content)
    assert page.main([str(path)]) == 1
    assert capsys.readouterr().err.count(f"error: {path}") == 2


def test_page_names_the_largest_terms_and_the_last_results() -> None:
    common = {"part": "throughput", "commit": "abc", "seed": 1, "run": 1, "kind": "row", "status": "measured"}
    terms = {"products": 6e-3, "attend": 1e-3, "the device waits": 3e-3}
    step = {"name": "decode", "item": "m", "step": {"seconds": 10e-3, "terms": terms}, "fraction_of_bound": 0.5}
    old = {"name": "prefill", "item": "m", "fraction_of_bound": 0.25}
    end = common | {"kind": "end", "environment": {"gpu": {"name": "a GPU"}}}
    lines = page.page([common | old, common | step | {"run": 2}, end]).splitlines()
    assert "60%" in lines[1]
    assert "products in decode" in lines[1]
    assert "the device waits" in lines[2]
    assert not any("prefill" in line for line in lines), "a row of an earlier run of this item"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "DeepSeek-V2-Lite"])
def test_throughput_of_a_tiny_model_on_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle time of a step is the rest of its time without the profiler."""
    monkeypatch.setattr(throughput, "rate_measure", lambda kind, generate, workload: lambda: 100.0 * workload.batch)
    monkeypatch.setattr(throughput, "kernel_seconds", lambda *args: {"matmul": 2e-3, "attend": 5e-3})
    limits_row, decode, prefill = throughput.measure(throughput.Model(name), lambda: 100.0, on_cpu=True)
    assert limits_row["limits"]["copy_bandwidth"] > 0
    assert decode["name"] == f"{name}, decode, 2 x 3, sampled"
    assert decode["step"]["terms"] == {throughput.WAITS: pytest.approx(3e-3), "matmul": 2e-3, "attend": 5e-3}
    assert decode["bound"] > 0
    assert prefill["name"] == f"{name}, prefill of 5"
    assert "step" not in prefill
    _, *late = throughput.measure(throughput.Model(name), lambda: 0.0, on_cpu=True)
    assert {row["status"] for row in late} == {"left out"}
    assert json.dumps([decode, prefill, *late], allow_nan=False)


def test_time_of_a_call_excludes_the_cache_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(limits.ColdTimer, "flush", lambda self: calls.append(4e-5))

    def replay(call: Any) -> float:
        calls.clear()
        call()
        return sum(calls)

    monkeypatch.setattr(limits, "replay_seconds", replay)
    assert limits.ColdTimer(torch.device("cpu"))(lambda: calls.append(3e-6)) == pytest.approx(3e-6, rel=1e-6)
