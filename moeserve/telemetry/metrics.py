"""Expert load for Prometheus. Knows windows of load only, and opens no port unless it is told to.

Series are labelled by layer, never by expert or rank: 61 layers with experts have 192 of them on any number of ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moeserve.errors import SettingsError, shown
from moeserve.telemetry.expert_load import LoadWindow, evenness, max_over_mean, padding_share

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.metrics_core import Metric

MAX_LAYERS_SHOWN = 128
MAX_PORT = 65535

# Name, what it is, and how it follows from a layer's tokens by expert and by rank.
_OfLayer = Callable[[Sequence[int], Sequence[int]], float]
_GAUGES_OF_LAYER: tuple[tuple[str, str, _OfLayer], ...] = (
    (
        "moeserve_expert_load_max_over_mean",
        "Tokens of the layer's hottest expert over the mean of its experts",
        lambda of_experts, of_ranks: max_over_mean(of_experts),
    ),
    (
        "moeserve_rank_load_max_over_mean",
        "Tokens that the layer's fullest rank got, over the mean of ranks",
        lambda of_experts, of_ranks: max_over_mean(of_ranks),
    ),
    (
        "moeserve_expert_load_entropy_ratio",
        "Entropy of the layer's load over its experts; 1: all got the same, 0: one got all",
        lambda of_experts, of_ranks: evenness(of_experts),
    ),
)


@dataclass(frozen=True)
class _Seen:
    """All windows so far. Replaced as a whole, so that a thread that reads finds figures of one moment."""

    last: LoadWindow | None = None
    num_steps: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    num_padding_tokens: int = 0
    num_empty_turns: int = 0
    bytes_dispatched: int = 0
    straggler_seconds: float = 0.0


class Metrics:
    """Counters over all windows that were observed, and gauges of the last one. They have a registry of their own.

    A window tells of all ranks, so one process of an engine observes, not one for each replica: what two observe is
    counted twice by whoever adds up their metrics.

    A gauge has one series for each layer. Of a model with more than 128 layers that have experts it has three, with
    "min", "mean" and "max" in place of the layer's number.

    Raises:
        SettingsError: the package prometheus_client is not installed.
    """

    def __init__(self) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise SettingsError(f"metrics need prometheus_client ({error}): pip install 'moeserve[metrics]'") from None
        self._seen = _Seen()
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)

    def observe(self, window: LoadWindow) -> None:
        """Counts one more window. Called by one thread; others may read meanwhile."""
        seen = self._seen
        self._seen = replace(
            seen,
            last=window,
            num_steps=seen.num_steps + window.num_steps,
            seconds=seen.seconds + window.seconds,
            num_tokens=seen.num_tokens + window.num_tokens,
            num_padding_tokens=seen.num_padding_tokens + window.num_padding_tokens,
            num_empty_turns=seen.num_empty_turns + window.num_empty_turns,
            bytes_dispatched=seen.bytes_dispatched + window.bytes_dispatched,
            straggler_seconds=seen.straggler_seconds + window.straggler_seconds,
        )

    def text(self) -> str:
        """All metrics as Prometheus reads them."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry).decode()

    def serve(self, port: int, address: str = "127.0.0.1") -> MetricsServer:
        """Answers Prometheus over HTTP, at /metrics, from a thread, until it is stopped.

        Args:
            port: 0: any that is free.
            address: of this host; "0.0.0.0" lets everyone in who reaches it.

        Raises:
            SettingsError: no such port or address, or it is in use.
        """
        from prometheus_client import start_http_server

        if not 0 <= port <= MAX_PORT:
            raise SettingsError(f"port {shown(port)} cannot serve metrics; choose from 0 (any) to {MAX_PORT}")
        try:
            return MetricsServer(*start_http_server(port, address, self._registry))
        except OSError as error:
            raise SettingsError(f"cannot serve metrics on {address}, port {port}: {error.strerror}") from None

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        seen = self._seen
        for name, what, total in (
            ("moeserve_steps", "Steps of the model", seen.num_steps),
            ("moeserve_step_seconds", "Time that steps took", seen.seconds),
            ("moeserve_tokens", "Tokens that went through the model, padding not among them", seen.num_tokens),
            ("moeserve_padding_tokens", "Padding that went through the model", seen.num_padding_tokens),
            (
                "moeserve_empty_turns",
                "Steps in which a replica had no token, but another one",
                seen.num_empty_turns,
            ),
            ("moeserve_dispatched_bytes", "Sent by all ranks to others, there and back", seen.bytes_dispatched),
            ("moeserve_straggler_seconds", "Waited for the slowest rank, mean over ranks", seen.straggler_seconds),
        ):
            yield CounterMetricFamily(name, what, value=total)
        window = seen.last
        padding = GaugeMetricFamily("moeserve_padding_ratio", "Padding among the tokens of the last window")
        epoch = GaugeMetricFamily("moeserve_placement_epoch", "How often experts were placed anew, up to then")
        of_layer = [GaugeMetricFamily(name, what, labels=["layer"]) for name, what, _ in _GAUGES_OF_LAYER]
        if window is not None:
            padding.add_metric([], padding_share(window))
            epoch.add_metric([], window.placement_epoch)
            for family, (_, _, figure) in zip(of_layer, _GAUGES_OF_LAYER, strict=True):
                figures = list(map(figure, window.tokens_of_expert, window.tokens_of_rank))
                for label, value in _labelled(window.layers, figures):
                    family.add_metric([label], value)
        yield from (padding, epoch, *of_layer)


class MetricsServer:
    """A port where metrics are served. Stopped when it is left, as a context manager, or told to."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        return self._server.server_port

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _labelled(layers: Sequence[int], figures: Sequence[float]) -> list[tuple[str, float]]:
    if len(layers) <= MAX_LAYERS_SHOWN:
        return [(str(layer), figure) for layer, figure in zip(layers, figures, strict=True)]
    return [("min", min(figures)), ("mean", sum(figures) / len(figures)), ("max", max(figures))]
