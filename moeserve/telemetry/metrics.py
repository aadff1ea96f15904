"""Prometheus metrics of expert load.

Series are labelled by layer, never by expert or rank, so their number does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moeserve.errors import SettingsError, missing_extra, shown
from moeserve.telemetry.expert_load import DiskReads, LoadWindow, evenness, max_over_mean, padding_share

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MAX_PORT = 65535

COUNTERS: dict[str, tuple[str, Callable[[LoadWindow], float]]] = {
    "moeserve_steps": ("Steps of the model.", lambda window: window.num_steps),
    "moeserve_step_seconds": ("Duration of all steps.", lambda window: window.seconds),
    "moeserve_tokens": ("Tokens that the model processed, without padding.", lambda window: window.num_tokens),
    "moeserve_padding_tokens": ("Padding rows that the model processed.", lambda window: window.num_padding_tokens),
    "moeserve_idle_steps": (
        "Steps in which a replica had no tokens while another had some.",
        lambda window: window.num_idle_steps,
    ),
    "moeserve_dispatched_bytes": (
        "Bytes that ranks sent to each other in dispatch and combine.",
        lambda window: window.bytes_dispatched,
    ),
    "moeserve_straggler_seconds": ("Time that ranks waited for slower ranks.", lambda window: window.straggler_seconds),
}
DISK_COUNTERS: dict[str, tuple[str, Callable[[DiskReads], float]]] = {
    "moeserve_experts_found": ("Experts that steps found in memory.", lambda reads: reads.num_found),
    "moeserve_experts_read": ("Experts that steps read from disk.", lambda reads: reads.num_read),
    "moeserve_expert_bytes_read": ("Bytes of experts read from disk.", lambda reads: reads.num_bytes),
    "moeserve_expert_wait_seconds": ("Time that ranks waited for experts.", lambda reads: reads.wait_seconds),
    "moeserve_expert_memory_released_bytes": (
        "Memory for experts that was given back, because memory became scarce.",
        lambda reads: reads.num_released,
    ),
}
GAUGES: dict[str, tuple[str, Callable[[LoadWindow], float]]] = {
    "moeserve_padding_ratio": ("Share of padding in the last window.", padding_share),
    "moeserve_placement_epoch": ("Number of placement changes of layers.", lambda window: window.placement_epoch),
}
# Each value is a function of a layer's tokens by expert and by rank.
LAYER_GAUGES: dict[str, tuple[str, Callable[[Sequence[int], Sequence[int]], float]]] = {
    "moeserve_expert_load_max_over_mean": (
        "Tokens of the layer's hottest expert divided by the mean over its experts.",
        lambda of_experts, of_ranks: max_over_mean(of_experts),
    ),
    "moeserve_rank_load_max_over_mean": (
        "Tokens of the layer's fullest rank divided by the mean over its ranks.",
        lambda of_experts, of_ranks: max_over_mean(of_ranks),
    ),
    "moeserve_expert_load_entropy_ratio": (
        "Entropy of the layer's expert load divided by its maximum: 1 if even, 0 if one expert got all tokens.",
        lambda of_experts, of_ranks: evenness(of_experts),
    ),
}


class LoadMetrics:
    """Prometheus counters over all windows, and gauges of the last window, in a registry of prometheus_client."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge

        self._counters = [(Counter(name, help, registry=registry), value) for name, (help, value) in COUNTERS.items()]
        self._disk_counters = [
            (Counter(name, help, registry=registry), value) for name, (help, value) in DISK_COUNTERS.items()
        ]
        self._gauges = [(Gauge(name, help, registry=registry), value) for name, (help, value) in GAUGES.items()]
        self._layer_gauges = [
            (Gauge(name, help, ["layer"], registry=registry), value) for name, (help, value) in LAYER_GAUGES.items()
        ]

    def observe(self, window: LoadWindow) -> None:
        """Update the metrics with a window."""
        for counter, total in self._counters:
            counter.inc(total(window))
        if window.disk is not None:
            for counter, of_reads in self._disk_counters:
                counter.inc(of_reads(window.disk))
        for gauge, value in self._gauges:
            gauge.set(value(window))
        for gauge, of_layer in self._layer_gauges:
            for layer, of_experts, of_ranks in zip(
                window.layers, window.tokens_of_expert, window.tokens_of_rank, strict=True
            ):
                gauge.labels(layer).set(of_layer(of_experts, of_ranks))


class MetricsServer:
    """Serves `LoadMetrics` over HTTP at /metrics, in a thread.

    A window covers all ranks, so only one process of an engine may pass windows to a server.
    """

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        """
        Args:
            port: port to listen on; 0 chooses a free one.
            address: an address of this host; "0.0.0.0" listens on all interfaces.

        Raises:
            SettingsError: prometheus_client is not installed, or the port or address is invalid or in use.
        """
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise missing_extra("metrics need prometheus_client", "metrics", error) from None
        if not 0 <= port <= MAX_PORT:
            raise SettingsError(f"port {shown(port)} cannot serve metrics; choose from 0 (any) to {MAX_PORT}")
        registry = CollectorRegistry()
        self._metrics = LoadMetrics(registry)
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            raise SettingsError(f"cannot serve metrics on {address}, port {port}: {error.strerror}") from None
        self.port = self._server.server_port

    def observe(self, window: LoadWindow) -> None:
        """Update the metrics with a window."""
        self._metrics.observe(window)

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
