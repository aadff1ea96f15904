"""Prometheus metrics of expert load, against recounts."""

from __future__ import annotations

import math
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from load_windows import drawn, of_counts

from moeserve.errors import SettingsError
from moeserve.telemetry.expert_load import DiskReads
from moeserve.telemetry.metrics import MetricsServer

pytest.importorskip("prometheus_client", reason="install it with: pip install 'moeserve[metrics]'")


@pytest.fixture
def metrics() -> Iterator[MetricsServer]:
    server = MetricsServer(0)
    yield server
    server.stop()


def served(metrics: MetricsServer) -> dict[str, float]:
    """Return the value of each series by its name with labels, without the creation times of counters."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=60) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    series = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    return {name: value for name, value in series.items() if not name.endswith("_created")}


def test_counters_add_up_and_gauges_are_those_of_the_last_window(metrics: MetricsServer) -> None:
    assert set(served(metrics).values()) == {0.0}
    metrics.observe(of_counts([[9, 0], [9, 0]], [[9, 0], [9, 0]], num_tokens=9, placement_epoch=1, layers=(3, 11)))
    second = of_counts(
        [[6, 2], [4, 4]],
        [[5, 3], [4, 4]],
        num_steps=3,
        seconds=0.5,
        num_tokens=6,
        num_padding_tokens=2,
        num_idle_steps=5,
        bytes_dispatched=24,
        placement_epoch=2,
        layers=(3, 11),
        disk=DiskReads(num_found=7, num_read=2, num_bytes=4096, wait_seconds=0.25, num_released=512),
    )
    metrics.observe(second)
    bits = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert served(metrics) == pytest.approx(
        {
            "moeserve_steps_total": 13,
            "moeserve_experts_found_total": 7,
            "moeserve_experts_read_total": 2,
            "moeserve_expert_bytes_read_total": 4096,
            "moeserve_expert_wait_seconds_total": 0.25,
            "moeserve_expert_memory_released_bytes_total": 512,
            "moeserve_step_seconds_total": 2.5,
            "moeserve_tokens_total": 15,
            "moeserve_padding_tokens_total": 2,
            "moeserve_idle_steps_total": 5,
            "moeserve_dispatched_bytes_total": 1024,
            "moeserve_straggler_seconds_total": 0.5,
            "moeserve_padding_ratio": 0.25,
            "moeserve_placement_epoch": 2,
            'moeserve_expert_load_max_over_mean{layer="3"}': 1.5,
            'moeserve_expert_load_max_over_mean{layer="11"}': 1.0,
            'moeserve_rank_load_max_over_mean{layer="3"}': 1.25,
            'moeserve_rank_load_max_over_mean{layer="11"}': 1.0,
            'moeserve_expert_load_entropy_ratio{layer="3"}': bits,
            'moeserve_expert_load_entropy_ratio{layer="11"}': 1.0,
        }
    )


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(4, 2), (256, 64)])
def test_series_depend_on_layers_only(num_experts: int, num_ranks: int, metrics: MetricsServer) -> None:
    metrics.observe(*drawn(1, 20, num_experts, num_ranks))
    assert len(served(metrics)) == 14 + 3 * 20


def test_servers_are_separate_and_free_their_ports(metrics: MetricsServer) -> None:
    other = MetricsServer(0)
    other.observe(of_counts([[4]], [[4]]))
    assert served(other)["moeserve_tokens_total"] == 4
    assert served(metrics)["moeserve_tokens_total"] == 0
    with pytest.raises(SettingsError, match=rf"127\.0\.0\.1, port {other.port}: Address already in use"):
        MetricsServer(other.port)
    other.stop()
    with pytest.raises(OSError, match="refused"):
        served(other)
    MetricsServer(other.port).stop()


@pytest.mark.parametrize(
    ("port", "address", "message"),
    [(65536, "127.0.0.1", "choose from 0"), (0, "256.0.0.1", r"cannot serve metrics on 256\.0\.0\.1")],
)
def test_invalid_ports_and_addresses(port: int, address: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        MetricsServer(port, address)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SettingsError, match=r"pip install 'moeserve\[metrics\]'"):
        MetricsServer(0)
