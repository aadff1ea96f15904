"""The processes that test_processes.py starts: each does what its configuration says."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from moeserve.errors import CheckpointError, DistributedError
from moeserve.processes.child import Parent
from moeserve.processes.local import start_process
from moeserve.processes.supervision import wait_for_messages


def run(parent: Parent) -> None:
    config: dict[str, Any] = parent.config(dict)
    channel = parent.channel(str)
    match config["do"]:
        case "echo":
            while messages := channel.receive(None):
                for message in messages:
                    channel.send(message[::-1])
                channel.flush()
        case "raise":
            kinds = {"plain": ZeroDivisionError, "consequence": DistributedError, "user": CheckpointError}
            raise kinds[config["kind"]]("the message")
        case "kill":
            os.kill(os.getpid(), getattr(signal, config["signal"]))
        case "exit":
            os._exit(config["status"])
        case "compute":  # never reads from the parent again
            channel.send("computing")
            while True:
                sum(range(1000))
        case "stop":
            channel.send("ready")
            os.kill(os.getpid(), signal.SIGSTOP)
        case "family":  # starts a child, which does config["child"]
            child = start_process("watched:run", "grandchild", config["child"], str, environment=os.environ)
            parent.adopt([child])
            channel.send(str(child.handle.pid))  # type: ignore[attr-defined]
            while not child.failures():
                wait_for_messages([child], 60)
            raise DistributedError("the other ranks have gone")  # a consequence of the child's failure comes after it
        case "describe":
            cores = sorted(os.sched_getaffinity(0))
            channel.send(
                repr((os.getcwd(), os.getsid(0) == os.getpid(), cores, os.environ.get("A_VARIABLE"), sys.path))
            )
            print("to standard output", flush=True)
