"""`moeserve.bench.servers` with moeserve's own server, and the tokenizer that it adds to synthetic checkpoints."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from reference_models import SHAPES, Shape, make_reference
from tokenizers import Tokenizer

from moeserve.bench import servers
from moeserve.bench.harness import read_jsonl
from moeserve.bench.vocabulary import tokenizer, with_tokenizer

NEW_TOKENS = 7


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_reference(folder, Shape("Mixtral", SHAPES["mixtral"].settings | {"vocab_size": 300}, seed=5))
    return folder


def rows_of(checkpoint: Path, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    path = folder / "rows.jsonl"
    common = ["--model", str(checkpoint), "--rounds", "2", "--new-tokens", str(NEW_TOKENS), "--json", str(path)]
    servers.main([*common, *arguments])
    for row in read_jsonl(path):
        for figures in row["engines"].values():
            assert len(figures["rounds"]) == 2
            assert 0 < figures["first_token"]["median"] <= figures["first_token"]["p99"]
            assert 0 <= figures["between_tokens"]["median"] <= figures["between_tokens"]["p99"]
            assert figures["rate"] > 0
    return read_jsonl(path)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_server_beside_asyncllm(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--server", "asyncllm", "--server", "moeserve", "--clients", "3", "--threads", "1"]
    (row,) = rows_of(checkpoint, tmp_path, *arguments)
    assert (row["clients"], row["workload"]["batch"]) == (3, 6)
    assert list(row["engines"]) == ["asyncllm", "moeserve"]


def test_requests_that_arrive_at_a_rate(checkpoint: Path, tmp_path: Path) -> None:
    """Two rates, with long prompts among the others, whose latencies stand apart."""
    arguments = ["--server", "asyncllm", "--rate", "40", "--rate", "200", "--requests", "6", "--prompt-tokens", "8"]
    rows = rows_of(checkpoint, tmp_path, *arguments, "--long-every", "60", "--long-tokens", "30")
    assert [row["load"] for row in rows] == ["40 requests/s", "200 requests/s"]
    for row in rows:
        assert row["workload"] == {"batch": 7, "prompt_tokens": 8, "new_tokens": NEW_TOKENS}
        assert row["engines"]["asyncllm"]["prompts of 30"]["first_token"]["median"] > 0


@pytest.mark.slow
@pytest.mark.ranks
def test_prefill_and_decode_behind_a_router(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--server", "moeserve", "--server", "prefill_decode", "--rate", "20", "--requests", "4"]
    (row,) = rows_of(checkpoint, tmp_path, *arguments, "--threads", "2")
    assert list(row["engines"]) == ["moeserve", "prefill_decode"]


def test_arrivals_have_the_given_rate() -> None:
    arrivals = servers.draw_arrivals(50.0, 4000, random.Random(3))
    assert len(arrivals) / arrivals[-1] == pytest.approx(50, rel=0.1)
    assert sorted(arrivals) == arrivals


def test_a_tokenizer_for_synthetic_checkpoints(tmp_path: Path) -> None:
    made = Tokenizer.from_str(tokenizer(4000))
    assert made.get_vocab_size() == 4000
    for text in ("hello world", "naïve", "日本\n"):
        assert made.decode(made.encode(text).ids) == text
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"vocab_size": 300}))
    folder = with_tokenizer(checkpoint)
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert with_tokenizer(checkpoint) == folder == with_tokenizer(folder)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    assert times.keys() == {"config.json", "tokenizer.json", "tokenizer_config.json"}
