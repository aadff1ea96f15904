"""The scheduler's policies: order, budget, prefix hits, admission, preemption. Correctness under random histories is
tested in test_scheduling_states.py.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from logprob_rows import packed, unpacked

from moeserve.errors import RequestError
from moeserve.kv.manager import CacheManager
from moeserve.protocol import ChunkResult, Request, RequestUpdate, StepResult, TokenLogprobs
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.admission import MAX_PASSED
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.scheduler_config import SchedulerConfig
from moeserve.worker.request_table import Chunk, RequestTable

EOS, STOP = 99, 98
CONFIG = SchedulerConfig(
    num_blocks=16,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=64,
    enable_prefix_caching=True,
)
SIX_BLOCKS: dict[str, Any] = {"num_blocks": 6, "max_model_len": 24}
PROMPT = list(range(10, 20))  # two full blocks and a half
TABLES: WeakKeyDictionary[Scheduler, RequestTable] = WeakKeyDictionary()  # of the ranks


def make_scheduler(**changes: Any) -> Scheduler:
    return Scheduler(dataclasses.replace(CONFIG, **changes), b"engine")


def request(request_id: str, prompt: list[int] | int, *, cache_salt: str = "", **params: Any) -> Request:
    """Return a request. An integer as its prompt stands for that many tokens which no other request has."""
    if isinstance(prompt, int):
        prompt = [1000 + sum(map(ord, request_id)) * 1000 + index for index in range(prompt)]
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=RequestParams(**({"max_tokens": 8} | params)),
        seed=7,
        eos_token_ids=[EOS],
        cache_salt=cache_salt,
    )


def result_of(chunks: list[Chunk], step: int, token_id: int = 1) -> StepResult:
    """Return a result in which every sampled token is `token_id`, and prompt token t has the log-probability -t."""

    def chunk_result(chunk: Chunk) -> ChunkResult:
        rows = [TokenLogprobs([target], [-float(target)], [1]) for target in chunk.prompt_targets]
        return ChunkResult(token_ids=[token_id] if chunk.samples else [], prompt_logprobs=packed(rows))

    return StepResult(step=step, chunks=[chunk_result(chunk) for chunk in chunks])


def step(scheduler: Scheduler, token_id: int = 1) -> tuple[list[Chunk], list[RequestUpdate]]:
    """Plan a step, run it on the table of the scheduler's ranks, and commit it. Return its chunks and the updates."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.check_invariants()
    table = TABLES.setdefault(scheduler, RequestTable(CONFIG.max_num_seqs, 200))
    chunks = table.apply(plan)
    result = result_of(chunks, plan.step, token_id)
    table.append_tokens(chunks, [token_id] * sum(chunk.samples for chunk in chunks))
    updates = scheduler.commit(result)
    scheduler.note_step(plan, 0.01 * plan.num_tokens**2)  # few requests at once are faster
    scheduler.check_invariants()
    return chunks, updates


def run(scheduler: Scheduler, token_id: int = 1) -> list[RequestUpdate]:
    """Run all requests to their end. Return all updates."""
    updates: list[RequestUpdate] = []
    while scheduler.has_work:
        updates += step(scheduler, token_id)[1]
    return updates


def starts(chunks: list[Chunk]) -> list[int]:
    return [chunk.start for chunk in chunks]


def lengths(chunks: list[Chunk]) -> list[int]:
    return [len(chunk.token_ids) for chunk in chunks]


def test_running_requests_come_first_and_a_prompt_takes_the_rest_of_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5)
    scheduler.add(request("a", 2))
    scheduler.add(request("b", 7))
    assert [lengths(step(scheduler)[0]) for _ in range(3)] == [[2, 3], [1, 4], [1, 1]]


def test_at_most_max_num_seqs_run_in_order_of_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abcd":
        scheduler.add(request(name, 3, max_tokens=2))
    updates = step(scheduler)[1]
    assert [update.request_id for update in updates] == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    assert scheduler.abort("c") is not None
    assert [update.request_id for update in run(scheduler)] == ["a", "b", "d", "d"]


