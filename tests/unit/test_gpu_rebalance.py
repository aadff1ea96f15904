"""Rebalancing on a GPU orders its streams correctly, and the host never waits. The device is simulated on a CPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from build_contexts import cpu_context
from load_windows import of_counts
from thread_ranks import ThreadGroup, run
from torch import Tensor

from moeserve.layers.moe.dispatch.expert_copies import ExpertCopies
from moeserve.layers.moe.placement.load import ExpertLoad, LoadMeter
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.moe.placement.rebalance import MAX_PIECE_BYTES, Rebalancer, spare_bytes
from moeserve.ops.backend import REFERENCE
from moeserve.ops.side_stream import CudaSideStream, Pending

pytest.importorskip("triton")
import fake_device

BEFORE = Placement(((0, 1, 2), (3, 4, 5)), 6)
LOADS = [90, 80, 70, 3, 2, 1]  # of experts
BYTES_OF_TENSORS = (200, 56)  # of an expert
CONTEXT = dataclasses.replace(cpu_context(), backend=REFERENCE)  # whose operations the device records


@pytest.fixture
def device() -> Iterator[fake_device.FakeDevice]:
    with fake_device.installed() as installed:
        yield installed


class Layer:
    """A layer whose expert e consists of bytes e + 1."""

    def __init__(self, rank: int) -> None:
        self.experts = SimpleNamespace(
            memory_of_each=[
                torch.tensor([[expert + 1] * size for expert in BEFORE.logical_of_slot[rank]], dtype=torch.uint8)
                for size in BYTES_OF_TENSORS
            ]
        )
        self.rank = rank
        self.copies = ExpertCopies(BEFORE, rank, (0, 0), CONTEXT)
        self.load = ExpertLoad(BEFORE, rank, CONTEXT)

    @property
    def placement(self) -> Placement:
        return self.load.placement

    @property
    def local_experts(self) -> tuple[int, ...]:
        return self.placement.logical_of_slot[self.rank]

    def place(self, placement: Placement) -> None:
        self.load.placement = placement
        self.copies.place(placement)

    def step(self) -> tuple[Tensor, Tensor]:
        """Read all weights and the table of copies, and count rows, as a step does."""
        self.load.count(torch.tensor([5, 6, 7]))
        weights = torch.cat(self.experts.memory_of_each, dim=1)
        return weights.clone(), self.copies.choose(torch.arange(6)[:, None], 0)


class Stage(ThreadGroup):
    progresses_in_background = False


def play(
    group: ThreadGroup, num_steps: int, on_gpu: bool, update_before: int | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Run steps while experts move. Return what each step has read.

    Args:
        update_before: the step before which a trainer adds 100 to all bytes.
    """
    layer = Layer(group.rank_in_group)
    stage = Stage(group.table, group.rank_in_group)
    groups = cast(Any, SimpleNamespace(stage=stage, ep=stage))
    stage.seconds_waited = lambda: []  # type: ignore[attr-defined]
    rebalancer = Rebalancer({0: layer}, groups, 10**9, CudaSideStream() if on_gpu else None)
    meter = LoadMeter({0: layer.load}, groups)
    window = of_counts([LOADS], [[240, 6]], num_steps=10, seconds=1.0, straggler_seconds=0.5)
    rebalancer.consider(window, [[1000], [1000]])

    def steps() -> list[tuple[Tensor, Tensor]]:
        read = []
        for number in range(num_steps):
            if number == update_before:
                rebalancer.drop_changes()
                for memory in layer.experts.memory_of_each:
                    memory += 100
            if rebalancer.must_switch:
                meter.keep_counts(rebalancer.next_layer)
                rebalancer.switch()
            piece = rebalancer.begin_step()
            read.append(layer.step())
            rebalancer.finish_step(piece)
        return read

    if not on_gpu:
        return steps()
    with torch.cuda.graph(fake_device.FakeGraph()):  # type: ignore[arg-type]
        return steps()


