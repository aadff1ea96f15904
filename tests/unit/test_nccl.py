"""What ranks on GPUs need and can be tried without one: ways by device, choices, errors, who takes which GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore

from moeserve.config.resolve import CheckpointFacts, MachineFacts, resolve
from moeserve.config.settings import EngineConfig
from moeserve.config.validation import parse_settings
from moeserve.distributed import nccl, symmetric_memory
from moeserve.distributed.groups import groups_of_one_rank, unconnected
from moeserve.distributed.mesh import Mesh
from moeserve.distributed.nccl import NcclTransport
from moeserve.distributed.symmetric_memory import ALIGNMENT, MAX_BYTES, OneShotAllReduce, TorchSymmetricMemory
from moeserve.distributed.transport import HostDeviceTransport, TransportError, TransportUnavailable
from moeserve.errors import SettingsError
from moeserve.worker.process import take_device

# ---- ways by device


class Way:
    """Says what it was asked for."""

    supports_cuda_graphs = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> str:
            self.calls.append(operation)
            return f"{operation} by {self.name}"

        return call


@pytest.mark.parametrize(
    ("operation", "sizes"),
    [("begin_all_gather", [[1]]), ("begin_all_to_all", [[1], [1]]), ("reduce_scatter", [[1]]), ("all_reduce", [])],
)
def test_tensors_go_the_transport_of_their_device(operation: str, sizes: list[list[int]]) -> None:
    cpu, cuda = Way("cpu"), Way("cuda")
    both: Any = HostDeviceTransport(cpu, cuda)  # type: ignore[arg-type]
    assert getattr(both, operation)(torch.ones(1), *sizes) == f"{operation} by cpu"
    assert getattr(both, operation)(torch.ones(1, device="meta"), *sizes) == f"{operation} by cuda"
    of_host: Any = HostDeviceTransport(cpu, None)  # type: ignore[arg-type]
    assert getattr(of_host, operation)(torch.ones(1), *sizes) == f"{operation} by cpu"
    with pytest.raises(AssertionError, match="CPU only, not on meta"):
        getattr(of_host, operation)(torch.ones(1, device="meta"), *sizes)


def test_both_ways_begin_and_end_together() -> None:
    cpu, cuda = Way("cpu"), Way("cuda")
    both = HostDeviceTransport(cpu, cuda)  # type: ignore[arg-type]
    both.begin_step()
    both.close()
    assert (cpu.calls, cuda.calls) == (["begin_step", "close"], ["close"])
    both.raise_failure()
    assert cuda.calls[-1] == "raise_failure"
    assert both.seconds_waited() == "seconds_waited by cpu"
    assert (both.supports_cpu_graphs, both.is_capturing, both.supports_cuda_graphs) == (False, False, True)
    assert not HostDeviceTransport(cpu, None).supports_cuda_graphs  # type: ignore[arg-type]


def test_a_rank_alone_is_captured_and_cannot_fail() -> None:
    groups = groups_of_one_rank()
    assert groups.supports_cuda_graphs
    groups.raise_failure()
    unconnected(Mesh(tp=2, dp=1), 0).raise_failure()


# ---- which of NCCL's collectives


@dataclass
class RecordedGroup:
    """Does nothing, and remembers what was begun on which stream."""

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


class Doubling:
    """A one-shot sum of two ranks that bring the same."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_closed = 0

    def supports(self, x: Tensor) -> bool:
        return x.numel() <= self.most

    def all_reduce(self, x: Tensor) -> Tensor:
        return x * 2

    def close(self) -> None:
        self.num_closed += 1


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
        (lambda t: t.reduce_scatter(ROWS, [3, 1]), ["alltoall_base", "wait"]),
        (lambda t: t.reduce_scatter(ROWS[:0], [0, 0]), []),
        (lambda t: t.all_reduce(ROWS), ["allreduce here"]),
    ],
)
def test_what_is_asked_of_nccl(run: Callable[[NcclTransport], object], calls: list[str]) -> None:
    """Nothing goes through the host: what follows is ordered by streams."""
    through = RecordedGroup()
    run(NcclTransport(through, 5.0))
    assert through.calls == calls


