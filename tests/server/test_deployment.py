"""`examples/deployment`: its flags, paths and times are those of the server."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import yaml
from free_ports import free_port
from running_server import RunningServer
from tiny_model import save_tiny_model

from moeserve.cli import serve
from moeserve.cli.parser import Parser
from moeserve.server.settings import ServerSettings

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "deployment"
UNIT = (FOLDER / "moeserve.service").read_text()
DEPLOYMENT, SERVICE = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
IMAGE = (FOLDER / "Containerfile").read_text()
(ENTRY_POINT,) = re.findall(r'^ENTRYPOINT \["moeserve", "serve", (.*)\]$', IMAGE, re.M)
(HEALTH_CHECK,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", IMAGE, re.M)
CACHE = dict(re.findall(r"(MOESERVE_CACHE|HF_HOME)=(\S+)", IMAGE))
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["moeserve"]
DRAIN_TIMEOUT = ServerSettings().drain_timeout


def parse(arguments: list[str]) -> argparse.Namespace:
    command = Parser()
    serve.add_arguments(command)
    return command.parse_args(arguments)


@pytest.mark.parametrize("more", [CONTAINER["args"], COMPOSE["command"]], ids=["cluster", "compose"])
def test_the_flags_of_container_and_cluster(more: list[str]) -> None:
    arguments = parse([*re.findall(r'"(.*?)"', ENTRY_POINT), *more])
    assert arguments.host == "0.0.0.0"
    assert CONTAINER["ports"] == [{"name": "http", "containerPort": ServerSettings().port}]
    assert COMPOSE["ports"] == [f"127.0.0.1:{ServerSettings().port}:{ServerSettings().port}"]
    mounts = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert {"/keys", "/cache", "/tmp"} <= mounts
    assert Path(arguments.api_key_file).parent in (Path("/keys"), Path("/run/secrets"))
    assert {Path(folder).parent for folder in CACHE.values()} == {Path("/cache")}
    assert "cache:/cache" in COMPOSE["volumes"]


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
    assert int(COMPOSE["stop_grace_period"].removesuffix("s")) > DRAIN_TIMEOUT
    assert POD["spec"]["terminationGracePeriodSeconds"] > DRAIN_TIMEOUT
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.M)
    assert int(seconds) > DRAIN_TIMEOUT


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "moeserve.service"
    unit.write_text(UNIT.replace("/opt/moeserve/bin/moeserve", str(Path(sys.executable).with_name("moeserve"))))
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.slow
def test_the_server_runs_under_the_conditions_of_the_container(tmp_path: Path) -> None:
    """Another user, a root that cannot be written, caches in a volume, the health check, and an end by SIGTERM."""
    if os.geteuid() != 0 or not (shutil.which("setpriv") and shutil.which("unshare")):
        pytest.skip("needs root, setpriv and unshare")
    model, port = save_tiny_model(tmp_path), free_port()
    caches = {name: folder.replace("/cache", "/mnt/cache", 1) for name, folder in CACHE.items()}
    script = (
        f"mount -t tmpfs none /mnt && cp -r {model} /mnt/model && install -d -o 10001 /mnt/cache "
        "&& mount -t tmpfs none /tmp && mount -o remount,bind,ro / && cd / && "
        # Files of this environment may be in the home folder of root, so the user may read all.
        "exec setpriv --reuid=10001 --regid=10001 --clear-groups --inh-caps=+dac_read_search "
        '--ambient-caps=+dac_read_search "$@"'
    )
    command = [sys.executable, "-m", "moeserve", "serve", "/mnt/model", "-dp", "2", "--port", str(port)]
    own = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    with subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *command],
        env=own | caches | {"HOME": "/mnt/cache"},
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if line.startswith("serving "):
                break
        if any("mount:" in line or "unshare:" in line for line in lines):
            pytest.skip("".join(lines))
        assert lines[-1].startswith("serving "), lines
        check = [each.replace("8000", str(port)) for each in json.loads(HEALTH_CHECK)]
        subprocess.run([sys.executable, *check[1:]], check=True, timeout=60)
        body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
        request = Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        server.terminate()
        server.stderr.read()
        assert server.wait(60) == 0
    assert subprocess.run([sys.executable, *check[1:]], stderr=subprocess.DEVNULL).returncode != 0
