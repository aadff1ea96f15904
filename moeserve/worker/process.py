"""The process of one worker rank: joins the others, builds the worker, executes the steps it is sent."""

from __future__ import annotations

from moeserve.distributed.group import Groups, connect
from moeserve.distributed.mesh import Mesh
from moeserve.processes import Parent
from moeserve.worker.orders import Leave, RankStart, WorkerMessage
from moeserve.worker.worker import Worker


def serve(parent: Parent, start: RankStart) -> None:
    """Returns when the driver of the replica says so. What goes wrong is raised."""
    channel = parent.channel(WorkerMessage)
    groups = join(start)
    worker = Worker(start.config, groups, show_progress=False)
    while True:
        for order in channel.receive(None):
            if isinstance(order, Leave):
                return
            worker.execute(order.plan, order.agreement)


def join(start: RankStart) -> Groups:
    """The groups of this rank, once all ranks have come."""
    config = start.config
    return connect(
        Mesh(tp=config.tensor_parallel_size, dp=config.data_parallel_size),
        start.rank,
        store_host=start.store_host,
        store_port=start.store_port,
        store_key=start.store_key,
        timeout_s=config.collective_timeout,
        local_rank=start.rank,
        check_order=config.debug_collectives,
    )
