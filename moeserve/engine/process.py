"""The process of one replica. It performs the effects that the loop in `scheduling/replica.py` yields:

receive messages from the user's process, gather rows from all replicas, execute a step on the replica's ranks, deliver
updates. A simulator in tests drives the same loop.
"""

from __future__ import annotations

from typing import Any

import torch

from moeserve.distributed.coordinator import GroupCoordinator
from moeserve.engine.base import fit_to_cache, new_scheduler
from moeserve.engine.protocol import Delivery, EngineStart, Ready
from moeserve.errors import EngineError
from moeserve.executor.base import Executor
from moeserve.executor.multiproc import MultiprocExecutor, start_workers
from moeserve.processes.channel import Channel
from moeserve.processes.child import Parent
from moeserve.protocol import ReplicaMessage, ReplicaStats, Shutdown, Wake
from moeserve.scheduling.lockstep import Lockstep
from moeserve.scheduling.replica import Deliver, Effect, Execute, Gather, Receive, Replica, StepFailed
from moeserve.worker.process import join
from moeserve.worker.protocol import RankStart

# The longest sleep of an idle replica between agreements with the others. Seconds.
HEARTBEAT_S = 1.0


def run(parent: Parent) -> None:
    """Serve one replica on this host until all replicas have agreed to shut down. This process runs its first rank."""
    start = parent.config(EngineStart)
    workers = start_workers(start.driver)
    parent.watch_children(workers)
    channel = parent.channel(ReplicaMessage)
    groups = join(start.driver)
    executor = MultiprocExecutor(start.driver.config, groups, workers, show_progress=start.show_progress)
    replica, user = ready(channel, start.driver, executor.num_blocks)
    drive(replica, user, groups.dp, executor)
    parent.let_children_end()
    executor.shutdown()


def ready(channel: Channel[ReplicaMessage], start: RankStart, num_blocks: int) -> tuple[Replica, User]:
    """Report that the model is loaded, and return what `drive` needs.

    Args:
        start: of the replica's first rank.
        num_blocks: KV cache blocks of each rank.
    """
    user = User(channel)
    config = fit_to_cache(start.config, num_blocks)
    replica = Replica(
        scheduler=new_scheduler(config, num_blocks),
        lockstep=Lockstep(rank=start.dp_index, num_replicas=config.data_parallel_size),
        load_window=config.expert_load_window,
    )
    user.send(Ready(num_blocks))
    return replica, user


def drive(replica: Replica, user: User, replicas: GroupCoordinator, executor: Executor) -> None:
    """Perform the effects of the replica's loop until it ends. An error of an effect also ends it."""
    loop = replica.run()
    answer: Any = None
    effect: Effect | None
    while True:
        try:
            effect = loop.send(answer)
            if isinstance(effect, Deliver):
                # Send a delivery only after the loop has continued without an error. If it raises instead, the parent
                # reports the first cause of the failure, which this replica cannot determine.
                delivery, effect = effect, next(loop, None)
                user.deliver(delivery)
        except StopIteration:
            return
        match effect:
            case Receive(block=block, heartbeat=heartbeat):
                answer = user.receive(block=block, heartbeat=heartbeat)
            case Gather(row=row):
                answer = gather(replicas, row)
            case Execute(plan=plan, agreement=agreement):
                try:
                    answer = executor.execute(plan, agreement)
                except EngineError as error:  # raised after every rank has done its part of the step
                    answer = StepFailed(f"{executor.name}: {error}")
            case Deliver():
                raise AssertionError("two deliveries in a row")
            case None:  # the loop has ended after an orderly last delivery
                return


def gather(replicas: GroupCoordinator, row: list[int]) -> list[list[int]]:
    """Return the rows of all replicas, by rank."""
    if replicas.world_size == 1:
        return [row]
    # collective: the first ranks of all replicas
    rows: list[list[int]] = replicas.all_gather(torch.tensor([row]), [1] * replicas.world_size).tolist()
    return rows


class User:
    """The user's process, as the engine process sees it."""

    def __init__(self, channel: Channel[ReplicaMessage]) -> None:
        self._channel = channel
        self._may_sleep = True
        self._is_ending = False
        self._last_load: tuple[int, int, int] | None = None  # as it was delivered last

    def receive(self, *, block: bool, heartbeat: bool) -> list[ReplicaMessage]:
        """Perform `Receive`.

        A replica that is woken may find the one with the request inside an agreement that began before the request
        came. That agreement ends idle and the next one has the request, so a replica skips sleeping for two rounds
        after a wake-up. After `Shutdown` it does not sleep at all: the others are about to receive it too.
        """
        timeout_s = 0.0 if not block or not self._may_sleep else HEARTBEAT_S if heartbeat else None
        messages = self._channel.receive(timeout_s)
        if self._channel.is_closed:
            raise EngineError("the user's process has ended")
        self._is_ending |= any(isinstance(message, Shutdown) for message in messages)
        self._may_sleep = not self._is_ending and not any(isinstance(message, Wake) for message in messages)
        return messages

    def send(self, message: Ready | Delivery) -> None:
        self._channel.send(message)

    def deliver(self, delivery: Deliver) -> None:
        """Send a delivery unless it repeats the last one, so that unread messages of idle replicas do not pile up."""
        load = _load_of(delivery.stats)
        if delivery.updates or delivery.load or load != self._last_load:
            self.send(Delivery(delivery.updates, delivery.stats, delivery.load, delivery.answers))
            self._last_load = load


def _load_of(stats: ReplicaStats) -> tuple[int, int, int]:
    return stats.num_free_blocks, stats.num_waiting, stats.num_running
