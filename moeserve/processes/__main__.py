"""`python -m moeserve.processes`: a process of `local.py`, or a fork server."""

from __future__ import annotations

import socket
import sys

from moeserve.processes import child
from moeserve.processes.streams import open_closed_streams

if sys.platform == "linux":
    from moeserve.processes import fork_server

if __name__ == "__main__":
    open_closed_streams()
    role, fd = sys.argv[1:3]
    if sys.platform == "linux" and role == "fork-server":
        fork_server.main(int(fd))
    connection = socket.socket(fileno=int(fd))
    connection.set_inheritable(False)
    child.run(sys.argv[3], connection)
