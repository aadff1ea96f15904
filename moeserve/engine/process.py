"""The process of one replica. It schedules and computes nothing: the replica's ranks are processes of their own."""

from __future__ import annotations

import select
import time

from moeserve.engine.base import fit_to_cache, new_scheduler
from moeserve.engine.effects import Driver
from moeserve.engine.protocol import Delivery, EngineStart, Ready
from moeserve.errors import EngineError
from moeserve.executor.base import Executor
from moeserve.executor.multiproc import MultiprocExecutor, start_ranks
from moeserve.processes.channel import Channel
from moeserve.processes.child import Parent
from moeserve.protocol import ReplicaMessage, ReplicaStats, Shutdown, Wake
from moeserve.scheduling.replica import Deliver, Replica
from moeserve.worker.protocol import RankStart

# The longest sleep of an idle replica between agreements with the others. Seconds.
HEARTBEAT_S = 1.0


def run(parent: Parent) -> None:
    """Serve one replica on this host until all replicas have agreed to shut down."""
    start = parent.config(EngineStart)
    ranks = start_ranks(start.first_rank)
    parent.adopt(ranks)
    channel = parent.channel(ReplicaMessage)
    executor = MultiprocExecutor(ranks, start.first_rank.config)
    serve(channel, start.first_rank, executor)
    executor.shutdown()


def serve(channel: Channel[ReplicaMessage], start: RankStart, executor: Executor) -> None:
    """Report that the model is loaded, and serve until all replicas have agreed to shut down.

    Args:
        start: of the replica's first rank.

    Raises:
        EngineError: a rank, another replica or the user's process has failed.
    """
    num_blocks = executor.loaded[0].num_blocks
    config = fit_to_cache(start.config, num_blocks)
    replica = Replica(
        new_scheduler(config, executor.loaded),
        index=start.dp_index,
        num_replicas=config.data_parallel_size,
        max_rounds=config.max_concurrent_batches,
        load_window=config.expert_load_window,
    )
    channel.send(Ready(num_blocks))
    drive(replica, User(channel, config.max_concurrent_batches), executor, config.step_timeout)


def drive(replica: Replica, user: User, executor: Executor, step_timeout_s: float) -> None:
    """Run a replica's loop until all replicas have agreed to shut down.

    Raises:
        EngineError: a rank, another replica or the user's process has failed.
        StepTimeoutError: the ranks have not finished a step in time.
    """
    driver = Driver(replica, executor, user.deliver, step_timeout_s)
    while driver.wait is not None:
        messages, ended = user.receive(), driver.ended()
        if not messages and not ended:
            poll = select.poll()
            user.register(poll)
            executor.register(poll)
            timeout_s = step_timeout_s if driver.has_rounds else user.sleep_s(heartbeat=driver.wait.heartbeat)
            poll.poll(None if timeout_s is None else timeout_s * 1000)
            messages, ended = user.receive(), driver.ended()
        driver.handle(messages, ended, user.deliver)


class User:
    """The user's process, as the engine process sees it."""

    def __init__(self, channel: Channel[ReplicaMessage], max_rounds: int) -> None:
        """
        Args:
            max_rounds: rounds of a replica in flight at once.
        """
        self._channel = channel
        self._max_rounds = max_rounds
        self._num_sleeps_skipped = 0  # of the next ones
        self._is_ending = False
        self._last_load: tuple[int, int, int] | None = None  # as it was delivered last
        self._last_idle_steps = 0
        self._last_delivery_s = 0.0

    def register(self, poll: select.poll) -> None:
        """Register what becomes ready when `receive` has something to do."""
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.has_unsent else 0))

    def receive(self) -> list[ReplicaMessage]:
        """Return the messages that have arrived, and send what could not be sent before.

        Raises:
            EngineError: the user's process has ended.
        """
        messages = self._channel.receive(0.0)
        if self._channel.is_closed:
            raise EngineError("the user's process has ended")
        self._is_ending |= any(isinstance(message, Shutdown) for message in messages)
        if any(isinstance(message, Wake) for message in messages):
            self._num_sleeps_skipped = self._max_rounds
        return messages

    def sleep_s(self, *, heartbeat: bool) -> float | None:
        """Return how long an idle replica may sleep. None: until something happens.

        A replica that is woken may find the one with the request inside rounds that were sent before the request came.
        Those end idle, and the next one has the request. So after a wake-up a replica skips sleeping as often as there
        may be rounds in flight. After `Shutdown` it does not sleep at all: the others are about to receive it too.
        """
        if not heartbeat:
            return None
        if self._num_sleeps_skipped:
            self._num_sleeps_skipped -= 1
            return 0.0
        return 0.0 if self._is_ending else HEARTBEAT_S

    def deliver(self, delivery: Deliver) -> None:
        """Send a delivery unless it repeats the last one, so that unread messages of idle replicas do not pile up.

        While requests run, one is sent now and then all the same: the user's process takes long silence for a failure,
        and a long prompt has no updates for many steps. So it is while only other replicas have requests, for metrics.
        """
        stats, now = delivery.stats, time.monotonic()
        load, num_idle_steps = _load_of(stats), stats.steps.num_idle_steps
        takes_part = stats.num_running > 0 or num_idle_steps != self._last_idle_steps
        is_due = takes_part and now - self._last_delivery_s > HEARTBEAT_S
        if delivery.updates or delivery.load or load != self._last_load or is_due:
            self._channel.send(Delivery(delivery.updates, delivery.stats, delivery.load, delivery.answers))
            self._last_load, self._last_idle_steps, self._last_delivery_s = load, num_idle_steps, now


def _load_of(stats: ReplicaStats) -> tuple[int, int, int]:
    return stats.num_free_blocks, stats.num_waiting, stats.num_running
