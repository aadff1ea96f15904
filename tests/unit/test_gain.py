"""The decision to move experts, from numbers alone."""

from __future__ import annotations

import random

import pytest

from moeserve.layers.moe.placement.eplb import imbalance
from moeserve.layers.moe.placement.gain import Proposal, add_window, excess_rows, is_worth_it, propose
from moeserve.layers.moe.placement.placement import Placement

TWO_RANKS = Placement(((0, 1), (2, 3)), 4)


def test_proposal_saves_rows_of_the_fullest_rank() -> None:
    loads = [3000, 3000, 1000, 1000]
    proposal = propose(loads, TWO_RANKS)
    assert proposal is not None
    assert imbalance(loads, proposal.placement) == 1
    assert proposal.rows_saved == excess_rows(loads, TWO_RANKS) == 2000


@pytest.mark.parametrize("loads", [[0, 0, 0, 0], [10, 12, 9, 11], [1000, 1010, 990, 1000]])
def test_no_proposal_for_even_loads(loads: list[int]) -> None:
    assert propose(loads, TWO_RANKS) is None


def test_no_proposal_for_chance() -> None:
    dice = random.Random(0)
    before = Placement.even(16, 4)
    for _ in range(100):
        drawn = [0] * 16
        for _ in range(400):
            drawn[dice.randrange(16)] += 1
        proposal = propose(drawn, before)
        assert proposal is None or imbalance(drawn, before) > 1.09, "100 rows of a rank vary by 10"


def test_moves_are_worth_it_if_less_waiting_makes_up_for_them() -> None:
    half = Proposal(TWO_RANKS, rows_saved=50)
    assert is_worth_it(half, excess_of_model=100, waited_s=2.0, cost_s=0.99)
    assert not is_worth_it(half, excess_of_model=100, waited_s=2.0, cost_s=1.0)
    assert not is_worth_it(half, excess_of_model=0, waited_s=2.0, cost_s=0.0)
    more_than_all = Proposal(TWO_RANKS, rows_saved=500)
    assert not is_worth_it(more_than_all, excess_of_model=100, waited_s=1.0, cost_s=1.0)


def test_older_counts_decay() -> None:
    loads = [0.0, 0.0]
    for counts in ([8, 0], [0, 8], [0, 8]):
        loads = add_window(loads, counts)
    assert loads == [2.0, 12.0]
