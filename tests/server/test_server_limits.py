"""Keys, the queue, and clients that hang up."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from running_server import MODEL, RunningServer, running

from moeserve import AsyncLLM
from moeserve.errors import SettingsError
from moeserve.server.admission import Admission
from moeserve.server.errors import ApiError
from moeserve.server.keys import Keys
from moeserve.server.service import MAX_PREPARED

QUESTION: list[Any] = [{"role": "user", "content": "Count to one hundred."}]
LONG: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "extra_body": {"ignore_eos": True}}


def test_keys(llm: AsyncLLM) -> None:
    with running(llm, api_key=["first", "second"]) as server:
        for key in ("first", "second"):
            assert server.openai(api_key=key).models.list().data
            assert server.anthropic(api_key=key).messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
        with pytest.raises(openai.AuthenticationError):
            server.openai(api_key="third").models.list()
        with pytest.raises(anthropic.AuthenticationError):
            server.anthropic(api_key="third").messages.count_tokens(model=MODEL, messages=QUESTION)
        with server.http() as http:
            assert http.get("/v1/models").status_code == 401
            assert [http.get(path).status_code for path in ("/health", "/ready", "/version")] == [200, 200, 200]


def test_key_files(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\n two \n")
    keys = Keys.read(["zero"], str(tmp_path / "keys"))
    names = {keys.client({"authorization": f"Bearer {key}"}) for key in ("zero", "one", "two")}
    assert len(names) == 3
    assert None not in names
    assert keys.client({"x-api-key": "one"}) in names
    assert keys.client({"authorization": "Bearer three"}) is None
    assert keys.client({}) is None
    (tmp_path / "keys").write_text("\n")
    for path in ("keys", "missing"):
        with pytest.raises(SettingsError, match=path):
            Keys.read([], str(tmp_path / path))
    with pytest.raises(SettingsError):
        Keys.read(["two words"], None)


def test_a_full_queue_is_answered_at_once(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is generated before others are refused."""
    num_requests, num_served = 30, 10 + 4  # max_num_seqs, a quarter more, and those that wait
    num_refused, are_refused, generate = 0, threading.Event(), llm.generate

    async def held_up(*args: Any) -> AsyncIterator[Any]:
        deadline = time.monotonic() + 200
        while not are_refused.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        async with contextlib.aclosing(generate(*args)) as outputs:
            async for output in outputs:
                yield output

    monkeypatch.setattr(llm, "generate", held_up)
    with running(llm, max_waiting=4) as server:

        async def run() -> list[int]:  # seconds to wait; 0: an answer
            async with server.async_openai() as client:

                async def ask() -> int:
                    nonlocal num_refused
                    try:
                        await client.chat.completions.create(**LONG | {"max_tokens": 4}, messages=QUESTION)
                    except openai.RateLimitError as error:
                        num_refused += 1
                        if num_refused == num_requests - num_served:
                            are_refused.set()
                        return int(error.response.headers["retry-after"])
                    return 0

                return await asyncio.gather(*(ask() for _ in range(num_requests)))

        seconds = asyncio.run(run())
        assert seconds.count(0) == num_served
        assert all(1 <= each <= 60 for each in seconds if each)


