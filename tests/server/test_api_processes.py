"""Several processes that speak HTTP for one engine: one service to its clients, also when a process is killed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import openai
import psutil
import pytest
from free_ports import free_port
from rank_processes import living_ranks
from server_process import ServerProcess, serving, wait_until
from tiny_model import save_tiny_model

pytestmark = pytest.mark.ranks

NUM_REQUESTS = 24  # each has its own connection: all reach the same one of two processes once in 2**23 runs
FLAGS = ["--api-server-count=2", "--data-parallel-size=2", "--on-failure=restart", "--dtype=float32", "--num-threads=1"]
MODEL = "tiny"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with serving(str(save_tiny_model(tmp_path)), "--served-model-name", MODEL, *FLAGS) as server:
        wait_until(lambda: server.num_listeners() == 2)
        yield server


def ask(server: ServerProcess, **options: object) -> str:
    """Send a request over a connection of its own. Return the text of the answer."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        request = {"model": MODEL, "prompt": [3, 5, 7], "max_tokens": 20, "extra_body": {"ignore_eos": True}}
        answer = client.completions.create(**request | options)
        assert isinstance(answer, openai.types.Completion)
        return answer.choices[0].text


@pytest.mark.slow
def test_one_service(server: ServerProcess) -> None:
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda _: ask(server), range(NUM_REQUESTS)))
        seeded = threads.map(lambda _: ask(server, seed=1, max_tokens=300), range(NUM_REQUESTS))
        expected = next(seeded)
        living_ranks(server.pid)[-1].send_signal(signal.SIGKILL)  # the requests continue
        assert set(seeded) == {expected}
    assert len(set(texts)) == NUM_REQUESTS, "processes must not use the same random numbers"

    # Each answer is of one of the processes, and has the totals of both.
    num_tokens = NUM_REQUESTS * (20 + 300)
    wait_until(lambda: all(server.metric("generation_tokens_total") == num_tokens for _ in range(NUM_REQUESTS)))

    body = {"model": MODEL, "prompt": [3], "max_tokens": 500, "n": 4, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body):  # hangs up
        wait_until(lambda: server.metric("num_requests_running") == 4)
    wait_until(lambda: server.metric("num_requests_running") == 0)


def api_processes(server: ServerProcess) -> dict[str, psutil.Process]:
    found: list[tuple[str, psutil.Process]] = []
    for each in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            if (name := each.name()).startswith("API process"):
                found.append((name, each))
    # A process that one of them is about to start has its name for a moment.
    pids = {each.pid for _, each in found}
    return {name: each for name, each in found if parent_of(each) not in pids}


def parent_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.ppid()
    return None


@pytest.mark.slow
def test_an_api_process_that_is_killed_is_replaced(server: ServerProcess) -> None:
    before = api_processes(server)
    body = {"model": MODEL, "prompt": [3], "max_tokens": 500, "stream": True, "ignore_eos": True}
    with ThreadPoolExecutor(8) as threads, contextlib.ExitStack() as streams:
        for _ in range(8):  # some of them to each process
            answer = streams.enter_context(httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60))
            next(answer.iter_lines())
        before["API process 1"].send_signal(signal.SIGKILL)
        wait_until(lambda: "API process 2" in api_processes(server))
        assert len(set(threads.map(lambda _: try_to_ask(server), range(NUM_REQUESTS))) - {None}) > 1
    wait_until(lambda: server.metric("num_requests_running") == 0)
    wait_until(lambda: len({try_to_ask(server) for _ in range(NUM_REQUESTS)} - {None}) == NUM_REQUESTS)
    assert api_processes(server).keys() == {"API process 0", "API process 2"}


@pytest.mark.slow
def test_an_api_process_that_is_stopped_is_replaced_and_holds_up_no_shutdown(server: ServerProcess) -> None:
    wait_until(lambda: server.num_listeners() == 2)
    wait_until(lambda: all(server.metric("generation_tokens_total") >= 0 for _ in range(NUM_REQUESTS)))
    time.sleep(2)  # until each process has sent a note
    api_processes(server)["API process 1"].suspend()
    wait_until(lambda: "API process 2" in api_processes(server) and server.num_listeners() == 2)
    assert "API process 1" not in api_processes(server)
    assert len({ask(server) for _ in range(NUM_REQUESTS)}) == NUM_REQUESTS
    time.sleep(2)
    api_processes(server)["API process 2"].suspend()
    server.send_signal(signal.SIGTERM)
    server.wait(60)


def stop_a_starting_process(server: ServerProcess) -> None:
    """Stop API process 2 as soon as it exists: it has sent nothing yet."""
    api_processes(server)["API process 1"].kill()
    wait_until(lambda: "API process 2" in api_processes(server))
    api_processes(server)["API process 2"].suspend()


@pytest.mark.slow
def test_a_process_that_is_stopped_while_it_starts_is_replaced(server: ServerProcess) -> None:
    stop_a_starting_process(server)
    # On a busy machine, the process that replaces it may take too long too, and be replaced in turn.
    wait_until(lambda: "API process 2" not in api_processes(server) and server.num_listeners() == 2, 150)
    assert len({ask(server) for _ in range(NUM_REQUESTS)}) == NUM_REQUESTS


@pytest.mark.slow
def test_a_process_that_is_stopped_while_it_starts_holds_up_no_shutdown(server: ServerProcess) -> None:
    stop_a_starting_process(server)
    server.send_signal(signal.SIGTERM)
    server.wait(25)  # less than a process has for its start


@pytest.mark.slow
def test_requests_are_refused_while_the_model_is_loaded(tmp_path: Path) -> None:
    """Each request is answered at once, from the start to the first answer of an API process."""
    port = free_port()
    flags = ["--port", str(port), "--served-model-name", MODEL, *FLAGS]
    command = [sys.executable, "-m", "moeserve", "serve", str(save_tiny_model(tmp_path)), *flags]
    statuses: list[int] = []
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while 200 not in statuses and time.monotonic() < deadline:
            with contextlib.suppress(httpx.NetworkError):  # before the port is open
                answer = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5)
                statuses.append(answer.status_code)
                assert answer.status_code == 200 or int(answer.headers["retry-after"]) > 0
        assert statuses.count(503) > 1
        assert statuses[-1] == 200
    finally:
        process.terminate()
        process.wait(60)


def try_to_ask(server: ServerProcess) -> str | None:
    """Return the text of an answer; None if the connection was that of a process that died."""
    try:
        return ask(server)
    except openai.APIConnectionError:
        return None


@pytest.mark.slow
def test_a_server_whose_api_processes_fail_again_and_again_ends(server: ServerProcess) -> None:
    for index in range(1, 4):
        wait_until(lambda name=f"API process {index}": name in api_processes(server))
        api_processes(server)[f"API process {index}"].send_signal(signal.SIGKILL)
    assert server.wait(60) == 1
    assert "API process 3: killed by SIGKILL" in server.errors()
