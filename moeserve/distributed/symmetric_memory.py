"""All-reduce of small tensors on the GPUs of one host in one kernel: each GPU reads and adds the others' memory.

A decode step reduces a few rows in every layer, and most of that time is latency: NCCL passes data from rank to rank or
through a tree, whereas here each GPU reads every other GPU once. The kernel needs memory that all GPUs map, which torch
calls symmetric (torch.distributed._symmetric_memory, not public yet). All ranks therefore test whether symmetric memory
works and adds correctly, and agree to use NCCL if it does not. Symmetric memory does not work with Ray, where each rank
sees its own GPU as number 0: torch refuses ranks whose GPUs have the same number.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from moeserve.distributed.handshake import agree
from moeserve.distributed.torch_group import as_torch_group
from moeserve.distributed.transport import TransportError, TransportUnavailable

MAX_BYTES = 2**18  # larger tensors are limited by bandwidth, not latency
ALIGNMENT = 16  # bytes that the kernel reads at once
MAX_RANKS = 8  # each rank reads the memory of all others
DTYPES = (torch.float32, torch.bfloat16)

Result = TypeVar("Result")

# Memory of closed groups is never freed: freeing waits for the device, where a kernel may wait for a dead rank.
_leaked: list[Tensor] = []


def connect(
    store: Store,
    rank_in_group: int,
    num_ranks: int,
    *,
    is_one_host: bool,
    device: torch.device,
    timeout_s: float,
    library: TorchSymmetricMemory,
) -> OneShotAllReduce:
    """Map memory between the ranks of a group, and check that it works. Collective: all ranks of the group.

    All memory is allocated here, so that graphs can be captured afterwards.

    Args:
        store: used only by this group.

    Raises:
        TransportUnavailable: on all ranks, if one of them cannot use symmetric memory.
        TransportError: a rank does not connect in time.
    """
    attempts = _Attempts(store, rank_in_group, num_ranks, timeout_s)
    attempts.make(lambda: _check_requirements(num_ranks, device, library, is_one_host=is_one_host))
    if rank_in_group == 0:
        store.set("name", f"moeserve/{secrets.token_hex(8)}")
    name = store.get("name").decode()

    def allocate() -> Tensor:
        library.open(name, PrefixStore("memory", store), rank_in_group, num_ranks)
        return library.allocate(name, MAX_BYTES, device)

    try:
        memory = attempts.make(allocate)
        attempts.make(lambda: library.map(name, memory))
        one_shot = OneShotAllReduce(library, name, memory)
        attempts.make(lambda: _check(one_shot, rank_in_group, num_ranks, device))
    except BaseException:
        library.close(name)
        raise
    return one_shot


class _Attempts:
    """Attempts that succeed on all ranks of a group, or fail on all."""

    def __init__(self, store: Store, rank_in_group: int, num_ranks: int, timeout_s: float) -> None:
        self._store, self._rank, self._num_ranks, self._timeout_s = store, rank_in_group, num_ranks, timeout_s
        self._num_made = 0

    def make(self, do: Callable[[], Result]) -> Result:
        """Return the result of `do`. Collective: all ranks of the group.

        Raises:
            TransportUnavailable: on all ranks, if `do` fails on any rank.
            TransportError: a rank does not answer in time.
        """
        self._num_made += 1
        results, refusal = [], ""
        try:
            results.append(do())
        except Exception as error:  # a private API of torch: any name may be missing
            refusal = " ".join(str(error).split()) or type(error).__name__
        store = PrefixStore(f"stage{self._num_made}", self._store)
        try:
            agree(store, self._rank, self._num_ranks, refusal, self._timeout_s)
        except RuntimeError as error:  # raised by the store
            raise TransportError(f"not all ranks connected within {self._timeout_s:g} s") from error
        return results[0]


def _check_requirements(
    num_ranks: int, device: torch.device, library: TorchSymmetricMemory, *, is_one_host: bool
) -> None:
    if not is_one_host:
        raise TransportUnavailable("the group's ranks are on several hosts")
    if num_ranks > MAX_RANKS:
        raise TransportUnavailable(f"the group has {num_ranks} ranks, more than {MAX_RANKS}")
    if missing := library.missing(device):
        raise TransportUnavailable(missing)


def _check(one_shot: OneShotAllReduce, rank_in_group: int, num_ranks: int, device: torch.device) -> None:
    """Raise TransportUnavailable if one of two sums is wrong. The second sum must not read values of the first."""
    sums, expected = [], []
    for trial in range(2):  # run both even if the first fails, because other ranks join both
        x = torch.arange(256, dtype=torch.float32, device=device)
        sums.append(one_shot.all_reduce(x * (trial + rank_in_group + 1)))
        expected.append(x.cpu() * sum(trial + rank + 1 for rank in range(num_ranks)))
    if not torch.equal(torch.stack(sums).cpu(), torch.stack(expected)):
        raise TransportUnavailable("sums in symmetric memory are wrong here")


class OneShotAllReduce:
    """All-reduce over the ranks of a group. Calls must not overlap: use one stream, or streams that synchronise.

    Terms are added in rank order and in the tensors' dtype; bfloat16 is rounded after each addition. All ranks get the
    same bytes. If a rank is missing, the GPUs of the other ranks wait for ever: no timeout applies on the device.
    """

    def __init__(self, library: TorchSymmetricMemory, name: str, memory: Tensor) -> None:
        """
        Args:
            memory: [MAX_BYTES] uint8, mapped by all ranks.
        """
        self._library = library
        self._name = name
        self._memory = memory

    def supports(self, x: Tensor) -> bool:
        """True if x can be added. The answer depends only on dtype and size, so it is the same on all ranks."""
        return x.dtype in DTYPES and 0 < x.nbytes <= MAX_BYTES and x.nbytes % ALIGNMENT == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over ranks, in new memory with the shape and dtype of x. x is contiguous."""
        assert self.supports(x), (x.dtype, x.nbytes)
        if x.data_ptr() % ALIGNMENT:  # a view from the middle of another tensor
            x = x.clone()
        memory = self._memory[: x.nbytes].view(x.dtype).view(x.shape)
        return self._library.all_reduce(self._name, memory, x)

    def close(self) -> None:
        """Leave the group. May be called twice."""
        if len(self._memory):
            _leaked.append(self._memory)
            self._memory = torch.empty(0)
            self._library.close(self._name)


