"""What the scheduler promises, one sentence a test. Random histories are in test_scheduling_states.py."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.errors import RequestError
from moeserve.protocol import Chunk, ChunkResult, Request, RequestUpdate, StepPlan, StepResult, TokenLogprobs
from moeserve.sampling_params import SamplingParams
from moeserve.scheduling.scheduler import Scheduler

EOS, STOP = 99, 98


def scheduler_with(**changes: Any) -> Scheduler:
    settings: dict[str, Any] = {
        "num_blocks": 16,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "enable_prefix_caching": True,
        "cache_salt": b"engine",
    }
    return Scheduler(**(settings | changes))


def request(request_id: str, prompt: list[int] | int, *, cache_salt: str = "", **params: Any) -> Request:
    """A request. A number as its prompt stands for so many tokens that no other request has."""
    if isinstance(prompt, int):
        prompt = [1000 + sum(map(ord, request_id)) * 1000 + index for index in range(prompt)]
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**({"max_tokens": 8} | params)),
        seed=7,
        eos_token_ids=[EOS],
        cache_salt=cache_salt,
    )


def result_of(plan: StepPlan, token_id: int = 1) -> StepResult:
    """A step in which every sampled token is `token_id`, and prompt token t has the log-probability -t."""

    def given(chunk: Chunk) -> ChunkResult:
        rows = [TokenLogprobs([target], [-float(target)], [1]) for target in chunk.prompt_targets]
        return ChunkResult(token_id=token_id if chunk.sample else None, prompt_logprobs=rows)

    return StepResult(step=plan.step, chunks=[given(chunk) for chunk in plan.chunks])


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def step(scheduler: Scheduler, token_id: int = 1) -> tuple[StepPlan, list[RequestUpdate]]:
    plan = planned(scheduler)
    scheduler.check_invariants()
    updates = scheduler.commit(plan, result_of(plan, token_id))
    scheduler.check_invariants()
    return plan, updates


def run(scheduler: Scheduler, token_id: int = 1) -> list[RequestUpdate]:
    """Steps until nothing is left. Returns all the news."""
    updates: list[RequestUpdate] = []
    while scheduler.has_work:
        updates += step(scheduler, token_id)[1]
    return updates


def lengths(plan: StepPlan) -> list[int]:
    return [len(chunk.token_ids) for chunk in plan.chunks]


# What a request goes through.


def test_with_nothing_to_do_there_is_no_plan() -> None:
    scheduler = scheduler_with()
    assert scheduler.schedule() is None
    assert not scheduler.has_work


def test_a_prompt_is_computed_in_one_step_and_each_token_in_the_next() -> None:
    scheduler = scheduler_with()
    scheduler.add(request("a", [5, 6, 7], max_tokens=2))

    first, updates = step(scheduler, token_id=8)
    assert first.chunks[0].token_ids == [5, 6, 7]
    assert first.chunks[0].start == 0
    assert updates == [RequestUpdate(request_id="a", token_ids=[8])]

    second, updates = step(scheduler, token_id=9)
    assert second.chunks[0].token_ids == [8]
    assert second.chunks[0].start == 3
    assert second.chunks[0].block_ids == first.chunks[0].block_ids
    assert updates == [RequestUpdate(request_id="a", token_ids=[9], finish_reason="length")]
    assert second.step > first.step
    assert not scheduler.has_work
    assert scheduler.num_free_blocks == 16


def test_a_long_prompt_is_computed_in_pieces_and_only_the_last_one_samples() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=4)
    scheduler.add(request("a", 10))
    plans = [step(scheduler) for _ in range(3)]
    assert [plan.chunks[0].start for plan, _ in plans] == [0, 4, 8]
    assert [lengths(plan) for plan, _ in plans] == [[4], [4], [2]]
    assert [plan.chunks[0].sample is not None for plan, _ in plans] == [False, False, True]
    assert [len(plan.chunks[0].block_ids) for plan, _ in plans] == [1, 2, 3]
    assert [len(updates) for _, updates in plans] == [0, 0, 1]


def test_running_requests_go_on_while_a_prompt_takes_what_is_left_of_the_budget() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=5)
    scheduler.add(request("a", 2))
    scheduler.add(request("b", 7))
    assert lengths(step(scheduler)[0]) == [2, 3]
    assert lengths(step(scheduler)[0]) == [1, 4]
    assert lengths(step(scheduler)[0]) == [1, 1]


def test_no_more_requests_run_than_allowed_and_they_are_served_in_order() -> None:
    scheduler = scheduler_with(max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name, 3, max_tokens=2))
    updates = step(scheduler)[1]
    assert [update.request_id for update in updates] == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert [update.request_id for update in run(scheduler)] == ["a", "b", "c", "c"]


# How a request ends.


@pytest.mark.parametrize(
    ("token_id", "params", "finish_reason", "stop_reason"),
    [
        (EOS, {}, "stop", None),
        (STOP, {"stop_token_ids": [STOP]}, "stop", STOP),
        (STOP, {}, None, None),
        (EOS, {"max_tokens": 1}, "stop", None),
        (1, {"max_tokens": 1}, "length", None),
        (1, {"max_tokens": None}, None, None),
    ],
)
def test_the_end_and_its_reason(
    token_id: int, params: dict[str, Any], finish_reason: str | None, stop_reason: int | None
) -> None:
    scheduler = scheduler_with()
    scheduler.add(request("a", 3, **params))
    update = step(scheduler, token_id)[1][0]
    assert update.token_ids == [token_id]
    assert (update.finish_reason, update.stop_reason) == (finish_reason, stop_reason)
    assert scheduler.has_work == (finish_reason is None)


def test_a_request_without_max_tokens_ends_when_the_context_is_full() -> None:
    scheduler = scheduler_with(num_blocks=3, max_model_len=12)
    scheduler.add(request("a", 3, max_tokens=None))
    updates = run(scheduler)
    assert len(updates) == 9
    assert [update.finish_reason for update in updates] == [None] * 8 + ["length"]


def test_below_min_tokens_stop_tokens_are_barred_and_end_nothing() -> None:
    scheduler = scheduler_with()
    scheduler.add(request("a", 3, min_tokens=2, stop_token_ids=[STOP]))
    barred = []
    for _ in range(3):
        plan, updates = step(scheduler, EOS)
        assert plan.chunks[0].sample is not None
        barred.append((plan.chunks[0].sample.barred_token_ids, updates[0].finish_reason))
    assert barred == [([EOS, STOP], None), ([EOS, STOP], None), ([], "stop")]


# How a token is chosen.


def test_each_token_is_chosen_by_the_seed_and_its_place_in_the_output() -> None:
    scheduler = scheduler_with()
    scheduler.add(request("a", 3))
    specs = [step(scheduler)[0].chunks[0].sample for _ in range(3)]
    assert [(spec.seed, spec.position) for spec in specs if spec] == [(7, 0), (7, 1), (7, 2)]
    assert all(spec and not spec.prompt_token_ids and not spec.output_token_ids for spec in specs)


def test_penalties_come_with_the_tokens_they_look_at() -> None:
    scheduler = scheduler_with()
    scheduler.add(request("a", [5, 6], presence_penalty=0.5))
    step(scheduler, token_id=8)
    spec = step(scheduler, token_id=9)[0].chunks[0].sample
    assert spec is not None
    assert spec.prompt_token_ids == [5, 6]
    assert spec.output_token_ids == [8]


def test_logprobs_of_a_token_come_with_it() -> None:
    scheduler = scheduler_with()
    scheduler.add(request("a", 3, logprobs=0))
    logprobs = TokenLogprobs([4], [-0.5], [1])
    plan = planned(scheduler)
    given = StepResult(step=plan.step, chunks=[ChunkResult(token_id=4, logprobs=logprobs)])
    assert scheduler.commit(plan, given)[0].logprobs == [logprobs]


# Prompt log-probabilities.


def targets_of(update: RequestUpdate) -> list[int]:
    return [row.token_ids[0] for row in update.prompt_logprobs]


def test_prompt_logprobs_are_collected_over_the_pieces_and_sent_once_with_the_first_token() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=4)
    prompt = list(range(10, 20))
    scheduler.add(request("a", prompt, prompt_logprobs=1))
    plans, updates = zip(*(step(scheduler) for _ in range(4)), strict=True)
    assert [plan.chunks[0].prompt_targets for plan in plans] == [prompt[1:5], prompt[5:9], prompt[9:], []]
    assert [plan.chunks[0].num_prompt_logprobs for plan in plans] == [1, 1, 1, None]
    assert [targets_of(update) for news in updates for update in news] == [prompt[1:], []]


def test_a_request_without_prompt_logprobs_asks_for_none() -> None:
    scheduler = scheduler_with()
    scheduler.add(request("a", 6))
    chunk = step(scheduler)[0].chunks[0]
    assert chunk.num_prompt_logprobs is None
    assert chunk.prompt_targets == []


def test_prompt_logprobs_need_every_row_so_nothing_is_taken_from_the_cache() -> None:
    scheduler = scheduler_with()
    prompt = list(range(10, 20))
    scheduler.add(request("a", prompt))
    run(scheduler)
    scheduler.add(request("b", prompt, prompt_logprobs=0))
    plan, updates = step(scheduler)
    assert plan.chunks[0].start == 0
    assert targets_of(updates[0]) == prompt[1:]
    assert updates[0].num_cached_tokens == 0


def test_prompt_logprobs_half_collected_at_a_preemption_are_neither_lost_nor_doubled() -> None:
    scheduler = scheduler_with(num_blocks=16, block_size=1, max_model_len=16, max_num_batched_tokens=2)
    prompt = list(range(10, 20))
    scheduler.add(request("a", 2, max_tokens=12))
    scheduler.add(request("b", prompt, prompt_logprobs=0, max_tokens=2))
    starts, sent = [], []
    while scheduler.has_work:
        plan, updates = step(scheduler)
        starts += [chunk.start for chunk in plan.chunks if chunk.num_prompt_logprobs is not None]
        sent += [targets_of(update) for update in updates if update.request_id == "b"]
    assert scheduler.num_preemptions == 1
    assert starts == [0, 1, 2, 3, 4, 5, 6, 0, 2, 4, 6, 8]
    assert sent == [prompt[1:], []]


# Prefix caching.


def test_a_prompt_that_begins_like_an_earlier_one_starts_behind_their_common_blocks() -> None:
    scheduler = scheduler_with()
    common = list(range(10, 20))  # two full blocks and a half
    scheduler.add(request("a", [*common, 1, 2, 3]))
    first, _ = step(scheduler)
    scheduler.add(request("b", [*common, 4, 5, 6]))
    second, updates = step(scheduler)
    assert second.chunks[1].start == 8
    assert second.chunks[1].token_ids == [18, 19, 4, 5, 6]
    assert second.chunks[1].block_ids[:2] == first.chunks[0].block_ids[:2]
    assert not set(second.chunks[1].block_ids[2:]) & set(second.chunks[0].block_ids)
    assert [update.num_cached_tokens for update in updates] == [0, 8]


def test_the_last_token_of_a_prompt_is_computed_even_if_all_of_it_is_cached() -> None:
    scheduler = scheduler_with()
    prompt = list(range(10, 18))  # two full blocks
    scheduler.add(request("a", prompt))
    run(scheduler)
    scheduler.add(request("b", prompt))
    assert step(scheduler)[0].chunks[0].start == 4


def test_blocks_of_an_output_are_cached_too() -> None:
    scheduler = scheduler_with()
    scheduler.add(request("a", [10, 11], max_tokens=8))
    run(scheduler, token_id=3)
    scheduler.add(request("b", [10, 11, *[3] * 8]))
    assert step(scheduler)[0].chunks[0].start == 8  # the ninth token of "a" was computed, the tenth was not


def test_nothing_is_shared_before_it_is_computed() -> None:
    scheduler = scheduler_with()
    prompt = list(range(10, 20))
    scheduler.add(request("a", prompt))
    scheduler.add(request("b", prompt))
    plan, _ = step(scheduler)
    assert [chunk.start for chunk in plan.chunks] == [0, 0]
    assert not set(plan.chunks[0].block_ids) & set(plan.chunks[1].block_ids)


def test_a_block_is_not_shared_before_its_last_token_is_computed() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=6)
    prompt = list(range(10, 20))
    scheduler.add(request("a", prompt))
    step(scheduler)
    scheduler.abort("a")
    scheduler.add(request("b", prompt))
    assert step(scheduler)[0].chunks[0].start == 4


def test_equal_tokens_behind_other_tokens_are_not_shared() -> None:
    scheduler = scheduler_with()
    scheduler.add(request("a", [1, 1, 1, 1, 2, 2, 2, 2, 3]))
    run(scheduler)
    scheduler.add(request("b", [2, 2, 2, 2, 3]))
    assert step(scheduler)[0].chunks[0].start == 0


@pytest.mark.parametrize(("salt", "start"), [("tenant", 8), ("other", 0), ("", 0)])
def test_requests_share_only_with_their_own_salt(salt: str, start: int) -> None:
    scheduler = scheduler_with()
    prompt = list(range(10, 20))
    scheduler.add(request("a", prompt, cache_salt="tenant"))
    run(scheduler)
    scheduler.add(request("b", prompt, cache_salt=salt))
    assert step(scheduler)[0].chunks[0].start == start


def test_prefix_caching_can_be_off() -> None:
    scheduler = scheduler_with(enable_prefix_caching=False)
    prompt = list(range(10, 20))
    for name in "ab":
        scheduler.add(request(name, prompt))
        plan, updates = step(scheduler)
        assert plan.chunks[-1].start == 0
        assert updates[-1].num_cached_tokens == 0


# When blocks run out.


def test_the_newest_request_makes_room_and_its_output_is_kept() -> None:
    scheduler = scheduler_with(num_blocks=6, max_model_len=24, enable_prefix_caching=False)
    scheduler.add(request("a", 7, max_tokens=10))
    scheduler.add(request("b", 7, max_tokens=10))
    updates = run(scheduler)
    assert scheduler.num_preemptions == 1
    assert [update.request_id for update in updates] == ["a", "b"] * 6 + ["a"] * 4 + ["b"] * 4
    assert [update.finish_reason for update in updates if update.request_id == "b"] == [None] * 9 + ["length"]


def test_a_preempted_request_computes_its_output_again_and_samples_where_it_left_off() -> None:
    scheduler = scheduler_with(num_blocks=6, max_model_len=24, enable_prefix_caching=False)
    scheduler.add(request("a", 7, max_tokens=10))
    scheduler.add(request("b", [50, 51, 52, 53, 54, 55, 56], max_tokens=10))
    known = [50, 51, 52, 53, 54, 55, 56]
    for token_id in range(1, 7):
        step(scheduler, token_id)
        known.append(token_id)
    plan, _ = step(scheduler)
    assert scheduler.num_preemptions == 1
    assert len(plan.chunks) == 1  # "b" is not in the step that sent it away
    while scheduler.num_waiting:
        plan, _ = step(scheduler)
    again = plan.chunks[-1]
    assert again.start == 0
    assert again.token_ids == known
    assert again.sample is not None
    assert again.sample.position == 6


def test_a_preempted_request_finds_its_own_blocks_in_the_cache_but_does_not_count_them_as_hits() -> None:
    scheduler = scheduler_with(num_blocks=6, max_model_len=24)
    scheduler.add(request("a", 5, max_tokens=6))
    scheduler.add(request("b", 12, max_tokens=6))
    starts, updates = [], []
    while scheduler.has_work:
        plan, news = step(scheduler)
        starts += [chunk.start for chunk in plan.chunks if len(chunk.token_ids) > 1]
        updates += news
    assert scheduler.num_preemptions == 1
    assert starts == [0, 0, 12]
    assert {update.num_cached_tokens for update in updates} == {0}


def test_an_output_computed_again_in_pieces_samples_only_at_its_end() -> None:
    scheduler = scheduler_with(num_blocks=6, max_model_len=24, max_num_batched_tokens=8, enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(request(name, 4, max_tokens=10))
    for _ in range(10):
        step(scheduler)
    assert scheduler.num_preemptions == 1
    chunks = [step(scheduler)[0].chunks[0] for _ in range(2)]
    assert [(len(chunk.token_ids), chunk.sample is not None) for chunk in chunks] == [(8, False), (5, True)]


def test_nobody_is_admitted_in_a_step_that_sent_somebody_away() -> None:
    scheduler = scheduler_with(num_blocks=5, max_model_len=20)
    prompt = list(range(10, 18))
    scheduler.add(request("a", prompt))
    scheduler.add(request("b", prompt))  # computed at the same time, so in blocks of its own
    step(scheduler)
    assert [chunk.start for chunk in step(scheduler)[0].chunks] == [8]
    assert scheduler.num_preemptions == 1
    assert [chunk.start for chunk in step(scheduler)[0].chunks] == [9, 8]  # now it shares those of "a"


def test_a_request_is_admitted_only_if_every_running_one_can_still_grow() -> None:
    scheduler = scheduler_with(num_blocks=6, max_model_len=24, enable_prefix_caching=False)
    scheduler.add(request("a", 8))
    step(scheduler)
    scheduler.add(request("b", 14))  # four blocks are left: it would take all of them
    assert scheduler.num_free_blocks == 4
    assert len(step(scheduler)[0].chunks) == 1
    scheduler.abort("b")
    scheduler.add(request("c", 8))  # three are left, it takes two
    assert len(step(scheduler)[0].chunks) == 2


def test_a_prompt_is_admitted_whole_or_not_at_all_even_in_pieces() -> None:
    scheduler = scheduler_with(num_blocks=6, max_model_len=24, max_num_batched_tokens=4, enable_prefix_caching=False)
    scheduler.add(request("a", 4))
    step(scheduler)
    scheduler.add(request("b", 20))
    assert len(step(scheduler)[0].chunks) == 1


def test_a_cached_prefix_in_use_takes_no_room() -> None:
    scheduler = scheduler_with(num_blocks=6, max_model_len=24)
    prompt = list(range(10, 23))
    scheduler.add(request("a", prompt))
    step(scheduler)
    assert scheduler.num_free_blocks == 2
    scheduler.add(request("b", prompt))
    assert [chunk.start for chunk in step(scheduler)[0].chunks] == [13, 12]


def test_a_cached_prefix_that_is_free_does_take_room() -> None:
    scheduler = scheduler_with(num_blocks=6, max_model_len=24)
    prompt = list(range(10, 23))
    scheduler.add(request("a", prompt, max_tokens=1))
    run(scheduler)
    scheduler.add(request("b", 5))
    step(scheduler)
    scheduler.add(request("c", prompt))  # three of its four blocks are cached, among the four that are free
    assert scheduler.num_free_blocks == 4
    assert len(step(scheduler)[0].chunks) == 1


def test_a_short_request_does_not_overtake_a_long_one() -> None:
    scheduler = scheduler_with(num_blocks=6, max_model_len=24)
    scheduler.add(request("a", 8))
    step(scheduler)
    scheduler.add(request("long", 20))
    scheduler.add(request("short", 1))
    assert len(step(scheduler)[0].chunks) == 1


def test_one_request_may_fill_the_whole_cache() -> None:
    scheduler = scheduler_with(num_blocks=4, max_model_len=16)
    scheduler.add(request("a", 15, max_tokens=None))
    scheduler.add(request("b", 1, max_tokens=None))
    updates = run(scheduler)
    assert sum(len(update.token_ids) for update in updates) == 1 + 15
    assert scheduler.num_free_blocks == 4


# Ending from outside.


def test_a_step_given_up_ends_its_own_requests_only() -> None:
    scheduler = scheduler_with(max_num_batched_tokens=4)
    for request_id in "abc":
        scheduler.add(request(request_id, 2))
    planned(scheduler)
    scheduler.abort("a")
    scheduler.add(request("a", 2))  # another one by that name
    assert scheduler.abort_step() == [RequestUpdate(request_id="b", finish_reason="abort")]
    scheduler.check_invariants()
    scheduler.add(request("b", 2))
    assert scheduler.abort_step() == []
    assert scheduler.live_request_ids == ["c", "a", "b"]
    assert len(run(scheduler)) == 3 * 8


def test_an_abort_ends_a_request_once_and_frees_its_blocks() -> None:
    scheduler = scheduler_with()
    scheduler.add(request("a", 9))
    step(scheduler)
    assert scheduler.abort("a") == RequestUpdate(request_id="a", finish_reason="abort")
    assert scheduler.abort("a") is None
    assert scheduler.abort("never seen") is None
    assert scheduler.num_free_blocks == 16
    assert not scheduler.has_work


def test_a_waiting_request_can_be_aborted() -> None:
    scheduler = scheduler_with(max_num_seqs=1)
    for name in "abc":
        scheduler.add(request(name, 3, max_tokens=1))
    step(scheduler)
    assert scheduler.abort("b") is not None
    assert [update.request_id for update in run(scheduler)] == ["c"]


def test_what_a_step_gave_for_a_request_aborted_meanwhile_is_dropped() -> None:
    scheduler = scheduler_with()
    prompt = list(range(10, 20))
    scheduler.add(request("a", prompt))
    scheduler.add(request("b", 3))
    plan = planned(scheduler)
    scheduler.abort("a")
    assert [update.request_id for update in scheduler.commit(plan, result_of(plan))] == ["b"]
    scheduler.add(request("c", prompt))
    assert planned(scheduler).chunks[-1].start == 0  # nothing of "a" was registered


def test_a_new_request_under_an_aborted_id_gets_nothing_of_the_old_one() -> None:
    scheduler = scheduler_with()
    scheduler.add(request("a", 3))
    plan = planned(scheduler)
    scheduler.abort("a")
    scheduler.add(request("a", [5, 6]))
    assert scheduler.commit(plan, result_of(plan)) == []
    plan, updates = step(scheduler)
    assert plan.chunks[0].token_ids == [5, 6]
    assert [update.request_id for update in updates] == ["a"]


def test_after_a_failed_step_all_have_ended_nothing_is_cached_of_it_and_new_ones_run() -> None:
    scheduler = scheduler_with(max_num_seqs=2)
    prompt = list(range(10, 20))
    for name in "abc":
        scheduler.add(request(name, prompt))
    failed = planned(scheduler)
    updates = scheduler.abort_all()
    assert [(update.request_id, update.finish_reason) for update in updates] == [(name, "abort") for name in "abc"]
    assert scheduler.abort_all() == []
    assert scheduler.num_free_blocks == 16
    scheduler.check_invariants()
    scheduler.add(request("d", prompt))
    plan, _ = step(scheduler)
    assert plan.step > failed.step
    assert plan.chunks[0].start == 0


# What is refused.


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (0, "request 'b': the prompt has no tokens"),
        (64, "request 'b': the prompt has 64 tokens; with max_model_len=64 at most 63 fit"),
        (1000, "the prompt has 1000 tokens"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_and_nothing_changes(prompt: int, complaint: str) -> None:
    scheduler = scheduler_with()
    scheduler.add(request("a", 63, max_tokens=1))
    with pytest.raises(RequestError, match=complaint):
        scheduler.add(request("b", prompt))
    assert scheduler.num_waiting == 1
    assert [update.request_id for update in run(scheduler)] == ["a"]


@pytest.mark.parametrize("num_steps", [0, 1])
def test_an_id_in_use_is_refused_until_its_request_has_ended(num_steps: int) -> None:
    scheduler = scheduler_with()
    scheduler.add(request("a", 3, max_tokens=2))
    for _ in range(num_steps):
        step(scheduler)
    with pytest.raises(RequestError, match="request 'a' is still being served"):
        scheduler.add(request("a", 3))
    run(scheduler)
    scheduler.add(request("a", 3))


def test_a_cache_too_small_for_one_request_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="3 blocks cannot hold 13 tokens"):
        scheduler_with(num_blocks=3, max_model_len=13)


def test_a_step_must_be_committed_before_the_next_and_only_once() -> None:
    scheduler = scheduler_with()
    scheduler.add(request("a", 3))
    plan = planned(scheduler)
    with pytest.raises(AssertionError, match="neither committed nor aborted"):
        scheduler.schedule()
    scheduler.commit(plan, result_of(plan))
    with pytest.raises(AssertionError, match="chunks are missing"):
        scheduler.commit(plan, result_of(plan))


def test_the_same_calls_give_the_same_plans() -> None:
    def history() -> list[StepPlan]:
        scheduler = scheduler_with(num_blocks=6, max_model_len=24, max_num_batched_tokens=9)
        for name in "abcd":
            scheduler.add(request(name, [*range(10, 16), ord(name)], max_tokens=9))
        plans = []
        while scheduler.has_work:
            plans.append(step(scheduler)[0])
        return plans

    assert history() == history()
