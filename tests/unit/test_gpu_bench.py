"""The GPU benchmark without a GPU: its work counts, comparisons of engines, processes of parts, and texts."""

from __future__ import annotations

import importlib.util
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

from moeserve.bench.gpu import costs, engine, limits, page, parts, run, sanitizer, throughput
from moeserve.bench.gpu.costs import Bar, GpuLimits, LatentShape, MoEShape, Work, attention_shape
from moeserve.bench.gpu.page import row_text
from moeserve.bench.gpu.parts import PARTS, Part, run_part
from moeserve.config.validation import parse_settings

LIMITS = GpuLimits(copy_bandwidth=1e12, bf16_rate=4e14, fp8_rate=8e14)  # easy to divide by


@pytest.mark.parametrize("has_bias", [False, True])
def test_work_of_experts(has_bias: bool) -> None:
    """3 tokens, each with 2 of 4 experts; 2 experts have rows. 256 wide, experts of 200."""
    shape = MoEShape(num_experts=4, hidden=256, width=200, top_k=2, has_bias=has_bias)
    work = costs.experts_work(shape, num_tokens=3, num_hit=2, format="bf16")
    assert work.num_bytes == 2 * 3 * 256 * 200 * 2 + 3 * (256 + 256) * 2 + has_bias * 2 * (400 + 256) * 2
    assert work.operations == 2 * 3 * 2 * 3 * 256 * 200
    work = costs.experts_work(shape, num_tokens=3, num_hit=2, format="fp8")
    assert work.num_bytes == 2 * 3 * (256 * 200 + 4 * 2 * 2) + 3 * (256 + 256) * 2  # scales of 2 x 2 blocks
    assert work.format == "fp8"


def test_work_of_attention() -> None:
    """4 query heads, 2 of keys and values, 8 wide; a row after 9 others, and 3 rows of a prompt."""
    work = costs.attention_work(attention_shape(4, 2, 8), [(1, 10), (3, 3)])
    assert work.num_bytes == (10 + 3) * 2 * 2 * 8 * 2 + (1 + 3) * 2 * 4 * 8 * 2
    assert work.operations == 4 * 4 * 8 * (10 + 1 + 2 + 3)
    work = costs.attention_work(attention_shape(4, 2, 8, window=2), [(1, 10), (3, 7)])
    assert work.num_bytes == (2 + 4) * 2 * 2 * 8 * 2 + (1 + 3) * 2 * 4 * 8 * 2
    assert work.operations == 4 * 4 * 8 * (2 + 3 * 2)
    work = costs.attention_work(LatentShape(num_heads=100, latent_size=16, rotary_size=4), [(1, 10)])
    assert work.num_bytes == 10 * 20 * 2 + 100 * (20 + 16) * 2  # vectors of 16 + 4
    assert work.operations == 2 * 100 * (20 + 16) * 10


def test_bounds_and_bars() -> None:
    assert Work(2e9, 4e11).memory_seconds(LIMITS) == Work(2e9, 4e11).bound_seconds(LIMITS) == 2e-3
    assert Work(2e9, 4e12).bound_seconds(LIMITS) == 1e-2
    assert Work(2e9, 4e12, "fp8").bound_seconds(LIMITS) == 5e-3
    figure = "fraction_of_memory_bound"
    for reached, is_met in ((0.70, True), (0.699, False), (None, False)):
        verdict = Bar(figure, 0.70).verdict({} if reached is None else {figure: reached})
        assert (verdict["reached"], verdict["is_met"]) == (reached, is_met)
        assert page.bar_text(verdict).endswith(": met" if is_met else ": NOT MET")


def test_layers_are_left_out_where_they_do_not_fit() -> None:
    layer = 2 * (8 * 3 * 4096 * 14336 + 4096 * (2 * 4096 + 2 * 1024) + 2 * 4096) + 4 * 8 * 4096  # float32 routers
    outside = 2 * (2 * 32000 * 4096 + 4096)
    fitting = {outside + 5 * layer: 5, outside + 5 * layer - 1: 4, 0: 2, 10**15: 32}
    mixtral = throughput.published("Mixtral-8x7B")
    assert {size: throughput.layers_that_fit(mixtral, size) for size in fitting} == fitting


