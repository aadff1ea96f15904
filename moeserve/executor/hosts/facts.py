"""Facts about a host, and the check that it can serve together with the first host."""

from __future__ import annotations

import platform
import socket

from moeserve.executor.hosts.connection import HostFacts
from moeserve.executor.kernels import own_kernels
from moeserve.machine import installed_version, usable_cores

PACKAGES = ("moeserve", "torch")  # whose versions must be the same on all hosts


def own_facts() -> HostFacts:
    """Return the facts about this host."""
    return HostFacts(
        hostname=socket.gethostname(),
        cores=usable_cores(),
        kernels=own_kernels(),
        versions={"Python": platform.python_version()} | {name: installed_version(name) for name in PACKAGES},
    )


def why_different(theirs: HostFacts, own: HostFacts) -> str:
    """Return why ranks on two hosts cannot form one engine; "" if they can."""
    return "; ".join(
        f"{theirs.hostname} has {name} {theirs.versions.get(name) or '(missing)'}, but {own.hostname} has {version}"
        for name, version in own.versions.items()
        if theirs.versions.get(name) != version
    )
