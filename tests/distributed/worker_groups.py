"""Replicas on the processes of `ranks.py`: all that serves is real, and a client follows a timetable that all know.

Each replica's first rank runs what an engine process runs, `drive` with its `Replica`, `User` and `MultiprocExecutor`,
over gloo; further ranks execute the steps that come over a socket. What ends at the user's process ends here at the
client, in the process of the replica. On the way are only checks, named as in `tests/reliability/replica_simulator.py`:

- I2: what a layer dispatches it combines, once. That nothing is lost between ranks, `check_counts` sees afterwards.
- I4: before each round the scheduler's books balance, and it has the requests that the client has not seen end.
- I5: a replica runs the tokens it announced, and no step is run without a token.
- I6: each round has the number after the last one's.

Steps of up to MIDDLE tokens are carried as small ones, unless a test says otherwise: see `small_steps.py`.

I1 is checked where check_order is asked for. I3 and the tokens are for the caller to check, from the news.
"""

from __future__ import annotations

import importlib
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from ranks import Place, Ranks
from small_steps import MIDDLE, border, bytes_of_tokens
from torch import Tensor

from moeserve.config.resolve import MachineFacts, resolve
from moeserve.config.settings import EngineConfig
from moeserve.config.validation import parse_settings
from moeserve.distributed.groups import Groups
from moeserve.engine import process
from moeserve.engine.base import new_scheduler
from moeserve.engine.process import User, drive
from moeserve.engine.protocol import EngineMessage
from moeserve.executor.multiproc import MultiprocExecutor
from moeserve.models.decoder import Decoder
from moeserve.models.registry import read_facts
from moeserve.moe.dispatch.base import Dispatched, Dispatcher, PendingDispatch, PendingOutput
from moeserve.moe.layer import MoELayer
from moeserve.moe.router import Routing
from moeserve.processes.channel import Channel
from moeserve.protocol import (
    AbortRequest,
    AddRequest,
    ReplicaMessage,
    Request,
    RequestUpdate,
    Shutdown,
    StepPlan,
    StepResult,
    Wake,
)
from moeserve.scheduling.lockstep import Agreement, Lockstep
from moeserve.scheduling.replica import Deliver, Replica
from moeserve.scheduling.scheduler import Scheduler
from moeserve.step_inputs import StepInputs
from moeserve.worker.process import join
from moeserve.worker.protocol import Leave, RankStart, WorkerMessage
from moeserve.worker.worker import Worker

