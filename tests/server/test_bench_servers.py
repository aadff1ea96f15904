"""`moeserve.bench.servers` with moeserve's own server, and the tokenizer that it adds to synthetic checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reference_models import SHAPES, Shape, make_reference
from tokenizers import Tokenizer

from moeserve.bench import report, servers
from moeserve.bench.vocabulary import tokenizer, with_tokenizer

NEW_TOKENS = 7


@pytest.mark.slow
@pytest.mark.ranks
def test_a_server_beside_asyncllm(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    make_reference(checkpoint, Shape("Mixtral", SHAPES["mixtral"].settings | {"vocab_size": 300}, seed=5))
    rows = tmp_path / "rows.jsonl"
    arguments = ["--model", str(checkpoint), "--server", "asyncllm", "--server", "moeserve", "--clients", "3"]
    servers.main([*arguments, "--rounds", "2", "--new-tokens", str(NEW_TOKENS), "--json", str(rows), "--threads", "1"])
    (row,) = report.read_jsonl(rows)
    assert (row["clients"], row["workload"]["batch"]) == (3, 6)
    for figures in row["engines"].values():
        assert len(figures["rounds"]) == 2
        assert 0 < figures["first_token"]["median"] <= figures["first_token"]["p99"]
        assert 0 <= figures["between_tokens"]["median"] <= figures["between_tokens"]["p99"]
        assert figures["rate"] > 0
    shown = dict(report.servers(row))
    assert shown["asyncllm"]["over"] > 0
    assert "over" not in shown["moeserve"]


def test_a_tokenizer_for_synthetic_checkpoints(tmp_path: Path) -> None:
    made = Tokenizer.from_str(json.dumps(tokenizer(4000)))
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
