"""`moeserve simulate`: the real scheduling in virtual time, with step times from the cost model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from moeserve import cli
from moeserve.layers.moe.placement.eplb import eplb, imbalance
from moeserve.models.registry import describe
from moeserve.planner.costs import LayoutCosts, ReplicaLoad, StepLoad
from moeserve.planner.expert_balance import ExpertBalance, draw_loads
from moeserve.planner.hardware import TABLE
from moeserve.planner.layout import find_layouts
from moeserve.planner.pool import PoolPlan
from moeserve.planner.serving import ClusterPlan, prompt_of, serve
from moeserve.planner.settings import Assumptions, ExpertSettings, SimulationSettings
from moeserve.planner.simulation_report import Outcome, Percentiles, PoolOutcome
from moeserve.planner.traffic import RecordedRequest, Traffic, sample_traffic

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
H800 = TABLE["h800"]
NUM_REPLICAS = 8


@pytest.fixture(scope="module")
def costs(small_mixtral: Path) -> LayoutCosts:
    found = find_layouts(small_mixtral, NUM_REPLICAS, None, 1, num_redundant=8)
    return LayoutCosts(describe(small_mixtral), found, found.layouts[0], H800, Assumptions(), NUM_REPLICAS)


def balance_of(costs: LayoutCosts, **settings: Any) -> ExpertBalance:
    experts = ExpertSettings(num_redundant_experts=8, **settings)
    return ExpertBalance(costs, experts, draw_loads(2, 16, experts.skew, seed=0), seed=0)


def drawn_traffic(seed: int, num_requests: int, seconds: float, *, prompt: int = 300, output: int = 40) -> Traffic:
    dice = random.Random(seed)
    arrivals = sorted(dice.uniform(0, seconds) for _ in range(num_requests - 1))
    return Traffic(
        tuple(
            RecordedRequest(
                arrival_s=arrival_s,
                prompt_tokens=dice.randint(1, prompt),
                output_tokens=dice.randint(1, output),
                prefix_blocks=(0, dice.randrange(4), 10 + number)[: dice.randint(0, 3)],
            )
            for number, arrival_s in enumerate([0.0, *arrivals])
        ),
        tokens_per_block=100,
    )


SMALL = SimulationSettings(max_num_seqs=4, max_num_batched_tokens=128, host_time=0.0)


def pool_of(costs: LayoutCosts, *, cache_tokens: int = 4000, balance: ExpertBalance | None = None) -> PoolPlan:
    return PoolPlan(
        num_nodes=1,
        costs=costs,
        balance=balance or balance_of(costs),
        cache_tokens=cache_tokens,
        cache_bytes_per_token=2 * 2 * 8 * 128 * 2,  # keys and values of two layers with 8 heads, in bfloat16
    )


def served(traffic: Traffic, costs: LayoutCosts, *, cache_tokens: int = 4000, **options: Any) -> Outcome:
    plan = ClusterPlan(serving=(pool_of(costs, cache_tokens=cache_tokens),))
    return serve(traffic, plan, SMALL, **options)


def only_pool(found: Outcome) -> PoolOutcome:
    (pool,) = found.pools
    return pool


@pytest.mark.parametrize("seed", range(2))
def test_driving_all_replicas_gives_the_same_outcome(costs: LayoutCosts, seed: int) -> None:
    """The traffic has idle times, queues, shared prefixes and preemptions, and replicas without any request."""
    traffic = drawn_traffic(seed, 60, seconds=0.3)
    fast = served(traffic, costs, cache_tokens=640)
    assert fast == served(traffic, costs, cache_tokens=640, drives_all=True)
    assert fast.cached_tokens
    assert only_pool(fast).idle_step_share
    sparse = drawn_traffic(seed, 10, seconds=30)
    assert served(sparse, costs) == served(sparse, costs, drives_all=True)


def test_every_request_ends_once_with_its_output_length(costs: LayoutCosts) -> None:
    traffic = drawn_traffic(3, 300, seconds=0.2, output=60)
    found = served(traffic, costs, cache_tokens=480)
    assert found.num_finished == 300
    assert found.output_tokens == sum(each.output_tokens for each in traffic.requests)
    assert found.prompt_tokens == sum(each.prompt_tokens for each in traffic.requests)
    assert only_pool(found).num_preemptions
    assert 0 < only_pool(found).cache_used_most <= 1


def test_time_is_the_sum_of_step_times(costs: LayoutCosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests come at once, so there is no idle time. Each decode step has one token per request."""
    steps: list[tuple[StepLoad, float, float]] = []
    stage_seconds = costs.stage_seconds

    def recorded(load: StepLoad, imbalance: float | None = None) -> Any:
        assert imbalance is not None
        of_stages = stage_seconds(load, imbalance)
        steps.append((load, imbalance, sum(of_stages)))
        return of_stages

    monkeypatch.setattr(costs, "stage_seconds", recorded)
    traffic = Traffic(tuple(RecordedRequest(0.0, 20, 5, ()) for _ in range(NUM_REPLICAS)), 1)
    found = served(traffic, costs)
    assert found.seconds == pytest.approx(sum(seconds for _, _, seconds in steps))
    assert [load for load, _, _ in steps] == [
        StepLoad.of([ReplicaLoad(num_prefill=20, prefill_pairs=210)] * NUM_REPLICAS),
        *(StepLoad.of([ReplicaLoad(num_decoding=1, decode_pairs=length)] * NUM_REPLICAS) for length in range(21, 25)),
    ]
    assert steps[0][1] == costs.imbalance(20 * NUM_REPLICAS, balance_of(costs).expected).value
    assert found.first_token_s.p99 == pytest.approx(steps[0][2])
    assert found.output_token_s.p50 == pytest.approx(sum(seconds for _, _, seconds in steps[1:]) / 4)


