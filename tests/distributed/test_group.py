"""Collectives between processes, in shared memory and over gloo, against numpy; and what survivors say of failures."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from joining import join
from ranks import Place, Ranks
from torch import Tensor

from moeserve.distributed.connect import TransportName
from moeserve.distributed.coordinator import GroupCoordinator
from moeserve.distributed.groups import Groups, group_of_one, groups_of_one_rank
from moeserve.distributed.store import start_store
from moeserve.errors import DistributedError

DTYPES = ("float32", "bfloat16", "int64")
TRANSPORTS = ("auto", "gloo")  # the first is shared memory here

# Rows of each rank: even, ragged, ranks without rows, no rows at all. Cut to the number of ranks.
RAGGED = ([3, 3, 3, 3], [2, 0, 5, 1], [0, 4, 0, 0], [0, 0, 0, 0], [1, 700, 3, 2])
SHAPES = ((), (5,), (2, 3))  # of a row


def values(seed: int, *shape: int, dtype: str) -> Tensor:
    """What the rank of this seed brings. All ranks can make it, so each can compute what must come out."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == "int64":
        return torch.randint(-(2**61), 2**61, shape, generator=generator)
    scales = 10.0 ** torch.randint(-3, 4, shape, generator=generator)  # so that the order of adding shows
    return (torch.randn(shape, generator=generator) * scales).to(getattr(torch, dtype))


def strided(x: Tensor) -> Tensor:
    """The same values in memory that has other values between them."""
    wide = torch.full((*x.shape, 2), 77, dtype=x.dtype)
    wide[..., 1] = x
    return wide[..., 1]


def sum_in_rank_order(parts: list[Tensor]) -> Tensor:
    """Added one after the other, in float32 unless they are integers, by numpy."""
    if parts[0].dtype == torch.int64:
        return torch.from_numpy(np.asarray(sum(part.numpy() for part in parts)))
    total = parts[0].float().numpy().copy()
    for part in parts[1:]:
        total = total + part.float().numpy()
    return torch.from_numpy(np.asarray(total)).to(parts[0].dtype)


