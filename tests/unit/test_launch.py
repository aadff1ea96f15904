"""`moeserve launch`: what it refuses before Ray is started, and how it names what failed on which host."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from moeserve import addresses, cli
from moeserve import launch as room
from moeserve.errors import EngineError, MoeserveError, SettingsError

pytest.importorskip("ray", reason="install it with: pip install -e '.[ray]'")

HERE = "127.0.0.1"
TOKEN = "a-secret"
LISTEN = "import socket, sys, time; server = socket.create_server((sys.argv[1], int(sys.argv[2]))); time.sleep(60)"


@pytest.fixture(autouse=True)
def plain_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With two interfaces and no Ray."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for module in (addresses, room):
        monkeypatch.setattr(module, "own_addresses", lambda: {"lo": HERE, "eth1": "10.1.2.3"})


@pytest.fixture
def free_port() -> int:
    with socket.create_server((HERE, 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.create_server((HERE, 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.1.1, which is reached from 127.0.0.1, is as if it were the address of another host."""
    monkeypatch.setattr(room, "own_addresses", lambda: {"eth1": "10.1.2.3"})
    monkeypatch.setattr(room, "is_own", lambda address: address == "10.1.2.3")
    monkeypatch.setattr(room, "is_loopback", lambda address: False)


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head for other hosts, and a process that listens as Ray would."""

    def listener(
        role: list[str], own: str, wanted: room.Launch, environment: dict[str, str]
    ) -> AbstractContextManager[Any]:
        return room._running("Ray", [sys.executable, "-c", LISTEN, own, str(wanted.port)], environment)

    monkeypatch.setattr(room, "_ray_node", listener)
    monkeypatch.setattr(room, "is_loopback", lambda address: False)


def wanted(**changes: Any) -> room.Launch:
    plain = room.Launch(
        head=HERE,
        port=room.DEFAULT_PORT,
        num_nodes=1,
        hosts=[],
        remote_shell="false",
        interface=None,
        num_cpus=1,
        model=None,
        timeout_s=20.0,
        command=["true"],
    )
    return dataclasses.replace(plain, **changes)


def refusal(error: type[MoeserveError] = SettingsError, **changes: Any) -> str:
    """What is said beside the name of this host."""
    with pytest.raises(error) as refused:
        room.launch(wanted(**changes))
    said = str(refused.value)
    assert said.startswith(f"on {socket.gethostname()}: ")
    return said.partition(": ")[2]


def remote_shell(folder: Path, *lines: str) -> str:
    """A program that is given a host and a command."""
    program = folder / "shell"
    program.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    program.chmod(0o755)
    return str(program)


def test_the_address_of_the_first_node_is_needed() -> None:
    assert refusal(head=None).startswith("--head is missing")


def test_a_head_that_nobody_knows_is_waited_for_and_refused() -> None:
    host = "no-such-host.invalid"
    assert refusal(head=host, timeout_s=0.5).startswith(f"--head {host}: no such host within 0.5 s (")


@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".org"])
def test_what_is_no_name_of_a_host_is_refused_at_once(host: str) -> None:
    assert refusal(head=host, timeout_s=100).startswith(f"--head {host} cannot be the name of a host (")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "é" * 80])
def test_another_host_that_nobody_knows_is_refused(host: str) -> None:
    assert refusal(head=None, hosts=[host], num_nodes=2).startswith(f"there is no way from here to {host}: ")


@pytest.mark.parametrize("head", [HERE, "127.0.1.1"])
def test_several_nodes_cannot_meet_at_an_address_of_one(head: str) -> None:
    said = refusal(head=head, num_nodes=2)
    assert "can be reached from this host alone" in said
    assert said.endswith("give --head an address that the other nodes can reach: 10.1.2.3")


def test_an_interface_that_is_not_there_is_refused() -> None:
    assert refusal(interface="eth99").endswith("has no such; it has lo (127.0.0.1), eth1 (10.1.2.3)")
    assert "'10.1.0.0/99' is no subnet" in refusal(interface="10.1.0.0/99")


def test_an_interface_that_is_not_that_of_the_head_is_refused() -> None:
    assert refusal(interface="eth1") == "--head 127.0.0.1 is not on eth1, which is 10.1.2.3"


def test_a_model_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    said = refusal(model=str(tmp_path))
    assert said.startswith("the model cannot be read: ")
    assert f"'{tmp_path / 'config.json'}'; every node needs it under the same path" in said


def test_a_port_that_is_in_use_is_refused(used_port: int) -> None:
    said = refusal(port=used_port)
    assert said.startswith(f"port {used_port} cannot be opened on 127.0.0.1 (Address already in use)")
    assert "choose another with --port" in said


def test_any_loopback_address_is_this_host(used_port: int) -> None:
    """Some systems give their own name such a one."""
    with socket.create_server(("127.0.1.1", used_port)):
        assert "cannot be opened on 127.0.1.1" in refusal(head="127.0.1.1", port=used_port)


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_what_is_no_port_is_refused(port: int) -> None:
    assert refusal(port=port).startswith(f"--port {port}: ")


@pytest.mark.parametrize("shell", ["", " ", "ssh -o 'ProxyCommand"])
def test_what_is_no_remote_shell_is_refused(shell: str) -> None:
    assert refusal(hosts=["10.1.2.4"], remote_shell=shell).startswith(f"--remote-shell {shell!r}: ")


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moeserve.executor.ray.nodes", None)
    assert refusal().endswith("pip install 'moeserve[ray]'")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("interface", [None, "lo"])
def test_a_head_that_does_not_come_is_told_with_the_address_it_was_looked_for_from(
    free_port: int, interface: str | None
) -> None:
    began = time.monotonic()
    said = refusal(EngineError, head="127.0.1.1", port=free_port, num_nodes=2, interface=interface, timeout_s=1.0)
    assert 1.0 <= time.monotonic() - began < 1.0 + room.SECONDS_TO_CONNECT + 2.0
    assert said == (
        f"the head at 127.0.1.1:{free_port} cannot be reached from 127.0.0.1 within 1 s: Connection refused"
    )


@pytest.mark.usefixtures("without_ray")
def test_a_host_that_fails_is_told_with_what_it_said_last(free_port: int, tmp_path: Path) -> None:
    said_there = [f"echo line {number} of $1 >&2" for number in range(50)]
    shell = remote_shell(tmp_path, *said_there, "exit 3")
    said = refusal(EngineError, port=free_port, hosts=["node7"], num_nodes=2, remote_shell=shell)
    first, *lines = said.splitlines()
    assert first == "host node7 ended with status 3:"
    assert lines == [f"line {number} of node7" for number in range(50 - room.LINES_SHOWN, 50)]


@pytest.mark.usefixtures("without_ray")
def test_the_host_that_failed_is_told_among_others(free_port: int, tmp_path: Path) -> None:
    shell = remote_shell(tmp_path, '[ "$1" = node7 ] && exit 3', "exec sleep 60")
    said = refusal(EngineError, port=free_port, hosts=["node6", "node7", "node8"], num_nodes=4, remote_shell=shell)
    assert said.startswith("host node7 ended with status 3")


@pytest.mark.usefixtures("without_ray")
def test_a_remote_shell_that_is_not_there_is_told(free_port: int) -> None:
    said = refusal(port=free_port, hosts=["node7"], num_nodes=2, remote_shell="no-such-shell -v")
    assert said.startswith("host node7 cannot be started: ")
    assert "no-such-shell" in said


@pytest.mark.usefixtures("without_ray")
def test_hosts_get_the_token_where_nobody_can_see_it(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    shell = remote_shell(tmp_path, f"head -n 1 > {tmp_path}/input", f'echo "$@" > {tmp_path}/command', "exit 3")
    refusal(EngineError, port=free_port, hosts=["node7"], num_nodes=2, remote_shell=shell, model=None)
    assert (tmp_path / "input").read_text() == f"{TOKEN}\n"
    told = (tmp_path / "command").read_text()
    assert TOKEN not in told
    assert told.startswith(f"node7 {sys.executable} -m moeserve launch --head {HERE} --port {free_port} ")
    assert "--token-from-stdin --nodes 2 --timeout 20.0 --num-cpus 1" in told


@pytest.mark.usefixtures("without_ray")
def test_another_token_than_that_of_the_head_is_told_as_such(free_port: int, tmp_path: Path) -> None:
    shell = remote_shell(tmp_path, "echo 'RaySystemError: InvalidAuthToken'", "exit 1")
    said = refusal(port=free_port, hosts=["node7"], num_nodes=2, remote_shell=shell)
    assert said.startswith("the head has another token than this node")


@pytest.mark.usefixtures("without_ray")
def test_nothing_that_was_started_is_left(free_port: int, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    shell = remote_shell(
        tmp_path, f'[ "$1" = node7 ] && {{ while [ ! -s {note} ]; do sleep 0.05; done; exit 3; }}',
        f"echo $$ > {note}", "exec sleep 60",
    )  # fmt: skip
    began = time.monotonic()
    refusal(EngineError, port=free_port, hosts=["node6", "node7"], num_nodes=3, remote_shell=shell)
    assert time.monotonic() - began < room.SECONDS_TO_END  # asked to end, not killed
    assert not Path(f"/proc/{note.read_text().strip()}").exists()
    socket.create_server((HERE, free_port)).close()


def test_a_number_of_nodes_that_does_not_go_with_the_hosts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--head", HERE, "--nodes", "3", "--hosts", "node7", "--", "true"]) == 1
    assert "--nodes 3" in capsys.readouterr().err


def test_a_refusal_is_one_sentence_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--", "true"]) == 1
    assert capsys.readouterr().err.startswith(f"moeserve: on {socket.gethostname()}: --head is missing")


@pytest.mark.parametrize(
    ("arguments", "num_nodes", "command"),
    [
        (["--head", HERE], 1, []),
        (["--head", HERE, "--nodes", "4", "--", "prog", "--flag", "-v"], 4, ["prog", "--flag", "-v"]),
        (["--hosts", "a", "b", "--", "prog", "--nodes", "9"], 3, ["prog", "--nodes", "9"]),
    ],
)
def test_flags_become_what_is_wanted(
    arguments: list[str], num_nodes: int, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[room.Launch] = []
    monkeypatch.setattr(room, "launch", lambda wanted: asked.append(wanted) or 7)  # type: ignore[func-returns-value]
    assert cli.main(["launch", *arguments]) == 7
    assert (asked[0].num_nodes, asked[0].command, asked[0].port) == (num_nodes, command, room.DEFAULT_PORT)


def test_a_status_is_what_a_shell_makes_of_it() -> None:
    for order, status in [("exit 5", 5), ("kill -9 $$", 137)]:
        with room._running("it", ["sh", "-c", order], None) as process:
            assert process.status == status
