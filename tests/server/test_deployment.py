"""`examples/deployment`: its flags, paths and times are those of the server."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from running_server import RunningServer

from moeserve.cli import serve
from moeserve.cli.parser import Parser
from moeserve.server.settings import ServerSettings

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "deployment"
UNIT = (FOLDER / "moeserve.service").read_text()
DEPLOYMENT, SERVICE = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
(ENTRY_POINT,) = re.findall(r'^ENTRYPOINT \["moeserve", "serve", (.*)\]$', (FOLDER / "Dockerfile").read_text(), re.M)
DRAIN_TIMEOUT = ServerSettings().drain_timeout


def parse(arguments: list[str]) -> argparse.Namespace:
    command = Parser()
    serve.add_arguments(command)
    return command.parse_args(arguments)


def test_the_flags_of_container_and_cluster() -> None:
    arguments = parse([*re.findall(r'"(.*?)"', ENTRY_POINT), *CONTAINER["args"]])
    assert arguments.host == "0.0.0.0"
    assert CONTAINER["ports"] == [{"name": "http", "containerPort": ServerSettings().port}]
    mounts = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert str(Path(arguments.api_key_file).parent) in mounts
    assert "/home/moeserve/.cache" in mounts


def test_the_cluster_finds_the_pods_of_the_deployment() -> None:
    labels = POD["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == SERVICE["spec"]["selector"] == labels
    volumes = {volume["name"] for volume in POD["spec"]["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes
    assert {port["targetPort"] for port in SERVICE["spec"]["ports"]} == {"http"}


def test_probes_need_no_key(tiny_server: RunningServer) -> None:
    with tiny_server.http() as http:
        for probe in ("livenessProbe", "readinessProbe"):
            assert http.get(CONTAINER[probe]["httpGet"]["path"]).status_code == 200


def test_requests_have_time_to_finish() -> None:
    assert POD["spec"]["terminationGracePeriodSeconds"] > DRAIN_TIMEOUT
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.M)
    assert int(seconds) > DRAIN_TIMEOUT


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "moeserve.service"
    unit.write_text(UNIT.replace("/opt/moeserve/bin/moeserve", str(Path(sys.executable).with_name("moeserve"))))
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
