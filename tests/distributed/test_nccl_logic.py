"""Collectives as ranks with a GPU do them, over gloo in NCCL's place and on the CPU, against numpy."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from joining import join
from ranks import Place, Ranks
from test_group import RAGGED, SHAPES, check, strided, sum_in_rank_order, values
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from moeserve.distributed import connect as connect_module
from moeserve.distributed import gloo, nccl, symmetric_memory
from moeserve.distributed.groups import Groups
from moeserve.distributed.nccl import NcclTransport
from moeserve.distributed.transport import HostDeviceTransport, Transport, TransportError
from moeserve.errors import DistributedError

DTYPES = ("float32", "bfloat16", "int64")


class InNcclsPlace:
    """gloo's process group, with what NCCL's has besides."""

    def __init__(self, gloo_group: ProcessGroupGloo) -> None:
        self.gloo_group = gloo_group
        self.num_aborted = 0
        self.error = "SUCCESS"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gloo_group, name)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> Any:
        """gloo's own takes no ragged ones."""
        received, sent = torch.cat(outputs), torch.cat(inputs)
        sizes = [len(output) for output in outputs], [len(each) for each in inputs]
        work = self.gloo_group.alltoall_base(received, sent, *sizes, options)

        class Copying:
            def wait(self) -> None:
                work.wait()
                for output, part in zip(outputs, received.split(sizes[0]), strict=True):
                    output.copy_(part)

        return Copying()

    def get_error(self) -> Any:
        return type("ErrorType", (), {"name": self.error})

    def abort(self) -> None:
        self.num_aborted += 1


def process_group(place: Place, timeout_s: float = 20.0) -> InNcclsPlace:
    store = PrefixStore("nccl", TCPStore(place.store_host, place.store_port, is_master=False))
    return InNcclsPlace(
        gloo.make_process_group(store, place.rank, place.num_ranks, address="127.0.0.1", timeout_s=timeout_s)
    )


def check_sum(got: Tensor, inputs: list[Tensor], expected: Tensor, *, is_exact: bool) -> None:
    """The same bytes, or as close as the order of adding and its rounding let them be."""
    if is_exact or not expected.dtype.is_floating_point:
        check(got, expected)
        return
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.is_contiguous()
    magnitude = sum(each.double().abs() for each in inputs)
    epsilon = torch.finfo(expected.dtype).eps
    assert bool(((got.double() - expected.double()).abs() <= 4 * epsilon * magnitude).all())


# ---- what runs on the ranks


def gather_rows(place: Place, dtype: str) -> None:
    transport = NcclTransport(process_group(place), 20.0)
    pending = []
    for case, sizes in enumerate(RAGGED):
        sizes = sizes[: place.num_ranks]
        for shape in SHAPES:
            parts = [values(100 * case + rank, size, *shape, dtype=dtype) for rank, size in enumerate(sizes)]
            pending.append((transport.begin_all_gather(strided(parts[place.rank]), sizes), torch.cat(parts)))
    for (gathered, wait), expected in pending:
        wait()
        check(gathered, expected)


def exchange_rows(place: Place, dtype: str) -> None:
    transport = NcclTransport(process_group(place), 20.0)
    tables = [
        [[i + j for j in range(4)] for i in range(4)],
        [[0, 2, 0, 1], [3, 0, 0, 0], [0, 0, 0, 0], [5, 1, 0, 2]],  # rank 2 sends nothing and gets nothing
        [[0] * 4 for _ in range(4)],
    ]
    n = place.num_ranks
    pending = []
    for case, table in enumerate(tables):
        for shape in SHAPES:
            sent = [values(100 * case + i, sum(table[i][:n]), *shape, dtype=dtype) for i in range(n)]
            expected = torch.cat([torch.split(sent[i], table[i][:n])[place.rank] for i in range(n)])
            receive_sizes = [table[i][place.rank] for i in range(n)]
            arriving = transport.begin_all_to_all(strided(sent[place.rank]), table[place.rank][:n], receive_sizes)
            pending.append((arriving, expected))
    for (received, wait), expected in pending:
        wait()
        check(received, expected)


def reduce_rows(place: Place, dtype: str) -> None:
    transport = NcclTransport(process_group(place), 20.0)
    for case, sizes in enumerate(RAGGED):
        sizes = sizes[: place.num_ranks]
        own = slice(sum(sizes[: place.rank]), sum(sizes[: place.rank + 1]))
        is_exact = len(set(sizes)) > 1
        for shape in SHAPES:
            inputs = [values(100 * case + rank, sum(sizes), *shape, dtype=dtype) for rank in range(place.num_ranks)]
            got = transport.reduce_scatter(strided(inputs[place.rank]), sizes)
            check_sum(got, [each[own] for each in inputs], sum_in_rank_order(inputs)[own], is_exact=is_exact)


