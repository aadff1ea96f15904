"""The access log: one line for each request, in a form that clients cannot forge."""

from __future__ import annotations

import io
import logging
import re
import time
from collections.abc import Iterator

import pytest
from running_server import MODEL, RunningServer

from moeserve.server.middleware import access_log, start_access_log

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    start_access_log()
    (handler,) = access_log.handlers
    assert isinstance(handler, logging.StreamHandler)
    written = io.StringIO()
    handler.setStream(written)
    yield written
    access_log.removeHandler(handler)


def test_each_request_has_one_line(server: RunningServer, log: io.StringIO) -> None:
    with server.http() as http:
        body = {"model": MODEL, "prompt": "One, two,", "max_tokens": 3}
        http.post("/v1/completions", json=body, headers={"x-request-id": "first"})
        http.get("/none%0A2026-01-01 127.0.0.1", headers={"x-request-id": "a b"})
        http.get("/health", headers={"x-request-id": "last"})
    deadline = time.monotonic() + 60
    while not log.getvalue().endswith(" last\n"):  # a line is written after the answer was sent
        assert time.monotonic() < deadline
        time.sleep(0.01)
    *lines, _ = log.getvalue().splitlines()
    expected = (
        rf'{TIME} 127\.0\.0\.1 "POST /v1/completions" 200 \d+\.\d{{3}} s first',
        rf'{TIME} 127\.0\.0\.1 "GET /none%0A2026-01-01%20127.0.0.1" 404 \d+\.\d{{3}} s [0-9a-f]{{24}}',
    )
    assert len(lines) == len(expected), lines
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line
