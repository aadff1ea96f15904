"""Watched processes: messages, reports of each kind of failure, and that none outlives the process that started it."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import other_system
import psutil
import pytest

from moeserve.errors import CheckpointError, EngineError
from moeserve.processes.failures import MEANINGS, FailureReport, as_error, root_cause
from moeserve.processes.fork_server import ForkedProcess
from moeserve.processes.local import SpawnedProcess, start_process
from moeserve.processes.memory_kills import MEMORY_KILLS
from moeserve.processes.supervision import WatchedProcess, collect_failures, end_all, wait_for_messages

Start = Callable[..., WatchedProcess[str]]


BOTH_WAYS = pytest.mark.parametrize("way", ["forked", "spawned"], indirect=True)


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Processes are forked by the server, or started without one as on a system other than Linux."""
    way = getattr(request, "param", "forked")
    if way == "spawned":
        other_system.pretend(monkeypatch, only_processes=True)
        for name, value in other_system.ONLY_PROCESSES.items():
            monkeypatch.setenv(name, value)
    return str(way)


@pytest.fixture
def start(way: str) -> Iterator[Start]:
    started: list[WatchedProcess[str]] = []

    def start(do: str, name: str = "rank 1", **config: Any) -> WatchedProcess[str]:
        started.append(start_process("watched:run", name, {"do": do, **config}, str, environment=os.environ))
        assert type(started[-1].handle) is (ForkedProcess if way == "forked" else SpawnedProcess)
        return started[-1]

    yield start
    end_all(started)
    assert not [process.name for process in started if runs(pid_of(process))]


def pid_of(process: WatchedProcess[Any]) -> int:
    assert isinstance(process.handle, ForkedProcess | SpawnedProcess)
    return process.handle.pid


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def first_failures(process: WatchedProcess[str]) -> list[FailureReport]:
    deadline = time.monotonic() + 200
    while not (reports := process.failures()):
        assert time.monotonic() < deadline
        wait_for_messages([process], 1.0)
    return reports


def first_message(process: WatchedProcess[str]) -> str:
    messages = process.receive(60.0)
    assert messages, process.failures()
    return messages[0]


@BOTH_WAYS
def test_messages_of_any_size_pass_in_both_directions_at_once(start: Start) -> None:
    process = start("echo")
    sent = ["", "ab", "x" * 3_000_000 + "y", *(f"message {number}" for number in range(2000)), "z" * 5_000_000]
    for message in sent:  # far more than a socket holds, and nobody receives meanwhile
        process.channel.send(message)
    received: list[str] = []
    while len(received) < len(sent):
        received += process.receive(60.0)
        assert not process.failures()
    assert received == [message[::-1] for message in sent]


def test_a_message_that_the_search_for_failures_has_read_ends_a_wait_once(start: Start) -> None:
    process = start("echo")
    process.channel.send("ab")
    wait_until(lambda: process.failures() or process.has_messages)
    wait_for_messages([process], 300.0)  # longer than a test may take
    assert process.receive() == ["ba"]
    assert not process.has_messages


@pytest.mark.slow_but("config0")
@BOTH_WAYS
@pytest.mark.parametrize(
    ("do", "config", "cause", "error"),
    [
        ("raise", {"kind": "plain"}, "ZeroDivisionError: the message", None),
        ("raise", {"kind": "user"}, "the message", "CheckpointError"),
        ("raise", {"kind": "consequence"}, "the message", "DistributedError"),
        ("kill", {"signal": "SIGKILL"}, "killed by SIGKILL", None),
        ("kill", {"signal": "SIGBUS"}, f"killed by SIGBUS ({MEANINGS['SIGBUS']})", None),
        ("exit", {"status": 3}, "ended with exit status 3", None),
        ("exit", {"status": 0}, "ended with exit status 0", None),
    ],
)
def test_a_failure_is_reported_with_its_cause(
    start: Start, do: str, config: dict[str, Any], cause: str, error: str | None
) -> None:
    (report,) = first_failures(start(do, **config))
    assert (report.name, report.cause, report.error) == ("rank 1", cause, error)
    assert report.is_consequence == (error == "DistributedError")
    assert ("watched.py" in report.traceback) == (do == "raise")


