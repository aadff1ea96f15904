"""Python libraries: loops of tool calls, and answers that are parsed into objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import anthropic
import instructor
import langchain.agents
import openai
import pydantic_ai
import pytest
from anthropic import beta_tool
from conftest import Server
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

LOOP = 'Please [call weather {"city": "Paris"}] and [call weather {"city": "Oslo"}].'
LAST = "The tool returned: 20 degrees in Oslo"
PLACE = {"city": "Oslo", "degrees": 20}


class Place(BaseModel):
    """A city and its temperature."""

    city: Literal["Paris", "Oslo"]
    degrees: Literal[10, 20, 30]


@pytest.fixture
def cities() -> list[str]:
    """The cities with which the tool was called."""
    return []


@pytest.fixture
def weather(cities: list[str]) -> Callable[[str], str]:
    def weather(city: str) -> str:
        """Return the weather in a city."""
        cities.append(city)
        return f"20 degrees in {city}"

    return weather


@pytest.fixture(params=["scripted", "real"])
def server(request: pytest.FixtureRequest) -> Server:
    """Each server in turn."""
    return request.getfixturevalue(request.param)


def asked_for(server: Server, script: str) -> dict[str, Any]:
    """Return a conversation in which the scripted model answers as a test needs it."""
    messages = [{"role": "user", "content": f"Describe a city. {script}"}]
    return {"model": server.model, "messages": messages, "max_tokens": 200}


@pytest.mark.clients("pypi:openai")
def test_parse(server: Server) -> None:
    client = openai.OpenAI(base_url=server.openai_url, api_key="none", max_retries=0)
    request = asked_for(server, f"[answer {json.dumps(PLACE)}]")
    chat = client.chat.completions.parse(**request, response_format=Place)
    with client.chat.completions.stream(**request, response_format=Place) as stream:
        streamed = stream.get_final_completion()
    response = client.responses.parse(
        model=server.model, input=request["messages"], text_format=Place, max_output_tokens=200
    )
    found = [chat.choices[0].message.parsed, streamed.choices[0].message.parsed, response.output_parsed]
    assert all(isinstance(each, Place) for each in found)
    if server.model == "scripted":
        assert found == [Place(**PLACE)] * 3


@pytest.mark.clients("pypi:anthropic")
@pytest.mark.parametrize("stream", [False, True])
def test_tool_runner(scripted: Server, weather: Callable[[str], str], cities: list[str], stream: bool) -> None:
    client = anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": LOOP}]
    runner = client.beta.messages.tool_runner(
        model=scripted.model, max_tokens=500, tools=[beta_tool(weather)], messages=messages, stream=stream
    )
    assert runner.until_done().content[-1].text == LAST
    assert cities == ["Paris", "Oslo"]


def chat_models(server: Server) -> list[Any]:
    options: dict[str, Any] = {"model": server.model, "api_key": "none", "max_retries": 0, "max_tokens": 500}
    return [
        ChatOpenAI(**options, base_url=server.openai_url),
        ChatOpenAI(**options, base_url=server.openai_url, use_responses_api=True),
        ChatAnthropic(**options, base_url=server.url),
    ]


@pytest.mark.clients("pypi:langchain", "pypi:langchain-openai", "pypi:langchain-anthropic")
@pytest.mark.parametrize("number", range(3))
def test_langchain_agent(scripted: Server, weather: Callable[[str], str], cities: list[str], number: int) -> None:
    agent = langchain.agents.create_agent(chat_models(scripted)[number], tools=[weather])
    request: Any = {"messages": [{"role": "user", "content": LOOP}]}
    assert agent.invoke(request)["messages"][-1].text == LAST
    pieces = [piece for piece, _ in agent.stream(request, stream_mode="messages") if piece.type == "AIMessageChunk"]
    assert "".join(piece.text for piece in pieces) == LAST
    assert cities == ["Paris", "Oslo"] * 2


@pytest.mark.clients("pypi:langchain-openai")
@pytest.mark.parametrize("number", range(2))
def test_langchain_formats(server: Server, number: int) -> None:
    (message,) = asked_for(server, f"[answer {json.dumps(PLACE)}]")["messages"]
    model = chat_models(server)[number].with_structured_output(Place, method="json_schema")
    assert isinstance(model.invoke(message["content"]), Place)


@pytest.mark.clients("pypi:pydantic-ai-slim")
@pytest.mark.parametrize("model_class", [OpenAIChatModel, OpenAIResponsesModel])
def test_pydantic_ai(scripted: Server, weather: Callable[[str], str], cities: list[str], model_class: Any) -> None:
    provider = OpenAIProvider(base_url=scripted.openai_url, api_key="none")
    agent = pydantic_ai.Agent(model_class(scripted.model, provider=provider), tools=[weather])
    assert agent.run_sync(LOOP).output == LAST
    assert agent.run_stream_sync(LOOP).get_output() == LAST
    assert cities == ["Paris", "Oslo"] * 2


@pytest.mark.clients("pypi:pydantic-ai-slim")
def test_pydantic_ai_output(server: Server) -> None:
    provider = OpenAIProvider(base_url=server.openai_url, api_key="none")
    agent = pydantic_ai.Agent(OpenAIChatModel(server.model, provider=provider), output_type=Place)
    answer = agent.run_sync(f"Describe a city. [call final_result {json.dumps(PLACE)}]").output
    assert isinstance(answer, Place)


@pytest.mark.clients("pypi:instructor")
@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_instructor(server: Server, mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=server.openai_url, api_key="none"), mode=mode)

    def request(name: str) -> dict[str, Any]:
        script = f"call {name}" if mode is instructor.Mode.TOOLS else "answer"
        return {**asked_for(server, f"[{script} {json.dumps(PLACE)}]"), "response_model": Place, "max_retries": 0}

    assert isinstance(client.create(**request("Place")), Place)
    *_, last = client.create_partial(**request("PartialPlace"))
    assert last.model_dump().keys() == PLACE.keys()
