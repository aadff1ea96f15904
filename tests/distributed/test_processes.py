"""Children that are watched: how each kind of death is told, and that none outlives its parent. Real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from moeserve.errors import CheckpointError, EngineError
from moeserve.processes import Child, Death, as_error, collect_deaths, end_all, root_cause, wait_for_news


@pytest.fixture
def children() -> Iterator[list[Child[str]]]:
    started: list[Child[str]] = []
    yield started
    end_all(started)
    assert not [child.name for child in started if alive(child.pid)]


def start(children: list[Child[str]], do: str, name: str = "rank 1", **config: Any) -> Child[str]:
    child: Child[str] = Child("watched", name, {"do": do, **config}, str, environment=os.environ)
    children.append(child)
    return child


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(condition: Any, seconds: float = 5.0) -> float:
    """Seconds until a condition came true."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "it did not come true"
        time.sleep(0.01)
    return time.monotonic() - started


def first_deaths(child: Child[str], seconds: float = 5.0) -> list[Death]:
    deadline = time.monotonic() + seconds
    while not (deaths := child.deaths()):
        assert time.monotonic() < deadline, "no death was noticed"
        wait_for_news([child], 1.0)
    return deaths


def first_message(child: Child[str], seconds: float = 5.0) -> str:
    messages = child.receive(seconds)
    assert messages, child.deaths()
    return messages[0]


def test_messages_of_any_size_pass_both_ways_at_once(children: list[Child[str]]) -> None:
    child = start(children, "echo")
    sent = ["", "ab", "x" * 3_000_000 + "y", *(f"message {number}" for number in range(2000)), "z" * 5_000_000]
    for message in sent:  # far more than a socket holds, and nobody receives meanwhile
        child.channel.send(message)
    received: list[str] = []
    while len(received) < len(sent):
        received += child.receive(5.0)
        assert not child.deaths()
    assert received == [message[::-1] for message in sent]


def test_a_message_found_while_looking_for_deaths_is_news(children: list[Child[str]]) -> None:
    child = start(children, "echo")
    child.channel.send("ab")
    wait_until(lambda: child.deaths() or child.has_unread)
    started = time.monotonic()
    wait_for_news([child], 10.0)
    assert time.monotonic() - started < 5.0
    assert child.receive() == ["ba"]
    started = time.monotonic()
    wait_for_news([child], 0.3)  # it is news but once
    assert time.monotonic() - started > 0.2


@pytest.mark.parametrize(
    ("do", "config", "cause", "error"),
    [
        ("raise", {"kind": "plain"}, "ZeroDivisionError: so it is", None),
        ("raise", {"kind": "broken"}, "so it is", "CheckpointError"),
        ("raise", {"kind": "lost"}, "so it is", "DistributedError"),
        ("die", {"signal": "SIGKILL"}, "killed by SIGKILL", None),
        ("exit", {"status": 3}, "ended with exit status 3", None),
        ("exit", {"status": 0}, "ended with exit status 0", None),
    ],
)
def test_a_death_is_told_with_its_cause(
    children: list[Child[str]], do: str, config: dict[str, Any], cause: str, error: str | None
) -> None:
    (death,) = first_deaths(start(children, do, **config))
    assert (death.name, death.cause, death.error) == ("rank 1", cause, error)
    assert death.follows_another == (error == "DistributedError")
    assert ("watched.py" in death.traceback) == (do == "raise")


def test_a_kill_is_noticed_at_once(children: list[Child[str]]) -> None:
    child = start(children, "compute")
    os.kill(int(first_message(child)), signal.SIGKILL)
    started = time.monotonic()
    assert first_deaths(child)[0].cause == "killed by SIGKILL"
    assert time.monotonic() - started < 0.5


def test_the_error_of_a_child_is_raised_as_what_it_is() -> None:
    broken = Death(name="rank 2", cause="no such file", error="CheckpointError", traceback="Traceback ...")
    error = as_error(broken, "loading the model")
    assert isinstance(error, CheckpointError)
    assert str(error) == "no such file (rank 2, loading the model)"
    error = as_error(Death(name="rank 2", cause="IndexError: 7", traceback="Traceback: line 1"), "running a step")
    assert isinstance(error, EngineError)
    assert str(error) == "running a step: rank 2: IndexError: 7\n\nTraceback: line 1"
    assert isinstance(as_error(Death(name="rank 2", cause="x", error="DistributedError"), "y"), EngineError)


