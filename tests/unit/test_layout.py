"""`moeserve plan`: what ranks hold and what travels, against recounts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from thread_ranks import Record, ThreadGroup, run

from moeserve import cli
from moeserve.distributed.groups import unconnected
from moeserve.distributed.mesh import Mesh
from moeserve.errors import SettingsError
from moeserve.expert_placement.placement import Placement
from moeserve.models.registry import describe
from moeserve.models.summary import summarize
from moeserve.moe.dispatch.all_to_all import AllToAllDispatcher
from moeserve.moe.dispatch.allgather import AllGatherDispatcher
from moeserve.moe.dispatch.base import PackedTokens
from moeserve.moe.router import Routing
from moeserve.planner.layout import Holder, as_text, find_layouts

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
REPLICATED = ("norms", "routers", "shared experts")


def folder_of(tmp_path: Path, model: str, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[model] | changes))
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
    choices = 3 * 2 * 8  # to 3 other ranks, 2 experts, int64
    expected = choices + (sum(sent) + sum(received)) / len(sent)
    for layout in found.layouts:
        assert layout.dispatch_bytes == pytest.approx(expected)
        assert layout.allgather_bytes == pytest.approx(choices + 3 * row_bytes + sum(received) / len(received))
        assert layout.attention_bytes == {1: 0, 2: 2 * row_bytes, 4: 6 * row_bytes}[layout.tp]
        assert layout.cache_bytes_per_token == 2 * 32 * 8 * 128 * 2 / min(layout.tp, 8)
        assert layout.experts_per_rank == (2, 2)


@pytest.mark.parametrize(
    ("model", "changes"),
    [("Mixtral-8x7B", {}), ("DeepSeek-V2-Lite", {}), ("DeepSeek-V2-Lite", {"n_routed_experts": 10})],
    ids=["2 of 8", "6 of 64", "6 of 10, uneven"],
)
def test_bytes_that_travel_are_those_that_dispatchers_send(model: str, changes: dict[str, int], tmp_path: Path) -> None:
    """Random tokens of 4 ranks, each collective counted. Rows are narrow, so that choices count beside them."""
    width, num_tokens = 64, 2000  # of each rank
    folder = folder_of(tmp_path, model, hidden_size=width, **changes)
    moe = describe(folder).model.first_moe
    assert moe is not None
    num_experts, top_k = moe.router.num_experts, moe.router.top_k
    placement = Placement.even(num_experts, 4)
    step = cast(Any, SimpleNamespace(tokens_per_rank=(num_tokens,) * 4, padding=None))

    def mean_bytes(kind: type[AllGatherDispatcher] | type[AllToAllDispatcher]) -> float:
        def life(group: ThreadGroup) -> list[Record]:
            generator = torch.Generator().manual_seed(group.rank_in_group)
            chances_TE = torch.ones(num_tokens, num_experts)
            experts_TK = torch.multinomial(chances_TE, top_k, generator=generator)  # without replacement
            hidden_TD = torch.zeros(num_tokens, width, dtype=torch.bfloat16)
            dispatcher: Any = kind(cast(Any, group), placement, torch.device("cpu"))
            arrived = dispatcher.dispatch(hidden_TD, Routing(experts_TK, torch.ones(num_tokens, top_k)), step).wait()
            assert isinstance(arrived.tokens, PackedTokens)
            dispatcher.combine(arrived.tokens.rows_RD, arrived.handle).wait()
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
        assert layout.dispatch_bytes == pytest.approx(mean_bytes(AllToAllDispatcher), rel=0.015)
        assert layout.allgather_bytes == pytest.approx(mean_bytes(AllGatherDispatcher), rel=0.015)


GROUPED: list[tuple[int, int, int, bool]] = [
    (1, 8, 0, False),
    (4, 8, 0, False),
    (4, 8, 32, True),
    (4, 8, 30, False),
    (8, 4, 40, True),
    (16, 8, 32, True),
]


@pytest.mark.parametrize(("num_nodes", "ranks_per_node", "num_redundant", "has_loads"), GROUPED)
def test_groups_of_the_router_stay_whole(
    num_nodes: int, ranks_per_node: int, num_redundant: int, has_loads: bool, tmp_path: Path
) -> None:
    """DeepSeek-V3 has 8 groups of 32 experts: nodes have whole groups, or where nodes are more, groups whole nodes."""
    folder = folder_of(tmp_path, "DeepSeek-V3")
    loads = tmp_path / "loads.json"
    hot = [[float((expert * layer) % 97 + 1) for expert in range(256)] for layer in range(1, 59)]
    loads.write_text(json.dumps({"loads": hot}))
    (layout,) = find_layouts(
        *(folder, num_nodes * ranks_per_node, None, 1),
        loads=loads if has_loads else None,
        num_redundant=num_redundant,
        num_nodes=num_nodes,
        keeps_groups=True,
    ).layouts
    nodes_of_group: dict[int, set[int]] = {}
    groups_of_node: dict[int, set[int]] = {}
    for holder in layout.holders:
        for expert in holder.experts:
            nodes_of_group.setdefault(expert // 32, set()).add(holder.rank // ranks_per_node)
            groups_of_node.setdefault(holder.rank // ranks_per_node, set()).add(expert // 32)
    assert {len(nodes) for nodes in nodes_of_group.values()} == {max(1, num_nodes // 8)}
    assert {len(groups) for groups in groups_of_node.values()} == {max(1, 8 // num_nodes)}
    slots = [len(holder.experts) for holder in layout.holders]
    assert sum(slots) == 256 + num_redundant
    assert max(slots) - min(slots) <= 1


def test_groups_that_are_kept_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(folder_of(tmp_path, "DeepSeek-V3")), "--num-redundant-experts", "32", "--hardware", "h800"]
    assert cli.main([*command, "--nodes", "4", "--exchange", "node_limited"]) == 0
    assert "each 8 ranks in order hold whole groups of the router's experts\n" in capsys.readouterr().out
    assert cli.main([*command, "--nodes", "16", "--exchange", "node_limited"]) == 0
    assert "each 16 ranks in order hold whole groups of the router's experts\n" in capsys.readouterr().out
    assert cli.main([*command, "--nodes", "4", "--exchange", "by_node"]) == 0
    assert "groups" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "num_ranks", "options", "message"),
    [
        ("DeepSeek-V3", 24, {"num_nodes": 3}, "8 groups of experts and 3 nodes: one number must divide the other"),
        ("DeepSeek-V3", 32, {"num_nodes": 4, "shared_as_routed": True}, "also choose experts that are in no group"),
        # A node of two ranks holds two copies of each of its 64 experts, and would have 129 slots.
        (
            "DeepSeek-V3",
            8,
            {"num_nodes": 4, "num_redundant": 257},
            "each 2 ranks in order must hold whole groups of experts, but 513 slots on 8 ranks divide group 0 of the "
            "router's 8; use by_node, or other numbers of redundant experts and ranks",
        ),
        ("Mixtral-8x7B", 16, {"num_nodes": 2}, "the model's router does not choose groups of experts; use by_node"),
    ],
)
def test_groups_that_cannot_be_kept(
    model: str, num_ranks: int, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as error:
        find_layouts(folder_of(tmp_path, model), num_ranks, None, 1, keeps_groups=True, **options)
    assert message in str(error.value)
    assert str(error.value).startswith("exchange=node_limited: ")


def test_layouts_that_cannot_be_are_refused_with_the_reason(tmp_path: Path) -> None:
    found = find_layouts(folder_of(tmp_path, "Qwen3-30B-A3B"), 12, None)
    refused = {layout.tp: layout.refusal for layout in found.layouts if layout.refusal}
    assert all((layout.holders == ()) == (layout.refusal is not None) for layout in found.layouts)
    assert refused == {tp: f"32 attention heads cannot be divided evenly over {tp} ranks" for tp in (3, 6, 12)}


def test_who_holds_what(tmp_path: Path) -> None:
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


def test_the_holders_of_every_layout_hold_everything(tmp_path: Path) -> None:
    """Experts once in all, heads once in each replica, as many as the table says."""
    for layout in find_layouts(folder_of(tmp_path, "Mixtral-8x7B"), 32, None).layouts:
        assert [holder.rank for holder in layout.holders] == [*range(32)]
        assert [expert for holder in layout.holders for expert in holder.experts] == [*range(8)]
        for replica in range(layout.dp):
            of_replica = [holder.heads for holder in layout.holders if holder.replica == replica]
            assert len(of_replica) == layout.tp
            assert [head for first, last in of_replica for head in range(first, last + 1)] == [*range(32)]
            assert {last + 1 - first for first, last in of_replica} == {layout.heads_per_rank}


@pytest.mark.parametrize(("num_ranks", "is_listed"), [(16, True), (32, False)])
def test_every_layout_of_few_ranks_is_told_rank_by_rank(num_ranks: int, is_listed: bool, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "Mixtral-8x7B")
    blocks = as_text(find_layouts(folder, num_ranks, None)).split("\n\n")[2:]
    sizes = [1, 2, 4, 8, 16] if is_listed else []
    assert [block.splitlines()[0] for block in blocks] == [f"tp {tp}, dp {num_ranks // tp}" for tp in sizes]
    assert all(len(block.splitlines()) == 1 + num_ranks for block in blocks)
    (_, _, chosen) = as_text(find_layouts(folder, num_ranks, None, tp=4)).split("\n\n")
    assert chosen.splitlines()[0] == f"tp 4, dp {num_ranks // 4}"
    assert len(chosen.splitlines()) == 1 + num_ranks


@pytest.mark.parametrize(
    ("num_ranks", "tp", "message"),
    [
        (0, None, "ranks=0 cannot be laid out; choose from 1 to 4096 ranks"),
        (-4, 2, "ranks=-4 cannot be laid out; choose from 1 to 4096 ranks"),
        (4097, None, "ranks=4097 cannot be laid out; choose from 1 to 4096 ranks"),
        (2**31 - 1, None, "ranks=2147483647 cannot be laid out; choose from 1 to 4096 ranks"),
        (12, 5, "tp=5 does not divide ranks=12; use one of 1, 2, 4"),
        (12, 0, "tp=0 does not divide ranks=12; use one of 1, 2, 4"),
        (12, 24, "tp=24 does not divide ranks=12; use one of 1, 2, 4"),
        (12, 6, "tp=6: 32 attention heads cannot be divided evenly over 6 ranks; use one of 1, 2, 4"),
    ],
)
def test_what_cannot_be_asked_for(
    num_ranks: int, tp: int | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, "Qwen3-30B-A3B")
    with pytest.raises(SettingsError) as error:
        find_layouts(folder, num_ranks, None, tp)
    assert str(error.value) == message
    arguments = ["plan", str(folder), f"--ranks={num_ranks}", *([] if tp is None else [f"--tp={tp}"])]
    assert cli.main(arguments) == 1
    assert capsys.readouterr() == ("", f"moeserve: {message}\n")


def test_most_ranks(tmp_path: Path) -> None:
    """In seconds, not minutes."""
    found = find_layouts(folder_of(tmp_path, "DeepSeek-V3"), 4096, None, tp=128)
    assert len(found.layouts[0].holders) == 4096
    assert as_text(found).endswith("rank 4095: replica 31, head 127, expert 255")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(folder_of(tmp_path, "DeepSeek-V3"))
    assert cli.main(["plan", folder, "--ranks", "320"]) == 0
    assert "128 attention heads cannot be divided evenly over 5 ranks" in capsys.readouterr().out


def test_the_command_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All layouts, or the one asked for, with their holders whatever their number."""
    folder = str(folder_of(tmp_path, "Mixtral-8x7B"))
    assert cli.main(["plan", folder, "--ranks", "32", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert [(layout["tp"], len(layout["holders"])) for layout in layouts] == [(tp, 32) for tp in (1, 2, 4, 8, 16, 32)]
    assert cli.main(["plan", folder, "--ranks", "4", "--tp", "2", "--json"]) == 0
    (layout,) = json.loads(capsys.readouterr().out)["layouts"]
    assert layout["tp"] == 2
    assert layout["holders"][3] == {"rank": 3, "replica": 1, "heads": [16, 31], "experts": [6, 7]}
