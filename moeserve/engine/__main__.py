"""`python -m moeserve.engine FD`: one replica, started by `Replicas`."""

from __future__ import annotations

from moeserve.engine.protocol import EngineStart
from moeserve.executor.workers import start_workers
from moeserve.processes import Parent, run_child


def work(parent: Parent) -> None:
    start = parent.config(EngineStart)
    workers = start_workers(start.driver)
    parent.watch_children(workers)
    from moeserve.engine import process  # brings torch: only now, when all are started and watched

    process.serve(parent, start, workers)


if __name__ == "__main__":
    run_child(work)
