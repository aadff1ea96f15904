"""Groups of ranks in processes: collectives over each transport, shared connections, and errors that name ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from collective_checks import check_collectives
from joining import join, patient_reports, store_of
from ranks import Place, Ranks

from moeserve.distributed.connect import TransportName
from moeserve.distributed.groups import Groups, groups_of_one_rank
from moeserve.distributed.store_server import start_store
from moeserve.errors import DistributedError

TRANSPORTS = ("auto", "gloo")  # the first is shared memory here

# ---- collectives


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collectives(ranks: Ranks, transport: str) -> None:
    ranks.run(4, "test_group:run_collectives", transport=transport)


def run_collectives(place: Place, transport: TransportName) -> None:
    check_collectives(join(place, transport=transport).ep)


def test_a_group_of_one_returns_its_input() -> None:
    group = groups_of_one_rank().tp
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    assert group.all_gather(x, [3]) is x
    assert group.reduce_scatter(x, [3]) is x
    assert group.all_to_all(x, [3], [3]).wait() is x
    assert group.broadcast(x, 0) is x
    assert group.all_reduce_minimum(-4) == -4
    group.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_to_all_returns_before_others_join(ranks: Ranks, transport: str) -> None:
    assert ranks.run(2, "test_group:exchange_with_a_late_rank", transport=transport) == [[0.0, 1.0]] * 2


def exchange_with_a_late_rank(place: Place, transport: TransportName) -> list[float]:
    """Exchange rank numbers. Rank 1 joins once the call of rank 0 has returned."""
    group, store = join(place, transport=transport).ep, store_of(place)
    if place.rank == 1:
        store.wait(["returned"])
    arriving = group.all_to_all(torch.full((2,), float(place.rank)), [1, 1], [1, 1])
    store.set("returned", "")
    return arriving.wait().tolist()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_waits_are_measured_by_operation(ranks: Ranks, transport: TransportName, tmp_path: Path) -> None:
    """The wait of an operation is at most the time of its call, and at least the time that its late rank sees it sleep.

    The waits of other groups do not count, though all use the same connection.
    """
    of_ranks = ranks.run(3, "test_group:wait_in_turn", transport=transport, folder=str(tmp_path))
    by_operation = [waited for waited in zip(*(waited for waited, _, _ in of_ranks), strict=True) if max(waited) > 0]
    assert len(by_operation) == 6
    for number, waited in enumerate(by_operation):
        late = number % 3
        slept = of_ranks[late][2][number]
        assert all(waited[rank] >= slept > 0 for rank in range(3) if rank != late), (number, waited, slept)
        assert all(waited[rank] <= called[number] for rank, (_, called, _) in enumerate(of_ranks)), (number, waited)


def wait_in_turn(place: Place, transport: TransportName, folder: str) -> list[list[float]]:
    """Run two equal steps, in which each rank in turn joins an operation once the others sleep in it.

    Return sums over the steps: the waits of the ep group by index, the time of each call, and the time for which this
    rank, where it is late, sees the others sleep.
    """
    groups, store, num_calls = join(place, transport=transport), store_of(place), 2 * place.num_ranks
    store.set(f"process {place.rank}", str(os.getpid()))
    processes = [psutil.Process(int(store.get(f"process {rank}"))) for rank in range(place.num_ranks)]
    called, slept = [0.0] * num_calls, [0.0] * num_calls
    before = groups.ep.seconds_waited()
    for step in range(2):
        groups.begin_step(step)
        for number in range(num_calls):
            begun = [Path(folder, f"{step} {number} {rank}") for rank in range(place.num_ranks)]
            if place.rank == number % place.num_ranks:
                for rank in range(place.num_ranks):
                    while rank != place.rank and not (begun[rank].exists() and is_asleep(processes[rank])):
                        time.sleep(0.001)
                since = time.monotonic()
                time.sleep(0.01)
                slept[number] += time.monotonic() - since
            begun[place.rank].touch()
            since = time.monotonic()
            groups.ep.all_gather(torch.ones(1), [1] * place.num_ranks)
            called[number] += time.monotonic() - since
            if place.rank == 0:
                time.sleep(0.01)
            (groups.world if number % 2 else groups.dp).barrier()
    after = groups.ep.seconds_waited()
    waited = [now - then for now, then in zip(after, before + [0.0] * (len(after) - len(before)), strict=True)]
    return [waited, called, slept]


def is_asleep(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_SLEEPING)


# ---- connections


def test_members_of_the_groups_of_a_mesh(ranks: Ranks) -> None:
    everyone = [0, 1, 2, 3]
    assert ranks.run(4, "test_group:members") == [
        [everyone, [0, 1], [0, 2], everyone, [0], everyone],
        [everyone, [0, 1], [1, 3], everyone, [1], everyone],
        [everyone, [2, 3], [0, 2], everyone, [2], everyone],
        [everyone, [2, 3], [1, 3], everyone, [3], everyone],
    ]


def members(place: Place) -> list[list[int]]:
    """Return the members of each group, by asking them."""
    groups = join(place, tp=2)
    assert not torch.distributed.is_initialized()
    found = []
    for group in groups.all:
        found.append(group.all_gather(torch.tensor([place.rank]), [1] * group.world_size).tolist())
        assert group.ranks == tuple(found[-1])
        assert group.ranks[group.rank_in_group] == group.rank == place.rank
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("num_ranks", "tp", "num_member_sets"),
    [(3, 1, 1), (3, 3, 1), (4, 2, 3)],  # tp=1: world, dp and ep have the same members; tp=3: world, tp and ep
)
def test_groups_with_equal_members_share_one_connection(
    ranks: Ranks, num_ranks: int, tp: int, num_member_sets: int, transport: str
) -> None:
    """Each connection has one socket to each other rank. The one to the store is of the kind of shared memory's."""
    num_others = num_ranks - 1 if num_member_sets == 1 else 3 + 1 + 1
    for num_sockets in ranks.run(num_ranks, "test_group:count_sockets", tp=tp, transport=transport):
        assert num_sockets == num_others + (transport == "auto")


