"""The agent of a host: joins the engine of the first host, and starts, watches and kills ranks for it."""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

from moeserve.addresses import address_towards
from moeserve.config.environment import environment_of_rank
from moeserve.errors import EngineError, SettingsError
from moeserve.executor.hosts.connection import (
    SECONDS_BETWEEN_RECORDS,
    SECONDS_TO_ANSWER,
    End,
    Ended,
    HostOptions,
    Join,
    OpenChannel,
    Progress,
    Refused,
    StartRank,
    ToAgent,
    ToStart,
    WrongKeyError,
    connected,
    listening,
    prove,
)
from moeserve.executor.hosts.facts import own_facts
from moeserve.machine import usable_cores
from moeserve.processes.channel import Channel, frame, receive_frame
from moeserve.processes.local import start_process
from moeserve.processes.progress_records import ProgressRecords
from moeserve.processes.supervision import WatchedProcess
from moeserve.worker.protocol import RankStart

logger = logging.getLogger(__name__)

SECONDS_TO_JOIN = 600.0  # maximum time until the first host accepts this host
SECONDS_BETWEEN_ATTEMPTS = 0.5
# After this time without an answer of the first host, all ranks here are killed. The first host gives this host up
# sooner.
SECONDS_WITHOUT_FIRST_HOST = 60.0
MAX_NEW_CONNECTIONS = 128  # maximum number of connections whose first message has not arrived


@dataclass
class _WorkerGroup:
    """The progress records of a worker group, and the processes of its ranks here."""

    records: ProgressRecords
    ranks: dict[int, WatchedProcess[Any]] = field(default_factory=dict)  # by index of the record


