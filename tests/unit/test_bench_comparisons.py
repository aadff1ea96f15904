"""The benchmarks that compare engines, with tiny models: their rows follow from what was measured."""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_operations import plant

from moeserve import cli
from moeserve.bench import (
    attention,
    latency,
    linear_attention,
    moe,
    report,
    sparse_attention,
    speculation,
    startup,
    throughput,
)
from moeserve.bench.checkpoints import make_checkpoint
from moeserve.bench.decode import Generate, Workload, draw_prompts
from moeserve.bench.harness import read_jsonl
from moeserve.bench.limits import LimitProbe
from moeserve.bench.peers.adapters.experts import Shape
from moeserve.bench.peers.environments import PeerError
from moeserve.ops import pairs as pairs_ops
from moeserve.ops.native import set_num_threads
from moeserve.ops.select import select_backend

SMALL_PROBE = functools.partial(LimitProbe, buffer_bytes=1 << 22, matmul_size=128, num_passes=1)
SHAPE = Shape(num_experts=4, hidden=64, width=96, top_k=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mixtral-tiny", tmp_path_factory.mktemp("checkpoints") / "mixtral-tiny")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Small probes, no installed peers, and the number of threads as it was."""
    for benchmark in (throughput, moe):
        monkeypatch.setattr(benchmark, "LimitProbe", SMALL_PROBE)
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    threads = torch.get_num_threads()
    yield
    set_num_threads(threads)


@pytest.mark.slow
def test_throughput_from_end_to_end(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rate_measure(kind: str, generate: Generate, workload: Workload) -> Callable[[], float]:
        """Return a measure that no load of the machine makes fail: the difference of two runs may be negative."""
        return lambda: 1 / generate(draw_prompts(workload, random.Random(0)), workload.new_tokens)

    monkeypatch.setattr(throughput, "rate_measure", rate_measure)
    monkeypatch.setattr(throughput, "native_kernels", lambda: None)  # the goals of processors with AVX-512
    results = tmp_path / "throughput.jsonl"
    throughput.main([
        "--model", str(tiny), "--engine", "moeserve", "--engine", "moeserve-int8", "--engine", "transformers",
        "--batch", "2", "--batch", "8", "--prompt-tokens", "8", "--new-tokens", "2", "--prefill-tokens", "32",
        "--rounds", "2", "--threads", "1", "--json", str(results),
    ])  # fmt: skip
    rows = {row["cell"]: row for row in read_jsonl(results)}
    assert list(rows) == ["decode, batch 2", "decode, batch 8", "prefill, batch 4"]
    for row in rows.values():
        assert set(row["engines"]) == {"moeserve", "moeserve-int8", "transformers"}
        pairs = {(ratio["engine"], ratio["baseline"]) for ratio in row["ratios"]}
        assert pairs == {("moeserve", "transformers"), ("moeserve-int8", "transformers")}
        assert row["environment"]["threads"] == 1
        assert {"cpu", "isa", "commit", "load", "versions"} <= row["environment"].keys()
        assert "transformers" in row["engines"]["transformers"]["version"]
        assert {engine["settings"]["threads"] for engine in row["engines"].values()} == {1}
    assert rows["decode, batch 2"]["goal"] is None  # no bar is set for it
    goal = rows["decode, batch 8"]["goal"]
    own, peer = (rows["decode, batch 8"]["engines"][name]["rounds"] for name in ("moeserve", "transformers"))
    reached = [
        one["rate"] / min(1.3 * two["rate"], 0.85 * one["limit_rate"]) for one, two in zip(own, peer, strict=True)
    ]
    assert goal["best_peer"] == "transformers"
    assert goal["reached"] == pytest.approx(statistics.median(reached))
    assert goal["without"] == {"vllm": "not selected", "llama.cpp-bf16": "not selected"}
    printed = capsys.readouterr().out
    for text in ("moeserve / best peer (goal)", "reached", "vllm (not selected)"):
        assert text in printed


def test_selected_peer_that_is_not_installed_is_refused(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "throughput", "--model", str(tiny), "--engine", "vllm"]
    assert cli.main(arguments) == 1
    assert "python -m moeserve.bench.peers.install vllm" in capsys.readouterr().err


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_own_experts_are_checked_against_float32(quantization: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(moe.own_experts(SHAPE, quantization)(5, 3)) == 3
    right = pairs_ops.make(select_backend(torch.device("cpu")))

    class Unweighted:
        sort, gather = right.sort, right.gather

        def weighted_sum(self, output: Any, pairs: Any, weights: Any, dtype: Any) -> Any:
            return right.weighted_sum(output, pairs, torch.ones_like(weights), dtype)

    for name in ("cpu", "reference"):
        plant(monkeypatch, pairs_ops.TABLE, name, lambda pairs: Unweighted())
    with pytest.raises(PeerError, match="float32"):
        moe.own_experts(SHAPE, quantization)(5, 1)


def test_experts_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a selection, peers that are not installed are left out."""
    monkeypatch.setitem(moe.SHAPES, "tiny", SHAPE)
    results = tmp_path / "moe.jsonl"
    moe.main(["--shape", "tiny", "--rows", "1", "--rows", "9", "--rounds", "2", "--json", str(results)])
    rows = read_jsonl(results)
    assert [row["num_rows"] for row in rows] == [1, 9]
    for row in rows:
        assert set(row["engines"]) == {"moeserve", "moeserve-int8", "moeserve-int4", "moeserve-mxfp4"}
        assert all(engine["fraction_of_limit"] > 0 for engine in row["engines"].values())
        assert set(row["left_out"]) == {"vllm", "kt-kernel"}
    assert "without vllm" in capsys.readouterr().err


@pytest.mark.skipif(attention.NATIVE is attention.REFERENCE, reason="the C++ kernels are not built")
def test_attention_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = attention.Shape(batch=2, context_len=40)
    prefill = attention.Shape(1, 20, num_rows=20, num_kv_heads=1, head_size=576, latent_size=512)
    monkeypatch.setattr(attention, "attention_shapes", lambda: [decode, prefill])
    monkeypatch.setattr(attention, "measure_limits", lambda: SMALL_PROBE().measure())
    results = tmp_path / "attention.jsonl"
    attention.main(["--rounds", "1", "--threads", "1", "--json", str(results)])
    rows = read_jsonl(results)
    assert [(row["name"], row["shape"]["batch"]) for row in rows] == [
        ("torch", 2),
        ("C++", 2),
        ("torch", 1),
        ("C++", 1),
    ]
    assert all(row["fraction_of_limit"] > 0 for row in rows)
    assert "latent, 16 heads of 576, prefill" in capsys.readouterr().out


@pytest.mark.skipif(attention.NATIVE is attention.REFERENCE, reason="the C++ kernels are not built")
def test_sparse_and_linear_attention_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for benchmark in (sparse_attention, linear_attention):
        monkeypatch.setattr(benchmark, "LimitProbe", lambda dtype=torch.bfloat16, **_: SMALL_PROBE(dtype=dtype))
        monkeypatch.setattr(benchmark, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(sparse_attention, "CONTEXTS", (64, 256))
    monkeypatch.setattr(sparse_attention, "NUM_ROWS", (1, 2))
    small = sparse_attention.Layer("small", "S", 2, 32, 32, top_k=16, ratio=4, window=8)
    monkeypatch.setattr(sparse_attention, "LAYERS", (small,))
    delta = dataclasses.replace(linear_attention.DELTA, num_heads=2, num_key_heads=1, key_dim=8, value_dim=8)
    monkeypatch.setattr(linear_attention, "SHAPES", {"small": delta})
    monkeypatch.setattr(linear_attention, "STATE_BYTES", 1 << 14)
    results = tmp_path / "results.jsonl"
    for benchmark in (sparse_attention, linear_attention):
        benchmark.main(["--rounds", "1", "--threads", "1", "--json", str(results)])
    rows = read_jsonl(results)
    sparse = [row["fractions"] for row in rows if row["benchmark"] == "sparse_attention"]
    assert [fractions["indexer"] > 0 for fractions in sparse] == [False, False, True, True]
    assert all(fractions["sparse"] > 0 for fractions in sparse)
    assert [row["fraction_of_limit"] > 0 for row in rows[4:]] == [True] * len(linear_attention.CASES)
    assert len(report.plots(rows)) == 1


def test_work_of_experts_counts_those_that_are_chosen() -> None:
    weights = 3 * 64 * 96
    assert moe.experts_work(SHAPE, 1).num_bytes == 2 * 2 * weights
    assert moe.experts_work(SHAPE, 2).num_bytes == 2 * 3 * weights  # 2 of 4 each
    assert moe.experts_work(SHAPE, 2, bits=4).num_bytes == 0.5 * 3 * weights
    assert moe.experts_work(SHAPE, 7).operations == 2 * 7 * 2 * weights


def test_latency_from_end_to_end(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "latency.jsonl"
    latency.main([
        "--model", str(tiny), "--rate", "20", "--rate", "200", "--requests", "6", "--prompt-tokens", "8",
        "--new-tokens", "5", "--rounds", "2", "--threads", "1", "--json", str(results),
    ])  # fmt: skip
    rows = read_jsonl(results)
    assert [row["requests_per_second"] for row in rows] == [20, 200]
    for row in rows:
        assert [len(waits["first_token"]) for waits in row["rounds"]] == [6, 6]
        assert [len(waits["between_tokens"]) for waits in row["rounds"]] == [24, 24]
        for wait in ("first_token", "between_tokens"):
            values = [value for waits in row["rounds"] for value in waits[wait]]
            assert min(values) >= 0
            assert row[wait] == {"median": statistics.median(values), "p99": max(values)}
    assert "| mixtral-tiny, moeserve | 20 |" in capsys.readouterr().out


def test_speculation_from_end_to_end(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "speculation.jsonl"
    speculation.main([
        "--model", str(tiny), "--drafts", "3", "--new-tokens", "60", "--rounds", "1", "--threads", "1", "--json",
        str(results),
    ])  # fmt: skip
    without, drafted = read_jsonl(results)
    assert (without["accepted"], without["steps"]) == (None, 1)
    assert 0 < drafted["accepted"] <= 1
    assert drafted["steps"] < 1
    assert "| mixtral-tiny | 3 draft tokens |" in capsys.readouterr().out


def test_arrivals_have_the_given_rate() -> None:
    arrivals = latency.draw_arrivals(50.0, 4000, latency.random.Random(3))
    assert len(arrivals) / arrivals[-1] == pytest.approx(50, rel=0.1)
    assert sorted(arrivals) == arrivals


@pytest.mark.slow
def test_startup_from_end_to_end(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "startup.jsonl"
    startup.main(["--model", str(tiny), "--rounds", "1", "--threads", "1", "--json", str(results)])
    rows = read_jsonl(results)
    assert [row["source"] for row in rows] == ["checkpoint", "checkpoint, cold"]  # too small to have a copy
    for row in rows:
        assert 0 < row["loading"] < row["seconds"]
        assert row["imports"] > row["loading"]  # torch takes longer than this model
        assert row["seconds"] < row["beyond_torch"] < row["imports"] + row["seconds"]
    assert list((tmp_path / "bench").iterdir()) == []  # its own copies are gone
    assert "checkpoint, cold" in capsys.readouterr().out
    with pytest.raises(startup.EngineError, match="nothing"):
        startup.start_once(tmp_path / "nothing", tmp_path, {}, is_packed=False, is_cold=False)
