"""Limits of this process's control groups (cgroups) of versions 1 and 2, however they are nested and mounted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path("/")
UNLIMITED = 2**60  # bytes; version 1 names a larger number where there is no limit


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return how many cores' worth of CPU time this process may use, perhaps a fraction; None if no cgroup limits it.

    Args:
        root: root of the file system with /proc and the mounted cgroups.
    """
    return min((quota for folder in _folders("cpu", root) for quota in _quotas(folder)), default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Return the bytes that this process may still allocate; None if no cgroup limits memory.

    Cached files count as free, except mapped ones in use, such as libraries.

    Args:
        root: as for `cpu_quota`.
    """
    return min((left for folder in _folders("memory", root) for left in _memory_left(folder)), default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the bytes beyond which the kernel kills processes of a cgroup of this one; None if no cgroup limits it.

    Args:
        root: as for `cpu_quota`.
    """
    folders = _folders("memory", root)
    limits = [int(limit) for folder in folders for limit in _limits(folder, _statistics(folder)) if limit.isdecimal()]
    return min((limit for limit in limits if limit < UNLIMITED), default=None)


def memory_kills(root: Path = ROOT) -> int:
    """Return how many processes of this process's cgroup the kernel has killed for lack of memory, as far as it tells.

    Args:
        root: as for `cpu_quota`.
    """
    return sum(_kills(folder) for folder in _folders("memory", root, with_parents=False))


def _kills(folder: Path) -> int:
    counts = _words(folder / "memory.events") or _words(folder / "memory.oom_control")  # versions 2 and 1
    count = dict(zip(counts[::2], counts[1::2], strict=False)).get("oom_kill", "")
    return int(count) if count.isdecimal() else 0


def _limits(folder: Path, statistics: Mapping[str, str]) -> list[str]:
    """Return the limits of one cgroup in bytes, or words that mean that there is none."""
    return _words(folder / "memory.max") or [  # version 2
        *_words(folder / "memory.limit_in_bytes"),  # version 1
        statistics.get("hierarchical_memory_limit", ""),  # the least limit of all parents, even of invisible ones
    ]


def _statistics(folder: Path) -> dict[str, str]:
    words = _words(folder / "memory.stat")
    return dict(zip(words[::2], words[1::2], strict=False))


def _quotas(folder: Path) -> Iterator[float]:
    """Yield the quota of one cgroup in cores, if it has one."""
    quota_and_period = _words(folder / "cpu.max") or [  # version 2; "max 100000" if there is no limit
        *_words(folder / "cpu.cfs_quota_us"),  # version 1; -1 if there is no limit
        *_words(folder / "cpu.cfs_period_us"),
    ]
    match [int(word) for word in quota_and_period if word.isdecimal()]:
        case [quota, period] if period:
            yield quota / period


def _memory_left(folder: Path) -> Iterator[int]:
    """Yield the bytes that are left under each limit of one cgroup."""
    usage = _words(folder / "memory.current")
    names = ("inactive_file", "active_file", "file_mapped")
    if not usage:  # version 1
        usage = _words(folder / "memory.usage_in_bytes")
        names = ("total_inactive_file", "total_active_file", "total_mapped_file")
    statistics = _statistics(folder)
    inactive, active, mapped = (int(statistics.get(name, 0)) for name in names)
    # A file that was read twice is active, and is as easily dropped from memory as any other. Mapped ones, such as the
    # code of libraries, would soon be read again.
    cached = max(inactive, inactive + active - mapped)
    # Processes that exceed `memory.high`, of version 2, are slowed down until they hardly proceed.
    for limit in _limits(folder, statistics) + _words(folder / "memory.high"):
        if usage and limit.isdecimal():  # not "max"
            yield max(0, int(limit) - int(usage[0]) + cached)


def _folders(controller: str, root: Path, *, with_parents: bool = True) -> Iterator[Path]:
    """Yield the folders of this process's cgroups with a controller, and of all their visible parents."""
    groups = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup")]
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        _, _, _, mounted_group, mount_point = map(_unescaped, mount.split(" ")[:5])
        kind, _, options = file_system.split(" ", 2)
        if kind == "cgroup" and controller in options.split(","):
            of_mount = [group for _, controllers, group in groups if controller in controllers.split(",")]
        elif kind == "cgroup2":
            of_mount = [group for _, controllers, group in groups if controllers == ""]
        else:
            continue
        top = root / mount_point.lstrip("/")
        for group in of_mount:
            # In a container, the mount may show a cgroup that /proc names differently: then only the mount's top folder
            # is known.
            is_below = PurePosixPath(group).is_relative_to(mounted_group)
            folder = top / PurePosixPath(group).relative_to(mounted_group) if is_below else top
            yield folder
            if with_parents:
                yield from (parent for parent in folder.parents if parent.is_relative_to(top))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux, or no such controller
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _unescaped(field: str) -> str:
    """Return a field of mountinfo, in which spaces and backslashes are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
