"""OpenTelemetry traces: a span for each prompt, sent with OTLP over HTTP. Needs the extra `tracing`.

Attributes follow OpenTelemetry's conventions for generative AI, and otherwise vLLM's names. OpenTelemetry's usual
environment variables apply, such as OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from moeserve.config.environment import names_traced_service
from moeserve.errors import SettingsError, missing_extra, shown
from moeserve.outputs import RequestOutput
from moeserve.sampling_params import SamplingParams
from moeserve.server.errors import ApiError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from moeserve.server.client import Client


def open_tracing(endpoint: str | None) -> Tracing | None:
    """Return an object that sends spans to `endpoint`; None without an endpoint. Errors are as for `check_tracing`."""
    check_tracing(endpoint)
    return None if endpoint is None else Tracing(endpoint)


def check_tracing(endpoint: str | None) -> None:
    """Raise SettingsError if the endpoint is not a URL, or if OpenTelemetry is needed but not installed."""
    if endpoint is None:
        return
    if not _is_http_url(endpoint):
        raise SettingsError(
            f"otlp_traces_endpoint={shown(endpoint)} must be an HTTP URL, such as http://localhost:4318/v1/traces"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise missing_extra("traces need OpenTelemetry's SDK and its exporter", "tracing", error) from None


class Tracing:
    """Sends spans in batches, from a thread. Spans are dropped while the receiver is unreachable or too slow."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({} if names_traced_service() else {SERVICE_NAME: "moeserve"})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("moeserve")

    async def traced(
        self,
        client: Client,
        model: str,
        params: SamplingParams,
        generate: Callable[[Callable[[], None]], AsyncGenerator[RequestOutput, None]],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a prompt, and send a span at their end. The span continues a trace that the client sent.

        Args:
            generate: returns the outputs. `generate` must call its argument when the prompt leaves the queue.
        """
        span, began_s = self._begin(client, model, params), time.monotonic()
        finish_reasons: dict[int, str] = {}
        num_output = 0

        def set_latency(name: str) -> None:
            span.set_attribute(f"gen_ai.latency.{name}", time.monotonic() - began_s)

        try:
            async with contextlib.aclosing(generate(lambda: set_latency("time_in_queue"))) as outputs:
                async for output in outputs:
                    if not num_output:
                        set_latency("time_to_first_token")
                        span.set_attribute("gen_ai.usage.input_tokens", len(output.prompt_token_ids))
                        span.set_attribute("gen_ai.usage.cache_read.input_tokens", output.num_cached_tokens)
                    for each in output.outputs:
                        num_output += len(each.token_ids)
                        if each.finish_reason is not None:
                            finish_reasons[each.index] = each.finish_reason
                    yield output
        except BaseException as error:  # including the closing of the generator when a client disconnects
            _set_error(span, error)
            raise
        finally:
            set_latency("e2e")
            span.set_attribute("gen_ai.usage.output_tokens", num_output)
            span.set_attribute(
                "gen_ai.response.finish_reasons", [reason for _, reason in sorted(finish_reasons.items())]
            )
            span.end()

    def close(self) -> None:
        """Send the spans that have ended. Spans are lost if the receiver fails."""
        self._provider.shutdown()

    def _begin(self, client: Client, model: str, params: SamplingParams) -> Span:
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        operation = "text_completion" if client.path == "/v1/completions" else "chat"
        attributes: dict[str, str | float | None] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "moeserve",
            "gen_ai.request.id": client.request_id,
            "gen_ai.request.model": model,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.response.model": model,
            "url.path": client.path,
        }
        return self._tracer.start_span(
            f"{operation} {model}",
            context=extract(client.headers),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
        )


def _is_http_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # invalid host or port
        return False


def _set_error(span: Span, error: BaseException) -> None:
    from opentelemetry.trace import StatusCode

    if isinstance(error, Exception):
        span.set_attribute("error.type", str(error.status) if isinstance(error, ApiError) else type(error).__name__)
        span.set_status(StatusCode.ERROR, str(error))
    else:
        span.set_attribute("error.type", "client_disconnected")
