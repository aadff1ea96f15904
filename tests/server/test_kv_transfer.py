"""`kv_transfer_params` in every API: one server computes a prompt, and another one continues it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from running_server import MODEL, RunningServer, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM
from moeserve.server.reply import EVENTS, JSON, SECONDS_TO_HEADERS

BLOCK_SIZE = 4
TEXT = "A prompt of some blocks"
# The prompts differ, so none is cached when another has been continued.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 5, "temperature": 0, "ignore_eos": True},
    "/v1/chat/completions": {
        **{"messages": [{"role": "user", "content": f"In a chat: {TEXT}"}]},
        **{"max_tokens": 5, "temperature": 0, "ignore_eos": True},
    },
    "/v1/responses": {"input": f"For a response: {TEXT}", "max_output_tokens": 5, "temperature": 0},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 5, "temperature": 0},
}
# Fields that differ between equal answers: ids and times, and the number of cached tokens.
CHANGING = {"id", "created", "created_at", "cached_tokens", "cache_read_input_tokens", "input_tokens"}
FOR_REMOTE_DECODE = {"do_remote_decode": True}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, RunningServer]]:
    """Two servers that exchange keys and values."""
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    settings: dict[str, Any] = dict(dtype="float32", max_model_len=128, block_size=BLOCK_SIZE, num_threads=1)
    prefill, decode = (
        AsyncLLM(folder, kv_transfer_address="127.0.0.1", show_progress=False, **settings) for _ in range(2)
    )
    with running(prefill) as first, running(decode) as second:
        yield first, second
    prefill.shutdown()
    decode.shutdown()


def contents(answer: Any) -> Any:
    """Return an answer without what may differ from that of one server."""
    if isinstance(answer, dict):
        return {name: contents(value) for name, value in answer.items() if name not in CHANGING}
    return list(map(contents, answer)) if isinstance(answer, list) else answer


@pytest.mark.parametrize("path", list(BODIES))
def test_a_prompt_is_continued_by_another_server(servers: tuple[RunningServer, RunningServer], path: str) -> None:
    first, second = servers
    body = {"model": MODEL, **BODIES[path]}
    with first.http() as prefill, second.http() as decode:
        kept = prefill.post(path, json=body | {"stream": True, "kv_transfer_params": FOR_REMOTE_DECODE})
        # The answer is no event, unless the server was so slow that it has begun to stream.
        is_slow, media_type = kept.elapsed.total_seconds() > SECONDS_TO_HEADERS, kept.headers["content-type"]
        assert (kept.status_code, media_type) in ((200, JSON), (200, EVENTS if is_slow else JSON))
        answer = json.loads(kept.text.rpartition("data: ")[2]) if media_type == EVENTS else kept.json()
        assert list(answer) == ["kv_transfer_params"]
        params = answer["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        loaded = second.llm.session.engine.replica_stats[0].num_loaded_tokens
        continued = decode.post(path, json=body | {"kv_transfer_params": params})
        assert continued.status_code == 200
        gained = second.llm.session.engine.replica_stats[0].num_loaded_tokens - loaded
        assert params["remote_num_blocks"] * BLOCK_SIZE >= gained >= len(TEXT) // BLOCK_SIZE * BLOCK_SIZE
        assert contents(continued.json()) == contents(prefill.post(path, json=body).json())


def test_many_outputs_continue_one_prompt(servers: tuple[RunningServer, RunningServer]) -> None:
    first, second = servers
    body = {"prompt": TEXT[::-1], "n": 3, "seed": 4, "max_tokens": 6, "ignore_eos": True, "logprobs": 1}
    with first.http() as prefill, second.http() as decode:
        kept = prefill.post("/v1/completions", json=body | {"kv_transfer_params": FOR_REMOTE_DECODE}).json()
        continued = decode.post("/v1/completions", json=body | kept).json()
        assert [choice["text"] for choice in continued["choices"]] == [
            choice["text"] for choice in prefill.post("/v1/completions", json=body).json()["choices"]
        ]
        assert continued["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(TEXT) // BLOCK_SIZE * BLOCK_SIZE


def test_a_prompt_without_a_full_block_is_not_kept(servers: tuple[RunningServer, RunningServer]) -> None:
    with servers[0].http() as http:
        body = {"prompt": "ab", "kv_transfer_params": FOR_REMOTE_DECODE}
        assert http.post("/v1/completions", json=body).json() == {"kv_transfer_params": None}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [TEXT, TEXT], "kv_transfer_params": FOR_REMOTE_DECODE},
        {"prompt": TEXT, "kv_transfer_params": {"do_remote_decode": True, "block_ids": [1]}},
        {"prompt": TEXT, "kv_transfer_params": []},
        {
            "prompt": TEXT,
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "remote_handle": "a",
                "remote_addresses": ["127.0.0.1:1"],
                "remote_num_blocks": len(TEXT) // BLOCK_SIZE + 1,
            },
        },
    ],
)
def test_wrong_transfers_are_refused_by_name(
    servers: tuple[RunningServer, RunningServer], fields: dict[str, Any]
) -> None:
    with servers[0].http() as http:
        answer = http.post("/v1/completions", json=fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")


@pytest.mark.parametrize("path", list(BODIES))
def test_a_server_without_an_address_for_transfers_refuses_them(tiny_server: RunningServer, path: str) -> None:
    body = {"model": MODEL, **BODIES[path], "kv_transfer_params": FOR_REMOTE_DECODE}
    with tiny_server.http() as http:
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert "kv_transfer_params" in error["message"]
        assert "kv_transfer_address" in error["message"]
        if path != "/v1/messages":
            assert (error["param"], error["code"]) == ("kv_transfer_params", "unsupported_parameter")
        assert http.post(path, json=body | {"kv_transfer_params": None}).status_code == 200
