"""`/metrics`: metrics for Prometheus. Metrics that vLLM also has are named as in vLLM, with the prefix moeserve_."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from moeserve.api.metrics import REPLICA_COUNTERS, REPLICA_GAUGES, REQUEST_COUNTERS, REQUEST_HISTOGRAMS
from moeserve.protocol import ReplicaStats
from moeserve.server.service import Service
from moeserve.server.totals import Totals
from moeserve.telemetry.metrics import LoadMetrics
from moeserve.telemetry.request_stats import Histogram, RequestStats

LABELS = ["model_name", "engine"]  # the engine is the index of a replica


class Metrics:
    """All metrics of one server: of its requests, of each replica, and of expert load."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ServiceCollector(service))
        load = LoadMetrics(self._registry)
        service.llm.session.observer.listeners.append(load.observe)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _ServiceCollector(Collector):
    """Collects metrics from the totals of the service and its engine."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        totals = self._service.totals
        yield from self._of_queue(totals)
        yield from self._of_requests(totals.requests)
        engine = self._service.llm.session.engine
        yield from self._of_replicas(engine.replica_stats, engine.num_blocks)

    def _of_queue(self, totals: Totals) -> Iterator[Metric]:
        """Yield the metrics of requests that are not yet assigned to a replica."""
        model = self._service.model_names[0]
        waiting = GaugeMetricFamily(
            "moeserve_num_requests_queued", "Outputs that wait for room in the engine.", labels=LABELS[:1]
        )
        waiting.add_metric([model], totals.num_queued)
        yield waiting
        times = HistogramMetricFamily(
            "moeserve_request_queue_time_seconds", "Time that requests wait for room in the engine.", labels=LABELS[:1]
        )
        times.add_metric([model], _buckets(totals.waits), totals.waits.total)
        yield times

    def _of_requests(self, stats: list[RequestStats]) -> Iterator[Metric]:
        for name, (help, value) in REQUEST_COUNTERS.items():
            yield self._numbers(CounterMetricFamily(name, help, labels=LABELS), map(value, stats))
        ends = CounterMetricFamily(
            "moeserve_request_success", "Outputs that ended.", labels=[*LABELS, "finished_reason"]
        )
        for index, each in enumerate(stats):
            for reason, number in each.ends.items():
                ends.add_metric([self._service.model_names[0], str(index), reason], number)
        yield ends
        for name, (help, histogram) in REQUEST_HISTOGRAMS.items():
            yield self._histograms(name, help, map(histogram, stats))

    def _of_replicas(self, stats: list[ReplicaStats], num_blocks: int) -> Iterator[Metric]:
        for name, (help, value) in REPLICA_GAUGES.items():
            yield self._numbers(GaugeMetricFamily(name, help, labels=LABELS), map(value, stats))
        usage = GaugeMetricFamily(
            "moeserve_kv_cache_usage_perc", "Fraction of a replica's KV cache that requests use: 0 to 1.", labels=LABELS
        )
        yield self._numbers(usage, (1 - each.num_free_blocks / num_blocks for each in stats))
        for name, (help, value) in REPLICA_COUNTERS.items():
            yield self._numbers(CounterMetricFamily(name, help, labels=LABELS), map(value, stats))
        accepted = CounterMetricFamily(
            "moeserve_spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were accepted, by their position among those of a step.",
            labels=[*LABELS, "position"],
        )
        for index, each in enumerate(stats):
            for position, number in enumerate(each.speculation.num_accepted_per_position):
                accepted.add_metric([self._service.model_names[0], str(index), str(position)], number)
        yield accepted
        # The name is vLLM's, although names of histograms should not end in _total.
        help = "Tokens of a replica in each step in which it has any."
        yield self._histograms("moeserve_iteration_tokens_total", help, (each.steps.sizes for each in stats))

    def _numbers(self, family: CounterMetricFamily | GaugeMetricFamily, values: Iterable[float]) -> Metric:
        """Add each replica's value to a metric."""
        for index, value in enumerate(values):
            family.add_metric([self._service.model_names[0], str(index)], value)
        return family

    def _histograms(self, name: str, help: str, histograms: Iterable[Histogram]) -> Metric:
        """Return a metric with one histogram per replica."""
        family = HistogramMetricFamily(name, help, labels=LABELS)
        for index, each in enumerate(histograms):
            family.add_metric([self._service.model_names[0], str(index)], _buckets(each), each.total)
        return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return each upper bound with the cumulative number of values up to it."""
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