def check(got: Tensor, expected: Tensor) -> None:
    """The same bytes."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.is_contiguous()
    same_size = {8: torch.int64, 4: torch.int32, 2: torch.int16}[got.element_size()]
    assert torch.equal(got.view(same_size), expected.view(same_size))


# ---- what runs on the ranks


def gather_rows(place: Place, dtype: str, transport: TransportName) -> None:
    group = join(place, transport=transport).ep
    for case, sizes in enumerate(RAGGED):
        sizes = sizes[: place.num_ranks]
        for shape in SHAPES:
            parts = [values(100 * case + rank, size, *shape, dtype=dtype) for rank, size in enumerate(sizes)]
            check(group.all_gather(strided(parts[place.rank]), sizes), torch.cat(parts))


def reduce_rows(place: Place, dtype: str, transport: TransportName) -> None:
    group = join(place, transport=transport).ep
    for case, sizes in enumerate(RAGGED):
        sizes = sizes[: place.num_ranks]
        start = sum(sizes[: place.rank])
        for shape in SHAPES:
            inputs = [values(100 * case + rank, sum(sizes), *shape, dtype=dtype) for rank in range(place.num_ranks)]
            total = sum_in_rank_order(inputs)
            got = group.reduce_scatter(strided(inputs[place.rank]), sizes)
            check(got, total[start : start + sizes[place.rank]])


def reduce_everything(place: Place, dtype: str, transport: TransportName) -> None:
    group = join(place, transport=transport).ep
    # four ranks add the last in shares, which are not even
    for case, shape in enumerate([(), (0,), (1,), (7, 3), (257, 129), (300_003,)]):
        inputs = [values(100 * case + rank, *shape, dtype=dtype) for rank in range(place.num_ranks)]
        given = strided(inputs[place.rank])
        check(group.all_reduce(given), sum_in_rank_order(inputs))
        check(given.contiguous(), inputs[place.rank])


def exchange_rows(place: Place, dtype: str, transport: TransportName) -> None:
    group = join(place, transport=transport).ep
    # how many rows rank i sends to rank j
    tables = [
        [[i + j for j in range(4)] for i in range(4)],
        [[0, 2, 0, 1], [3, 0, 0, 0], [0, 0, 0, 0], [5, 1, 0, 2]],  # rank 2 sends nothing and gets nothing
        [[0] * 4 for _ in range(4)],
        [[0, 0, 0, 900], [0] * 4, [0] * 4, [0] * 4],
    ]
    num_ranks = place.num_ranks
    pending = []
    for case, table in enumerate(tables):
        for shape in SHAPES:
            sent = [values(100 * case + i, sum(table[i][:num_ranks]), *shape, dtype=dtype) for i in range(num_ranks)]
            pieces = [torch.split(sent[i], table[i][:num_ranks])[place.rank] for i in range(num_ranks)]
            receive_sizes = [table[i][place.rank] for i in range(num_ranks)]
            arriving = group.all_to_all(strided(sent[place.rank]), table[place.rank][:num_ranks], receive_sizes)
            pending.append((arriving, torch.cat(pieces)))
    for arriving, expected in reversed(pending):  # several at a time, waited for in another order
        check(arriving.wait(), expected)


def other_collectives(place: Place, transport: TransportName) -> None:
    group = join(place, transport=transport).world
    for source in range(place.num_ranks):
        for dtype in DTYPES:
            for shape in [(), (0, 3), (4, 5)]:
                sent = values(source, *shape, dtype=dtype)
                given = sent if place.rank == source else torch.zeros_like(sent)
                check(group.broadcast(strided(given), source), sent)
    assert group.all_reduce_minimum(5 - place.rank) == 5 - (place.num_ranks - 1)
    assert group.all_reduce_minimum(2**62 + place.rank) == 2**62


def exchange_while_other_is_late(place: Place, transport: TransportName) -> list[float]:
    group = join(place, transport=transport).ep
    group.barrier()
    if place.rank == 1:
        time.sleep(0.4)
    began = time.monotonic()
    arriving = group.all_to_all(torch.ones(2, 3), [1, 1], [1, 1])
    returned = time.monotonic()
    arriving.wait()
    return [returned - began, time.monotonic() - began]


def membership(place: Place) -> list[Any]:
    groups = join(place, tp=2)
    for name in ("world", "tp", "dp", "ep"):
        group = getattr(groups, name)
        assert (group.name, group.rank) == (name, place.rank)
        assert group.ranks[group.rank_in_group] == place.rank
        assert group.world_size == len(group.ranks)
        # every group is connected to the ranks it names
        assert group.all_gather(torch.tensor([place.rank]), [1] * group.world_size).tolist() == list(group.ranks)
    assert not torch.distributed.is_initialized()
    return [groups.tp.ranks, groups.dp.ranks, groups.ep.ranks, groups.world.ranks]


def listening(place: Place, transport: TransportName) -> list[str]:
    """The addresses, in the kernel's hexadecimal form, on which this process listens while it is connected."""
    groups = join(place, transport=transport)
    groups.world.barrier()
    sockets = set()
    for link in Path("/proc/self/fd").iterdir():
        target = os.readlink(link) if link.is_symlink() else ""
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    fields = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    found = [field[1].split(":")[0] for field in fields if field[3] == "0A" and field[9] in sockets]
    groups.world.barrier()
    return found


def outlive(
    place: Place, victim: int, how: str, operation: str, transport: TransportName, timeout_s: float = 10.0
) -> list[Any]:
    """Use the groups until another rank fails: the error, and how long it took."""
    groups = join(place, tp=2, timeout_s=timeout_s, transport=transport)
    groups.begin_step(41)
    groups.set_layer(7)
    groups.world.barrier()
    began = time.monotonic()
    if place.rank == victim:
        if how == "dies":
            os._exit(7)
        if how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "is late":
            time.sleep(0.8 * timeout_s)
        if how == "leaves":
            groups.leave("ValueError: the expert is missing")
            time.sleep(1.0)
            return []
    try:
        perform(groups, operation)
    except DistributedError as error:
        return [time.monotonic() - began, str(error)]
    return [time.monotonic() - began, ""]


def perform(groups: Groups, operation: str) -> None:
    match operation:
        case "all_to_all":
            groups.ep.all_to_all(torch.ones(4, 3), [1] * 4, [1] * 4).wait()
        case "all_reduce":
            groups.ep.all_reduce(torch.ones(100_000))
        case "barrier":
            groups.ep.barrier()


kept: list[Groups] = []  # connected after a function has returned, as they are in a process that goes on