@BOTH_WAYS
def test_an_older_process_that_is_killed_after_one_without_memory_has_its_own_cause(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "proc/self/mountinfo": "31 23 0:32 / /groups rw - cgroup2 cgroup2 rw",
        "groups/memory.current": "700",
        "groups/memory.max": "2097152",
        "groups/memory.events": "oom_kill 2",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(MEMORY_KILLS, "root", tmp_path)
    monkeypatch.setattr(MEMORY_KILLS, "_num_explained", 0)
    older, victim = start("echo", "rank 0"), start("echo", "rank 1")
    (tmp_path / "groups/memory.events").write_text("oom_kill 3\n")
    victim.kill()
    expected = FailureReport(name="rank 1", cause="the kernel killed it for lack of memory (limit 2.00 MiB)")
    assert first_failures(victim) == [expected]
    older.kill()
    assert first_failures(older) == [FailureReport(name="rank 0", cause="killed by SIGKILL")]
    assert victim.failures() == [expected]


@BOTH_WAYS
def test_a_target_that_cannot_be_imported_is_reported(way: str) -> None:
    process = start_process("no_such_module:run", "rank 1", {}, None, environment=os.environ)
    assert "no_such_module" in first_failures(process)[0].cause
    end_all([process])


def test_the_error_of_a_process_keeps_its_class_where_the_user_can_correct_it() -> None:
    report = FailureReport(name="rank 2", cause="no such file", error="CheckpointError", traceback="Traceback ...")
    error = as_error(report, "loading the model")
    assert isinstance(error, CheckpointError)
    assert all(part in str(error) for part in ("no such file", "rank 2", "loading the model"))
    error = as_error(
        FailureReport(name="rank 2", cause="IndexError: 7", traceback="Traceback: line 1"), "running a step"
    )
    assert type(error) is EngineError
    assert all(part in str(error) for part in ("rank 2", "IndexError: 7", "Traceback: line 1"))
    assert type(as_error(FailureReport(name="rank 2", cause="x", error="DistributedError"), "y")) is EngineError


def test_the_first_cause_is_named_among_its_consequences(start: Start) -> None:
    survivor = start("raise", "rank 0", kind="consequence")
    seen = first_failures(survivor)
    assert root_cause(seen).name == "rank 0"
    victim = start("kill", "rank 1", signal="SIGKILL")  # noticed later than its consequence
    reports = collect_failures([survivor, victim], seconds=60.0)
    assert root_cause(reports) == FailureReport(name="rank 1", cause="killed by SIGKILL")


def test_consequences_alone_are_returned_after_a_while(start: Start) -> None:
    processes = [start("raise", "rank 0", kind="consequence"), start("echo", "rank 1")]
    first_failures(processes[0])
    assert [report.name for report in collect_failures(processes)] == ["rank 0"]


@pytest.mark.slow
@BOTH_WAYS
def test_the_failure_of_a_grandchild_is_reported_by_its_parent(start: Start) -> None:
    process = start("family", "rank 0", child={"do": "raise", "kind": "plain"})
    grandchild = int(first_message(process))
    first_failures(process)
    report = root_cause(collect_failures([process]))
    assert (report.name, report.cause) == ("grandchild", "ZeroDivisionError: the message")
    assert "watched.py" in report.traceback
    wait_until(lambda: process.has_ended and not runs(grandchild))


@BOTH_WAYS
def test_a_grandchild_ends_with_its_parent(start: Start) -> None:
    process = start("family", child={"do": "compute"})
    grandchild = int(first_message(process))
    os.kill(pid_of(process), signal.SIGKILL)
    wait_until(lambda: not runs(grandchild))


def test_a_stopped_grandchild_ends_with_its_parent(start: Start) -> None:
    """It cannot end itself."""
    process = start("family", child={"do": "stop"})
    grandchild = int(first_message(process))
    wait_until(lambda: psutil.Process(grandchild).status() == psutil.STATUS_STOPPED)
    os.kill(pid_of(process), signal.SIGKILL)
    wait_until(lambda: not runs(grandchild))


PATH_OF_SCRIPT = os.pathsep.join(map(str, Path(__file__).parents[:2]))
SCRIPT = """
import os, sys, threading, time
from moeserve.processes.local import start_process
if {way!r} == "spawned":
    del os.pidfd_open
found = []
def main():
    for _ in range(2):
        process = start_process("watched:run", "rank 1", {{"do": "compute"}}, str, environment=os.environ)
        found.append(process)
        process.receive(20)
        print(process.handle.pid, flush=True)
thread = threading.Thread(target=main)  # the thread that started them ends first, which is no failure
thread.start()
thread.join()
{then}
"""


@pytest.mark.slow
@BOTH_WAYS
@pytest.mark.parametrize(
    "then", ["sys.exit(0)", "os.kill(os.getpid(), 9)", "os.fork() and os.kill(os.getpid(), 9); time.sleep(5)"]
)
def test_a_script_that_ends_leaves_no_process(tmp_path: Path, way: str, then: str) -> None:
    """Also where a forked copy of it lives on, which holds its sockets open."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(way=way, then=then))
    environment = os.environ | {"PYTHONPATH": PATH_OF_SCRIPT}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.wait(60)
        wait_until(lambda: not any(runs(pid) for pid in pids))


def test_a_process_that_does_not_exit_is_killed(start: Start) -> None:
    process = start("stop")
    assert first_message(process) == "ready"
    end_all([process], patience_s=0.2)
    assert not runs(pid_of(process))


@BOTH_WAYS
def test_a_process_has_what_its_parent_has_and_a_session_of_its_own(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("moeserve", "msgspec"):  # in the working folder, which is not on the path
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_VARIABLE", "grün")
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        process = start("describe")
    finally:
        os.sched_setaffinity(0, cores)
    folder, leads_session, its_cores, variable, path = ast.literal_eval(first_message(process))
    assert (folder, leads_session, its_cores, variable) == (str(tmp_path), True, [min(cores)], "grün")
    assert set(sys.path) - {""} <= set(path)
    process.handle.wait(60)
    assert capfd.readouterr().out == "to standard output\n"


@pytest.fixture
def environment() -> dict[str, str]:
    """An environment with a fork server of its own."""
    return os.environ | {"GOMP_SPINCOUNT": "7"}


def server_of(process: WatchedProcess[str]) -> psutil.Process:
    parent = psutil.Process(pid_of(process)).parent()
    assert parent is not None
    assert "fork-server" in parent.cmdline()
    return parent


def test_variables_that_libraries_read_once_have_a_server_of_their_own(environment: dict[str, str]) -> None:
    started = [
        start_process("watched:run", "rank 1", {"do": "echo"}, str, environment=each)
        for each in (os.environ, environment, environment | {"OTHER": "1"})
    ]
    servers = [server_of(process).pid for process in started]
    assert servers[0] != servers[1] == servers[2]
    end_all(started)


def test_processes_survive_the_fork_server_and_their_ends_are_noticed(environment: dict[str, str]) -> None:
    process = start_process("watched:run", "rank 1", {"do": "echo"}, str, environment=environment)
    server = server_of(process)
    server.kill()
    server.wait()
    process.channel.send("ab")
    assert first_message(process) == "ba"
    other = start_process("watched:run", "rank 2", {"do": "echo"}, str, environment=environment)  # without the server
    other.channel.send("cd")
    assert first_message(other) == "dc"
    os.kill(pid_of(process), signal.SIGKILL)
    assert "exit status is unknown" in first_failures(process)[0].cause
    end_all([process, other])


def test_a_stopped_process_ends_with_the_fork_server(environment: dict[str, str], tmp_path: Path) -> None:
    """It cannot notice the end of its user by itself."""
    script = SCRIPT.format(way="forked", then="os.kill(pid := found[0].handle.pid, 19); os.kill(os.getpid(), 9)")
    (tmp_path / "script.py").write_text(script)
    path = {"PYTHONPATH": PATH_OF_SCRIPT}
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], env=os.environ | path, capture_output=True, text=True
    )
    wait_until(lambda: not any(runs(int(pid)) for pid in done.stdout.split()))
