"""Two servers in processes of their own, the environment of clients, and a line for each client that passed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parents[1]
NODE_MODULES = ROOT / "build" / "clients" / "npm" / "node_modules"
PACKAGES = json.loads((TESTS / "package.json").read_text())["dependencies"]
REQUIREMENTS = [line for name in ("libraries", "benchmarks") for line in (TESTS / f"{name}.txt").read_text().split()]
SECONDS_TO_START = 120
SECONDS_OF_A_CLIENT = 120


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server, the name of its model, and the folder of the scripted server's checkpoint."""

    url: str
    model: str
    folder: Path | None = None

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"


@contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    """Start a program of the development environment that serves a model, and terminate it."""
    command = [str(ROOT / ".venv" / "bin" / arguments[0]), *arguments[1:]]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    killer = threading.Timer(SECONDS_TO_START, process.kill)
    killer.start()
    try:
        log: list[str] = []
        assert process.stderr is not None
        for line in process.stderr:
            log.append(line)
            if found := re.search(r"serving (\S+) at (http://\S+)/v1", line):
                break
        else:
            pytest.fail("the server has not started:\n" + "".join(log[-20:]))
        killer.cancel()
        reader = threading.Thread(target=log.extend, args=(process.stderr,))  # a full pipe would stop the server
        reader.start()
        yield Server(found[2], found[1])
    finally:
        killer.cancel()
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answers do what the prompt says; see scripted_server.py."""
    folder = tmp_path_factory.mktemp("scripted")
    with serving("python", str(TESTS / "scripted_server.py"), str(folder)) as server:
        yield dataclasses.replace(server, folder=folder)


@pytest.fixture(scope="session")
def real() -> Iterator[Server]:
    """A server of the default model."""
    with serving("moeserve", "serve", "--port", "0") as server:
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home folder of a client, with an empty folder to work in."""
    (tmp_path / "work").mkdir()
    return tmp_path


def run(home: Path, *command: str, stdin: str = "", **environment: str) -> str:
    """Run a client in a home folder of its own, and return what it printed."""
    variables = {"PATH": f"{NODE_MODULES / '.bin'}:{os.environ['PATH']}", "HOME": str(home), "LANG": "C.UTF-8"}
    done = subprocess.run(
        command,
        cwd=home / "work",
        env=variables | environment,
        input=stdin,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def version_of(client: str) -> str:
    """Return the version of a client that a mark names."""
    registry, _, name = client.partition(":")
    if registry == "npm":
        return str(PACKAGES[name])
    if registry == "pypi":
        return next(found[1] for each in REQUIREMENTS if (found := re.fullmatch(rf"{name}==(\S+)", each)))
    return subprocess.run([client, "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[0]


@pytest.fixture(autouse=True)
def clients(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Keep the clients of a test for the summary."""
    for mark in request.node.iter_markers("clients"):
        for client in mark.args:
            record_property("client", f"{client} {version_of(client)}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each client with its version and the number of its tests."""
    terminalreporter.section("clients")
    outcomes: dict[str, Counter[str]] = {}
    for report in (each for name in ("passed", "failed") for each in terminalreporter.getreports(name)):
        for _, client in report.user_properties:
            outcomes.setdefault(client, Counter())[report.outcome] += 1
    for client, counts in sorted(outcomes.items()):
        terminalreporter.line(f"{client:45s} {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
