"""Starts the processes of an engine on this host."""

from __future__ import annotations

from moeserve.config.engine_config import EngineConfig
from moeserve.config.environment import environment_of_rank
from moeserve.distributed.store_server import start_store
from moeserve.engine.protocol import EngineMessage, EngineStart
from moeserve.machine import usable_cores
from moeserve.processes.local import start_process
from moeserve.processes.worker_group import WorkerGroup
from moeserve.worker.protocol import RankStart


def start_local_group(config: EngineConfig, *, show_progress: bool) -> WorkerGroup:
    """Start the engine process of each replica, which in turn starts the processes of its ranks."""
    store = start_store()  # ranks meet at the store, which must outlive their processes
    group = WorkerGroup(release=store.close)
    environment = environment_of_rank(config, usable_cores())
    try:
        for rank in range(0, config.parallel.num_ranks, config.parallel.ranks_per_replica):
            first_rank = RankStart(
                config=config,
                rank=rank,
                store=store.address,
                show_progress=show_progress and rank == 0,
            )
            group.engines.append(
                start_process(
                    "moeserve.engine.process:run",
                    f"engine of replica {first_rank.dp_index}",
                    EngineStart(first_rank=first_rank),
                    EngineMessage,
                    environment=environment,
                )
            )
    except BaseException:
        group.end()
        raise
    return group
