"""All that we use of NCCL, torch's transport for tensors on GPUs. Knows no names of groups, and no tensor on the CPU.

NCCL takes float16, bfloat16, float32, float64, 8-bit floats, int8, uint8, int32, int64 and bool. Its errors are
RuntimeErrors, and what goes wrong on the device is found by a thread of torch's, after the call has returned.

In this file the process group may be any of torch's that has the methods used: the tests use gloo's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions
from torch.distributed import Store, Work, is_nccl_available

from moeserve.addresses import own_addresses
from moeserve.config.environment import set_for_libraries
from moeserve.config.resolve import WITHOUT_NCCL
from moeserve.distributed.transport import NotCapturable, Pending, TransportError, exchange_and_add
from moeserve.errors import SettingsError

# torch's thread gives a communicator up that has failed, and the process lives: 3, torch's default, ends the process
# before this rank could say which collective it was.
ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}

LOST = "NCCL lost the connection with another rank"


def as_torch_group(store: Store, rank_in_group: int, num_ranks: int, backend: Any) -> Any:
    """The ProcessGroup of torch.distributed over what `process_group` gave, for libraries that ask for one.

    It stands in no table of the process. Its backend is its default: a barrier, for one, takes a tensor of the default
    backend's device, and without any one of the CPU, for which NCCL has nothing.
    """
    c10d = importlib.import_module("torch._C._distributed_c10d")
    group = c10d.ProcessGroup(store, rank_in_group, num_ranks)
    kind = getattr(c10d.ProcessGroup.BackendType, backend.name().upper())
    device = torch.device("cuda" if backend.name() == "nccl" else "cpu")
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group


class OneShot(Protocol):
    """Sums of small tensors by a quicker way. See `symmetric_memory.py`."""

    def takes(self, x: Tensor) -> bool:
        """Whether this one is small enough, and of a kind that it can add. The same answer on all ranks."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def close(self) -> None: ...


