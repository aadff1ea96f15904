"""`moeserve plan`: what ranks hold and what travels, against recounts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from moeserve import cli
from moeserve.distributed.group import unconnected
from moeserve.distributed.mesh import Mesh
from moeserve.models.registry import describe
from moeserve.models.summary import summarize
from moeserve.planner.layout import find_layouts, who_holds_what

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
REPLICATED = ("norms", "routers", "shared experts")


def folder_of(tmp_path: Path, model: str) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[model]))
    return tmp_path


@pytest.mark.parametrize(("tp", "dp"), [(1, 3), (2, 2), (4, 1)])
@pytest.mark.parametrize("model", ["Mixtral-8x7B", "DeepSeek-V2-Lite", "gpt-oss-20b"])
def test_the_ranks_hold_the_whole_model_between_them(model: str, tp: int, dp: int, tmp_path: Path) -> None:
    """Experts once, what tp divides once per replica, and the rest on every rank."""
    description = describe(folder_of(tmp_path, model))
    whole = {part.name: part.num_parameters for part in summarize(description, "bfloat16").parts}
    mesh = Mesh(tp=tp, dp=dp)
    held = dict.fromkeys(whole, 0)
    for rank in range(mesh.world_size):
        for part in summarize(description, "bfloat16", unconnected(mesh, rank)).parts:
            held[part.name] += part.num_parameters
    assert held["routed experts"] == whole["routed experts"]
    for name in REPLICATED:
        assert held.get(name, 0) == mesh.world_size * whole.get(name, 0)
    for name in ("embedding", "output head", "dense networks"):
        assert held.get(name, 0) == dp * whole.get(name, 0)
    # Attention is divided but for what all heads share: compressing projections, norms, and biases of the output.
    assert dp * whole["attention"] <= held["attention"] < 1.4 * dp * whole["attention"]


def test_bytes_that_travel_are_those_of_every_choice_counted(tmp_path: Path) -> None:
    """8 experts on 4 ranks, 2 per token: all 28 pairs, seen from all 4 ranks."""
    found = find_layouts(folder_of(tmp_path, "Mixtral-8x7B"), 4, None)
    row_bytes, sent, received = 4096 * 2, [], []
    for own, pair in itertools.product(range(4), itertools.combinations(range(8), 2)):
        elsewhere = [expert // 2 for expert in pair if expert // 2 != own]
        sent.append(len(set(elsewhere)) * row_bytes)
        received.append(len(elsewhere) * row_bytes)
    expected = (sum(sent) + sum(received)) / len(sent)
    for layout in found.layouts:
        assert layout.dispatch_bytes == pytest.approx(expected)
        assert layout.allgather_bytes == pytest.approx(3 * row_bytes + sum(received) / len(received))
        assert layout.attention_bytes == 2 * row_bytes * (layout.tp - 1) / layout.tp
        assert layout.cache_bytes_per_token == 2 * 32 * 8 * 128 * 2 / min(layout.tp, 8)
        assert layout.experts_per_rank == (2, 2)


def test_layouts_that_cannot_be_are_refused_with_the_reason(tmp_path: Path) -> None:
    found = find_layouts(folder_of(tmp_path, "Qwen3-30B-A3B"), 12, None)
    refused = {layout.tp: layout.refusal for layout in found.layouts if layout.refusal}
    assert refused == {tp: f"32 attention heads cannot be divided evenly over {tp} ranks" for tp in (3, 6, 12)}


def test_who_holds_what(tmp_path: Path) -> None:
    lines = list(who_holds_what(folder_of(tmp_path, "Mixtral-8x7B"), Mesh(tp=2, dp=3)))
    assert lines[0] == "rank 0: replica 0, heads 0-15, experts 0"
    assert lines[2] == "rank 2: replica 1, heads 0-15, experts 2-3"
    assert lines[5] == "rank 5: replica 2, heads 16-31, experts 6-7"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(folder_of(tmp_path, "DeepSeek-V3"))
    assert cli.main(["plan", folder, "--ranks", "320"]) == 0
    assert "128 attention heads cannot be divided evenly over 5 ranks" in capsys.readouterr().out
    assert cli.main(["plan", folder, "--ranks", "8", "--tp", "3"]) == 1
    assert "--tp 3 does not divide --ranks 8" in capsys.readouterr().err
