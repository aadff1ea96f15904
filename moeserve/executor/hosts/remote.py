"""A rank on another host, started through the agent there."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
from typing import Any

import msgspec

from moeserve.addresses import AgentAddress
from moeserve.errors import EngineError
from moeserve.executor.hosts.connection import Ended, OpenChannel, StartRank, connected
from moeserve.processes.channel import Channel, frame
from moeserve.processes.supervision import WatchedProcess
from moeserve.worker.protocol import FromRank, RankStart

TOKEN_BYTES = 16


class RemoteProcess:
    """The process of a rank on another host. See `ProcessHandle`."""

    def __init__(self, control: socket.socket) -> None:
        """
        Args:
            control: a connection to the agent, which kills the rank when the connection ends.
        """
        self._control = control
        self._messages: Channel[Ended] = Channel(control, Ended)
        self._cause: str | None = None

    @property
    def watched_fds(self) -> list[int]:
        return [] if self._messages.is_closed else [self._messages.fileno()]

    def exit_cause(self) -> str | None:
        if self._cause is None:
            for message in self._messages.receive(0.0):
                self._cause = message.cause
            if self._cause is None and self._messages.is_closed:
                self._cause = "its host has closed the connection: the agent there has ended, or the host"
        return self._cause

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def wait(self, timeout_s: float) -> bool:
        if self._cause is None and not self._messages.is_closed:
            poll = select.poll()
            poll.register(self._messages, select.POLLIN)
            poll.poll(max(0.0, timeout_s) * 1000)
        return self.exit_cause() is not None

    def close(self) -> None:
        self._messages.close()


def start_remote_rank(
    agent: AgentAddress, start: RankStart, worker_group: str, num_records: int
) -> WatchedProcess[Any]:
    """Start the process of a rank on the host of an agent.

    Args:
        worker_group: name of the worker group, for which the agent has its own progress records.

    Raises:
        EngineError: the agent cannot be reached.
    """
    token, key = secrets.token_hex(TOKEN_BYTES), bytes.fromhex(agent.key)
    request = StartRank(
        token=token,
        name=start.name,
        worker_group=worker_group,
        num_records=num_records,
        record=start.record,
        start=msgspec.Raw(msgspec.msgpack.encode(start)),
    )
    try:
        channel = connected(agent.host, agent.port, key)
        channel.sendall(frame(OpenChannel(token)))
        control = connected(agent.host, agent.port, key)
        control.sendall(frame(request))
    except OSError as error:
        raise EngineError(f"{start.name} could not be started: the agent there cannot be reached ({error})") from None
    return WatchedProcess(start.name, channel, FromRank, RemoteProcess(control))
