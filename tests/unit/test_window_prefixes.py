"""Prefixes of prompts that layers with windows find again, with few blocks for windows."""

from __future__ import annotations

import random

from moeserve.kv.pool import num_blocks_of_windows
from moeserve.kv.rules import CacheGroup, KeepWindow
from moeserve.protocol import ChunkResult, Request, StepResult
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.scheduler_config import SchedulerConfig

WINDOW, BLOCK_SIZE, CHUNK = 4, 2, 4
# Room for one running request, and for the windows of a few others.
NUM_WINDOW_BLOCKS = num_blocks_of_windows(WINDOW, BLOCK_SIZE, max_num_seqs=1, num_tokens_in_flight=CHUNK) + 16


def num_cached(scheduler: Scheduler, prompt: list[int]) -> int:
    """Run a request to its end alone, and return how many of its tokens were cached."""
    params, num_tokens = RequestParams(max_tokens=2 * WINDOW), len(prompt)
    scheduler.add(Request(request_id="x", prompt_token_ids=prompt, params=params, seed=0))
    while True:
        plan = scheduler.schedule()
        assert plan is not None
        samples = plan.starts[0] + plan.lengths[0] == num_tokens
        num_tokens += samples
        result = ChunkResult(token_ids=[1] * samples)
        updates = scheduler.commit(StepResult(step=plan.step, chunks=[result]))
        scheduler.check_invariants()
        if updates and updates[0].finish_reason is not None:
            return updates[0].num_cached_tokens


def test_windows_behind_prompts_and_at_branches_outlast_long_prompts() -> None:
    dice = random.Random(0)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=1000,
            block_size=BLOCK_SIZE,
            max_num_seqs=1,
            max_num_batched_tokens=CHUNK,
            max_model_len=500,
            enable_prefix_caching=True,
            other_groups=(CacheGroup(KeepWindow(WINDOW, BLOCK_SIZE), NUM_WINDOW_BLOCKS),),
        ),
        b"",
    )

    def tokens(length: int) -> list[int]:
        return [dice.randrange(2, 1000) for _ in range(length)]

    whole = tokens(60)
    assert num_cached(scheduler, whole) == 0
    assert num_cached(scheduler, tokens(400)) == 0
    assert num_cached(scheduler, whole) == 58  # its last token is computed
    # The window in the middle of the prompt is lost: its blocks were given to later tokens of the same prompt.
    assert num_cached(scheduler, whole[:20] + tokens(20)) == 0
    assert num_cached(scheduler, whole[:20] + tokens(20)) == 20
    assert num_cached(scheduler, tokens(400)) == 0
    assert num_cached(scheduler, whole[:20] + tokens(20)) == 20
    assert num_cached(scheduler, whole) == 58