class NcclTransport(NotCapturable):
    """One rank's side. See `Transport` and `DeviceTransport` for the contract.

    Who waits is the current stream, never the host; sizes come from the host, so nothing is padded and nothing is asked
    of the device. Each collective takes its memory from torch's allocator, and no other: it can be captured in a CUDA
    graph once one of its kind and size has run outside, which makes the connections. Replays are watched by nobody: a
    rank that does not replay the graph that the others do keeps them waiting without end.

    **Sums.** NCCL adds in an order that follows from its algorithm, the number of bytes and the machine's wires, and
    may round to the tensors' dtype after each addition: last bits depend on all of these. `all_reduce` gives the same
    bytes to all ranks. Where all terms of a sum but one are zero, as in the combine of small steps, the order does not
    matter. Shares of different sizes are added here, in rank order and in float32, unless a one-shot sum takes them.
    """

    def __init__(
        self,
        group: Any,
        timeout_s: float,
        *,
        one_shot: OneShot | None = None,
        owns_group: bool = True,
    ) -> None:
        """
        Args:
            group: from `process_group`.
            one_shot: what adds the tensors that it takes.
            owns_group: whether to give the group up when this is closed; of several that share one, the first.
        """
        self._group: Any = group
        self._timeout_s = timeout_s
        self._num_ranks: int = group.size()
        self._rank: int = group.rank()
        self._one_shot = one_shot
        self._owns_group = owns_group

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending:
        x = x.contiguous()
        gathered = x.new_empty((sum(sizes), *x.shape[1:]))
        if not gathered.numel():  # so on all ranks
            return gathered, _nothing
        if _are_even(sizes):
            work = self._begun(lambda: self._group._allgather_base(gathered, x, AllgatherOptions()))
        else:
            parts = list(gathered.split(list(sizes)))
            work = self._begun(lambda: self._group.alltoall(parts, [x] * self._num_ranks, AllToAllOptions()))
        return gathered, self._waits_for(work)

    def begin_all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        x = x.contiguous()
        received = x.new_empty((sum(receive_sizes), *x.shape[1:]))
        arguments = received, x, list(receive_sizes), list(send_sizes)
        work = self._begun(lambda: self._group.alltoall_base(*arguments, AllToAllOptions()))
        return received, self._waits_for(work)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        x, own = x.contiguous(), sizes[self._rank]
        if not x.numel():  # so on all ranks
            return x.new_empty((own, *x.shape[1:]))
        if self._one_shot is not None and self._one_shot.takes(x):
            return self._sum_at_once(self._one_shot, x).narrow(0, sum(sizes[: self._rank]), own)
        if not _are_even(sizes):
            return exchange_and_add(self, x, sizes, self._rank)
        reduced = x.new_empty((own, *x.shape[1:]))
        options = _on_current_stream(ReduceScatterOptions())
        self._waits_for(self._begun(lambda: self._group._reduce_scatter_base(reduced, x, options)))()
        return reduced

    def all_reduce(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty(x.shape)
        if self._one_shot is not None and self._one_shot.takes(x):
            return self._sum_at_once(self._one_shot, x.contiguous())
        total = x.clone(memory_format=torch.contiguous_format)  # it is added where it lies
        options = _on_current_stream(AllreduceOptions())
        self._waits_for(self._begun(lambda: self._group.allreduce([total], options)))()
        return total

    def begin_step(self) -> None:
        return

    def seconds_waited(self) -> list[float]:
        """None: what waits is the device, which the host does not see."""
        return []

    @property
    def supports_cuda_graphs(self) -> bool:
        return True

    def raise_failure(self) -> None:
        """TransportError when a collective was given up, whose stream has gone on without a result.

        To be asked once the host has waited for the device, before it believes what came from there.
        """
        get_error = getattr(self._group, "get_error", None)  # of NCCL's process groups alone
        match "SUCCESS" if get_error is None else get_error().name:
            case "SUCCESS":
                return
            case "TIMEOUT":
                raise TransportError(_late(self._timeout_s))
            case _:
                raise TransportError(LOST)

    def try_out(self, device: torch.device) -> None:
        """One small collective of each kind, waited for by the host: so what cannot work fails before the first step.

        Collective: all ranks of the group. TransportError when something fails, or a sum is wrong.
        """
        ones = torch.ones(self._num_ranks, dtype=torch.float32, device=device)
        even = [1] * self._num_ranks
        ragged = [2, *even[1:]]
        gathered, wait_gathered = self.begin_all_gather(ones[: ragged[self._rank]], ragged)
        exchanged, wait_exchanged = self.begin_all_to_all(ones, even, even)
        wait_gathered()
        wait_exchanged()
        flat, wait_flat = self.begin_all_gather(ones[:1], even)
        wait_flat()
        results = [gathered, exchanged, flat, self.reduce_scatter(ones, even), self.all_reduce(ones)]
        try:
            sums = [float(each.sum()) for each in results]
        except RuntimeError as error:  # the device's, found where the host waits
            raise TransportError(cause(error, self._timeout_s)) from error
        self.raise_failure()
        n = self._num_ranks
        if sums != [n + 1, n, n, n, n * n]:
            raise TransportError(f"NCCL carries wrong values here: {sums} instead of {[n + 1, n, n, n, n * n]}")

    def close(self) -> None:
        """Gives the group up: NCCL's kernels that wait on this device end, and ranks that wait for this one fail."""
        group, self._group = self._group, None
        if self._one_shot is not None:
            self._one_shot.close()
            self._one_shot = None
        if group is not None and self._owns_group:
            group.abort()

    def _begun(self, begin: Callable[[], Work | None]) -> Work | None:
        assert self._group is not None, "it was closed"
        try:
            return begin()
        except RuntimeError as error:
            raise TransportError(cause(error, self._timeout_s)) from error

    def _waits_for(self, work: Work | None) -> Callable[[], None]:
        """What makes the current stream wait. Until then the work holds what is read and written."""

        def wait() -> None:
            try:
                if work is not None:  # None: it runs on the current stream
                    work.wait()
            except RuntimeError as error:
                raise TransportError(cause(error, self._timeout_s)) from error

        return wait

    def _sum_at_once(self, one_shot: OneShot, x: Tensor) -> Tensor:
        try:
            return one_shot.all_reduce(x)
        except RuntimeError as error:
            raise TransportError(cause(error, self._timeout_s)) from error


def process_group(
    store: Store, rank_in_group: int, num_ranks: int, *, device: torch.device, address: str, timeout_s: float
) -> Any:
    """Connect with the others: a ProcessGroupNCCL, whose ranks have a GPU each.

    timeout_s holds for this and for each collective. NCCL meets at the interface that has `address`, unless
    NCCL_SOCKET_IFNAME says otherwise: its own choice would be open to the network on one host too.

    Raises:
        SettingsError: this torch has no NCCL.
        RuntimeError: ranks did not come, or NCCL cannot use the device.
    """
    if not is_nccl_available():
        raise SettingsError(f"torch {torch.__version__} {WITHOUT_NCCL}")
    from torch.distributed import ProcessGroupNCCL  # is missing in a torch without NCCL

    interface = next((name for name, own in own_addresses().items() if own == address), None)
    set_for_libraries(ENVIRONMENT | ({"NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}))
    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=timeout_s)
    group = ProcessGroupNCCL(store, rank_in_group, num_ranks, options)
    group.eager_connect_single_device(device)
    return group


def cause(error: RuntimeError, timeout_s: float) -> str:
    """What NCCL's words mean to a reader."""
    words = " ".join(str(error).split())
    lower = words.lower()
    if "timeout" in lower or "timed out" in lower:
        return _late(timeout_s)
    if any(
        lost in lower
        for lost in ("was aborted", "remote process exited", "connection closed", "connection reset", "broken pipe")
    ):
        return LOST
    return words


def _late(timeout_s: float) -> str:
    return f"not all ranks took part within {timeout_s:g} s"


def _are_even(sizes: Sequence[int]) -> bool:
    return len(set(sizes)) == 1


def _on_current_stream(options: Any) -> Any:
    """For collectives that are waited for at once: they need no stream of their own, nor events between the two."""
    options.asyncOp = False
    return options


def _nothing() -> None:
    return
