"""The process of one replica's engine. It only schedules: the replica's ranks are separate processes."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from moeserve.engine.base import new_replica, ready_of
from moeserve.engine.driver import Driver, StepTimeoutError
from moeserve.engine.protocol import Recover, ReplicaFaulted, ToReplica
from moeserve.errors import DistributedError, EngineError
from moeserve.executor.base import Executor
from moeserve.executor.multiproc import MultiprocExecutor, RankFaultedError, start_rank
from moeserve.processes import progress_records
from moeserve.processes.channel import Channel
from moeserve.processes.child import Parent
from moeserve.processes.failures import FailureReport, report_of
from moeserve.processes.memory_kills import MEMORY_KILLS
from moeserve.processes.supervision import SECONDS_TO_COLLECT, WatchedProcess, collect_failures, end_all
from moeserve.protocol import Delivery, ReplicaMessage, ReplicaStats, Shutdown, Wake
from moeserve.scheduling.replica import Replica
from moeserve.scheduling.scheduler import Scheduler
from moeserve.worker.protocol import RankStart, Rejoin

# The longest sleep of an idle replica between agreements with the other replicas, in seconds.
HEARTBEAT_S = 1.0


def run(parent: Parent) -> None:
    """Serve one replica on this host until all replicas have agreed to shut down.

    With on_failure="recover" or "shrink", ranks that have failed are replaced when the user's process orders it.
    """
    first_rank = parent.config(RankStart)
    progress_records.attach(parent.records_fd, first_rank.record_of_engine)

    def start(first: RankStart, number: int) -> WatchedProcess[Any]:
        return start_rank(first, number, parent.records_fd)

    ranks = [start(first_rank, number) for number in first_rank.numbers_of_replica]
    parent.adopt(ranks)
    serve_epochs(parent.channel(ToReplica), first_rank, parent.name, ranks, start)


def serve_epochs(
    channel: Channel[ToReplica],
    first_rank: RankStart,
    name: str,
    ranks: list[WatchedProcess[Any]],
    start: Callable[[RankStart, int], WatchedProcess[Any]],
) -> None:
    """Serve one replica until all replicas have agreed to shut down, in a new epoch after each recovery.

    Args:
        name: name of this process.
        ranks: the processes of the replica's ranks. New processes replace failed ones in this list.
        start: starts the process of a rank, given the start message of the replica's first rank.

    Raises:
        EngineError: a rank, another replica or the user's process has failed, and no recovery is possible.
    """
    has_loaded = first_rank.epoch > 0
    joining: set[int] = set()  # indices of ranks that were started in this epoch, until all have loaded
    scheduler: Scheduler | None = None  # scheduler of the last epoch, whose cached prefixes all ranks have
    while True:
        try:
            # Before the first epoch is ready, the user's process sends nothing.
            interrupt = (channel.fileno(), lambda: _require_no_order(channel)) if has_loaded else None
            executor = MultiprocExecutor(ranks, first_rank.config, first_rank.epoch, interrupt)
            replica = new_replica(
                first_rank.config, executor.loaded, first_rank.dp_index, None if joining else scheduler
            )
            has_loaded, joining, scheduler = True, set(), replica.scheduler
            serve(channel, first_rank, executor, replica)
            executor.shutdown()
            return
        except RecoveryOrdered as ordered:
            order = ordered.order
        except DistributedError as error:
            if not (has_loaded and first_rank.config.recovers_in_place) or isinstance(error, StepTimeoutError):
                raise
            reports = _reports(ranks, error, name, has_agents=bool(first_rank.agents))
            channel.send(ReplicaFaulted(first_rank.epoch, reports, any(rank.has_ended for rank in ranks)))
            order = _next_order(channel)
        first_rank = order.start
        if scheduler is not None:
            scheduler.start_again()
        # A rank that has not loaded fails because the store where it was to meet the others is closed.
        numbers = enumerate(first_rank.numbers_of_replica)
        joining |= {index for index, number in numbers if ranks[index].has_ended or number in order.lost}
        _replace(ranks, joining, first_rank, start)


def _reports(
    ranks: Sequence[WatchedProcess[Any]], error: DistributedError, name: str, *, has_agents: bool
) -> list[FailureReport]:
    """Return the failures that this replica knows of. Failures of its ranks come before their consequences.

    Args:
        has_agents: True if some ranks of the engine are on other hosts, from which their ends are noticed later.
    """
    if isinstance(error, RankFaultedError):  # the cause is a rank of another replica, or is known already
        return collect_failures(ranks, [error.report], seconds=SECONDS_TO_COLLECT if has_agents else 0.0)
    return collect_failures(ranks, [report_of(error, name)])


def _require_no_order(channel: Channel[ToReplica]) -> None:
    """Raise RecoveryOrdered if further ranks have failed while this replica recovers."""
    for message in channel.receive():
        if isinstance(message, Recover):
            raise RecoveryOrdered(message)
    if channel.is_closed:
        raise EngineError("the user's process has ended")


def _next_order(channel: Channel[ToReplica]) -> Recover:
    """Wait for the order to recover. Drop all other messages: their requests are sent again."""
    while not channel.is_closed:
        for message in channel.receive(None):
            if isinstance(message, Recover):
                return message
    raise EngineError("the user's process has ended")


def _replace(
    ranks: list[WatchedProcess[Any]],
    lost: Collection[int],
    first: RankStart,
    start: Callable[[RankStart, int], WatchedProcess[Any]],
) -> None:
    """Replace the ranks with these indices, and let all other ranks join the new ranks."""
    end_all([ranks[index] for index in lost])  # before their places are used again
    MEMORY_KILLS.forget()
    for index, number in enumerate(first.numbers_of_replica):
        if index in lost:
            ranks[index] = start(first, number)
        else:
            ranks[index].channel.send(Rejoin(first.of_rank(number)))


def serve(channel: Channel[ToReplica], start: RankStart, executor: Executor, replica: Replica) -> None:
    """Report that the model is loaded, and serve until all replicas have agreed to shut down.

    Args:
        start: the start message of the replica's first rank.

    Raises:
        EngineError: a rank, another replica or the user's process has failed.
        RecoveryOrdered: ranks of this or of another replica must be replaced first.
    """
    config = start.config
    channel.send(ready_of(executor.loaded, start.epoch))
    client = ClientConnection(channel, config.schedule.max_concurrent_batches)
    drive(replica, client, executor, config.failure.step_timeout, config.failure.load_timeout)


class RecoveryOrdered(Exception):
    """The user's process has ordered a recovery."""

    def __init__(self, order: Recover) -> None:
        super().__init__("a recovery was ordered")
        self.order = order


