"""A plan is small, however long its requests are: ranks keep what earlier plans have sent."""

from __future__ import annotations

import msgspec

from moeserve.protocol import ChunkResult, Request, StepPlan, StepResult
from moeserve.sampling_params import SamplingParams
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.scheduler_config import SchedulerConfig

NUM_REQUESTS, CONTEXT_LEN, BLOCK_SIZE = 256, 8192, 16


def test_a_decode_plan_of_256_requests_is_small() -> None:
    blocks_per_request = CONTEXT_LEN // BLOCK_SIZE + 2
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=NUM_REQUESTS * blocks_per_request,
            block_size=BLOCK_SIZE,
            max_num_seqs=NUM_REQUESTS,
            max_num_batched_tokens=NUM_REQUESTS * CONTEXT_LEN,
            max_model_len=CONTEXT_LEN + BLOCK_SIZE,
            enable_prefix_caching=False,
        ),
        cache_salt=b"",
    )
    params = SamplingParams(max_tokens=BLOCK_SIZE, temperature=0.7, stop_token_ids=list(range(64))).for_engine()
    for index in range(NUM_REQUESTS):
        prompt = [index] * CONTEXT_LEN
        scheduler.add(Request(request_id=str(index), prompt_token_ids=prompt, params=params, seed=index))
    plans = [plan_and_commit(scheduler) for _ in range(BLOCK_SIZE)]
    sizes = [len(msgspec.msgpack.encode(plan)) for plan in plans]
    assert sizes[0] > NUM_REQUESTS * CONTEXT_LEN  # the prompts, once
    # A slot, a position and a length for each request: less than 3 + 3 + 1 bytes. A new block: slot, id and two lists.
    assert max(sizes[1:]) < NUM_REQUESTS * (7 + 9) + 100, sizes
    assert sorted(sizes[1:])[len(sizes) // 2] < NUM_REQUESTS * 7 + 100, sizes


def plan_and_commit(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    assert len(plan.slots) == NUM_REQUESTS
    scheduler.commit(StepResult(step=plan.step, chunks=[ChunkResult(token_ids=[100]) for _ in plan.slots]))
    return plan