def test_what_a_one_shot_sum_takes_never_meets_nccl() -> None:
    through, one_shot = RecordedGroup(), Doubling(most=12)
    transport = NcclTransport(through, 5.0, small_all_reduce=one_shot)
    assert transport.all_reduce(ROWS).tolist() == (2 * ROWS).tolist()
    assert transport.reduce_scatter(ROWS, [3, 1]).tolist() == (2 * ROWS[:3]).tolist()
    assert transport.reduce_scatter(ROWS, [0, 4]).shape == (0, 3)
    assert not through.calls
    transport.all_reduce(torch.ones(13))
    assert through.calls == ["allreduce here"]
    transport.close()
    transport.close()
    assert (through.calls[1:], one_shot.num_closed) == (["abort"], 1)


def test_a_group_that_is_shared_is_given_up_by_one() -> None:
    through = RecordedGroup()
    NcclTransport(through, 5.0, owns_process_group=False).close()
    assert not through.calls


@pytest.mark.parametrize(
    ("nccls", "ours"),
    [
        (
            "NCCL communicator was aborted on rank 1. Original reason for failure was: [Rank 1] Watchdog caught "
            "collective operation timeout: WorkNCCL(SeqNum=4) ran for 5003 milliseconds before timing out.",
            "not all ranks joined within 5 s",
        ),
        ("[Rank 0] Watchdog caught collective operation timeout", "not all ranks joined within 5 s"),
        ("NCCL communicator was aborted on rank 0.", "NCCL lost the connection with another rank"),
        (
            "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error, NCCL version 2.27.5",
            "NCCL lost the connection with another rank",
        ),
        (
            "NCCL error in: NCCLUtils.cpp:94, invalid usage\n Last error:\nDuplicate GPU detected : rank 1 and rank 0",
            "NCCL error in: NCCLUtils.cpp:94, invalid usage Last error: Duplicate GPU detected : rank 1 and rank 0",
        ),
    ],
)
def test_errors_are_sentences(nccls: str, ours: str) -> None:
    transport = NcclTransport(RecordedGroup(error=nccls), 5.0)
    for begin in (
        lambda: transport.all_reduce(ROWS),
        lambda: transport.reduce_scatter(ROWS, [2, 2]),
        lambda: transport.begin_all_gather(ROWS, [4, 4]),
        lambda: transport.begin_all_gather(ROWS, [4, 1]),
        lambda: transport.begin_all_to_all(ROWS, [4, 0], [0, 0]),
    ):
        with pytest.raises(TransportError) as failure:
            begin()
        assert str(failure.value) == ours


def test_a_wait_that_fails_is_a_sentence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Done) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(Done, "wait", fail)
    _, wait = NcclTransport(RecordedGroup(), 5.0).begin_all_gather(ROWS, [4, 4])
    with pytest.raises(TransportError, match="NCCL lost the connection"):
        wait()


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_without_nccl_a_group_of_gpus_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"was built without NCCL.*install one for CUDA"):
        nccl.make_process_group(HashStore(), 0, 2, device=torch.device("cuda", 0), address="127.0.0.1", timeout_s=1)


def test_nccl_meets_where_the_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
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
        monkeypatch.setenv(name, "")  # so that it is taken back after the test
        monkeypatch.delenv(name)
    nccl.make_process_group(HashStore(), 1, 2, device=device, address="10.0.0.7", timeout_s=7)
    rank, size, options, environment = made[0]
    assert (rank, size, made[1]) == (1, 2, device)
    assert (options.is_high_priority_stream, options._timeout.total_seconds()) == (True, 7)
    assert environment["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    nccl.make_process_group(HashStore(), 1, 2, device=device, address="127.0.0.1", timeout_s=7)
    assert made[2][3]["NCCL_SOCKET_IFNAME"] == "=eth0"  # what somebody has said stays


# ---- sums in symmetric memory


@dataclass
class Meeting:
    """Where the ranks of a test, which are threads, lay down what they add."""

    num_ranks: int
    barrier: threading.Barrier = field(init=False)
    laid_down: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.num_ranks, timeout=10)
        self.laid_down = [torch.empty(0)] * self.num_ranks


