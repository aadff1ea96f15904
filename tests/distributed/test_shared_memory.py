"""Shared memory between ranks: the bytes of gloo, whatever the sizes, and no trace and no waiting when ranks die."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import secrets
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from joining import join
from ranks import Place, Ranks
from torch import Tensor

from moeserve.distributed import handshake, shared_memory
from moeserve.distributed.coordinator import GroupCoordinator, PendingTensor
from moeserve.distributed.transport import TransportUnavailable, sum_in_order
from moeserve.errors import DistributedError
from moeserve.ops.cpu.native import native_kernels

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int8", "uint8", "bool")
SMALL_SLOTS = dict(NUM_SLOTS=2, SLOT_BYTES=512)  # nearly everything is longer than all of them together
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
# Of Linux' unshare.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWNET = 0x20000, 0x4000000, 0x8000000, 0x40000000
FORMATS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def transport_of(group: GroupCoordinator) -> str:
    return type(group._transport).__name__


@contextlib.contextmanager
def slots(changed: dict[str, int]) -> Iterator[None]:
    """Groups that are connected meanwhile have other memories."""
    usual = {name: getattr(shared_memory, name) for name in changed}
    for name, value in changed.items():
        setattr(shared_memory, name, value)
    try:
        yield
    finally:
        for name, value in usual.items():
            setattr(shared_memory, name, value)


def random_values(shape: list[int], dtype: str, seed: object) -> Tensor:
    """Of any size, with infinities and both zeros; no NaN, which has many bytes."""
    generator = torch.Generator().manual_seed(random.Random(str(seed)).getrandbits(60))
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    kind = getattr(torch, dtype)
    if not kind.is_floating_point:
        limits = torch.iinfo(kind)
        return torch.randint(limits.min // 2, limits.max // 2, shape, generator=generator, dtype=kind)
    scales = 10.0 ** torch.randint(-9, 5, shape, generator=generator)
    values = (torch.randn(shape, generator=generator) * scales).to(kind)
    values[torch.rand(shape, generator=generator) < 0.01] = -0.0
    if random.Random(f"{seed} infinite").random() < 0.1:
        values[torch.rand(shape, generator=generator) < 0.001] = torch.inf
    return values


def same_bytes(a: Tensor, b: Tensor) -> bool:
    bits = FORMATS[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous() and torch.equal(a.view(bits), b.view(bits))


# ---- what runs on the ranks


def compare_with_gloo(place: Place, seed: int, num_calls: int, largest: int, changed: dict[str, int]) -> None:
    """The same random collectives over both, with sums by each instruction set. All ranks throw the same dice."""
    kernels = native_kernels()
    assert kernels is not None
    isas = kernels.usable_isas()
    with slots(changed):
        shared = join(place, key="shared").ep
    gloo = join(place, key="gloo", transport="gloo").ep
    dice = random.Random(seed)
    for call in range(num_calls):
        kernels.set_isa(isas[(call // len(OPERATIONS)) % len(isas)])
        operation = OPERATIONS[call % len(OPERATIONS)]
        dtype = dice.choice(DTYPES)
        row = dice.choice([[], [3], [2, 5], [64], [1]])
        bound = int(largest ** dice.random())
        num_ranks, rank = place.num_ranks, place.rank
        table = [
            [dice.choice([0, 1, bound, dice.randrange(bound + 1)]) for _ in range(num_ranks)] for _ in range(num_ranks)
        ]
        sizes = table[0]
        source = dice.randrange(num_ranks)
        results = []
        for group in (shared, gloo):
            match operation:
                case "all_reduce":
                    results.append(group.all_reduce(random_values([bound, *row], dtype, (seed, call, rank))))
                case "broadcast":
                    results.append(group.broadcast(random_values([bound, *row], dtype, (seed, call, rank)), source))
                case "all_gather":
                    given = random_values([sizes[rank], *row], dtype, (seed, call, rank))
                    results.append(group.all_gather(given, sizes))
                case "reduce_scatter":
                    given = random_values([sum(sizes), *row], dtype, (seed, call, rank))
                    results.append(group.reduce_scatter(given, sizes))
                case _:
                    given = random_values([sum(table[rank]), *row], dtype, (seed, call, rank))
                    to_me = [table[other][rank] for other in range(num_ranks)]
                    results.append(group.all_to_all(given, table[rank], to_me).wait())
        if not same_bytes(*results):
            raise AssertionError(f"call {call}: {operation} of {dtype}, rows {row}, sizes {table}, bound {bound}")
    kernels.set_isa(isas[0])
    assert (transport_of(shared), transport_of(gloo)) == ("SharedMemoryTransport", "GlooTransport")


def many_with_delays(place: Place, seed: int, num_calls: int, changed: dict[str, int], delay_s: float) -> int:
    """Up to four collectives in flight, waited for in any order, by ranks that dawdle; every byte is foretold."""
    with slots(changed):
        group = join(place, key="shared").ep
    dice, own_dice = random.Random(seed), random.Random(f"{seed} {place.rank}")
    num_ranks, rank = place.num_ranks, place.rank
    under_way: list[tuple[int, PendingTensor, Tensor]] = []
    num_checked = 0

    def finish(num_left: int) -> None:
        nonlocal num_checked
        while len(under_way) > num_left:
            number, pending, expected = under_way.pop(dice.randrange(len(under_way)))
            assert same_bytes(pending.wait(), expected), f"call {number} of rank {rank}"
            num_checked += 1

    for call in range(num_calls):
        if own_dice.random() < 0.1:
            time.sleep(own_dice.random() * delay_s)
        bound = int(20000 ** dice.random())
        table = [[dice.choice([0, dice.randrange(bound + 1)]) for _ in range(num_ranks)] for _ in range(num_ranks)]
        given = [random_values([sum(table[other])], "float32", (seed, call, other)) for other in range(num_ranks)]
        kind = dice.randrange(4)
        if kind == 0:
            sizes = [sum(row) for row in table]
            under_way.append((call, group.begin_all_gather(given[rank], sizes), torch.cat(given)))
        elif kind == 1:
            x = [random_values([bound], "bfloat16", (seed, call, other)) for other in range(num_ranks)]
            assert same_bytes(group.all_reduce(x[rank]), sum_in_order(torch.stack(x))), f"sum {call} of rank {rank}"
        else:
            to_me = [table[other][rank] for other in range(num_ranks)]
            parts = [given[other].split(table[other])[rank] for other in range(num_ranks)]
            under_way.append((call, group.all_to_all(given[rank], table[rank], to_me), torch.cat(parts)))
        finish(dice.randrange(5))
    finish(0)
    return num_checked


def exchange_until_it_fails(place: Place, seed: int, folder: str) -> list[Any]:
    """When it failed, how, and what of the memory is left in this process afterwards."""
    groups = join(place, key="shared")
    group = groups.ep
    (Path(folder) / f"{place.rank}").touch()  # it has begun
    own_dice = random.Random(f"{seed} {place.rank}")
    x = torch.ones(4000 * place.num_ranks)
    try:
        while True:
            if own_dice.random() < 0.05:
                time.sleep(0.01 * own_dice.random())
            group.all_reduce(x[:3])
            group.all_to_all(x, [4000] * place.num_ranks, [4000] * place.num_ranks).wait()
            group.all_reduce(x)
    except DistributedError as error:
        failed_at, message = time.time(), str(error)
    before = mapped_memories(os.getpid()), open_memories(os.getpid())
    groups.leave("it is over")
    return [failed_at, message, before, [mapped_memories(os.getpid()), open_memories(os.getpid())]]


def mapped_memories(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:moeserve")


def open_memories(pid: int) -> int:
    """Files of shared memory that a process has open."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(link))
    return sum("memfd:moeserve" in link for link in links)


