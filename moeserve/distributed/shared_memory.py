"""Collectives between ranks of one host through memory that all of them have mapped. Linux alone; else gloo's turn.

Each rank makes a piece of memory without a name (memfd), hands it to the others, and writes into it what it sends; the
C++ part, csrc/host/shared_memory.h, says how. Nothing is in the file system, so nothing is left when ranks are killed,
and the size of /dev/shm does not matter.

A rank that waits spins for a moment and then sleeps. A collective that was begun goes on whenever this rank begins or
waits for another one of the group, and at no other time: up to NUM_SLOTS of them, of up to SLOT_BYTES each, are wholly
sent when they begin. All ranks wait for their collectives in the same order of the program; within a group any order
will do.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from enum import IntEnum
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from moeserve.distributed import transport
from moeserve.distributed.handshake import YES, Contacts, agree, exchange_files
from moeserve.distributed.store import listed
from moeserve.distributed.transport import Pending, TransportError
from moeserve.machine import usable_cores
from moeserve.memory import new_empty

NUM_SLOTS = 8
SLOT_BYTES = 2**18

# How long a rank that waits looks for news before it sleeps, in seconds: longer than it takes to wake a sleeper where
# each rank has a core, and next to nothing where the one that is waited for may need this core.
SPIN_S = 50e-6
SPIN_WITHOUT_CORE_S = 1e-6

# all_reduce adds everything on every rank when that reads no more than so much more than adding a share on each.
MAX_EXTRA_BYTES = 2**17

# The sums that the C++ part does: torch does the others.
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}


class Outcome(IntEnum):
    """What the C++ part returns of a wait, as far as it matters here."""

    DONE = 0
    TIMEOUT = 2
    LOST = 3
    DISAGREE = 4


def connect(
    store: Store, ranks: Sequence[int], rank_in_group: int, *, num_ranks_in_all: int, timeout_s: float
) -> SharedMemoryTransport:
    """Meet the others of a group.

    `store` is for this group alone. CannotReach, on all of them, if they cannot all map each other's memory.
    TransportError when one of them does not come in time.
    """
    native = _native()
    num_ranks = len(ranks)
    sizes = dict(num_slots=NUM_SLOTS, slot_bytes=SLOT_BYTES)
    make_memory = functools.partial(_make_memory, native, num_ranks, sizes)
    spin_s = SPIN_S if num_ranks_in_all <= usable_cores() else SPIN_WITHOUT_CORE_S
    try:
        contacts = exchange_files(PrefixStore("files", store), rank_in_group, num_ranks, make_memory, timeout_s)
        memory, verdict = None, YES
        try:
            assert native is not None
            memory = native.SharedMemory(rank_in_group, contacts.files, contacts.socket_fds(), spin_s=spin_s, **sizes)
        except RuntimeError as error:
            verdict = str(error)
        finally:
            contacts.close_files()
        try:
            agree(PrefixStore("maps", store), rank_in_group, num_ranks, verdict, timeout_s)
        except BaseException:
            contacts.close()
            raise
    except RuntimeError as error:  # of the store
        raise TransportError(f"not all ranks came within {timeout_s:g} s") from error
    assert native is not None
    assert memory is not None
    return SharedMemoryTransport(native, memory, contacts, ranks, rank_in_group, timeout_s)


class SharedMemoryTransport:
    """One rank's side. See `Transport` for the contract."""

    def __init__(
        self,
        native: ModuleType,
        memory: Any,
        contacts: Contacts,
        ranks: Sequence[int],
        rank_in_group: int,
        timeout_s: float,
    ) -> None:
        self._native = native
        self._memory = memory
        self._contacts = contacts
        self._ranks = ranks
        self._num_ranks = len(ranks)
        self._rank = rank_in_group
        self._timeout_s = timeout_s
        # By number: what operations read and write, until they are waited for.
        self._in_use: dict[int, tuple[Tensor, Tensor]] = {}

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending:
        x = x.contiguous()
        row_shape = x.shape[1:]
        gathered = new_empty(x, sum(sizes), *row_shape)
        number = self._memory.begin_gather(x, gathered, sizes, x.element_size() * row_shape.numel())
        return gathered, self._begun(number, x, gathered)

    def begin_all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        x = x.contiguous()
        row_shape = x.shape[1:]
        received = new_empty(x, sum(receive_sizes), *row_shape)
        row_bytes = x.element_size() * row_shape.numel()
        number = self._memory.begin_exchange(x, send_sizes, received, receive_sizes, row_bytes)
        return received, self._begun(number, x, received)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        element = ELEMENTS.get(x.dtype)
        if element is None:
            return transport.exchange_and_add(self, x, sizes, self._rank)
        x = x.contiguous()
        row_shape = x.shape[1:]
        out = new_empty(x, sizes[self._rank], *row_shape)
        number = self._memory.begin_sum_of_parts(element, x, out, sizes, x.element_size() * row_shape.numel())
        self._begun(number, x, out)()
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        is_small = x.nbytes * (self._num_ranks - 2) <= MAX_EXTRA_BYTES
        element = ELEMENTS.get(x.dtype)
        if not is_small:
            return transport.add_shares_and_gather(self, x, self._num_ranks)
        if element is None:
            return transport.gather_and_add(self, x, self._num_ranks)
        x = x.contiguous()
        out = new_empty(x, *x.shape)
        number = self._memory.begin_sum(element, x, out, x.nbytes)
        self._begun(number, x, out)()
        return out

    def begin_step(self) -> None:
        self._memory.begin_step()

    def seconds_waited(self) -> list[float]:
        return list(self._memory.seconds_waited())

    @property
    def supports_cpu_graphs(self) -> bool:
        return True

    @property
    def is_capturing(self) -> bool:
        return bool(self._native.is_capturing())

    def on_replay_failure(self, fail: Callable[[str], NoReturn]) -> None:
        self._native.on_replay_failure(lambda outcome: fail(self._explained(outcome)))

    def close(self) -> None:
        self._memory.close()
        self._contacts.close()

    def __del__(self) -> None:
        self.close()

    def _begun(self, number: int, source: Tensor, target: Tensor) -> Callable[[], None]:
        """What waits for an operation."""
        self._in_use[number] = source, target

        def wait() -> None:
            outcome = self._memory.wait(number, self._timeout_s)
            if outcome != Outcome.DONE:
                raise TransportError(self._explained(outcome))
            self._in_use.pop(number, None)

        return wait

    def _explained(self, outcome: int) -> str:
        absent = [self._ranks[index] for index in self._memory.absent()]
        match outcome:
            case Outcome.TIMEOUT:
                return f"not all ranks took part within {self._timeout_s:g} s, nothing came from {listed(absent)}"
            case Outcome.LOST:
                return f"{listed(absent)} closed {'its' if len(absent) == 1 else 'their'} connection"
            case Outcome.DISAGREE:
                return (
                    f"{listed(absent)} sent what belongs to another collective, or has another size; "
                    "debug_collectives finds out where ranks part"
                )
            case _:
                return "this rank has left the group"


def _make_memory(native: ModuleType | None, num_ranks: int, sizes: dict[str, int]) -> int:
    """A file in memory without a name. OSError where there can be none."""
    if native is None or not hasattr(native, "SharedMemory") or not hasattr(os, "memfd_create"):
        raise OSError("moeserve._cpu is not built, or the system is not Linux")
    fd = os.memfd_create("moeserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, native.SharedMemory.num_bytes(num_ranks, **sizes))
        # A memory that another rank could make smaller would kill those who read it.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def _native() -> ModuleType | None:
    """The C++ part, where it was built."""
    if importlib.util.find_spec("moeserve._cpu") is None:
        return None
    return importlib.import_module("moeserve._cpu")