def test_the_host_is_hidden_behind_steps(costs: LayoutCosts) -> None:
    """A step cannot be planned before the end of the last one without async scheduling, so the host's time adds up."""
    traffic = Traffic(tuple(RecordedRequest(0.0, 20, 30, ()) for _ in range(NUM_REPLICAS)), 1)

    def run(**settings: Any) -> Outcome:
        return serve(traffic, ClusterPlan(serving=(pool_of(costs),)), SimulationSettings(**settings))

    free = run(host_time=0.0)
    host_time = free.seconds / only_pool(free).num_steps / 2
    off, on, slow = run(async_scheduling=False, host_time=host_time), run(host_time=host_time), run(host_time=1.0)
    assert only_pool(free).num_steps == only_pool(off).num_steps == only_pool(on).num_steps == 30
    assert off.seconds == pytest.approx(free.seconds + 30 * host_time)
    assert only_pool(off).host_waited_s == pytest.approx(only_pool(off).host_s) == pytest.approx(30 * host_time)
    assert on.seconds == pytest.approx(free.seconds + host_time)  # only the first step waits
    assert only_pool(on).host_waited_s == pytest.approx(host_time)
    # A host that is slower than the steps sets their pace.
    assert slow.seconds == pytest.approx(30 * 1.0 + only_pool(slow).step_s.p50, rel=1e-2)


def test_pipeline_stages_work_at_the_same_time(small_mixtral: Path) -> None:
    """Two stages of one layer each. With requests for two batches, steps begin at the pace of the slower stage."""
    found = find_layouts(small_mixtral, NUM_REPLICAS, None, 1, pp=2)
    costs = LayoutCosts(describe(small_mixtral), found, found.layouts[0], H800, Assumptions(), NUM_REPLICAS)
    balance = ExpertBalance(costs, ExpertSettings(), draw_loads(2, 16, 0.0, seed=0), seed=0)
    settings = SimulationSettings(host_time=0.0)

    def run(num_requests: int) -> Outcome:
        traffic = Traffic((RecordedRequest(0.0, 20, 200, ()),) * num_requests, 1)
        plan = ClusterPlan(serving=(pool_of(costs, cache_tokens=100_000, balance=balance),))
        return serve(traffic, plan, settings)

    one, two = run(1), run(2 * costs.dp)
    assert only_pool(one).num_steps == 200
    assert one.seconds == pytest.approx(200 * only_pool(one).step_s.p50, rel=0.05)
    load = StepLoad.of([ReplicaLoad(num_decoding=1, decode_pairs=120)] * costs.dp)
    of_stages = costs.stage_seconds(load)
    assert two.seconds == pytest.approx(400 * max(of_stages), rel=0.1)


