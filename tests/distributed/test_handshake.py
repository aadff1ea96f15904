"""The handshake of shared memory: ranks use gloo where one cannot be reached; unauthenticated peers get nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from joining import join, store_of
from ranks import Place, Ranks
from torch.distributed import FileStore, HashStore, PrefixStore, Store

from moeserve.distributed import handshake, shared_memory
from moeserve.distributed.transport import TransportUnavailable
from moeserve.processes import local_sockets

# Of Linux' unshare.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWNET = 0x20000, 0x4000000, 0x8000000, 0x40000000


# ---- ranks that cannot share memory. A group supports CPU graphs if it uses shared memory.


def test_a_rank_without_memory_makes_its_groups_use_gloo(ranks: Ranks) -> None:
    used = ranks.run(4, "test_handshake:join_with_a_limit", limited=3)
    assert used == [[False, True], [False, True], [False, False], [False, False]]


def join_with_a_limit(place: Place, limited: int) -> list[bool]:
    """Join with one rank that may not make files longer than a page, which holds for memory as well."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    if place.rank == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, usual[1]))
    try:
        groups = join(place, tp=2)
        assert groups.world.all_reduce_minimum(place.rank) == 0
        assert groups.tp.all_gather(torch.tensor([place.rank]), [1, 1]).tolist() == list(groups.tp.ranks)
        return [groups.world.supports_cpu_graphs, groups.tp.supports_cpu_graphs]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_rank_that_cannot_map_memory_makes_all_use_gloo(ranks: Ranks) -> None:
    assert ranks.run(3, "test_handshake:join_without_addresses", limited=1) == [False] * 3


def join_without_addresses(place: Place, limited: int) -> bool:
    """Join with one rank whose address space has no room for the memory of the others."""
    usual = resource.getrlimit(resource.RLIMIT_AS)
    join(place, scope="before")  # load what is needed before the limit
    if place.rank == limited:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**28, usual[1]))
    try:
        with mock.patch.object(shared_memory, "SLOT_BYTES", 2**28):  # 2 GiB of addresses, most of it never used
            group = join(place, scope="after").world
        assert group.all_reduce_minimum(place.rank) == 0
        return group.supports_cpu_graphs
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)


def test_an_unreachable_rank_makes_all_use_gloo(ranks: Ranks) -> None:
    assert ranks.run(3, "test_handshake:join_from_elsewhere", elsewhere=0) == [False] * 3


def join_from_elsewhere(place: Place, elsewhere: int) -> bool:
    """Join with one rank whose address leads nowhere, as in a container with a network of its own."""
    with contextlib.ExitStack() as patches:
        if place.rank == elsewhere:
            nowhere = f"@moeserve-{secrets.token_hex(16)}"
            patches.enter_context(mock.patch.object(local_sockets, "address_of", return_value=nowhere))
        group = join(place).world
    assert group.all_reduce_minimum(place.rank) == 0
    return group.supports_cpu_graphs


@pytest.mark.parametrize(
    ("flag", "is_shared"), [(CLONE_NEWNET, False), (CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS, True)]
)
def test_containers_of_one_host(tmp_path: Path, flag: int, is_shared: bool) -> None:
    """Containers need to share the network namespace, which has the names of sockets, and nothing else."""
    own = Ranks()  # a rank in another namespace is of no use to later tests
    try:
        run = own.start(2, "test_handshake:connect_from_namespace", folder=str(tmp_path), flag=flag)
        outcomes = run.outcomes(30)
    finally:
        own.close()
    if outcomes[1].value == "not allowed":
        pytest.skip("this process may not make namespaces")
    assert [outcome.value for outcome in outcomes] == [is_shared] * 2, outcomes


def connect_from_namespace(place: Place, folder: str, flag: int) -> bool | str:
    """Move the last rank to a namespace of its own, and connect by a file that both ranks see."""
    if place.rank == place.num_ranks - 1 and ctypes.CDLL(None, use_errno=True).unshare(flag) != 0:
        return "not allowed"
    store = FileStore(str(Path(folder) / "store"), place.num_ranks)
    ranks = range(place.num_ranks)
    try:
        connection = shared_memory.connect(store, ranks, place.rank, world_size=place.num_ranks, timeout_s=5.0)
    except TransportUnavailable:
        return False
    total = shared_memory.SharedMemoryTransport(connection).reduce_scatter(torch.ones(6), [3, 3])
    assert total.tolist() == [place.num_ranks] * 3
    return True


