"""Progress records: 64 bytes of shared memory for each process, in which the process records its progress.

The process that started all others reads the records (`engine/hang_watch.py`); other hosts send their records to this
process. The C++ extension writes the records, also while it replays graphs; without the extension, all records keep
their initial values. See csrc/host/progress_record.h.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import mmap
import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

from moeserve.processes.memory_file import make_memory_file

_LAYOUT = struct.Struct("=6Q2IQ")


class Phase(IntEnum):
    """The state of a process, as far as it matters to processes that wait for it."""

    LOADING = 0
    IDLE = 1  # waits for its engine
    COMPUTING = 2
    WAITING = 3  # waits for other ranks, in memory that they share
    BLOCKED = 4  # waits for other ranks, in a library
    UPDATING = 5  # runs a command between two steps, such as an update of the weights


class ProgressRecord(NamedTuple):
    """The record of one process at one time."""

    heartbeat: int = 0  # grows ten times a second, even while Python is stuck
    round: int = 0
    num_collectives: int = 0  # number of collectives begun, in all groups
    num_kernels: int = 0
    num_reads: int = 0  # page faults and blocks that were read from disks
    num_looks: int = 0  # grows while this rank waits for others
    layer: int = 0  # number of the layer, from 1; 0: none yet in this round
    phase: int = Phase.LOADING
    epoch: int = 0

    @classmethod
    def decoded(cls, data: bytes) -> ProgressRecord:
        """Return a record that `ProgressRecords.encoded` has encoded."""
        return cls(*_LAYOUT.unpack(data))

    @property
    def counters(self) -> tuple[int, ...]:
        """The counters. At least one of them changes when this rank makes progress."""
        return self.epoch, self.round, self.num_collectives, self.layer, self.num_kernels, self.num_reads


class ProgressRecords:
    """The records of several processes, read by the process that made the memory."""

    def __init__(self, num_records: int) -> None:
        """Raises OSError if there is no memory."""
        self._fd = make_memory_file(num_records * _LAYOUT.size)
        self._memory = mmap.mmap(self._fd, num_records * _LAYOUT.size)

    @property
    def fd(self) -> int:
        """The file to pass to processes that write records."""
        return self._fd

    def read(self) -> list[ProgressRecord]:
        return [ProgressRecord(*fields) for fields in _LAYOUT.iter_unpack(self._memory)]

    def encoded(self, index: int) -> bytes:
        """Return one record in 64 bytes, to be sent to another host."""
        return self._memory[index * _LAYOUT.size : (index + 1) * _LAYOUT.size]

    def clear(self) -> None:
        """Clear all records, because some of the processes have ended."""
        self._memory[:] = bytes(len(self._memory))

    def clear_record(self, index: int) -> None:
        """Clear the record of a process that has ended."""
        self._memory[index * _LAYOUT.size : (index + 1) * _LAYOUT.size] = bytes(_LAYOUT.size)

    def close(self) -> None:
        """Release the memory. May be called twice."""
        if self._fd >= 0:
            self._memory.close()
            os.close(self._fd)
            self._fd = -1


def attach(fd: int | None, index: int) -> None:
    """Write the progress and the heartbeats of this process to a record from now on.

    Args:
        fd: the file of `ProgressRecords`. None: nothing is written.
    """
    if fd is not None and (native := _native()):
        native.attach_progress(fd, index)


def begin_epoch(epoch: int) -> None:
    if native := _native():
        native.begin_epoch(epoch)


def begin_round(number: int) -> None:
    if native := _native():
        native.begin_round(number)


def begin_layer(layer: int) -> None:
    """Record that a layer begins, counted from 0. In a graph that is being captured, every replay records it."""
    if native := _native():
        native.begin_layer(layer + 1)


@contextlib.contextmanager
def in_phase(phase: Phase) -> Iterator[None]:
    """Record a phase within the context, and the previous phase again afterwards."""
    before = set_phase(phase)
    try:
        yield
    finally:
        set_phase(before)


def set_phase(phase: int) -> int:
    """Record a phase, and return the previous one."""
    return native.set_phase(phase) if (native := _native()) else Phase.LOADING


@functools.cache
def _native() -> Any:
    """Return the C++ extension. None if it is not built."""
    return None if importlib.util.find_spec("moeserve._cpu") is None else importlib.import_module("moeserve._cpu")