def test_prompt_logprobs_half_collected_at_a_preemption_are_neither_lost_nor_repeated() -> None:
    scheduler = make_scheduler(num_blocks=16, block_size=1, max_model_len=16, max_num_batched_tokens=2)
    scheduler.add(request("a", 2, max_tokens=12))
    scheduler.add(request("b", PROMPT, prompt_logprobs=0, max_tokens=2))
    computed, sent = [], []
    while scheduler.has_work:
        chunks, updates = step(scheduler)
        computed += [chunk.start for chunk in chunks if chunk.prompt_targets]
        sent += [
            [row.token_ids[0] for row in unpacked(update.prompt_logprobs)]
            for update in updates
            if update.request_id == "b"
        ]
    assert scheduler.num_preemptions == 1
    assert computed == [0, 1, 2, 3, 4, 5, 6, 0, 2, 4, 6, 8]
    assert sent == [PROMPT[1:], []]


@pytest.mark.parametrize(
    ("first", "second", "num_cached"),
    [
        (request("a", [*PROMPT, 1, 2, 3]), request("b", [*PROMPT, 4, 5, 6]), 8),
        (request("a", PROMPT[:8]), request("b", PROMPT[:8]), 4),  # the last token is always computed
        (request("a", PROMPT[:2], max_tokens=8), request("b", PROMPT[:2] + [1] * 8), 8),  # blocks of an output
        (request("a", [1, 1, 1, 1, 2, 2, 2, 2, 3]), request("b", [2, 2, 2, 2, 3]), 0),  # another prefix
        (request("a", PROMPT), request("b", PROMPT, prompt_logprobs=0), 0),  # all rows are needed
        (request("a", PROMPT, cache_salt="tenant"), request("b", PROMPT, cache_salt="tenant"), 8),
        (request("a", PROMPT, cache_salt="tenant"), request("b", PROMPT, cache_salt="other"), 0),
        (request("a", PROMPT, cache_salt="tenant"), request("b", PROMPT), 0),
    ],
)
def test_prefix_hits(first: Request, second: Request, num_cached: int) -> None:
    for enable_prefix_caching in (True, False):
        scheduler = make_scheduler(enable_prefix_caching=enable_prefix_caching)
        scheduler.add(first)
        run(scheduler)
        scheduler.add(second)
        chunks, updates = step(scheduler)
        expected = num_cached if enable_prefix_caching else 0
        assert (chunks[0].start, updates[0].num_cached_tokens) == (expected, expected)


def test_blocks_of_an_aborted_prompt_are_shared() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    scheduler.add(request("a", PROMPT))
    step(scheduler)
    scheduler.abort("a")
    scheduler.add(request("b", PROMPT))
    assert starts(step(scheduler)[0]) == [4]


def test_a_preempted_request_finds_its_blocks_in_the_cache_without_counting_hits() -> None:
    scheduler = make_scheduler(**SIX_BLOCKS)
    scheduler.add(request("a", 5, max_tokens=6))
    scheduler.add(request("b", 12, max_tokens=6))
    prompt_starts, updates = [], []
    while scheduler.has_work:
        chunks, some = step(scheduler)
        prompt_starts += [chunk.start for chunk in chunks if len(chunk.token_ids) > 1]
        updates += some
    assert scheduler.num_preemptions == 1
    assert prompt_starts == [0, 0, 12]
    assert {update.num_cached_tokens for update in updates} == {0}


def test_no_request_is_admitted_in_a_step_with_a_preemption() -> None:
    scheduler = make_scheduler(num_blocks=5, max_model_len=20)
    for name in "ab":
        scheduler.add(request(name, PROMPT[:8]))  # computed at the same time, so in blocks of their own
    step(scheduler)
    assert starts(step(scheduler)[0]) == [8]
    assert scheduler.num_preemptions == 1
    assert starts(step(scheduler)[0]) == [9, 8]  # now b shares the blocks of a


