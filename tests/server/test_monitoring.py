"""`examples/monitoring`: the dashboard fits to `/metrics`, as Prometheus itself reads it where it is installed."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from free_ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from running_server import MODEL, RunningServer

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
GRAPHS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in GRAPHS for target in panel["targets"]]
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
OF_DRAFTS = "moeserve_spec_decode_num_accepted_tokens_per_pos"  # has no samples without drafts
GRID_WIDTH = 24  # columns, in Grafana
needs_prometheus = pytest.mark.skipif(
    not shutil.which("prometheus") or not shutil.which("promtool"), reason="needs Debian's package prometheus"
)


def answer_requests(server: RunningServer) -> None:
    """Answer requests, and end a window of expert load."""
    with server.http() as http:
        for number in range(3):
            body = {"model": MODEL, "prompt": [5, 6, 7, number] * 8, "max_tokens": 4}
            assert http.post("/v1/completions", json=body).status_code == 200
    server.llm.session.expert_load()


def metrics(server: RunningServer) -> str:
    with server.http() as http:
        return http.get("/metrics").text


def test_every_metric_of_dashboard_and_alerts_exists(tiny_server: RunningServer) -> None:
    answer_requests(tiny_server)
    families = text_string_to_metric_families(metrics(tiny_server))
    known = {"up"} | {sample.name for family in families for sample in family.samples} | {f"{OF_DRAFTS}_total"}
    for query in [*QUERIES, *(rule["expr"] for rule in ALERTS)]:
        names = set(re.findall(r"\b(?:moeserve_\w+|up)\b", query))
        assert names, query
        assert names <= known, query


def test_the_document_names_all_metrics(tiny_server: RunningServer) -> None:
    named = set(re.findall(r"`(moeserve_\w+)", (FOLDER.parents[1] / "docs" / "server.md").read_text()))
    documented = {name for name in named if not name.startswith("moeserve_router_")}  # of another kind of server
    exist = set(re.findall(r"^# TYPE (\w+)", metrics(tiny_server), re.MULTILINE))
    assert documented == {name for name in exist if not name.endswith("_created")}


def test_the_dashboard_has_the_form_that_grafana_reads() -> None:
    assert DASHBOARD["schemaVersion"] >= 36  # data sources are objects
    assert {"uid", "title", "time", "templating", "annotations"} <= DASHBOARD.keys()
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in GRAPHS:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"]))) - {"__rate_interval"}
    assert used == variables


def test_panels_do_not_overlap() -> None:
    cells = [
        (column, row)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for column, row in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
    ]
    assert len(set(cells)) == len(cells)
    assert {column for column, _ in cells} == set(range(GRID_WIDTH))


def test_the_containers_get_files_that_exist() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    mounts = {
        source: target
        for service in services.values()
        for source, target in (volume.split(":")[:2] for volume in service["volumes"])
        if source.startswith("./")
    }
    assert all((FOLDER / source).is_file() for source in mounts)
    (provider,) = yaml.safe_load((FOLDER / "dashboards.yaml").read_text())["providers"]
    assert str(Path(mounts["./dashboard.json"]).parent) == provider["options"]["path"]
    (source,) = yaml.safe_load((FOLDER / "datasource.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    assert re.fullmatch(r"http://(\w+):9090", source["url"])[1] in services  # type: ignore[index]


@needs_prometheus
def test_promtool_accepts_the_configuration_and_the_metrics(tiny_server: RunningServer) -> None:
    answer_requests(tiny_server)
    subprocess.run(["promtool", "check", "config", FOLDER / "prometheus.yml"], check=True, timeout=30)
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics(tiny_server), capture_output=True, text=True, timeout=30
    )
    complaints = checked.stderr.splitlines() + checked.stdout.splitlines()
    assert [line.split()[0] for line in complaints] == ["moeserve_iteration_tokens_total"]  # the name is vLLM's


@needs_prometheus
def test_when_alerts_fire() -> None:
    rules = Path(__file__).with_name("alerts.test.yml")
    run = subprocess.run(["promtool", "test", "rules", rules], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture
def prometheus(tiny_server: RunningServer, tmp_path: Path) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the server as in the example, but more often."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [tiny_server.url.removeprefix("http://")]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=error",
        ]
    )
    try:
        with httpx.Client(base_url=f"http://{address}/api/v1", timeout=30.0) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


def evaluated(prometheus: httpx.Client, query: str) -> list[Any]:
    """Return the series of a query's answer; none while Prometheus starts."""
    try:
        answer = prometheus.get("/query", params={"query": query})
    except httpx.ConnectError:
        return []
    if answer.status_code == 503:
        return []
    assert answer.json()["status"] == "success", (query, answer.text)
    return answer.json()["data"]["result"]


@needs_prometheus
def test_prometheus_answers_every_query_of_the_dashboard(tiny_server: RunningServer, prometheus: httpx.Client) -> None:
    deadline = time.monotonic() + 200
    answer_requests(tiny_server)
    while not evaluated(prometheus, "count_over_time(up[1m]) > 2"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert [value for series in evaluated(prometheus, "up") for value in series["value"][1:]] == ["1"]
    for query in QUERIES:
        has_series = evaluated(prometheus, query.replace("$__rate_interval", "1m").replace("$model", ".*"))
        assert has_series or OF_DRAFTS in query, query
    with tiny_server.http() as http:
        expected = http.get("/status").json()["generated_tokens"]
    (generated,) = evaluated(prometheus, "sum(moeserve_generation_tokens_total)")
    assert float(generated["value"][1]) == expected
