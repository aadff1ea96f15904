"""Chooses ports for programs that cannot choose one themselves."""

from __future__ import annotations

import os
import socket
from pathlib import Path

LOWEST = 20_000  # below are the ports of Ray's workers
RANGE_OF_SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a free port of 127.0.0.1 that the system gives to no connection and to no other program.

    Ports that the system chooses are in a range of their own, and processes of tests begin at different ports.
    """
    highest = int(RANGE_OF_SYSTEM.read_text().split()[0]) if RANGE_OF_SYSTEM.exists() else 32_768
    num_ports = highest - LOWEST
    for number in range(num_ports):
        port = LOWEST + (os.getpid() * 101 + number) % num_ports
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise OSError("no port is free")
