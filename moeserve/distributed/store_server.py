"""The server of the key-value store where ranks meet, which answers only peers that know the secret of the launch.

The secret reaches the ranks over inherited sockets or through Ray. A peer that connects receives a random challenge,
and is disconnected unless it answers with the HMAC of the challenge; the server proves in the same way that it knows
the secret. A peer without the secret therefore reads only random bytes, and changes nothing. If all ranks run on one
Linux host, the server listens on a socket with an abstract name, and the kernel must confirm that a peer runs as the
same user. On other systems the server of a single host listens on the loopback interface.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from moeserve.addresses import StoreAddress
from moeserve.processes import local_sockets
from moeserve.processes.channel import Channel, frame
from moeserve.processes.local_sockets import NO_SIGNAL, is_same_user
from moeserve.processes.proof import NONCE_BYTES, proof
from moeserve.processes.wake_up import WakeUp

SECONDS_TO_AUTHENTICATE = 10.0
MAX_UNAUTHENTICATED = 1024  # unauthenticated peers; when one more connects, the oldest is disconnected


class Set(msgspec.Struct, frozen=True, tag="set"):
    key: str
    value: bytes


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Request to add `amount` to the number at `key`, which is 0 at first. The reply is the sum."""

    key: str
    amount: int


class CompareSet(msgspec.Struct, frozen=True, tag="compare-set"):
    """Request to set a key that has the expected value, or that is absent if `expected` is empty.

    The reply is the key's value after the request, or `expected` if the key is absent.
    """

    key: str
    expected: bytes
    value: bytes