def join_with_a_limit(place: Place, limited: int) -> list[str]:
    """One rank may not make files longer than a page, which holds for memory as well."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    if place.rank == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, usual[1]))
    try:
        groups = join(place, tp=2)
        used = [transport_of(group) for group in (groups.world, groups.tp)]
        assert groups.world.all_reduce_minimum(place.rank) == 0
        assert groups.tp.all_gather(torch.tensor([place.rank]), [1, 1]).tolist() == list(groups.tp.ranks)
        return used
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def join_unmapped(place: Place, unlucky: int) -> list[Any]:
    """One rank has no room for the others' memories among its addresses."""
    usual = resource.getrlimit(resource.RLIMIT_AS)
    if place.rank == unlucky:
        torch.distributed.TCPStore  # noqa: B018  what has to be loaded is loaded before the limit
        join(place, key="before")
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, usual[1]))
    else:
        join(place, key="before")
    try:
        with slots(dict(SLOT_BYTES=2**28)):  # 2 GiB of addresses, and no memory before it is used
            group = join(place, key="after").world
        return [transport_of(group), group.all_reduce_minimum(place.rank)]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)


def join_from_elsewhere(place: Place, elsewhere: int) -> list[Any]:
    """One rank listens where the others cannot see it, as in a container with a network of its own."""
    usual = handshake._listen

    def listen_unseen(num_ranks: int) -> socket.socket:
        unseen = usual(num_ranks)
        unseen.close()  # it is refused to whoever connects to its name
        return _Named(usual(num_ranks), b"\0moeserve-" + secrets.token_hex(16).encode())  # type: ignore[return-value]

    if place.rank == elsewhere:
        handshake._listen = listen_unseen
    try:
        group = join(place, key="shared").world
    finally:
        handshake._listen = usual
    return [transport_of(group), group.all_reduce_minimum(place.rank)]


