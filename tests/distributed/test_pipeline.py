"""Pipeline stages: the tokens of transformers in all layouts, and the bytes of one stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import worker_groups
from logprob_rows import unpacked
from msgspec import structs
from ranks import Ranks
from reference_models import Reference
from test_layouts import experts_per_token, logprobs_of, updates_of
from worker_groups import Arrival, Story, Timetable

from moeserve.ops.native import native_kernels
from moeserve.protocol import Request, RequestUpdate
from moeserve.sampling_params import RequestParams

NUM_TOKENS = 12
LENGTHS = (1, 30, 9, 23, 17)
PARAMS = RequestParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=3, prompt_logprobs=1)
OPTIONS: dict[str, Any] = dict(
    max_model_len=64,
    block_size=8,
    kv_cache_memory="8MiB",
    max_num_batched_tokens=12,  # chunks of one prompt are in flight on several stages
    debug_collectives=True,
    collective_timeout=30,
)
LAYOUTS = ((2, 1, 1), (2, 2, 1), (2, 1, 2), (3, 1, 1))  # pp, tp, dp
MODELS = (
    "mixtral-three-layers",
    "deepseek-v3-four-heads",
    "qwen3-moe-eight-heads",
    "gpt-oss",
    "deepseek-v32",
    "beam",
    "minimax",
    "axk2",
    "dots3-note",
    "glm5-next",
    "inkling",
    "jetmoe",
    "minimax-m3",
)  # of three or four layers


@pytest.mark.slow_but("mixtral")
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_transformers_and_bytes_of_one_stage(
    ranks: Ranks, reference_named: Callable[[str], Reference], name: str
) -> None:
    """Prompts arrive one after another. The second replica, if there is one, has none of them and idles."""
    reference = reference_named(name)
    prompts = reference.clear_prompts(LENGTHS, NUM_TOKENS)

    def play(pp: int, tp: int, dp: int, **options: Any) -> list[Story]:
        requests = [
            Request(request_id=str(index), prompt_token_ids=prompt, params=PARAMS, seed=0)
            for index, prompt in enumerate(prompts)
        ]
        arrivals = [Arrival(round=index, replica=0, request=request) for index, request in enumerate(requests)]
        stories = worker_groups.run(
            ranks,
            pp * tp * dp,
            Timetable(arrivals=arrivals),
            folder=str(reference.folder),
            tp=tp,
            pp=pp,
            options=OPTIONS | options,
        )
        worker_groups.check_counts(stories, tp, experts_per_token(reference, name), pp)
        return stories

    alone = updates_of(play(1, 1, 1))
    for pp, tp, dp in LAYOUTS:
        updates = updates_of(play(pp, tp, dp, dispatcher="allgather" if tp > 1 else "auto"))
        for index, prompt in enumerate(prompts):
            request_id = str(index)
            tokens = [token for update in updates[request_id] for token in update.token_ids]
            assert tokens == reference.greedy(prompt, NUM_TOKENS), (pp, tp, dp)
            if tp == 1 or native_kernels() is not None:
                assert unpacked_updates(updates[request_id]) == unpacked_updates(alone[request_id]), (pp, tp, dp)
            else:  # torch adds in another order
                expected = pytest.approx(logprobs_of(alone[request_id]), abs=1e-5, rel=0)
                assert logprobs_of(updates[request_id]) == expected


def unpacked_updates(updates: list[RequestUpdate]) -> list[Any]:
    """Return updates for comparison: the chunks of a prompt, each with a table of log-probabilities, may differ."""
    return [(structs.replace(each, prompt_logprobs=[]), unpacked(each.prompt_logprobs)) for each in updates]
