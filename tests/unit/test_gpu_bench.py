"""The GPU benchmark without a GPU: its work counts, time budgets, supervision of processes, and texts."""

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

from moeserve.bench.gpu import costs, engine, limits, run, throughput
from moeserve.bench.gpu.costs import AttentionShape, Bar, GpuLimits, LatentShape, MoEShape, Work
from moeserve.bench.gpu.run import bar_text, row_text
from moeserve.bench.gpu.supervise import PARTS, RANKS, Part, PartResult, run_part

LIMITS = GpuLimits(copy_bandwidth=1e12, bf16_rate=4e14, fp8_rate=None)  # easy to divide by
ENVIRONMENT = {"gpu": {"name": "No GPU 9000", "driver": "1.2"}, "versions": {}}


def test_products_of_a_layer() -> None:
    """2 tokens, each with 2 of 4 experts; 3 experts have rows. 10 wide, experts of 6."""
    shape = MoEShape(num_experts=4, hidden=10, width=6, top_k=2)
    work = costs.products_work(shape, num_tokens=2, num_hit=3, format="bf16")
    gate_up = 3 * 12 * 10 * 2 + 2 * 10 * 2 + 4 * 6 * 2  # weights, the tokens once, a result for each row
    down = 3 * 10 * 6 * 2 + 4 * 6 * 2 + 4 * 10 * 2
    assert work.num_bytes == gate_up + down
    assert work.operations == 2 * 4 * (12 * 10 + 10 * 6)
    with_bias = MoEShape(num_experts=4, hidden=10, width=6, top_k=2, has_bias=True)
    biased = costs.products_work(with_bias, num_tokens=2, num_hit=3, format="bf16")
    assert biased.num_bytes == work.num_bytes + 3 * (12 + 10) * 2


def test_products_of_8_bit_blocks() -> None:
    """One byte for a weight and a row's number, two for a result, four for each scale."""
    shape = MoEShape(num_experts=4, hidden=256, width=200, top_k=2)
    work = costs.products_work(shape, num_tokens=3, num_hit=2, format="fp8")
    gate_up = 2 * 400 * 256 + 3 * 256 + 4 * (2 * 2 * 2 * 2 + 3 * 2) + 6 * 200 * 2  # gates and ups: 2 x 2 blocks each
    down = 2 * 256 * 200 + 6 * 200 + 4 * (2 * 2 * 2 + 6 * 2) + 6 * 256 * 2
    assert work.num_bytes == gate_up + down
    assert work.operations == 2 * 6 * (400 * 256 + 256 * 200)


def test_attention() -> None:
    """4 query heads, 2 of keys and values, 8 wide; a row after 9 others, and 3 rows of a prompt."""
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_size=8)
    work = costs.attention_work(shape, [(1, 10), (3, 3)])
    assert work.num_bytes == (10 + 3) * 2 * 2 * 8 * 2 + (1 + 3) * 2 * 4 * 8 * 2
    assert work.operations == 4 * 4 * 8 * (10 + 1 + 2 + 3)
    windowed = AttentionShape(num_heads=4, num_kv_heads=2, head_size=8, window=2)
    work = costs.attention_work(windowed, [(1, 10), (3, 7)])
    assert work.num_bytes == (2 + 4) * 2 * 2 * 8 * 2 + (1 + 3) * 2 * 4 * 8 * 2
    assert work.operations == 4 * 4 * 8 * (2 + 3 * 2)


def test_latent_attention() -> None:
    """Vectors of 16 + 4 numbers: read twice for 100 heads of one row."""
    shape = LatentShape(num_heads=100, latent_size=16, rotary_size=4)
    work = costs.latent_work(shape, [(1, 10)])
    assert work.num_bytes == 2 * 10 * 20 * 2 + 100 * (20 + 16) * 2
    assert work.operations == 2 * 100 * (20 + 16) * 10


