"""The steps before endpoints: which bodies are received, and how long they may take."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from running_server import running
from starlette.types import Message, Receive, Scope, Send

from moeserve import AsyncLLM
from moeserve.server.bytes_in_flight import BytesInFlight
from moeserve.server.keys import Keys
from moeserve.server.middleware import OPEN_PATHS, Entrance

BODY = b'{"prompt": "a"}'
JSON = [(b"content-type", b"application/json")]


async def read_to_end(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body."""
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


async def sent_by(pieces: list[bytes], *, is_complete: bool, timeout_s: float = 60.0, **scope: Any) -> list[Message]:
    """Send a request in pieces, and return the messages of the answer. An incomplete one never sends the rest."""
    left = list(pieces)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or not is_complete}

    answer: list[Message] = []

    async def send(message: Message) -> None:
        answer.append(message)

    whole = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": JSON} | scope
    await Entrance(read_to_end, Keys([]), 1000, BytesInFlight(10**6), body_timeout_s=timeout_s)(whole, receive, send)
    return answer


def test_bodies_must_arrive_in_time() -> None:
    begin, end = asyncio.run(sent_by([BODY[:5], BODY[5:]], is_complete=True))
    assert (begin["status"], end["body"]) == (200, BODY)
    begin, _ = asyncio.run(sent_by([BODY[:5]], is_complete=False, timeout_s=0.05))
    assert begin["status"] == 408
    assert (b"connection", b"close") in begin["headers"]


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_open_paths_take_no_body(path: str) -> None:
    """Neither is any of it awaited, if its length is known, nor kept."""
    length = [(b"content-length", b"1")]
    assert asyncio.run(sent_by([], is_complete=False, path=path, headers=length))[0]["status"] == 413
    assert asyncio.run(sent_by([b"a"], is_complete=False, path=path))[0]["status"] == 413
    assert asyncio.run(sent_by([b""], is_complete=True, path=path))[0]["status"] == 200


def test_a_server_with_keys_receives_no_body_without_one(llm: AsyncLLM) -> None:
    with running(llm, api_key=["first"]) as server, server.http() as http:
        for path in OPEN_PATHS:
            assert http.request("GET", path).status_code == 200
            assert http.request("GET", path, content=b"a").status_code == 413
        assert http.post("/v1/completions", content=b"a" * 2**20).status_code == 401
