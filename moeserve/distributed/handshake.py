"""The exchange of open files between the ranks of one host, and a vote among ranks on whether an attempt succeeded.

Ranks connect over sockets of this host (`processes/local_sockets.py`), whose addresses are random and published only in
the store. A process that connects must run as the same user and send a secret from the store. The result does not
depend on host names, containers or process ids: either all files reach all ranks, or all ranks agree that some did not.
The sockets stay open: a closed socket shows that the rank at the other end has died or left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType

from torch.distributed import Store

from moeserve.distributed.transport import TransportUnavailable
from moeserve.processes import local_sockets
from moeserve.processes.local_sockets import is_same_user

SECRET_BYTES = 32
RANK_DIGITS = 8  # a message holds the receiver's secret and the sender's rank
POLL_S = 0.05  # interval between checks for a refusal of another rank
NO_ADDRESS = "-"
OTHER_REFUSED = "another rank refused"


@dataclass
class PeerConnections:
    """The sockets to all ranks, and the file that each rank sent, by rank.

    This rank has None as its socket, and its own file.
    """

    sockets: list[socket.socket | None]
    files: list[int]

    def socket_fds(self) -> list[int]:
        return [-1 if each is None else each.fileno() for each in self.sockets]

    def close_files(self) -> None:
        while self.files:
            os.close(self.files.pop())

    def close(self) -> None:
        self.close_files()
        for each in self.sockets:
            if each is not None:
                each.close()


def exchange_files(
    store: Store, rank: int, num_ranks: int, make_file: Callable[[], int], timeout_s: float
) -> PeerConnections:
    """Make a file, and exchange it for the files of all other ranks.

    Args:
        store: used only by this exchange.

    Raises:
        TransportUnavailable: on all ranks, if one of them cannot make its file or reach another rank.
        RuntimeError: a rank does not answer in time.
    """
    with _Handshake(store, rank, num_ranks, timeout_s) as handshake:
        refusal = ""
        try:
            handshake.listen(make_file)
            handshake.connect_all()
        except OSError as error:
            refusal = f"{type(error).__name__}: {error}"
        except TransportUnavailable as error:
            refusal = str(error)
        agree(store, rank, num_ranks, refusal, timeout_s)
        return handshake.take_connections()


def agree(store: Store, rank: int, num_ranks: int, refusal: str, timeout_s: float) -> None:
    """Publish this rank's reason to refuse ("" to accept), and wait for the votes of all ranks.

    Raises:
        TransportUnavailable: on all ranks, if one of them refuses.
        RuntimeError: a rank does not answer in time.
    """
    if refusal:
        store.set("refused", "")
    store.set(f"refusal/{rank}", refusal)
    keys = [f"refusal/{each}" for each in range(num_ranks)]
    store.wait(keys, timedelta(seconds=timeout_s))
    reasons = [reason for value in store.multi_get(keys) if (reason := value.decode())]
    if reasons:
        raise TransportUnavailable(next((reason for reason in reasons if reason != OTHER_REFUSED), OTHER_REFUSED))


@dataclass
class _Handshake:
    """One rank's side of `exchange_files`. Leaving the context closes all sockets and files that were not taken."""

    store: Store
    rank: int
    num_ranks: int
    timeout_s: float
    connections: PeerConnections = field(init=False)
    secrets: list[bytes] = field(default_factory=list)  # the secret of each receiving rank
    listener: socket.socket | None = None
    unidentified: dict[int, socket.socket] = field(default_factory=dict)  # accepted connections by file descriptor

    def __post_init__(self) -> None:
        self.connections = PeerConnections([None] * self.num_ranks, [-1] * self.num_ranks)
        self.deadline = time.monotonic() + self.timeout_s

    def __enter__(self) -> _Handshake:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.listener is not None:
            local_sockets.stop_listening(self.listener)
        for each in self.unidentified.values():
            each.close()
        self.connections.files = [fd for fd in self.connections.files if fd >= 0]
        self.connections.close()

    def take_connections(self) -> PeerConnections:
        taken, self.connections = self.connections, PeerConnections([], [])
        return taken

    def listen(self, make_file: Callable[[], int]) -> None:
        """Make the file, listen, and publish the address; on failure, publish that there is no address."""
        address = NO_ADDRESS
        try:
            self.connections.files[self.rank] = make_file()
            self.listener = local_sockets.listen(self.num_ranks)
            address = f"{secrets.token_hex(SECRET_BYTES // 2)} {local_sockets.address_of(self.listener)}"
        finally:
            self.store.set(f"address/{self.rank}", address)

    def connect_all(self) -> None:
        """Connect to all lower ranks, and accept connections of all higher ranks."""
        peers = []
        addresses = self.store.multi_get([f"address/{rank}" for rank in range(self.num_ranks)])
        for rank, address in enumerate(each.decode() for each in addresses):
            if address == NO_ADDRESS:
                raise TransportUnavailable(f"rank {rank} of the group has no file to share")
            secret, _, peer = address.partition(" ")
            peers.append(peer)
            self.secrets.append(secret.encode())
        for rank in range(self.rank):
            self._connect(rank, peers[rank])
        while any(fd < 0 for fd in self.connections.files):
            if not self._handle_events() and self.store.check(["refused"]):
                raise TransportUnavailable(OTHER_REFUSED)
            if time.monotonic() > self.deadline:
                missing = [rank for rank, fd in enumerate(self.connections.files) if fd < 0]
                raise TransportUnavailable(f"ranks {missing} of the group did not answer on this host")

    def _connect(self, rank: int, address: str) -> None:
        peer = socket.socket(socket.AF_UNIX)
        self.connections.sockets[rank] = peer
        peer.settimeout(max(0.01, self.deadline - time.monotonic()))
        while True:
            try:
                local_sockets.connect(peer, address)
                break
            except BlockingIOError:  # the listener's queue is full; the kernel does not wait despite a timeout
                if self.store.check(["refused"]):
                    raise TransportUnavailable(OTHER_REFUSED) from None
                if time.monotonic() > self.deadline:
                    raise TransportUnavailable(f"rank {rank} of the group accepted no connection in time") from None
                time.sleep(POLL_S)
        if not is_same_user(peer):
            raise TransportUnavailable(f"rank {rank} of the group runs as another user")
        self._send_file(peer, rank)

    def _send_file(self, peer: socket.socket, rank: int) -> None:
        message = self.secrets[rank] + str(self.rank).zfill(RANK_DIGITS).encode()
        socket.send_fds(peer, [message], [self.connections.files[self.rank]])

    def _handle_events(self) -> bool:
        """Handle events, after a wait of at most POLL_S seconds. Return False if there were no events."""
        assert self.listener is not None
        poll = select.poll()
        awaited = {
            each.fileno(): rank
            for rank, each in enumerate(self.connections.sockets)
            if each is not None and self.connections.files[rank] < 0
        }
        for fd in [self.listener.fileno(), *self.unidentified, *awaited]:
            poll.register(fd, select.POLLIN)
        ready = poll.poll(POLL_S * 1000)
        for fd, _ in ready:
            if fd == self.listener.fileno():
                peer, _ = self.listener.accept()
                peer.settimeout(max(0.01, self.deadline - time.monotonic()))
                self.unidentified[peer.fileno()] = peer
            elif fd in awaited:
                connected = self.connections.sockets[awaited[fd]]
                assert connected is not None
                received = self._receive_file(connected)
                if received is None:
                    raise TransportUnavailable(f"rank {awaited[fd]} of the group closed the connection")
                self.connections.files[awaited[fd]] = received[1]
            else:
                self._identify(self.unidentified.pop(fd))
        return bool(ready)

    def _identify(self, peer: socket.socket) -> None:
        """Read the first message of an accepted connection. Close the connection if no rank of the group sent it."""
        received = self._receive_file(peer) if is_same_user(peer) else None
        if received is None:
            peer.close()
            return
        rank, fd = received
        if not self.rank < rank < self.num_ranks or self.connections.sockets[rank] is not None:
            os.close(fd)
            peer.close()
            return
        self.connections.sockets[rank], self.connections.files[rank] = peer, fd
        self._send_file(peer, rank)

    def _receive_file(self, peer: socket.socket) -> tuple[int, int] | None:
        """Return the rank of the sender and its file. None if the sender does not have the secret.

        A rank sends its short message at once, so a message that arrives in pieces does not come from a rank.
        """
        with contextlib.suppress(OSError, ValueError):
            message, fds, _, _ = socket.recv_fds(peer, SECRET_BYTES + RANK_DIGITS, 1)
            is_whole = len(fds) == 1 and len(message) == SECRET_BYTES + RANK_DIGITS
            if is_whole and secrets.compare_digest(message[:SECRET_BYTES], self.secrets[self.rank]):
                return int(message[SECRET_BYTES:]), fds[0]
            for fd in fds:
                os.close(fd)
        return None
