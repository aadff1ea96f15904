"""Layers with windows keep the blocks of their windows alone, in every layout, and give the tokens of transformers."""

from __future__ import annotations

from typing import Any

import pytest
from reference_models import Reference

from moeserve import LLM, SamplingParams
from moeserve.models.inspection import inspect

NUM_TOKENS = 48
LENGTHS = (50, 30)
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
MAX_MODEL_LEN = max(LENGTHS) + NUM_TOKENS
ALONE = {"max_num_seqs": 1, "max_num_batched_tokens": 7}

both = pytest.mark.parametrize("reference", ["gpt-oss", "step3p7"], indirect=True)
one = pytest.mark.parametrize("reference", ["gpt-oss"], indirect=True)


def prompts_and_tokens(reference: Reference) -> tuple[list[list[int]], list[list[int]]]:
    """Return two prompts, one the beginning of the other, and their greedy tokens."""
    (whole,) = reference.clear_prompts([max(LENGTHS)], NUM_TOKENS)
    prompts = [whole[:length] for length in LENGTHS]
    tokens = reference.continuations(prompts, NUM_TOKENS)
    assert all(reference.is_clear(prompt, NUM_TOKENS) for prompt in prompts)
    return prompts, tokens


def smallest_memory(reference: Reference) -> int:
    """Return the bytes of the longest request alone, of which layers with windows keep few blocks."""
    needs = inspect(reference.folder, "float32").cache
    num_blocks = -(-MAX_MODEL_LEN // BLOCK_SIZE)
    window = needs.rules.tables[1].num_kept(MAX_MODEL_LEN)
    num_window_blocks = -(-window // BLOCK_SIZE) + 2 + -(-2 * ALONE["max_num_batched_tokens"] // BLOCK_SIZE)
    assert 2 * num_window_blocks < num_blocks
    of_all, of_windows = (num_bytes // needs.block_size for num_bytes in needs.block_bytes)
    return BLOCK_SIZE * (num_blocks * of_all + num_window_blocks * of_windows)


def generate(reference: Reference, rounds: int = 1, **settings: Any) -> list[list[int]]:
    """Generate in rounds, compare the tokens, and return how many tokens of each prompt were cached in each."""
    prompts, expected = prompts_and_tokens(reference)
    num_cached = []
    settings = {"dtype": "float32", "block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN} | settings
    with LLM(reference.folder, **settings) as llm:
        for _ in range(rounds):
            outputs = llm.generate(prompts, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            num_cached.append([output.num_cached_tokens for output in outputs])
    return num_cached


@both
@pytest.mark.parametrize("kv_host_memory", [0, "8MiB"], ids=["alone", "with a store"])
def test_the_longest_request_fits_into_less_memory(reference: Reference, kv_host_memory: int | str) -> None:
    """Requests run one after the other, and evict each other's blocks."""
    memory = smallest_memory(reference)
    generate(reference, 2, kv_cache_memory=memory, kv_host_memory=kv_host_memory, **ALONE)


@one
@pytest.mark.parametrize(
    "layout",
    [
        {"max_num_batched_tokens": 1},
        {"tensor_parallel_size": 2, "num_threads": 1},
        {"pipeline_parallel_size": 2, "num_threads": 1},
    ],
    ids=lambda layout: "-".join(layout),
)
def test_layouts(reference: Reference, layout: dict[str, Any]) -> None:
    """In the second round, prompts begin behind cached blocks."""
    _, second = generate(reference, 2, kv_cache_memory="8MiB", **layout)
    assert second == [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in LENGTHS]


@one
def test_preemption(reference: Reference) -> None:
    """There is room for one and a half requests, so one is preempted."""
    memory = smallest_memory(reference) * 3 // 2
    generate(reference, kv_cache_memory=memory, max_num_seqs=3, max_num_batched_tokens=7, debug_rank_state=True)
