"""Replies whose first chunk takes long: the headers do not wait for it, and silence is filled with pings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from moeserve.server.errors import ApiError
from moeserve.server.reply import EVENTS, JSON, Reply

PING = b"\n\n"  # no comment, after which vLLM's benchmark would lose events


async def sent_by(media_type: str, num_pings: int, error: ApiError | None = None) -> list[Message]:
    """Return the messages of a reply whose only chunk comes after some pings, or after a moment if there are none."""
    sent: list[Message] = []
    have_pings = asyncio.Event()

    async def chunks() -> AsyncGenerator[bytes, None]:
        if num_pings:
            await asyncio.wait_for(have_pings.wait(), 60)
        else:
            await asyncio.sleep(0.05)
        if error is not None:
            raise error
        yield b"chunk"

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) > num_pings:
            have_pings.set()

    reply = Reply(chunks(), media_type, seconds_to_headers=0.01, seconds_between_pings=0.01)
    await reply({"type": "http"}, receive, send)
    return sent


def test_a_stream_begins_before_its_first_chunk() -> None:
    begin, *bodies = asyncio.run(sent_by(EVENTS, 3))
    assert begin["status"] == 200
    pings = bodies[: bodies.index({"type": "http.response.body", "body": b"chunk", "more_body": True})]
    assert len(pings) >= 3
    assert all(each["body"] == PING for each in pings)
    assert bodies[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("status", [429, 503])
def test_an_error_after_the_headers_is_an_event(status: int) -> None:
    begin, *bodies = asyncio.run(sent_by(EVENTS, 2, ApiError(status, "no room")))
    assert begin["status"] == 200
    assert b"no room" in bodies[-1]["body"]
    assert bodies[-1]["more_body"] is False


def test_a_whole_answer_keeps_its_status() -> None:
    begin, body = asyncio.run(sent_by(JSON, 0, ApiError(503, "no room")))
    assert (begin["status"], b"no room" in body["body"]) == (503, True)
    assert [each.get("body") for each in asyncio.run(sent_by(JSON, 0))] == [None, b"chunk", b""]