class Agent:
    """Runs ranks on this host for the engine of the first host."""

    def __init__(self, options: HostOptions) -> None:
        """
        Raises:
            SettingsError: no address of this host reaches the first host.
        """
        self._options = options
        self._identity = secrets.token_hex(16)
        self._groups: dict[str, _WorkerGroup] = {}
        self._channels: dict[str, socket.socket] = {}  # channels of ranks that are not started yet, by token
        self._changed = threading.Condition()  # guards the groups and the channels
        self._new_connections = threading.BoundedSemaphore(MAX_NEW_CONNECTIONS)
        try:
            self._own_host = address_towards(options.host)
        except OSError as error:
            raise SettingsError(f"master_addr={options.host!r} cannot be reached from here: {error}") from None
        self._listener = listening(self._own_host, 0, "master_addr")

    def run(self) -> None:
        """Serve until the engine has ended. Join again if the first host was lost.

        Raises:
            SettingsError: the first host refuses this host.
            EngineError: the first host cannot be reached.
        """
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        while True:
            first = self._connected()
            try:
                has_ended, is_closed = self._serve(first), first.is_closed
            finally:
                first.close()
            self._kill_all()
            if has_ended:
                return
            logger.warning(
                "the first host %s; all ranks here were killed, and this host joins again",
                "has closed the connection" if is_closed else f"has not answered for {SECONDS_WITHOUT_FIRST_HOST:g} s",
            )

    def _connected(self) -> Channel[ToAgent]:
        """Connect to the first host, send it the request to join, and return the connection."""
        options, deadline = self._options, time.monotonic() + SECONDS_TO_JOIN
        message = Join(
            number=options.number,
            num_hosts=options.num_hosts,
            identity=self._identity,
            host=self._own_host,
            port=self._listener.getsockname()[1],
            facts=own_facts(),
        )
        while True:
            try:
                connection = connected(options.host, options.port, options.key, own_host=self._own_host)
            except WrongKeyError as error:
                raise SettingsError(
                    f"the first host at {options.host}:{options.port} does not accept this one ({error}): "
                    "cluster_key_file must have the same key on all hosts"
                ) from None
            except OSError as error:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"the first host at {options.host}:{options.port} cannot be reached within "
                        f"{SECONDS_TO_JOIN:g} s ({error.strerror or error}): start node_rank=0 there"
                    ) from None
                time.sleep(SECONDS_BETWEEN_ATTEMPTS)
                continue
            channel: Channel[ToAgent] = Channel(connection, ToAgent)
            channel.send(message)
            return channel

    def _serve(self, first: Channel[ToAgent]) -> bool:
        """Send progress until the first host ends the engine, or is lost. Return True if the first host has ended the
        engine.

        Raises:
            SettingsError: the first host refuses this host.
        """
        has_joined, answered_s = False, time.monotonic()
        while True:
            now = time.monotonic()
            if now - answered_s > SECONDS_WITHOUT_FIRST_HOST:
                return False
            first.send(Progress(self._records()))
            next_s = now + SECONDS_BETWEEN_RECORDS
            while (left_s := next_s - time.monotonic()) > 0:
                for message in first.receive(left_s):
                    if isinstance(message, Refused):
                        raise SettingsError(message.reason)
                    if isinstance(message, End):
                        return True
                    answered_s = time.monotonic()
                    if not has_joined:
                        has_joined = True
                        logger.info("this host has joined the engine at %s:%d", self._options.host, self._options.port)
                if first.is_closed:
                    return False

    def _records(self) -> dict[str, dict[int, bytes]]:
        with self._changed:
            return {
                name: {index: group.records.encoded(index) for index in group.ranks}
                for name, group in self._groups.items()
            }

    def _kill_all(self) -> None:
        """Kill all ranks here. The threads that watch the ranks report how they ended."""
        with self._changed:
            for group in self._groups.values():
                for process in group.ranks.values():
                    process.kill()

    def _accept(self) -> NoReturn:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # no free file descriptor
                logger.warning("a connection could not be accepted: %s", error)
                time.sleep(SECONDS_BETWEEN_ATTEMPTS)
                continue
            if self._new_connections.acquire(blocking=False):
                threading.Thread(target=self._handle, args=(connection,), name="connection", daemon=True).start()
            else:
                connection.close()

    def _handle(self, connection: socket.socket) -> None:
        """Read the first message of a connection, and carry it out."""
        try:
            try:
                prove(connection, self._options.key, connects=False)
                message = msgspec.msgpack.decode(receive_frame(connection), type=ToStart)
            finally:
                self._new_connections.release()
        except (OSError, EOFError, msgspec.DecodeError) as error:
            logger.warning("a connection was refused: %s", error)
            connection.close()
            return
        if isinstance(message, OpenChannel):
            with self._changed:
                self._channels[message.token] = connection
                self._changed.notify_all()
        else:
            with connection, contextlib.suppress(OSError):
                connection.sendall(frame(Ended(self._run_rank(message, connection))))

    def _run_rank(self, message: StartRank, control: socket.socket) -> str:
        """Run the process of a rank until the process or the connection ends. Return how the process ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: message.token in self._channels, SECONDS_TO_ANSWER):
                return "could not be started: its channel was not opened"
            channel = self._channels.pop(message.token)
        start = msgspec.msgpack.decode(message.start, type=RankStart)
        with channel:
            try:
                process, group = self._started(message, start, channel)
            except (EngineError, OSError) as error:
                return str(error)
        poll = select.poll()
        poll.register(control, select.POLLIN)
        for fd in process.handle.watched_fds:
            poll.register(fd, select.POLLIN)
        poll.poll()
        process.kill()
        process.wait(SECONDS_TO_ANSWER)
        cause = process.handle.exit_cause() or "does not end"
        with self._changed:
            if group.ranks.get(message.record) is process:
                del group.ranks[message.record]
            if not group.ranks and self._groups.get(message.worker_group) is group:
                del self._groups[message.worker_group]
                group.records.close()
        process.close()
        return cause

    def _started(
        self, message: StartRank, start: RankStart, channel: socket.socket
    ) -> tuple[WatchedProcess[Any], _WorkerGroup]:
        with self._changed:
            group = self._groups.get(message.worker_group)
            if group is None:
                group = self._groups[message.worker_group] = _WorkerGroup(ProgressRecords(message.num_records))
            group.records.clear_record(message.record)
            process = start_process(
                "moeserve.worker.rank_process:run",
                message.name,
                message.start,
                None,
                environment=environment_of_rank(start.config, usable_cores()),
                records_fd=group.records.fd,
                channel=channel,
            )
            group.ranks[message.record] = process
            return process, group