HEARTBEAT_S = 0.01  # of a replica that sleeps: shorter than an engine's, so that pauses take no time
WAKE_LOSS = 0.3


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it comes, and to whom."""

    round: int
    replica: int
    request: Request
    abort_round: int | None = None


class Timetable(msgspec.Struct, frozen=True, kw_only=True):
    """Actions of the clients of all replicas, by round. Without a shutdown they leave after the last request."""

    arrivals: list[Arrival]  # in order of rounds
    shutdown_round: int | None = None


class Story(msgspec.Struct, kw_only=True):
    """What one rank saw."""

    steps: list[tuple[int, ...]] = []  # tokens of each replica, by executed step
    routed: list[list[list[int]]] = []  # by executed step and layer: how many of this rank's tokens chose each expert
    computed: list[list[list[int]]] = []  # the same: how many rows each expert computed on this rank
    ways: list[bool] = []  # by executed step and layer, where there are several ranks: whether it was a small one
    news: list[RequestUpdate] = []  # from here on of first ranks alone
    num_rounds: int = 0
    num_idle_rounds: int = 0
    num_padding_steps: int = 0
    num_preemptions: int = 0
    slowest_round_s: float = 0.0


def run(ranks: Ranks, num_ranks: int, timetable: Timetable, *, within_s: float = 60.0, **arguments: Any) -> list[Story]:
    """`play` on each rank: their stories."""
    told = msgspec.to_builtins(timetable)
    return msgspec.convert(
        ranks.run(num_ranks, "worker_groups:play", within_s, timetable=told, **arguments), list[Story], strict=False
    )


def play(
    place: Place,
    folder: str,
    tp: int,
    timetable: dict[str, Any],
    options: dict[str, Any],
    num_blocks: int | None = None,
    seed: int = 0,
    replica_type: str = "moeserve.scheduling.replica:Replica",
    max_small_tokens: int | None = MIDDLE,
) -> dict[str, Any]:
    """One rank of a worker group of `place.num_ranks / tp` replicas, from its start to the shutdown that all agree to.

    Args:
        options: settings of the engine.
        num_blocks: of KV cache, fewer than the worker made.
        seed: of what a client decides by itself, such as which wake-ups are lost.
        replica_type: as module:name.
        max_small_tokens: of all ranks, in steps that are carried as small ones. None: as many as in serving.
    """
    process.HEARTBEAT_S = HEARTBEAT_S
    options = {"dtype": "float32", "num_threads": 1, "tensor_parallel_size": tp, **options}
    settings = parse_settings(options | {"data_parallel_size": place.num_ranks // tp})
    config = resolve(settings, read_facts(folder), MachineFacts(num_cores=place.num_ranks))
    groups = join(RankStart(config=config, rank=place.rank, store_host=place.store_host, store_port=place.store_port))
    story = Story()
    max_small_bytes = None if max_small_tokens is None else bytes_of_tokens(folder, max_small_tokens)
    try:
        with border(max_small_bytes, story.ways.append):
            if groups.tp.rank_in_group > 0:
                follow(config, groups, story)
            else:
                arrivals = msgspec.convert(timetable, Timetable)
                lead(config, groups, arrivals, num_blocks, seed, named(replica_type), story)
    except Exception as error:  # a process would die of it; this one stays, so it must say so
        groups.leave(f"{type(error).__name__}: {error}")
        raise
    return msgspec.to_builtins(story)


def lead(
    config: EngineConfig,
    groups: Groups,
    timetable: Timetable,
    num_blocks: int | None,
    seed: int,
    replica_type: type[Replica],
    story: Story,
) -> None:
    """The life of a replica's first rank."""
    dp_index, num_replicas = groups.dp.rank_in_group, config.data_parallel_size
    followers = accept_followers(groups)
    executor = MultiprocExecutor(config, groups, followers, show_progress=False)  # type: ignore[arg-type]
    assert num_blocks is None or num_blocks <= executor.num_blocks, (num_blocks, executor.num_blocks)
    num_blocks = num_blocks or executor.num_blocks
    layers = count_dispatches(executor.worker.runner.model)
    scheduler = new_scheduler(config, num_blocks)
    lockstep = Lockstep(rank=dp_index, num_replicas=num_replicas)
    client = Client(dp_index, timetable, scheduler, num_blocks, random.Random(f"{seed} {dp_index}"), story)
    checked = CheckedExecutor(executor, dp_index, layers, story)
    drive(replica_type(scheduler=scheduler, lockstep=lockstep), client, groups.dp, checked)  # type: ignore[arg-type]
    client.check_end()
    story.num_preemptions = scheduler.num_preemptions
    for follower in followers:
        follower.channel.send(Leave())
        assert follower.channel.flush(5.0)


def follow(config: EngineConfig, groups: Groups, story: Story) -> None:
    """The life of a replica's other ranks, as in `worker/process.py`."""
    channel = reach_leader(groups)
    worker = Worker(config, groups, show_progress=False)
    layers = count_dispatches(worker.runner.model)
    while True:
        for order in channel.receive(None):
            if isinstance(order, Leave):
                return
            worker.execute(order.plan, order.agreement)
            note_step(story, order.agreement, layers)
        assert not channel.is_closed, "the first rank of the replica has gone"


@dataclass(frozen=True)
class Follower:
    """What an executor needs of a worker's process."""

    name: str
    channel: Channel[Any]


