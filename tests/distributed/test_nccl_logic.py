"""The transport of ranks with a GPU, with gloo's process group in place of NCCL's, and tensors on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from collective_checks import check_collectives, check_rounded
from joining import join
from ranks import Place, Ranks
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from moeserve.distributed import gloo, nccl, symmetric_memory
from moeserve.distributed.coordinator import GroupConnection, GroupCoordinator
from moeserve.distributed.groups import Groups
from moeserve.distributed.nccl import NcclTransport
from moeserve.distributed.store import RankStore, connect_store
from moeserve.distributed.transport import Transport, TransportError
from moeserve.errors import DistributedError

CPU = torch.device("cpu")


class NcclStandIn:
    """gloo's process group with the methods that NCCL's has in addition."""

    def __init__(self, gloo_group: ProcessGroupGloo) -> None:
        self.gloo_group = gloo_group
        self.num_aborted = 0
        self.error = "SUCCESS"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gloo_group, name)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> Any:
        """Accept tensors of different sizes, which gloo's alltoall does not."""
        received, sent = torch.cat(outputs), torch.cat(inputs)
        sizes = [len(output) for output in outputs], [len(each) for each in inputs]
        work = self.gloo_group.alltoall_base(received, sent, *sizes, options)

        class CopyWhenDone:
            def wait(self) -> None:
                work.wait()
                for output, part in zip(outputs, received.split(sizes[0]), strict=True):
                    output.copy_(part)

        return CopyWhenDone()

    def get_error(self) -> Any:
        return type("ErrorType", (), {"name": self.error})

    def abort(self) -> None:
        self.num_aborted += 1


def stand_in(place: Place, timeout_s: float = 20.0) -> NcclStandIn:
    store = connect_store(place.rank, place.store, 20.0, "nccl")
    return NcclStandIn(
        gloo.make_process_group(store, place.rank, place.num_ranks, address="127.0.0.1", timeout_s=timeout_s)
    )


# ---- one transport


def test_collectives(ranks: Ranks) -> None:
    ranks.run(4, "test_nccl_logic:run_collectives")


def run_collectives(place: Place) -> None:
    everyone = tuple(range(place.num_ranks))
    store = RankStore(place.rank, connect_store(place.rank, place.store, 20.0), 20.0)
    connection = GroupConnection(NcclTransport(stand_in(place), 20.0), store, None)
    group = GroupCoordinator(
        name="tp", rank=place.rank, ranks=everyone, node_of_rank=(0,) * place.num_ranks, connection=connection
    )
    check_collectives(group, check_rounded)


def test_streams_of_sums(ranks: Ranks) -> None:
    """A sum needs no stream of its own, unless another collective of the communicator is under way in that one."""
    assert ranks.run(2, "test_nccl_logic:streams_of_sums") == [[False, True, True, False]] * 2


def streams_of_sums(place: Place) -> list[bool]:
    process_group = stand_in(place)
    in_own_stream: list[bool] = []

    def note_and_keep_own_share(out: Tensor, x: Tensor, options: Any) -> None:
        in_own_stream.append(options.asyncOp)
        keep_own_share(out, x, options)

    process_group._reduce_scatter_base = note_and_keep_own_share
    transport = NcclTransport(process_group, 20.0)
    ones = torch.ones(2)
    transport.reduce_scatter(ones, [1, 1])
    waits = [transport.begin_all_gather(ones, [2, 2])[1], transport.begin_all_to_all(ones, [1, 1], [1, 1])[1]]
    for wait in waits:
        transport.reduce_scatter(ones, [1, 1])
        wait()
        wait()
    transport.reduce_scatter(ones, [1, 1])
    return in_own_stream


def test_a_connection_that_carries_wrong_values_is_refused(ranks: Ranks) -> None:
    assert ranks.run(3, "test_nccl_logic:check_connection", adds=True) == [""] * 3
    for message in ranks.run(3, "test_nccl_logic:check_connection", adds=False):
        assert "[4.0, 3.0, 3.0, 1.0] instead of [4, 3, 3, 3]" in message


def keep_own_share(out: Tensor, x: Tensor, options: Any) -> None:
    out.copy_(x[: len(out)])


def check_connection(place: Place, adds: bool) -> str:
    process_group = stand_in(place)
    if not adds:
        process_group._reduce_scatter_base = keep_own_share
    transport = NcclTransport(process_group, 20.0)
    try:
        transport.check(CPU)
    except TransportError as error:
        return str(error)
    return ""


# ---- groups with tensors on the host and on a device


def transport_by_dtype(self: GroupConnection, x: Tensor) -> Transport:
    """Send integers as if they were on the host, and all other tensors as if they were on a GPU."""
    if x.dtype in (torch.int64, torch.uint8):
        return self.transport
    assert self.device_transport is not None
    return self.device_transport


made: list[NcclStandIn] = []


@contextmanager
def gpu_stand_in() -> Iterator[None]:
    """Connect with all but NCCL and the device real."""
    made.clear()
    check = NcclTransport.check

    def make(store: Any, rank: int, num_ranks: int, *, device: Any, address: str, timeout_s: float) -> NcclStandIn:
        assert device == torch.device("meta")
        made.append(NcclStandIn(gloo.make_process_group(store, rank, num_ranks, address=address, timeout_s=timeout_s)))
        return made[-1]

    with (
        mock.patch.object(nccl, "make_process_group", make),
        mock.patch.object(NcclTransport, "check", lambda self, device: check(self, CPU)),
    ):
        yield


