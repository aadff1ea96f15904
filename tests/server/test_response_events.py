"""The events of OpenAI's Responses API, as OpenAI documents them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseErrorEvent
from running_server import MODEL, RunningServer, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM, SamplingParams
from moeserve.errors import EngineError

ASKED: dict[str, Any] = {"model": MODEL, "input": "Hi", "temperature": 0}


@pytest.fixture(scope="module")
def reasoning_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of a model whose template begins the reasoning. The model writes one byte with each token."""
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    path = Path(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] += "<think>"
    path.write_text(json.dumps(config))
    llm = AsyncLLM(folder, dtype="float32", max_model_len=512, max_num_seqs=8, show_progress=False)
    with running(llm, answer_parser="hermes") as server:
        yield server
    llm.shutdown()


def test_a_cut_item_is_incomplete(tiny_server: RunningServer) -> None:
    events = list(tiny_server.openai().responses.create(**ASKED, max_output_tokens=4, stream=True))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    (done,) = [event for event in events if event.type == "response.output_item.done"]
    assert done.item.type == "message"
    last = events[-1]
    assert last.type == "response.incomplete"
    assert done.item.status == "incomplete"
    assert done.item == last.response.output[0]


def test_tokens_of_reasoning_are_counted(reasoning_server: RunningServer) -> None:
    client = reasoning_server.openai()
    cut = client.responses.create(**ASKED, max_output_tokens=8)
    assert [item.type for item in cut.output] == ["reasoning"]
    assert cut.usage is not None
    assert cut.usage.output_tokens_details.reasoning_tokens == cut.usage.output_tokens == 8


def test_tokens_of_an_answer_are_not_of_its_reasoning(
    reasoning_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = reasoning_server.llm.codec
    assert codec is not None
    ends_soon = SamplingParams(seed=3, logit_bias={codec.added_tokens["</think>"]: 5.0}, max_tokens=None)
    monkeypatch.setattr(reasoning_server.llm, "get_default_sampling_params", lambda: ends_soon)
    form: Any = {"format": {"type": "json_schema", "name": "word", "schema": {"enum": ["yes"]}}}
    answer = reasoning_server.openai().responses.create(**ASKED | {"temperature": 1.0}, text=form)
    reasoning, message = answer.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert answer.output_text == '"yes"'
    assert answer.usage is not None
    others = answer.usage.output_tokens - answer.usage.output_tokens_details.reasoning_tokens
    # The end of the reasoning, at most four spaces, five letters, and the end of the output. Spaces before the end of
    # the reasoning belong to neither.
    assert 7 <= others < answer.usage.output_tokens


def test_an_answer_without_text_has_begun(tiny_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = tiny_server.llm.generate

    async def without_text(*args: Any, **options: Any) -> Any:
        async for output in generate(*args, **options):
            yield dataclasses.replace(output, outputs=[dataclasses.replace(each, text="") for each in output.outputs])

    monkeypatch.setattr(tiny_server.llm, "generate", without_text)
    events = list(tiny_server.openai().responses.create(**ASKED, max_output_tokens=1, stream=True))
    kinds = ["response.created", "response.in_progress", "response.incomplete"]
    assert [(event.type, event.sequence_number) for event in events] == list(zip(kinds, range(3), strict=True))


def test_an_error_in_a_stream_is_an_event(tiny_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = tiny_server.llm.generate

    async def failing(*args: Any, **options: Any) -> Any:
        num_outputs = 0
        async for output in generate(*args, **options):
            yield output
            num_outputs += 1
            if num_outputs == 3:
                raise EngineError("a rank died")

    monkeypatch.setattr(tiny_server.llm, "generate", failing)
    events = list(tiny_server.openai().responses.create(**ASKED, max_output_tokens=30, stream=True))
    last = events[-1]
    assert isinstance(last, ResponseErrorEvent)
    assert (last.type, last.code) == ("error", "service_unavailable_error")
    assert "rank" not in last.message
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_log_probabilities_cannot_be_included(tiny_server: RunningServer) -> None:
    client = tiny_server.openai()
    with pytest.raises(openai.BadRequestError, match="logprobs") as refused:
        client.responses.create(**ASKED, max_output_tokens=1, include=["message.output_text.logprobs"])
    assert refused.value.param == "include"
    client.responses.create(**ASKED, max_output_tokens=1, include=["web_search_call.action.sources"])  # there are none