def test_bounds() -> None:
    work = Work(num_bytes=2e9, operations=4e11)
    assert work.memory_seconds(LIMITS) == 2e-3
    assert work.bound_seconds(LIMITS) == 2e-3
    assert Work(2e9, 4e12).bound_seconds(LIMITS) == 1e-2
    assert Work(2e9, 4e12, "fp8").bound_seconds(LIMITS) == 5e-3, "twice the rate of bf16, where none was measured"
    assert LIMITS.rate("bf16") == 4e14
    assert GpuLimits(1.0, 2.0, 3.0).rate("fp8") == 3.0


def test_bars() -> None:
    bars = {tokens: costs.products_bar(tokens, "bf16") for tokens in (1, 16, 64, 128, 4096, 16384)}
    memory = "fraction_of_memory_bound"
    assert bars[1] == bars[16] == Bar(memory, 0.70)
    assert bars[64] is None
    assert bars[128] == Bar(memory, 0.85)
    assert bars[4096] == bars[16384] == Bar("operations_per_second", 500e12)
    assert costs.products_bar(4096, "fp8") == Bar("operations_per_second", 1000e12)
    assert [(bar.figure, bar.least) for bar in throughput.DECODE_BARS] == [("times_transformers", 4.0), (memory, 0.60)]
    for reached, is_met in ((0.70, True), (0.699, False), (None, False)):
        verdict = Bar(memory, 0.70).verdict({} if reached is None else {memory: reached})
        assert (verdict["reached"], verdict["is_met"]) == (reached, is_met)
        assert bar_text(verdict).endswith(": met" if is_met else ": NOT MET")


def test_bytes_of_a_decode_step(tmp_path: Path) -> None:
    """Mixtral's with 2 layers: each token reads 2 of 8 experts, and 64 of them nearly all."""
    mixtral = next(model for model in throughput.MODELS if model.name == "Mixtral-8x7B")
    throughput.write_config(mixtral, 2, tmp_path)
    attention = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    experts = 8 * 3 * 4096 * 14336
    rest = 2 * (attention + 8 * 4096 + 2 * 4096) + 4096 + 32000 * 4096
    cache = 2 * 2 * 8 * 128 * 2  # layers, keys and values, heads, their size, bytes
    one = 2 * (rest + 2 * experts * 2 / 8) + 512 * cache
    assert throughput.decode_bytes(tmp_path, 1, 512) == pytest.approx(one, rel=1e-6)
    many = 2 * (rest + 2 * experts * (1 - 0.75**64)) + 64 * 512 * cache
    assert throughput.decode_bytes(tmp_path, 64, 512) == pytest.approx(many, rel=1e-6)


def test_layers_are_left_out_where_they_do_not_fit() -> None:
    mixtral = next(model for model in throughput.MODELS if model.name == "Mixtral-8x7B")
    layer = 2 * (8 * 3 * 4096 * 14336 + 4096 * (2 * 4096 + 2 * 1024) + 2 * 4096) + 4 * 8 * 4096  # float32 routers
    outside = 2 * (2 * 32000 * 4096 + 4096)
    assert throughput.layers_that_fit(mixtral, outside + 5 * layer) == 5
    assert throughput.layers_that_fit(mixtral, outside + 5 * layer - 1) == 4
    assert throughput.layers_that_fit(mixtral, 0) == 2
    assert throughput.layers_that_fit(mixtral, 1e15) == 32


def test_engine_may_be_as_far_from_float32_as_transformers_is() -> None:
    exact = torch.tensor([-1.0, -2.0])
    near = engine.bf16_figures(exact + 0.02, exact + torch.tensor([0.01, -0.01]), exact)
    assert near["max_logprob_difference"] == pytest.approx(0.03)
    assert near["wrong"] == []
    assert "0.04" in engine.bf16_figures(exact + 0.04, exact + 0.01, exact)["wrong"][0]
    assert engine.bf16_figures(exact * float("nan"), exact + 0.01, exact)["wrong"]


