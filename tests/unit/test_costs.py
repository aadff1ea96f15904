"""The cost model: formulas against their numbers, terms against plain arithmetic, balance against random draws."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.planner.costs import (
    Assumptions,
    ExchangeWork,
    ExpertWork,
    LayoutCosts,
    RankShape,
    ReplicaLoad,
    StepLoad,
)
from moeserve.planner.expert_rows import Balance, ExchangeName, rows_that_leave
from moeserve.planner.formula import Formula, shown_seconds
from moeserve.planner.hardware import TABLE, Hardware

SIMPLE = Hardware(
    name="simple",
    memory=1e9,
    memory_bandwidth=1000.0,
    bf16_rate=4000.0,
    fp8_rate=8000.0,
    node_bandwidth=100.0,
    network_bandwidth=10.0,
)
PERFECT = Assumptions(memory_efficiency=1, compute_efficiency=1, link_efficiency=1, exchange_latency=0)

counts = st.integers(1, 10**6)


def computed(text: str) -> float:
    """Evaluate a formula with numbers: + - x / ^, max and min."""
    return float(eval(text.replace(" x ", " * ").replace("^", "**"), {"max": max, "min": min}))


def check(formula: Formula) -> None:
    assert computed(formula.with_numbers) == pytest.approx(formula.value, rel=1e-6, abs=1e-15)
    assert not any(character in formula.with_numbers + formula.in_words for character in "{}_")


def test_the_published_bound_of_the_exchange() -> None:
    """Insights into DeepSeek-V3 (arXiv 2505.09343), 2.3.2: 32 tokens to 9 experts, a byte there and two back, 50 GB/s.

    Its 120.96 us are those of "7K" = 7000 values; the model's rows have 7168.
    """
    work = ExchangeWork(
        node_rows=0,
        network_rows=9,
        width=7000,
        bytes=1 + 2,
        node_bandwidth=160e9,
        network_bandwidth=50e9,
        latency=0,
    )
    assert work.seconds(tokens=32, imbalance=1.0) == pytest.approx(120.96e-6, rel=1e-12)
    assert shown_seconds(work.seconds(tokens=32, imbalance=1.0)) == "120.96 us"
    step = 61 * 2 * work.seconds(tokens=32, imbalance=1.0)  # two halves of 32 tokens each
    assert shown_seconds(step) == "14.76 ms"
    assert math.floor(1 / step) == 67
    assert shown_seconds(replace(work, width=7168).seconds(tokens=32, imbalance=1.0)) == "123.86 us"


def draw_fullest(num_ranks: int, num_experts: int, chosen: int, num_tokens: int, rounds: int) -> float:
    """Return the mean of the fullest rank's rows over the mean, in rounds of random choices."""
    generator = random.Random(5)
    rank_of = [expert * num_ranks // num_experts for expert in range(num_experts)]
    ratios = []
    for _ in range(rounds):
        rows = [0] * num_ranks
        for _ in range(num_tokens):
            for expert in generator.sample(range(num_experts), chosen):
                rows[rank_of[expert]] += 1
        ratios.append(max(rows) * num_ranks / (num_tokens * chosen))
    return mean(ratios)


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "chosen", "num_tokens"),
    [(2, 8, 2, 30), (4, 8, 2, 100), (8, 64, 6, 64), (32, 256, 8, 64), (64, 256, 8, 512), (256, 256, 8, 400)],
)
def test_the_fullest_rank_equals_random_draws(num_ranks: int, num_experts: int, chosen: int, num_tokens: int) -> None:
    balance = Balance(placement=1.0, num_ranks=num_ranks, num_experts=num_experts, chosen=chosen)
    drawn = draw_fullest(num_ranks, num_experts, chosen, num_tokens, rounds=30_000 // num_tokens)
    assert drawn > 1.02
    # The excess over the mean may be off by a tenth.
    assert balance.imbalance(num_tokens) - 1 == pytest.approx(drawn - 1, rel=0.1)


@settings(max_examples=30)
@given(
    placement=st.floats(1, 8),
    ranks=st.integers(2, 320),
    experts=st.integers(8, 512),
    chosen=st.integers(1, 8),
    tokens=counts,
)
def test_imbalance_is_bounded_and_shows_its_formula(
    placement: float, ranks: int, experts: int, chosen: int, tokens: int
) -> None:
    balance = Balance(placement=min(placement, ranks), num_ranks=ranks, num_experts=experts, chosen=chosen)
    check(balance.formula(tokens))
    assert balance.placement <= balance.imbalance(tokens) <= max(balance.placement, ranks)
    assert balance.imbalance(10**12) == pytest.approx(balance.placement, abs=0.01)


def test_a_single_token_fills_ranks_with_one_expert_each() -> None:
    balance = Balance(placement=1.0, num_ranks=256, num_experts=256, chosen=8)
    assert balance.imbalance(1) == 256 / 8
    assert Balance(placement=1.0, num_ranks=1, num_experts=8, chosen=2).imbalance(5) == 1.0


def test_experts_hit_equal_random_draws() -> None:
    generator = random.Random(7)
    hit = mean(len({e for _ in range(20) for e in generator.sample(range(64), 6)} & {*range(16)}) for _ in range(400))
    work = ExpertWork(
        slots=16,
        all_slots=64,
        chosen=6,
        ranks=4,
        parameters=1,
        bytes=1,
        memory_bandwidth=1,
        rate=1e9,
    )
    assert work.seconds(tokens=20, imbalance=1.0) == pytest.approx(hit, rel=0.02)


def draw_rows(exchange: ExchangeName, num_nodes: int, per_node: int, groups: tuple[int, int]) -> tuple[float, float]:
    """Return the mean rows inside and outside the node of a token that chooses 8 of 256 experts at random."""
    generator = random.Random(3)
    inside, outside = [], []
    of_group = 256 // groups[0]
    for _ in range(4000):
        if exchange == "node_limited":
            among = [g * of_group + e for g in generator.sample(range(groups[0]), groups[1]) for e in range(of_group)]
        else:
            among = list(range(256))
        own = generator.randrange(num_nodes * per_node)
        ranks = [expert * num_nodes * per_node // 256 for expert in generator.sample(among, 8)]
        if exchange == "direct":
            elsewhere = [rank for rank in ranks if rank != own]
            inside.append(sum(rank // per_node == own // per_node for rank in elsewhere))
            outside.append(sum(rank // per_node != own // per_node for rank in elsewhere))
        else:
            inside.append(sum(rank % per_node != own % per_node for rank in ranks))
            outside.append(len({rank // per_node for rank in ranks} - {own // per_node}))
    return mean(inside), mean(outside)


@pytest.mark.parametrize("num_nodes", [1, 4, 8, 16])
@pytest.mark.parametrize("exchange", ["direct", "by_node", "node_limited"])
def test_rows_that_leave_equal_random_draws(exchange: ExchangeName, num_nodes: int) -> None:
    groups = (8, 4)
    leaving = rows_that_leave(
        exchange,
        num_ranks=num_nodes * 8,
        ranks_per_node=8,
        num_experts=256,
        chosen=8,
        num_groups=groups[0],
        num_chosen_groups=groups[1],
    )
    inside, outside = draw_rows(exchange, num_nodes, 8, groups)
    assert leaving.inside.value == pytest.approx(inside, rel=0.05)
    assert leaving.outside.value == pytest.approx(outside, rel=0.05)
    check(leaving.inside)
    check(leaving.outside)


def shape(**changes: Any) -> RankShape:
    """Return two replicas of one rank with one expert each, one layer with experts and one without."""
    values: dict[str, Any] = dict(
        tp=1,
        dp=2,
        ranks_per_node=2,
        hidden_size=10,
        num_layers=2,
        num_sparse_layers=1,
        num_layers_of_window={None: 1, 4: 1},
        cache_bytes=8.0,
        decode_operations=16.0,
        prefill_operations=6.0,
        attention_parameters=400.0,
        dense_parameters=300.0,
        router_parameters=20.0,
        shared_parameters=30.0,
        expert_parameters=100.0,
        head_parameters=500.0,
        slots=1,
        all_slots=2,
        chosen=1,
        weight_bytes=2.0,
        is_fp8=False,
        plain_bytes=2.0,
        leaving=rows_that_leave("direct", num_ranks=2, ranks_per_node=2, num_experts=2, chosen=1),
        balance=Balance(placement=1.0, num_ranks=2, num_experts=2, chosen=1),
    )
    return RankShape(**values | changes)


LOADS = [
    ReplicaLoad(num_decoding=6, decode_pairs=60, num_prefill=4, prefill_pairs=30),
    ReplicaLoad(num_decoding=2, decode_pairs=90, num_prefill=0, prefill_pairs=0),
]


def test_a_step_by_hand() -> None:
    """12 tokens, 10 of them in one replica; memory reads 1000 bytes and products are 4000 operations in a second."""
    time = LayoutCosts(shape(), SIMPLE, PERFECT).step_seconds(StepLoad.of(LOADS), imbalance=1.5)
    projections = 2 * 2 * 400 * 10 / 4000  # 2 layers; computing 2 s each is slower than reading 0.8 s
    dense = 2 * 300 * 10 / 4000
    router, shared = 2 * 20 * 10 / 4000, 2 * 30 * 10 / 4000
    full = 90 * 8 / 1000 + 30 * 6 / 4000
    windowed = 6 * 4 * 8 / 1000 + 4 * 4 * 6 / 4000
    experts = 2 * 100 * (12 / 2 * 1.5) / 4000  # reading an expert would take 0.2 s
    assert time.layers == pytest.approx(projections + dense + router + shared + full + windowed + experts)
    assert time.exchange == pytest.approx(max(10, 12 / 2 * 1.5) * 0.5 * 10 * (2 + 2) / 100)
    assert time.head == pytest.approx(2 * 500 * 6 / 4000)
    assert time.seconds == pytest.approx(time.layers + time.exchange + time.head)


def test_halves_that_overlap_read_weights_twice_and_hide_the_exchange() -> None:
    light = [ReplicaLoad(num_decoding=1, decode_pairs=1)] * 2
    plain = LayoutCosts(shape(), SIMPLE, PERFECT).step_seconds(StepLoad.of(light), imbalance=1.0)
    halved = LayoutCosts(shape(), SIMPLE, replace(PERFECT, overlap=True)).step_seconds(StepLoad.of(light), 1.0)
    weights = (2 * 400 + 300 + 20 + 30) * 2 / 1000
    assert halved.exchange == pytest.approx(plain.exchange)
    assert halved.layers - plain.layers == pytest.approx(weights, rel=0.1)
    assert halved.seconds == max(halved.layers, halved.exchange) + halved.head


@given(
    tp=st.sampled_from([1, 2, 64]),
    is_fp8=st.booleans(),
    overlap=st.booleans(),
    slots=st.integers(1, 64),
    loads=st.lists(
        st.builds(
            ReplicaLoad,
            num_decoding=st.integers(1, 10**4),
            decode_pairs=counts,
            num_prefill=st.integers(0, 10**4),
            prefill_pairs=counts,
        ),
        min_size=2,
        max_size=2,
    ),
)
def test_terms_show_their_formulas_and_add_up(
    tp: int, is_fp8: bool, overlap: bool, slots: int, loads: list[ReplicaLoad]
) -> None:
    rank = shape(tp=tp, is_fp8=is_fp8, weight_bytes=1.0 if is_fp8 else 2.0, slots=slots, all_slots=2 * tp * slots)
    costs, load = LayoutCosts(rank, TABLE["h800"], Assumptions(overlap=overlap)), StepLoad.of(loads)
    terms = list(costs.terms(load))
    assert {term.work.name for term in terms} >= {"attention", "attention to 4 positions", "routed experts"}
    for term in terms:
        check(term.formula)
    time = costs.step_seconds(load)
    total = sum(term.formula.value * term.count for term in terms)
    assert total == pytest.approx(time.layers + time.exchange + time.head)


def test_tp_ranks_exchange_their_own_share_and_gather_all() -> None:
    costs = LayoutCosts(shape(tp=2, dp=1), SIMPLE, PERFECT)
    load = StepLoad.of([ReplicaLoad(num_decoding=10, decode_pairs=10)])
    gathers = 3 * 2 * 10 * (1 / 2) * 10 * 2 / 100  # attention of 2 layers, and the dense network
    assert costs.step_seconds(load, 1.0).exchange == pytest.approx(5 * 0.5 * 10 * 4 / 100 + gathers)


def test_a_tp_group_of_several_nodes_is_as_slow_as_the_network() -> None:
    load = StepLoad.of([ReplicaLoad(num_decoding=10, decode_pairs=10)])
    near, far = (
        LayoutCosts(shape(tp=2, dp=1, ranks_per_node=size), SIMPLE, PERFECT).step_seconds(load, 1.0) for size in (2, 1)
    )
    assert far.exchange - near.exchange == pytest.approx(3 * 2 * 10 * (1 / 2) * 10 * 2 * (1 / 10 - 1 / 100))


def test_a_step_without_tokens_takes_no_time() -> None:
    assert LayoutCosts(shape(), SIMPLE, PERFECT).step_seconds(StepLoad.of([ReplicaLoad()])).seconds == 0


def test_one_rank_exchanges_nothing() -> None:
    alone = shape(dp=1, slots=2, balance=Balance(placement=1.0, num_ranks=1, num_experts=2, chosen=1))
    costs = LayoutCosts(alone, SIMPLE, Assumptions())
    assert costs.step_seconds(StepLoad.of(LOADS[:1])).exchange == 0
    assert "dispatch and combine" not in {term.work.name for term in costs.terms(StepLoad.of(LOADS[:1]))}


def test_the_model_of_costs_needs_no_torch() -> None:
    modules = "moeserve.planner.costs, moeserve.planner.hardware, moeserve.planner.traffic"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
