"""`/metrics`: what Prometheus reads. Names are vLLM's behind the prefix moeserve_; expert load has names of its own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from moeserve.server.service import Service
from moeserve.telemetry.metrics import LoadMetrics
from moeserve.telemetry.request_stats import Histogram

PREFIX = "moeserve_"


class Metrics:
    """The metrics of one server: of requests, of each replica, and of expert load."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ServiceCollector(service))
        load = LoadMetrics(self._registry)
        service.llm.session.observer.listeners.append(load.observe)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _ServiceCollector(Collector):
    """Reads the totals that the service and its engine keep."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        yield from self._of_requests()
        yield from self._of_replicas()

    def _of_requests(self) -> Iterator[Metric]:
        model = self._service.model_names[0]
        stats = self._service.llm.session.frontend.stats
        admission = self._service.admission
        for name, help, value in (
            ("prompt_tokens", "Tokens of prompts.", stats.num_prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.num_generated_tokens),
            ("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.", stats.num_prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_cached_tokens),
        ):
            yield _labelled(CounterMetricFamily(PREFIX + name, help, labels=["model_name"]), [model], value)
        ends = CounterMetricFamily(
            f"{PREFIX}request_success", "Outputs that ended.", labels=["model_name", "finished_reason"]
        )
        for reason, number in stats.ends.items():
            ends.add_metric([model, reason], number)
        yield ends
        for name, help, histogram in (
            ("time_to_first_token_seconds", "Time from a prompt's arrival to its first token.", stats.first_token),
            ("inter_token_latency_seconds", "Time between tokens of an output.", stats.between_tokens),
            ("e2e_request_latency_seconds", "Time from a prompt's arrival to the end of an output.", stats.whole),
            ("request_queue_time_seconds", "Time that requests wait for the engine.", admission.waits),
            ("request_prompt_tokens", "Tokens of a prompt.", stats.prompt_tokens),
            ("request_generation_tokens", "Tokens of an output.", stats.generated_tokens),
        ):
            yield _of_histogram(name, help, model, histogram)
        waiting = GaugeMetricFamily(
            f"{PREFIX}num_requests_queued", "Outputs that wait for room in the engine.", labels=["model_name"]
        )
        yield _labelled(waiting, [model], admission.num_waiting)

    def _of_replicas(self) -> Iterator[Metric]:
        model, engine = self._service.model_names[0], self._service.llm.session.engine
        labels = ["model_name", "engine"]
        gauges = [
            ("num_requests_running", "Requests in the steps of a replica."),
            ("num_requests_waiting", "Requests that a replica has not begun."),
            ("kv_cache_usage_perc", "Share of a replica's KV cache that requests use: 0 to 1."),
        ]
        counters = [
            ("num_preemptions", "Requests that lost their KV cache to older ones."),
            ("rounds", "Rounds of a replica, idle ones included."),
        ]
        families: list[CounterMetricFamily | GaugeMetricFamily] = [
            *(GaugeMetricFamily(PREFIX + name, help, labels=labels) for name, help in gauges),
            *(CounterMetricFamily(PREFIX + name, help, labels=labels) for name, help in counters),
        ]
        for index, stats in enumerate(engine.replica_stats):
            share_used = 1 - stats.num_free_blocks / engine.num_blocks
            values = [stats.num_running, stats.num_waiting, share_used, stats.num_preemptions, stats.num_rounds]
            for family, value in zip(families, values, strict=True):
                family.add_metric([model, str(index)], value)
        yield from families


def _labelled(family: CounterMetricFamily | GaugeMetricFamily, labels: list[str], value: float) -> Metric:
    family.add_metric(labels, value)
    return family


def _of_histogram(name: str, help: str, model: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, help, labels=["model_name"])
    buckets, num_values = [], 0
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        num_values += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(num_values)))
    family.add_metric([model], buckets, histogram.total)
    return family