def accept_followers(groups: Groups) -> list[Follower]:
    """Sockets to the replica's other ranks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        groups.tp.broadcast(torch.tensor(listener.getsockname()[1]), 0)  # collective: all tp ranks
        channels = [Channel(listener.accept()[0], WorkerMessage) for _ in groups.tp.ranks[1:]]
    return [Follower(f"worker {index}", channel) for index, channel in enumerate(channels)]


def reach_leader(groups: Groups) -> Channel[Any]:
    port = int(groups.tp.broadcast(torch.tensor(0), 0))  # collective: all tp ranks
    return Channel(socket.create_connection(("127.0.0.1", port)), WorkerMessage)


class Client(User):
    """The user's end of a replica's socket as well: it sends before each round what the timetable says."""

    def __init__(
        self,
        replica: int,
        timetable: Timetable,
        scheduler: Scheduler,
        num_blocks: int,
        dice: random.Random,
        story: Story,
    ) -> None:
        here, there = socket.socketpair()
        super().__init__(Channel(there, ReplicaMessage))
        self.far_end: Channel[Any] = Channel(here, EngineMessage)
        self.scheduler = scheduler
        self.num_blocks = num_blocks
        self.dice = dice
        self.story = story
        self.shutdown_round = timetable.shutdown_round
        self.round = -1
        self.unended: set[str] = set()  # sent, and no end was told
        self.has_shut_down = False
        self.round_began = time.monotonic()
        self.busy_rounds = {arrival.round for arrival in timetable.arrivals}
        messages: list[tuple[int, ReplicaMessage]] = []
        for arrival in timetable.arrivals:
            if arrival.replica == replica:
                messages.append((arrival.round, AddRequest(arrival.request)))
                if arrival.abort_round is not None:
                    messages.append((arrival.abort_round, AbortRequest(arrival.request.request_id)))
        self.messages = sorted(messages, key=lambda message: message[0], reverse=True)  # the next one last

    def receive(self, *, block: bool, heartbeat: bool) -> list[ReplicaMessage]:
        self.story.slowest_round_s = max(self.story.slowest_round_s, time.monotonic() - self.round_began)
        self.story.num_idle_rounds += block
        self.check_books()
        self.send_what_is_due()
        if block and not heartbeat:  # a replica that is alone sleeps until a message comes, and here time is rounds
            self.far_end.send(Wake())
        messages = super().receive(block=block, heartbeat=heartbeat)
        self.round_began = time.monotonic()
        return messages

    def deliver(self, delivery: Deliver) -> None:
        self.round += 1
        step = delivery.stats.step
        assert step == self.round, f"I6: round {self.round} has number {step}"
        super().deliver(delivery)
        for message in self.far_end.receive():
            for update in message.updates:
                self.story.news.append(update)
                if update.finish_reason is not None:
                    self.unended.discard(update.request_id)

    def send_what_is_due(self) -> None:
        if self.has_shut_down:
            return
        while self.messages and self.messages[-1][0] <= self.round:
            _, message = self.messages.pop()
            if isinstance(message, AddRequest):
                self.unended.add(message.request.request_id)
            self.far_end.send(message)
        if self.round in self.busy_rounds and self.dice.random() >= WAKE_LOSS:
            self.far_end.send(Wake())
        if not (self.messages or self.unended) if self.shutdown_round is None else self.round >= self.shutdown_round:
            self.has_shut_down = True
            self.far_end.send(Shutdown())

    def check_books(self) -> None:
        try:
            self.scheduler.check_invariants()
        except AssertionError as error:
            raise AssertionError(f"I4: before round {self.round}: {error}") from error
        live = set(self.scheduler.live_request_ids)
        assert live == self.unended, f"I4: the scheduler has {sorted(live)}, the client {sorted(self.unended)}"
        if not live:
            assert self.scheduler.num_free_blocks == self.num_blocks, "I4: blocks are in use without requests"

    def check_end(self) -> None:
        """When the replica has left."""
        self.story.num_rounds = self.round
        assert self.has_shut_down, f"I1: the replica left after round {self.round} without being told to"
        self.check_books()


class CheckedExecutor:
    """A replica's executor, for `drive`."""

    def __init__(
        self, executor: MultiprocExecutor, dp_index: int, layers: Sequence[CountedDispatcher], story: Story
    ) -> None:
        self.executor = executor
        self.dp_index = dp_index
        self.layers = layers
        self.story = story

    def execute(self, plan: StepPlan | None, agreement: Agreement) -> StepResult:
        num_tokens = 0 if plan is None else plan.num_tokens
        announced = agreement.num_tokens[self.dp_index]
        assert num_tokens == announced, f"I5: {num_tokens} tokens are to run, and {announced} were agreed"
        assert any(agreement.num_tokens), "I5: a step of nothing but padding"
        result = self.executor.execute(plan, agreement)
        self.story.num_padding_steps += plan is None
        note_step(self.story, agreement, self.layers)
        return result


