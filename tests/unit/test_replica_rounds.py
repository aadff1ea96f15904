"""What a replica agrees to and tells, round by round: which load was asked for, and whether it only decodes."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from load_windows import of_counts

from moeserve.protocol import AddRequest, ChunkResult, CollectLoad, ReplicaMessage, Request, StepResult
from moeserve.sampling_params import SamplingParams
from moeserve.scheduling.lockstep import Agreement, Lockstep
from moeserve.scheduling.replica import Deliver, Effect, Execute, Gather, Receive, Replica
from moeserve.scheduling.scheduler import Scheduler

WINDOW = of_counts([[1, 2]], [[3]])  # which are nothing to a replica


def a_life() -> Generator[Effect, Any, None]:
    """Of a lone replica, up to its first `Receive`. A window of load is two steps."""
    scheduler = Scheduler(
        num_blocks=8,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=32,
        enable_prefix_caching=False,
        cache_salt=b"",
    )
    life = Replica(scheduler=scheduler, lockstep=Lockstep(rank=0, num_replicas=1), load_window=2).run()
    assert isinstance(next(life), Deliver)
    assert isinstance(life.send(None), Receive)
    return life


def a_request(name: str, num_tokens: int) -> AddRequest:
    params = SamplingParams(max_tokens=9)
    return AddRequest(Request(request_id=name, prompt_token_ids=[1] * num_tokens, params=params, seed=0))


def a_round(life: Generator[Effect, Any, None], messages: list[ReplicaMessage]) -> tuple[Agreement, Deliver]:
    """From one `Receive` to the next. The ranks tell a load where it is agreed to."""
    gather = life.send(messages)
    assert isinstance(gather, Gather)
    execute = life.send([gather.row])
    assert isinstance(execute, Execute)
    plan, load = execute.plan, WINDOW if execute.agreement.collects_load else None
    chunks = [] if plan is None else [ChunkResult(token_id=None if c.sample is None else 5) for c in plan.chunks]
    told = life.send(StepResult(step=0 if plan is None else plan.step, chunks=chunks, load=load))
    assert isinstance(told, Deliver)
    assert isinstance(life.send(None), Receive)
    return execute.agreement, told


def test_a_window_that_ends_by_itself_is_no_answer() -> None:
    life = a_life()
    messages: list[list[ReplicaMessage]] = [[a_request("0", 2)], [], [], [CollectLoad()]]
    told = [a_round(life, each)[1] for each in messages]
    assert [each.load is not None for each in told] == [False, False, True, True]
    assert [each.answers for each in told] == [False, False, False, True]
    told = [a_round(life, [])[1], a_round(life, [CollectLoad()])[1]]  # asked for when it ends by itself: the same one
    assert [each.answers for each in told] == [False, True]
    assert not a_round(life, [])[1].answers


def test_a_step_with_a_longer_chunk_does_not_only_decode() -> None:
    life = a_life()
    messages: list[list[ReplicaMessage]] = [[a_request("0", 2)], [], [a_request("1", 3)], [], [a_request("2", 1)]]
    agreed = [a_round(life, each)[0] for each in messages]
    assert [each.num_tokens for each in agreed] == [(2,), (1,), (4,), (2,), (2,)]
    assert [each.is_decode_only for each in agreed] == [False, True, False, True, True]
