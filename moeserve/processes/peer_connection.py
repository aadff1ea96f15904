"""Connections between processes of different hosts, whose two sides prove that they know the same key.

Nothing is encrypted, and nothing after the proofs is authenticated.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from typing import Any, TypeVar

import msgspec

from moeserve.processes.channel import LENGTH, frame
from moeserve.processes.proof import NONCE_BYTES, proof

MAX_MESSAGE_BYTES = 2**20
SECONDS_OF_SILENCE = 15.0

T = TypeVar("T")


class PeerError(Exception):
    """The other side of a connection cannot be used."""


class Connection:
    """A connection to another process. All methods raise OSError or PeerError if the connection fails.

    A connection also fails if the other side is silent for too long.
    """

    def __init__(self, connected: socket.socket, deadline: float, silence_s: float = SECONDS_OF_SILENCE) -> None:
        """
        Args:
            deadline: time by `time.monotonic` after which nothing is sent or received.
            silence_s: seconds for which the other side may be silent.
        """
        self._socket, self.deadline, self._silence_s = connected, deadline, silence_s
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prove(self, key: bytes, *, connects: bool) -> None:
        """Prove that this side knows the key, and require the same proof from the other side.

        The connecting side sends its proof first, so that it gets no proof without knowing the key.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.send(nonce)
        other = bytes(self.receive(NONCE_BYTES))
        own_role, other_role = (b"reader", b"sender") if connects else (b"sender", b"reader")
        own_proof = proof(key, own_role, nonce, other)
        if connects:
            self.send(own_proof)
        expected = proof(key, other_role, other, nonce)
        if not hmac.compare_digest(self.receive(NONCE_BYTES), expected):
            raise PeerError("it has another key")
        if not connects:
            self.send(own_proof)

    def send(self, data: Any) -> None:
        self._limit_time()
        self._socket.sendall(data)

    def receive(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.receive_into(memoryview(data))
        return data

    def receive_into(self, view: memoryview) -> None:
        """Fill the view with received bytes."""
        while view:
            self._limit_time()
            num_bytes = self._socket.recv_into(view)
            if num_bytes == 0:
                raise PeerError("it has closed the connection")
            view = view[num_bytes:]

    def send_message(self, message: Any) -> None:
        self.send(frame(message))

    def receive_message(self, kind: type[T] | Any) -> T:
        (length,) = LENGTH.unpack(self.receive(LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise PeerError(f"it has sent a message of {length} bytes")
        try:
            message: T = msgspec.msgpack.decode(self.receive(length), type=kind)
        except msgspec.DecodeError as error:
            raise PeerError(f"it has sent something else than a message: {error}") from None
        return message

    def close(self) -> None:
        """Close the connection, even while another thread uses it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _limit_time(self) -> None:
        self._socket.settimeout(max(min(self.deadline - time.monotonic(), self._silence_s), 0.001))
