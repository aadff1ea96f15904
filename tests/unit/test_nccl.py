"""Parts of ranks on GPUs that run without one: transports by device, NCCL calls, errors, symmetric memory, devices."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore

from moeserve.config.engine_config import EngineConfig
from moeserve.config.facts import CheckpointFacts, MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed import nccl, symmetric_memory
from moeserve.distributed.coordinator import GroupConnection
from moeserve.distributed.groups import groups_of_one_rank, unconnected
from moeserve.distributed.mesh import Mesh
from moeserve.distributed.nccl import NcclTransport
from moeserve.distributed.symmetric_memory import ALIGNMENT, MAX_BYTES, OneShotAllReduce, TorchSymmetricMemory
from moeserve.distributed.torch_group import as_torch_group
from moeserve.distributed.transport import TransportError, TransportUnavailable
from moeserve.errors import SettingsError
from moeserve.worker.rank_process import take_device

# ---- transports by device


def test_tensors_use_the_transport_of_their_device() -> None:
    host, device = mock.Mock(), mock.Mock()
    x, on_device = torch.ones(1), torch.ones(1, device="meta")
    both = GroupConnection(host, mock.Mock(), None, device)
    assert (both.transport_of(x), both.transport_of(on_device)) == (host, device)
    with pytest.raises(AssertionError, match="CPU only, not on meta"):
        GroupConnection(host, mock.Mock(), None).transport_of(on_device)


def test_a_rank_alone_supports_graphs_and_cannot_fail() -> None:
    groups = groups_of_one_rank()
    assert groups.supports_cuda_graphs
    groups.raise_failure()
    unconnected(Mesh(tp=2, dp=1), 0).raise_failure()


# ---- which of NCCL's collectives


@dataclass
class RecordedGroup:
    """A process group that records its calls, with " here" for those on the current stream."""

    num_ranks: int = 2
    calls: list[str] = field(default_factory=list)
    error: str = ""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.num_ranks

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "get_error":
            raise AttributeError(name)

        def begin(*arguments: Any) -> Any:
            if self.error:
                raise RuntimeError(self.error)
            stream = "" if not arguments or arguments[-1].asyncOp else " here"
            self.calls.append(name + stream)
            return None if stream else Done(self.calls)

        return begin


@dataclass
class Done:
    calls: list[str]

    def wait(self) -> None:
        self.calls.append("wait")


ROWS = torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize(
    ("run", "calls"),
    [
        (lambda t: t.begin_all_gather(ROWS, [4, 4])[1](), ["_allgather_base", "wait"]),
        (lambda t: t.begin_all_gather(ROWS, [4, 3])[1](), ["alltoall", "wait"]),
        (lambda t: t.begin_all_gather(ROWS[:0], [0, 3])[1](), ["alltoall", "wait"]),
        (lambda t: t.begin_all_gather(ROWS[:0], [0, 0])[1](), []),
        (lambda t: t.begin_all_to_all(ROWS, [1, 3], [2, 0])[1](), ["alltoall_base", "wait"]),
        (lambda t: t.begin_all_to_all(ROWS[:0], [0, 0], [0, 0])[1](), ["alltoall_base", "wait"]),
        (lambda t: t.reduce_scatter(ROWS, [2, 2]), ["_reduce_scatter_base here"]),
        (lambda t: t.reduce_scatter(ROWS, [2, 2], torch.bfloat16), ["alltoall_base", "wait"]),
        (lambda t: t.reduce_scatter(ROWS, [3, 1]), ["alltoall_base", "wait"]),
        (lambda t: t.reduce_scatter(ROWS[:0], [0, 0]), []),
    ],
)
def test_nccl_calls(run: Callable[[NcclTransport], object], calls: list[str]) -> None:
    """The host waits for nothing: streams order what follows."""
    through = RecordedGroup()
    run(NcclTransport(through, 5.0))
    assert through.calls == calls


def test_small_sums_skip_nccl() -> None:
    through, one_shot = RecordedGroup(), mock.Mock()
    one_shot.supports = lambda x: x.numel() <= 12
    one_shot.all_reduce = lambda x: 2 * x
    transport = NcclTransport(through, 5.0, small_all_reduce=one_shot)
    assert transport.reduce_scatter(ROWS, [3, 1]).tolist() == (2 * ROWS[:3]).tolist()
    assert transport.reduce_scatter(ROWS, [0, 4]).shape == (0, 3)
    assert not through.calls
    transport.reduce_scatter(torch.ones(14), [7, 7])
    assert through.calls == ["_reduce_scatter_base here"]


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "NCCL communicator was aborted on rank 1. Original reason for failure was: [Rank 1] Watchdog caught "
            "collective operation timeout: WorkNCCL(SeqNum=4) ran for 5003 milliseconds before timing out.",
            "not all ranks joined within 5 s",
        ),
        (
            "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error, NCCL version 2.27.5",
            "NCCL lost the connection with another rank",
        ),
        ("invalid usage\n Last error:\nDuplicate GPU", "invalid usage Last error: Duplicate GPU"),
    ],
)
def test_errors_are_translated(message: str, cause: str) -> None:
    transport = NcclTransport(RecordedGroup(error=message), 5.0)
    for begin in (
        lambda: transport.reduce_scatter(ROWS, [2, 2]),
        lambda: transport.begin_all_gather(ROWS, [4, 4]),
        lambda: transport.begin_all_gather(ROWS, [4, 1]),
        lambda: transport.begin_all_to_all(ROWS, [4, 0], [0, 0]),
    ):
        with pytest.raises(TransportError) as failure:
            begin()
        assert str(failure.value) == cause


def test_errors_of_waits_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Done) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(Done, "wait", fail)
    _, wait = NcclTransport(RecordedGroup(), 5.0).begin_all_gather(ROWS, [4, 4])
    with pytest.raises(TransportError, match="NCCL lost the connection"):
        wait()


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"was built without NCCL.*install one for CUDA"):
        nccl.make_process_group(HashStore(), 0, 2, device=torch.device("cuda", 0), address="127.0.0.1", timeout_s=1)


def test_nccl_uses_the_interface_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Recorded:
        class Options:
            def __init__(self, is_high_priority_stream: bool) -> None:
                self.is_high_priority_stream = is_high_priority_stream

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            made.append((rank, size, options, dict(os.environ)))

        def eager_connect_single_device(self, device: torch.device) -> None:
            made.append(device)

    monkeypatch.setattr(nccl, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Recorded, raising=False)
    monkeypatch.setattr(nccl, "own_addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.7"})
    device = torch.device("cuda", 1)
    for name in ("NCCL_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    nccl.make_process_group(HashStore(), 1, 2, device=device, address="10.0.0.7", timeout_s=7)
    rank, size, options, environment = made[0]
    assert (rank, size, made[1]) == (1, 2, device)
    assert (options.is_high_priority_stream, options._timeout.total_seconds()) == (True, 7)
    assert environment["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    nccl.make_process_group(HashStore(), 1, 2, device=device, address="127.0.0.1", timeout_s=7)
    assert made[2][3]["NCCL_SOCKET_IFNAME"] == "=eth0"  # a value that is set stays


# ---- all-reduce in symmetric memory


@dataclass
class SharedTensors:
    """The tensors of all ranks of a test, which are threads."""

    num_ranks: int
    barrier: threading.Barrier = field(init=False)
    tensors: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.num_ranks, timeout=200)
        self.tensors = [torch.empty(0)] * self.num_ranks


@dataclass
class ThreadMemory:
    """Symmetric memory between threads. `fails` has the error of a call, or a wrong result."""

    rank: int
    shared: SharedTensors
    fails: dict[str, Exception | str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def missing(self, device: torch.device) -> str:
        self._record("missing")
        return str(self.fails.get("missing", ""))

    def open(self, name: str, store: Any, rank: int, num_ranks: int) -> None:
        self._record("open")

    def allocate(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        self._record("memory")
        assert num_bytes == MAX_BYTES
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def map(self, name: str, memory: Tensor) -> None:
        self._record("map")

    def all_reduce(self, name: str, memory: Tensor, x: Tensor) -> Tensor:
        self._record("sum")
        assert (memory.shape, memory.dtype, memory.is_contiguous()) == (x.shape, x.dtype, True)
        assert x.data_ptr() % ALIGNMENT == 0
        memory.copy_(x)
        self.shared.tensors[self.rank] = memory
        self.shared.barrier.wait()
        total = sum(self.shared.tensors[1:], self.shared.tensors[0].clone())
        self.shared.barrier.wait()
        return total + 1 if self.fails.get("wrong") else total

    def close(self, name: str) -> None:
        self._record("close")

    def _record(self, call: str) -> None:
        self.calls.append(call)
        error = self.fails.get(call)
        if isinstance(error, Exception):
            raise error


def on_threads(num_ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """Return the results of a function on each rank, or the errors that it raises."""
    results: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def connected(
    fails: Sequence[dict[str, Exception | str]], *, is_one_host: bool = True
) -> tuple[list[ThreadMemory], list[Any]]:
    """Return the memories of all ranks, and the result of connecting on each."""
    num_ranks, store = len(fails), HashStore()
    shared = SharedTensors(num_ranks)
    libraries = [ThreadMemory(rank, shared, of_rank) for rank, of_rank in enumerate(fails)]

    def connect(rank: int) -> OneShotAllReduce:
        return symmetric_memory.connect(
            PrefixStore("test", store),
            rank,
            num_ranks,
            is_one_host=is_one_host,
            device=torch.device("cpu"),
            timeout_s=10,
            library=libraries[rank],  # type: ignore[arg-type]
        )

    return libraries, on_threads(num_ranks, connect)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_reduce_in_symmetric_memory(num_ranks: int) -> None:
    libraries, one_shots = connected([{}] * num_ranks)
    assert all(isinstance(each, OneShotAllReduce) for each in one_shots), one_shots
    start = ["missing", "open", "memory", "map", "sum", "sum"]
    assert [each.calls for each in libraries] == [start] * num_ranks
    parts = torch.randn(num_ranks, 5, 32, 4, generator=torch.Generator().manual_seed(0))

    def add(rank: int) -> list[Tensor]:
        whole = one_shots[rank].all_reduce(parts[rank])
        of_view = one_shots[rank].all_reduce(parts[rank].flatten()[1:5])  # not aligned as the kernel needs
        of_halves = one_shots[rank].all_reduce(parts[rank].bfloat16())
        one_shots[rank].close()
        one_shots[rank].close()
        return [whole, of_view, of_halves]

    total = sum(parts[1:], parts[0].clone())
    for whole, of_view, of_halves in on_threads(num_ranks, add):
        assert torch.equal(whole, total)
        assert torch.equal(of_view, total.flatten()[1:5])
        assert of_halves.dtype == torch.bfloat16
    # Nothing was allocated for these: a graph may have captured them.
    assert [each.calls for each in libraries] == [[*start, "sum", "sum", "sum", "close"]] * num_ranks


def test_supported_tensors() -> None:
    one_shot = OneShotAllReduce(mock.Mock(), "group", torch.empty(MAX_BYTES, dtype=torch.uint8))
    for dtype, numel, is_supported in [
        (torch.bfloat16, MAX_BYTES // 2, True),  # 32 tokens of 4096
        (torch.bfloat16, MAX_BYTES // 2 + 8, False),
        (torch.float32, MAX_BYTES // 4, True),
        (torch.float32, 4, True),
        (torch.float32, 3, False),
        (torch.float32, 0, False),
        (torch.float16, 64, False),
    ]:
        assert one_shot.supports(torch.empty(numel, dtype=dtype)) == is_supported, (dtype, numel)


@pytest.mark.parametrize(
    ("failing", "words", "last"),
    [
        ({"missing": "the GPU has no NVLink"}, "the GPU has no NVLink", "missing"),
        ({"open": TypeError("set_group_info() has other\n  arguments")}, "has other arguments", "close"),
        ({"map": RuntimeError("no peer access")}, "no peer access", "close"),
        ({"wrong": "yes"}, "sums in symmetric memory are wrong here", "close"),
    ],
)
def test_without_symmetric_memory_all_ranks_use_nccl(
    failing: dict[str, Exception | str], words: str, last: str
) -> None:
    libraries, results = connected([{}, failing, {}])
    for result in results:
        assert isinstance(result, TransportUnavailable), result
        assert words in str(result)
    assert [each.calls[-1] for each in libraries] == [last] * 3


def test_several_hosts_or_many_ranks_use_nccl() -> None:
    _, results = connected([{}, {}], is_one_host=False)
    assert [str(each) for each in results] == ["the group's ranks are on several hosts"] * 2
    libraries, results = connected([{}] * 9)
    assert {str(each) for each in results} == {"the group has 9 ranks, more than 8"}
    assert not any(each.calls for each in libraries)


def gloo_backend(store: Any) -> Any:
    """Return a process group of one rank. Any backend can be in a torch group, so this is gloo's."""
    options = torch.distributed.ProcessGroupGloo._Options()
    options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return torch.distributed.ProcessGroupGloo(PrefixStore("gloo", store), 0, 1, options)