def reduce_everything(place: Place, dtype: str) -> list[list[int]]:
    """The bytes of the sums, too."""
    transport = NcclTransport(process_group(place), 20.0)
    sums = []
    for case, shape in enumerate([(), (0,), (1,), (7, 3), (257, 129), (300_003,)]):
        inputs = [values(100 * case + rank, *shape, dtype=dtype) for rank in range(place.num_ranks)]
        given = strided(inputs[place.rank])
        got = transport.all_reduce(given)
        check_sum(got, inputs, sum_in_rank_order(inputs), is_exact=False)
        check(given.contiguous(), inputs[place.rank])
        sums.append(got.flatten()[:50].view(torch.uint8).tolist() if got.dim() else [])
    return sums


def try_out(place: Place, wrong: bool) -> str:
    through = process_group(place)
    if wrong:
        through.allreduce = lambda tensors, options: None
    transport = NcclTransport(through, 20.0)
    assert transport.seconds_waited() == []
    assert transport.supports_cuda_graphs
    assert not transport.supports_cpu_graphs
    try:
        transport.check(torch.device("cpu"))
    except TransportError as error:
        return str(error)
    return ""


kept: list[InNcclsPlace] = []  # connected after a function has returned


def be_late(place: Place) -> str:
    """What a rank says of one that never joins."""
    kept.append(process_group(place, timeout_s=1.0))
    if place.rank:
        return ""
    transport = NcclTransport(kept[-1], 1.0)
    try:
        transport.all_reduce(torch.ones(3))
    except TransportError as error:
        return str(error)
    return "all came"


class Carried(HostDeviceTransport):
    """Integers stay on the host; what else there is, goes as if it were on a GPU."""

    def _transport_of(self, x: Tensor) -> Transport:
        if x.dtype in (torch.int64, torch.uint8):
            return self._host
        assert self._device is not None
        return self._device


made: list[InNcclsPlace] = []


def joined(place: Place, tp: int) -> Groups:
    """With a stand-in of a GPU: everything but NCCL and the device is real."""
    made.clear()

    def instead(store: Any, rank_in_group: int, num_ranks: int, **where: Any) -> InNcclsPlace:
        assert where["device"] == torch.device("meta")
        address, timeout_s = where["address"], where["timeout_s"]
        found = gloo.make_process_group(store, rank_in_group, num_ranks, address=address, timeout_s=timeout_s)
        made.append(InNcclsPlace(found))
        return made[-1]

    on_cpu, real = NcclTransport.check, nccl.make_process_group
    nccl.make_process_group = instead  # type: ignore[assignment]
    nccl.NcclTransport.check = lambda self, device: on_cpu(self, torch.device("cpu"))  # type: ignore[method-assign]
    connect_module.HostDeviceTransport = Carried  # type: ignore[misc]
    try:
        return join(place, tp, device=torch.device("meta"))
    finally:
        nccl.NcclTransport.check, nccl.make_process_group = on_cpu, real  # type: ignore[method-assign]
        connect_module.HostDeviceTransport = HostDeviceTransport  # type: ignore[misc]


