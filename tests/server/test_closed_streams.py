"""When a client hangs up while an answer waits to be sent, its generation has ended before the request is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from running_server import MODEL, RunningServer

from moeserve.server.anthropic import messages
from moeserve.server.client import Client
from moeserve.server.openai import chat, completions, responses
from moeserve.server.reply import Reply

QUESTION = [{"role": "user", "content": "Hi"}]


async def reply(server: RunningServer, api: str) -> Reply:
    service, client = server.service, Client("", "id", "/", {})
    match api:
        case "completions":
            completion = {"model": MODEL, "prompt": "Hi", "max_tokens": 30, "stream": True, "ignore_eos": True}
            return completions.complete(service, client, completions.CompletionRequest(**completion))
        case "chat":
            body = {"model": MODEL, "messages": QUESTION, "stream": True, "ignore_eos": True}
            return await chat.answer(service, client, chat.ChatRequest.model_validate(body))
        case "responses":
            body = {"model": MODEL, "input": "Hi", "stream": True}
            return responses.answer(service, None, client, responses.ResponsesRequest.model_validate(body))
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 30, "stream": True}
    return messages.answer(service, client, messages.MessagesRequest.model_validate(body))


@pytest.mark.parametrize("api", ["completions", "chat", "responses", "messages"])
def test_no_generator_is_left_to_the_garbage_collector(
    tiny_server: RunningServer, monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    service = tiny_server.service
    generate, made = service.generate, []

    def kept(*args: Any) -> AsyncGenerator[Any, None]:
        made.append(generate(*args))  # the reference keeps the garbage collector away
        return made[-1]

    monkeypatch.setattr(service, "generate", kept)

    async def run() -> None:
        is_full = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                is_full.set()
                await asyncio.Event().wait()  # the client does not read

        async def receive() -> Any:
            await is_full.wait()
            return {"type": "http.disconnect"}

        answer = await reply(tiny_server, api)
        await answer({"type": "http"}, receive, send)
        assert is_full.is_set()
        assert [generator.ag_frame for generator in made] == [None]

    asyncio.run(run())
    assert service.admission.num_running == 0
