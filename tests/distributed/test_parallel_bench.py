"""The benchmarks of several ranks, with small sizes on real ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moeserve.bench import compare, ranks, rebalance
from moeserve.bench.checkpoints import make_checkpoint
from moeserve.bench.decode import Generate, Workload, draw_prompts
from moeserve.bench.harness import read_jsonl
from moeserve.bench.ranks import Ranks, TimeDispatch
from moeserve.errors import EngineError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mixtral-tiny", tmp_path_factory.mktemp("checkpoints") / "mixtral-tiny")


@pytest.mark.slow
def test_failed_rank_ends_the_benchmark(tiny: Path) -> None:
    sizes = dict(num_tokens=33, hidden_size=24, num_experts=2, top_k=3)  # fewer experts than each token needs
    with Ranks(tiny, data_parallel_size=2) as started, pytest.raises(EngineError, match=r"rank \d"):
        started.run(TimeDispatch(dispatcher="allgather", num_calls=2, **sizes))


def test_all_tables_of_several_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = dict(TOKENS_PER_RANK=(8,), SHAPE=ranks.SHAPE | {"hidden_size": 32}, NUM_BYTES=(64,), SAMPLE_SECONDS=0.01)
    for name, value in sizes.items():
        monkeypatch.setattr(ranks, name, value)
    results, threads = tmp_path / "ranks.jsonl", torch.get_num_threads()
    try:
        ranks.main(["--ranks", "2", "--rounds", "1", "--json", str(results)])
    finally:
        torch.set_num_threads(threads)
    assert "| reduce_scatter | bfloat16 |" in capsys.readouterr().out
    rows = read_jsonl(results)
    assert all(row["environment"]["load"] >= 0 for row in rows)
    (agreement,), dispatch, collectives = ([row for row in rows if row["table"] == each] for each in ranks.TABLES)
    assert agreement["num_ranks"] == 2
    assert 0 < agreement["median_us"] <= agreement["p99_us"]

    assert [row["way"] for row in dispatch] == list(ranks.DISPATCHERS)
    assert len(collectives) == 2 * (len(ranks.OPERATIONS) + 1)  # sums in two dtypes
    assert {row["way"] for row in collectives} == {"gloo", "shared memory"}
    for first, *others in (dispatch, *(collectives[index : index + 2] for index in range(0, len(collectives), 2))):
        for row in others:
            assert row["ratio"] == pytest.approx(first["median_us"] / row["median_us"])


def rate_of_one_run(kind: str, generate: Generate, workload: Workload) -> Callable[[], float]:
    """Return a measure that no load of the machine makes fail: the difference of two runs may be negative."""
    return lambda: 1 / generate(draw_prompts(workload, random.Random(0)), workload.new_tokens)


def test_two_ranks_are_compared_with_one(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "rate_measure", rate_of_one_run)
    monkeypatch.setattr(compare, "PREFILL_TOKENS", 64)
    results = tmp_path / "compare.jsonl"
    compare.main(["ranks", "--model", str(tiny), "--new-tokens", "3", "--rounds", "1", "--json", str(results)])
    rows = read_jsonl(results)
    names = ["one rank", "all_to_all", "shared_memory"]
    found = [(row["tp"], row["dp"], row["kind"], row["batch"], row["way"]) for row in rows]
    works = [("decode", 1), ("decode", 8), ("prefill", 1)]
    layouts = [(2, 1), (1, 2)]
    assert found == [(tp, dp, kind, dp * batch, name) for tp, dp in layouts for kind, batch in works for name in names]
    assert [row["ratio"] for row in rows[:3]] == [row["rate"] / rows[0]["rate"] for row in rows[:3]]


@pytest.mark.slow
def test_rebalancing_is_timed_before_during_and_after(tmp_path: Path) -> None:
    results = tmp_path / "rebalance.jsonl"
    rebalance.main(["--ranks", "2", "--rounds", "1", "--steps", "4", "--tokens", "64", "--json", str(results)])
    (row,) = read_jsonl(results)
    assert row["without"]["steps"] == row["before"]["steps"] == row["after"]["steps"] == 4
    assert row["during"]["steps"] >= 1
    assert row["max_over_mean"]["without"] > 1
    assert row["max_over_mean"]["after"] < row["max_over_mean"]["before"]