@pytest.mark.parametrize(
    ("running", "waiting", "budget", "is_admitted"),
    [
        # three blocks are free, and one of them is left for the running request
        (request("a", 8), [request("b", 9)], 64, False),
        (request("a", 8), [request("b", 8)], 64, True),
        # the whole prompt must fit, even in chunks
        (request("a", 4), [request("b", 20)], 4, False),
        # a short request may pass a long one that does not fit
        (request("a", 8), [request("b", 20), request("c", 1)], 64, True),
        # a prefix in use takes no room: two blocks are free
        (request("a", [*PROMPT, 1, 2, 3]), [request("b", [*PROMPT[:8], 5, 6, 7])], 64, True),
    ],
)
def test_admission_leaves_room_to_grow(
    running: Request, waiting: list[Request], budget: int, is_admitted: bool
) -> None:
    scheduler = make_scheduler(**SIX_BLOCKS, max_num_batched_tokens=budget)
    scheduler.add(running)
    while not step(scheduler)[0][0].samples:
        pass
    for each in waiting:
        scheduler.add(each)
    assert (len(step(scheduler)[0]) > 1) == is_admitted


def test_requests_whose_turn_it_is_may_all_be_preempted() -> None:
    scheduler = make_scheduler(num_blocks=32, max_model_len=128, longest_turn_wait=5.0)
    for name in "abc":
        scheduler.add(request(name, 8, max_tokens=100))
    tokens: Counter[str] = Counter()
    while scheduler.has_work:
        _, updates = step(scheduler)
        for update in updates:
            tokens[update.request_id] += len(update.token_ids)
    assert scheduler.num_preemptions > 0
    assert tokens == {"a": 100, "b": 100, "c": 100}


def test_a_long_request_is_passed_by_a_bounded_number_of_short_ones() -> None:
    scheduler = make_scheduler(**SIX_BLOCKS)
    scheduler.add(request("running", 8, max_tokens=15))
    step(scheduler)
    scheduler.add(request("long", 20, max_tokens=1))
    for number in range(2 * MAX_PASSED):
        scheduler.add(request(f"short {number}", 1, max_tokens=1))
    ended = [update.request_id for update in run(scheduler) if update.finish_reason is not None]
    assert ended.index("short 0") < ended.index("running") < ended.index("long") <= MAX_PASSED + 1


def test_a_long_queue_is_not_searched_for_requests_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(**SIX_BLOCKS)
    scheduler.add(request("running", 20, max_tokens=4))
    step(scheduler)
    for number in range(10 * MAX_PASSED):
        scheduler.add(request(f"long {number}", 20, max_tokens=1))
    looked_at = []
    prefix_of = CacheManager.find
    monkeypatch.setattr(CacheManager, "find", lambda self, each: looked_at.append(each) or prefix_of(self, each))
    step(scheduler)
    assert len(looked_at) == MAX_PASSED


def test_batches_stay_even_when_the_queue_is_longer_than_the_cache() -> None:
    scheduler = make_scheduler(num_batches=2, plans_ahead=False, enable_prefix_caching=False)
    for number in range(40):
        scheduler.add(request(str(number), 6, max_tokens=9))
    for number in range(6):
        first, second = scheduler.schedule(), scheduler.schedule()
        assert first is not None
        assert second is not None
        for plan in (first, second):
            chunks = [ChunkResult(token_ids=[1]) for _ in plan.slots]
            scheduler.commit(StepResult(step=plan.step, chunks=chunks))
        assert number == 0 or abs(len(first.slots) - len(second.slots)) <= 1, (first.slots, second.slots)


def test_a_request_that_decodes_advances_beside_a_long_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(request("a", 1))
    scheduler.add(request("long", 12))
    assert [lengths(step(scheduler)[0]) for _ in range(3)] == [[1, 3], [1, 3], [1, 3]]


LONG: dict[str, Any] = {"num_blocks": 64, "max_model_len": 200, "max_num_batched_tokens": 16}


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    scheduler = make_scheduler(**LONG)
    scheduler.add(request("long", 150, max_tokens=2))
    assert lengths(step(scheduler)[0]) == [16]  # nobody waits
    scheduler.add(request("short", 3))
    scheduler.add(request("middle", 12))
    # Half of the tokens are for others as long as they want them, and none is left over.
    assert [lengths(step(scheduler)[0]) for _ in range(4)] == [[8, 3, 5], [8, 1, 7], [14, 1, 1], [14, 1, 1]]


