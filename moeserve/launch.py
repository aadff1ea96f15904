"""`moeserve launch`: makes a Ray cluster of some nodes, checks them, and runs a command on the first.

The same command is given on every node, by hand or by a scheduler; or once, with the names of the other hosts. Each
node looks at itself before it starts anything, so what is wrong with it is said where it is wrong and with its name.
Ray's processes are children of this one, and end with it: no other Ray on the machine is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn

from moeserve.addresses import address_on, address_towards, is_loopback, is_own, own_addresses
from moeserve.config.environment import environment_of_cluster, is_token_refused, ray_token
from moeserve.errors import EngineError, MoeserveError, SettingsError
from moeserve.machine import usable_cores

logger = logging.getLogger(__name__)

DEFAULT_PORT = 6379
MAX_PORT = 65535
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_CONNECT = 2.0
SECONDS_WITHOUT_HEAD = 5.0  # after which a node that joined it ends its Ray
SECONDS_OF_A_START = 20.0  # a Ray that has ended before has never worked
SECONDS_TO_END = 10.0
LINES_SHOWN = 15  # of what a process said before it failed
TOKEN_BYTES = 32
PR_SET_PDEATHSIG = 1  # of Linux


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What was asked for."""

    head: str | None  # address or name of the first node; none: this host, with `hosts`
    port: int
    num_nodes: int
    hosts: Sequence[str]  # the other nodes, to be reached by the remote shell; empty: they run this command themselves
    remote_shell: str  # as it is written on a command line, before a host's name
    interface: str | None  # name or subnet
    num_cpus: int | None  # of this node, for Ray; none: those that this process may use
    model: str | None  # whose files each node must be able to read
    timeout_s: float  # for nodes to come
    command: Sequence[str]  # empty: the cluster is kept until it is interrupted
    reads_token: bool = False  # from standard input


def launch(wanted: Launch) -> int:
    """Runs this node's part. Returns the exit status: that of the command on the head; 0 on the others.

    Raises:
        SettingsError: something about this node is not as it must be.
        EngineError: a node does not come, or fails.
    """
    with _named_errors(), _ended_by_signals():
        if wanted.hosts and wanted.head is None:
            head = address_on(wanted.interface) if wanted.interface else _address_towards(wanted.hosts[0])
        elif wanted.head is None:
            raise SettingsError("--head is missing: the address of the first node, the same on all nodes")
        else:
            head = _resolved(wanted.head, wanted.timeout_s)
        if wanted.interface and is_loopback(head) and wanted.num_nodes > 1:
            head = address_on(wanted.interface)  # this host's own name, as /etc/hosts often has it
        is_head = is_own(head)
        own = head if is_head else _own_address(wanted, head)
        _check_here(wanted, head, own, is_head)
        token = sys.stdin.readline().strip() if wanted.reads_token else ray_token()
        if is_head:
            if not token and (wanted.hosts or wanted.num_nodes == 1) and not is_token_refused():
                token = secrets.token_hex(TOKEN_BYTES)
            if not token:
                logger.warning(
                    "the nodes share no token, so whoever reaches %s can run programs there: set RAY_AUTH_TOKEN on all "
                    "nodes, or put one into ~/.ray/auth_token with `ray get-auth-token --generate`",
                    head,
                )
            return _be_head(wanted, head, token)
        return _join(wanted, head, own, token)


def _check_here(wanted: Launch, head: str, own: str, is_head: bool) -> None:
    """What can be known before anything is started."""
    try:
        from moeserve.executor.ray.nodes import why_unreadable
    except ImportError as error:
        raise SettingsError(f"Ray is not installed ({error}): pip install 'moeserve[ray]'") from None
    if wanted.num_nodes > 1 and is_loopback(own):
        raise SettingsError(
            f"the address {own} can be reached from this host alone; give --head an address that the other nodes can "
            f"reach: {', '.join(address for address in own_addresses().values() if not is_loopback(address))}"
        )
    if wanted.interface is not None and is_head and address_on(wanted.interface) != head:
        raise SettingsError(f"--head {head} is not on {wanted.interface}, which is {address_on(wanted.interface)}")
    _check_remote_shell(wanted.remote_shell)
    if not 1 <= wanted.port <= MAX_PORT:
        raise SettingsError(f"--port {wanted.port}: ports are from 1 to {MAX_PORT}")
    if wanted.model is not None and (why := why_unreadable(Path(wanted.model))):
        what = f"the model cannot be read: {why}; every node needs it under the same path"
        if is_head:
            raise SettingsError(what)
        logger.warning(what)  # the head asks all nodes, and ends the launch with this one's name
    if is_head:
        try:
            socket.create_server((head, wanted.port)).close()
        except OSError as error:
            raise SettingsError(
                f"port {wanted.port} cannot be opened on {head} ({os.strerror(error.errno or 0)}): another Ray "
                "cluster may use it; choose another with --port, on all nodes"
            ) from None