def test_conversations_of_one_key_do_not_hold_up_another(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second key's conversation is rendered soon, though many of the first key's came before it."""
    num_first = 10
    rendered: list[str] = []  # the keys' clients, in the order in which their conversations were rendered
    second_has_arrived = asyncio.Event()

    async def run(server: RunningServer) -> None:
        question: dict[str, Any] = {"model": MODEL, "messages": QUESTION}
        async with server.async_openai(api_key="first") as first, server.async_anthropic(api_key="second") as second:
            asked = [first.chat.completions.create(**question, max_tokens=1) for _ in range(num_first)]
            asking = asyncio.gather(*asked)
            while server.service.preparation.num_waiting < num_first - MAX_PREPARED:
                await asyncio.sleep(0.001)
            await second.messages.count_tokens(**question)
            await asking

    with running(llm, api_key=["first", "second"]) as server:
        admitted, chat_prompt = server.service.preparation.admitted, server.service.chat_prompt
        clients: list[str] = []  # in the order of their requests

        @contextlib.asynccontextmanager
        async def recorded(client: str, num_outputs: int) -> AsyncIterator[None]:
            clients.append(client)
            if len(clients) > num_first:
                second_has_arrived.set()
            async with admitted(client, num_outputs):
                rendered.append(client)
                yield

        async def held_up(*args: Any, **kwargs: Any) -> list[int]:
            await second_has_arrived.wait()
            return await chat_prompt(*args, **kwargs)

        monkeypatch.setattr(server.service.preparation, "admitted", recorded)
        monkeypatch.setattr(server.service, "chat_prompt", held_up)
        asyncio.run(run(server))
    assert len(rendered) == num_first + 1
    assert rendered.index(clients[-1]) <= MAX_PREPARED + 1  # behind those that were rendered when it came, and one turn


def test_clients_take_turns() -> None:
    order = []

    async def run() -> None:
        admission = Admission(max_running=lambda: 1, max_waiting=100)

        async def request(client: str) -> None:
            async with admission.admitted(client, 1):
                order.append(client)
                await asyncio.sleep(0)

        await asyncio.gather(*(request(client) for client in "aaaaaabbc"))
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    asyncio.run(run())
    assert "".join(order) == "aabcabaaa"


def test_clients_get_equal_numbers_of_outputs() -> None:
    """Clients send all of their requests at once, or each when the one before has ended."""

    async def num_outputs_per_client(num_at_once: int) -> collections.Counter[str]:
        admission = Admission(max_running=lambda: 4, max_waiting=10**6)
        served: collections.Counter[str] = collections.Counter()

        async def client(name: str, num_outputs: int) -> None:
            while True:
                async with admission.admitted(name, num_outputs):
                    served[name] += num_outputs
                    await asyncio.sleep(0)
                await asyncio.sleep(0)

        tasks = [
            asyncio.create_task(client(name, num_outputs))
            for name, num_outputs in (("many", 16), ("some", 3), ("one", 1))
            for _ in range(num_at_once)
        ]
        while served.total() < 3 * 1000:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return served

    served = asyncio.run(num_outputs_per_client(8))
    assert max(served.values()) - min(served.values()) <= 2 * 16, served
    # A client with one request at a time, which is small, cannot use its share, but waits for at most one large one.
    served = asyncio.run(num_outputs_per_client(1))
    assert served["one"] >= served["many"] / 16, served


def test_a_request_with_many_outputs_waits_for_room_and_not_for_an_idle_engine() -> None:
    async def run() -> None:
        admission = Admission(max_running=lambda: 4, max_waiting=1000)
        admitted: list[str] = []
        ends: dict[str, asyncio.Event] = collections.defaultdict(asyncio.Event)

        async def request(name: str, num_outputs: int) -> None:
            async with admission.admitted(name, num_outputs):
                admitted.append(name)
                await ends[name].wait()

        names = [("a", 1), ("b", 1), ("c", 1), ("d", 1), ("large", 128), ("e", 1)]
        tasks = [asyncio.create_task(request(*each)) for each in names]
        for _ in range(5):
            await asyncio.sleep(0)
        assert admitted == ["a", "b", "c", "d"]
        ends["a"].set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert admitted == ["a", "b", "c", "d", "large"]
        assert admission.num_running == 3 + 128
        for name, _ in names:
            ends[name].set()
        await asyncio.gather(*tasks)
        assert admitted[-1] == "e"
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    asyncio.run(run())


def test_cancelled_waiting_requests_leave_no_trace() -> None:
    async def run() -> None:
        chance = random.Random(7)
        admission = Admission(max_running=lambda: 4, max_waiting=10**6)
        most = 0

        async def request(client: str, num_outputs: int) -> None:
            nonlocal most
            async with admission.admitted(client, num_outputs):
                most = max(most, admission.num_running)
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)

        for _ in range(50):
            tasks = [
                asyncio.create_task(request(chance.choice("abc"), chance.choice([1, 1, 2, 4, 7]))) for _ in range(40)
            ]
            for task in tasks:
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
                if chance.random() < 0.5:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert (admission.num_running, admission.num_waiting) == (0, 0)
        assert 7 < most <= 3 + 7  # while there was room for one more output
        admission.close()
        with pytest.raises(ApiError):
            await request("a", 1)

    asyncio.run(run())


def wait_for_all_blocks(server: RunningServer) -> None:
    session = server.llm.session
    deadline = time.monotonic() + 200
    while (
        session.engine.replica_stats[0].num_free_blocks < session.engine.num_blocks
        or server.service.admission.num_running
        or session.frontend._prompts
    ):
        assert time.monotonic() < deadline, "a request was not ended"
        time.sleep(0.01)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_hangs_up_frees_its_blocks(server: RunningServer, is_stream: bool) -> None:
    chance = random.Random(3)

    async def ask(client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(**LONG, messages=QUESTION, stream=is_stream)
        async for _ in answer:
            pass

    async def run() -> None:
        async with server.async_openai() as client:
            tasks = [asyncio.create_task(ask(client)) for _ in range(24)]
            for task in tasks:
                await asyncio.sleep(chance.choice([0, 0.01, 0.05]))
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    wait_for_all_blocks(server)
