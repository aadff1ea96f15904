"""Sums of small tensors on the GPUs of one host in one kernel: each GPU reads all others' memory, and adds for itself.

A decode step sums a few rows in every layer, and what that takes is waiting: NCCL passes them on from rank to rank or
through a tree, here one look at each other GPU is enough. It takes memory that all GPUs have mapped, which torch calls
symmetric (torch.distributed._symmetric_memory; it is not public yet). So whether it is there and gives right sums is
found out by doing it, on all ranks alike, and where not, NCCL sums. So with Ray, which shows each rank its own GPU as
number 0: torch refuses ranks whose GPUs have the same number.

Knows ranks of one group. What is of torch is in `TorchLibrary`; the rest runs without a GPU.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from moeserve.distributed.handshake import YES, CannotReach, agree
from moeserve.distributed.nccl import as_torch_group
from moeserve.distributed.transport import TransportError

MAX_BYTES = 2**18  # of a tensor; where more are to be summed, what counts is how many bytes travel
ALIGNMENT = 16  # bytes that the kernel reads at once
MAX_RANKS = 8  # of one host, all of which read all others' memory
DTYPES = (torch.float32, torch.bfloat16)

# Memory of groups that were left. To free it torch waits for the device, where a sum may wait for a rank that is gone.
_given_up: list[Tensor] = []


class Library(Protocol):
    """What torch does."""

    def why_not(self, device: torch.device) -> str:
        """What is missing here; "": nothing that can be seen from this rank alone."""
        ...

    def open(self, name: str, store: Store, rank: int, num_ranks: int) -> None:
        """Make the group known under a name that no other has had in this process."""
        ...

    def memory(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        """Bytes that the other ranks can map."""
        ...

    def map(self, name: str, memory: Tensor) -> None:
        """Map all ranks' memory into each other's. Collective: all ranks of the group."""
        ...

    def sum(self, name: str, memory: Tensor, x: Tensor) -> Tensor:
        """The sum over all ranks of x, contiguous, by way of as much memory, of the same shape and dtype.

        Collective: all ranks of the group, on their current streams.
        """
        ...

    def close(self, name: str) -> None:
        """Forget the group. Nothing may be under way."""
        ...


def connect(
    store: Store,
    rank_in_group: int,
    num_ranks: int,
    *,
    is_one_host: bool,
    device: torch.device,
    timeout_s: float,
    library: Library,
) -> OneShotSum:
    """Map memory with the others of a group. Collective: all ranks of the group.

    `store` is for this group alone. All memory is taken here, so that graphs may be captured afterwards.

    Raises:
        CannotReach: why there is none; on all of the ranks, or on none.
        TransportError: one of them does not come in time.
    """
    stage = 0

    def agreed(do: Callable[[], object]) -> None:
        """Done by all, or by none."""
        nonlocal stage
        stage += 1
        verdict = YES
        try:
            do()
        except Exception as error:  # what torch has there is not public: anything may be missing, or other
            verdict = " ".join(str(error).split()) or type(error).__name__
        try:
            agree(PrefixStore(f"stage{stage}", store), rank_in_group, num_ranks, verdict, timeout_s)
        except RuntimeError as error:  # of the store
            raise TransportError(f"not all ranks came within {timeout_s:g} s") from error

    def look() -> None:
        if not is_one_host:
            raise CannotReach("the group's ranks are on several hosts")
        if num_ranks > MAX_RANKS:
            raise CannotReach(f"the group has {num_ranks} ranks, more than {MAX_RANKS}")
        if missing := library.why_not(device):
            raise CannotReach(missing)

    agreed(look)
    if rank_in_group == 0:
        store.set("name", f"moeserve/{secrets.token_hex(8)}")
    name = store.get("name").decode()
    memory = torch.empty(0)

    def take() -> None:
        nonlocal memory
        library.open(name, PrefixStore("memory", store), rank_in_group, num_ranks)
        memory = library.memory(name, MAX_BYTES, device)

    try:
        agreed(take)
        agreed(lambda: library.map(name, memory))
        one_shot = OneShotSum(library, name, memory, num_ranks)
        agreed(lambda: _try_out(one_shot, rank_in_group, num_ranks, device))
    except BaseException:
        library.close(name)
        raise
    return one_shot


def _try_out(one_shot: OneShotSum, rank_in_group: int, num_ranks: int, device: torch.device) -> None:
    """CannotReach when a sum is wrong. Twice in the same memory: the second must not meet the first one's values."""
    got, expected = [], []
    for turn in range(2):  # all of them, whatever comes of the first: the others are waiting
        x = torch.arange(256, dtype=torch.float32, device=device)
        got.append(one_shot.all_reduce(x * (turn + rank_in_group + 1)))
        expected.append(x.cpu() * sum(turn + rank + 1 for rank in range(num_ranks)))
    if not torch.equal(torch.stack(got).cpu(), torch.stack(expected)):
        raise CannotReach("sums in symmetric memory are wrong here")


