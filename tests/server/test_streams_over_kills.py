"""Ranks are killed one after the other while many clients of several API processes read streams."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from rank_processes import living_ranks
from server_process import ServerProcess, serving, wait_until
from tiny_model import save_tiny_model

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

NUM_STREAMS, NUM_TOKENS = 32, 120
LAYOUTS = {"dp4": ["-dp=4"], "tp2dp2": ["-tp=2", "-dp=2"], "pp2dp2": ["-pp=2", "-dp=2"]}


async def stream(client: httpx.AsyncClient, index: int, tokens: asyncio.Semaphore) -> list[str]:
    """Return the texts of a stream that ends well."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": [3, 5, 7, index],
        "max_tokens": NUM_TOKENS,
        "temperature": 0.7 * (index % 2),
        "seed": index,
        "ignore_eos": True,
        "stream": True,
    }
    texts, reasons, is_done = [], [], False
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                texts.append(choice["text"])
                reasons.append(choice["finish_reason"])
                tokens.release()
    assert is_done
    assert reasons[-1] == "length"
    return texts


async def all_streams(server: ServerProcess, num_kills: int = 0) -> list[str]:
    """Return the texts of all streams, with ranks that are killed after a share of the tokens each."""
    tokens, dice = asyncio.Semaphore(0), random.Random(num_kills)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        streams = [asyncio.ensure_future(stream(client, index, tokens)) for index in range(NUM_STREAMS)]
        for _ in range(num_kills):
            for _ in range(NUM_STREAMS * NUM_TOKENS // (3 * num_kills)):  # an output may have several tokens
                if not all(each.done() for each in streams):
                    await tokens.acquire()
            dice.choice(living_ranks(server.pid)).send_signal(signal.SIGKILL)
        return ["".join(texts) for texts in await asyncio.gather(*streams)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_stream_breaks(tmp_path: Path, layout: str) -> None:
    flags = ["--api-server-count=4", *LAYOUTS[layout], "--dtype=float32", "--num-threads=1", "--max-num-seqs=32"]
    with serving(str(save_tiny_model(tmp_path)), "--served-model-name", "tiny", *flags) as server:
        wait_until(lambda: server.num_listeners() == 4)
        expected = asyncio.run(all_streams(server))
        for num_kills in (1, 2, 1, 2):
            assert asyncio.run(all_streams(server, num_kills)) == expected
    assert server.errors().count("failed ranks are replaced") >= 4
