"""Connections: heads have limits, offers to upgrade are ignored, and every request holds a bounded number of bytes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zstandard
from server_process import wait_until
from stand_in_servers import InThread
from starlette.types import Receive, Scope, Send

from moeserve.server.bytes_in_flight import BytesInFlight
from moeserve.server.connection import MAX_BYTES_IN_PIPELINE, MAX_HEAD_BYTES, MAX_HEADERS
from moeserve.server.hosts import hosts_for
from moeserve.server.http_server import http_config
from moeserve.server.keys import Keys
from moeserve.server.middleware import Entrance
from moeserve.server.settings import ServerSettings

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MAX_BODY, MAX_IN_FLIGHT = 2**20, 2**21


class Echo:
    """Answers with the body. /wait and its query's number waits for events; counts the requests that disconnect."""

    def __init__(self) -> None:
        self.num_running = self.num_served = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = (await receive())["body"]
        self.num_running += 1
        try:
            if scope["path"] == "/wait":
                while (await receive())["type"] != "http.disconnect":
                    pass
                return
            self.num_served += 1
            chunks = [body[: len(body) // 2], body[len(body) // 2 :]] if scope["path"] == "/stream" else [body]
            length = [] if len(chunks) > 1 else [(b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": length})
            for index, chunk in enumerate(chunks):
                await send({"type": "http.response.body", "body": chunk, "more_body": index + 1 < len(chunks)})
        finally:
            self.num_running -= 1


class Served:
    """A server of `Echo`, and raw connections to it."""

    def __init__(self, **settings: Any) -> None:
        chosen = ServerSettings(max_body_bytes=MAX_BODY, **settings)
        self.echo, self.budget = Echo(), BytesInFlight(MAX_IN_FLIGHT)
        keys = Keys(chosen.api_key or ())
        hosts = hosts_for(chosen.host, chosen.allowed_host, has_keys=keys.are_required)
        app = Entrance(self.echo, keys, MAX_BODY, self.budget, hosts)
        self.running = InThread(app, http_config(app, chosen, self.budget, timeout_graceful_shutdown=1))
        self.address = ("127.0.0.1", int(self.running.url.rpartition(":")[2]))

    @contextlib.contextmanager
    def connected(self, *sent: bytes) -> Iterator[socket.socket]:
        with socket.create_connection(self.address, timeout=30) as client:
            for piece in sent:
                client.sendall(piece)
            yield client

    def answer(self, *sent: bytes) -> bytes:
        """Return all bytes until the server closes the connection, or a second of silence after the first ones."""
        with self.connected(*sent) as client:
            return read(client)


def read(client: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(TimeoutError, ConnectionResetError):
        while piece := client.recv(2**16):
            received += piece
            client.settimeout(1)
    return received


def post(body: bytes, *headers: bytes, closes: bool = True) -> bytes:
    lines = [*headers, *([b"Connection: close"] if closes else []), b"Content-Length: %d" % len(body)]
    return POST + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.running.stop()


ENDLESS = {
    "url": (b"GET /", b"a" * 2**14),
    "header": (b"GET / HTTP/1.1\r\nHost: x\r\nX: ", b"a" * 2**14),
    "name": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"a" * 2**14),
    "headers": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"X: b\r\n" * 2**12),
    "empty lines": (b"", b"\r\n" * 2**13),
    "trailers": (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: b\r\n" * 2**12),
    "trailer": (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"a" * 2**14),
    "extension": (POST + b"Transfer-Encoding: chunked\r\n\r\n1;a=", b"a" * 2**14),
}


@pytest.mark.parametrize("part", ENDLESS)
def test_no_part_of_a_head_is_endless(served: Served, part: str) -> None:
    begin, piece = ENDLESS[part]
    sent = 0
    with served.connected(begin) as client:
        with contextlib.suppress(ConnectionError):
            while sent < 2**24:
                client.sendall(piece)
                sent += len(piece)
        assert sent < 2**24, "the connection was not closed"
    wait_until(lambda: served.budget.num_bytes == 0)


@pytest.mark.parametrize(("size", "expected"), [(MAX_HEAD_BYTES - 200, 200), (MAX_HEAD_BYTES, 431)])
def test_the_limit_of_a_head(served: Served, size: int, expected: int) -> None:
    assert status(served.answer(post(b"{}", b"X: " + b"a" * size))) == expected


def test_the_number_of_headers(served: Served) -> None:
    assert status(served.answer(post(b"{}", *[b"a: b"] * MAX_HEADERS))) == 431
    assert status(served.answer(post(b"{}", *[b"a: b"] * (MAX_HEADERS - 4)))) == 200


def test_bodies_in_many_chunks_are_read(served: Served) -> None:
    chunks = b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in b'"' + b"a" * 30_000 + b'"')
    answer = served.answer(
        POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nX: trailer\r\n\r\n"
    )
    assert status(answer) == 200
    assert answer.endswith(b"a" * 30_000 + b'"')


@pytest.mark.slow
def test_offers_to_upgrade_are_ignored(served: Served) -> None:
    offer = [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAA"]
    body = b'{"prompt": "Hi"}'
    request = post(body, *offer, closes=False)
    for pieces in ([request], [request[:-4], request[-4:]], [request[:30], request[30:-20], request[-20:]]):
        answer = served.answer(*pieces)
        assert (status(answer), answer.endswith(body)) == (200, True)
    assert served.answer(request + request).count(body) == 2


def test_http_1_0_gets_no_chunks(served: Served) -> None:
    body = b'{"prompt": "Hi"}'
    request = post(body).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"/v1/completions", b"/stream")
    head, _, content = served.answer(request).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert content == body
    assert served.answer(post(body).replace(b"HTTP/1.1", b"HTTP/1.0")).endswith(body)


def test_head_is_get_without_a_body(served: Served) -> None:
    answer = served.answer(b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert status(answer) == 200
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("piece", [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", post(b"1" * 100)])
def test_a_hang_up_is_noticed_behind_other_requests(served: Served, piece: bytes) -> None:
    with served.connected(post(b"{}", closes=False).replace(b"/v1/completions", b"/wait")) as client:
        wait_until(lambda: served.echo.num_running == 1)
        client.sendall(piece)
    wait_until(lambda: served.echo.num_running == 0)


def test_bytes_behind_a_request_are_bounded(served: Served) -> None:
    with served.connected(post(b"{}", closes=False).replace(b"/v1/completions", b"/wait")) as client:
        wait_until(lambda: served.echo.num_running == 1)
        with contextlib.suppress(ConnectionError):
            client.sendall(POST + b"Content-Length: 1000000\r\n\r\n")
            for _ in range(2 * MAX_BYTES_IN_PIPELINE // 1000):
                client.sendall(b"a" * 1000)
                time.sleep(0.001)
        wait_until(lambda: served.echo.num_running == 0)


def test_requests_in_a_pipeline_are_answered_in_order(served: Served) -> None:
    answer = served.answer(b"".join(post(b'"%d"' % index, closes=index == 4) for index in range(5)))
    places = [answer.index(b'"%d"' % index) for index in range(5)]
    assert places == sorted(places)


def test_all_connections_share_one_budget(served: Served) -> None:
    """The largest unfinished body ends, and small requests are served."""
    with contextlib.ExitStack() as stack:
        begin = POST + b"Content-Length: %d\r\n\r\n" % MAX_BODY + b" " * (MAX_BODY - 1)
        clients = [stack.enter_context(served.connected(begin)) for _ in range(4)]
        wait_until(lambda: served.budget.num_bytes > MAX_IN_FLIGHT // 2)
        assert served.budget.num_bytes <= MAX_IN_FLIGHT
        assert status(served.answer(post(b"{}"))) == 200
        ended, _, _ = select.select(clients, [], [], 30)
        assert {status(read(client)) for client in ended} == {503}
    wait_until(lambda: served.budget.num_bytes == 0)


def test_unfinished_heads_count_too(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_IN_FLIGHT // 2**15 + 20):
            stack.enter_context(served.connected(b"GET /" + b"a" * 2**15))
        wait_until(lambda: served.budget.num_bytes > MAX_IN_FLIGHT // 2)
        assert status(served.answer(post(b"{}"))) == 200
        assert served.budget.num_bytes <= MAX_IN_FLIGHT
    wait_until(lambda: served.budget.num_bytes == 0)


@pytest.mark.parametrize("length", [b"0" * 5000 + b"2", b"9" * 18, b"9" * 5000, b"-1", b"2, 2"])
def test_strange_lengths(served: Served, length: bytes) -> None:
    expected = 200 if length.startswith(b"0") else 413 if len(length) == 18 else 400
    assert status(served.answer(POST + b"Connection: close\r\nContent-Length: " + length + b"\r\n\r\n{}")) == expected


def test_compressed_bodies(served: Served) -> None:
    body = json.dumps({"prompt": "Hi" * 1000}).encode()
    for name, packed in (("gzip", gzip.compress(body)), ("zstd", zstandard.compress(body)), ("identity", body)):
        answer = served.answer(post(packed, b"Content-Encoding: " + name.encode()))
        assert (name, status(answer), answer.endswith(body)) == (name, 200, True)
    for name, packed in (("gzip", b"abc"), ("zstd", b"abc"), ("gzip", gzip.compress(body)[:-20])):
        assert status(served.answer(post(packed, b"Content-Encoding: " + name.encode()))) == 400
    answer = served.answer(post(body, b"Content-Encoding: br"))
    assert status(answer) == 415
    assert b"zstd" in answer


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_small_body_that_inflates_to_much_is_refused(served: Served, pack: Any) -> None:
    packed = pack(b" " * 2**28)
    assert len(packed) < MAX_BODY
    name = b"gzip" if pack is gzip.compress else b"zstd"
    assert status(served.answer(post(packed, b"Content-Encoding: " + name))) == 413
    assert served.budget.num_bytes == 0


def test_other_content_types_and_encodings_are_named(served: Served) -> None:
    for given in (b"", b"Content-Type: text/plain\r\n", b"Content-Type: application/x-www-form-urlencoded\r\n"):
        answer = served.answer(post(b"{}").replace(b"Content-Type: application/json\r\n", given))
        assert status(answer) == 415
        assert b"Content-Type" in answer
    assert status(served.answer(post(b"{}").replace(b"application/json", b"application/json; charset=utf-8"))) == 200
    for encoding in ("utf-16", "utf-16-le", "utf-32-be", "latin-1"):
        answer = served.answer(post('{"é": 1}'.encode(encoding)))
        assert status(answer) == 400
        assert b"UTF-8" in answer


def test_a_page_whose_name_resolves_to_this_machine_is_refused(served: Served) -> None:
    def status_of(server: Served, host: str) -> int:
        return status(server.answer(post(b"{}").replace(b"Host: x", b"Host: " + host.encode())))

    for host in (
        "127.0.0.1",
        "127.0.0.1:8000",
        "localhost:1",
        "[::1]:8000",
        "a.localhost",
        "machine",
        "10.0.0.1",
        "host.docker.internal:8000",
    ):
        assert status_of(served, host) == 200
    for host in (
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "evil.example.",
        "a.internal",
        "a.host.docker.internal",
    ):
        assert status_of(served, host) == 403
    for settings in ({"allowed_host": ["Evil.example"]}, {"host": "0.0.0.0"}):
        other = Served(**settings)
        try:
            assert status_of(other, "evil.example:8000") == 200
        finally:
            other.running.stop()


@pytest.mark.slow
def test_malformed_heads(served: Served) -> None:
    """Each is answered with an error or a closed connection, and never with a failure of the server."""
    chance = random.Random(5)
    request = post(b'{"prompt": "a"}', b"X: y", b"Transfer-Encoding: chunked")

    def malformed() -> bytes:
        data = bytearray(post(b'{"prompt": "a"}', b"X: y") if chance.random() < 0.5 else request)
        for _ in range(chance.randrange(1, 6)):
            place = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[place] = chance.randrange(256)
                case 1:
                    del data[place : place + chance.randrange(1, 20)]
                case 2:
                    data[place:place] = bytes(chance.choices(b"\r\n\0 :;,\x80aA0", k=chance.randrange(1, 8)))
                case _:
                    data[place:place] = data[: chance.randrange(len(data))]
        return bytes(data)

    async def one(limit: asyncio.Semaphore) -> bytes:
        async with limit:
            reader, writer = await asyncio.open_connection(*served.address)
            writer.write(malformed())
            writer.write_eof()
            received = b""
            with contextlib.suppress(ConnectionError):
                received = await reader.read()
            writer.close()
            return received

    async def run() -> list[bytes]:
        limit = asyncio.Semaphore(50)
        return await asyncio.gather(*(one(limit) for _ in range(10_000)))

    answers = [answer for answer in asyncio.run(run()) if answer]
    assert {status(answer) // 100 for answer in answers} <= {2, 4}
    assert status(served.answer(post(b"{}"))) == 200
    wait_until(lambda: served.budget.num_bytes == 0 and served.echo.num_running == 0)
