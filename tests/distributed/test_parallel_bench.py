"""The benchmarks of several ranks, with small sizes on real ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.bench import parallel, rebalance
from moeserve.bench.checkpoints import make_checkpoint
from moeserve.bench.decode import Generate, Workload, draw_prompts
from moeserve.bench.harness import read_jsonl
from moeserve.bench.ranks import Ranks, TimeDispatch
from moeserve.errors import EngineError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mixtral-tiny", tmp_path_factory.mktemp("checkpoints") / "mixtral-tiny")


def test_failed_rank_ends_the_benchmark(tiny: Path) -> None:
    sizes = dict(num_tokens=33, hidden_size=24, num_experts=2, top_k=3)  # fewer experts than each token needs
    with Ranks(tiny, data_parallel_size=2) as started, pytest.raises(EngineError, match=r"rank \d"):
        started.run(TimeDispatch(dispatcher="allgather", num_calls=2, **sizes))


def rate_of_one_run(kind: str, generate: Generate, workload: Workload, *, seed: int) -> Callable[[], float]:
    """Return a measure that no load of the machine makes fail: the difference of two runs may be negative."""
    return lambda: 1 / generate(draw_prompts(workload, random.Random(seed)), workload.new_tokens)


def test_all_tables_of_several_ranks(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: dict[str, Any] = dict(
        TOKENS_PER_RANK=(8,), SHAPE=parallel.SHAPE | {"hidden_size": 32}, NUM_BYTES=(64,), SAMPLE_SECONDS=0.01,
        LAYOUTS=({"data_parallel_size": 2},), REQUESTS_PER_REPLICA=(2,), CACHE_MEMORY="4MiB",
    )  # fmt: skip
    sizes["rate_measure"] = rate_of_one_run
    for name, value in sizes.items():
        monkeypatch.setattr(parallel, name, value)
    results = tmp_path / "parallel.jsonl"
    threads = torch.get_num_threads()
    try:
        parallel.main([
            "--model", str(tiny), "--ranks", "2", "--rounds", "1", "--new-tokens", "2", "--prefill-tokens", "64",
            "--json", str(results),
        ])  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    tables_of = ("| 2 |", "| 2 ranks, 8 tokens, all_to_all |", "| 2 ranks, reduce_scatter, bfloat16 |")
    for line in (*tables_of, "tp 1, dp 2, shared_memory |"):
        assert line in printed
    rows = read_jsonl(results)
    assert all(row["environment"]["load"] >= 0 for row in rows)
    tables = {name: [row for row in rows if row.get("table") == name] for name in ("agreement", "dispatch", "serving")}
    (agreement,) = tables["agreement"]
    assert agreement["num_replicas"] == 2
    assert 0 < agreement["median_us"] <= agreement["p99_us"]

    assert [row["dispatcher"] for row in tables["dispatch"]] == list(parallel.DISPATCHERS)
    gathered, *others = tables["dispatch"]
    for row in others:
        assert row["ratio"] == pytest.approx(gathered["median_us"] / row["median_us"])

    collectives = [row for row in rows if row["benchmark"] == "collectives"]
    assert len(collectives) == 2 * (len(parallel.OPERATIONS) + 1)  # sums in two dtypes
    for shared, gloo in zip(collectives[::2], collectives[1::2], strict=True):
        assert (shared["transport"], gloo["transport"]) == ("shared memory", "gloo")
        assert shared["ratio_to_gloo"] == pytest.approx(gloo["median_us"] / shared["median_us"])

    serving = {(row["what"], row["layout"]): row for row in tables["serving"]}
    names = ["one rank", "tp 1, dp 2, all_to_all", "tp 1, dp 2, shared_memory"]
    assert set(serving) == {(kind, name) for kind in ("decode", "prefill") for name in names}
    for (kind, _), row in serving.items():
        alone = serving[kind, "one rank"]["tokens_per_second"]
        assert row["ratio_to_one_rank"] == pytest.approx(row["tokens_per_second"] / alone)
        assert row["workload"]["batch"] == (4 if kind == "decode" else 2)


@pytest.mark.slow
def test_rebalancing_is_timed_before_during_and_after(tmp_path: Path) -> None:
    results = tmp_path / "rebalance.jsonl"
    rebalance.main(["--ranks", "2", "--rounds", "1", "--steps", "4", "--tokens", "64", "--json", str(results)])
    (row,) = read_jsonl(results)
    assert row["without"]["steps"] == row["before"]["steps"] == row["after"]["steps"] == 4
    assert row["during"]["steps"] >= 1
    assert row["max_over_mean"]["without"] > 1
    assert row["max_over_mean"]["after"] < row["max_over_mean"]["before"]
