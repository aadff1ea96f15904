"""`POST /scale`: the number of replicas changes while the server answers."""

from __future__ import annotations

import asyncio
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from rank_processes import living_ranks
from server_process import ServerProcess, serving, wait_until
from tiny_model import save_tiny_model

pytestmark = pytest.mark.ranks

FLAGS = ["--dtype=float32", "--num-threads=1", "--allow-scale", "--api-key=secret", "--max-model-len=512"]
HEADERS = {"Authorization": "Bearer secret"}
BODY = {"prompt": [3, 5, 7], "max_tokens": 200, "seed": 1, "ignore_eos": True}


def scale(server: ServerProcess, size: object, headers: dict[str, str] = HEADERS) -> tuple[int, object]:
    answer = httpx.post(f"{server.url}/scale", json={"data_parallel_size": size}, headers=headers, timeout=60)
    return answer.status_code, answer.json()


def replicas_in(text: str) -> set[str]:
    return set(re.findall(r'^moeserve_num_requests_running{engine="(\d+)"', text, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_size_changes_while_the_server_answers(tmp_path: Path, num_processes: int) -> None:
    folder = str(save_tiny_model(tmp_path))

    def complete(_: int) -> str:
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY, headers=HEADERS, timeout=60)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    with serving(folder, *FLAGS, f"--api-server-count={num_processes}") as server, ThreadPoolExecutor(4) as threads:
        expected = complete(0)
        for size in (2, 3, 1):
            answers = threads.map(complete, range(8))
            assert scale(server, size) == (200, {"data_parallel_size": size})
            assert set(answers) == {expected}
            wait_until(lambda size=size: len(living_ranks(server.pid)) == size)
            deadline = time.monotonic() + 200
            while True:
                text = httpx.get(f"{server.url}/metrics", headers=HEADERS, timeout=60).text
                status = httpx.get(f"{server.url}/status", headers=HEADERS, timeout=60).json()
                if len(replicas_in(text)) == len(status["replicas"]) == size:
                    break
                assert time.monotonic() < deadline, (text, status)
                time.sleep(0.05)
            assert f"data_parallel_size={size}" in status["layout"]
        assert scale(server, 0)[0] == scale(server, "two")[0] == scale(server, 10**6)[0] == 400
        assert scale(server, 2, headers={})[0] == 401
        statuses = sorted(status for status, _ in threads.map(lambda size: scale(server, size), (3, 3, 3)))
        assert statuses[0] == 200
        assert set(statuses) <= {200, 409}


@pytest.mark.slow
def test_the_endpoint_is_off_by_default(tmp_path: Path) -> None:
    with serving(str(save_tiny_model(tmp_path)), "--dtype=float32") as server:
        assert scale(server, 2)[0] == 404


@pytest.mark.slow
def test_all_processes_admit_requests_for_new_replicas(tmp_path: Path) -> None:
    """No request ends in this test, so a process admits others only because it has noticed the new number."""
    folder = save_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20_008}))
    body = BODY | {"max_tokens": 20_000, "stream": True}
    flags = ["--kv-cache-memory=64MiB", "--max-num-seqs=1", "--api-server-count=2", "--allow-scale"]
    with serving(str(folder), "--dtype=float32", "--num-threads=1", *flags) as server:
        wait_until(lambda: server.num_listeners() == 2)

        async def stream(client: httpx.AsyncClient) -> None:
            async with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    pass

        def scale_to_four() -> None:
            wait_until(lambda: num_admitted(server) == 2)
            assert scale(server, 4)[0] == 200
            wait_until(lambda: num_admitted(server) == 6)  # each process: half of 1.25 for each replica

        async def run() -> None:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(timeout=600, limits=limits) as client:
                streams = asyncio.gather(*(stream(client) for _ in range(40)))  # the system chooses their process
                await asyncio.to_thread(scale_to_four)
                assert not streams.done()
                streams.cancel()
                await asyncio.wait([streams])

        asyncio.run(run())


def num_admitted(server: ServerProcess) -> float:
    return server.metric("num_requests_running") + server.metric("num_requests_waiting")