def count_sockets(place: Place, tp: int, transport: TransportName) -> int:
    """Return the number of sockets of the transport that joining adds to this process."""
    before = connected_sockets(transport)
    groups = join(place, tp, transport=transport)
    groups.world.barrier()
    num_sockets = len(connected_sockets(transport) - before)
    groups.world.barrier()
    groups.leave("the test is over")
    return num_sockets


def connected_sockets(transport: TransportName) -> set[str]:
    """Return the inodes of this process' connected sockets of the kind that the transport uses."""
    own = own_sockets()
    if transport == "auto":
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        return {line[6] for line in lines if line[4] == "0001" and line[5] == "03"} & own  # stream, connected
    return {fields[9] for fields in tcp_sockets() if fields[3] == "01"} & own


def own_sockets() -> set[str]:
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def tcp_sockets() -> list[list[str]]:
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [line.split() for line in lines]


def test_nothing_listens_beyond_this_host(ranks: Ranks) -> None:
    for addresses in ranks.run(2, "test_group:listening_addresses"):
        assert set(addresses) == {"0100007F"}  # 127.0.0.1
    store = start_store("127.0.0.1")
    port = f":{store.address.port:04X}"
    assert [each[1] for each in tcp_sockets() if each[1].endswith(port) and each[3] == "0A"] == [f"0100007F{port}"]


def listening_addresses(place: Place) -> list[str]:
    groups = join(place, transport="gloo")
    groups.world.barrier()
    own = own_sockets()
    found = [each[1].split(":")[0] for each in tcp_sockets() if each[3] == "0A" and each[9] in own]
    groups.world.barrier()
    return found


def test_one_rank_connects_without_others(ranks: Ranks) -> None:
    assert ranks.run(1, "test_group:connect_if_present", absent=[], timeout_s=5) == [""]


def test_absent_ranks_are_named(ranks: Ranks) -> None:
    messages = ranks.run(4, "test_group:connect_if_present", absent=[1, 3], timeout_s=2.0)
    for rank in (0, 2):
        assert "ranks 1, 3 " in messages[rank]
        assert "2 s" in messages[rank]


def connect_if_present(place: Place, absent: list[int], timeout_s: float) -> str:
    if place.rank in absent:
        return ""
    return error_of(lambda: join(place, timeout_s=timeout_s))


def test_a_rank_connects_once_to_a_store(ranks: Ranks) -> None:
    assert "rank 0 registered twice" in ranks.run(1, "test_group:connect_twice")[0]


def connect_twice(place: Place) -> str:
    join(place)
    return error_of(lambda: join(place))


def error_of(call: Any) -> str:
    """Return the message of a DistributedError, or "" without one."""
    try:
        call()
    except DistributedError as error:
        return str(error)
    return ""


# ---- ranks that fail


def outlive(place: Place, victim: int, how: str, operation: str, transport: TransportName, timeout_s: float) -> Any:
    """Use the ep group until another rank fails. Return the seconds it took, and the error."""
    groups, store = join(place, tp=2, timeout_s=timeout_s, transport=transport), store_of(place)
    groups.begin_step(41)
    groups.set_layer(7)
    groups.world.barrier()
    began = time.monotonic()
    if place.rank == victim:
        match how:
            case "dies":
                os._exit(7)
            case "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "is late":
                time.sleep(1.2)  # longer than ranks wait between two checks of their connections
            case "leaves":
                groups.leave("ValueError: the expert is missing")
                store.wait([f"failed/{rank}" for rank in range(place.num_ranks) if rank != victim])
                return []
    with patient_reports():
        error = error_of(lambda: perform(groups, operation))
    store.set(f"failed/{place.rank}", "")
    return [time.monotonic() - began, error]


