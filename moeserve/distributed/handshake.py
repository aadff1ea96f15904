"""Hands an open file of each rank to all others, if they can reach each other on this host. Knows not what is in it.

Ranks meet over sockets in Linux' abstract namespace: they have no file, and end with their processes. Their names are
random, and stand in the store alone; whoever connects must show a secret from there as well. So nothing has to be known
of hosts, containers or process ids: either all files have arrived everywhere, or all ranks agree that they have not.

The sockets stay open. One that hangs up says that the rank at its other end has died, or has dropped it.
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

SECRET_BYTES = 32
SECONDS_BETWEEN_LOOKS = 0.05  # for ranks that have given up
CANNOT = "-"  # instead of an address
YES = "yes"  # as a verdict; all others are reasons
FOLLOWS = "another rank has given up"


class CannotReach(Exception):
    """Why these ranks cannot hand files to each other; the same words on none or all of them."""


@dataclass
class Contacts:
    """To each other rank a socket, and the file it gave; of this rank -1 and its own."""

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


def exchange_files(store: Store, rank: int, num_ranks: int, make_file: Callable[[], int], timeout_s: float) -> Contacts:
    """Make a file, and give it to all others for theirs.

    CannotReach, on all ranks, when one of them cannot make its file, or cannot reach another. RuntimeError when a rank
    does not come in time. `store` is for this alone.
    """
    with _Meeting(store, rank, num_ranks, timeout_s) as meeting:
        try:
            meeting.open(make_file)
            meeting.gather()
            verdict = YES
        except (OSError, CannotReach) as error:
            verdict = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
        agree(store, rank, num_ranks, verdict, timeout_s)
        return meeting.keep()


def agree(store: Store, rank: int, num_ranks: int, verdict: str, timeout_s: float) -> None:
    """CannotReach on all ranks unless each says YES. RuntimeError when one says nothing in time."""
    if verdict != YES:
        store.set("refused", "")
    store.set(f"verdict/{rank}", verdict)
    keys = [f"verdict/{each}" for each in range(num_ranks)]
    store.wait(keys, timedelta(seconds=timeout_s))
    reasons = [said for key in keys if (said := store.get(key).decode()) != YES]
    if reasons:
        raise CannotReach(next((reason for reason in reasons if reason != FOLLOWS), FOLLOWS))


@dataclass
class _Meeting:
    """One rank's side, until all have come or one has given up. What was opened is closed, unless it is kept."""

    store: Store
    rank: int
    num_ranks: int
    timeout_s: float
    contacts: Contacts = field(init=False)
    secrets: list[bytes] = field(default_factory=list)  # by rank: what to show to it
    listener: socket.socket | None = None
    unknown: dict[int, socket.socket] = field(default_factory=dict)  # by descriptor: they have not said who they are

    def __post_init__(self) -> None:
        self.contacts = Contacts([None] * self.num_ranks, [-1] * self.num_ranks)
        self.deadline = time.monotonic() + self.timeout_s

    def __enter__(self) -> _Meeting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for each in [self.listener, *self.unknown.values()]:
            if each is not None:
                each.close()
        self.contacts.files = [fd for fd in self.contacts.files if fd >= 0]
        self.contacts.close()

    def keep(self) -> Contacts:
        kept, self.contacts = self.contacts, Contacts([], [])
        return kept

    def open(self, make_file: Callable[[], int]) -> None:
        """Make the file, listen, and tell where. Whatever happens, the others are told something."""
        address = CANNOT
        try:
            self.contacts.files[self.rank] = make_file()
            self.listener = _listen(self.num_ranks)
            address = f"{self.listener.getsockname()[1:].decode()} {secrets.token_hex(SECRET_BYTES // 2)}"
        finally:
            self.store.set(f"address/{self.rank}", address)

    def gather(self) -> None:
        """Connect to lower ranks, and wait for higher ones."""
        names = []
        for rank in range(self.num_ranks):
            said = self.store.get(f"address/{rank}").decode()
            if said == CANNOT:
                raise CannotReach(f"rank {rank} of the group has no file to share")
            name, secret = said.split()
            names.append(name)
            self.secrets.append(secret.encode())
        for rank in range(self.rank):
            self._greet(rank, names[rank])
        while any(fd < 0 for fd in self.contacts.files):
            if not self._take_next() and self.store.check(["refused"]):
                raise CannotReach(FOLLOWS)
            if time.monotonic() > self.deadline:
                absent = [rank for rank, fd in enumerate(self.contacts.files) if fd < 0]
                raise CannotReach(f"ranks {absent} of the group did not answer on this host")

    def _greet(self, rank: int, name: str) -> None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.contacts.sockets[rank] = peer
        peer.settimeout(max(0.01, self.deadline - time.monotonic()))
        while True:
            try:
                peer.connect(b"\0" + name.encode())
                break
            except BlockingIOError:  # so many wait there that no more fit; the kernel does not wait with a timeout
                if self.store.check(["refused"]):
                    raise CannotReach(FOLLOWS) from None
                if time.monotonic() > self.deadline:
                    raise CannotReach(f"rank {rank} of the group admitted nobody in time") from None
                time.sleep(SECONDS_BETWEEN_LOOKS)
        self._give(peer, rank)

    def _give(self, peer: socket.socket, rank: int) -> None:
        """Say who this is, with the secret of the other, and give the file."""
        words = self.secrets[rank] + str(self.rank).encode()
        socket.send_fds(peer, [words], [self.contacts.files[self.rank]])

    def _take_next(self) -> bool:
        """What happens next, if anything does soon."""
        assert self.listener is not None
        poll = select.poll()
        waiting = {
            each.fileno(): rank
            for rank, each in enumerate(self.contacts.sockets)
            if each is not None and self.contacts.files[rank] < 0
        }
        for fd in [self.listener.fileno(), *self.unknown, *waiting]:
            poll.register(fd, select.POLLIN)
        ready = poll.poll(SECONDS_BETWEEN_LOOKS * 1000)
        for fd, _ in ready:
            if fd == self.listener.fileno():
                stranger, _ = self.listener.accept()
                stranger.settimeout(max(0.01, self.deadline - time.monotonic()))
                self.unknown[stranger.fileno()] = stranger
            elif fd in waiting:
                peer = self.contacts.sockets[waiting[fd]]
                assert peer is not None
                found = self._take(peer)
                if found is None:
                    raise CannotReach(f"rank {waiting[fd]} of the group hung up")
                self.contacts.files[waiting[fd]] = found[1]
            else:
                self._admit(self.unknown.pop(fd))
        return bool(ready)

    def _admit(self, stranger: socket.socket) -> None:
        """One that has connected has spoken. Whoever does not know the secret is no rank of this group."""
        found = self._take(stranger)
        if found is None:
            stranger.close()
            return
        rank, fd = found
        if not self.rank < rank < self.num_ranks or self.contacts.sockets[rank] is not None:
            os.close(fd)
            stranger.close()
            return
        self.contacts.sockets[rank], self.contacts.files[rank] = stranger, fd
        self._give(stranger, rank)

    def _take(self, peer: socket.socket) -> tuple[int, int] | None:
        """Who gave a file, and the file; None: it was nobody with the secret."""
        with contextlib.suppress(OSError, ValueError):
            words, fds, _, _ = socket.recv_fds(peer, SECRET_BYTES + 16, 1)
            if len(fds) == 1 and secrets.compare_digest(words[:SECRET_BYTES], self.secrets[self.rank]):
                return int(words[SECRET_BYTES:]), fds[0]
            for fd in fds:
                os.close(fd)
        return None


def _listen(num_ranks: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(b"\0moeserve-" + secrets.token_hex(16).encode())
        listener.listen(num_ranks)
    except OSError:
        listener.close()
        raise
    return listener
