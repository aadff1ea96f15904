"""Prometheus metrics of expert load.

Series are labelled by layer, never by expert or rank: 61 layers with experts have 192 series on any number of ranks.
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

MAX_PORT = 65535

_Value = Callable[[Sequence[int], Sequence[int]], float]  # of a layer's tokens by expert and by rank
_LAYER_GAUGES: tuple[tuple[str, str, _Value], ...] = (  # name, help, value
    (
        "moeserve_expert_load_max_over_mean",
        "Tokens of the layer's hottest expert divided by the mean over its experts.",
        lambda of_experts, of_ranks: max_over_mean(of_experts),
    ),
    (
        "moeserve_rank_load_max_over_mean",
        "Tokens of the layer's fullest rank divided by the mean over ranks.",
        lambda of_experts, of_ranks: max_over_mean(of_ranks),
    ),
    (
        "moeserve_expert_load_entropy_ratio",
        "Entropy of the layer's expert load divided by its maximum: 1 if even, 0 if one expert got all tokens.",
        lambda of_experts, of_ranks: evenness(of_experts),
    ),
)


@dataclass(frozen=True)
class _Seen:
    """Totals of all windows. Replaced as a whole, so that a reading thread sees one consistent state."""

    last: LoadWindow | None = None
    num_steps: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    num_padding_tokens: int = 0
    num_idle_steps: int = 0
    bytes_dispatched: int = 0
    straggler_seconds: float = 0.0


class Metrics:
    """Counters over all windows and gauges of the last one, in a registry of their own.

    A window covers all ranks, so only one process of an engine may observe it.

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
        """Add a window. Called by one thread; others may read at the same time."""
        seen = self._seen
        self._seen = replace(
            seen,
            last=window,
            num_steps=seen.num_steps + window.num_steps,
            seconds=seen.seconds + window.seconds,
            num_tokens=seen.num_tokens + window.num_tokens,
            num_padding_tokens=seen.num_padding_tokens + window.num_padding_tokens,
            num_idle_steps=seen.num_idle_steps + window.num_idle_steps,
            bytes_dispatched=seen.bytes_dispatched + window.bytes_dispatched,
            straggler_seconds=seen.straggler_seconds + window.straggler_seconds,
        )

    def text(self) -> str:
        """Return all metrics in the Prometheus text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry).decode()

    def serve(self, port: int, address: str = "127.0.0.1") -> MetricsServer:
        """Serve the metrics over HTTP at /metrics, from a thread, until the server is stopped.

        Args:
            port: 0 chooses a free one.
            address: of this host; "0.0.0.0" listens on all interfaces.

        Raises:
            SettingsError: the port or address is invalid or in use.
        """
        from prometheus_client import start_http_server

        if not 0 <= port <= MAX_PORT:
            raise SettingsError(f"port {shown(port)} cannot serve metrics; choose from 0 (any) to {MAX_PORT}")
        try:
            return MetricsServer(*start_http_server(port, address, self._registry))
        except OSError as error:
            raise SettingsError(f"cannot serve metrics on {address}, port {port}: {error.strerror}") from None

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families, as the registry requires."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        seen = self._seen
        for name, what, total in (
            ("moeserve_steps", "Steps of the model.", seen.num_steps),
            ("moeserve_step_seconds", "Duration of all steps.", seen.seconds),
            ("moeserve_tokens", "Tokens that the model processed, without padding.", seen.num_tokens),
            ("moeserve_padding_tokens", "Padding rows that the model processed.", seen.num_padding_tokens),
            (
                "moeserve_idle_steps",
                "Steps of a replica without tokens while another one had some.",
                seen.num_idle_steps,
            ),
            ("moeserve_dispatched_bytes", "Bytes that ranks sent to each other for experts.", seen.bytes_dispatched),
            ("moeserve_straggler_seconds", "Time that ranks waited for slower ones.", seen.straggler_seconds),
        ):
            yield CounterMetricFamily(name, what, value=total)
        window = seen.last
        padding = GaugeMetricFamily("moeserve_padding_ratio", "Share of padding in the last window.")
        epoch = GaugeMetricFamily("moeserve_placement_epoch", "Number of placement changes of layers.")
        of_layer = [GaugeMetricFamily(name, what, labels=["layer"]) for name, what, _ in _LAYER_GAUGES]
        if window is not None:
            padding.add_metric([], padding_share(window))
            epoch.add_metric([], window.placement_epoch)
            for family, (_, _, figure) in zip(of_layer, _LAYER_GAUGES, strict=True):
                figures = list(map(figure, window.tokens_of_expert, window.tokens_of_rank))
                for layer, value in zip(window.layers, figures, strict=True):
                    family.add_metric([str(layer)], value)
        yield from (padding, epoch, *of_layer)


class MetricsServer:
    """An HTTP server of metrics, as a context manager. `stop` stops it."""

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