def connect_from_namespace(place: Place, folder: str, flag: int) -> str:
    """The last rank has moved to a namespace of its own. They meet in a file, which both see."""
    if place.rank == place.num_ranks - 1:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(flag) != 0:
            return "refused"
    store = torch.distributed.FileStore(str(Path(folder) / "store"), place.num_ranks)
    try:
        made = shared_memory.connect(
            store, range(place.num_ranks), place.rank, world_size=place.num_ranks, timeout_s=5.0
        )
    except TransportUnavailable:
        return "gloo"
    assert shared_memory.SharedMemoryTransport(made).all_reduce(torch.ones(3)).tolist() == [place.num_ranks] * 3
    return "shared memory"


class _Named:
    """A socket under a name that it does not have."""

    def __init__(self, real: socket.socket, name: bytes) -> None:
        self.real, self.name = real, name

    def getsockname(self) -> bytes:
        return self.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def join_among_strangers(place: Place) -> list[Any]:
    """Somebody connects before the ranks do, says what it likes, and stays."""
    if place.rank == 0:
        return [transport_of(join(place, key="shared").world)]
    strangers: list[socket.socket] = []
    name = listening_rank(store_of(place))
    for words in (b"", b"hello", b"0" * 32 + b"1"):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(name)
        with open("/proc/self/status", "rb") as file:
            if words:
                socket.send_fds(stranger, [words], [file.fileno()])
        strangers.append(stranger)
    found = [transport_of(join(place, key="shared").world)]
    for stranger in strangers:
        stranger.close()
    return found


def join_past_a_crowd(place: Place) -> list[Any]:
    """So many have connected that no more fit when the other rank comes, and the first admits nobody for a while."""
    store = store_of(place)
    if place.rank == 0:
        gather = handshake._Handshake.connect_all

        def gather_late(meeting: handshake._Handshake) -> None:
            store.wait(["begin"])
            gather(meeting)

        with mock.patch.object(handshake._Handshake, "connect_all", gather_late):
            return [transport_of(join(place, key="shared").world)]
    name = listening_rank(store)
    crowd: list[socket.socket] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            crowd.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            crowd[-1].setblocking(False)
            crowd[-1].connect(name)
    timer = threading.Timer(0.5, store.set, ("begin", ""))
    timer.start()
    found = [transport_of(join(place, key="shared").world)]
    timer.join()
    for stranger in crowd:
        stranger.close()
    return found


def store_of(place: Place) -> torch.distributed.Store:
    return torch.distributed.PrefixStore(
        "shared", torch.distributed.TCPStore(place.store_host, place.store_port, is_master=False)
    )


def listening_rank(store: torch.distributed.Store) -> bytes:
    """The socket at which rank 0 of two listens; it believes that the other has come."""
    known = own_names()
    deadline = time.monotonic() + 10
    store.set("rank/1", "")
    while not (names := own_names() - known):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (name,) = names
    return name


def own_names(pids: Sequence[int] | None = None) -> set[bytes]:
    """Names of our sockets in the abstract namespace; only those of some processes."""
    found = set()
    inodes = None if pids is None else {inode for pid in pids for inode in sockets_of(pid)}
    for line in Path("/proc/net/unix").read_text().splitlines():
        fields = line.split()
        if fields[-1].startswith("@moeserve-") and (inodes is None or fields[6] in inodes):
            found.add(b"\0" + fields[-1][1:].encode())
    return found


