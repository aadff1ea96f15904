"""SIGTERM under load: each request is answered, or ends with an error; then nothing of the server is left."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from rank_processes import assert_gone, shared_memory_of
from server_process import ServerProcess, serving
from tiny_model import save_tiny_model

from moeserve.server.http_server import DrainingServer, budget_of, listen
from moeserve.server.settings import ServerSettings

pytestmark = pytest.mark.ranks

NUM_OUTPUTS = 8  # that run at once, and a quarter more is admitted
NUM_UNREAD = 4  # of these, for a client that does not read
NUM_STREAMS = 12
NUM_TOKENS = 490
SECONDS_TO_CLOSE = 60.0  # once requests have ended, or may not go on
MODEL = "tiny"
LONG: dict[str, Any] = {"model": MODEL, "prompt": [3, 5, 7], "max_tokens": NUM_TOKENS, "stream": True}
UNREAD: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 480,
    "stream": True,
}
UNREAD |= {"n": NUM_UNREAD, "logprobs": True, "top_logprobs": 64, "ignore_eos": True}  # several MB


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@contextlib.contextmanager
def loaded_server(
    checkpoint: Path, *flags: str, all_read: bool = False
) -> Iterator[tuple[ServerProcess, list[concurrent.futures.Future[str]]]]:
    """A server, and how each of some streams ends: some run, and others wait. One client does not read its answer.

    Args:
        all_read: there is no such client.
    """
    all_flags = [
        str(checkpoint),
        "--dtype",
        "float32",
        "--max-num-seqs",
        str(NUM_OUTPUTS),
        "--served-model-name",
        MODEL,
    ]
    num_running, enough = 0, threading.Event()

    def stream(client: openai.OpenAI) -> str:
        nonlocal num_running
        reason = None
        try:
            for chunk in client.completions.create(**LONG, extra_body={"ignore_eos": True}):
                if reason is None and chunk.choices[0].text:
                    num_running += 1
                    reason = "cut off"
                    if num_running >= NUM_OUTPUTS - NUM_UNREAD:
                        enough.set()
                reason = chunk.choices[0].finish_reason or reason
        except openai.APIError as error:
            return f"error {getattr(error, 'status_code', '')}".strip()
        return reason or "nothing"

    with serving(*all_flags, *flags) as server, concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with contextlib.nullcontext() if all_read else unread_answer(server):
            streams = [pool.submit(stream, client) for _ in range(NUM_STREAMS)]
            assert enough.wait(60)
            yield server, streams


@contextlib.contextmanager
def unread_answer(server: ServerProcess) -> Iterator[None]:
    """A client that asks for more than the buffers of a connection hold, and reads its begin alone."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        body = json.dumps(UNREAD).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert client.recv(12) == b"HTTP/1.1 200"
        yield


def check_nothing_is_left(server: ServerProcess, children: list[psutil.Process]) -> None:
    assert_gone(children, seconds=SECONDS_TO_CLOSE)
    assert not shared_memory_of([server.pid, *(child.pid for child in children)])
    host, _, port = server.url.removeprefix("http://").partition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drain_timeout", "flags"),
    [(0, ()), (3, ()), (3, ("--api-server-count", "2"))],
    ids=["no time", "one process", "several processes"],
)
def test_each_request_is_answered_or_ends_with_an_error(
    checkpoint: Path, drain_timeout: int, flags: tuple[str, ...]
) -> None:
    """After the time for running requests, though a client does not read."""
    with loaded_server(checkpoint, "--drain-timeout", str(drain_timeout), *flags) as (server, streams):
        children = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(signal.SIGTERM)
        assert server.wait(drain_timeout + SECONDS_TO_CLOSE) == 0
        check_nothing_is_left(server, children)
        ends = Counter(each.result(SECONDS_TO_CLOSE) for each in streams)
    assert ends.keys() <= {"length", "error", "error 503"}
    assert drain_timeout or ends["length"] < NUM_STREAMS


@pytest.mark.slow_but("one process")
@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")], ids=["one process", "several processes"])
def test_running_requests_are_answered_in_full(checkpoint: Path, flags: tuple[str, ...]) -> None:
    with loaded_server(checkpoint, "--drain-timeout", "600", *flags, all_read=True) as (server, streams):
        children = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(signal.SIGTERM)
        ends = Counter(each.result(120) for each in streams)
        assert server.wait(SECONDS_TO_CLOSE) == 0
        check_nothing_is_left(server, children)
    assert ends.keys() <= {"length", "error 503"}
    assert ends["length"] >= NUM_OUTPUTS - NUM_UNREAD


def ask_until_refused(server: ServerProcess) -> None:
    """One of several processes may learn of the signal later than the one that answered /ready."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    while True:
        client.completions.create(**LONG).close()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")], ids=["one process", "several processes"])
def test_a_second_sigterm_ends_the_server_at_once(checkpoint: Path, flags: tuple[str, ...]) -> None:
    with loaded_server(checkpoint, "--drain-timeout", "300", *flags) as (server, streams):
        children = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(signal.SIGTERM)
        server.wait_for_readiness(503, SECONDS_TO_CLOSE)
        with pytest.raises(openai.InternalServerError):
            ask_until_refused(server)
        server.send_signal(signal.SIGTERM)
        assert server.wait(SECONDS_TO_CLOSE) == 0
        check_nothing_is_left(server, children)
        assert {each.result(SECONDS_TO_CLOSE) for each in streams} <= {"length", "error", "error 503"}


class NothingRuns:
    """An application without requests."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody asks")

    async def drain(self, timeout_s: float, is_forced: Callable[[], bool]) -> None:
        pass


class MayNotRun(DrainingServer):
    async def main_loop(self) -> None:
        raise AssertionError("the signal was lost")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_event_loop_runs_ends_the_server(number: int) -> None:
    nothing = NothingRuns()
    settings = ServerSettings(port=0)
    server = MayNotRun(nothing, nothing, settings, budget_of(settings), None)
    with contextlib.closing(listen(settings)) as listener:
        server.answer(listener, lambda: os.kill(os.getpid(), number))
