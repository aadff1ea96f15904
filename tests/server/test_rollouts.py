"""The routes for trainers: only with `rl` and an administrator's key; names and payloads of vLLM."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from running_server import MODEL, RunningServer, running
from server_process import serving

from moeserve import AsyncLLM

ADMIN = {"Authorization": "Bearer admin"}
ROUTES = [("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    from tiny_model import save_tiny_model

    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    llm = AsyncLLM(folder, dtype="float32", max_model_len=512, rl=True, show_progress=False)
    with running(llm, api_key=["user"], admin_key=["admin"]) as server:
        yield server
    llm.shutdown()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_routes_need_the_setting_and_the_key(
    server: RunningServer, tiny_server: RunningServer, method: str, path: str
) -> None:
    with server.http() as http:
        assert http.request(method, path).status_code == 401
        refused = http.request(method, path, headers={"Authorization": "Bearer user"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "administrator_required")
        assert http.request(method, path, headers=ADMIN).status_code == 200
        http.post("/resume", headers=ADMIN)
    with tiny_server.http() as http:
        assert http.request(method, path).status_code == 404


def test_a_pause_aborts_and_later_requests_wait(server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": [3, 1, 4], "max_tokens": 500, "ignore_eos": True, "stream": True}
    with server.http(headers=ADMIN) as http:
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert http.post("/pause").json() == {"status": "paused"}
            assert '"finish_reason":"abort"' in "".join(lines)
        assert http.get("/is_paused").json() == {"is_paused": True}
        answers: list[Any] = []
        short = {"model": MODEL, "prompt": [3, 1, 4], "max_tokens": 2}

        def ask() -> None:
            with server.http(headers=ADMIN) as other:
                answers.append(other.post("/v1/completions", json=short).json())

        thread = threading.Thread(target=ask)
        thread.start()
        assert http.post("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
        assert not answers
        assert http.post("/resume").json() == {"status": "resumed"}
        thread.join()
        assert answers[0]["choices"][0]["finish_reason"] == "length"
        assert http.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("query", ["mode=stop", "mode=", "clear_cache=2", "mode=keep&mode=stop"])
def test_wrong_arguments_are_refused(server: RunningServer, query: str) -> None:
    with server.http(headers=ADMIN) as http:
        assert http.post(f"/pause?{query}").status_code == 400
        assert http.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.slow
def test_several_processes_pause_one_engine(default_cache: Any) -> None:
    flags = ["--max-model-len", "512", "--kv-cache-memory", "64MiB", "--api-server-count", "2", "--rl"]
    with serving(*flags, "--admin-key", "admin") as server:
        for _ in range(4):  # requests reach both processes
            assert server.post("/pause?mode=wait", "admin") == 200
            assert server.post("/resume", "admin") == 200
