"""The options of `moeserve launch`, and the checks of a node before Ray is started on it."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.addresses import address_on, address_towards, is_loopback, is_own, own_addresses
from moeserve.errors import SettingsError, missing_extra

logger = logging.getLogger(__name__)

MAX_PORT = 65535
PORTS_OF_RAY = range(10001, 20000)  # of its client server and, by default, its workers
POLL_INTERVAL_S = 0.2
SECONDS_TO_CONNECT = 2.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The options of `moeserve launch`."""

    head: str | None  # address or name of the first node; None: this host, if `hosts` is used
    port: int
    num_nodes: int
    hosts: Sequence[str]  # other nodes, started by the remote shell; empty: started by other means
    remote_shell: str  # command line without the host name
    interface: str | None  # network interface by name or subnet
    num_cpus: int | None  # number of CPUs that Ray uses here; None: all that this process may use
    model: str | None  # checkpoint folder that each node must be able to read, or OWNER/NAME in a hub
    timeout_s: float  # limit for all nodes to join
    command: Sequence[str]  # command to run; empty: keep the cluster until interrupted
    reads_token: bool = False  # read the token from standard input


def find_addresses(options: Launch) -> tuple[str, str]:
    """Return the addresses of the head and of this node, which are equal on the head.

    Raises:
        SettingsError: an address cannot be determined.
    """
    if options.hosts and options.head is None:
        head = address_on(options.interface) if options.interface else _address_towards(options.hosts[0])
    elif options.head is None:
        raise SettingsError("--head is missing: the address of the first node, the same on all nodes")
    else:
        head = _resolved(options.head, options.timeout_s)
    if options.interface and is_loopback(head) and options.num_nodes > 1:
        head = address_on(options.interface)  # the host's own name often resolves to loopback in /etc/hosts
    if is_own(head):
        return head, head
    return head, address_on(options.interface) if options.interface else _address_towards(head)


def check_node(options: Launch, head: str, own: str) -> None:
    """Check the requirements that can be checked before anything is started.

    Raises:
        SettingsError: this node cannot be part of the cluster.
    """
    try:
        from moeserve.executor.ray.nodes import why_unreadable
    except ImportError as error:
        raise missing_extra("a cluster needs Ray", "ray", error) from None
    is_head = head == own
    if options.num_nodes > 1 and is_loopback(own):
        others = [address for address in own_addresses().values() if not is_loopback(address)]
        raise SettingsError(
            f"the address {own} can be reached from this host alone; give --head an address that the other nodes can "
            f"reach: {', '.join(others)}"
        )
    if options.interface is not None and is_head and address_on(options.interface) != head:
        raise SettingsError(f"--head {head} is not on {options.interface}, which is {address_on(options.interface)}")
    try:
        if not shlex.split(options.remote_shell):
            raise ValueError("it is empty")
    except ValueError as error:
        raise SettingsError(f"--remote-shell {options.remote_shell!r}: {error}") from None
    if not 1 <= options.port <= MAX_PORT:
        raise SettingsError(f"--port {options.port}: ports are from 1 to {MAX_PORT}")
    if options.port in PORTS_OF_RAY:
        raise SettingsError(
            f"--port {options.port}: Ray's workers use ports {PORTS_OF_RAY[0]} to {PORTS_OF_RAY[-1]}; choose another"
        )
    if options.model is not None and (why := why_unreadable(options.model)):
        message = f"the model cannot be read: {why}; every node needs it under the same path"
        if is_head:
            raise SettingsError(message)
        logger.warning(message)  # the head checks all nodes, and its error names this node
    if is_head:
        try:
            socket.create_server((head, options.port)).close()
        except OSError as error:
            raise SettingsError(
                f"port {options.port} cannot be opened on {head} ({os.strerror(error.errno or 0)}): another Ray "
                "cluster may use it; choose another with --port, on all nodes"
            ) from None


def why_unreachable(host: str, port: int, own: str) -> str:
    """Return the reason why `own` cannot connect to a port of `host`; "" if the connection succeeds."""
    try:
        socket.create_connection((host, port), timeout=SECONDS_TO_CONNECT, source_address=(own, 0)).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _address_towards(host: str) -> str:
    try:
        return address_towards(host)
    except (OSError, TypeError) as error:  # TypeError: not a valid host name
        raise SettingsError(f"{host} cannot be reached from here: {error}") from None


def _resolved(host: str, timeout_s: float) -> str:
    """Return the address of a host name. Retries: a scheduler may publish the name only once the host has started."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.gethostbyname(host)
        except UnicodeError as error:
            raise SettingsError(f"--head {host} cannot be the name of a host ({error})") from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise SettingsError(f"--head {host}: no such host within {timeout_s:g} s ({error})") from None
        time.sleep(POLL_INTERVAL_S)