def test_an_open_group_is_registered_by_name() -> None:
    """torch's operations look it up there."""
    c10d = symmetric_memory._c10d()
    store = HashStore()
    library = TorchSymmetricMemory(gloo_backend(store))
    library.open("moeserve/test", PrefixStore("memory", store), 0, 1)
    found = c10d._resolve_process_group("moeserve/test")
    assert (found.group_name, found.rank(), found.size()) == ("moeserve/test", 0, 1)
    library.close("moeserve/test")
    library.close("moeserve/test")
    with pytest.raises(RuntimeError):
        c10d._resolve_process_group("moeserve/test")
    assert not torch.distributed.is_initialized()


def test_a_torch_group_has_a_default_backend() -> None:
    """Without one, barriers and objects would use the CPU, for which a group of GPUs has no backend."""
    store = HashStore()
    group = as_torch_group(PrefixStore("group", store), 0, 1, gloo_backend(store))
    assert group.name() == "gloo"
    group.barrier().wait()
    gathered = [None]
    torch.distributed.all_gather_object(gathered, {"rank": 0}, group)
    assert gathered == [{"rank": 0}]
    assert not torch.distributed.is_initialized()


# ---- the GPU of each rank


def config(**options: Any) -> EngineConfig:
    facts = CheckpointFacts(
        path="somewhere",
        dtype="bfloat16",
        vocab_size=100,
        max_position_embeddings=512,
        tensor_parallel_sizes=(1, 2),
        num_layers=2,
        num_sparse_layers=2,
        num_experts=4,
    )
    return resolve(parse_settings(options), facts, MachineFacts(has_cuda=True, num_cores=8))


def test_each_rank_of_a_host_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray actor sees its own GPU only."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    on_gpus = config(device="cuda", tensor_parallel_size=2, data_parallel_size=2)
    assert [take_device(on_gpus, rank) for rank in range(4)] == [torch.device("cuda", rank) for rank in range(4)]
    assert take_device(config(data_parallel_size=2), 1) == torch.device("cpu")
    assert take_device(on_gpus.changed(parallel={"executor": "ray"}), 3) == torch.device("cuda", 0)
    assert taken == [0, 1, 2, 3, 0]


def test_a_rank_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SettingsError, match=r"needs 2 ranks.* sees 1 on this host; use at most 1"):
        take_device(config(device="cuda", data_parallel_size=2), 1)