def test_engine_may_be_as_far_from_float32_as_transformers_is() -> None:
    exact = torch.tensor([-1.0, -2.0])
    assert engine.figures(exact + 0.02, exact + torch.tensor([0.01, -0.01]), exact, is_fp8=False)["wrong"] == []
    for wrong in (exact + 0.04, exact * float("nan")):
        assert engine.figures(wrong, exact + 0.01, exact, is_fp8=False)["wrong"]


def test_comparisons_are_valid_and_each_process_has_one_checkpoint_and_dtype() -> None:
    for name, comparisons in (("engine", engine.COMPARISONS), ("ranks", engine.RANK_COMPARISONS)):
        assert len({comparison.name for comparison in comparisons}) == len(comparisons)
        num_processes = next(part.num_processes for part in PARTS if part.name == name)
        for share in range(num_processes):
            of_process = comparisons[share::num_processes]
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


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="DeepEP is installed")
def test_comparison_without_its_library_is_left_out() -> None:
    row = {"name": "a"} | engine.compare(engine.RANK_COMPARISONS[-1], "cpu", 3)
    assert row["status"] == "left out"
    assert "deep_ep" in row_text(row)


PROGRAM = """
import json, os, signal, sys, time
from moeserve.bench.gpu.parts import work_through

options = dict(option.split("=") for option in sys.argv[2:])
finished = json.load(sys.stdin)
share = int(options["--share"].split("/")[0])

def fine():
    yield {"status": "passed", "seed": int(options["--seed"])}

def fatal():
    print("a fault", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    yield

def useless():
    raise RuntimeError("CUDA error: misaligned address")
    yield

def faulty():
    yield {"name": "g's first row", "status": "passed"}
    raise ValueError("oh")

def endless():
    time.sleep(600)
    yield

shares = [
    [("a", fine)],
    [("b", fatal), ("c", fine), ("d", useless), ("e", fine)],
    [("f", endless), ("late", fine)],
    [("g", faulty), ("h", fine)],
    [("i", fine)],
]
left = [item for item in shares[share] if item[0] not in finished]
work_through(left, int(options["--skip"]), lambda: 0.0 if share == 4 else 1.0)
"""


def test_part_continues_after_faults_and_stops_what_hangs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found: list[dict[str, Any]] = []
    command = (sys.executable, str(program))
    part = Part("checks", 1.0, num_processes=5)
    run_part(part, 12.0, 7, found.append, command=command)
    rows = {row["name"]: row for row in found if "name" in row}
    ended = [row["finished"] for row in found if "finished" in row]
    assert sorted(ended) == ["a", "b", "c", "d", "e", "f", "g", "h"]  # all that began
    statuses = dict(a="passed", b="failed", c="passed", d="failed", e="passed", f="failed", g="failed", h="passed")
    assert {name: row["status"] for name, row in rows.items()} == {
        **statuses, "g's first row": "passed", "i": "left out", "late": "left out",
    }  # fmt: skip
    assert rows["a"]["seed"] == 7
    assert "exit code -9" in rows["b"]["error"]
    assert "a fault" in rows["b"]["log"]
    assert "misaligned address" in rows["d"]["log"]
    assert "ValueError: oh" in rows["g"]["error"]
    found.clear()
    run_part(part, 12.0, 7, found.append, ended, command)  # nothing is left but what was not begun
    assert {row.get("name", row.get("finished")) for row in found} == {"late", "i"}


