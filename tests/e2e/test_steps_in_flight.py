"""Tokens do not depend on the number of steps in flight, nor on chunks, preemptions and aborts meanwhile."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from rank_processes import free_blocks
from reference_models import Reference

from moeserve import LLM, SamplingParams
from moeserve.engine.engine import Engine
from moeserve.engine.local_replica import LocalReplica
from moeserve.scheduling.scheduler import Scheduler

NUM_TOKENS = 20
CACHE = 130 * 256  # bytes: 130 tokens, a third of what all prompts need at their ends
SOURCE = random.Random(5)
PROMPTS = {index: [SOURCE.randrange(90) for _ in range(SOURCE.randrange(1, 60))] for index in range(9)}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
WAYS: dict[str, dict[str, Any]] = {
    "one step": {"async_scheduling": False, "max_concurrent_batches": 1},
    "two steps": {"async_scheduling": True, "max_concurrent_batches": 2},
    "three steps": {"async_scheduling": True, "max_concurrent_batches": 3},
    "two steps, only known tokens": {"async_scheduling": False, "max_concurrent_batches": 2},
    "one step with drafts": {"speculative_config": NGRAM},
    "two steps with drafts": {"speculative_config": NGRAM, "max_concurrent_batches": 2},
}


def params_of(index: int) -> SamplingParams:
    """Return greedy, sampled, and penalised parameters in turn. Penalties depend on all earlier tokens."""
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0 if index % 3 == 0 else 0.9,
        seed=index,
        repetition_penalty=1.3 if index % 3 == 2 else 1.0,
        frequency_penalty=0.4 if index % 3 == 2 else 0.0,
        logprobs=2,
        ignore_eos=index % 2 == 0,
    )


def results_of(
    llm: LLM, prompts: Mapping[int, list[int]], aborts: random.Random | None = None
) -> dict[int, tuple[Any, ...]]:
    """Return tokens, log-probabilities and reason of each prompt. Some are aborted if `aborts` is given."""
    session = llm.session
    ids = session.submit(list(prompts.values()), [params_of(index) for index in prompts])
    while session.has_work:
        session.poll()
        if aborts is not None and aborts.random() < 0.03:
            session.abort(aborts.choice(ids))
    outputs = [session.output(prompt_id).outputs[0] for prompt_id in ids]
    session.discard(ids)
    return {
        index: (output.token_ids, output.logprobs, output.finish_reason)
        for index, output in zip(prompts, outputs, strict=True)
    }


def scheduler_of(llm: LLM) -> Scheduler:
    assert isinstance(llm.core, Engine)
    (replica,) = llm.core.replicas
    assert isinstance(replica, LocalReplica)
    return replica.replica._scheduler


@pytest.fixture(scope="module")
def alone(plain: Reference) -> dict[int, tuple[Any, ...]]:
    """The results of each prompt alone, one step at a time."""
    with LLM(plain.folder, num_threads=1, max_model_len=96, enable_prefix_caching=False, **WAYS["one step"]) as llm:
        return {index: results_of(llm, {index: prompt})[index] for index, prompt in PROMPTS.items()}


@pytest.mark.slow_but("two steps with drafts", "three steps")
@pytest.mark.parametrize("way", WAYS)
def test_results_are_those_of_each_prompt_alone(way: str, plain: Reference, alone: dict[int, tuple[Any, ...]]) -> None:
    settings = {"num_threads": 1, "max_model_len": 96, "max_num_batched_tokens": 11, "block_size": 4}
    with LLM(plain.folder, kv_cache_memory=CACHE, **settings, **WAYS[way]) as llm:
        scheduler = scheduler_of(llm)
        for seed in range(3):
            results = results_of(llm, PROMPTS, aborts=random.Random(seed) if seed else None)
            for index, (tokens, logprobs, reason) in results.items():
                expected = alone[index]
                if reason == "abort":
                    expected = (expected[0][: len(tokens)], expected[1][: len(tokens)], "abort")
                assert (tokens, logprobs, reason) == expected, (index, seed)
            if seed:
                assert any(reason == "abort" for _, _, reason in results.values())
            assert free_blocks(llm, scheduler.config.num_blocks) == [scheduler.config.num_blocks]
            scheduler.check_invariants()
        assert scheduler.num_preemptions
        assert bool(scheduler.speculation.num_accepted_tokens) == ("drafts" in way)
