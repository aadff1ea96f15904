"""R1: replicas in lockstep on real gloo ranks, under random traffic. What is checked on the way: `worker_groups.py`."""

from __future__ import annotations

import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import worker_groups
from ranks import Ranks
from reference_models import Reference
from worker_groups import Arrival, Story, Timetable

from moeserve.protocol import Request, RequestUpdate
from moeserve.sampling_params import RequestParams

# Few blocks, so that requests must make room for each other.
OPTIONS: dict[str, Any] = dict(
    max_model_len=36, block_size=4, max_num_seqs=6, max_num_batched_tokens=24, kv_cache_memory="1MiB"
)
NUM_BLOCKS = 11
MAX_TOKENS = 12
NUM_PROMPTS = 40
ABORT_SHARE = 0.2
REFUSED_SHARE = 0.05
STOP_SHARE = 0.2


@dataclass(frozen=True)
class Pool:
    """Prompts, and what transformers makes of them."""

    reference: Reference
    prompts: list[list[int]]
    continuations: list[list[int]]


@pytest.fixture(scope="module")
def pool_named(reference_named: Callable[[str], Reference]) -> Callable[[str], Pool]:
    pools: dict[str, Pool] = {}

    def named(name: str) -> Pool:
        if name not in pools:
            pools[name] = make_pool(reference_named(name))
        return pools[name]

    return named


def make_pool(reference: Reference) -> Pool:
    """Half of the prompts begin alike, where they are long enough, for the prefix cache."""
    dice = random.Random(0)
    lengths = [1, 20, *(dice.randint(1, 20) for _ in range(NUM_PROMPTS - 2))]
    half = NUM_PROMPTS // 2
    (beginning,) = reference.clear_prompts([8], MAX_TOKENS)
    prompts = reference.clear_prompts(lengths[:half], MAX_TOKENS, beginning=beginning)
    prompts += reference.clear_prompts(lengths[half:], MAX_TOKENS)
    return Pool(reference, prompts, reference.continuations(prompts, MAX_TOKENS))