@dataclass
class FakeLibrary:
    """Symmetric memory of threads. `fails` is what one call of this rank does."""

    rank: int
    meeting: Meeting
    fails: dict[str, Exception | str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def missing(self, device: torch.device) -> str:
        self._note("missing")
        return str(self.fails.get("missing", ""))

    def open(self, name: str, store: Any, rank: int, num_ranks: int) -> None:
        self._note("open")

    def allocate(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        self._note("memory")
        assert num_bytes == MAX_BYTES
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def map(self, name: str, memory: Tensor) -> None:
        self._note("map")

    def all_reduce(self, name: str, memory: Tensor, x: Tensor) -> Tensor:
        self._note("sum")
        assert (memory.shape, memory.dtype, memory.is_contiguous()) == (x.shape, x.dtype, True)
        assert x.data_ptr() % ALIGNMENT == 0
        memory.copy_(x)
        self.meeting.laid_down[self.rank] = memory
        self.meeting.barrier.wait()
        total = sum(self.meeting.laid_down[1:], self.meeting.laid_down[0].clone())
        self.meeting.barrier.wait()
        return total + 1 if self.fails.get("wrong") else total

    def close(self, name: str) -> None:
        self._note("close")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        error = self.fails.get(call)
        if isinstance(error, Exception):
            raise error


def on_threads(num_ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """What a function returns on each rank, or the error it raises."""
    results: list[Any] = [None] * num_ranks

    def life(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=life, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def connected(
    fails: Sequence[dict[str, Exception | str]], *, is_one_host: bool = True
) -> tuple[list[FakeLibrary], list[Any]]:
    """The libraries, and what connecting gave."""
    num_ranks, store = len(fails), HashStore()
    meeting = Meeting(num_ranks)
    libraries = [FakeLibrary(rank, meeting, of_rank) for rank, of_rank in enumerate(fails)]

    def connect(rank: int) -> OneShotAllReduce:
        return symmetric_memory.connect(
            PrefixStore("test", store),
            rank,
            num_ranks,
            is_one_host=is_one_host,
            device=torch.device("cpu"),
            timeout_s=10,
            library=libraries[rank],
        )

    return libraries, on_threads(num_ranks, connect)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_in_symmetric_memory(num_ranks: int) -> None:
    libraries, one_shots = connected([{}] * num_ranks)
    assert all(isinstance(each, OneShotAllReduce) for each in one_shots), one_shots
    start = ["missing", "open", "memory", "map", "sum", "sum"]
    assert [each.calls for each in libraries] == [start] * num_ranks
    parts = torch.randn(num_ranks, 5, 32, 4)

    def add(rank: int) -> list[Tensor]:
        whole = one_shots[rank].all_reduce(parts[rank])
        of_view = one_shots[rank].all_reduce(parts[rank].flatten()[1:5])  # does not begin where a kernel can read
        of_halves = one_shots[rank].all_reduce(parts[rank].bfloat16())
        one_shots[rank].close()
        one_shots[rank].close()
        return [whole, of_view, of_halves]

    total = sum(parts[1:], parts[0].clone())
    for whole, of_view, of_halves in on_threads(num_ranks, add):
        assert torch.equal(whole, total)
        assert torch.equal(of_view, total.flatten()[1:5])
        assert of_halves.dtype == torch.bfloat16
    # No memory was taken for any of these: a graph may have captured them.
    assert [each.calls for each in libraries] == [[*start, "sum", "sum", "sum", "close"]] * num_ranks


def test_which_tensors_are_summed_at_once() -> None:
    one_shot = OneShotAllReduce(FakeLibrary(0, Meeting(1)), "group", torch.empty(MAX_BYTES, dtype=torch.uint8))
    for dtype, numel, is_taken in [
        (torch.bfloat16, MAX_BYTES // 2, True),  # 32 tokens of 4096
        (torch.bfloat16, MAX_BYTES // 2 + 8, False),
        (torch.float32, MAX_BYTES // 4, True),
        (torch.float32, 4, True),
        (torch.float32, 3, False),
        (torch.bfloat16, 12, False),
        (torch.float32, 0, False),
        (torch.float16, 64, False),
        (torch.int64, 64, False),
    ]:
        assert one_shot.supports(torch.empty(numel, dtype=dtype)) == is_taken, (dtype, numel)


@pytest.mark.parametrize(
    ("failing", "words", "last"),
    [
        ({"missing": "the GPU has no NVLink"}, "the GPU has no NVLink", "missing"),
        ({"missing": AttributeError("no such name")}, "no such name", "missing"),
        ({"open": TypeError("set_group_info() has other\n  arguments")}, "has other arguments", "close"),
        ({"memory": RuntimeError("out of memory")}, "out of memory", "close"),
        ({"map": RuntimeError("no peer access")}, "no peer access", "close"),
        ({"wrong": "yes"}, "sums in symmetric memory are wrong here", "close"),
    ],
)
def test_all_ranks_do_without_where_one_must(failing: dict[str, Exception | str], words: str, last: str) -> None:
    libraries, results = connected([{}, failing, {}])
    for result in results:
        assert isinstance(result, TransportUnavailable), result
        assert words in str(result)
    assert [each.calls[-1] for each in libraries] == [last] * 3


def test_one_host_and_few_ranks_are_needed() -> None:
    _, results = connected([{}, {}], is_one_host=False)
    assert [str(each) for each in results] == ["the group's ranks are on several hosts"] * 2
    libraries, results = connected([{}] * 9)
    assert {str(each) for each in results} == {"the group has 9 ranks, more than 8"}
    assert not any(each.calls for each in libraries)


def test_who_does_not_come_is_a_timeout() -> None:
    store = PrefixStore("test", HashStore())
    with pytest.raises(TransportError, match=r"not all ranks connected within 0\.2 s"):
        symmetric_memory.connect(
            store,
            0,
            2,
            is_one_host=True,
            device=torch.device("cpu"),
            timeout_s=0.2,
            library=FakeLibrary(0, Meeting(2)),
        )


def test_torch_finds_a_group_by_its_name_while_it_is_open() -> None:
    """As torch's operations look it up; with gloo's process group, since the table cares for no kind."""
    c10d = symmetric_memory._c10d()
    options = torch.distributed.ProcessGroupGloo._Options()
    options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    store = HashStore()
    library = TorchSymmetricMemory(torch.distributed.ProcessGroupGloo(PrefixStore("gloo", store), 0, 1, options))
    library.open("moeserve/test", PrefixStore("memory", store), 0, 1)
    found = c10d._resolve_process_group("moeserve/test")
    assert (found.group_name, found.rank(), found.size()) == ("moeserve/test", 0, 1)
    library.close("moeserve/test")
    library.close("moeserve/test")
    with pytest.raises(RuntimeError):
        c10d._resolve_process_group("moeserve/test")
    assert not torch.distributed.is_initialized()


def test_a_group_for_libraries_has_a_default() -> None:
    """Without one, barriers and objects would go by the CPU, where a group of GPUs has no backend."""
    options = torch.distributed.ProcessGroupGloo._Options()
    options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    store = HashStore()
    backend = torch.distributed.ProcessGroupGloo(PrefixStore("gloo", store), 0, 1, options)
    group = nccl.as_torch_group(PrefixStore("group", store), 0, 1, backend)
    assert group.name() == "gloo"
    group.barrier().wait()
    told = [None]
    torch.distributed.all_gather_object(told, {"rank": 0}, group)
    assert told == [{"rank": 0}]
    assert not torch.distributed.is_initialized()


# ---- who takes which GPU


def config(**options: Any) -> EngineConfig:
    facts = CheckpointFacts(
        path="somewhere",
        dtype="bfloat16",
        vocab_size=100,
        max_position_embeddings=512,
        tensor_parallel_sizes=(1, 2),
        num_sparse_layers=2,
        num_experts=4,
    )
    return resolve(parse_settings(options), facts, MachineFacts(has_cuda=True, num_cores=8))


def test_each_rank_of_a_host_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    on_gpus = config(device="cuda", tensor_parallel_size=2, data_parallel_size=2)
    assert [take_device(on_gpus, rank) for rank in range(4)] == [torch.device("cuda", rank) for rank in range(4)]
    assert taken == [0, 1, 2, 3]
    assert take_device(config(data_parallel_size=2), 1) == torch.device("cpu")
    assert len(taken) == 4


def test_an_actor_of_ray_sees_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    on_ray = replace(config(device="cuda", data_parallel_size=4), executor="ray")
    assert take_device(on_ray, 3) == torch.device("cuda", 0)
    assert taken == [0]


def test_a_rank_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SettingsError, match=r"needs 2 ranks.* sees 1 on this host; use at most 1"):
        take_device(config(device="cuda", data_parallel_size=2), 1)
