"""Ranks on NUMA nodes: topologies in a folder like that of the kernel, and the calls that bind a thread."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moeserve import numa
from moeserve.numa import MPOL_INTERLEAVE, MPOL_PREFERRED, Node, bind_thread, nodes_of_rank, usable_nodes
from moeserve.worker import rank_process

GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
UNUSABLE = 100_000  # no such core

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="threads are bound on Linux only")


def write_nodes(folder: Path, cores_of_node: dict[int, str]) -> Path:
    """Write what the kernel shows of NUMA nodes."""
    for number, cores in cores_of_node.items():
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cores + "\n")
    (folder / "online").write_text("0\n")
    return folder


def two_ranks(num_threads: int, numa_binding: bool = True) -> Any:
    """Return the part of a config that `take_nodes` reads."""
    values = SimpleNamespace(num_ranks=2, num_threads=num_threads, numa_binding=numa_binding)
    return SimpleNamespace(parallel=values, compute=values)


@needs_linux
def test_nodes_have_the_cores_that_this_process_may_use(tmp_path: Path) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    listed = ",".join(map(str, others))
    folder = write_nodes(
        tmp_path,
        {
            2: f"{UNUSABLE}-{UNUSABLE + 3}",  # of another container
            10: f"{listed},{UNUSABLE}-{UNUSABLE + 1}" if others else str(first),
            0: f"{first},{UNUSABLE + 7}",
            3: "",  # has memory only
        },
    )
    assert usable_nodes(folder) == [Node(0, frozenset({first})), Node(10, frozenset(others or {first}))]
    assert usable_nodes(tmp_path / "missing") == []


def test_ranges_of_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert usable_nodes(write_nodes(tmp_path, {0: "0-2,8-9,63"})) == [Node(0, frozenset({0, 1, 2, 8, 9, 63}))]


@pytest.mark.parametrize(
    ("cores", "num_ranks", "num_threads", "expected"),
    [
        ([8, 8], 2, 8, [[0], [1]]),
        ([8, 8], 4, 4, [[0], [0], [1], [1]]),
        ([8, 8], 3, 4, [[0], [0], [1]]),
        ([8, 8], 3, 5, None),  # two ranks of 5 threads do not fit on a node
        ([8, 2], 2, 5, None),
        ([8, 2], 2, 2, [[0], [1]]),
        ([4] * 8, 2, 16, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([4] * 4, 3, 4, [[0], [1], [2, 3]]),
        ([16], 2, 8, None),
        ([8, 8], 1, 16, None),
        ([], 2, 1, None),
    ],
)
def test_division_of_nodes(
    cores: list[int], num_ranks: int, num_threads: int, expected: list[list[int]] | None
) -> None:
    nodes = [Node(number, frozenset(range(100 * number, 100 * number + count))) for number, count in enumerate(cores)]
    divided = [nodes_of_rank(nodes, rank, num_ranks, num_threads) for rank in range(num_ranks)]
    assert [[node.number for node in each] for each in divided] == (expected or [[]] * num_ranks)


def in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a new thread, which may be bound. Raises its error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except OSError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(results[0], OSError):
        raise results[0]
    return results[0]


def binding() -> tuple[set[int], int, int]:
    """Return the cores, the memory policy and the mask of its nodes, as the kernel has them for this thread."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
    number = GET_MEMPOLICY[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, ctypes.byref(mode), mask, ctypes.c_ulong(1024), None, 0) == 0
    return set(os.sched_getaffinity(0)), mode.value, mask[0]


def real_node() -> Node:
    """Return a node of this machine with one of its cores; skip the test where there is none."""
    nodes = usable_nodes()
    if not nodes or platform.machine() not in numa.SET_MEMPOLICY:
        pytest.skip("this kernel has no NUMA nodes")
    return Node(nodes[0].number, frozenset({max(nodes[0].cores)}))


@needs_linux
def test_a_bound_thread_and_its_children_have_cores_and_memory_of_the_node() -> None:
    node, before = real_node(), in_thread(binding)

    def bind() -> tuple[Any, Any]:
        bind_thread([node])
        return binding(), in_thread(binding)

    own, of_child = in_thread(bind)
    assert own == of_child == (set(node.cores), MPOL_PREFERRED, 1 << node.number)
    assert in_thread(binding) == before  # threads of others are not bound


@needs_linux
def test_pages_of_several_nodes_take_turns() -> None:
    node = real_node()
    found = in_thread(lambda: (bind_thread([node, node]), binding())[1])
    assert found == (set(node.cores), MPOL_INTERLEAVE, 1 << node.number)


@needs_linux
def test_missing_node() -> None:
    with pytest.raises(OSError, match="set_mempolicy"):
        in_thread(lambda: bind_thread([Node(1000, real_node().cores)]))


@needs_linux
def test_ranks_take_their_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank runs on the cores of its node. This machine need not have the second node's memory."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    folder = write_nodes(tmp_path, {real_node().number: str(cores[0]), 1000: str(cores[1])})
    monkeypatch.setattr(rank_process, "usable_nodes", lambda: usable_nodes(folder))

    def cores_of(rank: int, *, numa_binding: bool = True) -> set[int]:
        config = two_ranks(num_threads=1, numa_binding=numa_binding)

        def take() -> set[int]:
            rank_process.take_nodes(config, rank)
            return set(os.sched_getaffinity(0))

        return cast(set[int], in_thread(take))

    assert [cores_of(rank) for rank in range(2)] == [{cores[0]}, {cores[1]}]
    assert cores_of(0, numa_binding=False) == set(cores)


@needs_linux
def test_ranks_that_do_not_fit_on_the_nodes_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    folder = write_nodes(tmp_path, {0: str(cores[0]), 1: str(cores[1])})
    monkeypatch.setattr(rank_process, "usable_nodes", lambda: usable_nodes(folder))
    for rank in range(2):
        rank_process.take_nodes(two_ranks(num_threads=2), rank)
    assert [record.message for record in caplog.records] == [
        "2 ranks with num_threads=2 do not fit on NUMA nodes of 1, 1 cores, so they are not bound to nodes; "
        "lower num_threads, or set numa_binding=False"
    ]
    assert os.sched_getaffinity(0) == set(cores)
