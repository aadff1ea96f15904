"""Collectives on graphs: played, they carry what is there by then, and say what is wrong as they do when begun."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from joining import join
from ranks import Place, Ranks

from moeserve.distributed.groups import Groups
from moeserve.errors import DistributedError
from moeserve.ops.cpu.native import native_kernels

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels are not built")

SIZES = [2, 1, 3]


def record(groups: Groups, rows: torch.Tensor, parts: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A graph that gathers rows and adds parts, and where both end up."""
    kernels = native_kernels()
    assert kernels is not None
    sizes = SIZES[: groups.ep.world_size]
    graph = kernels.CpuGraph()
    graph.begin_capture()
    try:
        gathered = groups.ep.all_gather(rows, sizes)
        summed = groups.ep.reduce_scatter(parts, sizes)
    finally:
        graph.end_capture()
    return graph, gathered, summed


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_played_collectives_carry_what_is_there_by_then(ranks: Ranks, num_ranks: int) -> None:
    assert ranks.run(num_ranks, "test_captured_collectives:rounds_that_went_wrong") == [[]] * num_ranks


def rounds_that_went_wrong(place: Place) -> list[int]:
    """Ranks play or begin their collectives as they like: to the others it is the same."""
    groups = join(place)
    sizes = SIZES[: place.num_ranks]
    rows, parts = torch.empty(sizes[place.rank], 5), torch.empty(sum(sizes), 7, dtype=torch.bfloat16)
    graph, played_rows, played_sum = record(groups, rows.zero_(), parts.zero_())
    wrong = []
    for turn in range(20):
        torch.manual_seed(turn)
        all_rows, all_parts = torch.randn(sum(sizes), 5), torch.randn(place.num_ranks, sum(sizes), 7).bfloat16()
        rows.copy_(all_rows.split(sizes)[place.rank])
        parts.copy_(all_parts[place.rank])
        if (turn + place.rank) % 3:
            graph.replay()
            gathered, summed = played_rows, played_sum
        else:
            gathered = groups.ep.all_gather(rows, sizes)
            summed = groups.ep.reduce_scatter(parts, sizes)
        total = all_parts[0].float()
        for part in all_parts[1:]:
            total += part.float()
        expected = total.bfloat16().split(sizes)[place.rank]
        if not torch.equal(gathered, all_rows) or not torch.equal(summed, expected):
            wrong.append(turn)
    groups.world.barrier()
    return wrong


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_rank_that_dies_is_named_by_those_that_play(ranks: Ranks, operation: str) -> None:
    outcomes = ranks.start(3, "test_captured_collectives:what_the_others_say", operation=operation).outcomes(60.0)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        told = outcomes[rank].value
        assert told.startswith(f"rank {rank}: {operation} of group 'ep' (ranks 0, 1, 2; collective "), told
        assert "step 7, layer 4" in told
        assert "rank 1" in told.partition("failed: ")[2]


def what_the_others_say(place: Place, operation: str) -> str:
    groups = join(place)
    sizes = SIZES[: place.num_ranks]
    groups.set_layer(4)
    kernels = native_kernels()
    assert kernels is not None
    graph = kernels.CpuGraph()
    graph.begin_capture()
    match operation:
        case "all_gather":
            groups.ep.all_gather(torch.zeros(sizes[place.rank], 5), sizes)
        case "reduce_scatter":
            groups.ep.reduce_scatter(torch.zeros(sum(sizes), 7), sizes)
        case "all_reduce":
            groups.ep.all_reduce(torch.zeros(9))
    graph.end_capture()
    groups.set_layer(None)
    groups.begin_step(7)
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DistributedError) as caught:
        graph.replay()
    return str(caught.value)


def test_gloo_and_checked_collectives_are_not_recorded(ranks: Ranks) -> None:
    assert ranks.run(2, "test_captured_collectives:what_supports_cpu_graphs") == [[True, False, False]] * 2


def what_supports_cpu_graphs(place: Place) -> list[bool]:
    answers = []
    for index, options in enumerate(({}, dict(transport="gloo"), dict(check_order=True))):
        groups = join(place, key=str(index), **options)
        answers.append(groups.supports_cpu_graphs)
        groups.world.barrier()
    return answers
