"""Metrics of an engine. Metrics that vLLM has too have vLLM's names, with another prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from moeserve.api.session import Session
from moeserve.protocol import ReplicaStats
from moeserve.telemetry import request_stats
from moeserve.telemetry.request_stats import RequestStats

REQUEST_COUNTERS: dict[str, tuple[str, Callable[[RequestStats], float]]] = {
    "moeserve_prompt_tokens": ("Tokens of prompts.", lambda stats: stats.num_prompt_tokens),
    "moeserve_generation_tokens": ("Tokens generated.", lambda stats: stats.num_generated_tokens),
    "moeserve_prefix_cache_queries": (
        "Prompt tokens that were looked up in the prefix cache.",
        lambda stats: stats.num_prompt_tokens,
    ),
    "moeserve_prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda stats: stats.num_cached_tokens),
}
REQUEST_HISTOGRAMS: dict[str, tuple[str, Callable[[RequestStats], request_stats.Histogram]]] = {
    "moeserve_time_to_first_token_seconds": (
        "Time from a prompt's arrival in the engine to its first token.",
        lambda stats: stats.first_token,
    ),
    "moeserve_inter_token_latency_seconds": ("Time between tokens of an output.", lambda stats: stats.between_tokens),
    "moeserve_e2e_request_latency_seconds": (
        "Time from a prompt's arrival in the engine to the end of an output.",
        lambda stats: stats.whole,
    ),
    "moeserve_request_prompt_tokens": ("Tokens of a prompt.", lambda stats: stats.prompt_tokens),
    "moeserve_request_generation_tokens": ("Tokens of an output.", lambda stats: stats.generated_tokens),
}
REPLICA_GAUGES: dict[str, tuple[str, Callable[[ReplicaStats], float]]] = {
    "moeserve_num_requests_running": ("Requests in the steps of a replica.", lambda stats: stats.num_running),
    "moeserve_num_requests_waiting": ("Requests that a replica has not begun.", lambda stats: stats.num_waiting),
}
REPLICA_COUNTERS: dict[str, tuple[str, Callable[[ReplicaStats], float]]] = {
    "moeserve_num_preemptions": (
        "Requests that were preempted: they lost their KV cache to older requests.",
        lambda stats: stats.num_preemptions,
    ),
    "moeserve_spec_decode_num_drafts": (
        "Runs of draft tokens that were verified.",
        lambda stats: stats.speculation.num_drafts,
    ),
    "moeserve_spec_decode_num_draft_tokens": (
        "Draft tokens that were verified.",
        lambda stats: stats.speculation.num_draft_tokens,
    ),
    "moeserve_spec_decode_num_accepted_tokens": (
        "Draft tokens that were accepted.",
        lambda stats: stats.speculation.num_accepted_tokens,
    ),
    "moeserve_external_prefix_cache_hits": (
        "Tokens whose keys and values came from the store behind the KV cache.",
        lambda stats: stats.num_loaded_tokens,
    ),
    "moeserve_kv_store_saved_blocks": (
        "Blocks saved to the store behind the KV cache.",
        lambda stats: stats.num_saved_blocks,
    ),
    "moeserve_kv_store_failed_blocks": (
        "Blocks and states that could not be loaded from the store behind the KV cache, or saved to it.",
        lambda stats: stats.num_failed_blocks,
    ),
    "moeserve_kv_store_loaded_states": (
        "Recurrent states that came from the store behind the KV cache.",
        lambda stats: stats.num_loaded_states,
    ),
    "moeserve_kv_store_saved_states": (
        "Recurrent states saved to the store behind the KV cache.",
        lambda stats: stats.num_saved_states,
    ),
    "moeserve_rounds": ("Rounds of a replica, idle ones included.", lambda stats: stats.num_rounds),
    "moeserve_replica_idle_steps": (
        "Steps in which other replicas had tokens and this one had none.",
        lambda stats: stats.steps.num_idle_steps,
    ),
    "moeserve_replica_padding_tokens": (
        "Padding rows that a replica computed in addition to its tokens.",
        lambda stats: stats.steps.num_padding_tokens,
    ),
    "moeserve_agreement_seconds": (
        "Time at the start of steps until all replicas had agreed, most of it waiting for slower ones.",
        lambda stats: stats.steps.agreement_seconds,
    ),
}


@dataclass(frozen=True)
class Counter:
    """A total since the start."""

    name: str
    labels: dict[str, str]
    value: int | float


@dataclass(frozen=True)
class Vector:
    """Totals since the start, by position."""

    name: str
    labels: dict[str, str]
    values: list[int]


@dataclass(frozen=True)
class Gauge:
    """A number now."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Histogram:
    """A distribution of values since the start."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]  # by upper bound, the number of values up to it; the last one is "+Inf"


Metric: TypeAlias = Counter | Vector | Gauge | Histogram


def metrics_of(session: Session) -> list[Metric]:
    """Return the metrics of each replica. Their names are those of the server's /metrics with "moeserve:" in front."""
    engine = session.engine
    model = engine.config.weights.model_path
    found: list[Metric] = []
    for index, requests in enumerate(session.frontend.stats):
        found += _of_requests(requests, {"model_name": model, "engine": str(index)})
    for index, replica in enumerate(engine.replica_stats):
        found += _of_replica(replica, engine.num_blocks, {"model_name": model, "engine": str(index)})
    return found


def _of_requests(stats: RequestStats, labels: dict[str, str]) -> Iterator[Metric]:
    for name, (_, value) in REQUEST_COUNTERS.items():
        yield Counter(_name(name), labels, value(stats))
    for reason, number in stats.ends.items():
        yield Counter("moeserve:request_success", labels | {"finished_reason": reason}, number)
    for name, (_, histogram) in REQUEST_HISTOGRAMS.items():
        yield _histogram(name, labels, histogram(stats))


def _of_replica(stats: ReplicaStats, num_blocks: int, labels: dict[str, str]) -> Iterator[Metric]:
    for name, (_, value) in REPLICA_GAUGES.items():
        yield Gauge(_name(name), labels, value(stats))
    yield Gauge("moeserve:kv_cache_usage_perc", labels, 1 - stats.num_free_blocks / num_blocks)
    for name, (_, value) in REPLICA_COUNTERS.items():
        yield Counter(_name(name), labels, value(stats))
    accepted = list(stats.speculation.num_accepted_per_position)
    yield Vector("moeserve:spec_decode_num_accepted_tokens_per_pos", labels, accepted)
    yield _histogram("moeserve_iteration_tokens_total", labels, stats.steps.sizes)


def _histogram(name: str, labels: dict[str, str], values: request_stats.Histogram) -> Histogram:
    bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
    counts = list(accumulate(values.counts))
    return Histogram(_name(name), labels, counts[-1], values.total, dict(zip(bounds, counts, strict=True)))


def _name(name: str) -> str:
    return name.replace("moeserve_", "moeserve:", 1)