def join_with_gpus(place: Place, tp: int) -> Groups:
    with gpu_stand_in():
        return join(place, tp, device=torch.device("meta"))


by_dtype = mock.patch.object(GroupConnection, "transport_of", transport_by_dtype)


@pytest.mark.parametrize(("num_ranks", "tp", "num_process_groups"), [(2, 1, 1), (4, 2, 2)])
def test_groups_carry_tensors_of_both_devices(ranks: Ranks, num_ranks: int, tp: int, num_process_groups: int) -> None:
    """Groups with equal members share a process group, which is aborted once."""
    found = ranks.run(num_ranks, "test_nccl_logic:use_both_devices", tp=tp)
    assert found == [[1] * num_process_groups] * num_ranks


@by_dtype
def use_both_devices(place: Place, tp: int) -> list[int]:
    """Return how often each process group was aborted."""
    groups = join_with_gpus(place, tp)
    assert groups.supports_cuda_graphs
    assert not groups.supports_cpu_graphs
    assert not groups.world.supports_cuda_graphs
    groups.begin_step(3)
    total = groups.tp.reduce_scatter(torch.full((tp,), float(place.rank)), [1] * tp)
    assert total.tolist() == [float(sum(groups.tp.ranks))]
    sizes = [rank + 1 for rank in range(place.num_ranks)]
    rows = groups.ep.all_gather(torch.full((place.rank + 1, 2), float(place.rank)), sizes)
    assert rows[:, 0].tolist() == [float(rank) for rank, size in enumerate(sizes) for _ in range(size)]
    assert groups.world.all_reduce_minimum(place.rank + 5) == 5
    counts = groups.dp.all_gather(torch.tensor([[place.rank]]), [1] * groups.dp.world_size)
    assert counts.flatten().tolist() == list(groups.dp.ranks)
    groups.raise_failure()
    groups.world.barrier()
    groups.leave("the test is over")
    return [each.num_aborted for each in made]


@pytest.mark.parametrize(("error", "words"), [("TIMEOUT", "within 20 s"), ("COMM_ERROR", "NCCL lost the connection")])
def test_a_failure_on_the_device_is_raised_later(ranks: Ranks, error: str, words: str) -> None:
    """A collective that was aborted after it had returned fails when it is checked, and at the next step."""
    for messages in ranks.run(2, "test_nccl_logic:fail_on_the_device", error=error):
        assert len(messages) == 2
        for message in messages:
            assert "group 'tp' (ranks 0, 1; up to collective 2, step 7)" in message
            assert words in message


@by_dtype
def fail_on_the_device(place: Place, error: str) -> list[str]:
    groups = join_with_gpus(place, tp=place.num_ranks)
    groups.begin_step(7)
    groups.tp.reduce_scatter(torch.ones(4), [2, 2])
    for each in made:
        each.error = error
    messages = []
    for check in (groups.raise_failure, lambda: groups.begin_step(8)):
        with pytest.raises(DistributedError) as failure:
            check()
        messages.append(str(failure.value))
    groups.world.barrier()
    return messages


class GlooSymmetricMemory:
    """Symmetric memory in which gloo adds."""

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self.calls: list[str] = []
        symmetric_memories.append(self)

    def missing(self, device: torch.device) -> str:
        return ""

    def open(self, name: str, store: Any, rank: int, num_ranks: int) -> None:
        self.calls.append("open")

    def allocate(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        self.calls.append("allocate")
        return torch.empty(num_bytes, dtype=torch.uint8)

    def map(self, name: str, memory: Tensor) -> None:
        self.calls.append("map")

    def all_reduce(self, name: str, memory: Tensor, x: Tensor) -> Tensor:
        self.calls.append(f"all_reduce {tuple(x.shape)}")
        memory.copy_(x)
        self.process_group.gloo_group.allreduce([memory]).wait()
        return memory.clone()

    def close(self, name: str) -> None:
        self.calls.append("close")


symmetric_memories: list[GlooSymmetricMemory] = []


def test_small_sums_use_symmetric_memory(ranks: Ranks) -> None:
    """After connecting there are only sums: what a graph captures allocates and maps nothing."""
    calls = ranks.run(3, "test_nccl_logic:use_symmetric_memory")
    assert calls == [["all_reduce (6, 64)", "close"]] * 3


@by_dtype
def use_symmetric_memory(place: Place) -> list[str]:
    """Return the calls after connecting."""
    symmetric_memories.clear()
    check = symmetric_memory._check
    with (
        mock.patch.object(symmetric_memory, "TorchSymmetricMemory", GlooSymmetricMemory),
        mock.patch.object(symmetric_memory, "_check", lambda *arguments: check(*arguments[:-1], CPU)),
    ):
        groups = join_with_gpus(place, tp=place.num_ranks)
    (memory,) = symmetric_memories  # of tp, not of ep
    num_calls = len(memory.calls)
    small, large = torch.arange(6.0)[:, None].expand(6, 64), torch.ones(2**16 + 4)
    sizes = [1, 5] if place.num_ranks == 2 else [1, 0, 5]
    of_large = [len(large) - 3, *range(1, place.num_ranks)]
    assert torch.equal(groups.tp.reduce_scatter(large, of_large), large[: of_large[place.rank]] * place.num_ranks)
    expected = small.split(sizes)[place.rank] * place.num_ranks
    assert torch.equal(groups.tp.reduce_scatter(small, sizes), expected)
    assert torch.equal(groups.ep.reduce_scatter(small, sizes), expected)  # not through memory that tp may be using
    groups.world.barrier()
    groups.leave("the test is over")
    return memory.calls[num_calls:]