def note_step(story: Story, agreement: Agreement, layers: Sequence[CountedDispatcher]) -> None:
    story.steps.append(agreement.num_tokens)
    story.routed.append([layer.take(layer.routed) for layer in layers])
    story.computed.append([layer.take(layer.computed) for layer in layers])


@dataclass
class CountedDispatcher:
    """A dispatcher that is counted with."""

    within: Dispatcher[Any]
    local_experts: Tensor
    num_experts: int
    routed: list[list[int]] = field(default_factory=list)
    computed: list[list[int]] = field(default_factory=list)
    handle: Any = None  # of what has arrived and is not combined yet
    num_rows: int = 0  # that arrived with it, spare ones too

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> CountedPending:
        assert self.handle is None, "I2: what was dispatched before was not combined"
        chosen = routing.experts_TK[routing.experts_TK >= 0]
        self.routed.append(torch.bincount(chosen, minlength=self.num_experts).tolist())
        return CountedPending(self, self.within.dispatch(hidden_TD, routing, step))

    def combine(self, output: Tensor, handle: Any) -> PendingOutput:
        assert handle is self.handle, "I2: combined is not what was dispatched"
        assert len(output) == self.num_rows, "I2: as many rows come out of the experts as go in"
        self.handle = None
        return self.within.combine(output, handle)

    def take(self, counts: list[list[int]]) -> list[int]:
        """The counts of the one time that the layer ran in a step."""
        assert self.handle is None, "I2: what was dispatched was not combined"
        assert len(counts) == 1, f"I2: the layer ran {len(counts)} times in a step"
        return counts.pop()


@dataclass(frozen=True)
class CountedPending:
    dispatcher: CountedDispatcher
    pending: PendingDispatch[Any]

    def wait(self) -> Dispatched[Any]:
        arrived, dispatcher = self.pending.wait(), self.dispatcher
        counts = torch.zeros(dispatcher.num_experts, dtype=torch.int64)
        counts.index_add_(0, dispatcher.local_experts, arrived.tokens.counts_e)
        dispatcher.computed.append(counts.tolist())
        dispatcher.handle = arrived.handle
        dispatcher.num_rows = len(arrived.tokens.rows_RD)
        num_counted = sum(dispatcher.computed[-1])
        has_spare_rows = arrived.tokens.has_spare_rows
        assert num_counted == dispatcher.num_rows or (num_counted < dispatcher.num_rows and has_spare_rows), (
            "I2: as many rows come to the experts as are counted"
        )
        return arrived


def count_dispatches(model: Decoder) -> list[CountedDispatcher]:
    """Wraps the dispatchers of a model's layers."""
    counted = []
    for layer in model.layers:
        moe = layer.feed_forward
        if isinstance(moe, MoELayer):
            local_experts = torch.tensor(moe.local_experts, dtype=torch.int64)
            moe.dispatcher = CountedDispatcher(moe.dispatcher, local_experts, moe.router.config.num_experts)
            counted.append(moe.dispatcher)
    assert counted
    return counted


def check_counts(stories: Sequence[Story], tp: int, top_k: int) -> None:
    """I2 and I5: each token's pairs go out once and are computed once, and a rank without tokens adds none.

    Also I1: all ranks executed the same steps, in the same ways.
    """
    assert all(story.steps == stories[0].steps for story in stories), "I1: ranks executed different steps"
    assert all(story.ways == stories[0].ways for story in stories), "I1: ranks carried steps in different ways"
    for index, num_tokens in enumerate(stories[0].steps):
        routed = torch.tensor([story.routed[index] for story in stories])  # [ranks, layers, experts]
        computed = torch.tensor([story.computed[index] for story in stories])
        assert torch.equal(routed.sum(0), computed.sum(0)), f"I2: step {index}: {routed.tolist()} {computed.tolist()}"
        of_replicas = routed.unflatten(0, (-1, tp)).sum(1).sum(-1)  # [replicas, layers]
        expected = torch.tensor(num_tokens)[:, None].expand_as(of_replicas) * top_k
        assert torch.equal(of_replicas, expected), f"I5: step {index}: {of_replicas.tolist()} pairs, not {num_tokens}"


def named(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
