"""Spans as a receiver of OTLP over HTTP gets them."""

from __future__ import annotations

import http.server
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from running_server import MODEL, RunningServer, running

from moeserve import AsyncLLM, SettingsError
from moeserve.server.tracing import open_tracing

Received = queue.Queue[tuple[dict[str, Any], Span]]


@pytest.fixture
def receiver() -> Iterator[tuple[str, Received]]:
    """A receiver: its URL, and the attributes of the resource with each span that comes."""
    received: Received = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["content-type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        received.put((values(resource.resource.attributes), span))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def traced(llm: AsyncLLM, receiver: tuple[str, Received]) -> Iterator[tuple[RunningServer, Received]]:
    with running(llm, otlp_traces_endpoint=receiver[0]) as server:
        yield server, receiver[1]


def values(attributes: Any) -> dict[str, Any]:
    """Return attributes as Python's values."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {each.key: plain(each.value) for each in attributes}


def spans(server: RunningServer, received: Received) -> list[tuple[dict[str, Any], Span]]:
    """Return all spans, once the server has ended with its requests."""
    assert server.tracing is not None
    server.stop()
    server.tracing.close()
    return list(received.queue)


def test_a_span_describes_the_request_and_continues_its_trace(traced: tuple[RunningServer, Received]) -> None:
    server, received = traced
    trace_id, parent_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    answer = server.openai().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Count to three."}],
        n=2,
        max_tokens=6,
        temperature=0.5,
        seed=7,
        extra_headers={"traceparent": f"00-{trace_id}-{parent_id}-01", "x-request-id": "abc"},
    )
    ((resource, span),) = spans(server, received)
    assert resource["service.name"] == "moeserve"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace_id, parent_id)
    assert (span.name, span.kind) == (f"chat {MODEL}", Span.SPAN_KIND_SERVER)
    found = values(span.attributes)
    assert answer.usage is not None
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.id": "abc",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": answer.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": answer.usage.completion_tokens,
        "gen_ai.response.finish_reasons": [choice.finish_reason for choice in answer.choices],
    }
    assert {name: found[name] for name in expected} == expected
    latencies = [found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")]
    assert latencies == sorted(latencies)
    assert latencies[-1] <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 + 1e-3
    assert span.status.code == Status.STATUS_CODE_UNSET


def test_each_prompt_has_a_span_and_an_unsampled_trace_has_none(traced: tuple[RunningServer, Received]) -> None:
    server, received = traced
    client = server.openai()
    client.completions.create(model=MODEL, prompt=["One", "Two", "Three"], max_tokens=2, seed=2**63 - 1)
    unsampled = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"}
    client.completions.create(model=MODEL, prompt="Four", max_tokens=2, extra_headers=unsampled)
    sent = spans(server, received)
    assert [span.name for _, span in sent] == [f"text_completion {MODEL}"] * 3
    assert len({span.trace_id for _, span in sent}) == 3


def test_a_failed_request_and_a_hang_up_are_named(traced: tuple[RunningServer, Received]) -> None:
    server, received = traced
    with server.http() as http:
        assert http.post("/v1/completions", json={"model": MODEL, "prompt": "word " * 2000}).status_code == 400
    with server.openai().completions.create(model=MODEL, prompt="One", max_tokens=900, stream=True) as stream:
        next(iter(stream))
    failed, ended = (values(span.attributes) for _, span in spans(server, received))
    assert failed["error.type"] == "400"
    assert ended["error.type"] == "client_disconnected"
    assert 0 < ended["gen_ai.usage.output_tokens"] < 900


@pytest.mark.parametrize(
    "endpoint", ["localhost:4318", "ftp://localhost/v1/traces", "http://", "http://[::1", "http://a:b"]
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="otlp_traces_endpoint"):
        open_tracing(endpoint)


def test_without_an_endpoint_nothing_is_imported_and_without_the_extra_it_is_named() -> None:
    code = (
        "import sys; import moeserve.server.run; assert 'opentelemetry.sdk' not in sys.modules\n"
        "sys.modules['opentelemetry.sdk'] = None\n"
        "from moeserve.server.tracing import open_tracing; open_tracing('http://localhost:4318/v1/traces')"
    )
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "SettingsError" in failed.stderr
    assert "moeserve[tracing]" in failed.stderr
