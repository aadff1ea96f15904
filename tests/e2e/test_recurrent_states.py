"""Prompts that begin alike share recurrent states, in every layout, and give the tokens of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from reference_models import Reference

from moeserve import LLM, SamplingParams

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS = {"dtype": "float32", "kv_cache_memory": "8MiB", "max_model_len": 400}

of_qwen3_next = pytest.mark.parametrize("reference", ["qwen3-next"], indirect=True)


def clear_prompts(
    reference: Reference, lengths: Sequence[int], join: Callable[..., list[list[int]]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return joined random prompts whose greedy tokens rounding does not change, and these tokens."""
    for seed in range(1000):
        prompts = join(*reference.prompts(*lengths, seed=seed))
        if all(reference.is_clear(prompt, NUM_TOKENS) for prompt in prompts):
            return prompts, reference.continuations(prompts, NUM_TOKENS)
    raise AssertionError("no prompts are clear")


@of_qwen3_next
@pytest.mark.parametrize("block_size", [4, 16])
def test_branches_start_from_saved_states(reference: Reference, block_size: int) -> None:
    """A prompt that continues another, a branch of it, and a second branch, which starts where the first one began."""
    prompts, expected = clear_prompts(
        reference,
        (300, 50, 60),
        lambda whole, first, second: [whole[:200], whole, whole[:150] + first, whole[:150] + second],
    )
    num_cached = []
    with LLM(reference.folder, block_size=block_size, **SETTINGS) as llm:
        for prompt, tokens in zip(prompts, expected, strict=True):
            (output,) = llm.generate([prompt], GREEDY)
            assert output.outputs[0].token_ids == tokens
            num_cached.append(output.num_cached_tokens)
    # States are kept after multiples of 64 tokens. Of the 150 common ones, the first branch computes all: the state
    # after 128 was not saved before it.
    assert num_cached == [0, 192, 0, 128]


@of_qwen3_next
def test_few_rows_are_reused(reference: Reference) -> None:
    prompts, expected = clear_prompts(reference, (130, 131, 132), lambda *prompts: list(prompts))
    num_cached = []
    with LLM(reference.folder, num_saved_states=1, **SETTINGS) as llm:
        for index in (0, 1, 2, 2, 0):
            (output,) = llm.generate([prompts[index]], GREEDY)
            assert output.outputs[0].token_ids == expected[index]
            num_cached.append(output.num_cached_tokens)
    assert num_cached == [0, 0, 0, 128, 0]


LAYOUTS = [
    ("qwen3-next", {"tensor_parallel_size": 2}),
    ("qwen3-next", {"data_parallel_size": 2}),
    ("qwen3-next", {"pipeline_parallel_size": 3}),
    ("qwen3-next", {"max_num_batched_tokens": 70}),
    ("qwen3-next", {"max_num_seqs": 2, "max_num_batched_tokens": 33}),
    ("qwen3-next", {"num_saved_states": 0}),
    ("lfm2-moe", {"tensor_parallel_size": 2, "max_num_batched_tokens": 33}),
    ("lfm2-moe", {"data_parallel_size": 2, "pipeline_parallel_size": 2}),
    ("kimi-linear", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ("granite-hybrid", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    ("granite-hybrid", {"pipeline_parallel_size": 2}),
    ("kimi-linear", {"data_parallel_size": 2}),
    ("ling3", {"pipeline_parallel_size": 2}),
    ("ling3-unbounded", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    ("nemotron-h", {"data_parallel_size": 2, "pipeline_parallel_size": 2}),
    ("nemotron-h-latent", {"tensor_parallel_size": 2, "data_parallel_size": 2, "num_redundant_experts": 3}),
    ("nemotron-h-wide", {"tensor_parallel_size": 2, "expert_parallel": False}),
    ("jamba", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    ("jamba", {"pipeline_parallel_size": 2, "max_num_batched_tokens": 33}),
    ("jamba-odd", {"data_parallel_size": 2}),
    ("zaya-odd", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    ("zaya", {"data_parallel_size": 2, "max_num_batched_tokens": 33}),
    ("minimax", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    ("minimax", {"pipeline_parallel_size": 2, "max_num_batched_tokens": 33}),
    ("minimax-odd", {"data_parallel_size": 2}),
    ("glm5-next", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    ("glm5-next", {"pipeline_parallel_size": 2, "max_num_batched_tokens": 33}),
    ("glm5-next-odd", {"data_parallel_size": 2, "max_num_seqs": 2, "max_num_batched_tokens": 7}),
    ("inkling", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    ("inkling", {"pipeline_parallel_size": 3, "max_num_batched_tokens": 33}),
    ("inkling-odd", {"data_parallel_size": 2, "max_num_seqs": 2, "max_num_batched_tokens": 7}),
    ("inkling2", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    ("inkling2", {"pipeline_parallel_size": 3, "max_num_batched_tokens": 33}),
    ("inkling2-odd", {"data_parallel_size": 2, "max_num_seqs": 2, "max_num_batched_tokens": 7}),
    ("qwen4-exp", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    ("qwen4-exp", {"pipeline_parallel_size": 2, "max_num_batched_tokens": 33}),
    ("qwen4-exp-odd", {"data_parallel_size": 2, "max_num_seqs": 2, "max_num_batched_tokens": 7}),
]


@pytest.mark.slow_but("qwen3-next-data", "nemotron-h-latent", "jamba-tensor", "kimi-linear-tensor")
@pytest.mark.parametrize(
    ("reference", "layout"),
    LAYOUTS,
    indirect=["reference"],
    ids=[f"{name}-{'-'.join(layout)}" for name, layout in LAYOUTS],
)
def test_layouts(reference: Reference, layout: dict[str, int]) -> None:
    """Two rounds of prompts with common beginnings, several at a time."""
    prompts, expected = clear_prompts(
        reference, (100, 30), lambda whole, other: [whole, whole[:70] + other, whole[:90], other]
    )
    with LLM(reference.folder, num_threads=1, **SETTINGS, **layout) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == expected