def _check_remote_shell(command: str) -> None:
    try:
        is_empty = not shlex.split(command)
    except ValueError as error:
        raise SettingsError(f"--remote-shell {command!r}: {error}") from None
    if is_empty:
        raise SettingsError(f"--remote-shell {command!r}: it names no program")


def _be_head(wanted: Launch, head: str, token: str) -> int:
    address = f"{head}:{wanted.port}"
    environment = environment_of_cluster(address, token)
    with contextlib.ExitStack() as ending:
        ray = ending.enter_context(
            _ray_node(["--head", f"--port={wanted.port}", "--include-dashboard=false"], head, wanted, environment)
        )
        remotes = [ending.enter_context(_remote(wanted, host, address, token)) for host in wanted.hosts]
        deadline = time.monotonic() + wanted.timeout_s
        while ray.is_running and (why := _why_unreachable(head, wanted.port, head)):
            if time.monotonic() > deadline:
                raise EngineError(f"Ray did not come up at {address} within {wanted.timeout_s:g} s: {why}")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        _wait_for_nodes(wanted, address, environment, [ray, *remotes])
        if not wanted.command:
            print(f"moeserve: the cluster is up; Ctrl-C ends it. For programs on this host:\n{_exports(environment)}")
            sys.stdout.flush()
            while all(process.is_running for process in [ray, *remotes]):
                time.sleep(SECONDS_BETWEEN_LOOKS)
            return _blame([ray, *remotes])
        command = ending.enter_context(_running("the command", list(wanted.command), environment, is_captured=False))
        while command.is_running:
            if not ray.is_running:
                _blame([ray])
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return command.status


def _exports(environment: dict[str, str]) -> str:
    """What a shell must be told so that its programs use the cluster, the token included: it is shown to its owner."""
    names = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    return "\n".join(f"export {name}={shlex.quote(environment[name])}" for name in names if name in environment)


def _wait_for_nodes(wanted: Launch, address: str, environment: dict[str, str], running: Sequence[_Process]) -> None:
    """Returns when all have come and were found to be alike, in a process of its own: Ray may end it."""
    options = ["--nodes", str(wanted.num_nodes), "--timeout", str(wanted.timeout_s)]
    options += ["--model", wanted.model] if wanted.model else []
    command = [sys.executable, "-m", "moeserve.executor.ray", *options]
    with _running("the check of the nodes", command, environment, is_captured=False) as check:
        while check.is_running:
            if any(not process.is_running for process in running):
                _blame(running)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if check.status != 0:
            raise EngineError(f"the {wanted.num_nodes} nodes of the cluster at {address} cannot be used; see above")


def _join(wanted: Launch, head: str, own: str, token: str) -> int:
    """Until the head has ended. What this node loses meanwhile, its Ray or the way to the head, it gets again."""
    address = f"{head}:{wanted.port}"
    environment = environment_of_cluster(address, token)
    while True:
        _wait_for_head(wanted, head, own)
        with _ray_node([f"--address={address}"], own, wanted, environment) as ray:
            started = last_seen = time.monotonic()
            why = ""
            while ray.is_running and time.monotonic() - last_seen < SECONDS_WITHOUT_HEAD:
                why = _why_unreachable(head, wanted.port, own)
                if not why:
                    last_seen = time.monotonic()
                time.sleep(SECONDS_BETWEEN_LOOKS)
            if why == os.strerror(errno.ECONNREFUSED):  # that host lives, and its Ray is gone
                return 0
            if not ray.is_running and time.monotonic() - started < SECONDS_OF_A_START:
                _blame([ray])
        what = f"the head at {address} cannot be reached ({why})" if why else "this node's Ray has ended"
        logger.warning("%s; it is joined again", what)