# ---- processes that are no ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_files_reach_all_ranks(num_ranks: int) -> None:
    """Without moeserve's memory: each rank reads what the others wrote into their files."""
    contents = exchange_among_threads(num_ranks)
    assert contents == [[f"rank {rank}".encode() for rank in range(num_ranks)]] * num_ranks


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with the secret of the store. The kernel says which user is at the other end of a socket."""
    other_user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other_user)
    for error in exchange_among_threads(2):
        assert isinstance(error, TransportUnavailable)
        assert "user" in str(error)


def exchange_among_threads(num_ranks: int) -> list[Any]:
    """Return the contents of all files as each rank reads them, or the error of each rank."""
    store = HashStore()

    def exchange(rank: int) -> Any:
        def make_file() -> int:
            with tempfile.TemporaryFile() as file:
                os.write(file.fileno(), f"rank {rank}".encode())
                return os.dup(file.fileno())

        try:
            peers = handshake.exchange_files(PrefixStore("files", store), rank, num_ranks, make_file, 10.0)
        except TransportUnavailable as error:
            return error
        try:
            assert [each is None for each in peers.sockets] == [other == rank for other in range(num_ranks)]
            return [os.pread(fd, 100, 0) for fd in peers.files]
        finally:
            peers.close()

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(exchange, range(num_ranks)))


def test_unauthenticated_peers_get_nothing_and_delay_nobody(ranks: Ranks) -> None:
    assert ranks.run(2, "test_handshake:join_among_unauthenticated_peers") == [True] * 2


def join_among_unauthenticated_peers(place: Place) -> bool:
    """Join while peers are connected to rank 0 that have sent nothing, or something without the secret."""
    store = store_of(place)
    if place.rank == 0:
        store.set("pid", str(os.getpid()))
        return join(place).world.supports_cpu_graphs
    name = name_of_rank_0(store)
    with contextlib.ExitStack() as peers:
        for message in (b"", b"hello", b"0" * 32 + b"1"):
            peer = peers.enter_context(socket.socket(socket.AF_UNIX))
            peer.connect(name)
            with open("/proc/self/status", "rb") as file:
                if message:
                    socket.send_fds(peer, [message], [file.fileno()])
        return join(place).world.supports_cpu_graphs


def test_a_crowd_of_unauthenticated_peers_is_outlived(ranks: Ranks) -> None:
    assert ranks.run(2, "test_handshake:join_behind_a_crowd") == [True] * 2


def join_behind_a_crowd(place: Place) -> bool:
    """Join when the queue of rank 0 is full of unauthenticated peers, and rank 0 accepts nobody for a while."""
    store = store_of(place)
    if place.rank == 0:
        store.set("pid", str(os.getpid()))
        connect_all = handshake._Handshake.connect_all

        def connect_late(self: handshake._Handshake) -> None:
            store.wait(["begin"])
            connect_all(self)

        with mock.patch.object(handshake._Handshake, "connect_all", connect_late):
            return join(place).world.supports_cpu_graphs
    name = name_of_rank_0(store)
    with contextlib.ExitStack() as crowd:
        with contextlib.suppress(BlockingIOError):
            while True:
                peer = crowd.enter_context(socket.socket(socket.AF_UNIX))
                peer.setblocking(False)
                peer.connect(name)
        timer = threading.Timer(0.5, store.set, ("begin", ""))
        timer.start()
        joined = join(place).world.supports_cpu_graphs
        timer.join()
        return joined


def name_of_rank_0(store: Store) -> bytes:
    """Return the name of the socket on which rank 0 of two listens, having registered rank 1 so that it goes on."""
    pid = int(store.get("pid"))
    known = listening_names([pid])
    deadline = time.monotonic() + 200
    store.set("rank/1", "")
    while not (names := listening_names([pid]) - known):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (name,) = names
    return name


def listening_names(pids: Sequence[int] | None = None) -> set[bytes]:
    """Return the names of moeserve's sockets in the abstract namespace; with pids, of these processes only."""
    inodes = None if pids is None else {inode for pid in pids for inode in sockets_of(pid)}
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines():
        fields = line.split()
        if fields[-1].startswith("@moeserve-") and (inodes is None or fields[6] in inodes):
            found.add(b"\0" + fields[-1][1:].encode())
    return found


def sockets_of(pid: int) -> set[str]:
    """Return the inodes of a process' sockets."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(link))
    return {link[8:-1] for link in links if link.startswith("socket:[")}
