"""Framed messages over a stream socket."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from typing import Any, Generic, TypeVar

import msgspec

from moeserve.processes.local_sockets import NO_SIGNAL

Incoming = TypeVar("Incoming")

LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 2**20


class Channel(Generic[Incoming]):
    """Messages in both directions, each a length followed by a msgpack value.

    `send` never blocks: bytes that the socket does not accept are kept until `flush` or `receive`. Two processes that
    send each other more than their sockets hold therefore cannot deadlock. Only one thread at a time may receive; any
    thread may send.
    """

    def __init__(self, connection: socket.socket, incoming: Any) -> None:
        """
        Args:
            connection: a stream socket, owned by the channel from now on.
            incoming: type of the messages to receive.
        """
        connection.setblocking(False)
        self._socket = connection
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._outbox = bytearray()
        self._inbox = bytearray()
        self._lock = threading.Lock()  # guards the outbox
        self.is_closed = False  # the other end is closed, and all that it sent was received

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def send(self, message: Any) -> None:
        """Send the bytes that the socket accepts now, and keep the rest. Messages to a closed end are dropped."""
        self.send_frame(frame(message))

    def send_frame(self, data: bytes) -> None:
        """Send a message that `frame` has encoded, so that it can be encoded once for several receivers."""
        with self._lock:
            self._outbox += data
            self._write()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until the socket has accepted all bytes. Return False after a timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.send_frame(b"")
            if not self._outbox:
                return True
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            poll = select.poll()
            poll.register(self, select.POLLOUT)
            poll.poll(None if left is None else left * 1000)

    def receive(self, timeout_s: float | None = 0.0) -> list[Incoming]:
        """Return all messages that have arrived, after waiting for the first one.

        Args:
            timeout_s: maximum wait; None: wait until a message arrives or the other end is closed.

        Raises:
            msgspec.DecodeError: a message has another type than `incoming`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._outbox:
                self.send_frame(b"")
            self._read()
            messages = self._take_messages()
            if messages or self.is_closed:
                return messages
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return []
            poll = select.poll()
            poll.register(self, select.POLLIN | (select.POLLOUT if self._outbox else 0))
            poll.poll(None if left is None else left * 1000)

    def close(self) -> None:
        self._socket.close()
        self.is_closed = True

    def _write(self) -> None:
        try:
            while self._outbox:
                num_sent = self._socket.send(memoryview(self._outbox)[:_CHUNK_BYTES], NO_SIGNAL)
                del self._outbox[:num_sent]
        except BlockingIOError:
            pass
        except OSError:  # the other end is closed; `receive`, or the code that watches the process, reports it
            self._outbox.clear()

    def _read(self) -> None:
        try:
            while not self.is_closed:
                piece = self._socket.recv(_CHUNK_BYTES)
                self._inbox += piece
                self.is_closed = not piece
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True

    def _take_messages(self) -> list[Incoming]:
        messages, start = [], 0
        while len(self._inbox) >= start + LENGTH.size:
            (length,) = LENGTH.unpack_from(self._inbox, start)
            end = start + LENGTH.size + length
            if len(self._inbox) < end:
                break
            messages.append(self._decoder.decode(bytes(self._inbox[start + LENGTH.size : end])))
            start = end
        del self._inbox[:start]
        return messages


def frame(message: Any) -> bytes:
    """Return an encoded message: its length, followed by its msgpack encoding."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def receive_frame(connection: socket.socket) -> bytes:
    """Return the body of the next message of a blocking socket, without reading beyond it.

    Raises:
        EOFError: the other end was closed first.
    """

    def exactly(num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            piece = connection.recv(min(num_bytes - len(data), _CHUNK_BYTES))
            if not piece:
                raise EOFError("the other end of the channel is closed")
            data += piece
        return bytes(data)

    (length,) = LENGTH.unpack(exactly(LENGTH.size))
    return exactly(length)