def disagree(place: Place, plan: list[list[list[Any]]], tp: int) -> str:
    """Run this rank's own list of (group, operation, argument): the error."""
    kept.clear()
    groups = join(place, tp, timeout_s=2.0, check_order=True)
    kept.append(groups)
    groups.begin_step(3)
    groups.world.barrier()
    try:
        for name, operation, argument in plan[place.rank]:
            group: GroupCoordinator = getattr(groups, name)
            match operation:
                case "barrier":
                    group.barrier()
                case "minimum":
                    group.all_reduce_minimum(argument)
                case "step":
                    groups.begin_step(argument)
                case "reduce":
                    group.all_reduce(torch.ones(argument))
                case "reduce bfloat16":
                    group.all_reduce(torch.ones(argument, dtype=torch.bfloat16))
                case "gather":
                    group.all_gather(torch.ones(argument[group.rank_in_group], 2), argument)
                case "scatter":
                    group.reduce_scatter(torch.ones(sum(argument), 2), argument)
                case "broadcast":
                    group.broadcast(torch.ones(2), argument)
                case "exchange":
                    group.all_to_all(torch.ones(sum(argument[0]), 2), *argument).wait()
                case _:
                    raise ValueError(operation)
    except DistributedError as error:
        return str(error)
    return ""


def all_collectives_checked(place: Place) -> None:
    """In check mode, with the ranks' groups interleaved."""
    groups = join(place, tp=2, check_order=True)
    for step in range(3):
        groups.begin_step(step)
        groups.tp.all_reduce(torch.ones(3))
        arriving = groups.ep.all_to_all(torch.ones(place.rank * 4, 2), [place.rank] * 4, [0, 1, 2, 3])
        groups.dp.all_gather(torch.ones(groups.dp.rank_in_group, 1), [0, 1])
        assert arriving.wait().shape == (6, 2)
        groups.tp.reduce_scatter(torch.ones(3, 2, 2, dtype=torch.bfloat16), [1, 2])
        groups.ep.broadcast(torch.ones(2, dtype=torch.int64), 3)
        assert groups.world.all_reduce_minimum(place.rank) == 0
        groups.world.barrier()


def come(place: Place, absent: list[int], timeout_s: float) -> str:
    if place.rank in absent:
        return ""
    try:
        join(place, timeout_s=timeout_s)
    except DistributedError as error:
        return str(error)
    return "connected"


def come_twice(place: Place) -> str:
    join(place)
    try:
        join(place)
    except DistributedError as error:
        return str(error)
    return "connected"