def test_a_prompt_near_its_end_leaves_nothing_to_others() -> None:
    scheduler = make_scheduler(**LONG)
    scheduler.add(request("first", 72, max_tokens=1))
    scheduler.add(request("second", 30, max_tokens=1))
    expected = [[8, 8], [16], [16], [16], [16], [16], [6]]
    assert [lengths(step(scheduler)[0]) for _ in expected] == expected


@pytest.mark.parametrize("limit", [{"num_blocks": 40}, {"max_num_seqs": 1}], ids=["cache is full", "one runs"])
def test_a_long_prompt_leaves_nothing_to_those_that_cannot_be_admitted(limit: dict[str, int]) -> None:
    scheduler = make_scheduler(**LONG | {"max_model_len": 160} | limit)
    scheduler.add(request("long", 158, max_tokens=1))
    scheduler.add(request("other", 10))
    assert [lengths(step(scheduler)[0]) for _ in range(10)] == [[16]] * 9 + [[14]]


def test_tokens_left_to_others_are_not_lost() -> None:
    """Neither those of a cached prefix, nor those of requests that get no slot."""
    scheduler = make_scheduler(**LONG)
    scheduler.add(request("first", 40, max_tokens=1))
    run(scheduler)
    scheduler.add(request("long", 150, max_tokens=1))
    scheduler.add(request("first", 40, max_tokens=1))  # nine of its ten blocks are cached
    assert lengths(step(scheduler)[0]) == [12, 4]
    for name in "abcdefghij":
        scheduler.add(request(name, 1, max_tokens=50))
    assert lengths(step(scheduler)[0]) == [9, *[1] * 7]


def test_a_free_cached_prefix_takes_room() -> None:
    scheduler = make_scheduler(**SIX_BLOCKS)
    prompt = [*PROMPT, 1, 2, 3]
    scheduler.add(request("a", prompt, max_tokens=1))
    run(scheduler)
    scheduler.add(request("b", 5))
    step(scheduler)
    scheduler.add(request("c", prompt))  # three of its four blocks are cached, among the four that are free
    assert scheduler.num_free_blocks == 4
    assert len(step(scheduler)[0]) == 1


@pytest.mark.parametrize(("prompt", "mentioned"), [(0, "no tokens"), (64, "max_model_len=64")])
def test_a_prompt_that_cannot_run_is_refused(prompt: int, mentioned: str) -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 63, max_tokens=1))
    with pytest.raises(RequestError, match=f"'b'.*{mentioned}"):
        scheduler.add(request("b", prompt))
    assert scheduler.live_request_ids == ["a"]


def test_an_id_in_use_is_refused_until_its_request_has_ended() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 3, max_tokens=2))
    for _ in range(2):
        with pytest.raises(RequestError, match="'a'"):
            scheduler.add(request("a", 3))
        step(scheduler)
    scheduler.add(request("a", 3))


def test_a_request_leaves_no_blocks_of_several_weights() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", PROMPT, max_tokens=14))
    for _ in range(3):  # 12 of its tokens are computed
        step(scheduler)
    scheduler.use_new_weights(b"engine")  # the old salt, so that later requests would find what is registered
    while scheduler.has_work:
        step(scheduler)
    scheduler.add(request("b", [*PROMPT, *[1] * 14]))
    ((chunk,), _) = step(scheduler)
    assert chunk.start == 12


def test_new_weights_hide_the_prefixes_of_waiting_and_preempted_requests() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(request("a", PROMPT))
    step(scheduler)
    scheduler.add(request("b", PROMPT))
    scheduler.hold()
    scheduler.add(request("c", PROMPT))
    scheduler.retract()
    scheduler.use_new_weights(b"new")
    scheduler.release()
    starts = []
    while scheduler.has_work:
        chunks, _ = step(scheduler)
        starts += [chunk.start for chunk in chunks if len(chunk.token_ids) > 1]
    assert starts == [0, 8, 8]  # the first one fills the blocks that the others find
