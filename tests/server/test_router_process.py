"""`moeserve serve --prefill URL --decode URL`: how the router starts and ends."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from server_process import serving
from stand_in_servers import Received, generate, standing_in, waiting_for_hang_up
from starlette.responses import Response, StreamingResponse

from moeserve.cli import main

SECONDS = 60.0
BODY = {"prompt": "x"}


def test_requests_in_flight_are_answered_after_sigterm() -> None:
    rest = threading.Event()

    async def stream(received: Received) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"first, "
            await asyncio.to_thread(rest.wait, SECONDS)
            yield b"and the rest"

        return StreamingResponse(chunks())

    with standing_in(stream) as (decode,), serving("--prefill", decode.url, "--decode", decode.url) as router:
        maps = Path(f"/proc/{router.pid}/maps")
        if maps.exists():  # on Linux
            assert "torch" not in maps.read_text()
        assert router.status_of("/ready") == 200
        with httpx.stream("POST", f"{router.url}/v1/completions", json=BODY, timeout=SECONDS) as answer:
            parts = answer.iter_raw()
            assert next(parts) == b"first, "
            router.send_signal(signal.SIGTERM)
            router.wait_for_readiness(503, SECONDS)
            refusal = httpx.post(f"{router.url}/v1/completions", json=BODY, timeout=SECONDS)
            assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "10")
            rest.set()
            assert b"".join(parts) == b"and the rest"
        assert router.wait(SECONDS) == 0
    assert "Traceback" not in router.errors()


@pytest.mark.parametrize("first", [b"", b"first"])
def test_requests_are_cut_off_after_the_drain_timeout(first: bytes) -> None:
    with (
        standing_in(generate) as (decode,),
        serving("--prefill", decode.url, "--decode", decode.url, "--drain-timeout", "0.5") as router,
        ThreadPoolExecutor(1) as thread,
    ):
        decode.behaviour = waiting_for_hang_up(decode, first)
        received: list[bytes] = []

        def ask() -> None:
            with httpx.stream("POST", f"{router.url}/v1/completions", json=BODY, timeout=SECONDS) as answer:
                received.extend(answer.iter_raw())

        asked = thread.submit(ask)
        while not (received if first else decode.received):
            assert not asked.done()
            threading.Event().wait(0.01)
        router.send_signal(signal.SIGTERM)
        if first:
            with pytest.raises(httpx.RemoteProtocolError):
                asked.result(SECONDS)
            assert received == [first]
        else:
            asked.result(SECONDS)
            assert json.loads(b"".join(received))["error"]["type"] == "service_unavailable_error"
        assert decode.hang_ups.acquire(timeout=SECONDS)
        assert router.wait(SECONDS) == 0
    assert "Traceback" not in router.errors()


SERVERS = ["--prefill", "http://a:1", "--decode", "http://b:2"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--prefill", "http://a:1"], "--decode"),
        (["--decode", "http://a:1"], "--prefill"),
        (["--min-remote-prefill", "5"], "--prefill"),
        ([*SERVERS, "--tensor-parallel-size", "2"], "--tensor-parallel-size"),
        ([*SERVERS, "--api-key", "x"], "--api-key"),
        (["checkpoint", *SERVERS], "MODEL"),
        ([*SERVERS, "--prefill", "ftp://a:1"], "--prefill ftp://a:1"),
        ([*SERVERS, "--decode", "http://a:1/path"], "--decode http://a:1/path"),
        ([*SERVERS, "--decode", "http://user@a:1"], "--decode http://user@a:1"),
        ([*SERVERS, "--decode", "http://a:99999"], "--decode http://a:99999"),
    ],
)
def test_flags_that_make_no_router_are_refused(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", *flags]) == 1
    assert named in capsys.readouterr().err
