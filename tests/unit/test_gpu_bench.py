"""The GPU benchmark without a GPU: its work counts, comparisons of engines, processes of parts, runs, and texts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moeserve.bench.gpu import costs, engine, limits, page, run, throughput
from moeserve.bench.gpu.costs import Bar, GpuLimits, LatentShape, MoEShape, Work, attention_shape
from moeserve.bench.gpu.parts import PARTS, Job, Part, run_part
from moeserve.config.validation import parse_settings

LIMITS = GpuLimits(copy_bandwidth=1e12, bf16_rate=4e14, fp8_rate=8e14)  # easy to divide by
JOB = Job("checks", 7)


@pytest.mark.parametrize("has_bias", [False, True])
def test_work_of_experts(has_bias: bool) -> None:
    """3 tokens, each with 2 of 4 experts; 2 experts have rows. 256 wide, experts of 200."""
    shape = MoEShape(num_experts=4, hidden=256, width=200, top_k=2, has_bias=has_bias)
    work = costs.experts_work(shape, num_tokens=3, num_hit=2, format="bf16")
    assert work.num_bytes == 2 * 3 * 256 * 200 * 2 + 3 * (256 + 256) * 2 + has_bias * 2 * (400 + 256) * 2
    assert work.operations == 2 * 3 * 2 * 3 * 256 * 200
    work = costs.experts_work(shape, num_tokens=3, num_hit=2, format="fp8")
    assert work.num_bytes == 2 * 3 * (256 * 200 + 4 * 2 * 2) + 3 * (256 + 256) * 2  # scales of 2 x 2 blocks


def test_work_of_attention() -> None:
    """4 query heads, 2 of keys and values, 8 wide; a row after 9 others, and 3 rows of a prompt."""
    work = costs.attention_work(attention_shape(4, 2, 8), [(1, 10), (3, 3)])
    assert work.num_bytes == (10 + 3) * 2 * 2 * 8 * 2 + (1 + 3) * 2 * 4 * 8 * 2
    assert work.operations == 4 * 4 * 8 * (10 + 1 + 2 + 3)
    work = costs.attention_work(attention_shape(4, 2, 8, window=2), [(1, 10), (3, 7)])
    assert work.num_bytes == (2 + 4) * 2 * 2 * 8 * 2 + (1 + 3) * 2 * 4 * 8 * 2
    work = costs.attention_work(LatentShape(num_heads=100, latent_size=16, rotary_size=4), [(1, 10)])
    assert work.num_bytes == 10 * 20 * 2 + 100 * (20 + 16) * 2  # vectors of 16 + 4


def test_bounds_and_bars() -> None:
    assert Work(2e9, 4e11).memory_seconds(LIMITS) == Work(2e9, 4e11).bound_seconds(LIMITS) == 2e-3
    assert Work(2e9, 4e12).bound_seconds(LIMITS) == 1e-2
    assert Work(2e9, 4e12, "fp8").bound_seconds(LIMITS) == 5e-3
    figure = "fraction_of_memory_bound"
    for reached, is_met in ((0.70, True), (0.699, False), (None, False)):
        verdict = Bar(figure, 0.70).verdict({} if reached is None else {figure: reached})
        assert (verdict["reached"], verdict["is_met"]) == (reached, is_met)


def test_work_of_steps_of_mixtral_by_hand(tmp_path: Path) -> None:
    """A token reads 2 of 8 experts; 4096 tokens read all, and attend to half of the pairs."""
    throughput.published("Mixtral-8x7B").write(tmp_path, 2)
    attention, expert, router = 4096 * (2 * 4096 + 2 * 1024), 3 * 4096 * 14336, 8 * 4096
    position = 2 * 8 * 128 * 2
    head, norms = 32000 * 4096, 5 * 4096
    work = throughput.work_of(tmp_path, [(1, 8192)], None)
    weights = 2 * (attention + 2 * expert + router) + head + norms
    assert work.num_bytes == pytest.approx(2 * weights + 2 * 8192 * position, rel=1e-6)
    work = throughput.work_of(tmp_path, [(4096, 4096)], "fp8")
    pairs = 4096 * 4097 / 2
    products = 2 * (4096 * 2 * (attention + 2 * expert + router) + head)
    assert work.operations == pytest.approx(products + 2 * 4 * 32 * 128 * pairs, rel=1e-3)
    assert work.format == "fp8"


def test_layers_are_left_out_where_they_do_not_fit() -> None:
    layer = 2 * (8 * 3 * 4096 * 14336 + 4096 * (2 * 4096 + 2 * 1024) + 2 * 4096) + 4 * 8 * 4096  # float32 routers
    outside = 2 * (2 * 32000 * 4096 + 4096)
    fitting = {outside + 5 * layer: 5, outside + 5 * layer - 1: 4, 0: 2, 10**15: 32}
    mixtral = throughput.published("Mixtral-8x7B")
    assert {size: throughput.layers_that_fit(mixtral, size) for size in fitting} == fitting


def test_engine_may_be_as_far_from_float32_as_transformers_is() -> None:
    exact = torch.tensor([-1.0, -2.0])
    assert engine.figures(exact + 0.02, exact + torch.tensor([0.01, -0.01]), exact)["wrong"] == []
    for wrong in (exact + 0.04, exact * float("nan")):
        assert engine.figures(wrong, exact + 0.01, exact)["wrong"]


def test_comparisons_are_valid_and_each_process_has_one_checkpoint_and_dtype() -> None:
    for name, comparisons in (("engine", engine.COMPARISONS), ("ranks", engine.RANK_COMPARISONS)):
        assert len({comparison.name for comparison in comparisons}) == len(comparisons)
        for share in range(PARTS[name].num_processes):
            of_process = comparisons[share :: PARTS[name].num_processes]
            assert len({(each.family, each.dtype) for each in of_process if not each.model}) == 1
        for each in comparisons:
            parse_settings(dict(each.settings))
    assert {each.family for each in engine.COMPARISONS} == set(engine.FAMILIES)


@pytest.mark.parametrize("variant", ["float32, graphs", "bfloat16, graphs", "float32, dp=2, in halves"])
def test_engine_is_compared_with_transformers(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = [*engine.COMPARISONS, *engine.RANK_COMPARISONS]
    (comparison,) = (each for each in comparisons if each.name == f"Mixtral, {variant}")
    found = []
    generate = engine.generate
    monkeypatch.setattr(engine, "generate", lambda *args: found.append(generate(*args)) or found[0])
    row = engine.compare(comparison, "cpu", 3)
    assert (row["status"], row["wrong"]) == ("passed", []), row
    tokens, logprobs = found[0]
    assert tokens.shape == (len(engine.PROMPTS.lengths), engine.PROMPTS.num_tokens)
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

def hangs():
    time.sleep(600)
    yield

def leaves_a_process():
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)
    yield

def is_wrong():
    yield {"status": "failed", "wrong": ["rms_norm, 1 x 4096"]}

shares = [
    {"plain error": fails(ValueError("oh")), "wrong result": is_wrong},
    {"killed": dies},
    {"device lost": fails(RuntimeError("CUDA error: misaligned address"))},
    {"no memory": fails(MemoryError("out of memory"))},
    {"competitor lost the device": fails(RuntimeError("CUDA error: illegal"), [{"status": "measured"}])},
    {"hangs": hangs},
    {"hangs with a process": leaves_a_process},
    {"error after another row": fails(KeyError("key"), [{"name": "another row", "status": "passed"}])},
    {"exits": exits},
    {},
]
if job.share == 9:
    raise ImportError("no such module")
items = [*shares[job.share].items(), (f"after {job.share}", passes)]
left = [item for item in items if item[0] not in job.finished and job.match in item[0]]
work_through(left, job.num_begun, job.seconds_left)
"""
FAULTS = {  # an item, and what its row must say
    "plain error": "ValueError: oh",
    "wrong result": "rms_norm, 1 x 4096",
    "killed": "exit code -9",
    "device lost": "misaligned address",
    "no memory": "MemoryError",
    "competitor lost the device, after its result": "illegal",
    "hangs": "did not end within 3 s",
    "hangs with a process": "did not end within 3 s",
    "error after another row": "KeyError",
    "exits": "exit code 0",
    "a process of checks": "no such module",
}


