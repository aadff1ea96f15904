"""The router: which servers get a request, what they and the client get, and what follows when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest
from stand_in_servers import (
    KEPT,
    Behaviour,
    Received,
    StandIn,
    answering,
    closing_connections,
    generate,
    keep,
    routing,
    standing_in,
    unreachable,
    waiting_for_hang_up,
)
from starlette.responses import JSONResponse, Response, StreamingResponse

from moeserve.server import upstreams
from moeserve.server.settings import ServerSettings

TOKENS = 100  # from which prompts are computed by a prefill server
LONG = "x" * 4 * TOKENS
SECONDS = 60.0  # for anything that should happen at once

LONG_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
    "/v1/responses": {"instructions": LONG[:200], "input": LONG[200:]},
    "/v1/messages": {"system": LONG[:200], "messages": [{"role": "user", "content": LONG[200:]}], "max_tokens": 3},
}


@dataclass(frozen=True)
class Setup:
    """A prefill server, a decode server, and a client of the router before them."""

    prefill: StandIn
    decode: StandIn
    http: httpx.Client

    def metric(self, name: str, **labels: str) -> float:
        named = ",".join(f'{label}="{value}"' for label, value in labels.items())
        begin = f"moeserve_router_{name}{{{named}}} " if named else f"moeserve_router_{name} "
        values = [line[len(begin) :] for line in self.http.get("/metrics").text.splitlines() if line.startswith(begin)]
        return float(values[0]) if values else 0.0

    def post_long(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": LONG, **fields})


@contextlib.contextmanager
def set_up(prefill_timeout: float) -> Iterator[Setup]:
    with (
        standing_in(keep, generate) as (prefill, decode),
        routing(
            [prefill.url], [f"{decode.url}/v1/"], min_remote_prefill=TOKENS, prefill_timeout=prefill_timeout
        ) as http,
    ):
        yield Setup(prefill, decode, http)


@pytest.fixture
def setup() -> Iterator[Setup]:
    with set_up(prefill_timeout=SECONDS) as setup:
        yield setup


# --- which servers get what


@pytest.mark.parametrize("path", list(LONG_BODIES))
def test_a_long_prompt_is_computed_by_one_server_and_continued_by_another(setup: Setup, path: str) -> None:
    content = json.dumps({**LONG_BODIES[path], "temperature": 1e-3, "seed": 2**62 + 1}, indent=1).encode()
    headers = {"Authorization": "Bearer key", "X-Api-Key": "other", "X-Request-Id": "mine", "traceparent": "00-1"}
    answer = setup.http.post(f"{path}?a=b%20c", content=content, headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"text": "generated"})
    assert answer.headers["x-request-id"] == "mine"
    for server, params in [(setup.prefill, {"do_remote_decode": True}), (setup.decode, KEPT)]:
        received = server.take()
        assert received.path == f"{path}?a=b%20c"
        assert received.fields == json.loads(content) | {"kv_transfer_params": params}
        assert received.body.endswith(content[1:])  # as the client wrote it
        assert {name: received.headers[name.lower()] for name in headers} == headers
    assert setup.metric("requests_total", path="remote") == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": LONG[1:]},
        {"prompt": [7] * (TOKENS - 1)},
        {"prompt": "ö" * (TOKENS * 2 - 1)},  # two bytes each
        {"prompt": [LONG, LONG]},  # keys and values are exchanged for one prompt
        {"prompt": [[7] * TOKENS, [8]]},
        {"prompt": LONG, "echo": True, "logprobs": 1},  # needs the whole prompt
        {"prompt": LONG, "prompt_logprobs": 0},
        {"messages": LONG},
    ],
    ids=str,
)
def test_other_requests_reach_a_decode_server_as_they_are(setup: Setup, fields: dict[str, Any]) -> None:
    content = json.dumps(fields).encode()
    assert setup.http.post("/v1/completions", content=content).json() == {"text": "generated"}
    assert setup.decode.take().body == content
    assert not setup.prefill.received
    assert setup.metric("requests_total", path="direct") == 1


@pytest.mark.parametrize(
    "prompt", [[7] * TOKENS, "ö" * TOKENS * 2, [LONG], [[7] * TOKENS]], ids=lambda each: str(each)[:9]
)
def test_the_length_of_a_prompt_is_that_of_its_tokens_or_bytes(setup: Setup, prompt: Any) -> None:
    setup.http.post("/v1/completions", json={"prompt": prompt})
    assert len(setup.prefill.received) == 1


@pytest.mark.parametrize("content", [b"", b"[", b"[1]", b'"text"', b'{"prompt": NaN}'])
def test_a_decode_server_answers_what_is_no_request(setup: Setup, content: bytes) -> None:
    setup.decode.behaviour = answering(400, b'{"error": 1}')
    assert setup.http.post("/v1/completions", content=content).json() == {"error": 1}
    assert setup.decode.take().body == content


def test_a_prompt_without_a_block_is_computed_by_the_decode_server(setup: Setup) -> None:
    setup.prefill.behaviour = answering(200, b'{"kv_transfer_params": null}')
    assert setup.post_long().status_code == 200
    assert setup.decode.take().fields == {"prompt": LONG}


def test_clients_do_not_choose_the_addresses_that_servers_connect_to(setup: Setup) -> None:
    answer = setup.http.post("/v1/completions", json={"prompt": "x", "kv_transfer_params": KEPT})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")
    assert not setup.prefill.received + setup.decode.received


def test_the_server_with_the_least_work_is_chosen() -> None:
    """One of two prefill servers has a prompt of 3 parts; prompts of 1 part go to the other, until it has more."""
    release = threading.Event()

    async def keep_later(received: Received) -> Response:
        await asyncio.to_thread(release.wait, SECONDS)
        return await keep(received)

    async def generate_later(received: Received) -> Response:
        await asyncio.to_thread(release.wait, SECONDS)
        return await generate(received)

    with standing_in(keep_later, keep_later, generate_later, generate_later) as (first, second, third, fourth):
        prefill, decode = [first, second], [third, fourth]
        with (
            routing([server.url for server in prefill], [server.url for server in decode]) as http,
            ThreadPoolExecutor(10) as threads,
        ):
            answers = []

            def send(prompt: str, servers: list[StandIn]) -> tuple[int, ...]:
                """Send a request. Return how many requests each server has, when it has arrived at one of them."""
                before = sum(len(server.received) for server in servers)
                answers.append(threads.submit(http.post, "/v1/completions", json={"prompt": prompt}))
                for _ in range(int(SECONDS / 0.01)):
                    if sum(len(server.received) for server in servers) > before:
                        break
                    threading.Event().wait(0.01)
                return tuple(len(server.received) for server in servers)

            part = 4 * 2000
            assert send("x" * 3 * part, prefill) == (1, 0)
            assert send("x" * part, prefill) == (1, 1)
            assert send("x" * part, prefill) == (1, 2)
            assert send("x" * part * 3, prefill) == (1, 3)
            assert send("x" * part, prefill) == (2, 3)
            assert send("short", decode) == (1, 0)
            assert send("short" * 99, decode) == (1, 1)
            assert send("short", decode) == (2, 1)
            release.set()
            assert [answer.result(SECONDS).status_code for answer in answers] == [200] * len(answers)
            for _ in range(3):  # all have ended, so both have no work
                assert http.post("/v1/completions", json={"prompt": "x" * part}).status_code == 200
            assert [len(server.received) for server in prefill] == [5, 3]


# --- what the client gets


def test_a_stream_is_passed_on_byte_for_byte_as_it_comes(setup: Setup) -> None:
    chance = random.Random(3)
    chunks = [chance.randbytes(chance.choice([1, 7, 1000, 100_000])) for _ in range(20)]
    has_come = [threading.Event() for _ in chunks]

    async def stream(received: Received) -> Response:
        async def sent() -> AsyncIterator[bytes]:
            for chunk, come in zip(chunks, has_come, strict=True):
                yield chunk
                assert await asyncio.to_thread(come.wait, SECONDS)  # the next one only after this one has come

        headers = {"content-type": "text/event-stream", "cache-control": "no-cache", "content-encoding": "gzip"}
        return StreamingResponse(sent(), 200, headers)

    setup.decode.behaviour = stream
    got = b""
    ends = [sum(map(len, chunks[: number + 1])) for number in range(len(chunks))]
    with setup.http.stream("POST", "/v1/completions", json={"prompt": LONG, "stream": True}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        for part in answer.iter_raw():
            got += part
            for end, come in zip(ends, has_come, strict=True):
                if len(got) >= end:
                    come.set()
    assert got == b"".join(chunks)


def test_the_status_and_headers_of_an_answer_are_passed_on(setup: Setup) -> None:
    setup.decode.behaviour = answering(429, b'{"full": 1}', **{"retry-after": "17", "x-request-id": "theirs"})
    answer = setup.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.content) == (429, b'{"full": 1}')
    assert answer.headers["retry-after"] == "17"
    assert answer.headers["content-length"] == "11"
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert len(answer.headers.get_list("date")) == 1


def test_an_answer_that_breaks_off_is_not_taken_for_a_complete_one(setup: Setup) -> None:
    async def break_off(received: Received) -> Response:
        async def sent() -> AsyncIterator[bytes]:
            yield b"begin"
            raise ConnectionError("breaks off")

        return StreamingResponse(sent())

    setup.decode.behaviour = break_off
    with pytest.raises(httpx.RemoteProtocolError):
        setup.http.post("/v1/completions", json={"prompt": "x"})
    assert len(setup.decode.received) == 1  # not sent again: the client has a part of the answer


def test_other_paths_are_those_of_a_decode_server(setup: Setup) -> None:
    assert setup.http.get("/v1/models/a/b", headers={"Authorization": "Bearer k"}).json() == {"text": "generated"}
    received = setup.decode.take()
    assert (received.method, received.path, received.headers["authorization"]) == ("GET", "/v1/models/a/b", "Bearer k")
    assert setup.http.post("/tokenize", json={"prompt": LONG}).status_code == 200
    assert setup.decode.take().fields == {"prompt": LONG}
    assert setup.http.get("/health").json() == {"status": "alive"}
    assert not setup.prefill.received + setup.decode.received
    for path in ("/status", "/v1/messages/x"):
        answer = setup.http.get(path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert setup.http.get("/v1/completions").status_code == 405


def test_the_router_is_ready_if_a_decode_server_is() -> None:
    with standing_in(answering(503), answering(200)) as (starting, ready), unreachable() as gone:
        for decode, status in [([starting.url, gone], 503), ([gone, ready.url], 200)]:
            with routing([gone], decode) as http:
                assert http.get("/ready").status_code == status


def test_a_large_body_is_refused_by_the_router() -> None:
    with (
        standing_in(generate) as (decode,),
        routing([decode.url], [decode.url], ServerSettings(max_body_bytes=99)) as http,
    ):
        answer = http.post("/v1/messages", json={"messages": LONG})
        assert (answer.status_code, answer.json()["type"]) == (413, "error")
        assert not decode.received


# --- failures


FAILURES: dict[str, tuple[Behaviour, str]] = {
    "full": (answering(429), "refused"),
    "shutting down": (answering(503), "refused"),
    "internal error": (answering(500), "error"),
    "no transfers": (answering(400, b'{"error": {"param": "kv_transfer_params"}}'), "error"),
    "no JSON": (answering(200, b"<html>"), "error"),
    "other JSON": (answering(200, b'{"choices": []}'), "error"),
    "redirect": (answering(307, location="http://192.0.2.1/"), "error"),
}


@pytest.mark.parametrize("name", list(FAILURES))
def test_a_decode_server_computes_what_a_prefill_server_does_not(setup: Setup, name: str) -> None:
    setup.prefill.behaviour, reason = FAILURES[name]
    assert setup.post_long(seed=5).json() == {"text": "generated"}
    assert setup.decode.take().body == setup.prefill.take().body.replace(
        b'"kv_transfer_params":{"do_remote_decode":true},', b""
    )
    assert setup.metric("requests_total", path="fallback") == 1
    assert setup.metric("prefill_failures_total", reason=reason) == 1


def test_a_slow_prefill_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "AVOID_S", 600.0)
    with set_up(prefill_timeout=2.0) as setup:
        setup.prefill.behaviour = waiting_for_hang_up(setup.prefill)
        assert setup.post_long().status_code == 200
        assert setup.prefill.hang_ups.acquire(timeout=SECONDS)  # so its request has ended
        assert setup.metric("prefill_failures_total", reason="timeout") == 1
        assert setup.post_long().status_code == 200  # at once, without that server
        assert len(setup.prefill.received) == 1


def test_a_prefill_server_that_is_gone_is_left_out() -> None:
    with (
        unreachable() as gone,
        standing_in(keep, generate) as (prefill, decode),
        routing([gone, prefill.url], [decode.url], min_remote_prefill=TOKENS) as http,
    ):
        for _ in range(3):
            assert http.post("/v1/completions", json={"prompt": LONG}).status_code == 200
            assert "kv_transfer_params" in decode.take().fields


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_a_wrong_request_is_answered_by_the_prefill_server(setup: Setup, status: int) -> None:
    setup.prefill.behaviour = answering(status, b'{"error": {"param": "top_p"}}', **{"www-authenticate": "Bearer"})
    answer = setup.post_long(stream=True)
    assert (answer.status_code, answer.json()) == (status, {"error": {"param": "top_p"}})
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["content-type"] == "application/json"
    assert not setup.decode.received


@pytest.mark.parametrize("status", [None, 429, 503])
def test_another_decode_server_answers_if_one_does_not(status: int | None) -> None:
    """The first server is unreachable, or refuses the request."""
    with (
        unreachable() as gone,
        standing_in(answering(status or 200), generate) as (refusing, serving),
        routing([gone], [refusing.url if status else gone, serving.url]) as http,
    ):
        for _ in range(2):
            assert http.post("/v1/completions", json={"prompt": "x"}).json() == {"text": "generated"}
        assert len(refusing.received) == (2 if status else 0)


def test_a_decode_server_that_accepts_and_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "HEALTH_INTERVAL_S", 0.05)
    monkeypatch.setattr(upstreams, "HEALTH_TIMEOUT_S", 2.0)
    with contextlib.ExitStack() as stack:
        hung = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        [decode] = stack.enter_context(standing_in(generate))
        urls = [f"http://127.0.0.1:{hung.getsockname()[1]}", decode.url]
        http = stack.enter_context(routing([decode.url], urls))
        with ThreadPoolExecutor(16) as threads:
            bodies = [{"prompt": "a"}] * 32
            statuses = list(threads.map(lambda body: http.post("/v1/completions", json=body).status_code, bodies))
        assert statuses == [200] * 32
        alone = stack.enter_context(routing([decode.url], urls[:1]))
        assert alone.post("/v1/completions", json={"prompt": "a"}).status_code == 503


def test_a_decode_server_that_falls_silent_ends_the_response(setup: Setup) -> None:
    setup.decode.behaviour = waiting_for_hang_up(setup.decode)
    with routing([setup.prefill.url], [setup.decode.url], decode_timeout=0.2) as http:
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
    assert setup.decode.hang_ups.acquire(timeout=SECONDS)


@pytest.mark.parametrize(
    "path", ["/v1/models/../../secret", "/v1/models/%2e%2e/x", "/v1/models/a/..", "/v1/models/..%2fx"]
)
def test_paths_do_not_lead_elsewhere(setup: Setup, path: str) -> None:
    setup.decode.received.clear()
    with socket.create_connection((setup.http.base_url.host, setup.http.base_url.port)) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert client.recv(100).split()[1] == b"404"
    assert not setup.decode.received


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_without_a_decode_server_clients_get_an_error_of_their_api(path: str) -> None:
    with unreachable() as gone, routing([gone], [gone, gone]) as http:
        answer = http.post(path, json={"prompt": "x"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        kind = "overloaded_error" if path == "/v1/messages" else "service_unavailable_error"
        assert answer.json()["error"]["type"] == kind


@pytest.mark.parametrize("stage", ["prefill", "decode", "stream"])
def test_a_client_that_hangs_up_ends_its_request(setup: Setup, stage: str) -> None:
    server = setup.prefill if stage == "prefill" else setup.decode
    server.behaviour = waiting_for_hang_up(server, b"first" if stage == "stream" else b"")

    async def hang_up() -> None:
        """Send a request, and hang up when the server has it, or when the first part of the answer has come."""
        has_begun = asyncio.Event()

        async def ask() -> None:
            async with http.stream("POST", "/v1/completions", json={"prompt": LONG}) as answer:
                async for _ in answer.aiter_raw():
                    has_begun.set()

        async with httpx.AsyncClient(base_url=setup.http.base_url, timeout=SECONDS) as http:
            task = asyncio.create_task(ask())
            while not (has_begun.is_set() if stage == "stream" else server.received):
                assert not task.done()
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(hang_up())
    assert server.hang_ups.acquire(timeout=SECONDS)
    server.behaviour = keep if stage == "prefill" else generate
    assert setup.post_long().status_code == 200
    if stage == "prefill":
        assert len(setup.decode.received) == 1  # of the second request alone


def test_every_answer_is_whole_and_of_its_own_prompt_whatever_fails() -> None:
    """Servers answer, refuse, fail, wait or close connections at random, and some clients hang up."""
    chance = random.Random(8)
    failures = [answering(status) for status in (429, 500, 503)]

    async def keep_or_fail(received: Received) -> Response:
        await asyncio.sleep(chance.random() / 50)
        if chance.random() < 0.5:
            return await chance.choice(failures)(received)
        name = hashlib.sha256(received.fields["prompt"].encode()).hexdigest()
        return JSONResponse({"kv_transfer_params": {**KEPT, "remote_handle": name}})

    async def generate_or_refuse(received: Received) -> Response:
        await asyncio.sleep(chance.random() / 50)
        if chance.random() < 0.3:
            return await failures[0](received)
        prompt, params = received.fields["prompt"], received.fields.get("kv_transfer_params")
        assert params is None or params["remote_handle"] == hashlib.sha256(prompt.encode()).hexdigest()

        async def chunks() -> AsyncIterator[bytes]:
            for place in range(0, len(prompt), 1000):
                yield prompt[place : place + 1000].encode()
                await asyncio.sleep(0)

        return StreamingResponse(chunks())

    async def send(http: httpx.AsyncClient, number: int) -> int | None:
        """Send a request. Return the status of the answer, or None after hanging up."""
        prompt = f"{number} " * chance.randrange(1, chance.choice([50, 2000]))
        timeout = chance.choice([0.01, 30, 30])
        try:
            answer = await http.post("/v1/completions", json={"prompt": prompt}, timeout=timeout)
        except httpx.TimeoutException:
            return None
        assert answer.status_code in (200, 429, 503)
        assert answer.status_code != 200 or answer.text == prompt
        return int(answer.status_code)

    async def send_all(url: str) -> list[int | None]:
        limits = httpx.Limits(max_connections=None)
        at_once = asyncio.Semaphore(20)

        async def one(number: int) -> int | None:
            async with at_once:
                return await send(http, number)

        async with httpx.AsyncClient(base_url=url, limits=limits) as http:
            return await asyncio.gather(*map(one, range(200)))

    with (
        closing_connections() as closing,
        standing_in(keep_or_fail, generate_or_refuse, generate_or_refuse) as (prefill, first, second),
        routing([prefill.url], [closing, first.url, second.url], min_remote_prefill=TOKENS) as http,
    ):
        statuses = asyncio.run(send_all(str(http.base_url)))
        assert statuses.count(200) > 100
        setup = Setup(prefill, first, http)
        assert setup.metric("prefill_failures_total", reason="refused") > 10
        assert setup.metric("decode_failures_total") > 10
        for path in ("direct", "remote", "fallback"):
            assert setup.metric("requests_total", path=path) > 5


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_kv_transfer_params_in_json_that_is_unusual(setup: Setup, encoding: str) -> None:
    """Nothing that a server would read passes unread."""
    body = '{"prompt": "short", "user": "\\ud800", "kv_transfer_params": {"do_remote_prefill": true}}'.encode(encoding)
    answer = setup.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert ("kv_transfer_params" if encoding == "utf-8" else "UTF-8") in answer.text
    assert not setup.decode.received


# --- stored responses


def storing(*stored: str) -> Behaviour:
    """Return the behaviour of a server that has some stored responses and items."""

    async def answer(received: Received) -> Response:
        if received.method == "POST":
            fields = received.fields
            wanted = fields.get("previous_response_id") or fields["input"][0]["id"]
            code = "previous_response_not_found" if "previous_response_id" in fields else "item_not_found"
        else:
            wanted, code = received.path.rsplit("/", 1)[1], "response_not_found"
        if wanted in stored:
            return JSONResponse({"found": wanted})
        status = 400 if code == "previous_response_not_found" else 404
        return JSONResponse({"error": {"message": "not stored", "code": code}}, status)

    return answer


def test_requests_reach_the_server_that_stores_their_response() -> None:
    with (
        standing_in(keep, storing("a", "item"), storing("b"), storing("c")) as (prefill, *decode),
        routing([prefill.url], [each.url for each in decode], min_remote_prefill=1) as http,
    ):
        for wanted in ("a", "b", "c"):
            path = f"/v1/responses/{wanted}"
            body = {"input": LONG, "previous_response_id": wanted}
            for answer in (http.get(path), http.delete(path), http.post("/v1/responses", json=body)):
                assert (answer.status_code, answer.json()) == (200, {"found": wanted})
        body = {"input": [{"type": "item_reference", "id": "item"}]}
        assert http.post("/v1/responses", json=body).json() == {"found": "item"}
        for answer, code in (
            (http.get("/v1/responses/none"), "response_not_found"),
            (
                http.post("/v1/responses", json={"input": LONG, "previous_response_id": "d"}),
                "previous_response_not_found",
            ),
        ):
            assert answer.status_code in (400, 404)
            assert answer.json()["error"]["code"] == code
        assert not prefill.received, "it cannot know the conversation"


def test_a_response_is_not_missing_while_a_server_is_unreachable() -> None:
    with (
        unreachable() as gone,
        standing_in(keep, storing()) as (prefill, decode),
        routing([prefill.url], [decode.url, gone], min_remote_prefill=1) as http,
    ):
        assert http.get("/v1/responses/a").status_code == 503


def test_other_errors_of_responses_are_passed_on() -> None:
    refusal = b'{"error": {"message": "no", "code": null}}'
    with (
        standing_in(keep, answering(400, refusal)) as (prefill, decode),
        routing([prefill.url], [decode.url]) as http,
    ):
        answer = http.post("/v1/responses", json={"input": "a"})
    assert (answer.status_code, answer.content) == (400, refusal)
