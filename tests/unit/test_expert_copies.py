"""The choice among copies of an expert: equally often, near copies first, and none for padding."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from build_contexts import cpu_context
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.layers.moe.dispatch.expert_copies import ExpertCopies
from moeserve.layers.moe.placement.placement import Placement, copies_in_turn
from moeserve.ops import routing as routing_ops
from moeserve.ops.backend import REFERENCE
from moeserve.ops.select import select_backend

NATIVE = select_backend(torch.device("cpu"))


def placed(*slots: tuple[int, ...]) -> Placement:
    return Placement(slots, 1 + max(expert for of_rank in slots for expert in of_rank))


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, list[int]]:
    """Draw a placement and the node of each rank."""
    num_ranks, num_experts = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    slots = [
        draw(st.lists(st.integers(0, num_experts - 1), max_size=num_experts, unique=True)) for _ in range(num_ranks)
    ]
    for expert in range(num_experts):
        if not any(expert in of_rank for of_rank in slots):
            slots[draw(st.integers(0, num_ranks - 1))].append(expert)
    nodes = [draw(st.integers(0, 3)) for _ in range(num_ranks)]
    return Placement(tuple(map(tuple, slots)), num_experts), nodes


@given(placements())
@settings(derandomize=True, deadline=None)
def test_copies_have_equally_many_turns(drawn: tuple[Placement, list[int]]) -> None:
    placement, nodes = drawn
    turns = [copies_in_turn(placement, rank, nodes) for rank in range(placement.num_ranks)]
    for expert, copies in enumerate(placement.physical_of_logical):
        share = Counter[int]()
        for of_rank in turns:
            assert len(of_rank[expert]) == len(copies)
            share.update(of_rank[expert])
        assert share == Counter(dict.fromkeys(copies, placement.num_ranks))


@given(placements())
@settings(derandomize=True, deadline=None)
def test_ranks_of_one_node_use_all_copies(drawn: tuple[Placement, list[int]]) -> None:
    """Each copy gets the same work even if one rank has all tokens."""
    placement, nodes = drawn
    for rank in range(placement.num_ranks):
        assert copies_in_turn(placement, rank, [0] * len(nodes)) == placement.physical_of_logical


def test_copies_of_the_own_node_come_first() -> None:
    """Each node has a copy of expert 0, so its tokens stay on their node."""
    placement = placed((0,), (1,), (0,), (2,))
    assert [copies_in_turn(placement, rank, [0, 0, 1, 1])[0] for rank in range(4)] == [(0, 0), (0, 0), (2, 2), (2, 2)]


def test_node_with_more_copies_helps_the_other() -> None:
    placement = placed((0,), (0,), (0, 1), (2,))
    turns = [copies_in_turn(placement, rank, [0, 0, 1, 1])[0] for rank in range(4)]
    assert turns[:2] == [(0, 1, 0), (1, 0, 1)]
    assert turns[2] == (2, 2, 2)
    assert sorted(turns[3]) == [0, 1, 2]  # its node's copy has one turn left


@pytest.mark.parametrize("choose", [routing_ops.make_copies(NATIVE), routing_ops.make_copies(REFERENCE)])
def test_turns_by_token_and_padding(choose) -> None:
    copies = torch.tensor([[4, 5, 6], [7, -1, -1]])
    num_turns = torch.tensor([3, 1])
    experts = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, -1], [0, 1]])
    assert choose(experts, copies, num_turns, 1).tolist() == [[5, 7], [6, -1], [7, 4], [-1, -1], [6, 7]]
    assert choose(experts[:0], copies, num_turns, 3).shape == (0, 2)


@given(st.data())
@settings(derandomize=True, deadline=None)
def test_kernel_equals_reference(data: st.DataObject) -> None:
    num_experts, width, top_k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    num_turns = torch.tensor([data.draw(st.integers(1, width)) for _ in range(num_experts)])
    copies = torch.arange(num_experts * width).view(num_experts, width)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    experts = torch.randint(-1, num_experts, (data.draw(st.integers(0, 40)), top_k), generator=generator)
    first = data.draw(st.integers(0, 10**6))
    chosen = routing_ops.make_copies(NATIVE)(experts, copies, num_turns, first)
    assert torch.equal(chosen, routing_ops.make_copies(REFERENCE)(experts, copies, num_turns, first))


def test_placement_in_order_is_the_identity() -> None:
    experts = torch.tensor([[0, 2], [1, -1]])
    assert ExpertCopies(placed((0, 1), (2,)), 0, (0, 0), cpu_context()).choose(experts, 5) is experts
    assert ExpertCopies(placed((1, 0), (2,)), 0, (0, 0), cpu_context()).choose(experts, 5).tolist() == [[1, 2], [0, -1]]
