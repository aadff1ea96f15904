"""The access log: one line for each request, in a form that clients cannot forge."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest
from running_server import MODEL, RunningServer
from server_process import wait_until

from moeserve.processes.logs import JsonFormatter
from moeserve.server.middleware import access_log, start_access_log

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[io.StringIO]:
    caplog.set_level(logging.INFO, logger=access_log.name)
    start_access_log()
    (handler,) = access_log.handlers
    assert isinstance(handler, logging.StreamHandler)
    written = io.StringIO()
    handler.setStream(written)
    yield written
    access_log.removeHandler(handler)
    access_log.propagate = True


def wait_for_lines(log: io.StringIO, num_lines: int) -> list[str]:
    """Return the lines of requests, sorted: each is written after its answer was sent, maybe after the next one's."""
    wait_until(lambda: log.getvalue().count("\n") >= num_lines)
    return sorted(log.getvalue().splitlines(), key=lambda line: line.split('"')[1])


def test_each_request_has_one_line(server: RunningServer, log: io.StringIO) -> None:
    with server.http() as http:
        body = {"model": MODEL, "prompt": "One, two,", "max_tokens": 3}
        http.post("/v1/completions", json=body, headers={"x-request-id": "first"})
        http.get("/none%0A2026-01-01 127.0.0.1", headers={"x-request-id": "a b"})
    expected = (
        rf'{TIME} 127\.0\.0\.1 "GET /none%0A2026-01-01%20127.0.0.1" 404 \d+\.\d{{3}} s [0-9a-f]{{24}}',
        rf'{TIME} 127\.0\.0\.1 "POST /v1/completions" 200 \d+\.\d{{3}} s first',
    )
    lines = wait_for_lines(log, len(expected))
    assert len(lines) == len(expected), lines
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def test_requests_of_monitors_have_no_line(server: RunningServer, log: io.StringIO) -> None:
    with server.http() as http:
        for path in ("/health", "/ready", "/ping", "/metrics", "/status"):
            assert http.get(path).status_code == 200
        http.get("/version", headers={"x-request-id": "last"})
    (line,) = wait_for_lines(log, 1)
    assert "/version" in line


def test_lines_of_json_have_the_same_members(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=access_log.name)
    with server.http() as http:
        http.get("/none", headers={"x-request-id": "last"})
    wait_until(lambda: bool(caplog.records))
    line = json.loads(JsonFormatter("API process 1").format(caplog.records[-1]))
    assert line.pop("seconds") >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    assert "GET /none" in line.pop("message")
    assert line == {
        "level": "info",
        "logger": "moeserve.access",
        "process": "API process 1",
        "client": "127.0.0.1",
        "method": "GET",
        "path": "/none",
        "status": 404,
        "request_id": "last",
    }
