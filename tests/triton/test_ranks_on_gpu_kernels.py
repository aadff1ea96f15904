"""Two ranks on Triton kernels in Triton's interpreter: float32 tokens equal those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import pytest
from ranks import Place, Ranks
from reference_models import Reference
from worker_groups import Arrival, Story, Timetable

from moeserve.protocol import Request
from moeserve.sampling_params import RequestParams

NUM_TOKENS = 4
SMALL_STEP = 3  # tokens: prompts are large steps, later steps are small
OPTIONS: dict[str, Any] = dict(
    max_model_len=64, block_size=8, kv_cache_memory="8MiB", collective_timeout=100, dispatcher="all_to_all"
)


def play(place: Place, **arguments: Any) -> dict[str, Any]:
    """Run `play` of worker_groups.py on one of several ranks, with Triton kernels."""
    import worker_groups

    from moeserve.ops import select
    from moeserve.ops.triton.table import TRITON_KERNELS

    with mock.patch.dict(select.TABLES, cpu=lambda: TRITON_KERNELS):
        return worker_groups.play(place, **arguments)


@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_of_two_ranks(reference_named: Callable[[str], Reference], tp: int) -> None:
    """Run two replicas, and one replica of two ranks, whose logits are computed by both."""
    reference = reference_named("mixtral")
    prompts = reference.clear_prompts((1, 9), NUM_TOKENS)
    params = RequestParams(temperature=0, max_tokens=NUM_TOKENS)
    timetable = Timetable(
        arrivals=[
            Arrival(
                round=0,
                replica=index % (2 // tp),
                request=Request(request_id=str(index), prompt_token_ids=prompt, params=params, seed=0),
            )
            for index, prompt in enumerate(prompts)
        ]
    )
    ranks = Ranks()  # separate processes, because each process selects its kernels once
    try:
        played = ranks.run(
            2,
            "test_ranks_on_gpu_kernels:play",
            200.0,
            folder=str(reference.folder),
            tp=tp,
            timetable=msgspec.to_builtins(timetable),
            options=OPTIONS,
            max_small_tokens=SMALL_STEP,
        )
    finally:
        ranks.close()
    stories = msgspec.convert(played, list[Story], strict=False)
    tokens: dict[str, list[int]] = {}
    for story in stories:
        for update in story.updates:
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
    assert tokens == {str(index): reference.greedy(prompt, NUM_TOKENS) for index, prompt in enumerate(prompts)}
