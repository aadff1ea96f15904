"""What children of the tests of `moeserve.processes` do: `python -m watched`, told by their configuration."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from moeserve.errors import CheckpointError, DistributedError
from moeserve.processes import Child, Parent, run_child, wait_for_news


def work(parent: Parent) -> None:
    config: dict[str, Any] = parent.config(dict)
    channel = parent.channel(str)
    match config["do"]:
        case "echo":
            while messages := channel.receive(None):
                for message in messages:
                    channel.send(message[::-1])
                channel.flush()
        case "raise":
            raise {"plain": ZeroDivisionError, "lost": DistributedError, "broken": CheckpointError}[config["kind"]](
                config.get("text", "so it is")
            )
        case "die":
            os.kill(os.getpid(), getattr(signal, config["signal"]))
        case "exit":
            os._exit(config["status"])
        case "compute":  # never looks at the parent again
            channel.send(str(os.getpid()))
            while True:
                sum(range(1000))
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            channel.send("ready")
            time.sleep(60)
        case "family":  # a child of its own, which is told to do config["child"]
            child: Child[str] = Child("watched", "grandchild", config["child"], str, environment=os.environ)
            parent.watch_children([child])
            channel.send(str(child.pid))
            if config.get("then") == "fail":
                wait_for_news([child], 10)  # what follows from a death comes after it
                raise DistributedError("the others did not come")
            time.sleep(60)
        case "tell":
            channel.send(" ".join([sys.executable, *sys.argv[:1], str(os.getsid(0) == os.getpid())]))


if __name__ == "__main__":
    run_child(work)