def test_each_fault_is_named_and_fails_one_item(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found: list[dict[str, Any]] = []
    part = Part("checks", num_processes=10, item_seconds=3)
    run_part(part, 60.0, JOB, found.append, (sys.executable, str(program)))
    rows = {row["name"]: row for row in found if "name" in row}
    failed = {name: row for name, row in rows.items() if row["status"] == "failed"}
    assert set(failed) == set(FAULTS)
    for name, reason in FAULTS.items():
        assert reason in json.dumps(failed[name]), name
    passed = {name for name, row in rows.items() if row["status"] == "passed"}
    assert passed == {*(f"after {share}" for share in range(9)), "another row"}
    assert rows["competitor lost the device"]["status"] == "measured"
    assert rows["after 0"]["seed"] == 7
    ended = {row["finished"] for row in found if "finished" in row}
    assert ended == {row["item"] for row in found if "item" in row} - {"a process of checks"}
    found.clear()
    job = dataclasses.replace(JOB, finished=tuple(ended - {"after 1"}), match="after")
    run_part(part, 60.0, job, found.append, (sys.executable, str(program)))
    assert [row["name"] for row in found if row.get("status") == "passed"] == ["after 1"]


def test_items_that_do_not_begin_are_left_out(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found: list[dict[str, Any]] = []
    run_part(Part("checks", 6, item_seconds=60), 8.0, JOB, found.append, (sys.executable, str(program)))
    rows = {row["name"]: row for row in found if "name" in row}
    assert {rows[name]["status"] for name in ("hangs", "after 5")} == {"left out"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_one_sentence() -> None:
    command = [sys.executable, "-m", "moeserve.bench.gpu.run", "first"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"torch": "2.10.1", "triton": "3.5.0", "transformers": "5.0.0"}, "torch 2.10.1"),
        ({"torch": "2.11.0+cu130", "triton": "", "transformers": "5.0.0"}, "triton"),
        ({"torch": "2.11.0", "triton": "3.5.0", "transformers": "5.0.0"}, "is_available"),
    ],
)
def test_why_it_cannot_run(versions: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "installed_version", versions.__getitem__)
    for num_gpus in (0, 1):
        monkeypatch.setattr(run, "count_gpus", lambda num_gpus=num_gpus: num_gpus)
        found = run.why_not(needs_gpu=True)
        assert (found is None) == (reason == "is_available" and num_gpus == 1)
        assert found is None or reason in found
    assert run.why_not(needs_gpu=False) is None or reason != "is_available", "compiling needs no GPU and no interpreter"


