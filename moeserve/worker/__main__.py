"""`python -m moeserve.worker FD`: a worker rank, started by the driver of its replica."""

from __future__ import annotations

from moeserve.processes import Parent, run_child
from moeserve.worker.protocol import RankStart


def work(parent: Parent) -> None:
    start = parent.config(RankStart)
    from moeserve.worker import process  # brings torch: only now, when this process is watched and can speak

    process.serve(parent, start)


if __name__ == "__main__":
    run_child(work)