# ---- the tests


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("function", ["gather_rows", "reduce_rows", "reduce_everything", "exchange_rows"])
def test_collectives_of_tensors(ranks: Ranks, function: str, num_ranks: int, dtype: str, transport: str) -> None:
    ranks.run(num_ranks, f"test_group:{function}", dtype=dtype, transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_broadcast_and_minimum(ranks: Ranks, num_ranks: int, transport: str) -> None:
    ranks.run(num_ranks, "test_group:other_collectives", transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_to_all_does_not_wait_for_the_others(ranks: Ranks, transport: str) -> None:
    returned, arrived = ranks.run(2, "test_group:exchange_while_other_is_late", transport=transport)[0]
    assert returned < 0.2
    assert arrived > 0.3


def test_groups_of_a_mesh(ranks: Ranks) -> None:
    everyone = [0, 1, 2, 3]
    assert ranks.run(4, "test_group:membership") == [
        [[0, 1], [0, 2], everyone, everyone],
        [[0, 1], [1, 3], everyone, everyone],
        [[2, 3], [0, 2], everyone, everyone],
        [[2, 3], [1, 3], everyone, everyone],
    ]


def test_a_group_of_one_returns_what_it_is_given() -> None:
    group = group_of_one("tp", rank=5)
    assert (group.rank, group.ranks, group.world_size, group.rank_in_group) == (5, (5,), 1, 0)
    x = torch.randn(3, 2)
    assert group.all_reduce(x) is x
    assert group.all_gather(x, [3]) is x
    assert group.reduce_scatter(x, [3]) is x
    assert group.all_to_all(x, [3], [3]).wait() is x
    assert group.broadcast(x, 0) is x
    assert group.all_reduce_minimum(-4) == -4
    group.barrier()
    groups = groups_of_one_rank()
    assert groups.mesh.world_size == 1
    assert [groups.world.name, groups.tp.name, groups.dp.name, groups.ep.name] == ["world", "tp", "dp", "ep"]


def test_one_rank_connects_without_others(ranks: Ranks) -> None:
    assert ranks.run(1, "test_group:come", absent=[], timeout_s=5) == ["connected"]


def test_nothing_listens_beyond_this_host(ranks: Ranks) -> None:
    for addresses in ranks.run(2, "test_group:listening", transport="gloo"):
        assert addresses
        assert set(addresses) == {"0100007F"}
    store = start_store()
    port = f"{store.port:04X}"
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    assert {fields[1] for fields in lines if fields[1].endswith(f":{port}") and fields[3] == "0A"} == {
        f"0100007F:{port}"
    }


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("operation", ["all_to_all", "all_reduce", "barrier"])
def test_a_rank_that_dies_is_named_at_once(ranks: Ranks, operation: str, transport: str) -> None:
    run = ranks.start(4, "test_group:outlive", victim=2, how="dies", operation=operation, transport=transport)
    outcomes = run.outcomes()
    assert outcomes[2].error == "ended with exit status 7"
    for rank in (0, 1, 3):
        assert outcomes[rank].error is None, outcomes[rank].error
        seconds, message = outcomes[rank].value
        assert seconds < 2.5
        assert (
            f"rank {rank}: {operation} of group 'ep' (ranks 0, 1, 2, 3; collective 2, step 41, layer 7) failed"
            in message
        )
        assert "closed its connection" in message
        assert "No failure report from rank 2:" in message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_stuck_is_named_at_the_timeout(ranks: Ranks, transport: str) -> None:
    arguments: dict[str, Any] = dict(operation="all_to_all", timeout_s=1.0, transport=transport)
    run = ranks.start(4, "test_group:outlive", victim=1, how="stops", **arguments)
    others = [run.processes[rank].receive(time.monotonic() + 20) for rank in (0, 2, 3)]
    run.processes[1].close()
    for rank, outcome in zip((0, 2, 3), others, strict=True):
        assert outcome.error is None, outcome.error
        seconds, message = outcome.value
        assert 0.9 < seconds < 3
        assert f"rank {rank}: all_to_all of group 'ep'" in message
        assert "No failure report from rank 1:" in message
    assert any("not all ranks joined within 1 s" in outcome.value[1] for outcome in others)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slow_rank_is_no_failure(ranks: Ranks, transport: str) -> None:
    arguments: dict[str, Any] = dict(operation="all_reduce", timeout_s=2.5, transport=transport)
    values = ranks.run(4, "test_group:outlive", victim=1, how="is late", **arguments)
    assert [message for _, message in values] == [""] * 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_leaves_is_quoted(ranks: Ranks, transport: str) -> None:
    arguments: dict[str, Any] = dict(operation="all_to_all", transport=transport)
    values = ranks.run(4, "test_group:outlive", victim=3, how="leaves", **arguments)
    for rank in (0, 1, 2):
        seconds, message = values[rank]
        assert seconds < 2.5
        assert "Rank 3 reported: ValueError: the expert is missing." in message
        assert "No failure report" not in message


def test_who_does_not_come_is_named(ranks: Ranks) -> None:
    messages = ranks.run(4, "test_group:come", absent=[1, 3], timeout_s=0.5)
    for rank in (0, 2):
        assert f"rank {rank}: ranks 1, 3 did not connect within 0.5 s" in messages[rank]


def test_a_store_that_is_gone_is_named() -> None:
    store = start_store()
    port = store.port
    del store
    with pytest.raises(DistributedError, match=f"rank 0 cannot reach the store at 127.0.0.1:{port}"):
        join(Place(0, 1, "127.0.0.1", port))


def test_a_rank_comes_once_to_a_store(ranks: Ranks) -> None:
    assert "rank 0 registered twice" in ranks.run(1, "test_group:come_twice")[0]


def test_checked_collectives_pass(ranks: Ranks) -> None:
    ranks.run(4, "test_group:all_collectives_checked")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([["tp", "barrier", 0]], [["tp", "minimum", 7]], ["barrier of group 'tp'", "all_reduce_minimum of group 'tp'"]),
        ([["tp", "reduce", [2, 8]]], [["tp", "reduce", [8, 2]]], ["float32 [2, 8]", "float32 [8, 2]"]),
        ([["tp", "reduce", [4]]], [["tp", "reduce bfloat16", [4]]], ["float32 [4]", "bfloat16 [4]"]),
        ([["tp", "gather", [1, 2]]], [["tp", "gather", [1, 3]]], ["sizes [1, 2]", "sizes [1, 3]"]),
        ([["tp", "scatter", [1, 2]]], [["tp", "scatter", [2, 1]]], ["sizes [1, 2]", "sizes [2, 1]"]),
        ([["tp", "broadcast", 0]], [["tp", "broadcast", 1]], ["source 0", "source 1"]),
        (
            [["tp", "exchange", [[1, 2], [1, 1]]]],
            [["tp", "exchange", [[1, 1], [3, 1]]]],
            ["sends 2 rows and expects 1", "sends 1 rows and expects 3"],
        ),
        # the same collectives in another order of groups: two groups of the same ranks
        (
            [["tp", "barrier", 0], ["ep", "barrier", 0]],
            [["ep", "barrier", 0], ["tp", "barrier", 0]],
            ["barrier of group 'tp'", "barrier of group 'ep'"],
        ),
        # one too many on one rank, found at the next that both join
        (
            [["tp", "barrier", 0], ["ep", "reduce", [3]]],
            [["tp", "barrier", 0], ["tp", "barrier", 0], ["ep", "reduce", [3]]],
            ["all_reduce of group 'ep'", "barrier of group 'tp' (step 3, collective 3"],
        ),
        # one rank is a step ahead
        (
            [["tp", "step", 4], ["tp", "barrier", 0]],
            [["tp", "barrier", 0]],
            ["step 4, collective 2", "step 3, collective 2"],
        ),
    ],
)
def test_ranks_that_disagree_are_named_with_what_they_do(
    ranks: Ranks, first: list[Any], second: list[Any], words: list[str]
) -> None:
    messages = ranks.run(2, "test_group:disagree", plan=[first, second], tp=2)
    for rank, message in enumerate(messages):
        assert f"rank {rank} calls" in message
        assert f"but rank {1 - rank} calls " in message
        own, other = (words[rank], words[1 - rank])
        assert message.index(own) < message.index(f"but rank {1 - rank}") < message.rindex(other)