def test_each_process_of_a_part_has_one_checkpoint_and_dtype() -> None:
    engine_part = next(part for part in PARTS if part.name == "engine")
    for part, comparisons in ((engine_part, engine.COMPARISONS), (RANKS, engine.RANK_COMPARISONS)):
        assert len({comparison.name for comparison in comparisons}) == len(comparisons)
        for share in range(part.num_processes):
            of_process = comparisons[share :: part.num_processes]
            assert len({(each.family, each.dtype) for each in of_process if not each.is_wide}) == 1
    assert {each.family for each in engine.COMPARISONS} == set(engine.FAMILIES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_is_compared_with_transformers(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = next(each for each in engine.COMPARISONS if each.dtype == dtype)
    row = engine.compare(comparison, "cpu", 3)
    assert (row["name"], row["status"], row["wrong"]) == (f"Mixtral, {dtype}, graphs", "passed", []), row
    assert row["num_tokens"] == len(engine.PROMPT_LENGTHS) * engine.NUM_TOKENS
    engine_answers = engine.answers_of

    def shifted(*args: Any, **settings: Any) -> list[engine.Answer]:
        answers = engine_answers(*args, **settings)
        return [engine.Answer([(token + 1) % 160 for token in each.tokens], each.logprobs) for each in answers]

    monkeypatch.setattr(engine, "answers_of", shifted)
    assert engine.compare(comparison, "cpu", 3)["status"] == "failed"


@pytest.mark.parametrize("layout", ["tp=2", "dp=2"])
def test_two_ranks_are_compared_with_transformers(layout: str) -> None:
    name = f"Mixtral, float32, {layout}, all_to_all"
    comparison = next(each for each in engine.RANK_COMPARISONS if each.name == name)
    row = engine.compare(comparison, "cpu", 3)
    assert (row["name"], row["status"], row["equal_tokens"]) == (name, "passed", 1.0), row


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="DeepEP is installed")
def test_comparison_without_its_library_is_left_out() -> None:
    row = engine.compare(engine.RANK_COMPARISONS[-1], "cpu", 3)
    assert row["status"] == "left out"
    assert "deep_ep" in row_text(row)


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from moeserve.bench.gpu.parts import work_through

options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
seed = int(options["--seed"])

def fine(name):
    yield {"name": name, "status": "passed", "seed": seed}

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
    [("a", lambda: fine("a"))],
    [("b", fatal), ("c", lambda: fine("c")), ("d", useless), ("e", lambda: fine("e"))],
    [("f", endless)],
    [("g", faulty), ("h", lambda: fine("h"))],
    [("i", lambda: fine("i"))],
]
share = int(options["--share"].split("/")[0])
work_through(shares[share], Path(options["--rows"]), lambda: 0.0 if share == 4 else 1.0)
"""


def test_part_continues_after_faults_and_stops_what_hangs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    reported: list[str] = []
    command = (sys.executable, str(program))
    part = Part("checks", 1.0, num_processes=5)
    result = run_part(part, 20.0, 7, lambda row: reported.append(row["name"]), command)
    rows = {row["name"]: row for row in result.rows}
    assert sorted(reported) == sorted(rows)
    statuses = dict(a="passed", b="failed", c="passed", d="failed", e="passed", f="failed", g="failed", h="passed")
    assert {name: row["status"] for name, row in rows.items()} == {
        **statuses, "g's first row": "passed", "i": "left out"
    }  # fmt: skip
    assert rows["a"]["seed"] == 7
    assert "exit code -9" in rows["b"]["error"]
    assert "a fault" in rows["b"]["log"]
    assert "misaligned address" in rows["d"]["error"]
    assert "ValueError: oh" in rows["g"]["error"]


def test_process_that_cannot_start_fails_once(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "raise ImportError('no such module')")
    result = run_part(Part("kernels", 1.0, num_processes=1), 20.0, 7, lambda row: None, command)
    assert [row["status"] for row in result.rows] == ["failed"]
    assert "no such module" in result.rows[0]["log"]
    assert result.seconds < 15


CHECK_ROW = {
    "name": "norms",
    "status": "failed",
    "num_cases": 4,
    "error_ratio": 3.5,
    "worst": "rms_norm, 1 x 4096",
    "wrong": ["rms_norm, 1 x 4096"],
    "left_out": "everything after 'x': no time was left",
}
KERNEL_ROW = {
    "name": "products bf16 Mixtral-8x7B, 16 tokens",
    "status": "measured",
    "seconds": 1e-3,
    "bytes_per_second": 1e12,
    "operations_per_second": 2e12,
    "fraction_of_bound": 0.5,
    "others": {"torch grouped_mm": {"seconds": 2e-3, "times_as_fast": 2.0}, "other": {"error": "no such"}},
    "bars": [{"figure": "fraction_of_memory_bound", "least": 0.7, "reached": 0.5, "is_met": False}],
    "notes": ["8 of 8 experts have rows"],
}
DECODE_ROW = {
    "name": "Mixtral-8x7B, decode, batch 64",
    "status": "measured",
    "num_layers": 17,
    "layers_of_the_published": 32,
    "rate": 5000.0,
    "fraction_of_bound": 0.62,
    "transformers": {"rate": 1000.0},
    "bars": [{"figure": "times_transformers", "least": 4.0, "reached": 5.0, "is_met": True}],
}
LATE_ROW = {"name": "late", "status": "left out", "reason": "no time was left"}
TOKENS_ROW = {"name": "Mixtral", "status": "passed", "equal_tokens": 0.9, "max_logprob_difference": 0.25, "wrong": []}


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        (CHECK_ROW, ["4 cases, worst 3.5", "wrong: rms_norm, 1 x 4096", "no time was left"]),
        (
            KERNEL_ROW,
            ["1,000.0 us, 1,000 GB/s, 2.0 TFLOP/s, 50% of the bound", "NOT MET", "2.00 times as fast", "no such"],
        ),
        (DECODE_ROW, ["17 of 32 layers, 5,000 tokens/s, 62%", "1,000 tokens/s", "5.00 x transformers: met"]),
        (limits.limits_row("limits", LIMITS), ["1,000 GB/s copied, 400 TFLOP/s in bf16, none in fp8"]),
        (TOKENS_ROW, ["90.0% of the tokens equal", "0.25"]),
    ],
)
def test_text_of_a_row_has_its_figures(row: dict[str, Any], facts: list[str]) -> None:
    assert [fact for fact in facts if fact not in row_text(row)] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_one_sentence() -> None:
    command = [sys.executable, "-m", "moeserve.bench.gpu.run", "--seconds", "30"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1


def test_checks_and_kernel_times_need_no_msgspec() -> None:
    pytest.importorskip("triton")
    modules = ", ".join(f"moeserve.bench.gpu.{name}" for name in ("run", "parts", "checks", "kernels"))
    program = f"import sys; sys.modules['msgspec'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"torch": "2.10.1", "triton": "3.5.0", "transformers": "5.0.0"}, "torch 2.10.1"),
        ({"torch": "2.11.0+cu130", "triton": "", "transformers": "5.0.0"}, "triton"),
        ({"torch": "2.11.0", "triton": "3.5.0", "transformers": "4.57.1"}, "transformers 4.57.1"),
        ({"torch": "2.11.0", "triton": "3.5.0", "transformers": "5.0.0"}, "is_available"),
    ],
)
def test_why_it_cannot_run(versions: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "installed_version", versions.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reason in (run.why_not() or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (run.why_not() is None) == (reason == "is_available")


@pytest.mark.parametrize(("status", "num_gpus"), [("passed", 1), ("failed", 2)])
def test_run_from_beginning_to_end(
    status: str, num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def take(part: Part, seconds: float, seed: int, report: Any) -> PartResult:
        rows = {"checks": [TOKENS_ROW | {"name": "a", "status": status}], "kernels": [KERNEL_ROW, LATE_ROW]}
        found = rows.get(part.name, [DECODE_ROW])
        for row in found:
            report(row)
        return PartResult(part.name, seconds, 1.0, found)

    monkeypatch.setattr(run, "why_not", lambda: None)
    monkeypatch.setattr(run, "count_gpus", lambda: num_gpus)
    monkeypatch.setattr(limits, "gpu_environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(run, "run_part", take)
    path = tmp_path / "gpu.jsonl"
    assert run.main(["--json", str(path), "--seed", "5", "--seconds", "100"]) == (1 if status == "failed" else 0)
    row = json.loads(path.read_text())
    assert (row["passed"], row["seed"], row["left_out"]) == (status == "passed", 5, ["late"])
    parts = {part["part"]: part for part in row["parts"]}
    assert list(parts) == ["checks", "engine", *(["ranks"] if num_gpus == 2 else []), "kernels", "throughput"]
    assert parts["throughput"]["budget"] == pytest.approx(90, abs=1), "earlier parts took no time"
    assert parts["kernels"]["rows"] == [KERNEL_ROW, LATE_ROW]
    printed = capsys.readouterr().out
    for fact in (
        "No GPU 9000, seed 5",
        f"failed: {'a' if status == 'failed' else 'nothing'}",
        "for lack of time: late",
    ):
        assert fact in printed
    assert run.main(["--only", "ranks", "--seconds", "30"]) == (0 if num_gpus == 2 else 1), "two GPUs are needed"


@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV2"])
def test_throughput_of_a_tiny_model_on_a_cpu(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    published = next(model for model in throughput.PUBLISHED if model.family == family)
    tiny = dict(vocab_size=100, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4)
    latent = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, moe_intermediate_size=16)
    settings = published.settings | tiny | (latent if family == "DeepseekV2" else {})
    sizes = dict(DEVICE="cpu", BATCHES=(3, 1), PROMPT_TOKENS=5, NEW_TOKENS=33, PREFILL_TOKENS=40)
    for name, value in sizes.items():
        monkeypatch.setattr(throughput, name, value)
    monkeypatch.setattr(throughput, "total_memory", lambda: 2**40)
    monkeypatch.setattr(throughput, "synchronize", lambda: None)
    monkeypatch.setattr(throughput, "rate_measure", lambda kind, generate, workload: lambda: 100.0 * workload.batch)
    model = throughput.Model("tiny", family, 3, settings)
    rows = list(throughput.measure(model, LIMITS, lambda: 100.0))
    names = ["tiny, decode, batch 3", "tiny, decode, batch 1", "tiny, prefill of 40"]
    assert [(row["name"], row["status"]) for row in rows] == [(name, "measured") for name in names], rows
    assert {(row["num_layers"], row["layers_of_the_published"]) for row in rows} == {(3, 3)}
    assert rows[0]["transformers"] == {"rate": 300.0}
    assert rows[0]["times_transformers"] == 1.0
    assert [bar["figure"] for bar in rows[0]["bars"]] == ["times_transformers", "fraction_of_memory_bound"]
    assert "bars" not in rows[1]
    late = list(throughput.measure(model, LIMITS, lambda: -1.0))
    assert {row["status"] for row in late} == {"left out"}
    assert json.dumps(rows + late, allow_nan=False)


class FakeGpu:
    """A clock that calls advance, and the parts of `torch.cuda` that read it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_replays = 0

    def take(self, seconds: float) -> None:
        self.seconds += seconds

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.seconds

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * 1e3

        class Graph:
            length = 0.0

            def replay(self) -> None:
                gpu.num_replays += 1
                gpu.take(self.length)

        @contextmanager
        def record(graph: Graph) -> Iterator[None]:
            began = gpu.seconds
            yield
            graph.length = gpu.seconds - began

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


@pytest.mark.parametrize("cost", [3e-6, 5e-4, 0.5])
def test_time_of_a_call_excludes_the_cache_flush(cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    monkeypatch.setattr(limits.ColdTimer, "flush", lambda self: gpu.take(4e-5))
    timer = limits.ColdTimer("cpu")
    assert timer.seconds(lambda: gpu.take(cost)) == pytest.approx(cost, rel=1e-6)
    assert timer.seconds_without_graph(lambda: gpu.take(cost)) == pytest.approx(cost, rel=1e-6)
    # Two replays of each graph are not counted: of flushes alone, and with the call.
    assert gpu.num_replays == 2 + limits.NUM_REPLAYS + 2 + (3 if cost == 0.5 else limits.NUM_REPLAYS)
