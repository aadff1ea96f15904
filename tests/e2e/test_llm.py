"""The Python API on the default model: real weights, real tokenizer, real text."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeserve import LLM, RequestError, SamplingParams, cli
from moeserve.api import default_model
from moeserve.config.settings import Settings
from moeserve.models import registry

QUESTION = [{"role": "user", "content": "What is the capital of England?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm(default_cache: Path) -> Iterator[LLM]:
    with LLM(max_model_len=512, kv_cache_memory="200MiB") as llm:
        yield llm


def test_the_default_model_knows_the_capital_of_france(llm: LLM) -> None:
    answer = llm.chat(QUESTION, GREEDY)[0].outputs[0]
    assert "London" in answer.text
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text


def test_the_command_line_answers_with_the_default_model(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """Greedily, with the chat template, until the end-of-sequence token."""
    assert cli.main(["generate", "--prompt", QUESTION[0]["content"]]) == 0
    answer = capsys.readouterr().out.strip()
    assert "London" in answer
    assert answer == llm.chat(QUESTION, GREEDY)[0].outputs[0].text


def test_the_known_facts_of_the_default_model_are_those_of_its_files(llm: LLM) -> None:
    path = llm.config.weights.model_path
    assert registry.read_facts(path) == dataclasses.replace(default_model.FACTS, path=path)


def test_repr_shows_model_dtype_and_layout(llm: LLM) -> None:
    shown = repr(llm)
    for text in (llm.config.weights.model_path, "bfloat16", "tensor_parallel_size=1", "data_parallel_size=1"):
        assert text in shown


def test_the_tokenizer_is_that_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (output,) = llm.generate("Hello, world", GREEDY)
    assert tokenizer.encode("Hello, world") == output.prompt_token_ids
    assert tokenizer.decode(output.outputs[0].token_ids) == output.outputs[0].text


def test_chat_takes_a_template_and_tools(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "capital_of", "parameters": {"type": "object"}}}]
    template = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ messages[0]['content'] }}"
    (output,) = llm.chat(QUESTION, GREEDY, chat_template=template, tools=tools)
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == "capital_of " + QUESTION[0]["content"]
    with pytest.raises(RequestError, match="tools="):
        llm.chat(QUESTION, GREEDY, tools="capital_of")


def test_changed_parameters_apply_to_later_requests_only(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    stream = llm.stream("One, two,", params)
    next(stream)
    params.max_tokens = 3
    assert len(list(stream)[-1].outputs[0].token_ids) == 8
    assert len(llm.generate("One, two,", params)[0].outputs[0].token_ids) == 3
    params.stop_token_ids.append(-1)
    with pytest.raises(RequestError, match="stop_token_ids=-1"):
        llm.generate("One, two,", params)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["One, two, three, four,", "The capital of Italy is", "Monday, Tuesday, Wednesday,"]
    params = [SamplingParams(temperature=0, max_tokens=length) for length in (12, 3, 7)]
    together = llm.generate(prompts, params)
    assert [output.prompt for output in together] == prompts
    assert [len(output.outputs[0].token_ids) for output in together] == [12, 3, 7]
    assert " five" in together[0].outputs[0].text
    assert "Rome" in together[1].outputs[0].text
    assert " Thursday" in together[2].outputs[0].text
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in together)


def test_a_stream_grows_to_what_generate_gives(llm: LLM) -> None:
    texts = [output.outputs[0].text for output in llm.stream("One, two, three,", GREEDY)]
    assert len(texts) > 10
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == llm.generate("One, two, three,", GREEDY)[0].outputs[0].text


def test_streams_and_calls_share_steps(llm: LLM) -> None:
    alone = llm.generate(["Red, green,", "North, east,"], GREEDY)
    first, second = llm.stream("Red, green,", GREEDY), llm.stream("North, east,", GREEDY)
    next(first)
    next(second)
    llm.generate("Anything", GREEDY)
    assert list(first)[-1].outputs == alone[0].outputs
    assert list(second)[-1].outputs == alone[1].outputs


def test_stop_strings_end_the_text(llm: LLM) -> None:
    whole = llm.generate("One, two, three, four,", GREEDY)[0].outputs[0].text
    assert ", seven" in whole
    stopped = llm.generate("One, two, three, four,", SamplingParams(temperature=0, max_tokens=24, stop=", seven"))
    output = stopped[0].outputs[0]
    assert output.text == whole[: whole.index(", seven")]
    assert (output.finish_reason, output.stop_reason) == ("stop", ", seven")
    while llm.session.has_work:  # the engine is a step ahead
        llm.session.poll()


def test_n_outputs_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.5, seed=7, max_tokens=12)
    texts = [output.text for output in llm.generate("Once upon a time", params)[0].outputs]
    assert len(set(texts)) == 4
    assert [output.text for output in llm.generate("Once upon a time", params)[0].outputs] == texts
    # the first of several is what one alone would be, whatever else is in the batch
    one = SamplingParams(n=1, temperature=1.5, seed=7, max_tokens=12)
    assert llm.generate(["Hello", "Once upon a time"], [GREEDY, one])[1].outputs[0].text == texts[0]


def test_logprobs_come_with_their_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=1)
    output = llm.generate("The capital of France is", params)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    assert len(completion.logprobs) == 5
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True):
        assert row[token_id].rank == 1
        assert len(row) == 3
    assert completion.cumulative_logprob == pytest.approx(
        sum(row[token].logprob for token, row in zip(completion.token_ids, completion.logprobs, strict=True))
    )
    assert "".join(completion.logprobs[i][t].decoded_token for i, t in enumerate(completion.token_ids)) == (
        completion.text
    )


def test_min_tokens_bars_the_end(llm: LLM) -> None:
    short = llm.chat(QUESTION, GREEDY)[0].outputs[0]
    longer = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=40, min_tokens=30))[0].outputs[0]
    assert len(short.token_ids) < 30 <= len(longer.token_ids)


def test_shared_prefixes_are_cached_only_within_a_salt(llm: LLM) -> None:
    prompt = "A long enough beginning that fills more than one block of sixteen tokens, so that it can be shared. " * 2

    def cached(**salt: str) -> int:
        return llm.generate({"prompt": prompt, **salt}, GREEDY)[0].num_cached_tokens

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") >= 32
    assert cached(cache_salt="b") == 0
    assert cached() == 0
    assert cached() >= 32


def test_several_conversations_at_once(llm: LLM) -> None:
    germany = [{"role": "user", "content": "What is the capital of Germany?"}]
    answers = llm.chat([QUESTION, germany], GREEDY)
    assert "London" in answers[0].outputs[0].text
    assert "Berlin" in answers[1].outputs[0].text


def test_a_malformed_conversation_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        llm.chat([{"rolle": "user", "content": "hi"}])
    with pytest.raises(RequestError, match="messages="):
        llm.chat({"role": "user", "content": "hi"})  # type: ignore[arg-type]
    assert "London" in llm.chat(QUESTION, GREEDY)[0].outputs[0].text


def test_the_end_token_of_the_tokenizer_counts_too(llm: LLM, tmp_path: Path) -> None:
    """A fine-tuned checkpoint may still have its base model's end token in config.json, or none."""
    for file in Path(llm.config.weights.model_path).iterdir():
        (tmp_path / file.name).symlink_to(file)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / name).read_text()) | {"eos_token_id": None}
        (tmp_path / name).unlink()
        (tmp_path / name).write_text(json.dumps(values))
    with LLM(tmp_path, max_model_len=512, kv_cache_memory="200MiB") as copy:
        assert copy.chat(QUESTION, GREEDY)[0].outputs == llm.chat(QUESTION, GREEDY)[0].outputs


def test_every_setting_shows_in_the_signature() -> None:
    parameters = inspect.signature(LLM).parameters
    for group in Settings.groups().values():
        for field in dataclasses.fields(group):
            assert parameters[field.name].default == field.default
    assert "settings" not in parameters
