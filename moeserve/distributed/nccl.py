"""The transport over NCCL, torch's library for GPU tensors.

NCCL carries float16, bfloat16, float32, float64, 8-bit floats, int8, uint8, int32, int64 and bool. NCCL's errors are
RuntimeErrors. A failure on the device is detected by torch's watchdog thread after the call has returned. Any torch
process group with the methods used here works: the tests pass a gloo process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions
from torch.distributed import Store, Work, is_nccl_available

from moeserve.addresses import own_addresses
from moeserve.config.environment import set_for_libraries
from moeserve.config.facts import WITHOUT_NCCL
from moeserve.distributed.symmetric_memory import OneShotAllReduce
from moeserve.distributed.transport import Pending, Transport, TransportError, reduce_scatter_by_all_to_all
from moeserve.errors import SettingsError

# torch's watchdog thread monitors the communicators. With 2, the watchdog aborts a failed communicator, and the process
# continues. With 3, torch's default, the watchdog ends the process before this rank can report the failed collective.
ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}

LOST = "NCCL lost the connection with another rank"


class NcclTransport(Transport):
    """One rank's transport of GPU tensors.

    **Waiting.** Only the current stream waits for a collective. The host never waits, because it knows all sizes.

    **CUDA graphs** can capture a collective, because it allocates only from torch's allocator. A collective of the same
    kind and size must have run before, because the first collective makes the connections. If a rank does not replay a
    graph, the other ranks wait for this rank without a time limit.

    **Sums.** NCCL chooses the order of additions by its algorithm, the size, and the wiring of the machine, and may
    round after each addition, so the last bits depend on all of these. The order does not matter where all terms but
    one are zero, as in the combine of small steps. This class adds in float32 and in the order of the other transports,
    instead of NCCL, in two cases: where ranks have different numbers of rows, unless `small_all_reduce` applies; and
    where the caller gives the dtype of the result, as for chunked products (`InputChunks`), whose order matters.
    """

    def __init__(
        self,
        process_group: Any,
        timeout_s: float,
        *,
        small_all_reduce: OneShotAllReduce | None = None,
        owns_process_group: bool = True,
    ) -> None:
        """
        Args:
            process_group: from `make_process_group`.
            small_all_reduce: used for the tensors that it supports.
            owns_process_group: True if `close` aborts the process group. Exactly one transport owns a shared group.
        """
        self._process_group: Any = process_group
        self._timeout_s = timeout_s
        self._num_ranks: int = process_group.size()
        self._rank: int = process_group.rank()
        self._small_all_reduce = small_all_reduce
        self._owns_process_group = owns_process_group
        self._under_way: set[int] = set()  # ids of collectives that no stream has waited for

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending:
        x = x.contiguous()
        gathered = x.new_empty((sum(sizes), *x.shape[1:]))
        if not gathered.numel():  # true on all ranks or on none
            return gathered, _nothing
        if _are_equal(sizes):
            work = self._begin(lambda: self._process_group._allgather_base(gathered, x, AllgatherOptions()))
        else:
            parts = list(gathered.split(list(sizes)))
            work = self._begin(lambda: self._process_group.alltoall(parts, [x] * self._num_ranks, AllToAllOptions()))
        return gathered, self._waiter(work)

    def begin_all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        x = x.contiguous()
        received = x.new_empty((sum(receive_sizes), *x.shape[1:]))
        arguments = received, x, list(receive_sizes), list(send_sizes)
        work = self._begin(lambda: self._process_group.alltoall_base(*arguments, AllToAllOptions()))
        return received, self._waiter(work)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        x, num_own = x.contiguous(), sizes[self._rank]
        if not x.numel():  # true on all ranks or on none
            return x.new_empty((num_own, *x.shape[1:]), dtype=dtype)
        if dtype is not None:
            return reduce_scatter_by_all_to_all(self, x, sizes, self._rank, dtype)
        if self._small_all_reduce is not None and self._small_all_reduce.supports(x):
            return self._all_reduce_small(self._small_all_reduce, x).narrow(0, sum(sizes[: self._rank]), num_own)
        if not _are_equal(sizes):
            return reduce_scatter_by_all_to_all(self, x, sizes, self._rank, dtype)
        reduced = x.new_empty((num_own, *x.shape[1:]))
        options = ReduceScatterOptions()
        if not self._under_way:  # else two streams would use the communicator at once
            options = _on_current_stream(options)
        self._waiter(self._begin(lambda: self._process_group._reduce_scatter_base(reduced, x, options)))()
        return reduced

    def raise_failure(self) -> None:
        """Raise TransportError if a collective was aborted: the GPU stream continues without a valid result.

        Call this after the host has waited for the device, before the results are used.
        """
        get_error = getattr(self._process_group, "get_error", None)  # only NCCL's process groups have this method
        match "SUCCESS" if get_error is None else get_error().name:
            case "SUCCESS":
                return
            case "TIMEOUT":
                raise TransportError(_timeout_cause(self._timeout_s))
            case _:
                raise TransportError(LOST)

    def check(self, device: torch.device) -> None:
        """Run one small collective of each kind and wait for it on the host, to detect failures before the first step.

        collective: all ranks of the group. Raises TransportError if a collective fails or returns a wrong result.
        """
        ones = torch.ones(self._num_ranks, dtype=torch.float32, device=device)
        equal = [1] * self._num_ranks
        ragged = [2, *equal[1:]]
        gathered, wait_gathered = self.begin_all_gather(ones[: ragged[self._rank]], ragged)
        exchanged, wait_exchanged = self.begin_all_to_all(ones, equal, equal)
        wait_gathered()
        wait_exchanged()
        flat, wait_flat = self.begin_all_gather(ones[:1], equal)
        wait_flat()
        results = [gathered, exchanged, flat, self.reduce_scatter(ones, equal)]
        try:
            sums = [float(each.sum()) for each in results]
        except RuntimeError as error:  # an error on the device, raised when the host waits
            raise TransportError(cause_of(error, self._timeout_s)) from error
        self.raise_failure()
        n = self._num_ranks
        if sums != [n + 1, n, n, n]:
            raise TransportError(f"NCCL returns wrong values here: {sums} instead of {[n + 1, n, n, n]}")

    def close(self) -> None:
        """Abort the process group: NCCL's waiting kernels on this device end, and ranks waiting for this rank fail."""
        process_group, self._process_group = self._process_group, None
        if self._small_all_reduce is not None:
            self._small_all_reduce.close()
            self._small_all_reduce = None
        if process_group is not None and self._owns_process_group:
            process_group.abort()

    def _begin(self, begin: Callable[[], Work | None]) -> Work | None:
        assert self._process_group is not None, "the transport is closed"
        try:
            return begin()
        except RuntimeError as error:
            raise TransportError(cause_of(error, self._timeout_s)) from error

    def _waiter(self, work: Work | None) -> Callable[[], None]:
        """Return a function that makes the current stream wait for `work`, which keeps its tensors alive until then."""
        self._under_way.add(id(work))

        def wait() -> None:
            self._under_way.discard(id(work))
            try:
                if work is not None:  # None: the collective runs on the current stream
                    work.wait()
            except RuntimeError as error:
                raise TransportError(cause_of(error, self._timeout_s)) from error

        return wait

    def _all_reduce_small(self, small_all_reduce: OneShotAllReduce, x: Tensor) -> Tensor:
        try:
            return small_all_reduce.all_reduce(x)
        except RuntimeError as error:
            raise TransportError(cause_of(error, self._timeout_s)) from error