def test_weights_and_tables_switch_between_two_steps(
    device: fake_device.FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has a simulated GPU, which rejects accesses without an event between streams, and hosts that wait.

    Rank 1 is on a CPU. Both run the same protocol, in several pieces.
    """
    monkeypatch.setattr("moeserve.layers.moe.placement.rebalance.MIN_PIECE_BYTES", 128)
    ranks = run(2, lambda group: play(group, 30, on_gpu=group.rank_in_group == 0))
    for rank, read in enumerate(ranks):
        placements = [tuple((weights[:, 0] - 1).tolist()) for weights, _ in read]
        first, last = placements[0], placements[-1]
        assert first == BEFORE.logical_of_slot[rank]
        assert last != first
        assert placements == [first] * placements.count(first) + [last] * placements.count(last)
        for placed, (weights, _) in zip(placements, read, strict=True):
            assert weights.tolist() == [[expert + 1] * sum(BYTES_OF_TENSORS) for expert in placed]
    # The tables of both ranks name the slots that have the weights, in every step.
    for (weights_0, table), (weights_1, other) in zip(*ranks, strict=True):
        placed_now = torch.cat([weights_0[:, 0], weights_1[:, 0]]).long() - 1
        for chosen in (table, other):
            assert placed_now[chosen[:, 0]].tolist() == [*range(6)]


@pytest.mark.parametrize("update_before", [2, 3])
def test_an_update_of_weights_drops_the_experts_that_move(monkeypatch: pytest.MonkeyPatch, update_before: int) -> None:
    """A piece has arrived before the second step, and another one before the third, the last of a change."""
    monkeypatch.setattr("moeserve.layers.moe.placement.rebalance.MIN_PIECE_BYTES", 128)
    for read in run(2, lambda group: play(group, 30, on_gpu=False, update_before=update_before)):
        for weights, _ in read[update_before:]:
            assert bool((weights > 100).all()), "a moved expert has old weights"


def test_a_missing_event_is_found(device: fake_device.FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pending, "wait", lambda self: self.result)
    with pytest.raises(RuntimeError, match="another stream"):
        run(2, lambda group: play(group, 30, on_gpu=group.rank_in_group == 0))


def test_memory_of_moves() -> None:
    """Room for all experts of a rank, and for what it sends and receives in a step."""
    assert spare_bytes({0: Layer(0)}) == 3 * sum(BYTES_OF_TENSORS) + 2 * MAX_PIECE_BYTES


def test_a_graph_sees_another_placement(device: fake_device.FakeDevice) -> None:
    after = Placement(((0, 3, 2), (1, 4, 5)), 6)
    copies = ExpertCopies(BEFORE, 0, (0, 0), CONTEXT)
    copies.place(BEFORE)  # as a rebalancer does before graphs are captured
    graph = fake_device.FakeGraph()
    chosen_TK = torch.arange(6)[:, None]
    with torch.cuda.graph(graph):  # type: ignore[arg-type]
        physical_TK = copies.choose(chosen_TK, 0)
    assert physical_TK.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    copies.place(after)
    graph.replay()
    assert physical_TK.flatten().tolist() == [0, 3, 2, 1, 4, 5]


@pytest.mark.parametrize(("loads", "moves"), [(LOADS, True), ([40] * 6, False)])
def test_experts_move_without_measured_waits(loads: Sequence[int], moves: bool, device: fake_device.FakeDevice) -> None:
    """On a GPU the gain follows from the rows of the fullest rank."""
    rebalancer = functools.partial(Rebalancer, {0: Layer(0)})
    stage = SimpleNamespace(rank_in_group=0, world_size=2, node_of_rank=(0, 0))
    made = rebalancer(cast(Any, SimpleNamespace(stage=stage)), 10**6, CudaSideStream())
    of_ranks = [sum(loads[:3]), sum(loads[3:])]
    made.consider(of_counts([loads], [of_ranks], num_steps=10, seconds=1.0), [[1000], [1000]])
    made.finish_step(None)  # plans the only layer, and decides
    assert made.is_busy == moves
