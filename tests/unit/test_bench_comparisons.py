"""The benchmarks that compare engines, with tiny models: their rows follow from what was measured."""

from __future__ import annotations

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
from moeserve.bench import compare, kernels, moe, startup, throughput
from moeserve.bench.checkpoints import make_checkpoint
from moeserve.bench.costs import FORMATS
from moeserve.bench.decode import Generate, Workload, draw_prompts
from moeserve.bench.gpu.attention_cases import attend, attend_chosen, choose_entries, latent_attend
from moeserve.bench.gpu.entry_cases import attend_to_entries, linear_attention
from moeserve.bench.harness import read_jsonl
from moeserve.bench.limits import LimitProbe
from moeserve.bench.peers.adapters.experts import Shape
from moeserve.bench.peers.environments import PeerError
from moeserve.ops import pairs as pairs_ops
from moeserve.ops.native import set_num_threads
from moeserve.ops.select import select_backend

SMALL_PROBE = functools.partial(LimitProbe, buffer_bytes=1 << 22, num_passes=1)
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


def rate_of_one_run(kind: str, generate: Generate, workload: Workload) -> Callable[[], float]:
    """Return a measure that no load of the machine makes fail: the difference of two runs may be negative."""
    return lambda: 1 / generate(draw_prompts(workload, random.Random(0)), workload.new_tokens)


