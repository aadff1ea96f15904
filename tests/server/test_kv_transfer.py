"""`kv_transfer_params` in every API: an engine that exchanges no keys and values refuses them."""

from __future__ import annotations

from typing import Any

import pytest
from running_server import MODEL, RunningServer

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "A long prompt", "stream": True, "n": 4, "max_tokens": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "A long prompt"}], "n": 2, "stream": True},
    "/v1/responses": {"input": "A long prompt", "stream": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "A long prompt"}], "max_tokens": 5, "stream": True},
}
FOR_REMOTE_DECODE = {"do_remote_decode": True}


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
