"""`moeserve plan`: the weights of each rank and the bytes exchanged, against recounts."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from build_contexts import cpu_context
from thread_ranks import Record, ThreadGroup, run

from moeserve import cli
from moeserve.distributed.groups import unconnected
from moeserve.distributed.mesh import Mesh
from moeserve.errors import SettingsError
from moeserve.layers.moe.dispatch.base import PackedTokens
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.moe.router import Routing
from moeserve.models.registry import describe
from moeserve.models.summary import summarize
from moeserve.planner.layout import Holder, as_text, find_layouts

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
REPLICATED = ("norms", "routers", "shared experts")


def folder_of(tmp_path: Path, model: str, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[model] | changes))
    return tmp_path


@pytest.mark.parametrize(("tp", "dp"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("model", ["Mixtral-8x7B", "DeepSeek-V2-Lite", "gpt-oss-20b"])
def test_ranks_together_hold_the_whole_model(model: str, tp: int, dp: int, tmp_path: Path) -> None:
    """Experts are held once, what tp divides once per replica, and the rest on every rank."""
    description = describe(folder_of(tmp_path, model))
    mesh = Mesh(tp=tp, dp=dp)
    whole, held = Counter[str](), Counter[str]()
    for part in summarize(description, "bfloat16").parts:
        whole[part.name] += part.num_parameters
    for rank in range(mesh.world_size):
        for part in summarize(description, "bfloat16", unconnected(mesh, rank)).parts:
            held[part.name] += part.num_parameters
    assert held["routed experts"] == whole["routed experts"]
    for name in REPLICATED:
        assert held.get(name, 0) == mesh.world_size * whole.get(name, 0)
    for name in ("embedding", "output head", "dense networks"):
        assert held.get(name, 0) == dp * whole.get(name, 0)
    # Attention is divided except for compressing projections, norms, and biases of the output.
    assert dp * whole["attention"] <= held["attention"] < 1.4 * dp * whole["attention"]


def test_cache_and_rows_of_attention(tmp_path: Path) -> None:
    row_bytes = 4096 * 2
    for layout in find_layouts(folder_of(tmp_path, "Mixtral-8x7B"), 4, None).layouts:
        assert layout.attention_bytes == {1: 0, 2: 2 * row_bytes, 4: 6 * row_bytes}[layout.tp]
        assert layout.cache_bytes_per_token == 2 * 32 * 8 * 128 * 2 / layout.tp
        assert layout.experts_per_rank == (2, 2)


@pytest.mark.parametrize(
    ("model", "changes"),
    [("Mixtral-8x7B", {}), ("DeepSeek-V2-Lite", {"n_routed_experts": 10})],
    ids=["2 of 8", "6 of 10, uneven"],
)
def test_exchanged_bytes_equal_those_of_the_dispatchers(model: str, changes: dict[str, int], tmp_path: Path) -> None:
    """Count the bytes of each collective for random tokens of 4 ranks. Narrow rows make expert ids significant."""
    width, num_tokens = 64, 2000  # of each rank
    folder = folder_of(tmp_path, model, hidden_size=width, **changes)
    moe = describe(folder).model.first_moe
    assert moe is not None
    num_experts, top_k = moe.router.num_experts, moe.router.top_k
    placement = Placement.even(num_experts, 4)
    step = cast(Any, SimpleNamespace(tokens_per_rank=(num_tokens,) * 4, padding=None))

    def mean_bytes(name: Literal["allgather", "all_to_all"]) -> float:
        def life(group: ThreadGroup) -> list[Record]:
            generator = torch.Generator().manual_seed(group.rank_in_group)
            chances_TE = torch.ones(num_tokens, num_experts)
            experts_TK = torch.multinomial(chances_TE, top_k, generator=generator)  # without replacement
            hidden_TD = torch.zeros(num_tokens, width, dtype=torch.bfloat16)
            dispatcher = TorchDispatchers(name, cast(Any, group), cpu_context()).make(placement)
            arrived = dispatcher.dispatch(hidden_TD, Routing(experts_TK, torch.ones(num_tokens, top_k)), step).wait()
            assert isinstance(arrived.tokens, PackedTokens)
            arrived.combine(arrived.tokens.rows_RD).wait()
            return group.records

        num_bytes = sum(
            rows.nbytes
            for source, records in enumerate(run(4, life))
            for record in records
            for to, rows in enumerate(record.sent)
            if to != source
        )
        return num_bytes / (4 * num_tokens)

    for layout in find_layouts(folder, 4, "bfloat16").layouts:
        assert layout.dispatch_bytes == pytest.approx(mean_bytes("all_to_all"), rel=0.015)
        assert layout.allgather_bytes == pytest.approx(mean_bytes("allgather"), rel=0.015)


def test_experts_of_one_replica_are_sliced_where_the_engine_slices_them(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "Mixtral-8x7B")
    found = find_layouts(folder, 4, None, expert_parallel="auto")
    assert [(layout.tp, layout.expert_slices) for layout in found.layouts] == [(1, 1), (2, 1), (4, 4)]
    assert find_layouts(folder, 4, None).layouts[2].weight_bytes == found.layouts[2].weight_bytes
    assert found.layouts[2].experts_per_rank == (8, 8)
    # To each of 3 ranks the row with two choices, and from each the two outputs in float32.
    assert found.layouts[2].allgather_bytes == 3 * (4096 * 2 + 2 * 8 + 2 * 4096 * 4)
    assert "8 x 1/4" in as_text(found)
    with pytest.raises(SettingsError, match="768"):
        find_layouts(folder_of(tmp_path, "Qwen3-30B-A3B"), 4, None, 4, expert_parallel=False)


def test_impossible_layouts_show_the_reason(tmp_path: Path) -> None:
    found = find_layouts(folder_of(tmp_path, "Qwen3-30B-A3B"), 12, None)
    refused = {layout.tp: layout.refusal for layout in found.layouts if layout.refusal}
    assert refused.keys() == {3, 6, 12}
    assert all(f"{tp} ranks" in reason for tp, reason in refused.items())
    assert all(reason in as_text(found) for reason in refused.values())


def test_contents_of_ranks(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "Mixtral-8x7B")
    (layout,) = find_layouts(folder, 6, None, tp=2).layouts
    assert (layout.tp, layout.dp) == (2, 3)
    assert layout.holders[0] == Holder(rank=0, replica=0, heads=(0, 15), experts=(0,))
    assert layout.holders[2] == Holder(rank=2, replica=1, heads=(0, 15), experts=(2, 3))
    assert layout.holders[5] == Holder(rank=5, replica=2, heads=(16, 31), experts=(6, 7))
    lines = as_text(find_layouts(folder, 32, None, tp=32)).splitlines()
    assert lines[-33] == "tp 32, dp 1"
    assert lines[-32] == "rank 0: replica 0, head 0, no experts"
    assert lines[-1] == "rank 31: replica 0, head 31, expert 7"


@pytest.mark.parametrize(
    ("num_ranks", "tp", "mentioned"),
    [
        (0, None, "ranks=0"),
        (4097, None, "ranks=4097"),
        (12, 5, "tp=5.*1, 2, 4"),
        (12, 0, "tp=0.*1, 2, 4"),
        (12, 6, "tp=6.*1, 2, 4"),
    ],
)
def test_impossible_arguments(
    num_ranks: int, tp: int | None, mentioned: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, "Qwen3-30B-A3B")
    with pytest.raises(SettingsError, match=mentioned) as error:
        find_layouts(folder, num_ranks, None, tp)
    arguments = ["plan", str(folder), f"--ranks={num_ranks}", *([] if tp is None else [f"--tp={tp}"])]
    assert cli.main(arguments) == 1
    as_flags = re.sub(r"\b(ranks|tp)=(\d+)", r"--\1 \2", str(error.value))  # the command line's spelling
    assert as_flags in capsys.readouterr().err


def test_the_command_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The holders are complete, however many there are."""
    folder = str(folder_of(tmp_path, "Mixtral-8x7B"))
    assert cli.main(["plan", folder, "--ranks", "32", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert [(layout["tp"], len(layout["holders"])) for layout in layouts] == [(tp, 32) for tp in (1, 2, 4, 8, 16, 32)]
    assert layouts[1]["holders"][31] == {"rank": 31, "replica": 15, "stage": 0, "heads": [16, 31], "experts": [7]}


def test_pipeline_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages of two replicas of two ranks: experts are divided over the four ranks of a stage."""
    folder = folder_of(tmp_path, "Mixtral-8x7B")
    (layout,) = find_layouts(folder, 8, None, 2, pp=2, pipeline_layers=[17, 15]).layouts
    (one_stage,) = find_layouts(folder, 4, None, 2).layouts
    assert (layout.tp, layout.dp, layout.pp) == (2, 2, 2)
    assert [(stage.first_layer, stage.num_layers) for stage in layout.stages] == [(0, 17), (17, 15)]
    assert sum(stage.weight_bytes for stage in layout.stages) == one_stage.weight_bytes
    assert sum(stage.cache.bytes_per_token for stage in layout.stages) == one_stage.cache_bytes_per_token
    assert layout.weight_bytes == layout.stages[0].weight_bytes
    assert [(each.replica, each.stage, each.experts) for each in layout.holders[:4]] == [
        (0, 0, (0, 1)),
        (0, 0, (2, 3)),
        (0, 1, (0, 1)),
        (0, 1, (2, 3)),
    ]
    assert cli.main(["plan", str(folder), "--ranks", "8", "--tp", "2", "-pp", "3"]) == 1
    assert "--pipeline-parallel-size 3" in capsys.readouterr().err
