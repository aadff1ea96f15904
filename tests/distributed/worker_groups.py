"""Real replicas in the processes of `ranks.py`, with a client in each that follows a timetable known to all ranks.

The process of each replica's rank that samples runs the replica's loop, as an engine process does, and the rank in a
thread. The other ranks execute the rounds that they receive over a socket. The client stands in for the user's process.
Invariants are checked on the way, named as in `tests/reliability/replica_simulator.py`:

- I1: all ranks execute the same steps (with an order check).
- I2: each layer combines what it dispatched, once. `check_counts` checks that no row is lost between ranks.
- I4: the scheduler's invariants hold, and it has no requests but those whose end the client has not seen.
- I5: a replica runs the tokens that it announced, and no step runs without a token.
- I6: rounds are numbered consecutively.

The caller checks I3 and the tokens, from the updates. Steps of up to MIDDLE tokens are small by default: see
`small_steps.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random
import select
import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgspec
import torch
from ranks import Place, Ranks
from small_steps import MIDDLE, border, bytes_of_tokens
from torch import Tensor

from moeserve.config.engine_config import EngineConfig
from moeserve.config.facts import MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.groups import Groups
from moeserve.distributed.mesh import Mesh
from moeserve.engine import replica_process
from moeserve.engine.base import new_scheduler
from moeserve.engine.protocol import FromReplica
from moeserve.engine.replica_process import ClientConnection
from moeserve.executor.results import ResultQueue
from moeserve.layers.moe.dispatch.base import Dispatched, Dispatcher, PendingDispatch, PendingOutput
from moeserve.layers.moe.router import Routing
from moeserve.models.decoder import Decoder
from moeserve.models.registry import read_facts
from moeserve.processes.channel import Channel
from moeserve.protocol import (
    AbortRequest,
    AddRequest,
    Delivery,
    ReplicaMessage,
    Request,
    RequestUpdate,
    Shutdown,
    Wake,
)
from moeserve.scheduling.lockstep import Round, RoundResult, agree
from moeserve.scheduling.replica import Replica
from moeserve.scheduling.scheduler import Scheduler
from moeserve.step_inputs import StepInputs
from moeserve.worker.protocol import FromRank, Leave, RankStart, ToRank
from moeserve.worker.rank_process import join
from moeserve.worker.worker import Worker

HEARTBEAT_S = 0.01  # of a sleeping replica: shorter than an engine's, so that pauses are short
WAKE_LOSS = 0.3


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A request, with the round and the replica in which it arrives."""

    round: int
    replica: int
    request: Request
    abort_round: int | None = None


class Timetable(msgspec.Struct, frozen=True, kw_only=True):
    """Actions of all clients, by round. Without a shutdown round they shut down after the last request."""

    arrivals: list[Arrival]  # in order of rounds
    shutdown_round: int | None = None


class Story(msgspec.Struct, kw_only=True):
    """The record of one rank."""

    steps: list[tuple[int, ...]] = []  # tokens of each replica, by executed step
    routed: list[list[list[int]]] = []  # by executed step and layer: how many of this rank's tokens chose each expert
    computed: list[list[list[int]]] = []  # the same: how many rows each expert computed on this rank
    ways: list[bool] = []  # by executed step, layer and half, if there are several ranks: True if it was small
    num_overlapped_steps: int = 0
    updates: list[RequestUpdate] = []  # this and the next fields: of ranks that sample
    num_rounds: int = 0
    num_idle_rounds: int = 0
    num_padding_steps: int = 0
    num_preemptions: int = 0


def run(
    ranks: Ranks, num_ranks: int, timetable: Timetable, *, within_s: float = 200.0, **arguments: Any
) -> list[Story]:
    """Run `play` on each rank, and return their records."""
    encoded = msgspec.to_builtins(timetable)
    return msgspec.convert(
        ranks.run(num_ranks, "worker_groups:play", within_s, timetable=encoded, **arguments), list[Story], strict=False
    )


