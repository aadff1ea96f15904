"""Cores, free memory and package versions of this host, within the limits of this process's container."""

from __future__ import annotations

import importlib.metadata
import os
import socket
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use: its affinity or its container's quota, if smaller."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroup_folders("cpu"):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            num_cores = min(num_cores, max(1, int(quota) // int(period)))
        except (OSError, ValueError):  # no such controller, or the quota is "max"
            continue
    return num_cores


def free_memory() -> int:
    """Return the number of bytes that could be allocated now without swapping."""
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:  # not Linux: assume half of the machine is free
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    available = next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    return min([available, *(left for folder in _cgroup_folders("memory") for left in _memory_left(folder))])


def host_identity() -> str:
    """Return a string that identifies this host: equal in all its processes, and different on every other host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        boot = ""
    return f"{boot} {socket.gethostname()}"


def installed_version(package: str) -> str:
    """Return the version of a Python package; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def shown_bytes(num_bytes: int) -> str:
    """Return an amount of memory as text, such as "832 bytes" or "1.5 GiB"."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    digits = 0 if size >= 100 or unit == "bytes" else 1 if size >= 10 else 2
    return f"{size:.{digits}f} {unit}"


def _memory_left(folder: Path) -> list[int]:
    """Return the bytes left under the limit of one cgroup, if it has one. Cached files count as free."""
    for limit_name, usage_name, cached_name in (
        ("memory.max", "memory.current", "inactive_file"),  # version 2
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
    ):
        try:
            limit, usage = (int((folder / name).read_text()) for name in (limit_name, usage_name))
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return [max(0, limit - usage + int(statistics.get(cached_name, 0)))]
        except (OSError, ValueError):  # no such file, or the limit is "max"
            continue
    return []


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of all its parents, for cgroup versions 2 and 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = CGROUPS
        elif controller in controllers.split(","):
            root = CGROUPS / controller
        else:
            continue
        folder = root / path.lstrip("/")
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(root))
