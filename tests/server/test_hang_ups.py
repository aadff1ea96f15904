"""Clients that hang up at any moment: their requests end, and nothing of them remains."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from typing import Any

import psutil
import pytest
from running_server import MODEL, RunningServer

AT_ONCE = 100  # clients
SECONDS_TO_END = 200.0


async def hang_up(server: RunningServer, chance: random.Random) -> None:
    """Send a request or a part of it, read a part of the answer, and close the connection."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    path = chance.choice(["completions", "chat/completions", "responses"])
    body = {
        "completions": {"prompt": [1, 2, 3], "max_tokens": 50, "ignore_eos": True, "n": chance.choice([1, 1, 4])},
        "chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True},
        "responses": {"input": "Hi"},
    }[path]
    content = json.dumps({**body, "model": MODEL, "stream": chance.random() < 0.7}).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    if chance.random() < 0.1:
        request = request[: chance.randrange(len(request))]
    writer.write(request)
    if chance.random() < 0.7:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(chance.randrange(1, 2000)), chance.random())
    if chance.random() < 0.5:
        writer.transport.abort()  # with a reset
    else:
        writer.close()


@pytest.mark.parametrize("num_clients", [500, pytest.param(5000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_nothing_remains_of_clients_that_hang_up(tiny_server: RunningServer, num_clients: int) -> None:
    chance = random.Random(11)
    process = psutil.Process(os.getpid())

    async def run(number: int) -> None:
        limit = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with limit:
                await hang_up(tiny_server, chance)

        await asyncio.gather(*(one() for _ in range(number)))

    def connections() -> list[Any]:
        port = int(tiny_server.url.rpartition(":")[2])
        found = [each for each in process.net_connections("inet") if each.laddr.port == port]
        return [each for each in found if each.status != psutil.CONN_LISTEN]

    def wait_until_idle() -> tuple[int, int]:
        """Return the open files and threads at rest: no request, no connection, and all blocks free."""
        engine, admission = tiny_server.llm.session.engine, tiny_server.service.admission
        deadline = time.monotonic() + SECONDS_TO_END
        while (
            (stats := engine.replica_stats[0]).num_running
            or stats.num_waiting
            or stats.num_free_blocks < engine.num_blocks
            or admission.num_running
            or admission.num_waiting
            or connections()
        ):
            assert time.monotonic() < deadline, (stats, admission.num_running, admission.num_waiting, connections())
            time.sleep(0.01)
        return process.num_fds(), process.num_threads()

    asyncio.run(run(AT_ONCE))  # opens what stays open
    files, threads = wait_until_idle()
    asyncio.run(run(num_clients))
    files_after, threads_after = wait_until_idle()
    assert threads_after <= threads + 2  # of the pool that tokenizes
    assert files_after <= files + 2
    with tiny_server.http() as http:
        assert http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2}).status_code == 200
