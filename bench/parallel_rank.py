"""One rank of the benchmarks of parallelism: started by `parallel.py`.

Joins the others as the engine's ranks do, times what it is told to, and answers. Knows no rounds and no tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, cast

import msgspec
import torch
from torch import Tensor

from moeserve.distributed.group import GroupCoordinator, Groups, PendingTensor, TransportName, connect
from moeserve.distributed.mesh import Mesh
from moeserve.engine.process import gather
from moeserve.expert_placement.placement import Placement
from moeserve.moe.dispatch.all_to_all import AllToAllDispatcher
from moeserve.moe.dispatch.allgather import AllGatherDispatcher
from moeserve.moe.dispatch.base import Dispatcher, PackedTokens
from moeserve.moe.router import Routing
from moeserve.ops.threads import set_num_threads
from moeserve.processes.child import Parent
from moeserve.scheduling.lockstep import Intent, Lockstep
from moeserve.step_inputs import StepInputs
from moeserve.worker.process import join
from moeserve.worker.protocol import RankStart

# T tokens of this rank, D model width, E experts, K experts per token

TravellingDispatcher = Literal["allgather", "all_to_all"]
Collective = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce"]
SummedDtype = Literal["float32", "bfloat16"]


class TimeAgreements(msgspec.Struct, frozen=True, kw_only=True, tag="agreements"):
    """Agree so often with the other replicas, each time as soon as the last agreement is made."""

    num_calls: int


class TimeDispatch(msgspec.Struct, frozen=True, kw_only=True, tag="dispatch"):
    """Send random tokens to random experts and the arrived rows straight back, so often."""

    dispatcher: TravellingDispatcher
    num_tokens: int  # of each rank
    hidden_size: int
    num_experts: int
    top_k: int
    num_calls: int


class TimeCollective(msgspec.Struct, frozen=True, kw_only=True, tag="collective"):
    """Call a collective of all ranks, each time as soon as the last call has returned, so often."""

    transport: TransportName
    operation: Collective
    dtype: SummedDtype
    num_bytes: int  # of all_reduce, those of x; of the others, what goes from each rank to each
    num_calls: int


Order: TypeAlias = TimeAgreements | TimeDispatch | TimeCollective


class Timing(msgspec.Struct, frozen=True, kw_only=True, tag="timing"):
    """What one rank saw."""

    seconds: list[float]  # of each call
    seconds_in_collectives: float = 0.0  # per call: copying into them, sending, and waiting for the others
    bytes_sent: float = 0.0  # per call, to other ranks


def work(parent: Parent) -> None:
    start = parent.config(RankStart)
    channel = parent.channel(Order)
    set_num_threads(start.config.num_threads)
    groups = join(start)
    collectives = Collectives(start, groups)
    lockstep = Lockstep(rank=start.dp_index, num_replicas=start.config.data_parallel_size)
    while True:
        for order in channel.receive(None):
            match order:
                case TimeAgreements(num_calls=num_calls):
                    channel.send(time_agreements(groups, lockstep, num_calls))
                case TimeDispatch():
                    channel.send(time_dispatch(groups, order))
                case TimeCollective():
                    channel.send(collectives.time(order))


def time_agreements(groups: Groups, lockstep: Lockstep, num_calls: int) -> Timing:
    intent = Intent(num_tokens=1, is_decode_only=True)
    seconds = []
    groups.world.barrier()  # collective: all ranks
    for _ in range(num_calls):
        start = time.perf_counter()
        lockstep.finish(gather(groups.dp, lockstep.begin(intent)))  # collective: the first ranks of all replicas
        seconds.append(time.perf_counter() - start)
    return Timing(seconds=seconds)


@torch.inference_mode()
def time_dispatch(groups: Groups, order: TimeDispatch) -> Timing:
    group = TimedGroup(groups.ep)
    dispatcher = _dispatcher(order, group)
    hidden_TD, routing = random_tokens(order, groups.rank)
    step = _step((order.num_tokens,) * group.world_size)
    seconds = []
    groups.world.barrier()  # collective: all ranks
    for _ in range(order.num_calls):
        start = time.perf_counter()
        arrived = dispatcher.dispatch(hidden_TD, routing, step).wait()  # collective: all ep ranks
        assert isinstance(arrived.tokens, PackedTokens)
        dispatcher.combine(arrived.tokens.rows_RD, arrived.handle).wait()  # collective: all ep ranks
        seconds.append(time.perf_counter() - start)
    return Timing(
        seconds=seconds,
        seconds_in_collectives=group.seconds / order.num_calls,
        bytes_sent=group.bytes_sent / order.num_calls,
    )


class Collectives:
    """The groups of all ranks, one for each transport."""

    def __init__(self, start: RankStart, groups: Groups) -> None:
        self.start = start
        self.groups: dict[TransportName, GroupCoordinator] = {"auto": groups.world}

    def time(self, order: TimeCollective) -> Timing:
        if order.transport not in self.groups:
            self.groups[order.transport] = self._connect(order.transport)
        group = self.groups[order.transport]
        call = _collective(group, order)
        seconds = []
        group.barrier()  # collective: all ranks
        for _ in range(order.num_calls):
            start = time.perf_counter()
            call()  # collective: all ranks
            seconds.append(time.perf_counter() - start)
        return Timing(seconds=seconds)

    def _connect(self, transport: TransportName) -> GroupCoordinator:
        start = self.start
        return connect(
            Mesh(tp=start.config.tensor_parallel_size, dp=start.config.data_parallel_size),
            start.rank,
            store_host=start.store_host,
            store_port=start.store_port,
            store_key=f"{start.store_key}{transport}",
            timeout_s=start.config.collective_timeout,
            local_rank=start.rank,
            check_order=False,
            transport=transport,
        ).world


def _collective(group: GroupCoordinator, order: TimeCollective) -> Callable[[], object]:
    num_ranks = group.world_size
    dtype = getattr(torch, order.dtype)
    num_values = order.num_bytes // dtype.itemsize
    sizes = [num_values] * num_ranks
    x = torch.ones(num_values, dtype=dtype)
    match order.operation:
        case "all_to_all":
            parts = x.repeat(num_ranks)
            return lambda: group.all_to_all(parts, sizes, sizes).wait()
        case "all_gather":
            return lambda: group.all_gather(x, sizes)
        case "reduce_scatter":
            parts = x.repeat(num_ranks)
            return lambda: group.reduce_scatter(parts, sizes)
        case "all_reduce":
            return lambda: group.all_reduce(x)


def random_tokens(order: TimeDispatch, rank: int) -> tuple[Tensor, Routing]:
    """The tokens that a rank sends, the same in every call. All experts are chosen equally often."""
    generator = torch.Generator().manual_seed(rank)
    hidden_TD = torch.randn(order.num_tokens, order.hidden_size, generator=generator).bfloat16()
    scores_TE = torch.rand(order.num_tokens, order.num_experts, generator=generator)
    experts_TK = scores_TE.topk(order.top_k, dim=-1).indices
    return hidden_TD, Routing(experts_TK, torch.full(experts_TK.shape, 1 / order.top_k))


class TimedGroup:
    """Stands before a group, for a dispatcher, and adds up what its collectives take and send."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.group = group
        self.world_size = group.world_size
        self.rank_in_group = group.rank_in_group
        self.node_of_rank = group.node_of_rank
        self.seconds = 0.0
        self.bytes_sent = 0

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return self.begin_all_gather(x, sizes).wait()

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> PendingTensor:
        self.bytes_sent += x.nbytes * (self.world_size - 1)
        return self._timed(lambda: self.group.begin_all_gather(x, sizes))

    def all_to_all(self, x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> PendingTensor:
        num_sent = len(x) - send_sizes[self.rank_in_group]  # the rank's own rows do not travel
        self.bytes_sent += num_sent * x.shape[1:].numel() * x.element_size()
        return self._timed(lambda: self.group.all_to_all(x, send_sizes, receive_sizes))

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        num_sent = len(x) - sizes[self.rank_in_group]
        self.bytes_sent += num_sent * x.shape[1:].numel() * x.element_size()
        start = time.perf_counter()
        reduced = self.group.reduce_scatter(x, sizes)
        self.seconds += time.perf_counter() - start
        return reduced

    def _timed(self, begin: Callable[[], PendingTensor]) -> PendingTensor:
        start = time.perf_counter()
        pending = begin()
        self.seconds += time.perf_counter() - start

        def finish() -> None:
            start = time.perf_counter()
            pending.wait()
            self.seconds += time.perf_counter() - start

        return PendingTensor(pending.tensor, finish)


def _dispatcher(order: TimeDispatch, timed: TimedGroup) -> Dispatcher[Any]:
    group = cast(GroupCoordinator, timed)
    placement, device = Placement.even(order.num_experts, group.world_size), torch.device("cpu")
    match order.dispatcher:
        case "allgather":
            return AllGatherDispatcher(group, placement, device)
        case "all_to_all":
            return AllToAllDispatcher(group, placement, device)


def _step(tokens_per_rank: tuple[int, ...]) -> StepInputs:
    """A step of which only the number of tokens is read."""
    nothing = torch.empty(0, dtype=torch.int64)
    return StepInputs(
        token_ids=nothing,
        positions=nothing,
        cache_slots=nothing,
        row_starts=nothing,
        context_lens=nothing,
        block_table=nothing,
        logits_rows=nothing,
        spans=(),
        tp_sizes=tokens_per_rank[:1],
        tokens_per_rank=tokens_per_rank,
    )
