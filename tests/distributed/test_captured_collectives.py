"""Collectives in CPU graphs: a replay carries the current values, and fails with the error of an eager collective."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from joining import join
from ranks import Place, Ranks

from moeserve.distributed.groups import Groups
from moeserve.distributed.transport import sum_in_tree
from moeserve.errors import DistributedError
from moeserve.ops.native import native_kernels

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels are not built")

SIZES = [2, 1, 3]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_replays_carry_current_values(ranks: Ranks, num_ranks: int) -> None:
    assert ranks.run(num_ranks, "test_captured_collectives:failed_rounds") == [[]] * num_ranks


def failed_rounds(place: Place) -> list[int]:
    """Replay in some rounds and run eagerly in others, differently on each rank. Return the rounds of wrong results.

    The groups have equal members, so all of their collectives use one connection.
    """
    kernels = native_kernels()
    assert kernels is not None
    groups = join(place)
    sizes = SIZES[: place.num_ranks]
    rows, parts = torch.zeros(sizes[place.rank], 5), torch.zeros(sum(sizes), 7)
    graph = kernels.CpuGraph()
    graph.begin_capture()
    try:
        captured = collectives(groups, rows, parts)
    finally:
        graph.end_capture()
    failed = []
    for round_ in range(20):
        generator = torch.Generator().manual_seed(round_)
        all_rows = torch.randn(sum(sizes), 5, generator=generator)
        all_parts = torch.randn(place.num_ranks, sum(sizes), 7, generator=generator)
        rows.copy_(all_rows.split(sizes)[place.rank])
        parts.copy_(all_parts[place.rank])
        if (round_ + place.rank) % 3:
            graph.replay()
            gathered, summed = captured
        else:
            gathered, summed = collectives(groups, rows, parts)
        expected = sum_in_tree(all_parts, torch.bfloat16).split(sizes)[place.rank]
        if not torch.equal(gathered, all_rows) or not torch.equal(summed, expected):
            failed.append(round_)
        counts = groups.dp.all_gather(torch.tensor([round_]), [1] * place.num_ranks)
        assert counts.tolist() == [round_] * place.num_ranks
    groups.world.barrier()
    return failed


def collectives(groups: Groups, rows: torch.Tensor, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = SIZES[: groups.ep.world_size]
    return groups.ep.all_gather(rows, sizes), groups.ep.reduce_scatter(parts, sizes, torch.bfloat16)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
def test_a_replay_names_a_rank_that_dies(ranks: Ranks, operation: str) -> None:
    outcomes = ranks.start(3, "test_captured_collectives:error_of_replay", operation=operation).outcomes(60.0)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        where, _, cause = outcomes[rank].value.partition("failed: ")
        assert where.startswith(f"rank {rank}: {operation} of group 'ep' (ranks 0, 1, 2; ")
        assert "step 7, layer 4" in where
        assert "rank 1" in cause


def error_of_replay(place: Place, operation: str) -> str:
    kernels = native_kernels()
    assert kernels is not None
    groups = join(place)
    sizes = SIZES[: place.num_ranks]
    groups.set_layer(4)
    graph = kernels.CpuGraph()
    graph.begin_capture()
    match operation:
        case "all_gather":
            groups.ep.all_gather(torch.zeros(sizes[place.rank], 5), sizes)
        case "reduce_scatter":
            groups.ep.reduce_scatter(torch.zeros(sum(sizes), 7), sizes)
    graph.end_capture()
    groups.set_layer(None)
    groups.begin_step(7)
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DistributedError) as caught:
        graph.replay()
    return str(caught.value)


def test_cpu_graphs_need_shared_memory_and_no_order_check(ranks: Ranks) -> None:
    assert ranks.run(2, "test_captured_collectives:supported") == [[True, False, False]] * 2


def supported(place: Place) -> list[bool]:
    answers = []
    for index, options in enumerate(({}, dict(transport="gloo"), dict(check_order=True))):
        groups = join(place, scope=str(index), **options)
        answers.append(groups.supports_cpu_graphs)
        groups.world.barrier()
    return answers