def test_a_disagreement_among_many_names_the_one(ranks: Ranks) -> None:
    reduce, barrier = [["ep", "reduce", [4]]], [["ep", "barrier", 0]]
    messages = ranks.run(4, "test_group:disagree", plan=[reduce, reduce, barrier, reduce], tp=2)
    for rank in (0, 1, 3):
        assert f"rank {rank} calls all_reduce" in messages[rank]
        assert "but rank 2 calls barrier of group 'ep'" in messages[rank]
    assert "rank 2 calls barrier" in messages[2]


def test_one_collective_too_many_at_the_end_is_named_at_the_timeout(ranks: Ranks) -> None:
    messages = ranks.run(2, "test_group:disagree", plan=[[["tp", "barrier", 0]], []], tp=2)
    assert "barrier of group 'tp' (ranks 0, 1; collective 2, step 3) failed: not all ranks joined" in messages[0]
    assert "No failure report from rank 1:" in messages[0]


def wait_in_turn(place: Place, *, transport: TransportName) -> list[float]:
    """Each rank is late for another exchange of a step; twice the same step."""
    groups = join(place, transport=transport)
    ep = groups.ep
    before = ep.seconds_waited()
    for step in range(2):
        groups.begin_step(step)
        for number in range(2 * place.num_ranks):
            if number % place.num_ranks == place.rank:
                time.sleep(0.05)
            ep.all_gather(torch.ones(1), [1] * place.num_ranks)
    after = ep.seconds_waited()
    return [now - then for now, then in zip(after, before + [0.0] * (len(after) - len(before)), strict=True)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_waits_are_told_by_exchange(ranks: Ranks, transport: TransportName) -> None:
    """Over all exchanges together, all ranks wait alike; exchange by exchange, the late one waits least."""
    waited = ranks.run(3, "test_group:wait_in_turn", transport=transport)
    assert len({len(of_rank) for of_rank in waited}) == 1
    for number in range(6):
        of_rank = [seconds[number] for seconds in waited]
        assert of_rank.index(min(of_rank)) == number % 3
        assert all(0.08 < seconds < 0.5 for rank, seconds in enumerate(of_rank) if rank != number % 3)