def _wait_for_head(wanted: Launch, head: str, own: str) -> None:
    deadline = time.monotonic() + wanted.timeout_s
    while why := _why_unreachable(head, wanted.port, own):
        if time.monotonic() > deadline:
            raise EngineError(
                f"the head at {head}:{wanted.port} cannot be reached from {own} within {wanted.timeout_s:g} s: {why}"
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _ray_node(
    role: list[str], own: str, wanted: Launch, environment: dict[str, str]
) -> contextlib.AbstractContextManager[_Process]:
    """This node's Ray, as a child of this process."""
    num_cpus = wanted.num_cpus or usable_cores()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address={own}"]
    command += [f"--num-cpus={num_cpus}", "--disable-usage-stats", "--block"]
    return _running(f"Ray on node {own}", command, environment)


def _remote(wanted: Launch, host: str, address: str, token: str) -> contextlib.AbstractContextManager[_Process]:
    """This command on another host."""
    head, _, port = address.rpartition(":")
    command = [sys.executable, "-m", "moeserve", "launch", "--head", head, "--port", port, "--token-from-stdin"]
    command += ["--nodes", str(wanted.num_nodes), "--timeout", str(wanted.timeout_s)]
    for option, value in [
        ("--interface", wanted.interface),
        ("--num-cpus", wanted.num_cpus),
        ("--model", wanted.model),
    ]:
        command += [option, str(value)] if value is not None else []
    shell = [*shlex.split(wanted.remote_shell), host]
    return _running(f"host {host}", [*shell, shlex.join(command)], None, stdin=f"{token}\n")


@dataclass
class _Process:
    """A child, and the end of what it said."""

    name: str
    process: subprocess.Popen[str]
    said: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_SHOWN))
    listener: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def status(self) -> int:
        """As a shell gives it."""
        status = self.process.wait()
        return status if status >= 0 else 128 - status

    def listen(self, output: IO[str]) -> None:
        for line in output:
            self.said.append(line.rstrip())
            logger.info("%s: %s", self.name, line.rstrip())


@contextlib.contextmanager
def _running(
    name: str,
    command: list[str],
    environment: dict[str, str] | None,
    *,
    is_captured: bool = True,
    stdin: str | None = None,
) -> Iterator[_Process]:
    """A child that is ended when the context is left."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL if stdin is None and is_captured else subprocess.PIPE if stdin else None,
            stdout=subprocess.PIPE if is_captured else None,
            stderr=subprocess.STDOUT if is_captured else None,
            start_new_session=is_captured,  # so that a Ctrl-C in the terminal is ours to handle
            preexec_fn=_end_with_parent if is_captured else None,
        )
    except OSError as error:
        raise SettingsError(f"{name} cannot be started: {error}") from None
    child = _Process(name, process)
    try:
        if stdin and process.stdin:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(stdin)
                process.stdin.flush()
        if process.stdout:
            child.listener = threading.Thread(target=child.listen, args=(process.stdout,), daemon=True)
            child.listener.start()
        yield child
    finally:
        if child.is_running:
            process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                if is_captured:  # the leader of a session of its own
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
            process.wait()
        if process.stdin:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _end_with_parent() -> None:
    """In a child: it is asked to end also where this process was killed."""
    with contextlib.suppress(OSError, AttributeError):  # a system without it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _blame(processes: Sequence[_Process]) -> NoReturn:
    """For those that have ended and should not have."""
    ended = next(process for process in processes if not process.is_running)
    if ended.listener is not None:
        ended.listener.join(1)
    said = "\n".join(ended.said)
    if "InvalidAuthToken" in said:
        raise SettingsError(
            "the head has another token than this node: give all nodes the same RAY_AUTH_TOKEN or ~/.ray/auth_token"
        )
    raise EngineError(f"{ended.name} ended with status {ended.status}:\n{said}")


def _own_address(wanted: Launch, head: str) -> str:
    return address_on(wanted.interface) if wanted.interface else _address_towards(head)


def _address_towards(host: str) -> str:
    try:
        return address_towards(host)
    except (OSError, TypeError) as error:  # the latter for what cannot be a name
        raise SettingsError(f"there is no way from here to {host}: {error}") from None


def _resolved(host: str, timeout_s: float) -> str:
    """The address of a name, which a scheduler may make known only once that host has come."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.gethostbyname(host)
        except UnicodeError as error:
            raise SettingsError(f"--head {host} cannot be the name of a host ({error})") from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise SettingsError(f"--head {host}: no such host within {timeout_s:g} s ({error})") from None
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _why_unreachable(host: str, port: int, own: str) -> str:
    """ "": it can be reached."""
    try:
        socket.create_connection((host, port), timeout=SECONDS_TO_CONNECT, source_address=(own, 0)).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Says which node an error is of."""
    try:
        yield
    except MoeserveError as error:
        raise type(error)(f"on {socket.gethostname()}: {error}") from error


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A signal that asks this process to end also ends what it has started. Further ones do not disturb that."""

    def stop(number: int, _: object) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before: dict[signal.Signals, Callable[..., object] | int | None] = {}
    for each in (signal.SIGTERM, signal.SIGHUP):
        before[each] = signal.signal(each, stop)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
