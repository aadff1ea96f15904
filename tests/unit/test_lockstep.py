"""The agreement between replicas, and the loop of one replica. Failures of replicas are tested in tests/reliability."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator
from typing import Any

import msgspec
import pytest
from load_windows import of_counts

from moeserve.errors import DistributedError, LockstepError
from moeserve.protocol import (
    AbortRequest,
    AddRequest,
    ChunkResult,
    CollectLoad,
    Delivery,
    ReplicaMessage,
    Request,
    RequestUpdate,
    Shutdown,
    StepResult,
)
from moeserve.sampling_params import RequestParams
from moeserve.scheduling import lockstep
from moeserve.scheduling.lockstep import ROW_SIZE, Agreement, Intent, IntentFlags, Round, RoundResult, make_row
from moeserve.scheduling.replica import Effect, Events, Replica, Submit, Wait
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.scheduler_config import SchedulerConfig
from moeserve.worker.request_table import RequestTable

NO_FLAGS = IntentFlags()
NOTHING = Intent(num_tokens=0, is_decode_only=True)


def rows_of(*intents: Intent, number: int = 0) -> list[list[int]]:
    return [make_row(intent, number=number, replica=index) for index, intent in enumerate(intents)]


def agree(*intents: Intent) -> Agreement:
    rows = rows_of(*intents)
    assert {len(row) for row in rows} == {ROW_SIZE}
    return lockstep.agree(rows, number=0, num_replicas=len(intents))


def flagged(**flags: bool) -> Intent:
    return Intent(num_tokens=0, is_decode_only=True, flags=IntentFlags(**flags))


def test_fields_of_an_agreement() -> None:
    decode = Intent(num_tokens=3, is_decode_only=True, num_sampling=2)
    assert agree(decode, Intent(num_tokens=9, is_decode_only=False)) == Agreement(
        number=0,
        num_tokens=(3, 9),
        num_sampling=(2, 0),
        control=0,
        is_idle=False,
        has_requests=True,
        is_decode_only=False,
        is_shutdown=False,
        failed_ranks=(),
        collects_load=False,
        prefill_budget=None,
        padded_tokens=9,
    )
    assert agree(NOTHING, NOTHING).is_idle
    assert not agree(NOTHING, decode).is_idle
    assert agree(NOTHING, decode).is_decode_only


def test_one_replica_can_request_load_but_shutdown_needs_all() -> None:
    agreement = agree(NOTHING, flagged(requests_load=True), NOTHING)
    assert agreement.collects_load
    assert not agreement.is_idle
    leaving, failed = flagged(requests_shutdown=True), flagged(has_failed=True, requests_load=True)
    assert agree(leaving, leaving).is_shutdown
    assert not agree(leaving, failed).is_shutdown
    assert agree(leaving, failed, failed).failed_ranks == (1, 2)


def test_a_control_runs_when_all_announce_it() -> None:
    ready = Intent(num_tokens=0, is_decode_only=True, control=3)
    busy = Intent(num_tokens=2, is_decode_only=True)
    assert agree(ready, ready).control == 3
    assert not agree(ready, ready).is_idle
    assert agree(ready, busy).control == 0
    assert agree(ready, NOTHING).is_idle
    with pytest.raises(LockstepError, match=r"\[3, 4\]"):
        agree(ready, dataclasses.replace(ready, control=4))
    with pytest.raises(LockstepError, match=r"\[0, 2\] tokens"):
        agree(ready, dataclasses.replace(ready, num_tokens=2))


@pytest.mark.parametrize(("place", "value"), [(0, 11), (1, 5)])
def test_replicas_out_of_step_are_named(place: int, value: int) -> None:
    rows = rows_of(NOTHING, NOTHING, NOTHING)
    rows[1][place] = value
    with pytest.raises(LockstepError, match=rf"{value} on replicas \[1\]"):
        lockstep.agree(rows, number=0, num_replicas=3)


def test_rows_in_wrong_order_or_number_or_of_another_round_are_refused() -> None:
    rows = rows_of(NOTHING, NOTHING)
    with pytest.raises(LockstepError, match=r"\[1, 0\]"):
        lockstep.agree(rows[::-1], number=0, num_replicas=2)
    with pytest.raises(LockstepError, match="1 rows"):
        lockstep.agree(rows[:1], number=0, num_replicas=2)
    with pytest.raises(LockstepError, match="round 0"):
        lockstep.agree(rows, number=1, num_replicas=2)


def request(request_id: str, num_prompt_tokens: int = 2, max_tokens: int = 4) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(num_prompt_tokens)),
        params=RequestParams(max_tokens=max_tokens),
        seed=1,
    )


class Driven:
    """Replica 0 of two, and its ranks. The other replica is this test: it never has a plan."""

    def __init__(self, load_window: int = 0, max_num_batched_tokens: int = 2, max_rounds: int = 1) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=8,
                block_size=4,
                max_num_seqs=2,
                max_num_batched_tokens=max_num_batched_tokens,
                max_prefill_tokens=16,
                max_model_len=16,
                enable_prefix_caching=False,
            ),
            b"test",
        )
        self.replica = replica = Replica(
            self.scheduler, index=0, num_replicas=2, max_rounds=max_rounds, load_window=load_window
        )
        self.run: Generator[Effect, Any, None] = replica.run()
        self.table = RequestTable(2, 4)
        self.rounds: list[Round] = []  # in flight
        self.num_rounds = 0  # that have ended
        self.agreements: list[Agreement] = []  # of steps
        self.delivered: list[Delivery] = []
        self.has_ended = False
        self.handle(None)

    @property
    def updates(self) -> list[RequestUpdate]:
        return [update for delivery in self.delivered for update in delivery.updates]

    def handle(self, events: Events | None) -> None:
        """Hand events to the replica, and perform its effects until it waits or ends."""
        answer = events
        while True:
            try:
                effect = self.run.send(answer)
            except StopIteration:
                self.has_ended = True
                return
            answer = None
            match effect:
                case Submit(work=work):
                    self.rounds.append(work)
                case Delivery():
                    self.delivered.append(effect)
                case Wait():
                    return

    def step(self, *messages: ReplicaMessage, error: str = "", other: IntentFlags = NO_FLAGS) -> None:
        """Deliver messages, and run the oldest round."""
        if messages or not self.rounds:
            self.handle(Events(list(messages), []))
        self.handle(Events([], [self.result(error, other)]))

    def result(self, error: str = "", other: IntentFlags = NO_FLAGS, num_decoding: int = 0) -> RoundResult:
        """Run the oldest round. An error fails its first row. The other replica has `num_decoding` requests."""
        work = self.rounds.pop(0)
        intent = Intent(num_tokens=0, is_decode_only=True, num_decoding=num_decoding, flags=other)
        row = make_row(intent, number=self.num_rounds, replica=1)
        agreement = lockstep.agree([work.row, row], number=self.num_rounds, num_replicas=2)
        self.num_rounds += 1
        if agreement.is_idle or agreement.ends_all:
            return RoundResult(agreement=agreement)
        self.agreements.append(agreement)
        chunks = [] if work.plan is None else self.table.apply(work.plan)
        results = [ChunkResult(token_ids=[7] if chunk.samples else []) for chunk in chunks]
        self.table.append_tokens(chunks, [7] * sum(chunk.samples for chunk in chunks))
        if error:
            results[0] = ChunkResult(error=error)
        load = of_counts([[agreement.number]], [[agreement.number]]) if agreement.collects_load else None
        step = 0 if work.plan is None else work.plan.step
        return RoundResult(agreement=agreement, result=StepResult(step=step, chunks=results, load=load))


def test_load_is_collected_after_each_window_of_steps_with_tokens() -> None:
    replica = Driven(load_window=2)
    replica.step()
    replica.step(AddRequest(request("a", 2, max_tokens=9)))  # in rounds 1 to 9
    for messages in ([], [], [], [CollectLoad()], [], [CollectLoad()], [], [], []):
        replica.step(*messages)
    collected = [agreement.number for agreement in replica.agreements if agreement.collects_load]
    answered = [delivery.answers for delivery in replica.delivered if delivery.load is not None]
    assert len(collected) == len(answered)
    assert all(later - earlier <= 2 for earlier, later in itertools.pairwise(collected)), collected
    assert sum(answered) == 2  # a request is answered once


def test_a_replica_stays_awake_while_requests_of_another_wait_for_their_tokens() -> None:
    """Such as requests on pipeline stages, which are not in every round."""
    replica = Driven()
    replica.step()
    replica.handle(Events([], []))
    replica.handle(Events([], [replica.result(num_decoding=1)]))
    assert replica.rounds
    replica.handle(Events([], [replica.result()]))
    assert not replica.rounds


def test_two_rounds_in_flight_request_load_once() -> None:
    replica = Driven(max_rounds=2)
    replica.step()
    replica.step(AddRequest(request("a", 2, max_tokens=9)))
    replica.step(CollectLoad())
    for _ in range(4):
        replica.step()
    assert sum(agreement.collects_load for agreement in replica.agreements) == 1


def test_a_step_with_a_longer_chunk_is_not_decode_only() -> None:
    replica = Driven(max_num_batched_tokens=8)
    for messages in ([AddRequest(request("a", 2))], [], [], [], []):
        replica.step(*messages)
    assert [agreement.num_tokens[0] for agreement in replica.agreements] == [2, 1, 1, 1]
    assert [agreement.is_decode_only for agreement in replica.agreements] == [False, True, True, True]


def test_the_next_round_is_sent_before_the_result_of_the_last() -> None:
    replica = Driven(max_rounds=2)
    replica.step()  # an idle round
    replica.handle(Events([AddRequest(request("a", 2, max_tokens=3))], []))
    assert [work.plan.lengths for work in replica.rounds if work.plan] == [[2], [1]]
    replica.step()
    assert [work.plan.starts for work in replica.rounds if work.plan] == [[2], [3]]
    replica.step()
    replica.step()
    assert [update.token_ids for update in replica.updates] == [[7], [7], [7]]
    assert replica.updates[-1].finish_reason == "length"


def test_tokens_after_the_end_of_a_request_are_dropped() -> None:
    replica = Driven(max_rounds=2)
    replica.step()
    ends_at_once = Request(
        request_id="a", prompt_token_ids=[1], params=RequestParams(max_tokens=9), seed=1, eos_token_ids=[7]
    )
    replica.handle(Events([AddRequest(ends_at_once)], []))
    replica.step()
    replica.step()
    assert [(update.token_ids, update.finish_reason) for update in replica.updates] == [([7], "stop")]
    replica.scheduler.check_invariants()
    assert replica.scheduler.num_free_blocks == 8


def test_rounds_that_are_sent_together_have_the_budgets_of_their_own_numbers() -> None:
    replica = Driven(max_num_batched_tokens=3, max_rounds=2)
    replica.step()
    replica.handle(Events([AddRequest(request("a", 12))], []))
    results = []
    for prefill_budget in (1, 2):
        result = replica.result()
        agreement = dataclasses.replace(result.agreement, prefill_budget=prefill_budget)
        results.append(msgspec.structs.replace(result, agreement=agreement))
    replica.handle(Events([], results))
    assert [work.plan.lengths for work in replica.rounds if work.plan is not None] == [[1], [2]]


def test_an_abort_takes_effect_while_a_plan_is_in_flight() -> None:
    replica = Driven(max_rounds=2)
    replica.step()
    replica.handle(Events([AddRequest(request("a"))], []))
    replica.handle(Events([AbortRequest("a")], []))
    assert [update.finish_reason for update in replica.updates] == ["abort"]
    assert replica.scheduler.num_free_blocks < 8  # the plans name them
    replica.step()
    replica.step()
    assert replica.scheduler.num_free_blocks == 8
    assert len(replica.updates) == 1


def test_an_unusable_row_ends_its_own_request_only() -> None:
    replica = Driven(max_num_batched_tokens=8)
    replica.step()
    replica.step(AddRequest(request("a")), AddRequest(request("b")), error="not a number")
    first, second = replica.updates
    assert (first.request_id, first.finish_reason, first.error) == ("a", "abort", "not a number")
    assert (second.request_id, second.token_ids, second.error) == ("b", [7], None)
    assert replica.scheduler.live_request_ids == ["b"]


def test_two_requests_with_one_id_end_once() -> None:
    replica = Driven()
    replica.step(AddRequest(request("a")), AddRequest(request("a")))
    assert [(update.request_id, update.finish_reason) for update in replica.updates] == [("a", "abort")]
    assert not replica.scheduler.has_work


def test_shutdown_ends_requests_at_once_and_the_loop_when_all_agree() -> None:
    replica = Driven()
    replica.step(AddRequest(request("a")))
    replica.step(Shutdown(), AddRequest(request("late")))
    replica.step()
    ends = {update.request_id: update.error for update in replica.updates if update.finish_reason is not None}
    assert ends.keys() == {"a", "late"}
    assert ends["a"] is None
    assert "shut down" in str(ends["late"])
    replica.step(other=IntentFlags(requests_shutdown=True))
    assert replica.has_ended


def test_the_failure_of_another_replica_is_named() -> None:
    replica = Driven()
    with pytest.raises(DistributedError, match="replica 1"):
        replica.step(AddRequest(request("a")), other=IntentFlags(has_failed=True))


def test_an_internal_error_is_announced_in_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Driven(max_rounds=2)
    replica.step(AddRequest(request("a")))
    monkeypatch.setattr(replica.scheduler, "commit", lambda *_: 1 / 0)
    replica.step()
    while not replica.rounds[0].row[-1]:
        replica.step()
    with pytest.raises(ZeroDivisionError):
        replica.step()
