"""Which of the loads that a replica tells of is the one that was asked for."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from load_windows import of_counts

from moeserve.messages import (
    AddRequest,
    ChunkResult,
    CollectLoad,
    ReplicaMessage,
    Request,
    SamplingParams,
    StepResult,
)
from moeserve.scheduling.lockstep import Lockstep
from moeserve.scheduling.replica import Deliver, Effect, Execute, Gather, Receive, Replica
from moeserve.scheduling.scheduler import Scheduler

WINDOW = of_counts([[1, 2]], [[3]])  # which are nothing to a replica


def a_round(life: Generator[Effect, Any, None], messages: list[ReplicaMessage]) -> Deliver:
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
    return told


def test_a_window_that_ends_by_itself_is_no_answer() -> None:
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
    request = Request(request_id="0", prompt_token_ids=[1, 2], params=SamplingParams(max_tokens=9), seed=0)
    told = [a_round(life, [AddRequest(request)]), a_round(life, []), a_round(life, []), a_round(life, [CollectLoad()])]
    assert [each.load is not None for each in told] == [False, False, True, True]
    assert [each.answers for each in told] == [False, False, False, True]
    told = [a_round(life, []), a_round(life, [CollectLoad()])]  # asked for when it ends by itself: the same one
    assert [each.answers for each in told] == [False, True]
    assert not a_round(life, []).answers
