"""`RemoteChunk`: tensors that a trainer on another host sends over TCP. Each rank reads only its part of them.

The trainer listens. Both sides prove that they know the chunk's key. The trainer then sends the header of a safetensors
file, and answers each `ReadBytes` request with the requested bytes of the file's data. See `rl/transports.py`.
"""

from __future__ import annotations

import math
import socket
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.models.checkpoint.mapped_files import DTYPES, rows_of
from moeserve.models.checkpoint.tensors import StoredTensor
from moeserve.processes.peer_connection import Connection, PeerError

LENGTH_BYTES = 8  # size of the field at the start of a safetensors file that holds the header's length
MAX_HEADER_BYTES = 100 * 2**20
SECONDS_TO_CONNECT = 5.0


class ReadBytes(msgspec.Struct, frozen=True, array_like=True):
    """Request for bytes `start` to `stop` of a safetensors file's data. The data begins after the file's header."""

    start: int
    stop: int


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class RemoteChunk:
    """A connection to the trainer. All errors of the connection are raised as CheckpointError."""

    def __init__(self, address: str, key: bytes) -> None:
        """
        Args:
            address: host and port of the trainer.
            key: secret of the chunk, which the trainer must know too.

        Raises:
            CheckpointError: the trainer cannot be reached, has another key, or sends no header.
        """
        self._address, self._connection = address, _connect(address)
        try:
            self._connection.prove(key, connects=True)
            length = int.from_bytes(self._connection.receive(LENGTH_BYTES), "little")
            if length > MAX_HEADER_BYTES:
                raise PeerError(f"it has sent a header of {length} bytes")
            self._entries = _entries(bytes(self._connection.receive(length)))
        except (OSError, PeerError, msgspec.DecodeError) as error:
            self.close()
            raise self._failed(error) from error

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The trainer's tensors, by name."""
        place = Path(self._address)  # for error messages
        return {
            name: StoredTensor(name, place, entry.dtype, tuple(entry.shape)) for name, entry in self._entries.items()
        }

    def read_rows(self, stored: StoredTensor, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of a tensor. See `rows_of`."""
        first = self._entries[stored.name].data_offsets[0]
        return rows_of(stored, start, stop, lambda begin, end: self._read(first + begin, first + end))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _read(self, start: int, stop: int) -> Tensor:
        bytes_B = torch.empty(stop - start, dtype=torch.uint8)
        try:
            self._connection.send_message(ReadBytes(start, stop))
            self._connection.receive_into(bytes_B.numpy().data)
        except (OSError, PeerError) as error:
            raise self._failed(error) from error
        return bytes_B

    def _failed(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"the trainer at {self._address} cannot be read: {error}")


def _connect(address: str) -> Connection:
    host, _, port = address.rpartition(":")
    try:
        return Connection(socket.create_connection((host, int(port)), SECONDS_TO_CONNECT), math.inf)
    except (OSError, ValueError, OverflowError) as error:
        raise CheckpointError(f"the trainer at {address} cannot be reached: {error}") from error


def _entries(header: bytes) -> dict[str, _Entry]:
    """Return the entries of a safetensors header, by tensor name.

    Raises:
        PeerError: a tensor has a dtype that is not supported, or its bytes do not fit its shape.
        msgspec.DecodeError: the header has another form.
    """
    fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    entries = {
        name: msgspec.json.decode(field, type=_Entry) for name, field in fields.items() if name != "__metadata__"
    }
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        if entry.dtype not in DTYPES:
            raise PeerError(f"tensor {name!r} is {entry.dtype}; supported: {', '.join(DTYPES)}")
        if min((start, *entry.shape)) < 0 or stop - start != math.prod(entry.shape) * DTYPES[entry.dtype].itemsize:
            raise PeerError(f"tensor {name!r} has shape {entry.shape}, and {stop - start} bytes")
    return entries