def test_nodes_hold_the_groups_that_the_router_chooses(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["DeepSeek-V3"]))
    found = find_layouts(tmp_path, 16, None, 1, num_redundant=32)
    loads = draw_loads(2, 256, 1.0, seed=0)
    experts = ExpertSettings(num_redundant_experts=32, placement="loads")
    for num_nodes in (1, 2):
        costs = LayoutCosts(describe(tmp_path), found, found.layouts[0], H800, Assumptions(), 16 // num_nodes)
        placed = [eplb(of_layer, 16, 288, num_nodes=num_nodes, num_groups=8) for of_layer in loads]
        assert [placement.num_nodes for placement in placed] == [num_nodes] * 2
        balance = ExpertBalance(costs, experts, loads, seed=0)
        assert balance.expected == pytest.approx(sum(map(imbalance, loads, placed)) / 2)


def test_time_passes_between_requests(costs: LayoutCosts) -> None:
    """Two requests far apart take as long as one each, without steps between them."""
    alone = served(Traffic((RecordedRequest(0.0, 20, 5, ()),), 1), costs)
    both = served(Traffic((RecordedRequest(0.0, 20, 5, ()), RecordedRequest(100.0, 20, 5, ())), 1), costs)
    assert both.seconds == pytest.approx(100 + alone.seconds)
    assert only_pool(both).busy_s == pytest.approx(2 * alone.seconds)
    assert both.first_token_s.p99 == pytest.approx(alone.first_token_s.p99)


def test_prompts_share_recorded_blocks() -> None:
    assert prompt_of(RecordedRequest(0.0, 5, 1, (7, 8)), 3, own_token=-1) == [7, 7, 7, 8, 8]
    assert prompt_of(RecordedRequest(0.0, 8, 1, (7, 8)), 3, own_token=-1) == [7, 7, 7, 8, 8, 8, -1, -1]
    assert prompt_of(RecordedRequest(0.0, 2, 1, ()), 1, own_token=-4) == [-4, -4]


def test_rebalancing_helps_a_skewed_router(costs: LayoutCosts) -> None:
    """The system is saturated, so tokens per second measure the speed of steps."""
    traffic = drawn_traffic(0, 400, seconds=0.01, prompt=2000, output=60)
    settings = SimulationSettings(max_num_seqs=32)
    moving: dict[str, Any] = dict(rebalance_window=0.02, rebalance_horizon=1000.0)

    def run(balance: ExpertBalance) -> Outcome:
        plan = ClusterPlan(serving=(pool_of(costs, cache_tokens=100_000, balance=balance),))
        return serve(traffic, plan, settings)

    off, auto = (run(balance_of(costs, skew=1.2, rebalance=mode, **moving)) for mode in ("off", "auto"))
    assert auto.output_tokens_per_s > 1.05 * off.output_tokens_per_s
    assert only_pool(auto).balance_at_end < only_pool(off).balance_at_end == only_pool(off).balance_at_start
    assert not only_pool(off).rebalances
    # The loads do not drift, so one rebalance of both layers is enough.
    (rebalance,) = only_pool(auto).rebalances
    assert rebalance.num_layers == 2
    assert (rebalance.balance_before, rebalance.balance_after) == (
        only_pool(off).balance_at_start,
        only_pool(auto).balance_at_end,
    )
    # Moves take the time of their bytes on the links.
    num_moves = rebalance.num_bytes / (3 * 4096 * 14336 * 2)
    assert num_moves == round(num_moves) > 0
    assert rebalance.num_bytes / NUM_REPLICAS / (200e9 * 0.8) <= rebalance.transfer_s
    assert rebalance.transfer_s <= rebalance.num_bytes / (200e9 * 0.8)


def test_unprofitable_moves_are_not_made(costs: LayoutCosts) -> None:
    traffic = drawn_traffic(0, 200, seconds=0.01)
    balance = balance_of(costs, skew=1.2, rebalance="auto", rebalance_window=0.02, rebalance_horizon=1e-6)
    found = serve(traffic, ClusterPlan(serving=(pool_of(costs, balance=balance),)), SMALL)
    assert only_pool(found).rebalances == ()


def test_rebalancing_follows_drift(costs: LayoutCosts) -> None:
    load = StepLoad.of([ReplicaLoad(num_decoding=64, decode_pairs=6400)] * NUM_REPLICAS)
    off, auto = (balance_of(costs, skew=1.0, drift=20.0, rebalance=mode) for mode in ("off", "auto"))
    values = set()
    excess = {off: 0.0, auto: 0.0}  # of the fullest rank over the mean
    added_s = 0.0
    for _ in range(300):
        for balance in (off, auto):
            excess[balance] += balance.expected - 1
        assert off.advance(load, 1.0) == 0.0
        added_s += auto.advance(load, 1.0)
        values.add(off.expected)
    assert 1 < len(values) <= 6  # drift happens once a minute
    assert excess[auto] < excess[off] / 2
    assert added_s == pytest.approx(sum(each.transfer_s for each in auto.rebalances))
    assert balance_of(costs, skew=1.0, placement="loads").expected < balance_of(costs, skew=1.0).expected


def test_percentiles() -> None:
    assert Percentiles.of(range(1, 101)) == Percentiles(p50=50, p90=90, p99=99)
    assert Percentiles.of([]) == Percentiles(p50=0.0, p90=0.0, p99=0.0)


class TestCommand:
    ARGUMENTS = ("--ranks", "8", "--hardware", "h800", "--seconds", "3", "--length", "0.05", "--rate", "4")
    EXPERTS = ("--num-redundant-experts", "8", "--skew", "1", "--drift", "5", "--rebalance", "auto")

    def test_the_same_seed_gives_the_same_bytes(self, small_mixtral: Path, capsys: pytest.CaptureFixture[str]) -> None:
        outputs = []
        for seed in ("1", "1", "2"):
            assert (
                cli.main(["simulate", str(small_mixtral), *self.ARGUMENTS, *self.EXPERTS, "--json", "--seed", seed])
                == 0
            )
            outputs.append(capsys.readouterr().out)
        assert outputs[0] == outputs[1] != outputs[2]
        assert cli.main(["simulate", str(small_mixtral), *self.ARGUMENTS, *self.EXPERTS]) == 0
        text = capsys.readouterr().out
        for name in ("1 x 8 h800, tp 1, dp 8", "time to the first token", "idle steps", "on average"):
            assert name in text
        found = json.loads(outputs[0])
        asked = [each for each in sample_traffic().requests if each.arrival_s / 4 < 3]
        assert found["outcome"]["num_finished"] == found["num_requests"] == len(asked)
        assert found["outcome"]["output_tokens"] == sum(max(1, round(each.output_tokens * 0.05)) for each in asked)

    def test_loads_of_a_file(self, small_mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """All tokens go to two experts, on one rank, or with known loads on two."""
        path = tmp_path / "loads.json"
        path.write_text(json.dumps({"loads": [[1.0, 1.0] + [0.0] * 14]}))
        for placement, fullest in (("even", 8.0), ("loads", 4.0)):
            arguments = ("--loads", str(path), "--placement", placement, "--json")
            assert cli.main(["simulate", str(small_mixtral), *self.ARGUMENTS, *arguments]) == 0
            (found,) = json.loads(capsys.readouterr().out)["outcome"]["pools"]
            assert found["balance_at_start"] == pytest.approx(fullest)

    @pytest.mark.parametrize(
        ("arguments", "mentioned"),
        [
            (["--skew", "1", "--loads", "loads.json"], "use one of them"),
            (["--length", "100"], "shorter requests"),
            (["--tp", "3"], "--tp 3 does not divide --ranks 8"),
            (["--num-redundant-experts", "1000"], "slots"),
            (["--loads", "no/such/loads.json"], "cannot read the expert loads"),
        ],
    )
    def test_refusals(
        self, small_mixtral: Path, arguments: list[str], mentioned: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        command = ["simulate", str(small_mixtral), "--ranks", "8", "--hardware", "h800", *arguments]
        assert cli.main(command) == 1
        assert mentioned in capsys.readouterr().err


@pytest.mark.slow
def test_320_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["DeepSeek-V3"] | {"num_hidden_layers": 5}))
    arguments = ["--nodes", "40", "--hardware", "h800", "--num-redundant-experts", "64"]
    traffic = ["--seconds", "10", "--length", "0.02", "--rate", "20"]
    cli.main(["simulate", str(tmp_path), *arguments, *traffic, "--json"])
    found = json.loads(capsys.readouterr().out)
    (pool,) = found["outcome"]["pools"]
    assert (pool["dp"], found["outcome"]["num_finished"]) == (320, found["num_requests"])
    # One slot for each rank: experts without a copy get 1 / 256 of the rows.
    assert pool["balance_at_start"] == pytest.approx(320 / 256)


def test_weights_that_do_not_fit_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["DeepSeek-V3"]))
    assert cli.main(["simulate", str(tmp_path), "--nodes", "1", "--hardware", "h800"]) != 0
    assert "the weights of a rank take" in capsys.readouterr().err