def make_process_group(
    store: Store, rank_in_group: int, num_ranks: int, *, device: torch.device, address: str, timeout_s: float
) -> Any:
    """Connect to the other ranks, each of which has its own GPU, and return a ProcessGroupNCCL.

    timeout_s limits both the connecting and each collective. NCCL uses the network interface with `address`, unless
    NCCL_SOCKET_IFNAME names an interface. By default, NCCL would choose an interface that is open to the network, even
    on a single host.

    Raises:
        SettingsError: this torch has no NCCL.
        RuntimeError: a rank did not connect, or NCCL cannot use the device.
    """
    if not is_nccl_available():
        raise SettingsError(f"torch {torch.__version__} {WITHOUT_NCCL}")
    from torch.distributed import ProcessGroupNCCL  # missing in a torch without NCCL

    interface = next((name for name, own in own_addresses().items() if own == address), None)
    set_for_libraries(ENVIRONMENT | ({"NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}))
    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=timeout_s)
    process_group = ProcessGroupNCCL(store, rank_in_group, num_ranks, options)
    process_group.eager_connect_single_device(device)
    return process_group


def cause_of(error: RuntimeError, timeout_s: float) -> str:
    """Return the cause of an NCCL error, in words that a user understands."""
    message = " ".join(str(error).split())
    lower = message.lower()
    if "timeout" in lower or "timed out" in lower:
        return _timeout_cause(timeout_s)
    if any(
        lost in lower
        for lost in ("was aborted", "remote process exited", "connection closed", "connection reset", "broken pipe")
    ):
        return LOST
    return message


def _timeout_cause(timeout_s: float) -> str:
    return f"not all ranks joined within {timeout_s:g} s"


def _are_equal(sizes: Sequence[int]) -> bool:
    return len(set(sizes)) == 1


def _on_current_stream(options: Any) -> Any:
    """Set options for a collective that is waited for at once, which needs neither a stream of its own nor events."""
    options.asyncOp = False
    return options


def _nothing() -> None:
    return
