"""Overlapped steps: the bytes of whole steps in all layouts, each pair computed once, one order of collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import worker_groups
from ranks import Ranks
from reference_models import Reference
from small_steps import MIDDLE
from test_layouts import logprobs_of, updates_of
from worker_groups import Arrival, Story, Timetable

from moeserve.protocol import Request
from moeserve.sampling_params import RequestParams

PARAMS = RequestParams(temperature=0, max_tokens=8, logprobs=1)
LENGTHS = (1, 40, 9, 23)  # one prompt is as long as the others together
OPTIONS: dict[str, Any] = dict(
    max_model_len=64, block_size=8, kv_cache_memory="8MiB", debug_collectives=True, collective_timeout=30
)
ALL_STEPS = dict(overlap_decode_tokens=1, overlap_prefill_tokens=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "dp", "pp", "dispatcher", "max_small_tokens"),
    [
        ("mixtral", 1, 2, 1, "shared_memory", MIDDLE),
        ("mixtral", 1, 2, 1, "all_to_all", 0),
        ("mixtral", 2, 2, 1, "allgather", MIDDLE),
        ("deepseek-v3-four-heads", 1, 3, 1, "shared_memory", 0),
        ("deepseek-v3-four-heads", 2, 2, 1, "all_to_all", MIDDLE),
        ("deepseek-v3-four-heads", 2, 1, 2, "allgather", 0),
        ("glm5", 1, 2, 1, "shared_memory", MIDDLE),
    ],
)
def test_bytes_of_whole_steps(
    ranks: Ranks,
    reference_named: Callable[[str], Reference],
    name: str,
    tp: int,
    dp: int,
    pp: int,
    dispatcher: str,
    max_small_tokens: int | None,
) -> None:
    """Replicas have different work, and one of three has none. Two steps before the end, only short ones are left."""
    reference = reference_named(name)
    prompts = reference.clear_prompts(LENGTHS, PARAMS.max_tokens or 0)
    busy = [replica for replica in range(dp) if dp < 3 or replica != 1]
    arrivals = [
        Arrival(
            round=index // 2,
            replica=busy[index % len(busy)],
            request=Request(request_id=str(index), prompt_token_ids=prompt, params=PARAMS, seed=0),
        )
        for index, prompt in enumerate(prompts)
    ]

    def play(**options: Any) -> list[Story]:
        stories = worker_groups.run(
            ranks,
            tp * dp * pp,
            Timetable(arrivals=arrivals),
            folder=str(reference.folder),
            tp=tp,
            pp=pp,
            options=OPTIONS | options,
            max_small_tokens=max_small_tokens,
        )
        worker_groups.check_counts(stories, tp, reference.model.config.num_experts_per_tok, pp)
        return stories

    def results(stories: list[Story]) -> dict[str, Any]:
        return {
            name: ([token for update in updates for token in update.token_ids], logprobs_of(updates))
            for name, updates in updates_of(stories).items()
        }

    whole, overlapped = play(dispatcher=dispatcher), play(dispatcher=dispatcher, **ALL_STEPS)
    assert {story.num_overlapped_steps for story in whole} == {0}
    assert all(story.num_overlapped_steps == len(story.steps) for story in overlapped)
    assert results(overlapped) == results(whole)
    for index, prompt in enumerate(prompts):
        assert results(overlapped)[str(index)][0] == reference.greedy(prompt, PARAMS.max_tokens or 0)
