"""A rank is killed while the server runs: readiness turns, requests continue, and the service is whole again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from rank_processes import living_ranks
from running_server import MODEL, RunningServer, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM

pytestmark = pytest.mark.ranks

SECONDS_TO_TURN = 60.0
SECONDS_TO_RECOVER = 120.0
PROMPTS = [[3, 5, 7, index] for index in range(6)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    llm = AsyncLLM(
        save_tiny_model(tmp_path_factory.mktemp("tiny")),
        dtype="float32",
        data_parallel_size=2,
        on_failure="restart",
        num_threads=1,
        show_progress=False,
    )
    with running(llm) as server:
        yield server
    llm.shutdown()


def wait_for_status(server: RunningServer, status: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    with server.http() as http:
        while http.get("/ready").status_code != status:
            assert time.monotonic() < deadline, f"/ready is not {status} after {seconds} s"
            time.sleep(0.02)


def kill_a_rank(server: RunningServer) -> None:
    living_ranks()[-1].send_signal(signal.SIGKILL)
    wait_for_status(server, 503, SECONDS_TO_TURN)


async def ask_all(server: RunningServer, on_first: Callable[[], None] = lambda: None) -> list[str]:
    async with server.async_openai() as client:

        async def ask(prompt: list[int]) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=300, temperature=1.0, seed=1, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            texts: list[str] = []
            async for chunk in stream:
                if not texts and prompt is PROMPTS[0]:
                    await asyncio.to_thread(on_first)
                texts.append(chunk.choices[0].text)  # may be empty
            return "".join(texts)

        return await asyncio.gather(*(ask(prompt) for prompt in PROMPTS))


def test_requests_continue_after_a_kill(server: RunningServer) -> None:
    expected = asyncio.run(ask_all(server))
    assert asyncio.run(ask_all(server, lambda: kill_a_rank(server))) == expected
    wait_for_status(server, 200, SECONDS_TO_RECOVER)


def test_an_idle_server_recovers_by_itself(server: RunningServer) -> None:
    wait_for_status(server, 200, SECONDS_TO_RECOVER)
    kill_a_rank(server)
    wait_for_status(server, 200, SECONDS_TO_RECOVER)
    assert server.openai().completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=2).usage
