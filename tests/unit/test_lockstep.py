"""What the agreement and the loop of one replica promise, one sentence a test. Gangs are in tests/reliability."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec
import pytest
from load_windows import of_counts

from moeserve.errors import EngineError, LockstepError
from moeserve.protocol import (
    AbortRequest,
    AddRequest,
    ChunkResult,
    CollectLoad,
    ReplicaMessage,
    Request,
    RequestUpdate,
    Shutdown,
    StepResult,
    Wake,
)
from moeserve.sampling_params import SamplingParams
from moeserve.scheduling.lockstep import ROW_SIZE, Agreement, Intent, IntentFlags, Lockstep
from moeserve.scheduling.replica import Deliver, Effect, Execute, Gather, Receive, Replica, StepFailed
from moeserve.scheduling.scheduler import Scheduler
from moeserve.telemetry.expert_load import LoadWindow

NO_FLAGS = IntentFlags()


def agreed(*intents: Intent) -> list[Agreement]:
    """The agreement as each replica sees it."""
    sides = [Lockstep(rank=rank, num_replicas=len(intents)) for rank in range(len(intents))]
    rows = [side.begin(intent) for side, intent in zip(sides, intents, strict=True)]
    assert {len(row) for row in rows} == {ROW_SIZE}
    return [side.finish(rows) for side in sides]


def test_all_replicas_agree_on_the_same() -> None:
    prefill, decode = (
        Intent(num_tokens=9, is_decode_only=False, placement_epoch=2),
        Intent(num_tokens=3, is_decode_only=True),
    )
    agreements = agreed(decode, prefill)
    expected = Agreement(
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
    assert agreements == [expected, expected]


def test_idle_only_if_nobody_has_tokens() -> None:
    nothing, something = Intent(num_tokens=0, is_decode_only=True), Intent(num_tokens=1, is_decode_only=True)
    assert agreed(nothing, nothing)[0].is_idle
    assert not agreed(nothing, something)[0].is_idle
    assert agreed(nothing, something)[0].is_decode_only


def test_what_experts_were_given_is_told_by_all_if_one_asks() -> None:
    nothing = Intent(num_tokens=0, is_decode_only=True)
    asking = Intent(num_tokens=0, is_decode_only=True, flags=IntentFlags(wants_load=True))
    told = agreed(nothing, asking, nothing)
    assert told[0].collects_load
    assert not told[0].is_idle
    assert told[0] == told[1] == told[2]


def test_shutdown_needs_all_and_failure_one() -> None:
    leaving = Intent(num_tokens=0, is_decode_only=True, flags=IntentFlags(wants_shutdown=True))
    failed = Intent(num_tokens=0, is_decode_only=True, flags=IntentFlags(has_failed=True, wants_load=True))
    assert agreed(leaving, leaving)[1].is_shutdown
    assert not agreed(leaving, failed)[1].is_shutdown
    assert agreed(leaving, failed, failed)[0].failed_ranks == (1, 2)


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [(0, 9, r"protocol version 3 on replicas \[0, 2\]; 9 on replicas \[1\]"), (1, 5, "step 0 .*5 on replicas")],
)
def test_replicas_out_of_step_are_named(place: int, value: int, named: str) -> None:
    sides = [Lockstep(rank=rank, num_replicas=3) for rank in range(3)]
    rows = [side.begin(Intent(num_tokens=1, is_decode_only=True)) for side in sides]
    rows[1][place] = value
    for side in sides:
        with pytest.raises(LockstepError, match=named):
            side.finish(rows)


def test_rows_in_the_wrong_order_or_number_are_refused() -> None:
    sides = [Lockstep(rank=rank, num_replicas=2) for rank in range(2)]
    rows = [side.begin(Intent(num_tokens=1, is_decode_only=True)) for side in sides]
    with pytest.raises(LockstepError, match=r"\[1, 0\]"):
        sides[0].finish(rows[::-1])
    with pytest.raises(LockstepError, match="2 replicas exchange"):
        sides[0].finish(rows[:1])


def test_rows_of_another_round_are_refused() -> None:
    side = Lockstep(rank=0, num_replicas=1)
    rows = [side.begin(Intent(num_tokens=1, is_decode_only=True))]
    side.finish(rows)
    with pytest.raises(LockstepError, match=r"here 1"):
        side.finish(rows)


def request(request_id: str, num_prompt_tokens: int = 2, max_tokens: int = 4) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(num_prompt_tokens)),
        params=SamplingParams(max_tokens=max_tokens, stop_token_ids=[99], logit_bias={5: -1.5}),
        seed=1,
    )


@pytest.mark.parametrize("message", [AddRequest(request("a")), AbortRequest("a"), Wake(), CollectLoad(), Shutdown()])
def test_messages_survive_the_wire(message: ReplicaMessage) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ReplicaMessage) == message


class Driven:
    """Replica 0 of two. The other one is this test: it wants nothing."""

    def __init__(self, load_window: int = 0) -> None:
        self.scheduler = Scheduler(
            num_blocks=8,
            block_size=4,
            max_num_seqs=2,
            max_num_batched_tokens=2,
            max_model_len=16,
            enable_prefix_caching=False,
            cache_salt=b"test",
        )
        lockstep = Lockstep(rank=0, num_replicas=2)
        self.other = Lockstep(rank=1, num_replicas=2)
        replica = Replica(scheduler=self.scheduler, lockstep=lockstep, load_window=load_window)
        self.run: Generator[Effect, Any, None] = replica.run()
        self.collected: list[int] = []  # steps in which all ranks told
        self.loads: list[LoadWindow] = []  # that were delivered
        self.effect: Effect | None = next(self.run)
        self.updates: list[RequestUpdate] = []

    def answer(self, answer: Any) -> None:
        try:
            self.effect = self.run.send(answer)
        except StopIteration:
            self.effect = None

    def step(self, *messages: ReplicaMessage, fails: bool = False, other: IntentFlags = NO_FLAGS) -> Receive:
        """One round. Returns how it listened."""
        self.deliver()
        assert isinstance(self.effect, Receive)
        listened = self.effect
        self.answer(list(messages))
        assert isinstance(self.effect, Gather)
        row = self.other.begin(Intent(num_tokens=0, is_decode_only=True, flags=other))
        rows = [self.effect.row, row]
        self.other.finish(rows)
        self.answer(rows)
        if isinstance(self.effect, Execute):
            plan, agreement = self.effect.plan, self.effect.agreement
            step = plan.step if plan else 0
            assert plan is not None or agreement.collects_load
            chunks = (
                [ChunkResult(token_id=None if chunk.sample is None else 7) for chunk in plan.chunks] if plan else []
            )
            load = of_counts([[agreement.step]], [[agreement.step]]) if agreement.collects_load else None
            self.collected += [agreement.step] * agreement.collects_load
            self.answer(StepFailed("not a number") if fails else StepResult(step=step, chunks=chunks, load=load))
        return listened

    def deliver(self) -> None:
        assert isinstance(self.effect, Deliver)
        self.updates += self.effect.updates
        self.loads += [] if self.effect.load is None else [self.effect.load]
        self.answer(None)


def test_it_sleeps_only_after_an_idle_round_and_with_a_heartbeat() -> None:
    replica = Driven()
    assert replica.step() == Receive(block=False, heartbeat=False)
    assert replica.step(AddRequest(request("a"))) == Receive(block=True, heartbeat=True)
    assert replica.step() == Receive(block=False, heartbeat=False)


def test_a_replica_that_is_asked_collects_once_and_tells() -> None:
    replica = Driven()
    replica.step()
    replica.step(CollectLoad())
    replica.step()
    replica.step()
    assert replica.collected == [1]
    assert [window.tokens_of_expert for window in replica.loads] == [((1,),)]
    assert replica.step() == Receive(block=True, heartbeat=True)


def test_windows_end_after_so_many_steps_with_tokens() -> None:
    replica = Driven(load_window=2)
    replica.step()
    replica.step(AddRequest(request("a", 2, max_tokens=6)))  # in steps 1 to 6
    for _ in range(8):
        replica.step()
    assert replica.collected == [3, 5, 7]


def test_a_failed_step_ends_its_own_requests_only() -> None:
    replica = Driven()
    replica.step(AddRequest(request("a", 2)), AddRequest(request("b", 2)), fails=True)  # b did not fit into the step
    replica.step()
    assert replica.updates == [RequestUpdate(request_id="a", finish_reason="abort", error="not a number")]
    replica.deliver()
    assert replica.updates[1:] == [RequestUpdate(request_id="b", token_ids=[7])]
    assert replica.scheduler.live_request_ids == ["b"]
    replica.scheduler.check_invariants()


def test_a_refused_request_ends_with_an_error() -> None:
    replica = Driven()
    replica.step(AddRequest(request("long", 16)), AddRequest(request("a")))
    replica.deliver()
    refused, first_token = replica.updates
    assert (refused.request_id, refused.finish_reason) == ("long", "abort")
    assert "16 tokens" in (refused.error or "")
    assert first_token == RequestUpdate(request_id="a", token_ids=[7])


def test_two_requests_of_one_id_end_once() -> None:
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
    replica.step(other=IntentFlags(wants_shutdown=True))
    replica.deliver()
    assert replica.effect is None


def test_an_error_in_a_collective_ends_all_requests_and_comes_out() -> None:
    replica = Driven()
    replica.step(AddRequest(request("a")))
    replica.deliver()
    replica.answer([])
    assert isinstance(replica.effect, Gather)
    replica.effect = replica.run.throw(ConnectionError("replica 1 is gone"))
    assert isinstance(replica.effect, Deliver)
    (update,) = replica.effect.updates
    assert (update.request_id, update.error) == ("a", "ConnectionError: replica 1 is gone")
    with pytest.raises(ConnectionError):
        next(replica.run)


def test_an_error_outside_of_collectives_is_told_to_all() -> None:
    replica = Driven()
    replica.step(AddRequest(request("a")))
    replica.effect = replica.run.throw(OSError("socket closed"))
    assert isinstance(replica.effect, Gather)
    rows = [replica.effect.row, replica.other.begin(Intent(num_tokens=5, is_decode_only=True))]
    assert replica.other.finish(rows).failed_ranks == (0,)
    replica.answer(rows)
    assert isinstance(replica.effect, Deliver)
    assert [update.error for update in replica.effect.updates] == ["OSError: socket closed"]
    with pytest.raises(OSError, match="socket closed"):
        next(replica.run)


def test_another_replicas_failure_is_named() -> None:
    replica = Driven()
    replica.step(AddRequest(request("a")), other=IntentFlags(has_failed=True))
    assert isinstance(replica.effect, Deliver)
    assert "replica 1 failed" in (replica.effect.updates[-1].error or "")
    with pytest.raises(EngineError, match="replica 1 failed"):
        next(replica.run)
