"""The agreement between replicas, and the loop of one replica. Failures of replicas are tested in tests/reliability."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from load_windows import of_counts

from moeserve.errors import EngineError, LockstepError
from moeserve.protocol import (
    AddRequest,
    ChunkResult,
    CollectLoad,
    ReplicaMessage,
    Request,
    RequestUpdate,
    Shutdown,
    StepResult,
)
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import ROW_SIZE, Agreement, Intent, IntentFlags, Lockstep
from moeserve.scheduling.replica import Deliver, Effect, Execute, Gather, Receive, Replica, StepFailed
from moeserve.scheduling.scheduler import Scheduler, SchedulerConfig

NO_FLAGS = IntentFlags()
NOTHING = Intent(num_tokens=0, is_decode_only=True)


def agree(*intents: Intent) -> Agreement:
    """Return the agreement, which is the same on each replica."""
    sides = [Lockstep(rank=rank, num_replicas=len(intents)) for rank in range(len(intents))]
    rows = [side.begin(intent) for side, intent in zip(sides, intents, strict=True)]
    assert {len(row) for row in rows} == {ROW_SIZE}
    first, *others = [side.finish(rows) for side in sides]
    assert all(other == first for other in others)
    return first


def flagged(**flags: bool) -> Intent:
    return Intent(num_tokens=0, is_decode_only=True, flags=IntentFlags(**flags))


def test_fields_of_an_agreement() -> None:
    decode = Intent(num_tokens=3, is_decode_only=True)
    assert agree(decode, Intent(num_tokens=9, is_decode_only=False, placement_epoch=2)) == Agreement(
        step=0,
        num_tokens=(3, 9),
        is_idle=False,
        is_decode_only=False,
        is_shutdown=False,
        failed_ranks=(),
        collects_load=False,
        placement_epoch=0,
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


@pytest.mark.parametrize(("place", "value"), [(0, 9), (1, 5)])
def test_replicas_out_of_step_are_named(place: int, value: int) -> None:
    sides = [Lockstep(rank=rank, num_replicas=3) for rank in range(3)]
    rows = [side.begin(NOTHING) for side in sides]
    rows[1][place] = value
    for side in sides:
        with pytest.raises(LockstepError, match=rf"{value} on replicas \[1\]"):
            side.finish(rows)


def test_rows_in_wrong_order_or_number_or_of_another_round_are_refused() -> None:
    sides = [Lockstep(rank=rank, num_replicas=2) for rank in range(2)]
    rows = [side.begin(NOTHING) for side in sides]
    with pytest.raises(LockstepError, match=r"\[1, 0\]"):
        sides[0].finish(rows[::-1])
    with pytest.raises(LockstepError, match="1 rows"):
        sides[0].finish(rows[:1])
    sides[0].finish(rows)
    with pytest.raises(LockstepError, match="step 0"):
        sides[0].finish(rows)


def request(request_id: str, num_prompt_tokens: int = 2, max_tokens: int = 4) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(num_prompt_tokens)),
        params=RequestParams(max_tokens=max_tokens),
        seed=1,
    )


class Driven:
    """Replica 0 of two. The other one is this test: it never has a plan."""

    def __init__(self, load_window: int = 0, max_num_batched_tokens: int = 2) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=8,
                block_size=4,
                max_num_seqs=2,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=16,
                enable_prefix_caching=False,
            ),
            b"test",
        )
        lockstep = Lockstep(rank=0, num_replicas=2)
        self.other = Lockstep(rank=1, num_replicas=2)
        replica = Replica(scheduler=self.scheduler, lockstep=lockstep, load_window=load_window)
        self.run: Generator[Effect, Any, None] = replica.run()
        self.agreements: list[Agreement] = []  # of steps that were executed
        self.delivered: list[Deliver] = []
        self.effect: Effect | None = next(self.run)

    @property
    def updates(self) -> list[RequestUpdate]:
        return [update for delivery in self.delivered for update in delivery.updates]

    def answer(self, answer: Any) -> None:
        try:
            self.effect = self.run.send(answer)
        except StopIteration:
            self.effect = None

    def step(self, *messages: ReplicaMessage, fails: bool = False, other: IntentFlags = NO_FLAGS) -> None:
        """Drive one round."""
        self.deliver()
        assert isinstance(self.effect, Receive)
        self.answer(list(messages))
        assert isinstance(self.effect, Gather)
        row = self.other.begin(Intent(num_tokens=0, is_decode_only=True, flags=other))
        rows = [self.effect.row, row]
        self.other.finish(rows)
        self.answer(rows)
        if isinstance(self.effect, Execute):
            plan, agreement = self.effect.plan, self.effect.agreement
            assert plan is not None or agreement.collects_load
            self.agreements.append(agreement)
            planned = plan.chunks if plan else []
            chunks = [ChunkResult(token_id=None if chunk.sample is None else 7) for chunk in planned]
            load = of_counts([[agreement.step]], [[agreement.step]]) if agreement.collects_load else None
            result = StepResult(step=plan.step if plan else 0, chunks=chunks, load=load)
            self.answer(StepFailed("not a number") if fails else result)

    def deliver(self) -> None:
        assert isinstance(self.effect, Deliver)
        self.delivered.append(self.effect)
        self.answer(None)


def test_load_is_collected_after_each_window_of_steps_with_tokens() -> None:
    replica = Driven(load_window=2)
    replica.step()
    replica.step(AddRequest(request("a", 2, max_tokens=9)))  # in steps 1 to 9
    for messages in ([], [], [], [CollectLoad()], [], [CollectLoad()], [], [], []):
        replica.step(*messages)
    assert [agreement.step for agreement in replica.agreements if agreement.collects_load] == [3, 5, 7, 9]
    answered = [delivery.answers for delivery in replica.delivered if delivery.load is not None]
    assert answered == [False, True, True, False]  # a request during a window is answered at its end, at once or not


def test_a_step_with_a_longer_chunk_is_not_decode_only() -> None:
    replica = Driven(max_num_batched_tokens=8)
    arrivals: list[list[ReplicaMessage]] = [[AddRequest(request("a", 2))], [], [AddRequest(request("b", 3))], []]
    for messages in arrivals:
        replica.step(*messages)
    assert [agreement.num_tokens[0] for agreement in replica.agreements] == [2, 1, 4, 2]
    assert [agreement.is_decode_only for agreement in replica.agreements] == [False, True, False, True]


def test_a_failed_step_ends_its_own_requests_only() -> None:
    replica = Driven()
    replica.step(AddRequest(request("a", 2)), AddRequest(request("b", 2)), fails=True)  # b did not fit into the step
    replica.step()
    assert replica.updates == [RequestUpdate(request_id="a", finish_reason="abort", error="not a number")]
    replica.deliver()
    assert replica.updates[1:] == [RequestUpdate(request_id="b", token_ids=[7])]
    assert replica.scheduler.live_request_ids == ["b"]
    replica.scheduler.check_invariants()


def test_two_requests_with_one_id_end_once() -> None:
    replica = Driven()
    replica.step(AddRequest(request("a")), AddRequest(request("a")))
    replica.deliver()
    assert [(update.request_id, update.finish_reason) for update in replica.updates] == [("a", "abort")]
    assert not replica.scheduler.has_work


def test_shutdown_ends_requests_at_once_and_the_loop_when_all_agree() -> None:
    replica = Driven()
    replica.step(AddRequest(request("a")))
    replica.step(Shutdown(), AddRequest(request("late")))
    replica.step()
    ends = {update.request_id: update.error for update in replica.updates if update.finish_reason is not None}
    assert ends.keys() == {"a", "late"}
    assert all("shut down" in (error or "") for error in ends.values())
    replica.step(other=IntentFlags(requests_shutdown=True))
    replica.deliver()
    assert replica.effect is None


def test_the_failure_of_another_replica_is_named() -> None:
    replica = Driven()
    replica.step(AddRequest(request("a")), other=IntentFlags(has_failed=True))
    assert isinstance(replica.effect, Deliver)
    assert "replica 1" in (replica.effect.updates[-1].error or "")
    with pytest.raises(EngineError, match="replica 1"):
        next(replica.run)
