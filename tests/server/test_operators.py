"""Endpoints for operators, keys of administrators, and the statistics of the last seconds."""

from __future__ import annotations

import json
import logging
import signal
from typing import Any

import pytest
from running_server import MODEL, RunningServer, running
from server_process import serving

from moeserve import AsyncLLM, __version__
from moeserve.server.operators import SHOWN_SETTINGS
from moeserve.server.statistics import Statistics

SHARED_PREFIX = "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen,"


def cached_tokens(http: Any, **options: Any) -> int:
    answer = http.post("/v1/completions", json={"prompt": SHARED_PREFIX, "max_tokens": 1}, **options)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def bearer(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


def test_ping_answers_both_methods_with_nothing(server: RunningServer) -> None:
    with server.http() as http:
        for answer in (http.get("/ping"), http.post("/ping")):
            assert (answer.status_code, answer.content) == (200, b"")


def test_load_counts_running_outputs(server: RunningServer) -> None:
    with server.http() as http, server.openai() as client:
        assert http.get("/load").json() == {"server_load": 0}
        stream = client.completions.create(model=MODEL, prompt="One,", max_tokens=500, n=2, stream=True)
        next(iter(stream))
        assert http.get("/load").json() == {"server_load": 2}
        stream.close()


def test_server_info_names_no_path(server: RunningServer) -> None:
    with server.http() as http:
        info = http.get("/server_info").json()
    assert (info["version"], info["model_names"]) == (__version__, [MODEL])
    assert set(info["config"]) == {*SHOWN_SETTINGS}
    assert info["config"]["max_model_len"] == 1024
    assert "/" not in json.dumps(info)


def test_tokenizer_info_is_served_on_request(llm: AsyncLLM, server: RunningServer) -> None:
    with server.http() as http:
        assert http.get("/tokenizer_info").status_code == 404
    with running(llm, enable_tokenizer_info_endpoint=True) as informing, informing.http() as http:
        info = http.get("/tokenizer_info").json()
    assert llm.codec is not None
    assert info["chat_template"] == llm.codec.chat_template
    assert info["eos_token"] == llm.codec.tokenizer.special_tokens["eos_token"]
    assert isinstance(info["tokenizer_class"], str)
    assert llm.codec.tokenizer.path not in json.dumps(info)


def test_a_reset_hides_all_earlier_prefixes(llm: AsyncLLM) -> None:
    with running(llm, admin_key=["admin"]) as server, server.http() as http:
        cached_tokens(http)
        assert cached_tokens(http) > 0
        assert http.post("/reset_prefix_cache").status_code == 403
        assert http.post("/reset_prefix_cache", **bearer("other")).status_code == 403
        assert cached_tokens(http) > 0
        assert http.post("/reset_prefix_cache", **bearer("admin")).status_code == 200
        assert cached_tokens(http) == 0
        assert cached_tokens(http) > 0


def test_without_an_administrator_nobody_resets(server: RunningServer) -> None:
    with server.http() as http:
        answer = http.post("/reset_prefix_cache", **bearer("none"))
    assert answer.status_code == 403
    assert "--admin-key" in answer.json()["error"]["message"]


def test_administrators_may_send_requests_and_change_replicas(llm: AsyncLLM) -> None:
    with running(llm, api_key=["user"], admin_key=["admin"], allow_scale=True) as server, server.http() as http:
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", **bearer("user")).status_code == 200
        assert http.get("/v1/models", **bearer("admin")).status_code == 200
        body = {"data_parallel_size": 2**20}  # refused by the engine
        assert http.post("/scale", json=body, **bearer("user")).status_code == 403
        assert http.post("/scale", json=body, **bearer("admin")).status_code == 400


def test_rates_are_those_of_the_last_ten_seconds(server: RunningServer) -> None:
    statistics = Statistics(server.service, 0.0)
    for second in range(20):
        statistics.sample(1000.0 + second)
    before = statistics.rates(1019.5)
    assert (before.generated_tokens, before.first_token_s, before.between_tokens_s) == (0.0, None, None)
    with server.http() as http:
        usage = http.post("/v1/completions", json={"prompt": "One, two,", "max_tokens": 9}).json()["usage"]
    rates = statistics.rates(1020.0)
    assert rates.generated_tokens == usage["completion_tokens"] / 10
    assert rates.prompt_tokens == usage["prompt_tokens"] / 10
    assert rates.first_token_s is not None
    assert rates.first_token_s > 0
    for second in range(20, 31):
        statistics.sample(1000.0 + second)
    assert statistics.rates(1031.0).generated_tokens == 0.0
    generated = [point.rates.generated_tokens for point in statistics.points]  # a point every five seconds
    assert [value > 0 for value in generated] == [False, False, False, False, True, True, False]
    for second in range(31, 2000):
        statistics.sample(1000.0 + second)
    assert len(statistics.points) * 5 == 600


def test_a_line_of_statistics_follows_activity_only(llm: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="moeserve.server.statistics")
    with running(llm, log_stats_interval=0.0) as server:
        check_lines_of_statistics(server, caplog)


def check_lines_of_statistics(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    statistics = Statistics(server.service, 10.0)
    statistics.sample(1e9)  # after any start
    caplog.clear()
    for second in range(1, 25):
        statistics.sample(1e9 + second)
    assert not caplog.records
    with server.http() as http:
        usage = http.post("/v1/completions", json={"prompt": "One, two,", "max_tokens": 9}).json()["usage"]
    for second in range(25, 65):
        statistics.sample(1e9 + second)
    *others, record = caplog.records  # others: counts of requests of earlier tests that arrive late
    rate = usage["completion_tokens"] / 10
    assert record.__dict__["fields"]["generated_tokens_per_s"] == rate
    assert f"{rate} tokens/s generated" in record.getMessage()
    assert all(other.__dict__["fields"]["prompt_tokens_per_s"] > 0 for other in others)


@pytest.mark.slow
def test_a_server_logs_json_alone(default_cache: Any) -> None:
    flags = ["--max-model-len", "1024", "--kv-cache-memory", "64MiB", "--log-format", "json", "--api-server-count", "2"]
    with serving(*flags) as server:
        assert server.status_of("/v1/models") == 200
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        lines = [json.loads(line) for line in server.errors().splitlines()]
    assert any(line["logger"] == "moeserve.access" and line["path"] == "/v1/models" for line in lines)


@pytest.mark.slow
def test_a_server_can_be_silent(default_cache: Any) -> None:
    flags = ["--max-model-len", "1024", "--kv-cache-memory", "64MiB", "--log-level", "warning"]
    with serving(*flags) as server:
        assert server.status_of("/v1/models") == 200
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        assert server.errors() == ""
