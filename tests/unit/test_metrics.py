"""Prometheus metrics of expert load, against recounts."""

from __future__ import annotations

import math
import sys
import urllib.request

import pytest
from load_windows import drawn, of_counts

from moeserve.errors import SettingsError
from moeserve.telemetry.metrics import Metrics

pytest.importorskip("prometheus_client", reason="install it with: pip install 'moeserve[metrics]'")


def series(text: str) -> dict[str, float]:
    """Return the value of each series by its name with labels."""
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    }


def test_counters_add_up_and_gauges_are_those_of_the_last_window() -> None:
    metrics = Metrics()
    metrics.observe(of_counts([[9, 0], [9, 0]], [[9, 0], [9, 0]], num_tokens=9, placement_epoch=1))
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
    )
    metrics.observe(second)
    bits = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert series(metrics.text()) == pytest.approx(
        {
            "moeserve_steps_total": 13,
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


def test_before_the_first_window_there_are_counters_alone() -> None:
    assert set(series(Metrics().text()).values()) == {0.0}
    assert all(name.endswith("_total") for name in series(Metrics().text()))


def test_every_metric_says_what_it_is() -> None:
    text = Metrics().text()
    kinds = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    assert all(name.startswith("moeserve_") for name in kinds)
    assert {name for name, kind in kinds.items() if kind == "counter"} == {
        name for name in kinds if name.endswith("_total")
    }
    described = [line.split(maxsplit=3) for line in text.splitlines() if line.startswith("# HELP")]
    assert {line[2] for line in described} == set(kinds)
    assert all(len(line) == 4 for line in described)


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(4, 2), (256, 64)])
def test_series_depend_on_layers_only(num_experts: int, num_ranks: int) -> None:
    metrics = Metrics()
    metrics.observe(*drawn(1, 20, num_experts, num_ranks))
    assert len(series(metrics.text())) == 9 + 3 * 20


def test_registries_are_separate() -> None:
    import prometheus_client

    one, other = Metrics(), Metrics()
    one.observe(of_counts([[4]], [[4]]))
    assert series(one.text())["moeserve_tokens_total"] == 4
    assert series(other.text())["moeserve_tokens_total"] == 0
    assert b"moeserve" not in prometheus_client.generate_latest()


def test_metrics_are_served_until_stopped() -> None:
    metrics = Metrics()
    with metrics.serve(0) as server:
        metrics.observe(of_counts([[4]], [[4]]))  # while it serves
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert series(answer.read().decode()) == series(metrics.text())
        with pytest.raises(SettingsError, match=rf"127\.0\.0\.1, port {server.port}: Address already in use"):
            Metrics().serve(server.port)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=10)
    with metrics.serve(server.port):  # the port is free again
        pass


@pytest.mark.parametrize(
    ("port", "address", "message"),
    [
        (-1, "127.0.0.1", "port -1 cannot serve metrics"),
        (65536, "127.0.0.1", "choose from 0"),
        (0, "256.0.0.1", r"cannot serve metrics on 256\.0\.0\.1"),
    ],
)
def test_invalid_ports_and_addresses(port: int, address: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Metrics().serve(port, address)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SettingsError, match=r"pip install 'moeserve\[metrics\]'"):
        Metrics()
