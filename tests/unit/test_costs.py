"""The cost model: formulas by hand and against random draws, and how load and layout enter a step."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.models.registry import describe
from moeserve.planner.cost_formulas import EXCHANGE, EXPERTS, rows_that_leave
from moeserve.planner.costs import LayoutCosts, ReplicaLoad, StepLoad, StepTime
from moeserve.planner.formula import Formula, shown_seconds
from moeserve.planner.hardware import TABLE
from moeserve.planner.layout import find_layouts
from moeserve.planner.settings import Assumptions, Speed

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
H800 = TABLE["h800"]


def costs_of(
    tmp_path: Path, num_ranks: int, *, tp: int = 1, ranks_per_node: int = 8, model: str = "Mixtral-8x7B", **assumed: Any
) -> LayoutCosts:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[model] | {"num_hidden_layers": 4}))
    perfect = dict(memory_efficiency=1, compute_efficiency=1, link_efficiency=1, exchange_latency=0)
    found = find_layouts(tmp_path, num_ranks, None, tp)
    assumptions = Assumptions(**perfect | assumed)
    return LayoutCosts(describe(tmp_path), found, found.layouts[0], H800, assumptions, ranks_per_node)


def seconds_of(costs: LayoutCosts, load: StepLoad, imbalance: float = 1.0) -> dict[str, float]:
    return {term.formula.name: term.seconds for term in costs.terms(load, imbalance)}


def decoding(*num_requests: int, context: int = 100) -> StepLoad:
    return StepLoad.of([ReplicaLoad(num_decoding=each, decode_pairs=each * context) for each in num_requests])


def test_a_formula_has_a_value_and_shows_its_numbers() -> None:
    formula = Formula("work", "max({rows} x {bytes_each}, min(1, 2) + {rows} ^ 2) / 2", {"rows": 3, "bytes_each": 4.5})
    assert formula.value == 13.5 / 2
    assert formula.as_text().splitlines() == [
        "work: 6.75 s",
        "    = max(rows x bytes each, min(1, 2) + rows ^ 2) / 2",
        "    = max(3 x 4.5, min(1, 2) + 3 ^ 2) / 2",
    ]
    assert [shown_seconds(value) for value in (2, 14.757e-3, 120.96e-6)] == ["2.00 s", "14.76 ms", "120.96 us"]


def test_the_published_bound_of_the_exchange() -> None:
    """Insights into DeepSeek-V3 (arXiv 2505.09343), 2.3.2: 32 tokens to 9 experts, a byte there and two back, 50 GB/s.

    Its 120.96 us are those of "7K" = 7000 values.
    """
    numbers = dict(tokens=32, node_rows=0, network_rows=9, width=7000, bytes=3, imbalance=1, latency=0)
    exchange = Formula("", EXCHANGE, {**numbers, "node_bandwidth": 160e9, "network_bandwidth": 50e9}).value
    assert exchange == pytest.approx(120.96e-6, rel=1e-12)
    assert math.floor(1 / (61 * 2 * exchange)) == 67  # steps per second: two halves of 32 tokens each


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
    ("model", "num_ranks", "num_experts", "chosen", "num_tokens"),
    [
        ("Mixtral-8x7B", 4, 8, 2, 100),
        ("Mixtral-8x7B", 8, 8, 2, 64),
        ("DeepSeek-V3", 32, 256, 8, 64),
        ("DeepSeek-V3", 256, 256, 8, 400),
    ],
)
def test_the_fullest_rank_equals_random_draws(
    model: str, num_ranks: int, num_experts: int, chosen: int, num_tokens: int, tmp_path: Path
) -> None:
    drawn = draw_fullest(num_ranks, num_experts, chosen, num_tokens, rounds=10_000 // num_tokens)
    expected = costs_of(tmp_path, num_ranks, model=model).imbalance(num_tokens).value
    assert expected - 1 == pytest.approx(drawn - 1, rel=0.2)


def test_chance_raises_the_imbalance_of_a_placement(tmp_path: Path) -> None:
    costs = costs_of(tmp_path, 8)

    @settings(derandomize=True, deadline=None)
    @given(placement=st.floats(1, 8), num_tokens=st.integers(1, 10**6))
    def check(placement: float, num_tokens: int) -> None:
        # Each token chooses 2 of 8 experts, so a rank gets at most four times the mean.
        assert placement <= costs.imbalance(num_tokens, placement).value <= max(placement, 4)
        assert costs.imbalance(10**12, placement).value == pytest.approx(placement, abs=0.01)

    check()


def test_experts_hit_equal_random_draws() -> None:
    generator = random.Random(7)
    hit = mean(len({e for _ in range(20) for e in generator.sample(range(64), 6)} & {*range(16)}) for _ in range(400))
    numbers = dict(slots=16, all_slots=64, chosen=6, ranks=4, parameters=1, bytes=1, memory_bandwidth=1, rate=1e9)
    assert Formula("", EXPERTS, {**numbers, "tokens": 20, "imbalance": 1}).value == pytest.approx(hit, rel=0.02)


def draw_rows(exchange: str, num_nodes: int, per_node: int) -> tuple[float, float]:
    """Return the mean rows inside and outside the node of a token that chooses 8 of 256 experts at random."""
    generator = random.Random(3)
    inside, outside = [], []
    for _ in range(4000):
        own = generator.randrange(num_nodes * per_node)
        ranks = [expert * num_nodes * per_node // 256 for expert in generator.sample(range(256), 8)]
        if exchange == "direct":
            elsewhere = [rank for rank in ranks if rank != own]
            inside.append(sum(rank // per_node == own // per_node for rank in elsewhere))
            outside.append(sum(rank // per_node != own // per_node for rank in elsewhere))
        else:
            inside.append(sum(rank % per_node != own % per_node for rank in ranks))
            outside.append(len({rank // per_node for rank in ranks} - {own // per_node}))
    return mean(inside), mean(outside)


@pytest.mark.parametrize("num_nodes", [1, 4, 16])
@pytest.mark.parametrize("exchange", ["direct", "by_node"])
def test_rows_that_leave_equal_random_draws(exchange: str, num_nodes: int) -> None:
    leaving = rows_that_leave(exchange, num_ranks=num_nodes * 8, ranks_per_node=8, chosen=8)
    assert [rows.value for rows in leaving] == pytest.approx(draw_rows(exchange, num_nodes, 8), rel=0.05)


def test_the_busiest_replica_determines_attention_and_all_tokens_the_experts(tmp_path: Path) -> None:
    costs = costs_of(tmp_path, 2)
    even, uneven = (seconds_of(costs, decoding(*sizes)) for sizes in ((3000, 3000), (4000, 2000)))
    assert uneven["attention"] == pytest.approx(4 / 3 * even["attention"])
    assert uneven["projections of attention"] == pytest.approx(4 / 3 * even["projections of attention"])
    assert uneven["routed experts"] == even["routed experts"]
    full = seconds_of(costs, decoding(3000, 3000), imbalance=1.5)
    assert full["routed experts"] == pytest.approx(1.5 * even["routed experts"])
    exchange = "combine"
    assert full[exchange] == pytest.approx(1.5 * even[exchange])
    # The busiest sender and the fullest receiver do not add up.
    assert uneven[exchange] == pytest.approx(4 / 3 * even[exchange])
    assert seconds_of(costs, decoding(4000, 2000), imbalance=1.5)[exchange] == pytest.approx(full[exchange])


def test_halves_that_overlap_read_weights_twice_and_hide_the_exchange(tmp_path: Path) -> None:
    load = decoding(*[8] * 8)
    plain, halved = (costs_of(tmp_path, 8, overlap=overlap) for overlap in (False, True))
    times = [costs.step_seconds(load, 1.0) for costs in (plain, halved)]
    assert times[1].exchange == pytest.approx(times[0].exchange)
    name = "projections of attention"
    assert seconds_of(halved, load)[name] == pytest.approx(2 * seconds_of(plain, load)[name])
    assert times[0].seconds == times[0].layers + times[0].exchange + times[0].head
    assert times[1].seconds == max(times[1].layers, times[1].exchange) + times[1].head


def test_small_steps_run_as_a_whole(tmp_path: Path) -> None:
    """The least tokens are those of the longest replica, and differ for steps with prompts."""
    plain, halved = (costs_of(tmp_path, 8, overlap=overlap) for overlap in (False, True))
    costs = costs_of(tmp_path, 8, overlap=True, overlap_decode_tokens=8, overlap_prefill_tokens=6)
    prompts = [StepLoad.of([ReplicaLoad(num_prefill=number, num_decoding=1)] * 8) for number in (4, 5)]
    for load, expected in (
        (decoding(7, 7, 7), plain),
        (decoding(8, 1, 1), halved),
        (prompts[0], plain),
        (prompts[1], halved),
    ):
        assert costs.for_step(load).step_seconds(load) == expected.step_seconds(load)
        assert plain.step_seconds(load) != halved.step_seconds(load)


def test_tp_ranks_exchange_their_own_share_and_gather_all(tmp_path: Path) -> None:
    load = decoding(10)
    near, far = (seconds_of(costs_of(tmp_path, 2, tp=2, ranks_per_node=size), load) for size in (2, 1))
    gathered = 4 * 2 * 10 * (1 / 2) * 4096 * 2  # bytes of rows of 4 layers, each way
    assert near["gather and scatter of tp ranks"] == pytest.approx(gathered / 200e9)
    assert far["gather and scatter of tp ranks"] == pytest.approx(gathered / 50e9)
    for name in ("dispatch", "combine"):
        assert near[name] == pytest.approx(4 * 5 * 2 * (1 / 2) * 4096 * 2 / 200e9)


@pytest.mark.parametrize("speed", ["optimum", "calibrated"])
def test_one_rank_exchanges_nothing_and_is_even(speed: Speed, tmp_path: Path) -> None:
    costs = costs_of(tmp_path, 1, exchange_latency=1, speed=speed, overlap=True)
    assert costs.step_seconds(decoding(10)).exchange == 0
    assert costs.imbalance(10).value == 1


def test_a_calibrated_exchange_hides_behind_its_own_part_of_a_layer_or_takes_cores(tmp_path: Path) -> None:
    load = decoding(*[512] * 16)

    def times(exchange: str, *, overlap: bool) -> tuple[StepTime, dict[str, float]]:
        costs = costs_of(tmp_path, 16, speed="calibrated", overlap=overlap, exchange=exchange)
        return costs.step_seconds(load), seconds_of(costs, load)

    direct, terms = times("direct", overlap=True)
    hidden = max(direct.before, direct.dispatch) + max(direct.after, direct.combine)
    assert direct.seconds == pytest.approx(hidden + direct.experts + direct.head)
    assert terms["dispatch on cores"] == terms["combine on cores"] == pytest.approx(2 * 4 * 60e-6)
    forwarding, slower = times("by_node", overlap=True)
    assert forwarding.seconds == max(forwarding.layers, forwarding.exchange) + forwarding.head
    # Two halves compute as much as one batch, on 108 of 132 cores.
    plain, terms = times("by_node", overlap=False)
    assert plain.seconds == plain.layers + plain.exchange + plain.head
    assert slower["routed experts"] == pytest.approx(terms["routed experts"] * 132 / 108)
    assert "dispatch on cores" not in slower.keys() | terms.keys()


def test_stages_take_the_time_of_their_layers(tmp_path: Path) -> None:
    """With one rank for each stage, both together take as long as one rank alone, and the hand-over."""
    load = decoding(64)
    whole = costs_of(tmp_path, 1)
    found = find_layouts(tmp_path, 2, None, 1, pp=2)
    halves = LayoutCosts(describe(tmp_path), found, found.layouts[0], H800, whole.assumptions, 2)
    first_s, second_s = halves.stage_seconds(load, 1.0)
    handover = [term.seconds for term in halves.terms(load, 1.0) if term.formula.name.startswith("hand-over")]
    config = describe(tmp_path).model
    bandwidth = H800.node_bandwidth * whole.assumptions.link_efficiency
    assert handover == [pytest.approx(64 * config.hidden_size * 2 / bandwidth + whole.assumptions.exchange_latency)]
    assert first_s + second_s - handover[0] == pytest.approx(whole.step_seconds(load, 1.0).seconds)
    head = [term.seconds for term in halves.terms(load, 1.0) if term.kind == "head"]
    assert second_s - sum(head) < first_s
