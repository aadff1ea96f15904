"""Cores, free memory and package versions of this host, within the limits of this process's container."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import socket
from dataclasses import dataclass
from pathlib import Path

from moeserve.cgroups import cpu_quota, memory_left


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use, within its affinity and its container's quota."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return num_cores if quota is None else max(1, min(num_cores, int(quota)))


def free_memory(num_processes: int = 1) -> int:
    """Return the number of bytes that each of `num_processes` processes could allocate now without swapping.

    Args:
        num_processes: processes that share the memory of this host. Each has the resource limits of this one.
    """
    try:
        meminfo = Path("/proc/meminfo").read_text()
        available = next(
            int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:")
        )
    except OSError:  # not Linux: assume half of the machine is free
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    left = memory_left()
    shared = available if left is None else min(available, left)
    return min([shared // num_processes, *(limit.left for limit in resource_limits())])


@dataclass(frozen=True)
class ResourceLimit:
    """A limit on the memory of a single process, as `ulimit` sets it."""

    name: str
    num_bytes: int
    left: int  # bytes that this process may still allocate

    def __str__(self) -> str:
        return f"{self.name} is {shown_bytes(self.num_bytes)}"


def resource_limits() -> list[ResourceLimit]:
    """Return the limits on this process's memory; few systems set any."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux
        return []
    used = {
        name: int(value.split()[0]) * 1024 for name, value in re.findall(r"^(Vm\w+):\s+(.*)$", status, re.MULTILINE)
    }
    found = []
    for name, limit, counted in (
        ("ulimit -v (RLIMIT_AS)", resource.RLIMIT_AS, "VmSize"),
        ("ulimit -d (RLIMIT_DATA)", resource.RLIMIT_DATA, "VmData"),
    ):
        num_bytes, _ = resource.getrlimit(limit)
        if num_bytes != resource.RLIM_INFINITY:
            found.append(ResourceLimit(name, num_bytes, max(0, num_bytes - used.get(counted, 0))))
    return found


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
