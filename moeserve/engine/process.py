"""The process of one replica: does what the replica's loop says is to be done.

The loop itself is `scheduling/replica.py`, which the simulator drives as well. Here its effects are real: messages from
the user's process, an all-gather over the replicas, a step on this replica's ranks.
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

# How long an idle replica sleeps at most before it agrees again with the others. Seconds.
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
    """What is to be driven, once the model is loaded and the user was told so.

    Args:
        start: of the replica's first rank.
        num_blocks: of KV cache that each rank has.
    """
    user = User(channel)
    config = fit_to_cache(start.config, num_blocks)
    replica = Replica(
        scheduler=new_scheduler(config, num_blocks),
        lockstep=Lockstep(rank=start.dp_index, num_replicas=config.data_parallel_size),
        load_window=config.expert_load_window,
    )
    user.say(Ready(num_blocks))
    return replica, user


def drive(replica: Replica, user: User, replicas: GroupCoordinator, executor: Executor) -> None:
    """Does what the replica's loop asks for, until it ends. An error of an effect ends it as well: see `replica.py`."""
    loop = replica.run()
    answer: Any = None
    effect: Effect | None
    while True:
        try:
            effect = loop.send(answer)
            if isinstance(effect, Deliver):
                # What it delivers last, when it ends with an error, is a guess at the cause: whoever hears of all the
                # deaths knows it. So it is told only once the loop has gone on.
                delivery, effect = effect, next(loop, None)
                user.tell(delivery)
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
                except EngineError as error:  # found after every rank had done its part of the step
                    answer = StepFailed(f"{executor.name}: {error}")
            case Deliver():
                raise AssertionError("two deliveries in a row")
            case None:  # after a delivery that was the last, and no guess
                return


def gather(replicas: GroupCoordinator, row: list[int]) -> list[list[int]]:
    """The rows of all replicas, by rank."""
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
        self._is_leaving = False
        self._told: tuple[int, int, int] | None = None

    def receive(self, *, block: bool, heartbeat: bool) -> list[ReplicaMessage]:
        """Answers `Receive`.

        A replica that is woken may find the one with the work inside an agreement that began before the work came. That
        agreement ends in idleness, and only the next one tells of the work: so a wake-up is good for two. Whoever is to
        leave does not sleep again: the others are told so in this moment.
        """
        timeout_s = 0.0 if not block or not self._may_sleep else HEARTBEAT_S if heartbeat else None
        messages = self._channel.receive(timeout_s)
        if self._channel.is_closed:
            raise EngineError("the user's process has gone")
        self._is_leaving |= any(isinstance(message, Shutdown) for message in messages)
        self._may_sleep = not self._is_leaving and not any(isinstance(message, Wake) for message in messages)
        return messages

    def say(self, message: Ready | Delivery) -> None:
        self._channel.send(message)

    def tell(self, delivery: Deliver) -> None:
        """Passes on what is news. Where nobody listens for long, nothing piles up but the tokens of live requests."""
        busy = _busy(delivery.stats)
        if delivery.updates or delivery.load or busy != self._told:
            self.say(Delivery(delivery.updates, delivery.stats, delivery.load, delivery.answers))
            self._told = busy


def _busy(stats: ReplicaStats) -> tuple[int, int, int]:
    return stats.num_free_blocks, stats.num_waiting, stats.num_running
