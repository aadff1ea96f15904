"""Structured outputs of a random model: every output belongs to its language, and other requests do not change."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structured_cases import CHOICES, PROMPTS, STRUCTURED, check, requests, result, small_llm, write_model
from test_steps_in_flight import WAYS, scheduler_of

from moeserve import LLM, AsyncLLM, EngineError, RequestError, SamplingParams

# A grammar that passes the check, whose first words are simple, and whose masks become too large later.
LATE = 'start: "abcdefgh" s\ns: a a a a a a a a\na: s | "x" | "y" |'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with small_llm(folder, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(folder: str) -> list[tuple[Any, ...]]:
    """The results of each request alone, one step at a time."""
    with small_llm(folder, enable_prefix_caching=False, **WAYS["one step"]) as llm:
        return [result(llm.generate(prompt, params)[0].outputs[0]) for prompt, params in zip(*requests(), strict=True)]


def test_outputs_belong_to_their_language_and_batches_change_nothing(llm: LLM, alone: list[tuple[Any, ...]]) -> None:
    """Rows with and without grammars run side by side. The second time, prompts are in the prefix cache."""
    prompts, params = requests()
    for _ in range(2):
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        for output, each in zip(outputs, params, strict=True):
            check(output, each.structured_outputs)
        assert [result(output) for output in outputs] == alone
    assert len({output.text for output in outputs}) > len(STRUCTURED) + 3


@pytest.mark.slow_but("two steps with drafts", "three steps")
@pytest.mark.parametrize("way", WAYS)
def test_results_do_not_depend_on_steps_in_flight_and_preemptions(
    way: str, folder: str, alone: list[tuple[Any, ...]]
) -> None:
    with small_llm(folder, kv_cache_memory=260 * 512, max_num_batched_tokens=11, block_size=4, **WAYS[way]) as llm:
        prompts, params = requests()
        outputs = llm.generate(prompts * 4, params * 4)  # so many that some are preempted, however the steps interleave
        assert [result(output.outputs[0]) for output in outputs] == alone * 4
        assert scheduler_of(llm).num_preemptions


def test_each_of_n_outputs_has_its_own_place_in_the_grammar(llm: LLM) -> None:
    params = SamplingParams(n=12, seed=3, max_tokens=160, structured_outputs=STRUCTURED["json"])
    (output,) = llm.generate(PROMPTS[0], params)
    for each in output.outputs:
        check(each, STRUCTURED["json"])
    assert len({each.text for each in output.outputs}) == 12


def test_log_probabilities_are_those_of_the_model_itself(llm: LLM) -> None:
    structured = SamplingParams(temperature=0, max_tokens=9, logprobs=3, structured_outputs=STRUCTURED["choice"])
    (constrained,) = llm.generate(PROMPTS[1], structured)
    token_ids = constrained.outputs[0].token_ids
    assert constrained.outputs[0].logprobs is not None
    prompt = [*constrained.prompt_token_ids, *token_ids]
    (scored,) = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=3))
    assert scored.prompt_logprobs is not None
    for place, entry in enumerate(constrained.outputs[0].logprobs):
        expected = scored.prompt_logprobs[len(constrained.prompt_token_ids) + place]
        assert expected is not None
        assert {key: value.logprob for key, value in entry.items()} == {
            key: value.logprob for key, value in expected.items()
        }


def test_stop_tokens_and_stop_strings_end_an_output(llm: LLM) -> None:
    (stop_id,) = llm.get_tokenizer().encode("!")
    params = SamplingParams(temperature=0, structured_outputs=STRUCTURED["choice"], ignore_eos=True)
    params.stop_token_ids = [stop_id]
    output = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert (output.text in CHOICES, output.finish_reason, output.stop_reason) == (True, "stop", stop_id)
    params = SamplingParams(temperature=0, structured_outputs={"choice": ["some", "somewhat"]}, stop="om")
    output = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("s", "stop", "om")


def test_an_output_may_end_at_max_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, structured_outputs=STRUCTURED["json"])
    output = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (4, "length")
    assert output.text.startswith('{"')


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "min_tokens": (dict(structured_outputs=STRUCTURED["choice"], min_tokens=3), "min_tokens=3"),
    "ignore_eos": (dict(structured_outputs=STRUCTURED["choice"], ignore_eos=True), "ignore_eos=True"),
    "malformed": (dict(structured_outputs={"regex": "(a"}), "structured_outputs: regex cannot"),
    "hostile": (dict(structured_outputs={"regex": "a?" * 5000 + "a" * 5000}), "structured_outputs: regex cannot"),
    "hostile schema": (
        dict(structured_outputs={"json": {"properties": {f"p{i}": {"const": i} for i in range(2500)}}}),
        "structured_outputs: json cannot",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_and_the_engine_goes_on(
    llm: LLM, alone: list[tuple[Any, ...]], name: str
) -> None:
    refused, message = REFUSED[name]
    prompts, params = requests()
    streams = [llm.stream(prompt, each) for prompt, each in zip(prompts[:5], params[:5], strict=True)]
    for stream in streams:
        next(stream)
    with pytest.raises(RequestError, match=message.replace("(", r"\(")):
        llm.generate(PROMPTS[0], SamplingParams(**refused))
    outputs = [list(stream)[-1].outputs[0] for stream in streams]
    assert [result(output) for output in outputs] == alone[:5]


def test_a_grammar_that_fails_later_ends_its_request_alone(llm: LLM, alone: list[tuple[Any, ...]]) -> None:
    prompts, params = requests()
    without_end = {2: -100.0}
    hostile = SamplingParams(max_tokens=200, seed=1, structured_outputs={"grammar": LATE}, logit_bias=without_end)
    with pytest.raises(EngineError, match="structured_outputs") as failure:
        llm.generate([*prompts, PROMPTS[0]], [*params, hostile])
    assert [result(output.outputs[0]) for output in failure.value.outputs[:-1]] == alone
    assert failure.value.outputs[-1].outputs[0].text.startswith("abcdefgh")


def test_without_a_tokenizer_there_is_no_structured_output(folder: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(folder) / name, tmp_path)
    with small_llm(str(tmp_path)) as llm, pytest.raises(RequestError, match="structured_outputs need a tokenizer"):
        llm.generate([1, 2, 3], SamplingParams(structured_outputs=STRUCTURED["choice"]))


def test_async_outputs(folder: str, alone: list[tuple[Any, ...]]) -> None:
    async def serve() -> list[Any]:
        llm = AsyncLLM(folder, dtype="float32", max_model_len=256, num_threads=1)

        async def last(prompt: str, params: SamplingParams) -> Any:
            outputs = [output async for output in llm.generate(prompt, params)]
            return result(outputs[-1].outputs[0])

        try:
            return await asyncio.gather(*[last(*each) for each in zip(*requests(), strict=True)])
        finally:
            llm.shutdown()

    assert asyncio.run(serve()) == alone
