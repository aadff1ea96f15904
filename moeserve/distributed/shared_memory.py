"""The transport between ranks of one host through memory that all these ranks map.

Each rank makes unnamed memory, shares the memory with the other ranks, and writes there the data that it sends. The
protocol is described in csrc/host/shared_memory.h. Killed ranks leave nothing behind, and on Linux the size of /dev/shm
is irrelevant.

A waiting rank spins briefly and then sleeps. A collective in progress advances only while this rank begins or waits for
a collective on the same connection. Data is sent in the order in which collectives begin; up to NUM_SLOTS collectives
of up to SLOT_BYTES each are sent completely when they begin. All ranks must wait for collectives of different groups in
the same order. Collectives of one group may be waited for in any order.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import mmap
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from moeserve.distributed.handshake import PeerConnections, agree, exchange_files
from moeserve.distributed.store import format_ranks
from moeserve.distributed.transport import (
    Pending,
    Transport,
    TransportError,
    reduce_scatter_by_all_to_all,
)
from moeserve.machine import usable_cores
from moeserve.memory import new_empty
from moeserve.processes.memory_file import make_memory_file

NUM_SLOTS = 8
SLOT_BYTES = 2**18

# Seconds that a waiting rank spins before it sleeps. With a core per rank, that is longer than it takes to wake a
# sleeping process. With fewer cores, a rank hardly spins, because another rank may need the core to send its data.
SPIN_S = 50e-6
SPIN_WITHOUT_CORE_S = 1e-6

# The dtypes whose sums the C++ extension computes, if it has kernels for this processor. torch adds all others.
NATIVE_DTYPES = (torch.float32, torch.bfloat16)

# Let waiting ranks sleep for short intervals, as on systems without futexes; set by tests.
NAPS = False


class WaitResult(IntEnum):
    """The results of a wait in the C++ extension, as far as this file distinguishes them."""

    DONE = 0
    TIMEOUT = 2
    LOST = 3
    MISMATCH = 4


def connect(
    store: Store, ranks: Sequence[int], rank_in_group: int, *, world_size: int, timeout_s: float
) -> SharedMemoryConnection:
    """Map the memory of all ranks of a group.

    Args:
        store: used only by this connection.
        world_size: number of ranks that compete for this host's cores.

    Raises:
        TransportUnavailable: on all ranks, if they cannot all map each other's memory.
        TransportError: a rank does not connect in time.
    """
    native = _native()
    num_ranks = len(ranks)
    sizes = dict(num_slots=NUM_SLOTS, slot_bytes=SLOT_BYTES)
    make_memory = functools.partial(_make_memory, native, num_ranks, sizes)
    spin_s = SPIN_S if world_size <= usable_cores() else SPIN_WITHOUT_CORE_S
    try:
        peers = exchange_files(PrefixStore("files", store), rank_in_group, num_ranks, make_memory, timeout_s)
        memory, refusal = None, ""
        try:
            memory = native.SharedMemory(
                rank_in_group, peers.files, peers.socket_fds(), spin_s=spin_s, naps=NAPS, **sizes
            )
        except RuntimeError as error:
            refusal = str(error)
        finally:
            peers.close_files()
        try:
            agree(PrefixStore("maps", store), rank_in_group, num_ranks, refusal, timeout_s)
        except BaseException:
            peers.close()
            raise
    except RuntimeError as error:  # raised by the store
        raise TransportError(f"not all ranks connected within {timeout_s:g} s") from error
    return SharedMemoryConnection(memory, peers, store, ranks, rank_in_group, timeout_s)


class SharedMemoryConnection:
    """One rank's connection to a set of ranks. Transports of groups with the same members share it."""

    def __init__(
        self,
        memory: Any,
        peers: PeerConnections,
        store: Store,
        ranks: Sequence[int],
        rank_in_group: int,
        timeout_s: float,
    ) -> None:
        """
        Args:
            memory: a SharedMemory of the C++ extension.
            store: used only by this connection.
        """
        self.memory = memory
        self.ranks = ranks
        self.rank_in_group = rank_in_group
        self._peers = peers
        self._store = store
        self._num_shared = 0  # number of calls of `share_memory`
        self._timeout_s = timeout_s
        # The tensors that each operation reads and writes, kept alive until the operation is waited for.
        self._in_use: dict[int, tuple[Tensor, Tensor]] = {}

    def waiter(self, operation: int, source: Tensor, target: Tensor, *, is_measured: bool) -> Callable[[], None]:
        """Return a function that waits for an operation, and raises TransportError if the operation fails."""
        self._in_use[operation] = source, target

        def wait() -> None:
            outcome = self.memory.wait(operation, self._timeout_s, is_measured)
            if outcome != WaitResult.DONE:
                raise TransportError(self.cause_of(outcome))
            self._in_use.pop(operation, None)

        return wait

    def share_memory(self, num_bytes: int) -> Tensor:
        """Return [num_bytes] uint8 memory of the first rank that all ranks map. See `GroupCoordinator.share_memory`."""
        store = PrefixStore(f"shared/{self._num_shared}", self._store)
        self._num_shared += 1
        size = num_bytes if self.rank_in_group == 0 else mmap.PAGESIZE
        num_ranks, memory, refusal = len(self.ranks), None, ""
        try:
            make_file = functools.partial(make_memory_file, size)
            peers = exchange_files(
                PrefixStore("files", store), self.rank_in_group, num_ranks, make_file, self._timeout_s
            )
            try:
                memory = mmap.mmap(peers.files[0], num_bytes)
            except OSError as error:
                refusal = str(error)
            finally:
                peers.close()
            agree(PrefixStore("maps", store), self.rank_in_group, num_ranks, refusal, self._timeout_s)
        except RuntimeError as error:  # raised by the store
            raise TransportError(f"not all ranks shared memory within {self._timeout_s:g} s") from error
        assert memory is not None
        return torch.frombuffer(memory, dtype=torch.uint8)

    def cause_of(self, outcome: int) -> str:
        """Return the cause of a failed wait. Ranks are named by their numbers in the world."""
        absent = [self.ranks[index] for index in self.memory.absent()]
        match outcome:
            case WaitResult.TIMEOUT:
                return f"not all ranks joined within {self._timeout_s:g} s, no data from {format_ranks(absent)}"
            case WaitResult.LOST:
                return f"{format_ranks(absent)} closed {'its' if len(absent) == 1 else 'their'} connection"
            case WaitResult.MISMATCH:
                return (
                    f"{format_ranks(absent)} sent data of another collective or of another size; "
                    "debug_collectives=True shows where the ranks diverge"
                )
            case _:
                return "this rank has left the group"

    def close(self) -> None:
        """Leave the group: other ranks that wait for this rank fail at once. May be called twice."""
        self.memory.close()
        self._peers.close()

    def __del__(self) -> None:
        self.close()