def drive(
    replica: Replica,
    client: ClientConnection,
    executor: Executor,
    step_timeout_s: float,
    load_timeout_s: float | None = None,
) -> None:
    """Run a replica's loop until all replicas have agreed to shut down.

    Raises:
        EngineError: a rank, another replica or the user's process has failed.
        StepTimeoutError: the ranks have not finished a step in time.
    """
    driver = Driver(replica, executor, client.deliver, step_timeout_s, load_timeout_s)
    while driver.wait is not None:
        events = driver.events(client.receive())
        if not events:
            poll = select.poll()
            client.register(poll)
            executor.register(poll)
            timeout_s = step_timeout_s if driver.has_rounds else client.sleep_s(heartbeat=driver.wait.heartbeat)
            poll.poll(None if timeout_s is None else timeout_s * 1000)
            events = driver.events(client.receive())
        driver.handle(events, client.deliver)


class ClientConnection:
    """The connection of an engine process to the user's process."""

    def __init__(self, channel: Channel[ToReplica], max_rounds: int) -> None:
        """
        Args:
            max_rounds: maximum number of rounds of a replica in flight.
        """
        self._channel = channel
        self._max_rounds = max_rounds
        self._num_sleeps_skipped = 0  # number of coming sleeps to skip
        self._is_ending = False
        self._last_load: tuple[int, int, int] | None = None  # as last delivered
        self._last_idle_steps = 0
        self._last_delivery_s = 0.0

    def register(self, poll: select.poll) -> None:
        """Register the file descriptor that becomes ready when `receive` has work to do."""
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.has_unsent else 0))

    def receive(self) -> list[ReplicaMessage]:
        """Return the messages that have arrived, and send pending data.

        Raises:
            EngineError: the user's process has exited.
            RecoveryOrdered: the user's process has ordered a recovery.
        """
        messages: list[ReplicaMessage] = []
        for message in self._channel.receive(0.0):
            if isinstance(message, Recover):
                raise RecoveryOrdered(message)
            messages.append(message)
        if self._channel.is_closed:
            raise EngineError("the user's process has ended")
        self._is_ending |= any(isinstance(message, Shutdown) for message in messages)
        if any(isinstance(message, Wake) for message in messages):
            self._num_sleeps_skipped = self._max_rounds
        return messages

    def sleep_s(self, *, heartbeat: bool) -> float | None:
        """Return the maximum time that an idle replica may sleep. None: no limit.

        After a wake-up for a request of another replica, this replica skips as many sleeps as there may be rounds in
        flight. The other replica may have sent rounds before its request arrived. Those rounds have nothing to compute,
        and only the round after them has the request. After `Shutdown` the replica does not sleep at all, because the
        other replicas are about to receive it too.
        """
        if not heartbeat:
            return None
        if self._num_sleeps_skipped:
            self._num_sleeps_skipped -= 1
            return 0.0
        return 0.0 if self._is_ending else HEARTBEAT_S

    def deliver(self, delivery: Delivery) -> None:
        """Send a delivery unless it repeats the last one, so that unread messages of idle replicas do not pile up.

        While requests run, a delivery is sent at intervals in any case: a long prompt has no updates for many steps,
        and the user's process would take the silence for a failure. The same applies while only other replicas have
        requests, so that metrics stay current.
        """
        stats, now = delivery.stats, time.monotonic()
        load, num_idle_steps = _load_of(stats), stats.steps.num_idle_steps
        takes_part = stats.num_running > 0 or num_idle_steps != self._last_idle_steps
        is_due = takes_part and now - self._last_delivery_s > HEARTBEAT_S
        if delivery.updates or delivery.load or delivery.controls or load != self._last_load or is_due:
            self._channel.send(delivery)
            self._last_load, self._last_idle_steps, self._last_delivery_s = load, num_idle_steps, now


def _load_of(stats: ReplicaStats) -> tuple[int, int, int]:
    return stats.num_free_blocks, stats.num_waiting, stats.num_running
