"""Tokens that `bad_words`, `allowed_token_ids` and `trace_decode_token_ids` exclude, beside transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_model import save_tiny_model

from moeserve import LLM, SamplingParams

PROMPT = "QUITE LONG: "
NUM_TOKENS = 24
# The seed of the model is one with which its greedy output has many different tokens.
DEFERRED = {"ngram": {"method": "ngram", "num_speculative_tokens": 3}, "alone": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=list(DEFERRED))
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """With n-gram drafts, tokens are chosen several positions at once; without, one step ahead of the last result."""
    with LLM(str(folder), dtype="float32", max_model_len=256, speculative_config=DEFERRED[request.param]) as llm:
        yield llm


def of_transformers(reference: Any, prompt_ids: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt_ids])
    options |= {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        return reference.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt_ids) :].tolist()


@pytest.mark.slow
def test_bad_words_are_those_that_transformers_excludes(llm: LLM, reference: Any) -> None:
    """Each round excludes words of one to three letters from the outputs of the round before."""
    codec = llm.codec
    assert codec is not None
    letters = codec.encode("abcdefghij klmnop")  # so that the random model writes text

    def generate(words: list[str]) -> Any:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, bad_words=words)
        params.allowed_token_ids = letters
        return llm.generate([PROMPT, "ZZZ"], params, use_tqdm=False)

    words: list[str] = []
    for length in (3, 2, 3, 1, 2, 3):
        texts = [output.outputs[0].text[start:] for output in generate(words) for start in (2, 9)]
        words += [text.strip()[:length] for text in texts if text.strip()]
        banned = [codec.encode(before + word) for word in words for before in ("", " ")]
        for output in generate(words):
            expected = of_transformers(
                reference,
                output.prompt_token_ids,
                bad_words_ids=banned,
                prefix_allowed_tokens_fn=lambda batch, ids: letters,
            )
            assert output.outputs[0].token_ids == expected
            assert not any(word in output.outputs[0].text for word in words)
    assert {1, 2, 3} == {len(word.rstrip()) for word in words}, words


def test_only_allowed_tokens_are_those_that_transformers_allows(llm: LLM, reference: Any) -> None:
    allowed = [3, 8, 40, 41, 42, 100, 200, 263]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, allowed_token_ids=allowed)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    expected = of_transformers(reference, output.prompt_token_ids, prefix_allowed_tokens_fn=lambda batch, ids: allowed)
    assert output.outputs[0].token_ids == expected
    sampled = llm.generate(
        [PROMPT] * 4,
        SamplingParams(temperature=50.0, max_tokens=60, ignore_eos=True, seed=3, allowed_token_ids=allowed),
        use_tqdm=False,
    )
    assert {token_id for each in sampled for token_id in each.outputs[0].token_ids} == set(allowed)


def test_a_trace_is_repeated_with_the_log_probabilities_of_the_model(llm: LLM, reference: Any) -> None:
    trace = [263, 0, 2, 2, 2, 17]  # with the end-of-sequence token
    params = SamplingParams(trace_decode_token_ids=trace, logprobs=0, max_tokens=2)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert output.outputs[0].token_ids == trace
    with torch.no_grad():
        logits = reference(torch.tensor([output.prompt_token_ids + trace])).logits[0, -len(trace) - 1 : -1]
    expected = logits.double().log_softmax(-1)[range(len(trace)), trace]
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    found = [each[token_id].logprob for each, token_id in zip(logprobs, trace, strict=True)]
    assert found == pytest.approx(expected.tolist(), abs=1e-4)


def test_log_probabilities_of_all_tokens_are_those_of_the_model(llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    with torch.no_grad():
        logits = reference(torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids])).logits[0]
    expected = logits.double().log_softmax(-1)[:-1]
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    positions = [*output.prompt_logprobs][1:] + output.outputs[0].logprobs
    for row, position in zip(expected, positions, strict=True):
        assert position is not None
        assert sorted(position) == list(range(264))
        assert [position[token_id].logprob for token_id in range(264)] == pytest.approx(row.tolist(), abs=1e-4)
        numbers = [each.logprob for each in position.values()]
        ranks = {token_id: each.rank for token_id, each in position.items()}
        assert ranks == {token_id: 1 + sum(n > each.logprob for n in numbers) for token_id, each in position.items()}
