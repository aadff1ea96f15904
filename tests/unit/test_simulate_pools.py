"""`moeserve simulate`: stores behind the KV cache, pools for prompts and for decoding, and changes of size."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from moeserve import cli
from moeserve.models.registry import describe
from moeserve.planner.costs import LayoutCosts, ReplicaLoad, StepLoad
from moeserve.planner.expert_balance import ExpertBalance, draw_loads
from moeserve.planner.hardware import TABLE
from moeserve.planner.layout import find_layouts
from moeserve.planner.pool import BLOCK_SIZE, PoolPlan
from moeserve.planner.serving import ClusterPlan, prompt_of, serve
from moeserve.planner.settings import Assumptions, ExpertSettings, SimulationSettings
from moeserve.planner.simulation_report import Outcome
from moeserve.planner.traffic import RecordedRequest, Traffic, repeated_tokens

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
H800 = TABLE["h800"]
TOKEN_BYTES = 2 * 2 * 8 * 128 * 2  # keys and values of two layers with 8 heads, in bfloat16
BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES
HOST_BANDWIDTH = 64e9 * 0.8
NETWORK_BANDWIDTH = 50e9 * 0.8
SMALL = SimulationSettings(max_num_seqs=8, max_num_batched_tokens=512, host_time=0.0, start_time=0.0, switch_time=0.5)


def pool_of(small_mixtral: Path, num_ranks: int, cache_tokens: int = 8000) -> PoolPlan:
    found = find_layouts(small_mixtral, num_ranks, None, 1)
    (layout,) = found.layouts
    costs = LayoutCosts(describe(small_mixtral), found, layout, H800, Assumptions(), 2)
    return PoolPlan(
        num_nodes=math.ceil(num_ranks / 2),
        costs=costs,
        balance=ExpertBalance(costs, ExpertSettings(), draw_loads(2, 16, 0.0, seed=0), seed=0),
        cache_tokens=cache_tokens,
        cache_bytes_per_token=layout.cache_bytes_per_token,
    )


def drawn_traffic(seed: int, num_requests: int, seconds: float, *, num_prefixes: int = 4) -> Traffic:
    """Return requests that begin with up to three blocks of 100 tokens that others have too."""
    dice = random.Random(seed)
    arrivals = sorted(dice.uniform(0, seconds) for _ in range(num_requests - 1))
    return Traffic(
        tuple(
            RecordedRequest(
                arrival_s=arrival_s,
                prompt_tokens=dice.randint(1, 500),
                output_tokens=dice.randint(1, 40),
                prefix_blocks=tuple(
                    10 * depth + prefix
                    for depth in range(dice.randint(0, 3))
                    for prefix in [dice.randrange(num_prefixes)]
                ),
            )
            for arrival_s in [0.0, *arrivals]
        ),
        tokens_per_block=100,
    )


def prompts_of(traffic: Traffic) -> list[list[int]]:
    return [
        prompt_of(each, traffic.tokens_per_block, own_token=-1 - number) for number, each in enumerate(traffic.requests)
    ]


def blocks_of(prompt: list[int]) -> list[tuple[int, ...]]:
    """Name each full block by all tokens up to its end."""
    return [tuple(prompt[:end]) for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)]


def loadable(prompt: list[int]) -> list[tuple[int, ...]]:
    """Return the blocks that a cache may have: the last token is always computed."""
    return blocks_of(prompt[:-1])


def tokens_of(traffic: Traffic) -> tuple[int, int]:
    return sum(each.prompt_tokens for each in traffic.requests), sum(each.output_tokens for each in traffic.requests)


@pytest.mark.parametrize("seed", range(3))
def test_repeated_tokens(seed: int) -> None:
    traffic = drawn_traffic(seed, 60, 1.0)
    known: set[tuple[int, ...]] = set()
    num_repeated = 0
    for prompt in prompts_of(traffic):
        num_repeated += BLOCK_SIZE * sum(block in known for block in loadable(prompt))
        known.update(blocks_of(prompt))
    assert repeated_tokens(traffic, BLOCK_SIZE) == num_repeated > 0


@pytest.mark.slow_but("host memory-1", "several pools-0", "resize-0")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["host memory", "pools", "several pools", "resize"])
def test_driving_all_replicas_gives_the_same_outcome(small_mixtral: Path, kind: str, seed: int) -> None:
    """The traffic has queues, shared prefixes, preemptions, and transfers that end while replicas sleep."""
    settings, four, two = SMALL, pool_of(small_mixtral, 4, 640), pool_of(small_mixtral, 2, 640)

    def run(**options: bool) -> Outcome:
        if kind == "pools":
            plan = ClusterPlan(serving=(four,), prefill=(two,))
        elif kind == "several pools":
            plan = ClusterPlan(serving=(four, two), prefill=(two, pool_of(small_mixtral, 2, 640)))
        else:
            plan = ClusterPlan(serving=(four,), resizes=((0.05, two), (0.8, four)) if kind == "resize" else ())
        return serve(traffic, plan, settings, **options)

    if kind == "host memory":
        settings = SimulationSettings(**vars(SMALL) | {"kv_host_memory": 500 * BLOCK_BYTES, "host_bandwidth": 1e9})
    traffic = drawn_traffic(seed, 80, 0.3)
    fast = run()
    assert fast == run(drives_all=True)
    assert fast.num_finished == 80
    assert (fast.prompt_tokens, fast.output_tokens) == tokens_of(traffic)
    if kind == "host memory":
        (pool,) = fast.pools
        assert pool.num_preemptions
        assert pool.loaded.num_tokens > 0
        assert pool.saved.num_tokens > 0
    sparse = drawn_traffic(seed, 10, 30)
    traffic = sparse
    assert run() == run(drives_all=True)


@pytest.mark.parametrize("seed", range(2))
def test_hits_of_a_store_behind_the_cache_equal_a_recount(small_mixtral: Path, seed: int) -> None:
    """Requests come one at a time to one replica, whose cache holds few prompts. The store has room for all blocks."""
    drawn = drawn_traffic(seed, 100, 1.0)
    apart = tuple(
        RecordedRequest(float(number), each.prompt_tokens, each.output_tokens, each.prefix_blocks)
        for number, each in enumerate(drawn.requests)
    )
    traffic = Traffic(apart, drawn.tokens_per_block)
    num_blocks = 60
    plan = ClusterPlan(serving=(pool_of(small_mixtral, 1, num_blocks * BLOCK_SIZE),))
    alone = serve(traffic, plan, SMALL)
    stored = serve(traffic, plan, SimulationSettings(**vars(SMALL) | {"kv_host_memory": "10GB"}))

    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()  # the least recently used block first
    hits = repeated = 0
    known: set[tuple[int, ...]] = set()
    for number, (request, prompt) in enumerate(zip(traffic.requests, prompts_of(traffic), strict=True)):
        wanted = loadable(prompt)
        num_hits = next((index for index, block in enumerate(wanted) if block not in cache), len(wanted))
        hits += num_hits
        repeated += next((index for index, block in enumerate(wanted) if block not in known), len(wanted))
        # The last output token has no keys and values.
        own = blocks_of(prompt + [-1 - number] * (request.output_tokens - 1))
        has_partial_block = (len(prompt) + request.output_tokens - 1) % BLOCK_SIZE > 0
        for block in own:
            cache.pop(block, None)
        while len(cache) + len(own) + has_partial_block > num_blocks:
            cache.popitem(last=False)
        cache |= dict.fromkeys(reversed(own))  # a prompt's tail is evicted before its head
        known.update(own)

    assert alone.cached_tokens == hits * BLOCK_SIZE
    assert stored.cached_tokens == stored.repeated_tokens == repeated * BLOCK_SIZE
    (pool,) = stored.pools
    assert pool.loaded.num_tokens == (repeated - hits) * BLOCK_SIZE > 0
    assert pool.saved.num_tokens == len(known) * BLOCK_SIZE
    for copies in (pool.loaded, pool.saved):
        assert copies.num_bytes == copies.num_tokens * TOKEN_BYTES
        assert copies.busy_s == pytest.approx(copies.num_bytes / HOST_BANDWIDTH)
    for found in (alone, stored):
        (pool,) = found.pools
        computed = found.prompt_tokens - found.cached_tokens
        assert pool.tokens_run == computed + found.output_tokens - found.num_finished


def test_a_prompt_waits_for_its_blocks(small_mixtral: Path) -> None:
    """The next two prompts replace the first one in the cache. The last is the first again, and 256 tokens longer."""
    prompts = ((320, (0,) * 3), (576, (1,)), (576, (2,)), (576, (0,) * 3))
    requests = [RecordedRequest(100.0 * number, each[0], 1, each[1]) for number, each in enumerate(prompts)]
    pool = pool_of(small_mixtral, 1, 40 * BLOCK_SIZE)
    settings = SimulationSettings(**vars(SMALL) | {"kv_host_memory": "1GB", "host_bandwidth": 1e6})
    found = serve(Traffic(tuple(requests), 100), ClusterPlan(serving=(pool,)), settings)
    num_loaded = 300 // BLOCK_SIZE
    copy_s = num_loaded * BLOCK_BYTES / (1e6 * 0.8)
    load = ReplicaLoad(num_prefill=576 - num_loaded * BLOCK_SIZE, prefill_pairs=sum(range(num_loaded * 16 + 1, 577)))
    assert found.pools[0].loaded.takes_s.p50 == pytest.approx(copy_s)
    assert found.pools[0].loaded.num_tokens == found.cached_tokens == num_loaded * BLOCK_SIZE
    step_s = pool.costs.step_seconds(StepLoad.of([load]), pool.balance.expected).seconds
    assert found.first_token_s.p99 == pytest.approx(copy_s + step_s)


class TestPools:
    def test_a_request_is_computed_moved_and_decoded(self, small_mixtral: Path) -> None:
        prefill, decode = pool_of(small_mixtral, 2), pool_of(small_mixtral, 4)
        found = serve(
            Traffic((RecordedRequest(0.0, 100, 5, ()),), 1), ClusterPlan(serving=(decode,), prefill=(prefill,)), SMALL
        )
        of_prompt = ReplicaLoad(num_prefill=100, prefill_pairs=5050)
        moved = 96
        of_tail = ReplicaLoad(num_prefill=4, prefill_pairs=97 + 98 + 99 + 100)
        decoding = [ReplicaLoad(num_decoding=1, decode_pairs=length) for length in range(101, 105)]

        def seconds(pool: PoolPlan, load: ReplicaLoad) -> float:
            step = StepLoad.of([load])
            fullest = pool.costs.imbalance(step.num_tokens, pool.balance.expected).value
            return pool.costs.step_seconds(step, fullest).seconds

        first_s = seconds(prefill, of_prompt) + moved * TOKEN_BYTES / NETWORK_BANDWIDTH + seconds(decode, of_tail)
        assert found.first_token_s.p50 == pytest.approx(first_s)
        assert found.seconds == pytest.approx(first_s + sum(seconds(decode, load) for load in decoding))
        assert [pool.tokens_run for pool in found.pools] == [100, 4 + 4]

    @pytest.mark.parametrize("seed", range(2))
    def test_every_block_of_a_prompt_moves_once(self, small_mixtral: Path, seed: int) -> None:
        """No prompt begins as another, so each is computed and moved in full. Short outputs end where prompts are."""
        drawn = drawn_traffic(seed, 200, 0.2)
        requests = [
            RecordedRequest(each.arrival_s, each.prompt_tokens, each.output_tokens, ()) for each in drawn.requests
        ]
        plan = ClusterPlan(
            serving=(pool_of(small_mixtral, 4),), prefill=(pool_of(small_mixtral, 2), pool_of(small_mixtral, 2))
        )
        found = serve(Traffic(tuple(requests), 1), plan, SMALL)
        *prefill, decode = found.pools
        moved = [each for each in requests if each.output_tokens > 1]
        num_received = sum((each.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE for each in moved)
        assert decode.received.num_tokens == num_received
        assert decode.received.num_bytes == num_received * TOKEN_BYTES
        assert decode.received.busy_s == pytest.approx(decode.received.num_bytes / NETWORK_BANDWIDTH)
        assert decode.num_preemptions == sum(pool.num_preemptions for pool in prefill) == 0
        assert sum(pool.tokens_run for pool in prefill) == found.prompt_tokens
        expected = sum(each.prompt_tokens + each.output_tokens - 1 for each in moved) - num_received
        assert decode.tokens_run == expected
        assert [pool.received.num_tokens for pool in prefill] == [0, 0]
        assert all(pool.num_replicas_used == 2 for pool in prefill)

    def test_prompts_do_not_yield_where_nothing_decodes(self, small_mixtral: Path) -> None:
        requests = tuple(RecordedRequest(0.0, 100, 2, ()) for _ in range(20))
        plan = ClusterPlan(serving=(pool_of(small_mixtral, 4),), prefill=(pool_of(small_mixtral, 1),))
        settings = SimulationSettings(max_num_batched_tokens=512, max_prefill_tokens=16)
        prefill, decode = serve(Traffic(requests, 1), plan, settings).pools
        assert (prefill.tokens_run, prefill.num_steps) == (2000, math.ceil(2000 / 512))
        assert decode.tokens_run == 20 * (100 - 96 + 1)

    @pytest.mark.parametrize(("num_senders", "num_receivers"), [(1, 4), (4, 1)])
    def test_links_carry_one_copy_at_a_time(self, small_mixtral: Path, num_senders: int, num_receivers: int) -> None:
        """Prompts that end in one step leave their replica one after the other, and so they arrive at one."""
        requests = tuple(RecordedRequest(0.0, 161, 2, ()) for _ in range(3))
        plan = ClusterPlan(
            serving=(pool_of(small_mixtral, num_receivers),), prefill=(pool_of(small_mixtral, num_senders),)
        )
        found = serve(Traffic(requests, 1), plan, SMALL)
        copies = found.pools[1].received
        of_one = 160 * TOKEN_BYTES / NETWORK_BANDWIDTH
        assert copies.takes_s.p99 == pytest.approx(3 * of_one)
        assert copies.takes_s.p50 == pytest.approx(2 * of_one)


class TestResize:
    @pytest.mark.parametrize("num_ranks", [2, 8])
    def test_requests_continue_on_the_new_size(self, small_mixtral: Path, num_ranks: int) -> None:
        requests = tuple(RecordedRequest(0.0, 100, 50, ()) for _ in range(8))
        before, after = pool_of(small_mixtral, 4), pool_of(small_mixtral, num_ranks)
        asked_s = serve(Traffic(requests, 1), ClusterPlan(serving=(before,)), SMALL).seconds / 2
        plan = ClusterPlan(serving=(before,), resizes=((asked_s, after),))
        found = serve(Traffic(requests, 1), plan, SMALL)
        (switch,) = found.switches
        old, new = found.pools
        # The step in flight ends before the switch.
        assert asked_s <= switch.at_s <= asked_s + old.step_s.p99
        assert (switch.nodes_before, switch.nodes_after, switch.num_resumed) == (2, num_ranks // 2, 8)
        assert old.seconds == switch.at_s
        assert new.starts_at == switch.at_s + SMALL.switch_time
        # Nothing is lost or sampled twice, and the new size computes all tokens so far again.
        assert old.output_tokens + new.output_tokens == found.output_tokens == 400
        assert new.tokens_run == 8 * 100 + old.output_tokens + new.output_tokens - 8
        first_step_s = max(new.step_s.p99, new.step_s.p50)
        assert SMALL.switch_time < switch.pause_s <= SMALL.switch_time + 2 * first_step_s
        assert switch.gap_s.p50 >= switch.pause_s

    def test_more_replicas_serve_faster(self, small_mixtral: Path) -> None:
        traffic = Traffic(tuple(RecordedRequest(0.0, 100, 200, ()) for _ in range(200)), 1)
        settings = SimulationSettings(max_num_seqs=8, host_time=0.0, start_time=0.3, switch_time=0.1)
        plan = ClusterPlan(serving=(pool_of(small_mixtral, 2),), resizes=((0.1, pool_of(small_mixtral, 8)),))
        old, new = serve(traffic, plan, settings).pools
        assert old.seconds == pytest.approx(0.4, abs=old.step_s.p99)
        assert new.output_tokens_per_s > 1.5 * old.output_tokens_per_s

    def test_a_size_that_comes_too_late_is_not_taken(self, small_mixtral: Path) -> None:
        plan = ClusterPlan(serving=(pool_of(small_mixtral, 4),), resizes=((1e6, pool_of(small_mixtral, 2)),))
        found = serve(drawn_traffic(0, 20, 0.1), plan, SMALL)
        assert (found.switches, len(found.pools)) == ((), 1)


def test_good_requests_are_within_both_limits(small_mixtral: Path) -> None:
    traffic, plan = drawn_traffic(5, 100, 0.2), ClusterPlan(serving=(pool_of(small_mixtral, 4),))
    found = serve(traffic, plan, SMALL)
    assert found.num_good == 100
    assert found.good_output_tokens_per_s == found.output_tokens_per_s

    def good(**limits: float) -> int:
        return serve(traffic, plan, SimulationSettings(**vars(SMALL) | limits)).num_good

    assert good(first_token_limit=found.first_token_s.p50) == 50
    of_one_token = sum(each.output_tokens == 1 for each in traffic.requests)
    within = of_one_token + math.ceil((100 - of_one_token) * 0.9)
    assert good(output_token_limit=found.output_token_s.p90) == within
    both = good(first_token_limit=found.first_token_s.p50, output_token_limit=found.output_token_s.p50)
    assert 0 < both < 50


class TestCommand:
    TRAFFIC = ("--seconds", "3", "--length", "0.05", "--rate", "4", "--hardware", "h800")

    def test_pools_and_sizes_are_shown(self, small_mixtral: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pools = ("--prefill-nodes", "1,1", "--decode-nodes", "1", "--gpus-per-node", "2", "--first-token-limit", "2")
        assert cli.main(["simulate", str(small_mixtral), *self.TRAFFIC, *pools]) == 0
        text = capsys.readouterr().out
        for shown in ("prefill 0: 1 x 2 h800", "prefill 1: 1 x 2 h800", "decode of 1 nodes", "received", "within the"):
            assert shown in text
        sizes = ("--nodes", "1", "--resize", "1:2", "--start-time", "0", "--kv-host-memory", "1GiB")
        assert cli.main(["simulate", str(small_mixtral), *self.TRAFFIC, *sizes]) == 0
        text = capsys.readouterr().out
        for shown in ("pool of 1 nodes", "pool of 2 nodes", "1 -> 2", "saved to the host"):
            assert shown in text

    @pytest.mark.parametrize(
        ("arguments", "mentioned"),
        [
            (["--prefill-nodes", "1"], "--prefill-nodes needs --decode-nodes"),
            (["--decode-nodes", "1"], "--decode-nodes needs --prefill-nodes"),
            (["--prefill-nodes", "1", "--decode-nodes", "1", "--nodes", "2"], "--nodes cannot be combined"),
            (["--prefill-nodes", "1", "--decode-nodes", "1", "--resize", "1:2"], "--resize cannot be combined"),
            (["--nodes", "1", "--resize", "60"], "'60' must be SECONDS:NODES"),
            (["--nodes", "1", "--resize", "60:0"], "'60:0' must be SECONDS:NODES"),
            (["--nodes", "1", "--resize", "60:2", "--resize", "6:4"], "order of their times"),
            (["--nodes", "1", "--kv-host-memory", "much"], "--kv-host-memory much is not an amount of memory"),
        ],
    )
    def test_refusals(
        self, small_mixtral: Path, arguments: list[str], mentioned: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["simulate", str(small_mixtral), "--hardware", "h800", *arguments]) == 1
        assert mentioned in capsys.readouterr().err


@pytest.mark.slow
def test_320_ranks_in_pools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["DeepSeek-V3"] | {"num_hidden_layers": 5}))
    pools = ["--prefill-nodes", "4,4,4,4", "--decode-nodes", "24", "--hardware", "h800"]
    traffic = ["--seconds", "10", "--length", "0.02", "--rate", "20"]
    assert cli.main(["simulate", str(tmp_path), *pools, *traffic, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [pool["dp"] for pool in found["outcome"]["pools"]] == [32, 32, 32, 32, 192]
    assert found["outcome"]["num_finished"] == found["num_requests"]