class Delete(msgspec.Struct, frozen=True, tag="delete"):
    """Request to remove a key. The reply is True if the key existed."""

    key: str


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Request to look for keys. The reply is True if all keys exist."""

    keys: list[str]


class Get(msgspec.Struct, frozen=True, tag="get"):
    """Request for the values of keys. The reply is sent once all keys exist."""

    keys: list[str]


class Collect(msgspec.Struct, frozen=True, tag="collect"):
    """Request for all entries of a folder, which is the part of a key before its last "/".

    The reply maps the rest of each key to its value, and is sent once the folder has `num_entries` entries.
    """

    folder: str
    num_entries: int


Operation: TypeAlias = Set | Add | CompareSet | Delete | Check | Get | Collect


class Request(msgspec.Struct, frozen=True):
    """One request. A connection has one request at a time: a new request replaces a request that still waits."""

    number: int
    operation: Operation


class Reply(msgspec.Struct, frozen=True):
    number: int  # the request's number
    value: Any


class StoreServer:
    """A store in a thread of this process. The thread ends when `close` is called or the object is deleted."""

    def __init__(self, listener: socket.socket, address: StoreAddress) -> None:
        self.address = address
        wake_up = WakeUp()
        loop = _Loop(listener, address.key, wake_up)
        self._thread = threading.Thread(target=loop.run, name="moeserve store", daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, _stop, wake_up, self._thread, os.getpid())

    def close(self) -> None:
        """Disconnect all ranks. May be called twice."""
        self._stop()


def start_store(host: str | None = None) -> StoreServer:
    """Start a store for one launch.

    Args:
        host: address at which ranks on other hosts reach the store; None: all ranks run on this host.
    """
    key = secrets.token_hex(NONCE_BYTES)
    if host is None and local_sockets.HAS_ABSTRACT_NAMES:
        listener = local_sockets.listen(1024)
        return StoreServer(listener, StoreAddress(name=local_sockets.address_of(listener), key=key))
    listener = socket.create_server((host or "127.0.0.1", 0), backlog=1024)
    return StoreServer(listener, StoreAddress(host=host or "127.0.0.1", port=listener.getsockname()[1], key=key))


def _growth(folder: str, num_entries: int) -> str:
    """Return the name under which a `Collect` request waits for the folder to have `num_entries` entries.

    The name never equals a key, because no key has an empty part.
    """
    return f"{folder}//{num_entries}"


def _stop(wake_up: WakeUp, thread: threading.Thread, owner: int) -> None:
    if os.getpid() == owner:  # a fork lacks the thread, but shares the event that ends it
        wake_up.wake()
        thread.join()


@dataclass(eq=False)
class _UnauthenticatedPeer:
    """A connected peer that has not authenticated yet."""

    connection: socket.socket
    deadline: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    answer: bytes = b""  # bytes received so far of the peer's nonce and proof


@dataclass(eq=False)
class _Rank:
    """An authenticated peer."""

    channel: Channel[Request]
    waiting: Request | None = None


class _Loop:
    """The server's thread."""

    def __init__(self, listener: socket.socket, key: str, wake_up: WakeUp) -> None:
        self._listener, self._key, self._wake_up = listener, key, wake_up
        listener.setblocking(False)
        self._folders: dict[str, dict[str, bytes]] = {}
        self._unauthenticated: dict[int, _UnauthenticatedPeer] = {}  # by file descriptor
        self._ranks: dict[int, _Rank] = {}  # by file descriptor
        self._waiting_for: dict[str, list[_Rank]] = {}  # ranks that wait, by key or name from `_growth`
        self._poll = select.poll()
        self._is_listening = True

    def run(self) -> None:
        for fd in (self._listener.fileno(), self._wake_up.fd):
            self._poll.register(fd, select.POLLIN)
        while not self._wake_up.take():
            was_listening, self._is_listening = self._is_listening, True
            events = self._poll.poll(None if was_listening and not self._unauthenticated else 1000)
            if not was_listening:
                self._poll.register(self._listener, select.POLLIN)
            for fd, _ in events:
                try:
                    self._handle(fd)
                except BlockingIOError:
                    pass
                except OSError:
                    if fd in self._unauthenticated or fd in self._ranks:  # else the descriptor would stay ready
                        self._drop(fd)
            now = time.monotonic()
            for fd in [fd for fd, peer in self._unauthenticated.items() if peer.deadline < now]:
                self._drop(fd)
        for fd in [*self._unauthenticated, *self._ranks]:
            self._drop(fd)
        self._listener.close()

    def _handle(self, fd: int) -> None:
        if fd == self._listener.fileno():
            self._accept()
        elif fd in self._unauthenticated:
            self._authenticate(fd, self._unauthenticated[fd])
        elif fd in self._ranks:
            rank = self._ranks[fd]
            try:
                requests = rank.channel.receive(0.0)
            except msgspec.DecodeError:
                requests = []
                rank.channel.is_closed = True
            for request in requests:
                rank.waiting = None
                self._answer(rank, request)
            if rank.channel.is_closed:
                self._drop(fd)
            else:
                self._watch(fd, rank)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # the peer has disconnected
            return
        except OSError:  # no free file descriptor; stop polling the listener, which stays ready
            self._poll.unregister(self._listener)
            self._is_listening = False
            return
        connection.setblocking(False)
        if connection.family == socket.AF_UNIX and not is_same_user(connection):
            connection.close()
            return
        if len(self._unauthenticated) == MAX_UNAUTHENTICATED:
            self._drop(next(iter(self._unauthenticated)))
        peer = _UnauthenticatedPeer(connection, time.monotonic() + SECONDS_TO_AUTHENTICATE)
        self._unauthenticated[connection.fileno()] = peer
        self._poll.register(connection, select.POLLIN)
        with contextlib.suppress(OSError):  # the peer has disconnected; the next event shows it
            connection.send(peer.nonce, NO_SIGNAL)

    def _authenticate(self, fd: int, peer: _UnauthenticatedPeer) -> None:
        received = peer.connection.recv(2 * NONCE_BYTES - len(peer.answer))
        peer.answer += received
        if received and len(peer.answer) < 2 * NONCE_BYTES:
            return
        nonce, answer = peer.answer[:NONCE_BYTES], peer.answer[NONCE_BYTES:]
        if not hmac.compare_digest(answer, proof(bytes.fromhex(self._key), b"rank", peer.nonce, nonce)):
            self._drop(fd)
            return
        peer.connection.send(proof(bytes.fromhex(self._key), b"store", nonce, peer.nonce), NO_SIGNAL)
        del self._unauthenticated[fd]
        self._ranks[fd] = _Rank(Channel(peer.connection, Request))

    def _answer(self, rank: _Rank, request: Request) -> None:
        """Reply to a request, or keep it until it can be answered."""
        match request.operation:
            case Set(key=key, value=value):
                self._set(key, value)
                self._reply(rank, request, None)
            case Add(key=key, amount=amount):
                total = int(self._value(key) or 0) + amount
                self._set(key, str(total).encode())
                self._reply(rank, request, total)
            case CompareSet(key=key, expected=expected, value=value):
                current = self._value(key)
                if (b"" if current is None else current) == expected:
                    self._set(key, current := value)
                self._reply(rank, request, expected if current is None else current)
            case Delete(key=key):
                folder, _, name = key.rpartition("/")
                self._reply(rank, request, self._folders.get(folder, {}).pop(name, None) is not None)
            case Check(keys=keys):
                self._reply(rank, request, all(self._value(key) is not None for key in keys))
            case Get(keys=keys):
                values = [self._value(key) for key in keys]
                if None in values:
                    self._wait(rank, request, keys[values.index(None)])
                else:
                    self._reply(rank, request, values)
            case Collect(folder=folder, num_entries=num_entries):
                entries = self._folders.get(folder, {})
                if len(entries) < num_entries:
                    self._wait(rank, request, _growth(folder, num_entries))
                else:
                    self._reply(rank, request, entries)

    def _value(self, key: str) -> bytes | None:
        folder, _, name = key.rpartition("/")
        return self._folders.get(folder, {}).get(name)

    def _set(self, key: str, value: bytes) -> None:
        folder, _, name = key.rpartition("/")
        entries = self._folders.setdefault(folder, {})
        entries[name] = value
        waiting = self._waiting_for.pop(key, []) + self._waiting_for.pop(_growth(folder, len(entries)), [])
        for rank in waiting:
            request, rank.waiting = rank.waiting, None
            if request is not None:
                self._answer(rank, request)

    def _wait(self, rank: _Rank, request: Request, needed: str) -> None:
        rank.waiting = request
        self._waiting_for.setdefault(needed, []).append(rank)

    def _reply(self, rank: _Rank, request: Request, value: Any) -> None:
        rank.channel.send_frame(frame(Reply(request.number, value)))
        self._watch(rank.channel.fileno(), rank)

    def _watch(self, fd: int, rank: _Rank) -> None:
        if fd in self._ranks:
            self._poll.modify(fd, select.POLLIN | (select.POLLOUT if rank.channel.has_unsent else 0))

    def _drop(self, fd: int) -> None:
        self._poll.unregister(fd)
        if (peer := self._unauthenticated.pop(fd, None)) is not None:
            peer.connection.close()
        if (rank := self._ranks.pop(fd, None)) is not None:
            rank.waiting = None
            rank.channel.close()