def test_of_several_deaths_the_one_that_the_others_followed_is_named(children: list[Child[str]]) -> None:
    survivor = start(children, "raise", "rank 0", kind="lost", text="rank 1 did not come")
    seen = first_deaths(survivor)
    victim = start(children, "die", "rank 1", signal="SIGKILL")  # noticed later than what followed from it
    deadline = time.monotonic() + 5
    deaths = collect_deaths([survivor, victim])
    while len(deaths) < 2 and time.monotonic() < deadline:  # a slow machine
        deaths = collect_deaths([survivor, victim])
    assert root_cause(deaths) == Death(name="rank 1", cause="killed by SIGKILL")
    assert root_cause(seen).name == "rank 0"
    lost = Death(name="rank 3", cause="", follows_another=True)
    assert root_cause([lost, Death(name="rank 4", cause=""), Death(name="rank 5", cause="")]).name == "rank 4"


def test_deaths_that_only_follow_are_waited_for_no_longer_than_half_a_second(children: list[Child[str]]) -> None:
    survivor = start(children, "raise", "rank 0", kind="lost")
    start(children, "echo", "rank 1")
    first_deaths(survivor)
    started = time.monotonic()
    (death,) = collect_deaths(children)
    assert death.name == "rank 0"
    assert 0.4 < time.monotonic() - started < 1.0


@pytest.mark.parametrize("then", ["wait", "fail"])
def test_the_death_of_a_grandchild_is_told_by_its_parent(children: list[Child[str]], then: str) -> None:
    child = start(children, "family", "rank 0", child={"do": "raise", "kind": "plain"}, then=then)
    grandchild = int(first_message(child))
    first_deaths(child)
    death = root_cause(collect_deaths([child]))
    assert (death.name, death.cause) == ("grandchild", "ZeroDivisionError: so it is")
    assert "watched.py" in death.traceback
    wait_until(lambda: child.has_ended and not alive(grandchild))


def test_children_end_with_their_parent_however_it_died(children: list[Child[str]]) -> None:
    child = start(children, "family", child={"do": "compute"})
    grandchild = int(first_message(child))
    time.sleep(0.3)  # computing
    os.kill(child.pid, signal.SIGKILL)
    assert wait_until(lambda: not alive(grandchild)) < 1.0


SCRIPT = """
import os, sys, threading
sys.path.insert(0, {folder!r})
from moeserve.processes import Child
found = []
def main():
    for _ in range(2):
        child = Child("watched", "rank 1", {{"do": "compute"}}, str, environment=os.environ)
        found.append(child)
        print(child.receive(10)[0], flush=True)
thread = threading.Thread(target=main)  # the thread that started them ends first: that is no death
thread.start()
thread.join()
{then}
"""


@pytest.mark.parametrize("then", ["sys.exit(0)", "os.fork() and os.kill(os.getpid(), 9); import time; time.sleep(5)"])
def test_a_script_that_ends_leaves_no_process(tmp_path: Path, then: str) -> None:
    """Also where a forked copy of it lives on, which holds its sockets open."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent), then=then))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        assert all(alive(pid) for pid in pids) or process.poll() is not None
        process.wait(5)
        assert wait_until(lambda: not any(alive(pid) for pid in pids)) < 1.0


def test_a_child_that_does_not_go_is_killed(children: list[Child[str]]) -> None:
    child = start(children, "stubborn")
    assert first_message(child) == "ready"
    started = time.monotonic()
    end_all(children, patience_s=1.0)
    children.clear()
    assert 1.0 < time.monotonic() - started < 3.0
    assert not alive(child.pid)


def test_children_are_out_of_reach_of_the_terminal_and_find_the_same_modules(
    children: list[Child[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("moeserve", "msgspec"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    executable, _, leads_session = first_message(start(children, "tell")).split(" ")
    assert (executable, leads_session) == (sys.executable, "True")


def test_without_pidfds_deaths_are_noticed_as_well(children: list[Child[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeserve.processes._open_pidfd", lambda pid: None)
    child = start(children, "compute")
    os.kill(int(first_message(child)), signal.SIGKILL)
    assert first_deaths(child)[0].cause == "killed by SIGKILL"