class TorchSymmetricMemory:
    """The parts of torch's symmetric memory that versions 2.9 to 2.13 have in common.

    torch's operations look up a group by name in a table of the process, so an open group is registered in that table.
    No other global state of torch.distributed is changed.
    """

    def __init__(self, process_group: Any) -> None:
        """
        Args:
            process_group: the process group of the same ranks from `nccl.make_process_group`.
        """
        self._backend = process_group
        self._group: Any = None

    def missing(self, device: torch.device) -> str:
        """Return a requirement of symmetric memory that this rank does not meet; "" if it meets all."""
        if not hasattr(_c10d(), "_SymmetricMemory") or not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
            return f"torch {torch.__version__} has no symmetric memory"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return f"{torch.cuda.get_device_name(device)} is older than the kernel supports"
        return "" if _has_nvlink(device) else f"{device} has no NVLink"

    def open(self, name: str, store: Store, rank: int, num_ranks: int) -> None:
        """Register the group under a name that no other group of this process has ever had."""
        c10d = _c10d()
        group = as_torch_group(store, rank, num_ranks, self._backend)
        group._set_group_name(name)
        c10d._register_process_group(name, group)
        self._group = group  # torch's table does not keep the group alive
        c10d._SymmetricMemory.set_group_info(name, rank, num_ranks, store)

    def allocate(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        """Return [num_bytes] uint8 memory that the other ranks can map."""
        memory: Tensor = _c10d()._SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, name)
        return memory

    def map(self, name: str, memory: Tensor) -> None:
        """Map the memory of all ranks into each other's address space. Collective: all ranks of the group."""
        _c10d()._SymmetricMemory.rendezvous(memory, name)

    def all_reduce(self, name: str, memory: Tensor, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks, through `memory` of x's shape and dtype. x is contiguous.

        collective: all ranks of the group, on their current streams.
        """
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(memory, x, "sum", name)
        return total

    def close(self, name: str) -> None:
        """Unregister the group. No collective may be under way."""
        if self._group is not None:
            _c10d()._unregister_process_group(name)
            self._group = None


def _has_nvlink(device: torch.device) -> bool:
    """True if NVLink connects this GPU to all others that this process sees, or to a switch that reaches all."""
    cuda = importlib.import_module("torch._C._autograd").DeviceType.CUDA
    if _c10d()._SymmetricMemory.has_multicast_support(cuda, device.index):
        return True
    links = _c10d()._detect_dma_connectivity(cuda, "nvlink").matrix[device.index]
    others = [count for other, count in enumerate(links) if other != device.index]
    return bool(others) and all(others)


def _c10d() -> Any:
    """Return the C++ part of torch.distributed. Most names used here are private and missing in some versions."""
    return importlib.import_module("torch._C._distributed_c10d")