@pytest.mark.slow
def test_throughput_from_end_to_end(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(throughput, "rate_measure", rate_of_one_run)
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
    assert rows["decode, batch 2"]["goals"] == {}  # no bar is set for it
    goals = rows["decode, batch 8"]["goals"]
    assert list(goals) == ["moeserve"]  # no peer has 8 bits
    goal = goals["moeserve"]
    own, peer = (rows["decode, batch 8"]["engines"][name]["rounds"] for name in ("moeserve", "transformers"))
    reached = [
        one["rate"] / min(1.3 * two["rate"], 0.85 * one["limit_rate"]) for one, two in zip(own, peer, strict=True)
    ]
    assert goal["best_peer"] == "transformers"
    assert goal["reached"] == pytest.approx(statistics.median(reached))
    assert goal["without"] == dict.fromkeys(["vllm", "llama.cpp-bf16", "ik_llama.cpp-bf16"], "not selected")
    printed = capsys.readouterr().out
    for text in ("moeserve / best peer (goal)", "reached"):
        assert text in printed


def test_each_precision_has_a_goal_against_peers_of_its_bits() -> None:
    """The best such peer counts, in each round, unless the share of the limit is lower."""

    def rounds(*rates: float) -> dict[str, Any]:
        of_round = [{"rate": rate, "limit_rate": 100.0} for rate in rates]
        return {"rate": statistics.median(rates), "rounds": of_round}

    results = {
        "moeserve": rounds(50, 60, 70),
        "moeserve-int8": rounds(60, 60, 60),
        "moeserve-int4": rounds(35, 35, 35),
        "vllm": rounds(40, 50, 50),
        "llama.cpp-q8_0": rounds(50, 50, 50),
        "ik_llama.cpp-q8_0": rounds(40, 60, 80),
        "llama.cpp-q4_0": rounds(70, 70, 70),
    }
    cell = throughput.Cell("decode", Workload(batch=1, prompt_tokens=1, new_tokens=2, vocab_size=2))
    goals = throughput.goals_of(cell, results, {"ik_llama.cpp-q4_0": "not installed"})
    assert {name: goal["best_peer"] for name, goal in goals.items()} == {
        "moeserve": "vllm", "moeserve-int8": "ik_llama.cpp-q8_0", "moeserve-int4": "llama.cpp-q4_0",
    }  # fmt: skip
    reached = [goal["reached"] for goal in goals.values()]
    assert reached == pytest.approx([50 / 44, 60 / 66, 35 / 70])  # rounds of bf16: 50 / 44, 60 / 55, 70 / 55
    assert goals["moeserve-int4"]["without"] == {"ik_llama.cpp-q4_0": "not installed"}
    del results["llama.cpp-q4_0"]
    assert "moeserve-int4" not in throughput.goals_of(cell, results, {})


def test_selected_peer_that_is_not_installed_is_refused(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "throughput", "--model", str(tiny), "--engine", "vllm"]
    assert cli.main(arguments) == 1
    assert "moeserve bench peers vllm" in capsys.readouterr().err


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


@pytest.mark.skipif(kernels.NATIVE is kernels.REFERENCE, reason="the C++ kernels are not built")
def test_kernels_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small step of each operation. Tokens that attend to all positions have no scores to compute."""
    monkeypatch.setattr(kernels, "LimitProbe", lambda dtype, **_: SMALL_PROBE(dtype=dtype))
    monkeypatch.setattr(kernels, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(kernels, "CACHE_BYTES", 1 << 14)
    small: dict[str, Any] = {
        "attention": [
            (attend, [("16 heads of 64", "2 x 1 of 40", "plain")]),
            (latent_attend, [("DeepSeek-V2-Lite", "1 x 20 of 20")]),
        ],
        "sparse_attention": [
            (choose_entries, [("1 x 2 of 64", 4, 128, 9), ("1 x 2 of 64", 4, 128, 100)]),
            (attend_chosen, [("DeepSeek-V2-Lite", "1 x 2 of 64", 9, False, True)]),
            (attend_to_entries, [("V4, chosen entries", 1, 256, 5)]),
        ],
        "linear_attention": [(linear_attention, [("Qwen3-Next", "1 decodes")])],
    }
    all_operations, tested = (
        {operation.make for entries in tables.values() for operation, _ in entries}
        for tables in (kernels.TABLES, small)
    )
    assert tested == all_operations
    monkeypatch.setattr(kernels, "TABLES", small)
    results = tmp_path / "kernels.jsonl"
    kernels.main(["--rounds", "1", "--threads", "1", "--json", str(results)])
    rows = read_jsonl(results)
    cases = [(name, ", ".join(map(str, shape))) for name in small for _, each in small[name] for shape in each]
    assert [(row["benchmark"], row["case"], row["way"]) for row in rows] == [
        (*case, way) for case in cases for way in ("torch", "C++")
    ]
    assert [row["case"] for row in rows if row["fraction_of_limit"] < 1e-6] == ["1 x 2 of 64, 4, 128, 100"] * 2
    assert "| attend | 16 heads of 64, 2 x 1 of 40, plain | C++ |" in capsys.readouterr().out


def test_work_of_experts_counts_those_that_are_chosen() -> None:
    weights = 3 * 64 * 96
    assert moe.experts_work(SHAPE, 1).num_bytes == 2 * 2 * weights
    assert moe.experts_work(SHAPE, 2).num_bytes == 2 * 3 * weights  # 2 of 4 each
    assert moe.experts_work(SHAPE, 2, FORMATS["mxfp4"]).num_bytes == 4.25 / 8 * 3 * weights
    assert moe.experts_work(SHAPE, 7).operations == 2 * 7 * 2 * weights


@pytest.mark.parametrize(
    ("table", "ways"),
    [
        ("steps", ["one step in flight", "two steps in flight"]),
        pytest.param("callers", ["LLM.generate", "64 tasks", "16 threads"], marks=pytest.mark.slow),
        pytest.param("pipeline", ["one batch of 16", "two batches of 8", "two batches of 16"], marks=pytest.mark.slow),
        ("speculation", ["no speculation", "3 draft tokens"]),
        ("kv_store", ["recomputation", "memory"]),
    ],
)
def test_settings_are_compared(
    table: str,
    ways: list[str],
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = dict(BATCHES=(2,), NUM_DRAFTS=(3,), CONVERSATIONS=8, TURNS=2, FIRST_TOKENS=32, TURN_TOKENS=16)
    for name, value in (sizes | {"ANSWER_TOKENS": 4, "rate_measure": rate_of_one_run}).items():
        monkeypatch.setattr(compare, name, value)
    results = tmp_path / "compare.jsonl"
    compare.main([table, "--model", str(tiny), "--new-tokens", "60", "--rounds", "2", "--json", str(results)])
    rows = read_jsonl(results)
    assert [row["way"] for row in rows] == ways
    for row in rows:
        pairs = zip(row["rounds"], rows[0]["rounds"], strict=True)
        assert row["ratio"] == pytest.approx(statistics.median(own["rate"] / base["rate"] for own, base in pairs))
        assert row["rate"] == statistics.median(each["rate"] for each in row["rounds"])
        assert 0 <= row.get("idle", 0) < 1
    if table == "speculation":
        assert (rows[0]["accepted"], rows[0]["steps"]) == (0, 1)
        assert 0 < rows[1]["accepted"] <= 1
        assert rows[1]["steps"] < 1
    if table == "kv_store":
        assert rows[1]["computed"] < rows[0]["computed"] <= 1
    assert f"| {ways[1]} |" in capsys.readouterr().out


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