def test_stages_take_the_time_that_they_promise() -> None:
    assert sum(run.STAGES["first"].values()) <= 340
    assert sum(run.STAGES["second"].values()) <= 350
    assert list(run.STAGES["all"]) == list(PARTS)
    assert run.read_parts("checks:90,throughput:60") == {"checks": 90, "throughput": 60}


class Runs:
    """Runs of the benchmark whose parts are played."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.asked: list[Job] = []
        self.results: dict[str, list[dict[str, Any]]] = {}  # rows by item of `checks`; `probe` has the first one
        self.environment: dict[str, Any] = {"gpu": {"name": "No GPU 9000"}, "versions": {}, "commit": "abc"}
        monkeypatch.setattr(run, "why_not", lambda needs_gpu: None)
        monkeypatch.setattr(run, "count_gpus", lambda: 1)
        monkeypatch.setattr(limits, "gpu_environment", lambda commit, has_gpu: self.environment)
        monkeypatch.setattr(run, "run_part", self._take)

    def _take(self, part: Part, seconds: float, job: Job, report: Any, *_: Any) -> None:
        self.asked.append(job)
        items = {"checks": list(self.results), "probe": list(self.results)[:1]}.get(part.name, [])
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


def test_second_stage_repeats_failures_and_measurements(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = {"status": "passed", "lines": ["4 cases"]}, {"status": "failed", "wrong": ["rms_norm, 1 x 4096"]}
    late = {"status": "left out", "reason": "no time was left"}
    runs.results = {"good": [good], "bad": [good, {"name": "second row"} | bad], "late": [late]}
    assert runs("first", "--seed", "5") == 1
    assert [job.part for job in runs.asked] == list(run.STAGES["first"])
    assert {job.models for job in runs.asked} == {("Qwen3-30B-A3B",)}
    printed = capsys.readouterr().out
    for fact in ("4 cases", "rms_norm, 1 x 4096", "No GPU 9000, commit abc, seed 5", "failed: second row", "late"):
        assert fact in printed
    assert runs("first") == 1, "an earlier failure counts"
    assert {job.seed for job in runs.asked} == {5}
    assert runs.asked[1].finished == ("bad", "good")

    runs.environment["commit"] = "mended"
    runs.results |= {"bad": [good], "late": [good]}
    assert runs("second") == 0
    finished = {job.part: job.finished for job in runs.asked}
    assert finished["checks"] == ("good",), "of another commit"
    assert finished["throughput"] == ()
    assert "failed: nothing" in capsys.readouterr().out
    runs("--parts", "probe:9,checks:9")
    assert {job.part: job.finished for job in runs.asked} == {"probe": (), "checks": ("bad", "late")}, "of this commit"
    runs("second", "--seed", "6")
    assert not any(job.finished for job in runs.asked), "another seed repeats everything"
    start = runs.lines()[0]
    assert (start["kind"], start["environment"]["gpu"]) == ("start", runs.environment["gpu"])


def test_line_that_was_cut_off_is_left_out(runs: Runs) -> None:
    runs.results = {"a": [{"status": "passed"}]}
    runs("--parts", "checks:9")
    text = runs.path.read_text()
    for length in range(len(text) - 40, len(text), 7):
        runs.path.write_text(text[:length])
        assert runs("--parts", "checks:9") == 0
        assert runs.asked[0].finished == ("a",)
        assert [line["kind"] for line in runs.lines()][-2:] == ["start", "end"]


def test_page_reads_files_of_any_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (None, "", "no JSON"):
        path = tmp_path / "file"
        if content is not None:
            path.write_text(content)
        assert page.main([str(path)]) == 1
        assert str(path) in capsys.readouterr().err


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


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "DeepSeek-V2-Lite"])
def test_throughput_of_a_tiny_model_on_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle time of a step is the rest of its time without the profiler."""
    monkeypatch.setattr(throughput, "rate_measure", lambda kind, generate, workload: lambda: 100.0 * workload.batch)
    monkeypatch.setattr(throughput, "kernel_seconds", lambda *args: {"matmul": 2e-3, "attend": 5e-3})
    monkeypatch.setattr(throughput, "measure_limits", lambda device: LIMITS)
    model = throughput.published(name)
    _, decode, prefill = throughput.measure(model, lambda: 100.0, throughput.SMALL_SIZES)
    assert decode["name"] == f"{name}, decode, 2 x 3, sampled"
    assert decode["step"]["terms"] == {throughput.WAITS: pytest.approx(3e-3), "matmul": 2e-3, "attend": 5e-3}
    assert decode["bound"] > 0
    assert prefill["name"] == f"{name}, prefill of 5"
    assert "step" not in prefill
    _, *late = throughput.measure(model, lambda: 0.0, throughput.SMALL_SIZES)
    assert {row["status"] for row in late} == {"left out"}
    assert json.dumps([decode, prefill, *late], allow_nan=False)


def test_limits_without_products_of_8_bits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("no such format")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    found = limits.measure_limits("cpu")
    assert found.fp8_rate == 2 * found.bf16_rate
    assert "no such format" in capsys.readouterr().out


@pytest.mark.parametrize("cost", [3e-6, 5e-4, 0.5])
def test_time_of_a_call_excludes_the_cache_flush(cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that calls advance, and the parts of `torch.cuda` that read it."""
    now = 0.0

    def take(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1e3

    class Graph:
        length = 0.0

        def replay(self) -> None:
            take(self.length)

    @contextmanager
    def record(graph: Graph) -> Iterator[None]:
        began = now
        yield
        graph.length = now - began

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": record,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda used: nullcontext(),
        "synchronize": lambda: None,
        "is_available": lambda: True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(limits.ColdTimer, "flush", lambda self: take(4e-5))
    assert limits.ColdTimer("cpu")(lambda: take(cost)) == pytest.approx(cost, rel=1e-6)
