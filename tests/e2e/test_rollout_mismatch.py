"""The comparison of sampled log-probabilities with those of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from reference_models import Reference

from moeserve.bench import rollout_mismatch


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_differences_are_those_of_the_dtype(
    name: str, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    rollout_mismatch.main(
        [
            *(str(reference_named(name).folder), "--dtype", "float32", "--sequences", "3", "--prompt-tokens", "5"),
            *("--new-tokens", "16", "--json", str(tmp_path / "rows.jsonl")),
        ]
    )
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["trainer"], row["experts"]) for row in rows] == [
        (dtype, experts) for dtype in ("float32", "bfloat16") for experts in ("own", "those of transformers")
    ]
    for row in rows[:2]:
        assert row["max"] < 1e-4
        assert row["K3"] < 1e-8
        assert row["other experts"] == row["other top"] == 0
    own, forced = rows[2:]
    assert own["mean"] > 1e-3
    assert own["mean"] <= own["p99"] <= own["max"]
    assert abs(own["K1"]) < own["mean"]
    assert forced["other experts"] == 0