def make_traffic(seed: int, num_replicas: int, num_requests: int, pool: Pool) -> Timetable:
    """Stretches of rounds: one replica is busy, some or all are, many requests come at once, none come."""
    dice = random.Random(seed)
    arrivals: list[Arrival] = []
    start = 0
    while len(arrivals) < num_requests:
        everyone = range(num_replicas)
        kind = dice.choice(["one", "one", "some", "all", "burst", "pause"])
        match kind:
            case "one":
                busy, num_arrivals, num_rounds = dice.sample(everyone, 1), dice.randint(1, 10), 20
            case "some":
                busy, num_arrivals, num_rounds = dice.sample(everyone, num_replicas // 2), 2 * num_replicas, 12
            case "all":
                busy, num_arrivals, num_rounds = list(everyone), 4 * num_replicas, 12
            case "burst":
                busy, num_arrivals, num_rounds = dice.sample(everyone, 1), 10, 1
            case _:
                busy, num_arrivals, num_rounds = [], 0, 24
        for round_ in sorted(start + dice.randrange(num_rounds) for _ in range(num_arrivals)):
            arrivals.append(make_arrival(dice, len(arrivals), round_, dice.choice(busy), pool))
        start += num_rounds
    return Timetable(arrivals=arrivals[:num_requests])


def make_arrival(dice: random.Random, number: int, round_: int, replica: int, pool: Pool) -> Arrival:
    index = dice.randrange(len(pool.prompts))
    prompt, continuation = pool.prompts[index], pool.continuations[index]
    if dice.random() < REFUSED_SHARE:
        prompt = dice.choice([[], [3] * OPTIONS["max_model_len"]])
    stops = dice.random() < STOP_SHARE
    request = Request(
        request_id=f"{number} of prompt {index}",
        prompt_token_ids=prompt,
        params=RequestParams(temperature=0, max_tokens=dice.randint(1, MAX_TOKENS)),
        seed=number,
        eos_token_ids=[dice.choice(continuation)] if stops else [],
    )
    is_aborted = dice.random() < ABORT_SHARE
    abort_round = round_ + dice.randint(0, 6) if is_aborted else None
    return Arrival(round=round_, replica=replica, request=request, abort_round=abort_round)


def whole_output(request: Request, continuation: Sequence[int]) -> tuple[list[int], str]:
    """Tokens and finish reason of a request that is left alone."""
    most = request.params.max_tokens or 0
    tokens = list(continuation[:most])
    for index, token in enumerate(tokens):
        if token in request.eos_token_ids:
            return tokens[: index + 1], "stop"
    return tokens, "length"


def check_news(timetable: Timetable, stories: Sequence[Story], pool: Pool) -> Counter[str]:
    """I3, and the tokens: each request has one end, with a reason. Returns how they ended."""
    news: dict[str, list[RequestUpdate]] = defaultdict(list)
    for story in stories:
        for update in story.updates:
            news[update.request_id].append(update)
    ends: Counter[str] = Counter()
    for arrival in timetable.arrivals:
        request = arrival.request
        updates = news.pop(request.request_id, [])
        if timetable.shutdown_round is not None and arrival.round >= timetable.shutdown_round and not updates:
            continue  # it was never sent
        reasons = [update.finish_reason for update in updates]
        assert reasons, f"I3: no word of request {request.request_id}"
        assert reasons[-1] is not None, f"I3: request {request.request_id} never ended"
        assert not any(reasons[:-1]), f"I3: request {request.request_id} ended more than once: {reasons}"
        tokens = [token for update in updates for token in update.token_ids]
        continuation = pool.continuations[int(request.request_id.split()[-1])]
        whole, reason = whole_output(request, continuation)
        error = updates[-1].error
        if not 1 <= len(request.prompt_token_ids) < OPTIONS["max_model_len"]:
            assert (tokens, reasons[-1]) == ([], "abort"), request
            assert error is not None, request
            ends["refused"] += 1
        elif reasons[-1] == "abort":
            assert tokens == whole[: len(tokens)], f"request {request.request_id}: {tokens}, not {whole}"
            assert len(tokens) < len(whole), f"request {request.request_id} was aborted when it was done"
            is_aborted, is_shut_down = arrival.abort_round is not None, timetable.shutdown_round is not None
            is_asked_for = (is_aborted or is_shut_down) if error is None else "shut down" in error
            assert is_asked_for, f"I3: nobody ended request {request.request_id}: {error}"
            ends["aborted" if is_aborted else "shut down"] += 1
        else:
            assert (tokens, reasons[-1]) == (whole, reason), f"request {request.request_id}: {tokens}, not {whole}"
            ends[reason] += 1
        ends["cached"] += updates[-1].num_cached_tokens > 0
    assert not news, f"I3: news of requests that nobody sent: {list(news)}"
    return ends


def fuzz(
    ranks: Ranks,
    pool: Pool,
    timetable: Timetable,
    *,
    tp: int,
    dp: int,
    pp: int = 1,
    dispatcher: str,
    check_order: bool,
    seed: int,
    within_s: float,
) -> Counter[str]:
    """Plays a timetable and checks what came of it. Returns what happened."""
    options = OPTIONS | dict(dispatcher=dispatcher, debug_collectives=check_order, collective_timeout=30)
    stories = worker_groups.run(
        ranks,
        pp * tp * dp,
        timetable,
        within_s=within_s,
        folder=str(pool.reference.folder),
        tp=tp,
        pp=pp,
        options=options,
        num_blocks=NUM_BLOCKS,
        seed=seed,
    )
    worker_groups.check_counts(stories, tp, pool.reference.model.config.num_experts_per_tok, pp)
    happened = check_news(timetable, stories, pool)
    leaders = stories[(pp - 1) * tp :: pp * tp]  # the ranks that sample
    assert len({story.num_rounds for story in leaders}) == 1, "I1: replicas left after different rounds"
    happened["rounds"] += leaders[0].num_rounds
    happened["steps"] += len(leaders[0].steps)
    happened["idle rounds"] += leaders[0].num_idle_rounds
    happened["padding steps"] += sum(story.num_padding_steps for story in leaders)
    happened["preemptions"] += sum(story.num_preemptions for story in leaders)
    return happened


def check_variety(happened: Counter[str], at_least: int) -> None:
    kinds = ("length", "stop", "aborted", "refused", "cached", "idle rounds", "padding steps", "preemptions")
    assert all(happened[kind] >= at_least for kind in kinds), happened


LAYOUTS = [("mixtral", 1, 1, 4), ("mixtral", 1, 2, 2), ("mixtral-odd", 1, 1, 8), ("mixtral", 2, 1, 3)]
IDS = ["dp4", "tp2dp2", "dp8", "pp2dp3"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "pp", "tp", "dp"), LAYOUTS, ids=IDS)
def test_random_traffic(ranks: Ranks, pool_named: Callable[[str], Pool], name: str, pp: int, tp: int, dp: int) -> None:
    pool = pool_named(name)
    happened: Counter[str] = Counter()
    for seed, dispatcher, check_order in ((1, "all_to_all", True), (2, "allgather", False)):
        timetable = make_traffic(seed, dp, 30, pool)
        happened += fuzz(
            ranks,
            pool,
            timetable,
            tp=tp,
            dp=dp,
            pp=pp,
            dispatcher=dispatcher,
            check_order=check_order,
            seed=seed,
            within_s=120,
        )
    check_variety(happened, 2)


