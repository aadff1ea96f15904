"""A server whose model is being loaded answers at once."""

from __future__ import annotations

import socket

import httpx2 as httpx

from moeserve.server.loading import answering_while_loading
from moeserve.server.settings import ServerSettings


def test_requests_are_refused_until_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with (
            answering_while_loading(listener.dup(), ServerSettings()),
            httpx.Client(base_url=url, timeout=30.0) as http,
        ):
            assert http.get("/health").status_code == 200
            for answer in (http.get("/ready"), http.post("/v1/completions", json={"prompt": "a"})):
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) > 0
        with socket.create_connection(listener.getsockname()):  # for the server that follows
            listener.settimeout(30)
            listener.accept()[0].close()
