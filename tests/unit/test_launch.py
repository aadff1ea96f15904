"""`moeserve launch`: options refused before Ray starts, and errors that name the failed host."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import free_ports
import pytest

from moeserve import addresses, cli
from moeserve.errors import EngineError, MoeserveError, SettingsError
from moeserve.launch import checks, cluster, commands
from moeserve.launch.checks import Launch

pytest.importorskip("ray", reason="install it with: pip install -e '.[ray]'")

HERE = "127.0.0.1"
TOKEN = "a-secret"
LISTEN = "import socket, sys, time; server = socket.create_server((sys.argv[1], int(sys.argv[2]))); time.sleep(600)"


@pytest.fixture(autouse=True)
def plain_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set up a host with two interfaces and without Ray."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for module in (addresses, checks):
        monkeypatch.setattr(module, "own_addresses", lambda: {"lo": HERE, "eth1": "10.1.2.3"})


@pytest.fixture
def free_port() -> int:
    return free_ports.free_port()


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.create_server((HERE, 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.1.1, which is reached from 127.0.0.1, is as if it were the address of another host."""
    monkeypatch.setattr(checks, "own_addresses", lambda: {"eth1": "10.1.2.3"})
    monkeypatch.setattr(checks, "is_own", lambda address: address == "10.1.2.3")
    monkeypatch.setattr(checks, "is_loopback", lambda address: False)


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head for other hosts, and a process that listens as Ray would."""

    def listener(role: list[str], own: str, wanted: Launch, environment: dict[str, str]) -> AbstractContextManager[Any]:
        return commands.running_in_background("Ray", [sys.executable, "-c", LISTEN, own, str(wanted.port)], environment)

    monkeypatch.setattr(cluster, "_ray_node", listener)
    monkeypatch.setattr(checks, "is_loopback", lambda address: False)


def wanted(**changes: Any) -> Launch:
    plain = Launch(
        head=HERE,
        port=cluster.DEFAULT_PORT,
        num_nodes=1,
        hosts=[],
        remote_shell="false",
        interface=None,
        num_cpus=1,
        model=None,
        timeout_s=60.0,
        command=["true"],
    )
    return dataclasses.replace(plain, **changes)


def refusal(error: type[MoeserveError] = SettingsError, **changes: Any) -> str:
    """Return the message of a refusal, without the name of this host."""
    with pytest.raises(error) as refused:
        cluster.launch(wanted(**changes))
    message = str(refused.value)
    assert message.startswith(f"on {socket.gethostname()}: ")
    return message.partition(": ")[2]


def remote_shell(folder: Path, *lines: str) -> str:
    """A program that is given a host and a command."""
    program = folder / "shell"
    program.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(head=None), ["--head"]),
        (dict(head="no-such-host.invalid", timeout_s=0.5), ["no-such-host.invalid", "0.5 s"]),
        (dict(head="a..b", timeout_s=100), ["a..b"]),  # at once
        (dict(head=None, hosts=["\u00e9" * 80], num_nodes=2), ["\u00e9" * 80]),
        # Several nodes cannot meet at an address of one.
        (dict(head=HERE, num_nodes=2), [HERE, "10.1.2.3"]),
        (dict(head="127.0.1.1", num_nodes=2), ["127.0.1.1", "10.1.2.3"]),
        (dict(interface="eth99"), ["eth99", "lo (127.0.0.1)", "eth1 (10.1.2.3)"]),
        (dict(interface="10.1.0.0/99"), ["10.1.0.0/99"]),
        (dict(interface="eth1"), ["--head 127.0.0.1", "eth1", "10.1.2.3"]),
        (dict(model="/no/model"), ["/no/model/config.json"]),
        *((dict(port=port), [f"--port {port}"]) for port in (-1, 0, 10001, 19999, 65536)),
        *(
            (dict(hosts=["10.1.2.4"], remote_shell=shell), [f"--remote-shell {shell!r}"])
            for shell in ("", " ", "ssh -o 'ProxyCommand")
        ),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_started(
    options: dict[str, Any], named: list[str]
) -> None:
    message = refusal(**options)
    assert all(text in message for text in named), message


@pytest.mark.parametrize("head", [HERE, "127.0.1.1"])
def test_a_port_that_is_in_use_is_refused(used_port: int, head: str) -> None:
    """Any loopback address is this host: some systems give their own name such a one."""
    with socket.create_server(("127.0.1.1", used_port)):
        message = refusal(head=head, port=used_port)
    assert all(text in message for text in (f"port {used_port}", head, "Address already in use", "--port"))


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moeserve.executor.ray.nodes", None)
    assert "pip install 'moeserve[ray]'" in refusal()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("interface", [None, "lo"])
def test_an_unreachable_head_is_an_error_with_both_addresses(free_port: int, interface: str | None) -> None:
    message = refusal(EngineError, head="127.0.1.1", port=free_port, num_nodes=2, interface=interface, timeout_s=1.0)
    assert all(text in message for text in (f"127.0.1.1:{free_port}", "127.0.0.1 ", "1 s", "Connection refused"))


@pytest.mark.usefixtures("without_ray")
def test_a_host_that_fails_is_named_with_its_last_output(free_port: int, tmp_path: Path) -> None:
    its_lines = [f"echo line {number} of $1 >&2" for number in range(50)]
    shell = remote_shell(tmp_path, *its_lines, "exit 3")
    message = refusal(EngineError, port=free_port, hosts=["node7"], num_nodes=2, remote_shell=shell)
    first, *lines = message.splitlines()
    assert first == "host node7 ended with status 3:"
    assert lines == [f"line {number} of node7" for number in range(50 - commands.NUM_LINES_SHOWN, 50)]


@pytest.mark.usefixtures("without_ray")
def test_a_remote_shell_that_is_missing_is_named(free_port: int) -> None:
    message = refusal(port=free_port, hosts=["node7"], num_nodes=2, remote_shell="no-such-shell -v")
    assert message.startswith("host node7 cannot be started: ")
    assert "no-such-shell" in message


@pytest.mark.usefixtures("without_ray")
def test_hosts_receive_the_token_through_standard_input(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    shell = remote_shell(tmp_path, f"head -n 1 > {tmp_path}/input", f'echo "$@" > {tmp_path}/command', "exit 3")
    refusal(EngineError, port=free_port, hosts=["node7"], num_nodes=2, remote_shell=shell, model=None)
    assert (tmp_path / "input").read_text() == f"{TOKEN}\n"
    given = (tmp_path / "command").read_text()
    assert TOKEN not in given
    assert given.startswith(f"node7 {sys.executable} -m moeserve launch --head {HERE} --port {free_port} ")
    assert "--token-from-stdin --nodes 2 --timeout 60.0 --num-cpus 1" in given


@pytest.mark.usefixtures("without_ray")
def test_another_token_than_that_of_the_head_is_named(free_port: int, tmp_path: Path) -> None:
    shell = remote_shell(tmp_path, "echo 'RaySystemError: InvalidAuthToken'", "exit 1")
    message = refusal(port=free_port, hosts=["node7"], num_nodes=2, remote_shell=shell)
    assert message.startswith("the head has another token than this node")


@pytest.mark.usefixtures("without_ray")
def test_nothing_that_was_started_is_left(free_port: int, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    shell = remote_shell(
        tmp_path, f'[ "$1" = node7 ] && {{ while [ ! -s {note} ]; do sleep 0.05; done; exit 3; }}',
        f"echo $$ > {note}", "exec sleep 600",
    )  # fmt: skip
    message = refusal(EngineError, port=free_port, hosts=["node6", "node7"], num_nodes=3, remote_shell=shell)
    assert message.startswith("host node7 ended with status 3")
    assert not Path(f"/proc/{note.read_text().strip()}").exists()
    socket.create_server((HERE, free_port)).close()


def test_a_number_of_nodes_that_contradicts_the_hosts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--head", HERE, "--nodes", "3", "--hosts", "node7", "--", "true"]) == 1
    assert "--nodes 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "num_nodes", "command"),
    [
        (["--head", HERE], 1, []),
        (["--head", HERE, "--nodes", "4", "--", "prog", "--flag", "-v"], 4, ["prog", "--flag", "-v"]),
        (["--hosts", "a", "b", "--", "prog", "--nodes", "9"], 3, ["prog", "--nodes", "9"]),
    ],
)
def test_flags_become_options(
    arguments: list[str], num_nodes: int, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Launch] = []
    monkeypatch.setattr(cluster, "launch", lambda wanted: asked.append(wanted) or 7)  # type: ignore[func-returns-value]
    assert cli.main(["launch", *arguments]) == 7
    assert (asked[0].num_nodes, asked[0].command, asked[0].port) == (num_nodes, command, cluster.DEFAULT_PORT)


def test_a_status_is_the_one_a_shell_gives() -> None:
    for order, status in [("exit 5", 5), ("kill -9 $$", 137)]:
        with commands.running("it", ["sh", "-c", order], None) as process:
            assert process.status == status
