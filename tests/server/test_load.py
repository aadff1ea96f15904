"""Servers under load: recorded traffic while a rank is killed, more load than they can carry, and many streams."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import httpx2 as httpx
import pytest
from rank_processes import living_ranks
from server_process import Holdings, ServerProcess, serving, wait_until
from tiny_model import save_tiny_model

from moeserve.bench import serve
from moeserve.planner.traffic import RecordedRequest, Traffic, fixed_traffic, sample_traffic

SECONDS_TO_TURN = 60.0
SECONDS_TO_RECOVER = 120.0
LENGTH = 0.02  # the traffic's prompts have 12,000 tokens and its outputs 350, on average
MAX_PROMPT, MIN_OUTPUT, MAX_OUTPUT = 400, 30, 100
VOCAB_SIZE = 256  # of the tiny model's tokens, those that stand for bytes

# A server may not keep more of a request than this: less than its prompt, or an object for each of its tokens.
BYTES_PER_REQUEST = 1024
NUM_FREE_BYTES = 4 * 2**20  # for allocators, whose fragments differ from one moment to the next
NUM_FREE_RANK_BYTES = 32 * 2**20  # new ranks keep captured steps of more and more sizes, up to a number
NUM_FREE_THREADS = 4  # pools of threads grow up to a limit


def recorded_requests(number: int, seed: int) -> tuple[list[RecordedRequest], list[list[int]]]:
    """Return requests with the lengths, common prefixes and intervals of recorded traffic, and their prompts."""
    scaled = sample_traffic().scaled(length=LENGTH)
    requests = tuple(
        dataclasses.replace(
            each,
            prompt_tokens=min(each.prompt_tokens, MAX_PROMPT),
            output_tokens=min(max(each.output_tokens, MIN_OUTPUT), MAX_OUTPUT),
            prefix_blocks=tuple(seed + block for block in each.prefix_blocks),
        )
        for each in scaled.requests
    )
    taken = serve.take(Traffic(requests, scaled.tokens_per_block), number)
    return taken, serve.draw_prompts(taken, VOCAB_SIZE)


def replay(server: ServerProcess, number: int, rate: float, seed: int) -> None:
    """Send recorded traffic, and check that every request is served in full."""
    requests, prompts = recorded_requests(number, seed)
    arrivals = serve.arrivals_at(requests, rate)
    answers, _ = asyncio.run(serve.load(f"{server.url}/v1", requests, prompts, arrivals=arrivals))
    assert [answer.error for answer in answers if answer.error is not None] == []
    assert [answer.num_output for answer in answers] == [request.output_tokens for request in requests]


def replay_with_kill(server: ServerProcess, number: int, rate: float, seed: int) -> None:
    """Replay traffic, and kill a rank in the middle of it: when a quarter of the requests has ended, and some run."""
    failures: list[Exception] = []
    num_before = server.metric("request_success_total")

    def kill() -> None:
        try:
            wait_until(lambda: server.metric("request_success_total") >= num_before + number / 4)
            wait_until(lambda: server.metric("num_requests_running") > 0)
            living_ranks(server.pid)[-1].send_signal(signal.SIGKILL)
            turned = server.wait_for_readiness(503, SECONDS_TO_TURN)
            recovered = server.wait_for_readiness(200, SECONDS_TO_RECOVER)
            print(f"/ready: 503 after {turned:.2f} s, 200 after another {recovered:.2f} s")
        except Exception as error:
            failures.append(error)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        replay(server, number, rate, seed)
    finally:
        killer.join()
    if failures:
        raise failures[0]


def assert_flat(before: Holdings, after: Holdings, num_requests: int) -> None:
    print(f"{before}\n{after}\n{(after.num_bytes - before.num_bytes) / num_requests:.0f} bytes per request")
    assert after.num_bytes - before.num_bytes <= NUM_FREE_BYTES + BYTES_PER_REQUEST * num_requests
    assert after.num_rank_bytes - before.num_rank_bytes <= NUM_FREE_RANK_BYTES
    assert after.num_files <= before.num_files
    assert after.num_threads <= before.num_threads + NUM_FREE_THREADS
    assert after.num_processes == before.num_processes


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_requests", "rate"),
    [(200, 20.0), pytest.param(4000, 400 / 60, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)
def test_recorded_traffic_and_a_killed_rank(tmp_path: Path, num_requests: int, rate: float) -> None:
    """Every request is served in full, and what the server holds does not grow. In soak: 10 minutes."""
    flags = ["--dtype=float32", "-dp=2", "--on-failure=restart", "--num-threads=1", "--kv-cache-memory=4MiB"]
    with serving(str(save_tiny_model(tmp_path)), *flags) as server:
        replay_with_kill(server, num_requests // 4, rate, seed=0)
        replay(server, num_requests // 4, rate, seed=1000)
        before = server.holdings()
        replay(server, num_requests // 2, rate, seed=2000)
        assert_flat(before, server.holdings(), num_requests // 2)


class HealthProbe:
    """Measures how long /health takes, while it is entered."""

    def __init__(self, server: ServerProcess) -> None:
        self.seconds: list[float] = []
        self._url = f"{server.url}/health"
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with httpx.Client(timeout=60.0) as client:
            while not self._is_done.wait(0.01):
                sent_at = time.perf_counter()
                assert client.get(self._url).status_code == 200
                self.seconds.append(time.perf_counter() - sent_at)

    def __enter__(self) -> HealthProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()


@dataclasses.dataclass(frozen=True)
class Ended:
    """The answer to a request."""

    status: int
    retry_after: str
    seconds: float


async def answers_at(url: str, rate: float, seconds: float, most_waiting: list[int]) -> Sequence[Ended]:
    """Send requests at a rate, whether or not earlier ones have ended."""
    body = {"prompt": [1, 2, 3], "max_tokens": 32, "ignore_eos": True}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:

        async def send(delay_s: float) -> Ended:
            await asyncio.sleep(delay_s)
            sent_at = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=body) as response:
                await response.read()
                return Ended(response.status, response.headers.get("Retry-After", ""), time.perf_counter() - sent_at)

        async def watch() -> None:
            while True:
                async with session.get(f"{url}/status") as response:
                    most_waiting.append((await response.json())["queued"])
                await asyncio.sleep(0.1)

        watching = asyncio.create_task(watch())
        try:
            return await asyncio.gather(*(send(index / rate) for index in range(int(rate * seconds))))
        finally:
            watching.cancel()


@pytest.mark.slow
def test_ten_times_more_than_it_can_carry(default_cache: Path) -> None:
    """Requests are served or refused, and those that need no queue are answered before those that pass through it."""
    max_running, max_waiting = 5, 12  # max_num_seqs and a quarter more
    flags = ["--max-num-seqs=4", f"--max-waiting={max_waiting}", "--max-model-len=256", "--kv-cache-memory=64MiB"]
    with serving(*flags) as server:
        requests = fixed_traffic(3, 32).requests * 32
        prompts = [[1, 2, 3]] * len(requests)
        answers, seconds = asyncio.run(serve.load(f"{server.url}/v1", requests, prompts, num_clients=8))
        capacity = len(answers) / seconds
        most_waiting: list[int] = []
        with HealthProbe(server) as probe:
            found = asyncio.run(answers_at(server.url, 10 * capacity, 10.0, most_waiting))
        counts = collections.Counter(each.status for each in found)
        seconds_served = statistics.median(each.seconds for each in found if each.status == 200)
        print(
            f"{capacity:.1f} requests per second can be served; {dict(counts)}; those that were served took "
            f"{seconds_served:.2f} s (median); /health: median "
            f"{1000 * statistics.median(probe.seconds):.1f} ms, longest {1000 * max(probe.seconds):.1f} ms, "
            f"{len(probe.seconds)} samples"
        )
        assert counts.keys() == {200, 429}
        assert counts[200] >= max_running + max_waiting
        assert all(1 <= int(each.retry_after) <= 60 for each in found if each.status == 429)
        assert 0 < max(most_waiting) <= max_waiting
        assert statistics.median(each.seconds for each in found if each.status == 429) < seconds_served
        # Other tests share the cores, so times are compared with each other alone.
        assert statistics.quantiles(probe.seconds, n=100)[-1] < seconds_served
        assert len(probe.seconds) > 20


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_256_streams(default_cache: Path) -> None:
    """256 concurrent streams on the default model."""
    num_streams, num_tokens = 256, 64
    flags = ["--max-num-seqs=256", "--max-model-len=256", "--kv-cache-memory=1GiB"]
    with serving(*flags) as server:

        def wave(number: int) -> None:
            requests = fixed_traffic(32, num_tokens).requests * num_streams
            prompts = [[100 + number, *([7 + index] * 31)] for index in range(num_streams)]
            answers, seconds = asyncio.run(serve.load(f"{server.url}/v1", requests, prompts, num_clients=num_streams))
            assert {answer.error for answer in answers} == {None}
            assert {answer.num_output for answer in answers} == {num_tokens}
            print(f"{num_streams * num_tokens / seconds:.0f} tokens per second; {server.holdings()}")

        for number in range(3):
            wave(number)
        before = server.holdings()
        for number in range(3, 9):
            wave(number)
        assert_flat(before, server.holdings(), 6 * num_streams)