def play(
    place: Place,
    folder: str,
    tp: int,
    timetable: dict[str, Any],
    options: dict[str, Any],
    num_blocks: int | None = None,
    seed: int = 0,
    faulty_part: str | None = None,
    max_small_tokens: int | None = MIDDLE,
    pp: int = 1,
) -> dict[str, Any]:
    """Run one rank of a worker group of `place.num_ranks / (pp * tp)` replicas, from its start to the agreed shutdown.

    Args:
        options: settings of the engine.
        num_blocks: of KV cache to use, at most as many as the worker has.
        seed: of the random choices of a client, such as which wake-ups are lost.
        faulty_part: a class of replicas or schedulers, or an agreement, as module:name; see `planted_bugs.py`.
        max_small_tokens: the largest small step, in tokens of all ranks. None: as in serving.
    """
    replica_process.HEARTBEAT_S = HEARTBEAT_S
    layout = dict(tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=place.num_ranks // (pp * tp))
    # The dispatches of captured steps could not be counted.
    settings = parse_settings({"dtype": "float32", "num_threads": 1, "enforce_eager": True, **layout, **options})
    config = resolve(settings, read_facts(folder), MachineFacts(num_cores=place.num_ranks))
    start = RankStart(config=config, rank=place.rank, store=place.store)
    groups = join(start)
    story = Story()
    part = named(faulty_part) if faulty_part else None
    agreement = (
        agree if part is None or isinstance(part, type) else functools.partial(part, index=groups.dp.rank_in_group)
    )
    max_small_bytes = None if max_small_tokens is None else bytes_of_tokens(folder, max_small_tokens)
    try:
        with border(max_small_bytes, story.ways.append), mock.patch("moeserve.worker.worker.agree", agreement):
            if start.samples:
                arrivals = msgspec.convert(timetable, Timetable)
                lead(config, groups, arrivals, num_blocks, seed, part, story)
            else:
                follow(config, groups, story)
    except Exception as error:  # this process goes on to run other tests, so it must report the failure
        groups.leave(f"{type(error).__name__}: {error}")
        raise
    return msgspec.to_builtins(story)


def lead(
    config: EngineConfig,
    groups: Groups,
    timetable: Timetable,
    num_blocks: int | None,
    seed: int,
    faulty_part: Any,
    story: Story,
) -> None:
    """Run a replica and its rank that samples, which computes in a thread."""
    dp_index, num_replicas = groups.dp.rank_in_group, config.parallel.data_parallel_size
    followers = accept_followers(groups)
    worker = Worker(config, groups, show_progress=False)
    assert num_blocks is None or num_blocks <= worker.num_blocks, (num_blocks, worker.num_blocks)
    num_blocks = num_blocks or worker.num_blocks
    scheduler = new_scheduler(
        config, [msgspec.structs.replace(worker.facts, num_blocks=num_blocks)] * config.parallel.ranks_per_replica
    )
    client = Client(dp_index, num_replicas, timetable, scheduler, random.Random(f"{seed} {dp_index}"), story)
    executor = LeadingExecutor(worker, followers, dp_index, story)
    if isinstance(faulty_part, type) and issubclass(faulty_part, Scheduler):
        scheduler.__class__ = faulty_part
    make_replica = faulty_part if isinstance(faulty_part, type) and issubclass(faulty_part, Replica) else Replica
    replica = make_replica(
        scheduler, index=dp_index, num_replicas=num_replicas, max_rounds=config.schedule.max_concurrent_batches
    )
    replica_process.drive(replica, client, executor, config.failure.step_timeout)
    executor.shutdown()
    story.num_preemptions = scheduler.num_preemptions
    client.check_end()
    for follower in followers:
        follower.send(Leave())
        assert follower.flush(5.0)


def follow(config: EngineConfig, groups: Groups, story: Story) -> None:
    """Run one of a replica's other ranks, as `worker/rank_process.py` does."""
    channel = reach_leader(groups)
    worker = Worker(config, groups, show_progress=False)
    layers = count_dispatches(worker.runner.model)
    has_ended = False
    while True:
        for order in channel.receive(None):
            if isinstance(order, Leave):
                return
            if not has_ended:
                result = worker.execute(order)
                has_ended = result.agreement.ends_all
                note_step(story, result, layers, worker)
        assert not channel.is_closed, "the rank that samples has gone"


class LeadingExecutor:
    """Sends rounds to a replica's other ranks, runs them on the rank that samples in a thread, and checks them."""

    def __init__(self, worker: Worker, followers: Sequence[Channel[Any]], dp_index: int, story: Story) -> None:
        self.name = f"replica {dp_index}"
        self.num_blocks = worker.num_blocks
        self._worker = worker
        self._followers = followers
        self._dp_index = dp_index
        self._story = story
        self._layers = count_dispatches(worker.runner.model)
        self._last_number = -1
        self._pool = ThreadPoolExecutor(1)
        self._has_ended = False
        self._results = ResultQueue()

    def submit(self, work: Round) -> Future[RoundResult]:
        assert work.row[1] == self._last_number + 1, f"I6: round {work.row[1]} after {self._last_number}"
        self._last_number = work.row[1]
        work = msgspec.msgpack.decode(msgspec.msgpack.encode(work), type=Round)
        for follower in self._followers:
            follower.send(work)
        self._pool.submit(self._run, work)
        return self._results.expect()

    def register(self, poll: select.poll) -> None:
        poll.register(self._results.fd, select.POLLIN)

    def progress(self) -> None:
        self._results.complete()

    def shutdown(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _run(self, work: Round) -> None:
        if self._has_ended:  # rounds that were sent after the last one are not run on any rank
            return
        try:
            self._results.add(self._executed(work))
        except BaseException as error:
            self._results.add(error)

    def _executed(self, work: Round) -> RoundResult:
        result = self._worker.execute(work)
        agreement = result.agreement
        self._has_ended = agreement.ends_all
        num_tokens, announced = 0 if work.plan is None else work.plan.num_tokens, agreement.num_tokens[self._dp_index]
        assert num_tokens == announced, f"I5: {num_tokens} tokens are to run, and {announced} were agreed"
        self._story.num_rounds += 1
        self._story.num_idle_rounds += agreement.is_idle
        self._story.num_padding_steps += work.plan is None and not agreement.is_idle and not agreement.ends_all
        note_step(self._story, result, self._layers, self._worker)
        return result


def accept_followers(groups: Groups) -> list[Channel[Any]]:
    """Return sockets to the replica's other ranks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        share_of_leader(groups, listener.getsockname()[1])
        num_followers = groups.tp.world_size * groups.pp.world_size - 1
        return [Channel(listener.accept()[0], FromRank) for _ in range(num_followers)]


def reach_leader(groups: Groups) -> Channel[Any]:
    return Channel(socket.create_connection(("127.0.0.1", share_of_leader(groups, 0))), ToRank)


def share_of_leader(groups: Groups, number: int) -> int:
    """Return the number that the rank passes which samples. Collective: all ranks of a replica."""
    in_stage = groups.pp.broadcast(torch.tensor(number), groups.pp.world_size - 1)
    return int(groups.tp.broadcast(in_stage, 0))


class Client(ClientConnection):
    """Both ends of a replica's socket: before each round the far end sends the messages of the timetable."""

    def __init__(
        self,
        replica: int,
        num_replicas: int,
        timetable: Timetable,
        scheduler: Scheduler,
        dice: random.Random,
        story: Story,
    ) -> None:
        here, there = socket.socketpair()
        super().__init__(Channel(there, ReplicaMessage), max_rounds=2)
        self.far_end: Channel[Any] = Channel(here, FromReplica)
        self.scheduler = scheduler
        self.num_blocks = scheduler.num_free_blocks
        self.is_alone = num_replicas == 1
        self.dice = dice
        self.story = story
        self.shutdown_round = timetable.shutdown_round
        self.round = -1
        self.unended: set[str] = set()  # requests without a finish reason
        self.has_shut_down = False
        self.busy_rounds = {arrival.round for arrival in timetable.arrivals}
        messages: list[tuple[int, ReplicaMessage]] = []
        for arrival in timetable.arrivals:
            if arrival.replica == replica:
                messages.append((arrival.round, AddRequest(arrival.request)))
                if arrival.abort_round is not None:
                    messages.append((arrival.abort_round, AbortRequest(arrival.request.request_id)))
        self.messages = sorted(messages, key=lambda message: message[0], reverse=True)  # the next one last

    def deliver(self, delivery: Delivery) -> None:
        super().deliver(delivery)
        for message in self.far_end.receive():
            for update in message.updates:
                self.story.updates.append(update)
                if update.finish_reason is not None:
                    self.unended.discard(update.request_id)

    def receive(self) -> list[ReplicaMessage]:
        self.check_invariants()
        self.send_due_messages(self.story.num_rounds)
        return super().receive()

    def send_due_messages(self, num_rounds: int) -> None:
        """Send what is due after this number of rounds."""
        if num_rounds != self.round:
            self.round = num_rounds
            if num_rounds in self.busy_rounds and self.dice.random() >= WAKE_LOSS:
                self.far_end.send(Wake())
        if self.has_shut_down:
            return
        # A replica that is alone has no rounds without work, so time passes when there is none.
        idles = self.is_alone and not self.unended
        while self.messages and (self.messages[-1][0] <= num_rounds or idles):
            _, message = self.messages.pop()
            if isinstance(message, AddRequest):
                self.unended.add(message.request.request_id)
                idles = False
            self.far_end.send(message)
        if self.shutdown_round is None:
            is_due = not (self.messages or self.unended)
        else:
            is_due = num_rounds >= self.shutdown_round or (self.is_alone and not (self.messages or self.unended))
        if is_due:
            self.has_shut_down = True
            self.far_end.send(Shutdown())

    def check_invariants(self) -> None:
        try:
            self.scheduler.check_invariants()
        except AssertionError as error:
            raise AssertionError(f"I4: before round {self.round}: {error}") from error
        live = set(self.scheduler.live_request_ids)
        assert live <= self.unended, f"I4: the scheduler has {sorted(live)}, the client {sorted(self.unended)}"
        if not live and not self.scheduler.num_plans:
            assert self.scheduler.num_free_blocks == self.num_blocks, "I4: blocks are in use without requests"

    def check_end(self) -> None:
        """Check the state after the replica has shut down."""
        assert self.has_shut_down, f"I1: the replica left after round {self.round} without a shutdown"
        assert not self.unended, f"I3: requests have not ended: {sorted(self.unended)}"
        self.check_invariants()


def note_step(story: Story, result: RoundResult, layers: Sequence[CountedDispatcher], worker: Worker) -> None:
    agreement = result.agreement
    if agreement.is_idle or agreement.ends_all:
        return
    assert any(agreement.num_tokens), "I5: a step of nothing but padding"
    overlaps = worker.runner.context.overlap.applies(max(agreement.num_tokens), is_decode_only=agreement.is_decode_only)
    story.num_overlapped_steps += overlaps
    story.steps.append(agreement.num_tokens)
    story.routed.append([layer.take(layer.routed, 1 + overlaps) for layer in layers])
    story.computed.append([layer.take(layer.computed, 1 + overlaps) for layer in layers])


@dataclass
class CountedDispatcher:
    """Counts the rows of a dispatcher."""

    within: Dispatcher
    local_experts: Tensor
    num_experts: int
    routed: list[list[int]] = field(default_factory=list)
    computed: list[list[int]] = field(default_factory=list)
    num_under_way: int = 0  # dispatches that are not combined yet
    arrived: list[tuple[Dispatched, int]] = field(default_factory=list)  # with their rows, spare ones too

    @property
    def takes_float8(self) -> bool:
        return self.within.takes_float8

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> CountedPending:
        assert self.num_under_way < 2, "I2: what was dispatched before was not combined"
        self.num_under_way += 1
        chosen = routing.experts_TK[routing.experts_TK >= 0]
        self.routed.append(torch.bincount(chosen, minlength=self.num_experts).tolist())
        return CountedPending(self, self.within.dispatch(hidden_TD, routing, step))

    def combine(self, dispatched: Dispatched, output: Tensor) -> PendingOutput:
        arrived, num_rows = self.arrived.pop()
        assert dispatched is arrived, "I2: combined is not what arrived"
        assert len(output) == num_rows, "I2: as many rows come out of the experts as go in"
        self.num_under_way -= 1
        return dispatched.combine(output)

    def take(self, counts: list[list[int]], num_parts: int) -> list[int]:
        """Return the counts of the layer in a step, in which it ran once for each part."""
        assert self.num_under_way == 0, "I2: what was dispatched was not combined"
        assert len(counts) == num_parts, f"I2: the layer ran {len(counts)} times in a step of {num_parts} parts"
        total = [sum(of_parts) for of_parts in zip(*counts, strict=True)]
        counts.clear()
        return total


@dataclass(frozen=True)
class CountedPending:
    dispatcher: CountedDispatcher
    pending: PendingDispatch

    def wait(self) -> Dispatched:
        arrived, dispatcher = self.pending.wait(), self.dispatcher
        counts = torch.zeros(dispatcher.num_experts, dtype=torch.int64)
        counts.index_add_(0, dispatcher.local_experts, arrived.tokens.groups.counts_e)
        dispatcher.computed.append(counts.tolist())
        gather = arrived.tokens.gather
        num_rows = len(arrived.tokens.rows_RD if gather is None else gather.indices_R)
        num_counted = sum(dispatcher.computed[-1])
        dispatcher.arrived.append((arrived, num_rows))
        has_spare_rows = arrived.tokens.groups.has_spare_rows
        assert num_counted == num_rows or (num_counted < num_rows and has_spare_rows), (
            "I2: as many rows come to the experts as are counted"
        )
        return dataclasses.replace(arrived, combine=functools.partial(dispatcher.combine, arrived))


def count_dispatches(model: Decoder) -> list[CountedDispatcher]:
    """Wrap the dispatchers of a model's layers."""
    counted = []
    for moe in model.moe_layers.values():
        local_experts = torch.tensor(moe.local_experts, dtype=torch.int64)
        moe.dispatcher = CountedDispatcher(moe.dispatcher, local_experts, moe.router.config.num_experts)
        counted.append(moe.dispatcher)
    return counted


def check_counts(all_stories: Sequence[Story], tp: int, top_k: int, pp: int = 1, num_slices: int = 1) -> None:
    """Check I2 and I5: each token's pairs are sent once and computed once, and ranks without tokens add none.

    And I1: all ranks executed the same steps, small or large.
    """
    assert all(story.steps == all_stories[0].steps for story in all_stories), "I1: ranks executed different steps"
    mesh = Mesh(tp=tp, pp=pp, dp=len(all_stories) // (tp * pp))
    for stage in range(pp):
        check_stage([all_stories[rank] for rank in mesh.group("ep", stage * tp)], tp, top_k, num_slices)


def check_stage(stories: Sequence[Story], tp: int, top_k: int, num_slices: int) -> None:
    """Check the ranks of one pipeline stage."""
    assert all(story.ways == stories[0].ways for story in stories), "I1: steps were small on some ranks only"
    for index, num_tokens in enumerate(stories[0].steps):
        routed = torch.tensor([story.routed[index] for story in stories])  # [ranks, layers, experts]
        if routed.ndim < 3:  # no layer of this stage has experts
            return
        computed = torch.tensor([story.computed[index] for story in stories])
        assert torch.equal(routed.sum(0) * num_slices, computed.sum(0)), (
            f"I2: step {index}: {routed.tolist()} {computed.tolist()}"
        )
        of_replicas = routed.unflatten(0, (-1, tp)).sum(1).sum(-1)  # [replicas, layers]
        expected = torch.tensor(num_tokens)[:, None].expand_as(of_replicas) * top_k
        assert torch.equal(of_replicas, expected), f"I5: step {index}: {of_replicas.tolist()} pairs, not {num_tokens}"


def named(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
