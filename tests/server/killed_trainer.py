"""A trainer that is killed while it sends weights over TCP: again and again, each time at a later point.

After each time it prints the point, and waits for a line.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from safetensors.torch import load_file

from moeserve.processes.peer_connection import Connection
from moeserve.rl import WeightSender
from moeserve.rl.weight_sender import _Routes


def send(url: str, file: str, point: int | None) -> int:
    """Send a weight update. At the chosen point this process is killed; else return the number of points passed."""
    num_passed = 0

    def dying(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal num_passed
            if num_passed == point:
                os.kill(os.getpid(), signal.SIGKILL)
            num_passed += 1
            return function(*arguments)

        return call

    Connection.send = dying(Connection.send)  # type: ignore[method-assign]
    _Routes._post = dying(_Routes._post)  # type: ignore[method-assign]
    tensors = {name: -0.5 * tensor for name, tensor in load_file(file).items()}
    WeightSender(url, "tcp", api_key="admin", chunk_bytes=20_000).send(tensors, "new")
    return num_passed


def in_child(url: str, file: str, point: int | None) -> int:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, str(send(url, file, point)).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as file_of_child:
        return int(file_of_child.read() or "0")


def main() -> None:
    url, file, num_points = sys.argv[1], sys.argv[2], int(sys.argv[3])
    num_all = in_child(url, file, None)
    print("whole", flush=True)
    sys.stdin.readline()
    for index in range(num_points):
        in_child(url, file, num_all * index // (num_points - 1) - (index == num_points - 1))
        print("killed", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