def perform(groups: Groups, operation: str) -> None:
    match operation:
        case "all_to_all":
            groups.ep.all_to_all(torch.ones(4, 3), [1] * 4, [1] * 4).wait()
        case "reduce_scatter":
            groups.ep.reduce_scatter(torch.ones(100_000), [25_000] * 4)


@pytest.mark.parametrize(("operation", "transport"), [("all_to_all", "auto"), ("reduce_scatter", "gloo")])
def test_a_rank_that_dies_is_named_at_once(ranks: Ranks, operation: str, transport: str) -> None:
    arguments: dict[str, Any] = dict(how="dies", operation=operation, transport=transport, timeout_s=600.0)
    outcomes = ranks.start(4, "test_group:outlive", victim=2, **arguments).outcomes()
    assert outcomes[2].error is not None
    for rank in (0, 1, 3):
        assert outcomes[rank].error is None, outcomes[rank].error
        _, message = outcomes[rank].value
        assert message.startswith(f"rank {rank}: {operation} of group 'ep' (ranks 0, 1, 2, 3; collective 2, step 41,")
        assert "No failure report from rank 2:" in message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stuck_rank_is_named_at_the_timeout(ranks: Ranks, transport: str) -> None:
    arguments: dict[str, Any] = dict(operation="all_to_all", timeout_s=2.0, transport=transport)
    run = ranks.start(4, "test_group:outlive", victim=1, how="stops", **arguments)
    others = [run.processes[rank].receive(time.monotonic() + 200) for rank in (0, 2, 3)]
    run.processes[1].close()
    for rank, outcome in zip((0, 2, 3), others, strict=True):
        assert outcome.error is None, outcome.error
        seconds, message = outcome.value
        assert seconds > 1.9
        assert f"rank {rank}: all_to_all of group 'ep'" in message
        assert "No failure report from rank 1:" in message
    assert any("within 2 s" in outcome.value[1] for outcome in others)


def test_a_slow_rank_is_no_failure(ranks: Ranks) -> None:
    arguments: dict[str, Any] = dict(operation="reduce_scatter", timeout_s=600.0, transport="auto")
    values = ranks.run(4, "test_group:outlive", victim=1, how="is late", **arguments)
    assert [message for _, message in values] == [""] * 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_leaves_is_quoted(ranks: Ranks, transport: str) -> None:
    arguments: dict[str, Any] = dict(operation="all_to_all", transport=transport, timeout_s=600.0)
    values = ranks.run(4, "test_group:outlive", victim=3, how="leaves", **arguments)
    for rank in (0, 1, 2):
        _, message = values[rank]
        assert "Rank 3 reported: ValueError: the expert is missing." in message
        assert "No failure report" not in message


# ---- the check of the order

kept: list[Groups] = []  # stay connected after a function has returned, as in a process that goes on


def call_in_order(place: Place, calls: list[list[list[Any]]], tp: int, timeout_s: float = 20.0) -> str:
    """Make this rank's calls of (group, operation, argument). Return the error."""
    kept.clear()
    groups = join(place, tp, timeout_s=timeout_s, check_order=True)
    kept.append(groups)
    groups.begin_step(3)
    groups.world.barrier()

    def make_calls() -> None:
        for name, operation, argument in calls[place.rank]:
            make_call(groups, name, operation, argument)

    return error_of(make_calls)


