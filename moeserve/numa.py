"""The division of a host's NUMA nodes over its ranks, each of which uses cores and memory of its own nodes."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NODES = Path("/sys/devices/system/node")

# Numbers of the system call set_mempolicy, which the C library does not export.
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
MPOL_PREFERRED, MPOL_INTERLEAVE = 1, 3
BITS_OF_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True)
class Node:
    """A NUMA node, and its cores that this process may use."""

    number: int
    cores: frozenset[int]


def usable_nodes(folder: Path = NODES) -> list[Node]:
    """Return the nodes that have cores this process may use, by number. Empty if the system does not list nodes."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    usable = os.sched_getaffinity(0)
    numbers = sorted(int(path.name.removeprefix("node")) for path in folder.glob("node[0-9]*"))
    nodes = (Node(each, _cores(folder / f"node{each}") & usable) for each in numbers)
    return [node for node in nodes if node.cores]


def nodes_of_rank(nodes: Sequence[Node], rank: int, num_ranks: int, num_threads: int) -> list[Node]:
    """Return the nodes of a rank; an empty list if ranks cannot be divided over the nodes.

    With at least as many ranks as nodes, each rank has one node, which neighbouring ranks share. With fewer ranks, a
    rank has several nodes. Ranks are not bound if there is only one rank or one node, or if they have more threads than
    their nodes have cores.

    Args:
        rank: index of the rank on this host.
        num_ranks: number of ranks on this host.
        num_threads: threads of each rank.
    """

    def of_rank(rank: int) -> range:
        first, last = (len(nodes) * each // num_ranks for each in (rank, rank + 1))
        return range(first, max(last, first + 1))

    if len(nodes) < 2 or num_ranks == 1:
        return []
    num_free = [len(node.cores) for node in nodes]
    for each in map(of_rank, range(num_ranks)):
        num_left = num_threads
        for index in each:
            num_taken = min(num_left, num_free[index])
            num_free[index] -= num_taken
            num_left -= num_taken
        if num_left:
            return []
    return [nodes[index] for index in of_rank(rank)]


def bind_thread(nodes: Sequence[Node]) -> None:
    """Bind this thread, and all threads that it starts later, to the cores and the memory of these nodes.

    If a single node is full, memory is allocated on other nodes. Pages are interleaved over several nodes.

    Raises:
        OSError: the system does not permit it.
    """
    if sys.platform == "linux":
        os.sched_setaffinity(0, frozenset[int]().union(*(node.cores for node in nodes)))
        _prefer_memory([node.number for node in nodes])


def _prefer_memory(numbers: Sequence[int]) -> None:
    call = SET_MEMPOLICY.get(platform.machine())
    if call is None:
        return
    num_words = max(numbers) // BITS_OF_WORD + 1
    mask = (ctypes.c_ulong * num_words)()
    for number in numbers:
        mask[number // BITS_OF_WORD] |= 1 << number % BITS_OF_WORD
    mode = MPOL_PREFERRED if len(numbers) == 1 else MPOL_INTERLEAVE
    # The kernel reads one bit less than the given number of bits.
    result = ctypes.CDLL(None, use_errno=True).syscall(call, mode, mask, ctypes.c_ulong(num_words * BITS_OF_WORD + 1))
    if result != 0:
        raise OSError(ctypes.get_errno(), f"set_mempolicy: {os.strerror(ctypes.get_errno())}")


def _cores(folder: Path) -> frozenset[int]:
    """Return the cores that a node's `cpulist` names, such as "0-3,8"; none if it cannot be read."""
    try:
        ranges = (folder / "cpulist").read_text().strip().split(",")
        bounds = [[int(bound) for bound in each.split("-")] for each in ranges if each]
    except (OSError, ValueError):
        return frozenset()
    return frozenset(core for each in bounds for core in range(each[0], each[-1] + 1))
