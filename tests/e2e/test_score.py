"""The score of a finished output is its log-probability, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_models import Reference

from moeserve import LLM, AsyncLLM, RequestError, SamplingParams

PROMPTS = [[5], [*range(1, 40)], [*range(1, 30), 7], [3, 1, 4, 1, 5, 9]]
SMALL: dict[str, Any] = dict(max_model_len=64, kv_cache_memory="8MiB", num_threads=1)


def rollouts(llm: LLM, temperature: float) -> tuple[list[list[int]], list[list[float]]]:
    """Return prompts with their outputs, and the log-probabilities of the outputs. One fills the context."""
    lengths = [12, 25, 12, 12]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=length, ignore_eos=True, logprobs=0)
        for seed, length in enumerate(lengths)
    ]
    sequences, logprobs = [], []
    for output in llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False):
        (made,) = output.outputs
        assert made.logprobs is not None
        sequences.append([*output.prompt_token_ids, *made.token_ids])
        logprobs.append([at[token].logprob for token, at in zip(made.token_ids, made.logprobs, strict=True)])
    assert max(map(len, sequences)) == SMALL["max_model_len"]
    return sequences, logprobs


@pytest.mark.slow_but("qwen3-moe-processed_logprobs-chunks", "deepseek-v3-four-heads-raw_logprobs-int8")
@pytest.mark.parametrize("options", [
    pytest.param(dict(max_num_batched_tokens=7, max_num_seqs=3), id="chunks"),
    pytest.param(dict(quantization="int8"), id="int8"),
    pytest.param(dict(speculative_config={"method": "ngram", "num_speculative_tokens": 3}), id="drafts"),
    pytest.param(dict(data_parallel_size=2, executor="mp"), id="dp", marks=pytest.mark.ranks),
    pytest.param(
        dict(tensor_parallel_size=2, pipeline_parallel_size=2, executor="mp"), id="tp-pp", marks=pytest.mark.ranks
    ),
])  # fmt: skip
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3-four-heads", "qwen3-next"])
def test_scores_are_the_log_probabilities_of_outputs(
    name: str, mode: str, options: dict[str, Any], reference_named: Callable[[str], Reference]
) -> None:
    """Also after the same prompts were cached."""
    temperature = 0.7
    with LLM(str(reference_named(name).folder), logprobs_mode=mode, **SMALL, **options) as llm:
        for _ in range(2):
            sequences, expected = rollouts(llm, temperature)
            at = {} if mode == "raw_logprobs" else {"temperature": temperature}
            scores = llm.score(sequences, [*map(len, PROMPTS)], use_tqdm=False, **at)
            assert [score.logprobs for score in scores] == expected
            assert [score.token_ids for score in scores] == [
                sequence[len(prompt) :] for sequence, prompt in zip(sequences, PROMPTS, strict=True)
            ]


def test_scores_equal_transformers(reference_named: Callable[[str], Reference]) -> None:
    reference = reference_named("qwen3-moe")
    sequence = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    with torch.inference_mode():
        logits_TV = reference.model(sequence[None]).logits[0].double() / 0.5
    expected_TV = logits_TV.log_softmax(dim=1)
    settings: dict[str, Any] = dict(SMALL, dtype="float32", logprobs_mode="processed_logprobs")
    with LLM(str(reference.folder), **settings) as llm:
        (score,) = llm.score([sequence], 3, temperature=0.5, top_logprobs=2, use_tqdm=False)  # type: ignore[list-item]
    assert score.token_ids == sequence[3:].tolist()
    expected = expected_TV[range(2, 7), sequence[3:]]
    assert score.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    for at, row_V in zip(score.top_logprobs, expected_TV[2:7], strict=True):
        assert {*row_V.topk(2).indices.tolist()} <= at.keys()


def test_an_async_engine_scores(reference_named: Callable[[str], Reference]) -> None:
    folder = str(reference_named("qwen3-moe").folder)
    with LLM(folder, **SMALL) as llm:
        (expected,) = llm.score([PROMPTS[3]], 2, use_tqdm=False)
    asynchronous = AsyncLLM(folder, **SMALL)
    try:
        assert asyncio.run(asynchronous.score(PROMPTS[3], 2)) == expected
    finally:
        asynchronous.shutdown()


def test_wrong_arguments_are_refused(reference_named: Callable[[str], Reference]) -> None:
    wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
        ([[1, 2, 3]], 3, {}, "prompt_lengths"),
        ([[1, 2, 3]], 0, {}, "prompt_lengths"),
        ([[1, 2, 3]], True, {}, "prompt_lengths"),
        ([[1, 2, 3]], [1, 1], {}, "prompt_lengths"),
        ([[1]], 1, {}, "sequences"),
        (["text"], 1, {}, "sequences"),
        ([[1, 2, 3]], 1, {"temperature": 0.5}, "temperature"),
        ([[1, 10**9]], 1, {}, "trace_decode_token_ids"),
    ]
    with LLM(str(reference_named("qwen3-moe").folder), **SMALL) as llm:
        for sequences, lengths, options, parameter in wrong:
            with pytest.raises(RequestError) as error:
                llm.score(sequences, lengths, use_tqdm=False, **options)
            assert error.value.parameter == parameter