class OneShotSum:
    """Sums over the ranks of a group. One at a time: on one stream, or on streams that wait for each other.

    Added in rank order, and in the tensors' dtype: a sum of bfloat16 is rounded after each addition. All ranks get the
    same bytes. A rank that does not come keeps the others' GPUs waiting without end: no timeout holds on the device.
    """

    def __init__(self, library: Library, name: str, memory: Tensor, num_ranks: int) -> None:
        """
        Args:
            memory: [MAX_BYTES] uint8, mapped by all ranks.
        """
        self._library = library
        self._name = name
        self._memory = memory
        self.num_ranks = num_ranks

    def takes(self, x: Tensor) -> bool:
        """Whether x can be summed here: a question that all ranks answer alike, since it goes by shape and dtype."""
        return x.dtype in DTYPES and 0 < x.nbytes <= MAX_BYTES and x.nbytes % ALIGNMENT == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in memory of its own. x is contiguous."""
        assert self.takes(x), (x.dtype, x.nbytes)
        if x.data_ptr() % ALIGNMENT:  # a view from the middle of another
            x = x.clone()
        memory = self._memory[: x.nbytes].view(x.dtype).view(x.shape)
        return self._library.sum(self._name, memory, x)

    def close(self) -> None:
        """Leave the group. May be called twice."""
        if len(self._memory):
            _given_up.append(self._memory)
            self._memory = torch.empty(0)
            self._library.close(self._name)


class TorchLibrary:
    """torch's symmetric memory, in the parts that versions 2.9 to 2.13 have in common.

    Its operations find a group by its name in a table of the whole process, so each of ours stands there while it is
    open. Nothing else of torch.distributed's global state is touched.
    """

    def __init__(self, process_group: Any) -> None:
        """
        Args:
            process_group: of the same ranks, from `nccl.process_group`: torch asks it for names alone.
        """
        self._backend = process_group
        self._group: Any = None

    def why_not(self, device: torch.device) -> str:
        if not hasattr(_c10d(), "_SymmetricMemory") or not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
            return f"torch {torch.__version__} has no symmetric memory"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return f"{torch.cuda.get_device_name(device)} is older than the kernel"
        return "" if _has_nvlink(device) else f"{device} has no NVLink"

    def open(self, name: str, store: Store, rank: int, num_ranks: int) -> None:
        c10d = _c10d()
        group = as_torch_group(store, rank, num_ranks, self._backend)
        group._set_group_name(name)
        c10d._register_process_group(name, group)
        self._group = group  # the table does not hold it
        c10d._SymmetricMemory.set_group_info(name, rank, num_ranks, store)

    def memory(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        memory: Tensor = _c10d()._SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, name)
        return memory

    def map(self, name: str, memory: Tensor) -> None:
        _c10d()._SymmetricMemory.rendezvous(memory, name)

    def sum(self, name: str, memory: Tensor, x: Tensor) -> Tensor:
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(memory, x, "sum", name)
        return total

    def close(self, name: str) -> None:
        if self._group is not None:
            _c10d()._unregister_process_group(name)
            self._group = None


def _has_nvlink(device: torch.device) -> bool:
    """Whether this GPU has an NVLink to all others that this process sees, or to a switch that can address all."""
    cuda = importlib.import_module("torch._C._autograd").DeviceType.CUDA
    if _c10d()._SymmetricMemory.has_multicast_support(cuda, device.index):
        return True
    links = _c10d()._detect_dma_connectivity(cuda, "nvlink").matrix[device.index]
    others = [count for other, count in enumerate(links) if other != device.index]
    return bool(others) and all(others)


def _c10d() -> Any:
    """The C++ part of torch.distributed, most of whose names here are not public, and not in all versions."""
    return importlib.import_module("torch._C._distributed_c10d")