@pytest.mark.ranks
def test_shutdown_in_the_middle(ranks: Ranks, pool_named: Callable[[str], Pool]) -> None:
    pool = pool_named("mixtral")
    whole = make_traffic(3, 4, 40, pool)
    timetable = msgspec.structs.replace(whole, shutdown_round=whole.arrivals[20].round + 1)
    happened = fuzz(ranks, pool, timetable, tp=1, dp=4, dispatcher="all_to_all", check_order=True, seed=3, within_s=120)
    assert happened["shut down"] >= 1, happened


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("bug", "check_order", "told"),
    [
        ("idles_alone", True, r"ranks call different collectives: rank \d calls .*, but rank \d calls "),
        ("idles_alone", False, r"rank \d sent data of another collective|not all ranks joined within 10 s"),
        ("LeavesWithoutWork", True, r"Rank \d reported: AssertionError: I1: the replica left after round \d+"),
        ("LeavesWithoutWork", False, r"Rank \d reported: AssertionError: I1: the replica left after round \d+"),
        ("LeaksAtAbort", True, r"Rank \d reported: AssertionError: I4: before round \d+: holders are miscounted"),
        ("LeaksAtAbort", False, r"Rank \d reported: AssertionError: I4: before round \d+: holders are miscounted"),
    ],
    ids=["padding", "padding-unchecked", "leaving", "leaving-unchecked", "leak", "leak-unchecked"],
)
def test_planted_bug_is_found(
    ranks: Ranks, pool_named: Callable[[str], Pool], bug: str, check_order: bool, told: str
) -> None:
    """All ranks end soon, and one of those that did nothing wrong names what did."""
    pool = pool_named("mixtral")
    timetable = make_traffic(1, 4, 50, pool)
    outcomes = ranks.start(
        4,
        "worker_groups:play",
        folder=str(pool.reference.folder),
        tp=1,
        timetable=msgspec.to_builtins(timetable),
        options=OPTIONS | dict(debug_collectives=check_order, collective_timeout=10),
        num_blocks=NUM_BLOCKS,
        faulty_part=f"planted_bugs:{bug}",
    ).outcomes()
    errors = [outcome.error or "" for outcome in outcomes]
    assert all("Traceback" in error for error in errors), errors  # none hangs, and none ends as if all were well
    assert any(re.search(told, error) for error in errors), errors


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("name", "pp", "tp", "dp"), LAYOUTS, ids=IDS)
def test_three_thousand_requests(
    ranks: Ranks, pool_named: Callable[[str], Pool], name: str, pp: int, tp: int, dp: int
) -> None:
    pool = pool_named(name)
    for seed in range(3):
        started = time.monotonic()
        happened = fuzz(
            ranks,
            pool,
            make_traffic(100 + seed, dp, 1000, pool),
            tp=tp,
            dp=dp,
            pp=pp,
            dispatcher=("all_to_all", "allgather")[seed % 2],
            check_order=seed % 2 == 0,
            seed=seed,
            within_s=700,
        )
        seconds = time.monotonic() - started
        print(f"{name} pp {pp} tp {tp} dp {dp} seed {seed}: {seconds:.1f} s, {dict(happened)}", file=sys.stderr)
        check_variety(happened, 20)