def carry_both(place: Place, tp: int) -> list[Any]:
    """Figures of the host and rows of the GPU through the same groups."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("moeserve.distributed.connect")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    groups = joined(place, tp)
    logger.removeHandler(handler)
    assert groups.supports_cuda_graphs
    assert not groups.supports_cpu_graphs
    assert groups.world.supports_cuda_graphs == (groups.world.world_size == 1)
    groups.begin_step(3)
    total = groups.tp.all_reduce(torch.full((4,), float(place.rank)))
    assert total.tolist() == [float(sum(groups.tp.ranks))] * 4
    sizes = [rank + 1 for rank in range(place.num_ranks)]
    rows = groups.ep.all_gather(torch.full((place.rank + 1, 2), float(place.rank)), sizes)
    assert rows[:, 0].tolist() == [float(rank) for rank, size in enumerate(sizes) for _ in range(size)]
    assert groups.world.all_reduce_minimum(place.rank + 5) == 5
    groups.raise_failure()
    if groups.dp.world_size > 1:
        counts = groups.dp.all_gather(torch.tensor([[place.rank]]), [1] * groups.dp.world_size)
        assert counts.flatten().tolist() == list(groups.dp.ranks)
    groups.world.barrier()
    groups.leave("the test is over")
    return [len(made), [each.num_aborted for each in made], said]


def fail_on_the_device(place: Place, error: str) -> list[str]:
    """A collective that is given up after it has returned is told of when it is asked for, and at the next step."""
    groups = joined(place, tp=place.num_ranks)
    groups.begin_step(7)
    groups.tp.all_reduce(torch.ones(3))
    for each in made:
        each.error = error
    messages = []
    for ask in (groups.raise_failure, lambda: groups.begin_step(8)):
        try:
            ask()
            messages.append("nothing")
        except DistributedError as failure:
            messages.append(str(failure))
    groups.world.barrier()
    return messages


class AddingLibrary:
    """Symmetric memory in which gloo adds."""

    def __init__(self, through: Any) -> None:
        self.through = through
        self.calls: list[str] = []
        libraries.append(self)

    def missing(self, device: torch.device) -> str:
        return ""

    def open(self, name: str, store: Any, rank: int, num_ranks: int) -> None:
        self.calls.append("open")

    def allocate(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        self.calls.append(f"memory {num_bytes}")
        return torch.empty(num_bytes, dtype=torch.uint8)

    def map(self, name: str, memory: Tensor) -> None:
        self.calls.append("map")

    def all_reduce(self, name: str, memory: Tensor, x: Tensor) -> Tensor:
        self.calls.append(f"sum {tuple(x.shape)}")
        memory.copy_(x)
        self.through.gloo_group.allreduce([memory]).wait()
        return memory.clone()

    def close(self, name: str) -> None:
        self.calls.append("close")


libraries: list[AddingLibrary] = []


def add_at_once(place: Place) -> list[list[str]]:
    libraries.clear()
    torchs = symmetric_memory.TorchSymmetricMemory
    symmetric_memory.TorchSymmetricMemory = AddingLibrary  # type: ignore[assignment, misc]
    trying = symmetric_memory._check
    symmetric_memory._check = lambda *arguments: trying(*arguments[:-1], torch.device("cpu"))
    try:
        groups = joined(place, tp=place.num_ranks)
    finally:
        symmetric_memory._check, symmetric_memory.TorchSymmetricMemory = trying, torchs  # type: ignore[misc]
    calls_before = [len(each.calls) for each in libraries]
    small, large = torch.arange(6.0)[:, None].expand(6, 64), torch.ones(2**16 + 4)
    assert groups.tp.all_reduce(small).tolist() == (small * place.num_ranks).tolist()
    assert groups.tp.all_reduce(large).tolist() == (large * place.num_ranks).tolist()
    sizes = [1, 5] if place.num_ranks == 2 else [1, 0, 5]
    own = groups.tp.reduce_scatter(small, sizes)
    assert own.tolist() == (small.split(sizes)[place.rank] * place.num_ranks).tolist()
    groups.ep.reduce_scatter(small, sizes)  # not through memory that tp may be using
    groups.world.barrier()
    groups.leave("the test is over")
    return [each.calls[count:] for each, count in zip(libraries, calls_before, strict=True)]


# ---- the tests


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("function", ["gather_rows", "exchange_rows"])
def test_rows_arrive_as_they_were(ranks: Ranks, function: str, num_ranks: int, dtype: str) -> None:
    ranks.run(num_ranks, f"test_nccl_logic:{function}", dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rows_are_summed(ranks: Ranks, num_ranks: int, dtype: str) -> None:
    ranks.run(num_ranks, "test_nccl_logic:reduce_rows", dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_ranks_have_the_same_sums(ranks: Ranks, num_ranks: int, dtype: str) -> None:
    sums = ranks.run(num_ranks, "test_nccl_logic:reduce_everything", dtype=dtype)
    assert sums == [sums[0]] * num_ranks


def test_what_does_not_work_is_found_at_once(ranks: Ranks) -> None:
    assert ranks.run(3, "test_nccl_logic:try_out", wrong=False) == [""] * 3
    for message in ranks.run(3, "test_nccl_logic:try_out", wrong=True):
        assert "wrong values here: [4.0, 3.0, 3.0, 3.0, 3.0] instead of [4, 3, 3, 3, 9]" in message


def test_a_rank_that_does_not_come_is_a_timeout(ranks: Ranks) -> None:
    assert ranks.run(2, "test_nccl_logic:be_late")[0] == "not all ranks joined within 1 s"


@pytest.mark.parametrize(("num_ranks", "tp", "num_groups"), [(2, 2, 1), (2, 1, 1), (4, 2, 2)])
def test_groups_carry_tensors_of_both_devices(ranks: Ranks, num_ranks: int, tp: int, num_groups: int) -> None:
    """Groups of the same ranks share a communicator, which is given up once."""
    found = ranks.run(num_ranks, "test_nccl_logic:carry_both", tp=tp)
    assert [each[0] for each in found] == [num_groups] * num_ranks
    assert all(each[1] == [1] * num_groups for each in found)
    said = [[line for line in each[2] if "symmetric memory" in line] for each in found]
    assert [len(lines) for lines in said] == [int(tp > 1), *[0] * (num_ranks - 1)]  # one log line, of rank 0
    if tp > 1:
        assert said[0][0].startswith("all-reduces of small tensors use NCCL, not symmetric memory (")


@pytest.mark.parametrize(
    ("error", "words"), [("TIMEOUT", "not all ranks joined within 20 s"), ("COMM_ERROR", "NCCL lost the connection")]
)
def test_failures_on_the_device_are_told_of(ranks: Ranks, error: str, words: str) -> None:
    for messages in ranks.run(2, "test_nccl_logic:fail_on_the_device", error=error):
        for message in messages:
            assert "a collective of group 'tp' (ranks 0, 1; up to collective 2, step 7) failed: " + words in message


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_small_sums_go_through_symmetric_memory(ranks: Ranks, num_ranks: int) -> None:
    """After the start, nothing but sums: what a graph captures takes no memory and maps none."""
    calls = ranks.run(num_ranks, "test_nccl_logic:add_at_once")
    assert calls == [[["sum (6, 64)", "sum (6, 64)", "close"]]] * num_ranks