def sockets_of(pid: int) -> set[str]:
    """Inodes."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(link))
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def wait_for_the_late(place: Place, seconds: float) -> list[float]:
    """CPU seconds and seconds that a rank spends waiting for one that comes late."""
    group = join(place, key="shared").world
    group.barrier()
    if place.rank == 0:
        time.sleep(seconds)
        group.barrier()
        return []
    used, began = time.process_time(), time.monotonic()
    group.barrier()
    return [time.process_time() - used, time.monotonic() - began]


def wake_sleepers(place: Place, num_calls: int) -> list[float]:
    """Seconds from the last rank's coming to the end of each collective, as those see it who were asleep by then."""
    group = join(place, key="shared").world
    dice = random.Random(7)
    seconds = []
    for _ in range(num_calls):
        delays = [dice.random() * 0.1 for _ in range(place.num_ranks)]
        group.barrier()
        time.sleep(delays[place.rank])
        came = group.all_gather(torch.tensor([time.time()], dtype=torch.float64), [1] * place.num_ranks)
        if int(came.argmax()) != place.rank:
            seconds.append(time.time() - float(came.max()))
    return seconds


def interrupt_a_wait(place: Place) -> list[float]:
    """Ctrl-C ends the wait, not the collective."""
    group = join(place, key="shared").world
    group.barrier()
    if place.rank == 0:
        time.sleep(1.0)
    pending = group.begin_all_gather(torch.tensor([place.rank]), [1, 1])
    if place.rank == 0:
        return pending.wait().tolist()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    try:
        pending.wait()
        raise AssertionError("it was not interrupted")
    except KeyboardInterrupt:
        seconds = time.monotonic() - began
    finally:
        signal.signal(signal.SIGINT, handler)
    assert pending.wait().tolist() == [0, 1]
    return [seconds]


def differ(place: Place, first: str, second: str) -> str:
    """Ranks that do not do the same, without the check of the order. Who has found out stays for a while."""
    group = join(place, key="shared", timeout_s=2.0).world
    x = torch.ones(8)
    try:
        for operation in (first, second)[place.rank], "sum":
            match operation:
                case "gather 3":
                    group.all_gather(x[:3], [3, 3])
                case "gather 2":
                    group.all_gather(x[:2], [2, 2])
                case "sum":
                    group.all_reduce(x)
                case "scatter":
                    group.reduce_scatter(x, [4, 4])
                case "nothing":
                    group.all_to_all(x[:0], [0, 0], [0, 0]).wait()
    except DistributedError as error:
        time.sleep(2.5)
        return str(error)
    return ""


def fail_and_stay(place: Place) -> list[Any]:
    """Rank 2 comes late. Rank 0 has given up by then, and keeps what it has."""
    group = join(place, key="shared", timeout_s=[2.0, 30.0, 30.0][place.rank]).world
    group.barrier()
    began = time.monotonic()
    if place.rank == 2:
        time.sleep(4.0)
    try:
        for _ in range(2):
            group.all_to_all(torch.ones(2), [1, 1, 0], [[1, 1, 1], [1, 1, 1], [0, 0, 0]][place.rank]).wait()
    except DistributedError as error:
        message, seconds = str(error), time.monotonic() - began
    time.sleep(max(0.0, 10.0 - seconds))
    return [seconds, message]


def send_past_a_sleeper(place: Place, num_bytes: int) -> float:
    """Ranks 0 and 1 exchange more than there is room for, while rank 2 has its little and does something else."""
    group = join(place, key="shared").world
    group.barrier()
    sizes = {0: [0, num_bytes, 1], 1: [num_bytes, 0, 1], 2: [1, 1, 0]}
    began = time.monotonic()
    x = torch.zeros(sum(sizes[place.rank]), dtype=torch.uint8)
    group.all_to_all(x, sizes[place.rank], [sizes[other][place.rank] for other in range(3)]).wait()
    seconds = time.monotonic() - began
    if place.rank == 2:
        time.sleep(2.0)
    group.barrier()
    return seconds


