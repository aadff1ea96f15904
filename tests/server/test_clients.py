"""Clients by others, unmodified, against what the engine gives for the same prompts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from running_server import MODEL, RunningServer, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM
from moeserve.outputs import RequestOutput

QUESTION: list[dict[str, str]] = [{"role": "user", "content": "What is the capital of England?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


async def _final(server: RunningServer, prompt: Any, **params: Any) -> RequestOutput:
    defaults = server.llm.get_default_sampling_params()
    async for output in server.llm.generate(prompt, dataclasses.replace(defaults, **{"temperature": 0} | params)):
        last = output
    return last


def expected(server: RunningServer, prompt: Any, **params: Any) -> RequestOutput:
    return asyncio.run(_final(server, prompt, **params))


def expected_answer(server: RunningServer, **params: Any) -> RequestOutput:
    return expected(server, server.llm.chat_prompt(QUESTION), **{"max_tokens": 16} | params)


def test_chat_completion(server: RunningServer) -> None:
    output = expected_answer(server)
    answer = server.openai().chat.completions.create(**GREEDY, messages=QUESTION, max_completion_tokens=16)
    (choice,) = answer.choices
    assert choice.message.content == output.outputs[0].text == "The capital of England is London."
    assert (choice.finish_reason, choice.message.role) == ("stop", "assistant")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    assert answer.usage.completion_tokens == len(output.outputs[0].token_ids)
    assert answer.model == MODEL


def test_token_ids_of_answers(server: RunningServer) -> None:
    """Prompts and outputs as token ids, whole and streamed, and token ids instead of texts in log-probabilities."""
    ids: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    chat: dict[str, Any] = dict(GREEDY, messages=QUESTION, max_tokens=4, logprobs=True)
    text: dict[str, Any] = dict(GREEDY, prompt=["London is", "Paris"], max_tokens=4, logprobs=1)
    with server.http() as http:
        output = expected_answer(server, max_tokens=4)
        answer = http.post("/v1/chat/completions", json=chat | ids).json()
        (choice,) = answer["choices"]
        assert answer["prompt_token_ids"] == output.prompt_token_ids
        assert choice["token_ids"] == output.outputs[0].token_ids
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert [at["token"] for at in choice["logprobs"]["content"]] == names
        chunks = events_of(http.post("/v1/chat/completions", json=chat | ids | {"stream": True}).text)
        assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [
            output.prompt_token_ids
        ]
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == choice["token_ids"]

        completion = http.post("/v1/completions", json=text | ids).json()
        chunks = events_of(http.post("/v1/completions", json=text | ids | {"stream": True}).text)
        for place, choice in enumerate(completion["choices"]):
            output = expected(server, text["prompt"][place], max_tokens=4)
            assert choice["prompt_token_ids"] == output.prompt_token_ids
            assert choice["token_ids"] == output.outputs[0].token_ids
            assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
            own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == place]
            assert [part["prompt_token_ids"] for part in own if "prompt_token_ids" in part] == [output.prompt_token_ids]
            assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]

        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
            assert "token_id" not in http.post(path, json=body).text


def events_of(stream: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


def test_streamed_chat_completions_of_many_tasks(server: RunningServer) -> None:
    output = expected_answer(server)

    async def ask(client: openai.AsyncOpenAI) -> tuple[str, Any, Any]:
        stream = await client.chat.completions.create(
            **GREEDY, messages=QUESTION, max_tokens=16, stream=True, stream_options={"include_usage": True}
        )
        text, reasons, last = "", [], None
        async for chunk in stream:
            last = chunk
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons.append(choice.finish_reason)
        assert last is not None
        assert set(reasons[:-1]) == {None}
        return text, reasons[-1], last.usage

    async def run() -> list[Any]:
        async with server.async_openai() as client:
            return await asyncio.gather(*(ask(client) for _ in range(12)))

    for text, reason, usage in asyncio.run(run()):
        assert (text, reason) == (output.outputs[0].text, "stop")
        assert usage.completion_tokens == len(output.outputs[0].token_ids)


def test_choices_and_log_probabilities(server: RunningServer) -> None:
    output = expected(server, server.llm.chat_prompt(QUESTION), n=3, temperature=1.0, seed=5, logprobs=2, max_tokens=6)
    answer = server.openai().chat.completions.create(
        model=MODEL, messages=QUESTION, n=3, temperature=1.0, seed=5, logprobs=True, top_logprobs=2, max_tokens=6
    )
    assert len(answer.choices) == 3
    for choice, each in zip(answer.choices, output.outputs, strict=True):
        assert choice.message.content == each.text
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert each.logprobs is not None
        for position, token_id, logprobs in zip(choice.logprobs.content, each.token_ids, each.logprobs, strict=True):
            assert position.logprob == pytest.approx(logprobs[token_id].logprob, abs=1e-6)
            assert position.token == logprobs[token_id].decoded_token
            ranked = sorted(logprobs.values(), key=lambda logprob: logprob.rank)[:2]
            assert [top.token for top in position.top_logprobs] == [logprob.decoded_token for logprob in ranked]


def test_completions_of_several_prompts(server: RunningServer) -> None:
    prompts = ["The capital of France is", "One, two, three,"]
    outputs = [expected(server, prompt, max_tokens=5) for prompt in prompts]
    client = server.openai()
    answer = client.completions.create(**GREEDY, prompt=prompts, max_tokens=5)
    assert [choice.text for choice in answer.choices] == [output.outputs[0].text for output in outputs]
    texts = ["", ""]
    for chunk in client.completions.create(**GREEDY, prompt=prompts, max_tokens=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]
    token_ids = client.completions.create(**GREEDY, prompt=[o.prompt_token_ids for o in outputs], max_tokens=5)
    assert [choice.text for choice in token_ids.choices] == texts


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_scores_of_a_prompt(server: RunningServer, max_tokens: int) -> None:
    text = "The capital of France is Paris."
    output = expected(server, text, max_tokens=max(1, max_tokens), logprobs=1, prompt_logprobs=1)
    answer = server.openai().completions.create(**GREEDY, prompt=text, echo=True, logprobs=1, max_tokens=max_tokens)
    (choice,) = answer.choices
    assert choice.text == text + (output.outputs[0].text if max_tokens else "")
    assert choice.logprobs is not None
    given = choice.logprobs.token_logprobs
    assert given is not None
    assert len(given) == len(output.prompt_token_ids) + max_tokens
    assert output.prompt_logprobs is not None
    assert given[0] is None
    for place, token_id in enumerate(output.prompt_token_ids[1:], start=1):
        position = output.prompt_logprobs[place]
        assert position is not None
        assert given[place] == pytest.approx(position[token_id].logprob, abs=1e-6)
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text


def test_stop_strings_and_limits(server: RunningServer) -> None:
    client = server.openai()
    stopped = client.chat.completions.create(**GREEDY, messages=QUESTION, max_tokens=16, stop=[" England"])
    assert stopped.choices[0].message.content == "The capital of"
    cut = client.chat.completions.create(**GREEDY, messages=QUESTION, max_tokens=3)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("The capital of", "length")


def test_responses(server: RunningServer) -> None:
    output = expected_answer(server)
    client = server.openai()
    answer = client.responses.create(model=MODEL, input=QUESTION[0]["content"], temperature=0, max_output_tokens=16)
    assert (answer.output_text, answer.status) == (output.outputs[0].text, "completed")
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(output.outputs[0].token_ids)
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=16) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == answer.output_text
    events = list(client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=3, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == "The capital of"
    assert last.response.incomplete_details.reason == "max_output_tokens"


def test_messages(server: RunningServer) -> None:
    output = expected_answer(server)
    client = server.anthropic()
    greedy = {"temperature": 0}  # no argument of the client
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 16, "extra_body": greedy}
    answer = client.messages.create(**options)
    assert [block.text for block in answer.content] == [output.outputs[0].text]
    assert (answer.stop_reason, answer.role) == ("end_turn", "assistant")
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(output.prompt_token_ids)
    assert usage.output_tokens == len(output.outputs[0].token_ids)
    with client.messages.stream(**options | {"stop_sequences": [" England"]}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == "The capital of"
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", " England")
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert counted.input_tokens == len(output.prompt_token_ids)


def test_models_and_tokens(server: RunningServer) -> None:
    client = server.openai()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "moeserve"
    with server.http() as http:
        tokens = http.post("/tokenize", json={"prompt": "Hello, world", "return_token_strs": True}).json()
        codec = server.llm.codec
        assert codec is not None
        assert tokens["tokens"] == codec.encode("Hello, world")
        assert len(tokens["token_strs"]) == tokens["count"]
        assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "Hello, world"}
        for is_begun in (True, False):
            begun = {"messages": QUESTION, "add_generation_prompt": is_begun}
            token_ids = server.llm.chat_prompt(QUESTION, add_generation_prompt=is_begun)["prompt_token_ids"]
            assert http.post("/tokenize", json=begun).json()["tokens"] == token_ids
            answer = http.post("/v1/chat/completions", json={**begun, "max_tokens": 1}).json()
            assert answer["usage"]["prompt_tokens"] == len(token_ids)


def test_a_prompt_is_tokenized_with_and_without_special_tokens(tmp_path: Path) -> None:
    """As lm-eval and vLLM's benchmark do it."""
    folder = save_tiny_model(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    known = {"<|begin|>": {"id": "<|begin|>", "ids": [0], "tokens": ["<|begin|>"]}}
    tokenizer["post_processor"] = dict(
        type="TemplateProcessing", single=[begin, text], pair=[begin, text], special_tokens=known
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    llm = AsyncLLM(folder, dtype="float32", max_model_len=64, show_progress=False)
    with running(llm) as server, server.http() as http:
        tokens = {
            given: http.post("/tokenize", json={"prompt": "Hi", "add_special_tokens": given}).json()["tokens"]
            for given in (True, False)
        }
        refused = http.post("/tokenize", json={"messages": QUESTION, "add_special_tokens": True})
    llm.shutdown()
    assert tokens[True] == [0, *tokens[False]]
    assert len(tokens[False]) == 2
    assert refused.status_code == 400


def test_token_counts_of_clients_equal_the_metrics(server: RunningServer) -> None:
    """Whole and streamed answers in each API, several outputs, and outputs that a stop text ends."""
    client, anthropic = server.openai(), server.anthropic()
    chat: dict[str, Any] = {**GREEDY, "messages": QUESTION, "max_tokens": 16}
    respond: dict[str, Any] = {**GREEDY, "input": QUESTION, "max_output_tokens": 16}
    messages: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 16}
    text: dict[str, Any] = {"model": MODEL, "prompt": ["One, two,", "Three, four,"], "max_tokens": 7}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    before = server.token_totals()
    usages: list[Any] = [
        client.chat.completions.create(**chat).usage,
        client.chat.completions.create(**chat, stop=" England").usage,
        client.chat.completions.create(**chat | {"temperature": 1.0}, n=3).usage,
        list(client.chat.completions.create(**chat, **streamed))[-1].usage,
        client.completions.create(**text, n=2).usage,
        client.completions.create(**text, echo=True, logprobs=1).usage,
        list(client.completions.create(**text, **streamed))[-1].usage,
        client.responses.create(**respond).usage,
        list(client.responses.create(**respond, stream=True))[-1].response.usage,
        anthropic.messages.create(**messages).usage,
    ]
    with anthropic.messages.stream(**messages, stop_sequences=[" of"]) as stream:
        usages.append(stream.get_final_message().usage)
    counts = [0, 0]
    for usage in usages:
        named = usage.model_dump()
        cached = named.get("cache_read_input_tokens") or 0  # of Anthropic, whose input tokens are the others
        counts[0] += named.get("prompt_tokens") or named.get("input_tokens") or 0
        counts[0] += cached
        counts[1] += named.get("completion_tokens") or named.get("output_tokens") or 0
    after = server.token_totals()
    assert counts == [after[0] - before[0], after[1] - before[1]]


def test_errors_name_the_parameter(server: RunningServer) -> None:
    client = server.openai()
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"use_beam_search": True})
    assert refused.value.param == "use_beam_search"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="1023"):
        client.completions.create(model=MODEL, prompt=[1] * 2000)
