"""Ranks on Triton kernels in Triton's interpreter: float32 tokens equal those of transformers.

With batch_invariant, results have the same bytes with any number of tp ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import pytest
from ranks import Place, Ranks
from reference_models import Reference
from test_layouts import updates_of
from worker_groups import Arrival, Story, Timetable

from moeserve.protocol import Request, RequestUpdate
from moeserve.sampling_params import RequestParams

NUM_TOKENS = 4
SMALL_STEP = 3  # tokens: prompts are large steps, later steps are small
OPTIONS: dict[str, Any] = dict(
    max_model_len=64, block_size=8, kv_cache_memory="8MiB", collective_timeout=100, dispatcher="all_to_all"
)


def play(place: Place, **arguments: Any) -> dict[str, Any]:
    """Run `play` of worker_groups.py on one of several ranks, with Triton kernels."""
    import worker_groups

    from moeserve.bench.gpu.rehearsal import products_by_row
    from moeserve.ops import select
    from moeserve.ops.backend import TRITON

    with products_by_row(), mock.patch.dict(select.BACKENDS, cpu=lambda dtype: TRITON):
        return worker_groups.play(place, **arguments)


def run(
    reference: Reference, prompts: list[list[int]], params: RequestParams, tp: int, dp: int, **options: Any
) -> dict[str, list[RequestUpdate]]:
    """Return the updates of each request. Requests are given to replicas in turn."""
    timetable = Timetable(
        arrivals=[
            Arrival(
                round=0,
                replica=index % dp,
                request=Request(request_id=str(index), prompt_token_ids=prompt, params=params, seed=0),
            )
            for index, prompt in enumerate(prompts)
        ]
    )
    ranks = Ranks()  # separate processes, because each process selects its kernels once
    try:
        played = ranks.run(
            tp * dp,
            "test_ranks_on_gpu_kernels:play",
            200.0,
            folder=str(reference.folder),
            tp=tp,
            timetable=msgspec.to_builtins(timetable),
            options=OPTIONS | options,
            max_small_tokens=SMALL_STEP,
        )
    finally:
        ranks.close()
    return updates_of(msgspec.convert(played, list[Story], strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "options"),
    [
        ("mixtral", 1, {}),
        ("mixtral", 2, {}),
        ("mixtral-wide", 2, dict(dispatcher="auto", expert_parallel=False)),
    ],
)
def test_tokens_of_two_ranks(
    reference_named: Callable[[str], Reference], name: str, tp: int, options: dict[str, Any]
) -> None:
    """Run two replicas, and one replica of two ranks: both compute its logits, with whole experts or with slices."""
    reference = reference_named(name)
    prompts = reference.clear_prompts((1, 9), NUM_TOKENS)
    updates = run(reference, prompts, RequestParams(temperature=0, max_tokens=NUM_TOKENS), tp, 2 // tp, **options)
    for index, prompt in enumerate(prompts):
        tokens = [token for update in updates[str(index)] for token in update.token_ids]
        assert tokens == reference.greedy(prompt, NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", pytest.param("deepseek-v3-four-heads", marks=pytest.mark.soak)])
def test_the_same_bytes_with_two_ranks(reference_named: Callable[[str], Reference], name: str) -> None:
    """Two replicas compute prompts whole; one replica of two ranks computes them together, in chunks of 5 tokens."""
    reference = reference_named(name)
    prompts = reference.prompts(1, 13)
    params = RequestParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=3)

    def played(tp: int, dp: int, **options: Any) -> list[list[tuple[Any, Any]]]:
        updates = run(reference, prompts, params, tp, dp, batch_invariant=True, **options)
        return [
            [(update.token_ids, update.logprobs) for update in updates[str(index)]] for index in range(len(prompts))
        ]

    assert played(2, 1, max_num_batched_tokens=5) == played(1, 2)