def begin_and_forget(place: Place) -> list[int]:
    """What is under way is not freed with the result that nobody wanted."""
    group = join(place, key="shared").world
    for _ in range(20):
        group.begin_all_gather(torch.full((100_000,), place.rank), [100_000] * place.num_ranks)
        torch.full((200_000,), 7)
    return group.all_gather(torch.tensor([place.rank]), [1] * place.num_ranks).tolist()


# ---- the tests


@pytest.mark.parametrize(
    ("num_ranks", "num_calls", "largest", "changed"),
    [
        (2, 300, 3000, {}),
        (3, 150, 3000, {}),
        (8, 20, 1000, {}),
        (2, 15, 120_000, {}),  # of 64 doubles: longer than all slots
        (3, 8, 60_000, {}),
        (2, 200, 400, SMALL_SLOTS),
        (3, 120, 300, SMALL_SLOTS),
        (8, 15, 100, SMALL_SLOTS),
    ],
)
def test_every_byte_is_that_of_gloo(
    ranks: Ranks, num_ranks: int, num_calls: int, largest: int, changed: dict[str, int]
) -> None:
    arguments: dict[str, Any] = dict(seed=num_ranks, num_calls=num_calls, largest=largest, changed=changed)
    ranks.run(num_ranks, "test_shared_memory:compare_with_gloo", within_s=120, **arguments)