class SharedMemoryTransport(Transport):
    """One rank's transport of one group."""

    def __init__(self, connection: SharedMemoryConnection, *, measures_waits: bool = False) -> None:
        self._connection = connection
        self._memory = connection.memory
        self._native = _native()
        self._added_natively = NATIVE_DTYPES if self._native.usable_isas() else ()
        self._measures_waits = measures_waits
        self._num_ranks = len(connection.ranks)
        self._rank = connection.rank_in_group

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending:
        x = x.contiguous()
        row_shape = x.shape[1:]
        gathered = new_empty(x, sum(sizes), *row_shape)
        operation = self._memory.begin_gather(x, gathered, sizes, x.element_size() * row_shape.numel())
        return gathered, self._waiter(operation, x, gathered)

    def begin_all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        x = x.contiguous()
        row_shape = x.shape[1:]
        received = new_empty(x, sum(receive_sizes), *row_shape)
        row_bytes = x.element_size() * row_shape.numel()
        operation = self._memory.begin_exchange(x, send_sizes, received, receive_sizes, row_bytes)
        return received, self._waiter(operation, x, received)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or x.dtype
        if x.dtype not in self._added_natively or dtype not in self._added_natively:
            return reduce_scatter_by_all_to_all(self, x, sizes, self._rank, dtype)
        x = x.contiguous()
        row_shape = x.shape[1:]
        out = new_empty(x, sizes[self._rank], *row_shape, dtype=dtype)
        operation = self._memory.begin_sum_of_parts(x, out, sizes, x.element_size() * row_shape.numel())
        self._waiter(operation, x, out)()
        return out

    def share_memory(self, num_bytes: int) -> Tensor:
        return self._connection.share_memory(num_bytes)

    def begin_step(self) -> None:
        self._memory.begin_step()

    def seconds_waited(self) -> list[float]:
        return list(self._memory.seconds_waited()) if self._measures_waits else []

    @property
    def progresses_in_background(self) -> bool:
        return False

    @property
    def supports_cpu_graphs(self) -> bool:
        return True

    @property
    def is_capturing(self) -> bool:
        return bool(self._native.is_capturing())

    def on_replay_failure(self, fail: Callable[[str], NoReturn]) -> None:
        self._native.on_replay_failure(lambda outcome: fail(self._connection.cause_of(outcome)))

    def close(self) -> None:
        self._connection.close()

    def _waiter(self, operation: int, source: Tensor, target: Tensor) -> Callable[[], None]:
        return self._connection.waiter(operation, source, target, is_measured=self._measures_waits)


def _make_memory(native: Any, num_ranks: int, sizes: dict[str, int]) -> int:
    """Make this rank's memory, and return its file descriptor. Raises OSError if the memory cannot be made."""
    if native is None:
        raise OSError("moeserve._cpu is not built")
    return make_memory_file(native.SharedMemory.num_bytes(num_ranks, **sizes))


@functools.cache
def _native() -> Any:
    """Return the C++ extension. None if the extension is not built."""
    return None if importlib.util.find_spec("moeserve._cpu") is None else importlib.import_module("moeserve._cpu")
