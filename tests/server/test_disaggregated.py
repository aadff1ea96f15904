"""Two servers behind a router, one for long prompts: their answers are those of one server."""

from __future__ import annotations

import json
import re
import signal
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
    with (
        serving(str(folder), *flags) as prefill,
        serving(str(folder), *flags) as decode,
        routing([prefill.url], [decode.url], min_remote_prefill=MIN_TOKENS) as http,
    ):
        http.headers["authorization"] = f"Bearer {KEY}"
        yield Setup(prefill, decode, http)


def loaded_tokens(server: ServerProcess) -> int:
    """Return the tokens whose keys and values a server has had from another one."""
    text = httpx.get(f"{server.url}/metrics", headers={"x-api-key": KEY}).text
    (value,) = re.findall(r"^moeserve_external_prefix_cache_hits_total{.*} (.*)$", text, re.MULTILINE)
    return int(float(value))


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


def test_requests_are_served_after_the_prefill_server_was_killed(setup: Setup) -> None:
    path = "/v1/completions"
    expected = outputs_of(setup.http.post(path, json=salted(path, "before")))
    setup.prefill.send_signal(signal.SIGKILL)
    setup.prefill.wait(30)
    before = loaded_tokens(setup.decode)
    for salt in ("after", "later"):
        assert outputs_of(setup.http.post(path, json=salted(path, salt))) == expected
    assert loaded_tokens(setup.decode) == before