@pytest.mark.parametrize("changed", [{}, SMALL_SLOTS], ids=["slots", "small slots"])
@pytest.mark.parametrize(("num_ranks", "num_calls"), [(2, 400), (3, 300), (8, 60)])
def test_many_collectives_among_ranks_that_dawdle(
    ranks: Ranks, num_ranks: int, num_calls: int, changed: dict[str, int]
) -> None:
    arguments = dict(seed=num_ranks, num_calls=num_calls, changed=changed, delay_s=0.02)
    found = ranks.run(num_ranks, "test_shared_memory:many_with_delays", within_s=120, **arguments)
    assert len(set(found)) == 1
    assert found[0] > num_calls / 2


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_is_killed_is_named_at_once_and_nothing_is_left(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    victim = dice.randrange(4)
    before = set(os.listdir("/dev/shm"))
    own = Ranks()  # without groups of earlier tests
    try:
        run = own.start(4, "test_shared_memory:exchange_until_it_fails", seed=seed, folder=str(tmp_path))
        wait_until(lambda: len(os.listdir(tmp_path)) == 4)
        time.sleep(dice.random() * 0.5)
        killed_at = time.time()
        run.processes[victim].kill()
        outcomes = run.outcomes()
        for rank in {0, 1, 2, 3} - {victim}:
            assert outcomes[rank].error is None, outcomes[rank].error
            failed_at, message, left_before, left = outcomes[rank].value
            assert f"No failure report from rank {victim}:" in message, message
            assert "closed its connection" in message or "closed their connection" in message, message
            assert 0 <= failed_at - killed_at < 2.5
            assert left_before == [4, 0]  # of four ranks, once for all groups: mapped, and no longer open
            assert left == [0, 0]
        assert set(os.listdir("/dev/shm")) <= before
    finally:
        own.close()


def wait_until(is_so: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_ranks_that_are_all_killed_at_any_moment_leave_nothing(tmp_path: Path) -> None:
    """Also while they meet: a round of deaths at several moments after the first has a memory."""
    before = set(os.listdir("/dev/shm"))
    names: set[bytes] = set()
    for moment in (0.0, 0.004, 0.015, 0.05):
        own = Ranks()
        try:
            run = own.start(2, "test_shared_memory:exchange_until_it_fails", seed=0, folder=str(tmp_path))
            pids = [process.pid for process in run.processes]
            wait_until(lambda pids=pids: any(open_memories(pid) + mapped_memories(pid) for pid in pids))  # type: ignore[misc]
            time.sleep(moment)
            names |= own_names(pids)
            for process in run.processes:
                process.kill()
            assert [outcome.error for outcome in run.outcomes()] == ["killed by SIGKILL"] * 2
        finally:
            own.close()
    assert names
    assert not names & own_names()
    assert set(os.listdir("/dev/shm")) <= before


def test_a_rank_that_cannot_make_a_memory_makes_its_groups_use_gloo(ranks: Ranks) -> None:
    used = ranks.run(4, "test_shared_memory:join_with_a_limit", limited=3)
    shared, gloo = "SharedMemoryTransport", "GlooTransport"
    assert used == [[gloo, shared], [gloo, shared], [gloo, gloo], [gloo, gloo]]


def test_a_rank_that_cannot_map_the_others_memory_makes_all_use_gloo(ranks: Ranks) -> None:
    assert ranks.run(3, "test_shared_memory:join_unmapped", unlucky=1) == [["GlooTransport", 0]] * 3


@pytest.mark.parametrize("elsewhere", [0, 1])
def test_a_rank_that_cannot_be_reached_makes_all_use_gloo(ranks: Ranks, elsewhere: int) -> None:
    assert ranks.run(3, "test_shared_memory:join_from_elsewhere", elsewhere=elsewhere) == [["GlooTransport", 0]] * 3


@pytest.mark.parametrize(
    ("flag", "expected"), [(CLONE_NEWNET, "gloo"), (CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS, "shared memory")]
)
def test_containers_of_one_host(tmp_path: Path, flag: int, expected: str) -> None:
    """Not with a network of their own: then they share no names of sockets. All else may be their own."""
    own = Ranks()  # one of which will not be of use to others
    try:
        outcomes = own.start(2, "test_shared_memory:connect_from_namespace", folder=str(tmp_path), flag=flag).outcomes(
            30
        )
    finally:
        own.close()
    if outcomes[1].value == "refused":
        pytest.skip("this process may not make namespaces")
    assert [outcome.value for outcome in outcomes] == [expected] * 2, outcomes


def test_strangers_get_nothing_and_hold_nobody_up(ranks: Ranks) -> None:
    assert ranks.run(2, "test_shared_memory:join_among_strangers") == [["SharedMemoryTransport"]] * 2


def test_a_crowd_of_strangers_is_waited_for(ranks: Ranks) -> None:
    assert ranks.run(2, "test_shared_memory:join_past_a_crowd") == [["SharedMemoryTransport"]] * 2


def test_a_rank_that_waits_sleeps(ranks: Ranks, record_property: Callable[[str, object], None]) -> None:
    _, (used, waited) = ranks.run(2, "test_shared_memory:wait_for_the_late", seconds=3.0)
    record_property("share of a core while waiting", used / waited)
    assert waited > 2.5
    assert used / waited < 0.01


def test_a_rank_that_sleeps_is_woken(ranks: Ranks, record_property: Callable[[str, object], None]) -> None:
    """By what it waits for, not by its next look around."""
    found = ranks.run(3, "test_shared_memory:wake_sleepers", num_calls=40)
    median = statistics.median(seconds for each in found for seconds in each)
    record_property("seconds to wake", median)
    assert median < 0.005


def test_ctrl_c_ends_a_wait(ranks: Ranks) -> None:
    gathered, (seconds,) = ranks.run(2, "test_shared_memory:interrupt_a_wait")
    assert gathered == [0, 1]
    assert seconds < 0.6


@pytest.mark.parametrize(
    ("first", "second"), [("gather 2", "gather 3"), ("sum", "gather 3"), ("sum", "scatter"), ("nothing", "gather 3")]
)
def test_ranks_that_differ_fail_and_say_so(ranks: Ranks, first: str, second: str) -> None:
    messages = ranks.run(2, "test_shared_memory:differ", first=first, second=second)
    assert any("sent data of another collective or of another size" in message for message in messages)
    assert all("failed: rank" in message for message in messages), messages


def test_a_rank_that_gave_up_is_not_waited_for(ranks: Ranks) -> None:
    (_, first), (seconds, second), (_, third) = ranks.run(3, "test_shared_memory:fail_and_stay")
    assert "failed: not all ranks joined within 2 s, no data from rank 2" in first
    assert "collective 4) failed: rank 0 closed its connection" in second
    assert "failed: rank 0 closed its connection" in third
    assert seconds < 8


def test_a_rank_that_has_its_part_holds_nobody_up(ranks: Ranks) -> None:
    seconds = ranks.run(3, "test_shared_memory:send_past_a_sleeper", num_bytes=20 * 2**20)
    assert max(seconds) < 1.5


def test_what_nobody_waits_for_is_not_freed_under_way(ranks: Ranks) -> None:
    assert ranks.run(3, "test_shared_memory:begin_and_forget") == [[0, 1, 2]] * 3