def test_process_that_cannot_start_fails_once() -> None:
    command = (sys.executable, "-c", "raise ImportError('no such module')")
    rows: list[dict[str, Any]] = []
    run_part(Part("kernels", 1.0, num_processes=1), 20.0, 7, rows.append, command=command)
    (row, _ended) = rows
    assert row["status"] == "failed"
    assert "no such module" in row["log"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_one_sentence() -> None:
    command = [sys.executable, "-m", "moeserve.bench.gpu.run", "--seconds", "30"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1


def test_checks_and_kernel_times_need_no_msgspec() -> None:
    pytest.importorskip("triton")
    modules = ", ".join(f"moeserve.bench.gpu.{name}" for name in ("run", "parts", "cases", "kernels"))
    program = f"import sys; sys.modules['msgspec'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reason in (run.why_not(needs_gpu=True) or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (run.why_not(needs_gpu=True) is None) == (reason == "is_available")


@pytest.mark.parametrize(("status", "num_gpus"), [("passed", 1), ("failed", 2)])
def test_run_from_beginning_to_end(
    status: str, num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = {"name": "a", "status": status, "lines": ["4 cases"], "wrong": ["rms_norm, 1 x 4096"]}
    late = parts.left_out("late", "no time was left")

    asked: list[tuple[str, list[str]]] = []

    def take(part: Part, seconds: float, seed: int, report: Any, finished: list[str]) -> None:
        asked.append((part.name, finished))
        if part.name != "checks":
            report(late)
        elif not finished:
            report(check)
            report({"finished": "a"})

    environment: dict[str, Any] = {"gpu": {"name": "No GPU 9000", "driver": "1.2"}, "versions": {}, "commit": "abc"}
    monkeypatch.setattr(run, "why_not", lambda needs_gpu: None)
    monkeypatch.setattr(run, "count_gpus", lambda: num_gpus)
    monkeypatch.setattr(limits, "gpu_environment", lambda commit, has_gpu: environment)
    monkeypatch.setattr(run, "run_part", take)
    path = tmp_path / "gpu.jsonl"
    assert run.main(["--json", str(path), "--seed", "5", "--seconds", "100"]) == (1 if status == "failed" else 0)
    start, *lines, end = map(json.loads, path.read_text().splitlines())
    rows = [line for line in lines if line["kind"] == "row"]
    assert start["environment"] == environment
    assert (end["passed"], end["seed"], set(end["left_out"])) == (status == "passed", 5, {"late"})
    names = [row["part"] for row in rows]
    assert names == [part.name for part in PARTS if part.num_gpus <= num_gpus]
    printed = capsys.readouterr().out
    failed = "a" if status == "failed" else "nothing"
    for fact in ("4 cases", "rms_norm, 1 x 4096", "No GPU 9000, seed 5", f"failed: {failed}", "left out: late"):
        assert fact in printed
    asked.clear()
    assert run.main(["--json", str(path)]) == (1 if status == "failed" else 0), "an earlier failure counts"
    assert dict(asked)["checks"] == ["a"]
    assert json.loads(path.read_text().splitlines()[-1])["seed"] == 5
    asked.clear()
    run.main(["--json", str(path), "--seed", "6"])
    environment["commit"] = "another"
    run.main(["--json", str(path), "--seed", "5"])
    assert not any(finished for _, finished in asked), "another seed or commit repeats everything"
    assert run.main(["--only", "ranks", "--seconds", "30"]) == (0 if num_gpus == 2 else 1), "two GPUs are needed"


@pytest.mark.parametrize("published", throughput.MODELS[:2], ids=lambda model: model.name)
def test_throughput_of_a_tiny_model_on_a_cpu(published: throughput.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dict(vocab_size=100, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4)
    tiny |= dict(moe_intermediate_size=16)
    if "kv_lora_rank" in published.config:
        tiny |= dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    sizes = throughput.Sizes("cpu", batches=(3, 1), prompt_tokens=5, new_tokens=6, prompts=(40,), chunk_tokens=30)
    monkeypatch.setattr(throughput, "total_memory", lambda: 2**40)
    monkeypatch.setattr(throughput, "rate_measure", lambda kind, generate, workload: lambda: 100.0 * workload.batch)
    model = throughput.Model("tiny", published.config | tiny | {"num_hidden_layers": 3})
    _, *rows = throughput.measure(model, 2, lambda: 100.0, lambda: LIMITS, sizes)
    names = ["tiny, decode, batch 3", "tiny, decode, batch 1", "tiny, prefill of 40"]
    assert [(row["name"], row["status"]) for row in rows] == [(name, "measured") for name in names], rows
    assert {row["num_layers"] for row in rows} == {3}
    assert [bar["figure"] for bar in rows[0]["bars"]] == ["fraction_of_bound"]
    assert "bars" not in rows[1]
    for row in rows[:2]:
        step = row["step"]
        assert {"seconds", "host_seconds", "busy", "terms", "bounds"} == set(step)
        assert sum(step["bounds"].values()) > 0
    assert "step" not in rows[2]
    assert "3 of 3 layers, 300 tokens/s" in row_text(rows[0])
    _, *late = throughput.measure(model, 1, lambda: 0.0, lambda: LIMITS, sizes)
    assert {row["status"] for row in late} == {"left out"}
    assert json.dumps(rows + late, allow_nan=False)


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
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(limits.ColdTimer, "flush", lambda self: take(4e-5))
    timer = limits.ColdTimer("cpu")
    assert timer(lambda: take(cost)) == pytest.approx(cost, rel=1e-6)


SANITIZER = """#!{python}
import os, subprocess, sys
command = sys.argv[sys.argv.index({python!r}):]
ended = subprocess.run(command, capture_output=True, text=True)
print(ended.stdout, ended.stderr)
print("========= COMPUTE-SANITIZER")
if {name!r} in command and sys.argv[2] == "memcheck":
    print("========= Invalid __global__ write of size 2 bytes")
    print("=========     at spoiled_kernel+0x9d0 in spoiled.py:12")
    print("=========     by thread (1,0,0) in block (0,0,0)")
    print("========= ERROR SUMMARY: 3 errors")
elif sys.argv[2] == "racecheck":
    print("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
else:
    print("========= ERROR SUMMARY: 0 errors")
sys.exit(ended.returncode)
"""


def test_sanitizer_names_the_check_and_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the tool on the PATH runs each check, and reports an error of one."""
    pytest.importorskip("triton")
    tool = tmp_path / sanitizer.TOOL
    tool.write_text(SANITIZER.format(python=sys.executable, name="routing"))
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    chosen = ["memcheck, routing", "memcheck, norms", "racecheck, norms"]
    items = dict(sanitizer.sanitizer_items(3, lambda: 100.0))
    assert "memcheck, graphs" not in items
    rows = {name: next(iter(items[name]())) for name in chosen}
    assert [rows[name]["status"] for name in chosen] == ["failed", "passed", "passed"]
    assert rows["memcheck, routing"]["wrong"] == ["Invalid __global__ write of size 2 bytes (spoiled_kernel)"]
    assert rows["memcheck, routing"]["num_errors"] == 3
    (late,) = dict(sanitizer.sanitizer_items(3, lambda: 1e-3))["memcheck, norms"]()
    assert late["status"] == "left out"


def test_without_the_sanitizer_its_part_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(sanitizer, "find_tool", lambda: None)
    ((name, rows),) = sanitizer.sanitizer_items(3, lambda: 100.0)
    (row,) = rows()
    assert (row["name"], row["status"]) == (name, "left out")


def test_output_without_a_summary_or_with_a_failed_check_fails() -> None:
    assert sanitizer.verdict("Segmentation fault", 139)["status"] == "failed"
    assert sanitizer.verdict("========= ERROR SUMMARY: 0 errors", 1)["status"] == "failed"
    assert sanitizer.verdict("========= ERROR SUMMARY: 0 errors", 0)["status"] == "passed"


def test_page_names_the_largest_loss_first() -> None:
    """A kernel far above its bound comes before one with more time at its bound, and before a device that waits."""
    step = {
        "seconds": 10e-3,
        "terms": {"products": 6e-3, "attend": 3e-3, "the device waits": 1e-3},
        "bounds": {"products": 5.5e-3, "attend": 0.5e-3},
    }
    rows = [{"name": "decode", "step": step}, {"name": "prefill", "fraction_of_bound": 0.25}]
    found = page.losses(rows)
    assert [loss.term for loss in found] == ["attend", "the device waits", "products"]
    assert [loss.share for loss in found] == pytest.approx([0.25, 0.1, 0.05])
    result = dict(failed=[], left_out=[], seconds=1.0, seed=1, environment={"gpu": {"name": "a GPU"}})
    lines = page.page(result, rows).splitlines()
    assert "25%" in lines[1]
    assert "attend in decode" in lines[1]
    assert "25%" in next(line for line in lines if "prefill" in line)
