"""`HostPool`: the other hosts that have joined the engine of this host, which is the first host."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from dataclasses import dataclass, field

import msgspec

from moeserve.addresses import AgentAddress, is_own
from moeserve.errors import EngineError, SettingsError
from moeserve.executor.hosts.connection import (
    SECONDS_TO_ANSWER,
    End,
    FromAgent,
    HostOptions,
    Join,
    Joined,
    Progress,
    Refused,
    WrongKeyError,
    listening,
    prove,
)
from moeserve.executor.hosts.facts import own_facts, why_different
from moeserve.executor.kernels import warn_of_other_kernels
from moeserve.processes.channel import Channel
from moeserve.processes.progress_records import ProgressRecord

logger = logging.getLogger(__name__)

SECONDS_TO_JOIN = 600.0  # maximum time until all hosts have joined
# A host whose last message is older than this is not used for new ranks, and its records are unknown.
SECONDS_WITHOUT_RECORD = 1.0
SECONDS_TO_END = 2.0  # maximum time until the agents have ended
SECONDS_UNTIL_REPLACED = 5.0  # a silent host's number may then be taken by another host


@dataclass(eq=False)
class _Member:
    """A host that has joined."""

    message: Join
    connection: socket.socket
    channel: Channel[FromAgent]
    received_s: float = field(default_factory=time.monotonic)  # time of the last message
    # progress records as last received, by worker group and index
    records: dict[str, dict[int, bytes]] = field(default_factory=dict)


class HostPool:
    """The hosts that have joined this host. Other hosts may join at any time, and lost hosts may join again."""

    def __init__(self, options: HostOptions) -> None:
        """Listen for other hosts.

        Raises:
            SettingsError: this host does not have the address, or the port is in use.
        """
        try:
            self.host = socket.gethostbyname(options.host)
        except OSError as error:
            raise SettingsError(f"master_addr={options.host!r}: no such host ({error})") from None
        self._options, self._facts = options, own_facts()
        self._members: dict[int, _Member] = {}  # by number of the host
        self._changed = threading.Condition()  # guards the members
        if not is_own(self.host):
            raise SettingsError(
                f"master_addr={options.host!r} is no address of this host, and node_rank=0 runs where it is; "
                "give this host another node_rank"
            )
        self._listener = listening(self.host, options.port, "master_addr (does node_rank=0 run already?)")
        self._is_closed = False
        threading.Thread(target=self._accept, name="accept-hosts", daemon=True).start()

    def wait_for_all(self) -> None:
        """Wait until all hosts have joined.

        Raises:
            EngineError: a host has not joined in time.
        """
        numbers = range(1, self._options.num_hosts)
        logger.info("waiting at %s:%d for %d other host(s)", self.host, self._options.port, len(numbers))
        with self._changed:
            if not self._changed.wait_for(lambda: all(each in self._members for each in numbers), SECONDS_TO_JOIN):
                missing = ", ".join(str(number) for number in numbers if number not in self._members)
                raise EngineError(
                    f"node_rank {missing} of nnodes={self._options.num_hosts} did not join within "
                    f"{SECONDS_TO_JOIN:g} s: see the output of moeserve on these hosts"
                )

    def cores_of_nodes(self) -> list[int]:
        """Return, for each host, the number of cores of the smallest host: all hosts have equally many ranks."""
        with self._changed:
            cores = [self._facts.cores, *(member.message.facts.cores for member in self._members.values())]
        return [min(cores)] * self._options.num_hosts

    def agents(self) -> dict[int, AgentAddress]:
        """Return the agents of the other hosts that answer, by number of the host."""
        now, key = time.monotonic(), self._options.key.hex()
        with self._changed:
            return {
                number: AgentAddress(number=number, host=each.message.host, port=each.message.port, key=key)
                for number, each in sorted(self._members.items())
                if now - each.received_s <= SECONDS_UNTIL_REPLACED
            }

    def record(self, agent: AgentAddress, worker_group: str, index: int) -> ProgressRecord | None:
        """Return the progress record of a rank; None if the rank's host has sent no record for a while."""
        with self._changed:
            member = self._members.get(agent.number)
            is_known = member is not None and time.monotonic() - member.received_s <= SECONDS_WITHOUT_RECORD
            if member is None or not is_known or member.message.port != agent.port:
                return None
            data = member.records.get(worker_group, {}).get(index)
        return ProgressRecord() if data is None else ProgressRecord.decoded(data)

    def drop_silent(self) -> None:
        """Disconnect hosts that do not answer. When these hosts notice this, they kill their ranks and join again."""
        with self._changed:
            for number in self._members.keys() - self.agents().keys():
                _disconnect(self._members.pop(number).connection)

    def close(self) -> None:
        """End the agents of all hosts, which close their connections then. May be called twice."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread that accepts
            for member in self._members.values():
                member.channel.send(End())
            self._changed.wait_for(lambda: not self._members, SECONDS_TO_END)

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closed:
                try:
                    connection, (host, _) = self._listener.accept()
                except OSError:  # closed, or no file descriptor is free
                    time.sleep(SECONDS_WITHOUT_RECORD if not self._is_closed else 0.0)
                    continue
                threading.Thread(target=self._admit, args=(connection, host), name="host", daemon=True).start()

    def _admit(self, connection: socket.socket, host: str) -> None:
        """Let a host join, and receive its messages until the host is lost."""
        try:
            prove(connection, self._options.key, connects=False)
        except OSError as error:
            why = "another key: cluster_key_file must be the same" if isinstance(error, WrongKeyError) else str(error)
            logger.warning("a connection from %s was refused: %s", host, why)
            connection.close()
            return
        channel: Channel[FromAgent] = Channel(connection, FromAgent)
        with contextlib.suppress(msgspec.DecodeError):  # a newer version; its agent sees that the connection is closed
            for message in channel.receive(SECONDS_TO_ANSWER):
                if isinstance(message, Join):
                    self._serve(_Member(message, connection, channel))
        channel.close()

    def _serve(self, member: _Member) -> None:
        reason = self._added(member)
        if reason:
            member.channel.send(Refused(reason))
            return
        member.channel.send(Joined())
        message = member.message
        logger.info(
            "host %d has joined: %s (%s), %d cores",
            message.number,
            message.host,
            message.facts.hostname,
            message.facts.cores,
        )
        numbered = ((0, self._facts), (message.number, message.facts))  # two hosts may have the same name
        warn_of_other_kernels({f"host {number} ({each.hostname})": each.kernels for number, each in numbered})
        while not member.channel.is_closed:
            for received in member.channel.receive(None):
                if isinstance(received, Progress):
                    member.received_s, member.records = time.monotonic(), received.records
                    member.channel.send(Joined())
        with self._changed:
            if self._members.get(message.number) is member:
                del self._members[message.number]
                self._changed.notify_all()

    def _added(self, member: _Member) -> str:
        """Add a host to the members. Return the reason if the host cannot be a member, otherwise ""."""
        message, num_hosts = member.message, self._options.num_hosts
        if message.num_hosts != num_hosts:
            return f"this host has nnodes={message.num_hosts}, and the first one {num_hosts}; give all hosts the same"
        if not 1 <= message.number < num_hosts:
            return (
                f"node_rank={message.number}: with nnodes={num_hosts}, other hosts have numbers up to {num_hosts - 1}"
            )
        if why := why_different(message.facts, self._facts):
            return f"this host cannot run ranks of the engine: {why}"
        with self._changed:
            if self._is_closed:
                return "the engine was shut down"
            other = self._members.get(message.number)
            is_alive = other is not None and time.monotonic() - other.received_s <= SECONDS_UNTIL_REPLACED
            if other is not None and is_alive and other.message.identity != message.identity:
                return (
                    f"node_rank={message.number} runs already, on {other.message.host} "
                    f"({other.message.facts.hostname}); give each host its own node_rank"
                )
            self._members[message.number] = member
            self._changed.notify_all()
        if other is not None:
            _disconnect(other.connection)
        return ""


def _disconnect(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
