"""The transports by which a trainer's tensors reach the ranks of an engine, one chunk after another.

Each transport is a context manager that returns the `update_info` of a chunk. Ranks can read the chunk until the
context ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
from safetensors.torch import save, save_file
from torch import Tensor

from moeserve.models.remote_chunk import LENGTH_BYTES, ReadBytes
from moeserve.models.weight_update import CHUNK_PREFIX, SHARED_MEMORY
from moeserve.processes.peer_connection import Connection, PeerError

SHARD = "model.safetensors"
KEY_BYTES = 32
MAX_CONNECTIONS = 4096  # at the same time, including connections that have not yet proved that they know the key
SECONDS_TO_AUTHENTICATE = 10.0
SECONDS_OF_RANKS = 600.0  # maximum pause of a rank, which waits while others copy or while it packs a weight
SECONDS_BETWEEN_LOOKS = 0.5

Offer = Callable[[dict[str, Tensor]], AbstractContextManager[dict[str, str]]]


@contextlib.contextmanager
def offer_in_shared_memory(tensors: dict[str, Tensor]) -> Iterator[dict[str, str]]:
    """Offer tensors to ranks on this host, in a file in shared memory."""
    path = SHARED_MEMORY / f"{CHUNK_PREFIX}{os.getpid()}-{secrets.token_hex(16)}"
    path.touch(0o600, exist_ok=False)  # other users must not read the weights
    try:
        save_file(tensors, path)
        yield {"path": str(path)}
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def offer_on_disk(tensors: dict[str, Tensor], folder: str | None) -> Iterator[dict[str, str]]:
    """Offer tensors in a temporary folder, which is created in `folder`; None: in the system's temporary folder."""
    path = Path(tempfile.mkdtemp(prefix=CHUNK_PREFIX, dir=folder))
    try:
        save_file(tensors, path / SHARD)
        yield {"path": str(path)}
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def offer_over_tcp(tensors: Mapping[str, Tensor], host: str) -> Iterator[dict[str, str]]:
    """Offer tensors to ranks on any host, which connect to this host. Each chunk has a new port and a new key.

    Args:
        host: address of this host on which to listen.
    """
    data, key, is_over = save(dict(tensors)), secrets.token_bytes(KEY_BYTES), threading.Event()
    listener = socket.create_server((host, 0), backlog=MAX_CONNECTIONS)
    accepting = threading.Thread(target=_accept, args=(listener, key, data, is_over), name="weights", daemon=True)
    accepting.start()
    try:
        yield {"address": "{}:{}".format(*listener.getsockname()), "key": key.hex()}
    finally:
        is_over.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends `accept` at once, on Linux
        accepting.join()
        listener.close()


def _accept(listener: socket.socket, key: bytes, data: bytes, is_over: threading.Event) -> None:
    listener.settimeout(SECONDS_BETWEEN_LOOKS)
    free = threading.BoundedSemaphore(MAX_CONNECTIONS)
    while not is_over.is_set():
        try:
            connected, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:  # no file descriptor is free, or the context has ended
            is_over.wait(SECONDS_BETWEEN_LOOKS)
            continue
        if free.acquire(blocking=False):
            threading.Thread(target=_serve, args=(connected, key, data, free), name="weights", daemon=True).start()
        else:
            connected.close()


def _serve(connected: socket.socket, key: bytes, data: bytes, free: threading.BoundedSemaphore) -> None:
    """Answer the requests of one rank until it closes the connection."""
    connection = Connection(connected, time.monotonic() + SECONDS_TO_AUTHENTICATE, SECONDS_OF_RANKS)
    first = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    try:
        connection.prove(key, connects=False)
        connection.deadline = math.inf
        connection.send(memoryview(data)[:first])
        while True:
            read: ReadBytes = connection.receive_message(ReadBytes)
            if not 0 <= read.start <= read.stop <= len(data) - first:
                raise PeerError("it has asked for bytes that are not there")
            connection.send(memoryview(data)[first + read.start : first + read.stop])
    except (OSError, PeerError, msgspec.DecodeError):
        pass  # the rank reports why it has closed the connection
    finally:
        connection.close()
        free.release()
