"""TCP connections between the hosts of an engine, and the messages over them.

Both sides of a connection prove that they know the same key before any message is read. Nothing is encrypted.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from moeserve.errors import SettingsError
from moeserve.processes.peer_connection import Connection, PeerError

SECONDS_TO_ANSWER = 10.0  # maximum time until the other side of a new connection answers
SECONDS_BETWEEN_RECORDS = 0.25


class WrongKeyError(ConnectionError):
    """The other side of a connection has another key."""


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The hosts of an engine, and the number of this host."""

    num_hosts: int
    number: int  # 0: the first host
    host: str  # address or name of the first host
    port: int  # where the first host listens
    key: bytes


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that a host must share with the first host, and properties of its processor."""

    hostname: str
    cores: int
    kernels: str  # instruction set of the C++ kernels; "" if there are none
    versions: dict[str, str]  # versions of packages and of Python, by name


class Join(msgspec.Struct, frozen=True, tag="join"):
    """First message of an agent to the first host."""

    number: int
    num_hosts: int
    identity: str  # random, and the same for as long as the agent runs
    host: str  # address at which the agent listens
    port: int
    facts: HostFacts


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Message of an agent, sent at intervals: the progress records of its ranks, by worker group and index."""

    records: dict[str, dict[int, bytes]]


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """Answer to `Join` and to each `Progress`."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Answer to `Join`: the host cannot be part of the engine."""

    reason: str


class End(msgspec.Struct, frozen=True, tag="end"):
    """Message to an agent that the engine has ended."""


class OpenChannel(msgspec.Struct, frozen=True, tag="channel"):
    """First message of a connection to an agent. The connection becomes the channel of a rank."""

    token: str  # random


class StartRank(msgspec.Struct, frozen=True, tag="start"):
    """First message of a connection to an agent, which starts a rank. The rank is killed when the connection ends."""

    token: str  # token of the rank's channel
    name: str
    worker_group: str
    num_records: int  # progress records of the worker group
    record: int  # index of the rank's progress record
    start: msgspec.Raw  # the rank's `RankStart`


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Message to the process that has started a rank: how the rank ended, in one line."""

    cause: str


FromAgent: TypeAlias = Join | Progress
ToAgent: TypeAlias = Joined | Refused | End
ToStart: TypeAlias = OpenChannel | StartRank


def connected(host: str, port: int, key: bytes, *, own_host: str | None = None) -> socket.socket:
    """Return a connection to another host that has the same key. Its timeout is `SECONDS_TO_ANSWER`.

    Raises:
        WrongKeyError: the other side has another key.
        OSError: the other host cannot be reached, or does not answer.
    """
    source = None if own_host is None else (own_host, 0)
    connection = socket.create_connection((host, port), timeout=SECONDS_TO_ANSWER, source_address=source)
    try:
        prove(connection, key, connects=True)
    except BaseException:
        connection.close()
        raise
    return connection


def prove(connection: socket.socket, key: bytes, *, connects: bool) -> None:
    """Prove that this side knows the key, and require the same proof from the other side.

    The connecting side sends its proof first, so that it gets no proof without knowing the key.

    Raises:
        WrongKeyError: the other side has another key, or has closed the connection, as a side with another key does.
        OSError: the other side does not answer within `SECONDS_TO_ANSWER`.
    """
    try:
        Connection(connection, time.monotonic() + SECONDS_TO_ANSWER).prove(key, connects=connects)
    except PeerError as error:
        raise WrongKeyError(str(error)) from None
    connection.settimeout(SECONDS_TO_ANSWER)


def listening(host: str, port: int, setting: str) -> socket.socket:
    """Return a socket that listens on one address of this host.

    Raises:
        SettingsError: the address cannot be used.
    """
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise SettingsError(
            f"{setting}: {host}:{port} cannot be opened on this host ({error.strerror or error})"
        ) from None