def make_call(groups: Groups, name: str, operation: str, argument: Any) -> None:
    group = getattr(groups, name)
    match operation:
        case "barrier":
            group.barrier()
        case "minimum":
            group.all_reduce_minimum(argument)
        case "step":
            groups.begin_step(argument)
        case "reduce":
            group.reduce_scatter(torch.ones(group.world_size, *argument), [1] * group.world_size)
        case "gather":
            group.all_gather(torch.ones(argument[group.rank_in_group], 2), argument)
        case "broadcast":
            group.broadcast(torch.ones(2), argument)
        case "exchange":
            group.all_to_all(torch.ones(sum(argument[0]), 2), *argument).wait()
        case _:
            raise ValueError(operation)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([["tp", "barrier", 0]], [["tp", "minimum", 7]], ["barrier of group 'tp'", "all_reduce_minimum of group 'tp'"]),
        ([["tp", "reduce", [2, 8]]], [["tp", "reduce", [8, 2]]], ["float32 [2, 8]", "float32 [8, 2]"]),
        ([["tp", "gather", [1, 2]]], [["tp", "gather", [1, 3]]], ["sizes [1, 2]", "sizes [1, 3]"]),
        ([["tp", "broadcast", 0]], [["tp", "broadcast", 1]], ["source 0", "source 1"]),
        (
            [["tp", "exchange", [[1, 2], [1, 1]]]],
            [["tp", "exchange", [[1, 1], [3, 1]]]],
            ["sends 2 rows and expects 1", "sends 1 rows and expects 3"],
        ),
        # the same collectives in another order of groups with equal members
        (
            [["tp", "barrier", 0], ["ep", "barrier", 0]],
            [["ep", "barrier", 0], ["tp", "barrier", 0]],
            ["barrier of group 'tp'", "barrier of group 'ep'"],
        ),
        # one collective too many on one rank, found at the next one that both call
        (
            [["tp", "barrier", 0], ["ep", "reduce", [3]]],
            [["tp", "barrier", 0], ["tp", "barrier", 0], ["ep", "reduce", [3]]],
            ["reduce_scatter of group 'ep'", "barrier of group 'tp' (step 3, collective 3"],
        ),
        # one rank is a step ahead
        (
            [["tp", "step", 4], ["tp", "barrier", 0]],
            [["tp", "barrier", 0]],
            ["step 4, collective 2", "step 3, collective 2"],
        ),
    ],
)
def test_ranks_that_disagree_are_named_with_their_calls(
    ranks: Ranks, first: list[Any], second: list[Any], words: list[str]
) -> None:
    messages = ranks.run(2, "test_group:call_in_order", calls=[first, second], tp=2)
    for rank, message in enumerate(messages):
        own, other = message.split(f", but rank {1 - rank} calls ")
        assert f"rank {rank} calls " in own
        assert words[rank] in own
        assert words[1 - rank] in other


def test_a_disagreement_among_many_names_the_one(ranks: Ranks) -> None:
    reduce, barrier = [["ep", "reduce", [4]]], [["ep", "barrier", 0]]
    messages = ranks.run(4, "test_group:call_in_order", calls=[reduce, reduce, barrier, reduce], tp=2)
    for rank in (0, 1, 3):
        assert f"rank {rank} calls reduce_scatter" in messages[rank]
        assert "rank 2 calls barrier of group 'ep'" in messages[rank]
    assert "rank 2 calls barrier" in messages[2]


def test_a_last_collective_too_many_is_named_at_the_timeout(ranks: Ranks) -> None:
    calls: list[list[Any]] = [[["tp", "barrier", 0]], []]
    messages = ranks.run(2, "test_group:call_in_order", calls=calls, tp=2, timeout_s=2.0)
    assert "barrier of group 'tp' (ranks 0, 1; collective 2, step 3)" in messages[0]
    assert "No failure report from rank 1:" in messages[0]


def test_checked_collectives_pass(ranks: Ranks) -> None:
    ranks.run(4, "test_group:run_checked_collectives")


def run_checked_collectives(place: Place) -> None:
    """Interleave the groups of a rank."""
    groups = join(place, tp=2, check_order=True)
    for step in range(3):
        groups.begin_step(step)
        arriving = groups.ep.all_to_all(torch.ones(place.rank * 4, 2), [place.rank] * 4, [0, 1, 2, 3])
        groups.dp.all_gather(torch.ones(groups.dp.rank_in_group, 1), [0, 1])
        assert arriving.wait().shape == (6, 2)
        groups.tp.reduce_scatter(torch.ones(3, 2, 2, dtype=torch.bfloat16), [1, 2])
        groups.ep.broadcast(torch.ones(2, dtype=torch.int64), 3)
        assert groups.world.all_reduce_minimum(place.rank) == 0
        groups.world.barrier()


def test_a_rank_has_one_socket_for_each_other_replica_and_one_for_the_store(ranks: Ranks) -> None:
    """So 320 replicas need 319 and one, beside the one on which gloo listens and the channel of the process."""
    ranks.run(6, "test_group:count_all_sockets")  # gloo's listening socket stays
    for num_ranks in (3, 6):
        assert ranks.run(num_ranks, "test_group:count_all_sockets") == [num_ranks] * num_ranks


def count_all_sockets(place: Place) -> int:
    """Return the number of sockets of this process that joining adds."""
    before = own_sockets()
    groups = join(place, transport="gloo")
    groups.world.barrier()
    num_sockets = len(own_sockets() - before)
    groups.world.barrier()
    groups.leave("the test is over")
    return num_sockets
