"""Two servers behind a router, one for long prompts: their answers are those of one server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest
from server_process import ServerProcess, serving
from stand_in_servers import routing
from tiny_model import save_tiny_model

BLOCK_SIZE = 4
MIN_TOKENS = 30
KEY = "secret"
KEPT_S = 6  # seconds for which blocks are kept
LONG = "Once upon a time, there was a prompt of more than thirty tokens. " * 4
SAMPLING = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**SAMPLING, "prompt": LONG, "n": 2},
    "/v1/chat/completions": {
        **SAMPLING,
        "logprobs": True,
        "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "Continue."}],
    },
}


@dataclass(frozen=True)
class Setup:
    prefill: ServerProcess
    decode: ServerProcess
    http: httpx.Client  # of the router before them


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    flags = ["--dtype", "float32", "--max-model-len", "512", "--block-size", str(BLOCK_SIZE), "--num-threads", "1"]
    flags += ["--kv-cache-memory", "16MiB", "--kv-transfer-address", "127.0.0.1", "--api-key", KEY]
    flags += ["--kv-transfer-timeout", str(KEPT_S)]
    with (
        serving(str(folder), *flags) as prefill,
        serving(str(folder), *flags) as decode,
        routing([prefill.url], [decode.url], min_remote_prefill=MIN_TOKENS) as http,
    ):
        http.headers["authorization"] = f"Bearer {KEY}"
        yield Setup(prefill, decode, http)


def metric(server: ServerProcess, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", headers={"x-api-key": KEY}, timeout=60.0).text
    (value,) = re.findall(rf"^moeserve_{name}{{.*}} (.*)$", text, re.MULTILINE)
    return float(value)


def loaded_tokens(server: ServerProcess) -> int:
    """Return the tokens whose keys and values a server has had from another one."""
    return int(metric(server, "external_prefix_cache_hits_total"))


def outputs_of(answer: httpx.Response) -> list[tuple[str, list[float], str]]:
    """Return the text, the log-probabilities and the finish reason of each output."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/json":
        choices = answer.json()["choices"]
    else:
        *events, end = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert end == "[DONE]"
        choices = [choice for each in events for choice in json.loads(each)["choices"]]
    outputs: dict[int, tuple[str, list[float], str]] = {}
    for choice in choices:
        text, logprobs, reason = outputs.get(choice["index"], ("", [], ""))
        message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        found = choice["logprobs"] or {}
        new = found.get("token_logprobs") or [each["logprob"] for each in found.get("content") or []]
        text += message.get("content") or ""
        outputs[choice["index"]] = (text, logprobs + new, choice["finish_reason"] or reason)
    return [outputs[index] for index in sorted(outputs)]


def salted(path: str, salt: str) -> dict[str, Any]:
    """Return a body whose prompt no server has cached."""
    return {**BODIES[path], "cache_salt": salt}


@pytest.mark.slow_but("chat/completions-True")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(BODIES))
def test_answers_are_those_of_one_server(setup: Setup, path: str, stream: bool) -> None:
    body = {**salted(path, str(stream)), "stream": stream}
    expected = httpx.post(f"{setup.decode.url}{path}", json=body, headers={"x-api-key": KEY}, timeout=60.0)
    before = loaded_tokens(setup.decode)
    answer = setup.http.post(path, json={**body, "cache_salt": f"new {stream}"})
    assert outputs_of(answer) == outputs_of(expected)
    assert (
        loaded_tokens(setup.decode) - before >= (len(LONG) - 1) // BLOCK_SIZE * BLOCK_SIZE
    )  # the last token is computed
    assert loaded_tokens(setup.prefill) == 0


def test_a_wrong_key_or_parameter_is_answered_by_the_prefill_server(setup: Setup) -> None:
    body = {**BODIES["/v1/completions"], "top_p": 7}
    assert setup.http.post("/v1/completions", json=body).json()["error"]["param"] == "top_p"
    answer = setup.http.post("/v1/completions", json=body, headers={"authorization": "Bearer wrong"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.slow
def test_nothing_remains_of_requests_that_hang_up(setup: Setup) -> None:
    """Clients hang up in prefill, in between, while blocks are read, and while tokens are generated."""
    chance = random.Random(6)
    before = loaded_tokens(setup.decode)

    async def send(http: httpx.AsyncClient, number: int) -> None:
        body = salted("/v1/completions", f"churn {number}") | {"max_tokens": 40, "stream": True}
        timeout = chance.choice([0.02, 0.1, 0.3, 1.0, 60.0])
        with contextlib.suppress(httpx.TimeoutException, asyncio.TimeoutError):
            await asyncio.wait_for(http.post("/v1/completions", json=body), timeout)

    async def send_all() -> None:
        async with httpx.AsyncClient(base_url=setup.http.base_url, headers=setup.http.headers, timeout=60) as http:
            for number in range(0, 60, 6):
                await asyncio.gather(*(send(http, each) for each in range(number, number + 6)))

    asyncio.run(send_all())
    assert loaded_tokens(setup.decode) > before
    deadline = time.monotonic() + KEPT_S + 60
    for server in (setup.prefill, setup.decode):
        while metric(server, "kv_cache_usage_perc") > 0:
            assert time.monotonic() < deadline
            body = {"prompt": "x", "max_tokens": 1}  # engines without requests look at nothing
            httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-api-key": KEY}, timeout=60.0)
            time.sleep(0.1)


def test_requests_are_served_after_the_prefill_server_was_killed(setup: Setup) -> None:
    path = "/v1/completions"
    expected = outputs_of(setup.http.post(path, json=salted(path, "before")))
    setup.prefill.send_signal(signal.SIGKILL)
    setup.prefill.wait(30)
    before = loaded_tokens(setup.decode)
    for salt in ("after", "later"):
        assert outputs_of(setup.http.post(path, json=salted(path, salt))) == expected
    assert loaded_tokens(setup.decode) == before
