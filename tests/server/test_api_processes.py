"""Several processes that speak HTTP for one engine: one service to its clients, also when a process is killed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import openai
import psutil
import pytest
from rank_processes import living_ranks
from tiny_model import save_tiny_model

pytestmark = pytest.mark.ranks

NUM_REQUESTS = 24  # each has its own connection: all reach the same one of two processes once in 2**23 runs


class Serving:
    """`moeserve serve` with two API processes, as a process of its own."""

    def __init__(self, folder: Path) -> None:
        flags = "--api-server-count 2 --port 0 --data-parallel-size 2 --on-failure restart --dtype float32"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moeserve", "serve", str(folder), *flags.split(), "--num-threads", "1"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        lines = iter(self.process.stderr.readline, "")
        address = next((found for line in lines if (found := re.search(r"serving (\S+) at (\S+)/v1", line))), None)
        assert address is not None
        self.model, self.url = address[1], address[2]

    def api_process(self, index: int) -> psutil.Process:
        name = f"API process {index}"
        return next(each for each in psutil.Process(self.process.pid).children(recursive=True) if each.name() == name)

    def ask(self, **options: object) -> openai.types.Completion:
        """Send a request over a connection of its own."""
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            request = {"model": self.model, "prompt": [3, 5, 7], "max_tokens": 20, "extra_body": {"ignore_eos": True}}
            answer = client.completions.create(**request | options)
            assert isinstance(answer, openai.types.Completion)
            return answer

    def end(self) -> str:
        """Wait for the end. Return what was printed since the start."""
        assert self.process.stderr is not None
        with self.process.stderr as errors:
            printed = errors.read()
        self.process.wait(20)
        return printed


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(save_tiny_model(tmp_path))
    yield serving
    serving.process.kill()
    serving.process.wait()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_service(serving: Serving) -> None:
    with ThreadPoolExecutor(8) as threads:
        texts = [answer.choices[0].text for answer in threads.map(lambda _: serving.ask(), range(NUM_REQUESTS))]
        seeded = threads.map(lambda _: serving.ask(seed=1, max_tokens=300), range(NUM_REQUESTS))
        expected = next(seeded).choices[0].text
        living_ranks(serving.process.pid)[-1].send_signal(signal.SIGKILL)  # the requests continue
        assert {answer.choices[0].text for answer in seeded} == {expected}
    assert len(set(texts)) == NUM_REQUESTS, "processes must not use the same random numbers"

    def metric(name: str) -> float:
        text = httpx.get(f"{serving.url}/metrics").text
        return sum(map(float, re.findall(rf"^moeserve_{name}{{.*}} (\S+)$", text, re.MULTILINE)))

    # Each answer is of one of the processes, and has the totals of both.
    num_tokens = NUM_REQUESTS * (20 + 300)
    wait_until(lambda: all(metric("generation_tokens_total") == num_tokens for _ in range(NUM_REQUESTS)))

    def num_running() -> int:
        return sum(replica["running"] for replica in httpx.get(f"{serving.url}/status").json()["replicas"])

    body = {"model": serving.model, "prompt": [3], "max_tokens": 1000, "n": 4, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{serving.url}/v1/completions", json=body):
        wait_until(lambda: num_running() == 4)
    wait_until(lambda: num_running() == 0)


def test_an_api_process_that_is_killed_is_named(serving: Serving) -> None:
    serving.api_process(1).send_signal(signal.SIGKILL)
    assert "API process 1: killed by SIGKILL" in serving.end()
    assert serving.process.returncode == 1


def test_sigterm_lets_requests_finish(serving: Serving) -> None:
    children = psutil.Process(serving.process.pid).children(recursive=True)
    all_run = threading.Barrier(NUM_REQUESTS, action=lambda: serving.process.send_signal(signal.SIGTERM))

    def ask(_: int) -> int:
        body = {"model": serving.model, "prompt": [3], "max_tokens": 400, "stream": True, "ignore_eos": True}
        options = {"stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{serving.url}/v1/completions", json=body | options, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            all_run.wait(60)
            *_, last, end = (line for line in lines if line)
            assert end == "data: [DONE]"
            return json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"]

    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        assert set(threads.map(ask, range(NUM_REQUESTS))) == {400}
    printed = serving.end().splitlines()
    assert [line for line in printed if '"POST /v1/completions" 200' not in line] == []  # the access log alone
    assert len(printed) == NUM_REQUESTS
    assert serving.process.returncode == 0
    assert not psutil.wait_procs(children, timeout=10)[1]
