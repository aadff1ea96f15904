"""The model divided over ranks: the tokens of transformers in all layouts, with all dispatchers and expert copies.

Pairs of parameters occur together, not all combinations: see `CASES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import worker_groups
from ranks import Ranks
from reference_models import Reference
from small_steps import MIDDLE, check_ways
from worker_groups import Arrival, Story, Timetable

from moeserve.protocol import Request, RequestUpdate
from moeserve.sampling_params import RequestParams

NUM_TOKENS = 12
LENGTHS = (1, 9, 23, 17)
PARAMS = RequestParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=1)
OPTIONS: dict[str, Any] = dict(
    max_model_len=64, block_size=8, kv_cache_memory="8MiB", debug_collectives=True, collective_timeout=30
)

DISPATCHERS = ("allgather", "all_to_all")
LAYOUTS = ((4, 1), (2, 2), (1, 8))  # tp, dp; some of 8 ranks have no experts
MODELS = ("mixtral", "deepseek-v3-four-heads", "qwen3-moe-eight-heads", "gpt-oss")  # with 4, 12, 9 and 5 experts
NUM_REDUNDANT = (0, 1, 3, 6)
# The largest small step in tokens: all steps large, all small (None), or both in turn; see small_steps.py.
MAX_SMALL_TOKENS = (MIDDLE, 0, None, MIDDLE)
DOUBLE = (0, 2, 3, 1)  # in the field of four elements, where + is ^

# Each value of a parameter occurs with each layout: indices are orthogonal Latin squares.
CASES = [
    (
        model,
        *layout,
        DISPATCHERS[(row + column) % 2],
        NUM_REDUNDANT[row ^ column],
        MAX_SMALL_TOKENS[DOUBLE[row] ^ column],
    )
    for row, model in enumerate(MODELS)
    for column, layout in enumerate(LAYOUTS)
]
CASES += [(name, 2, 2, "all_to_all", 2, MIDDLE) for name in ("qwen2-moe", "olmoe", "glm4-moe")]
CASES += [(name, 2, 2, "shared_memory", 2, MIDDLE) for name in ("mixtral", "gpt-oss")]
CASES += [
    ("deepseek-v3-four-heads", 1, 8, "shared_memory", 1, 0),
    ("qwen3-moe-eight-heads", 4, 1, "shared_memory", 3, 0),
]
NEWER = (
    "glm4-moe-lite-odd",
    "kimi-k25-tied",
    "minimax-m2",
    "ernie-odd",
    "ernie-vl-odd",
    "dots1",
    "hunyuan",
    "hy-v3",
    "granite-shared",
    "mistral4",
    "llama4",
    "step3p7",
    "mimo-v2-flash",
    "gemma4",
    "phimoe",
    "deepseek-v32",
    "glm5",
    "mistral-large4",
    "dbrx",
    "solar-open",
    "mellum",
    "flint",
    "granite-swa",
    "afmoe",
    "axk2",
    "dots3-note",
    "hy-v4",
    "flex-olmo",
    "kolibri1",
    "laguna",
    "aria",
    "cohere2-moe",
    "deepseek-ocr2",
    "beam",
    "minimax",
    "jetmoe",
    "glm5-next",
    "minimax-m3",
    "zaya-odd",
    "inkling",
    "inkling2",
    "qwen4-exp",
    "muse-spark",
)
CASES += [(name, 2, 2, "all_to_all", 2, MIDDLE) for name in NEWER]
CASES += [("deepseek-v2-lite", 1, 4, "allgather", 2, MIDDLE)]  # with an odd number of heads


def experts_per_token(reference: Reference, name: str) -> int:
    """Return the number of experts that the router of a shape chooses for each token."""
    text = reference.model.config.get_text_config()
    keys = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
    of_experts = getattr(text, "ffn_config", text)
    top_k: int = next(getattr(of_experts, key) for key in keys if hasattr(of_experts, key))
    return top_k + (text.n_shared_experts if name == "inkling" else 0)  # which it chooses for each token


@pytest.mark.slow_but("mixtral-2-2-all", "deepseek-v3-four-heads-1-8-all")
@pytest.mark.parametrize(("name", "tp", "dp", "dispatcher", "num_redundant", "max_small_tokens"), CASES)
def test_tokens_of_transformers(
    ranks: Ranks,
    reference_named: Callable[[str], Reference],
    name: str,
    tp: int,
    dp: int,
    dispatcher: str,
    num_redundant: int,
    max_small_tokens: int | None,
) -> None:
    """A request begins in every round. Log-probabilities are those of one rank."""
    reference = reference_named(name)
    options = dict(dispatcher=dispatcher, num_redundant_experts=num_redundant)
    stories = play(ranks, reference, tp, dp, max_small_tokens, **options)
    worker_groups.check_counts(stories, tp, experts_per_token(reference, name))
    check_ways([sum(num_tokens) for num_tokens in stories[0].steps], stories[0].ways, max_small_tokens)
    check_results(reference, stories, play(ranks, reference, 1, 1, dispatcher="local"))


@pytest.mark.slow_but("mixtral")
@pytest.mark.parametrize(
    ("name", "tp"),
    [("mixtral-wide", 2), ("mixtral-wide", 4), ("qwen3-moe-wide", 2), ("granite-wide", 2), ("gpt-oss-wide", 2)],
)
def test_tokens_of_transformers_with_sliced_experts(
    ranks: Ranks, reference_named: Callable[[str], Reference], name: str, tp: int
) -> None:
    reference = reference_named(name)
    stories = play(ranks, reference, tp, 1, expert_parallel=False)
    top_k = reference.model.config.get_text_config().num_experts_per_tok
    worker_groups.check_counts(stories, tp, top_k, num_slices=tp)  # each slice computes all rows of its expert
    check_results(reference, stories, play(ranks, reference, 1, 1, dispatcher="local"))


def play(
    ranks: Ranks, reference: Reference, tp: int, dp: int, max_small_tokens: int | None = None, **options: Any
) -> list[Story]:
    busy = [replica for replica in range(dp) if dp < 3 or replica != 1]  # one replica of many has no request
    arrivals = [
        Arrival(
            round=index,
            replica=busy[index % len(busy)],
            request=Request(request_id=str(index), prompt_token_ids=prompt, params=PARAMS, seed=0),
        )
        for index, prompt in enumerate(reference.clear_prompts(LENGTHS, NUM_TOKENS))
    ]
    return worker_groups.run(
        ranks,
        tp * dp,
        Timetable(arrivals=arrivals),
        folder=str(reference.folder),
        tp=tp,
        options=OPTIONS | options,
        max_small_tokens=max_small_tokens,
    )


def check_results(reference: Reference, stories: Sequence[Story], stories_of_one_rank: Sequence[Story]) -> None:
    """Check that tokens are those of transformers, and log-probabilities those of one rank."""
    updates, alone = updates_of(stories), updates_of(stories_of_one_rank)
    for index, prompt in enumerate(reference.clear_prompts(LENGTHS, NUM_TOKENS)):
        tokens = [token for update in updates[str(index)] for token in update.token_ids]
        assert tokens == reference.greedy(prompt, NUM_TOKENS)
        assert logprobs_of(updates[str(index)]) == pytest.approx(logprobs_of(alone[str(index)]), abs=1e-5, rel=0)


def updates_of(stories: Sequence[Story]) -> dict[str, list[RequestUpdate]]:
    updates: dict[str, list[RequestUpdate]] = {}
    for story in stories:
        for update in story.updates:
            updates.setdefault(update.request_id, []).append(update)
    return updates


def logprobs_of(updates: Sequence[RequestUpdate]) -> list[float]:
    return [each.logprobs[0] for update in updates for each in update.logprobs]
