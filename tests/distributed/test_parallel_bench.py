"""The benchmarks of parallelism and of collectives, run small, on real ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.bench import collectives, parallel
from moeserve.bench.checkpoints import make_checkpoint
from moeserve.bench.parallel_rank import TimeAgreements, TimeDispatch, TravellingDispatcher, random_tokens
from moeserve.errors import EngineError
from moeserve.moe.dispatch.allgather import MAX_SMALL_BYTES

NUM_RANKS = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mixtral-tiny", tmp_path_factory.mktemp("checkpoints") / "mixtral-tiny")


@pytest.fixture(scope="module")
def four(tiny: Path) -> Iterator[parallel.Ranks]:
    with parallel.Ranks(NUM_RANKS, tiny) as ranks:
        yield ranks


def bytes_sent(order: TimeDispatch, rank: int) -> int:
    """A recount, token by token."""
    row_bytes = 2 * order.hidden_size
    others = NUM_RANKS - 1
    if NUM_RANKS * order.num_tokens * order.top_k * row_bytes <= MAX_SMALL_BYTES:
        rows_there = others * order.num_tokens * (8 * order.top_k + row_bytes)  # each with its routing
        return rows_there + others * order.num_tokens * order.top_k * row_bytes  # a row for every pair of the others
    total = 0
    for source in range(NUM_RANKS):
        _, routing = random_tokens(order, source)
        for experts in routing.experts_TK.tolist():
            holders = [expert * NUM_RANKS // order.num_experts for expert in experts]
            if source == rank:
                total += others * 8 * order.top_k  # everybody learns the routing
                reached = others if order.dispatcher == "allgather" else len({*holders} - {rank})
                total += reached * row_bytes
            else:
                total += holders.count(rank) * row_bytes  # each expert's output goes back
    return total


@pytest.mark.parametrize("num_tokens", [0, 1, 33, 1000])
@pytest.mark.parametrize("dispatcher", parallel.DISPATCHERS)
def test_bytes_are_those_of_a_recount(four: parallel.Ranks, dispatcher: TravellingDispatcher, num_tokens: int) -> None:
    order = TimeDispatch(
        dispatcher=dispatcher, num_tokens=num_tokens, hidden_size=24, num_experts=12, top_k=3, num_calls=2
    )
    timings = four.time(order)
    assert [timing.bytes_sent for timing in timings] == [bytes_sent(order, rank) for rank in range(NUM_RANKS)]
    for timing in timings:
        assert len(timing.seconds) == 2
        assert 0 < timing.seconds_in_collectives < sum(timing.seconds) / 2


def test_ranks_agree_as_often_as_they_are_told(four: parallel.Ranks) -> None:
    assert [len(timing.seconds) for timing in four.time(TimeAgreements(num_calls=7))] == [7] * NUM_RANKS
    assert [len(timing.seconds) for timing in four.time(TimeAgreements(num_calls=3))] == [3] * NUM_RANKS


def test_a_rank_that_fails_ends_the_benchmark(tiny: Path) -> None:
    impossible = TimeDispatch(
        dispatcher="allgather", num_tokens=1, hidden_size=8, num_experts=2, top_k=3, num_calls=1
    )  # more experts for a token than there are
    with parallel.Ranks(2, tiny) as ranks, pytest.raises(EngineError, match=r"while ranks were timed: rank \d"):
        ranks.time(impossible)


def test_from_end_to_end(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: dict[str, Any] = dict(
        NUM_RANKS=(2,), NUM_AGREEMENTS=20, TOKENS_PER_RANK=(1, 8), HIDDEN_SIZE=32, SAMPLE_SECONDS=0.01,
        LAYOUTS=((1, 2),), REQUESTS_PER_REPLICA=(2,), CACHE_MEMORY="4MiB",
    )  # fmt: skip
    for name, value in sizes.items():
        monkeypatch.setattr(parallel, name, value)
    results = tmp_path / "parallel.jsonl"
    threads = torch.get_num_threads()
    try:
        parallel.main([
            "--model", str(tiny), "--rounds", "2", "--new-tokens", "48", "--prefill-tokens", "64",
            "--json", str(results),
        ])  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert {row["benchmark"] for row in rows} == {"parallel"}
    assert all(row["environment"]["load"] >= 0 for row in rows)

    (agreement,) = [row for row in rows if row["table"] == "agreement"]
    assert agreement["num_replicas"] == 2
    assert agreement["num_agreements"] == 40
    assert 0 < agreement["median_us"] <= agreement["p99_us"]

    dispatches = {(row["tokens_per_rank"], row["dispatcher"]): row for row in rows if row["table"] == "dispatch"}
    assert set(dispatches) == {(tokens, name) for tokens in (1, 8) for name in parallel.DISPATCHERS}
    for tokens in (1, 8):
        gathered, exchanged = (dispatches[tokens, name] for name in parallel.DISPATCHERS)
        assert exchanged["ratio"] == pytest.approx(gathered["median_us"] / exchanged["median_us"])
        assert 0 < exchanged["exchanging"] < 1

    serving = {(row["what"], row["layout"]): row for row in rows if row["table"] == "serving"}
    names = ["one rank", "tp 1, dp 2, allgather", "tp 1, dp 2, all_to_all"]
    assert set(serving) == {(what, name) for what in ("decode", "prefill") for name in names}
    for (what, _), row in serving.items():
        alone = serving[what, "one rank"]["tokens_per_second"]
        assert row["ratio_to_one_rank"] == pytest.approx(row["tokens_per_second"] / alone)
        assert row["workload"]["batch"] == (4 if what == "decode" else 2)
        assert len(row["samples"]) == 2
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


def test_collectives_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collectives, "NUM_BYTES", (64, 4096))
    monkeypatch.setattr(collectives, "SAMPLE_SECONDS", 0.01)
    results = tmp_path / "collectives.jsonl"
    collectives.main(["--ranks", "2", "--rounds", "2", "--json", str(results)])
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(rows) == 2 * 2 * (len(collectives.OPERATIONS) + len(collectives.SUMS))  # sums in two dtypes
    by_transport = {name: [row for row in rows if row["transport"] == name] for name in ("shared memory", "gloo")}
    for shared, gloo in zip(*by_transport.values(), strict=True):
        assert all(shared[key] == gloo[key] for key in ("operation", "dtype", "num_bytes"))
        assert shared["ratio_to_gloo"] == pytest.approx(gloo["median_us"] / shared["median_us"])
        assert len(shared["samples"]) == len(gloo["samples"]) == 2
    ratios = [row["ratio_to_gloo"] for row in by_transport["shared memory"]]
    assert sorted(ratios)[len(ratios) // 2] > 2, ratios  # 20 to 30 where nothing else runs
    printed = capsys.readouterr().out
    assert all(operation in printed for operation in collectives.OPERATIONS)
