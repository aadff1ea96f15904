"""Ranks for benchmarks: processes that are started and connected like the engine's ranks, and execute timed orders.

The parent uses `Ranks`; each child runs `work`. Ranks without an order sleep.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import torch
from torch import Tensor

from moeserve.config.engine_config import EngineConfig
from moeserve.config.environment import environment_of_rank
from moeserve.config.facts import MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.connect import Rendezvous, TransportName, connect
from moeserve.distributed.coordinator import GroupCoordinator
from moeserve.distributed.groups import Groups
from moeserve.distributed.mesh import Mesh
from moeserve.distributed.store_server import start_store
from moeserve.layers.context import ModelContext
from moeserve.layers.moe.dispatch.base import PackedTokens
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.moe.dispatch.shared_rows import share_rows
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.moe.router import Routing
from moeserve.machine import usable_cores
from moeserve.models.rank_model import RankModel
from moeserve.models.registry import read_facts
from moeserve.ops.native import set_num_threads
from moeserve.ops.rows.interface import plain_rows
from moeserve.ops.select import select_backend
from moeserve.processes.child import Parent
from moeserve.processes.failures import as_error, root_cause
from moeserve.processes.local import start_process
from moeserve.processes.supervision import WatchedProcess, collect_failures, end_all, wait_for_messages
from moeserve.protocol import CacheStart, Registration, StepPlan
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import Intent, IntentFlags, Round, agree, make_row
from moeserve.step_inputs import StepInputs
from moeserve.telemetry.expert_load import LoadWindow, ranks_max_over_mean
from moeserve.worker.process import join
from moeserve.worker.protocol import RankStart, rank_name
from moeserve.worker.worker import Worker

# T tokens of this rank, D model width, E experts, K experts per token

DispatcherName: TypeAlias = Literal["allgather", "all_to_all", "shared_memory"]
DISPATCHERS: tuple[DispatcherName, ...] = ("allgather", "all_to_all", "shared_memory")
LEAST_CALLS = 3  # minimum number of calls in a sample
WARM_UP_STEPS = 3


class TimeAgreements(msgspec.Struct, frozen=True, kw_only=True, tag="agreements"):
    """Order: agree with the other replicas `num_calls` times, without pauses."""

    num_calls: int = LEAST_CALLS


class TimeDispatch(msgspec.Struct, frozen=True, kw_only=True, tag="dispatch"):
    """Order: dispatch random tokens to random experts, and combine the unchanged rows, `num_calls` times."""

    dispatcher: DispatcherName
    num_tokens: int  # of each rank
    hidden_size: int
    num_experts: int
    top_k: int
    num_calls: int = LEAST_CALLS


class TimeCollective(msgspec.Struct, frozen=True, kw_only=True, tag="collective"):
    """Order: call a collective of all ranks `num_calls` times, without pauses."""

    transport: TransportName
    operation: str
    dtype: str
    num_bytes: int  # from each rank to each rank
    num_calls: int = LEAST_CALLS


class RunSteps(msgspec.Struct, frozen=True, kw_only=True, tag="steps"):
    """Order: run prefill steps, gather expert loads, run until experts have moved, and run the same steps again."""

    num_tokens: int  # of each replica in a step
    num_steps: int  # number of steps before the move, and again after it
    max_steps: int  # maximum number of steps while experts move
    hottest: float  # ratio of the longest to the shortest router row


Timed: TypeAlias = TimeAgreements | TimeDispatch | TimeCollective
Order: TypeAlias = Timed | RunSteps


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of consecutive steps."""

    seconds: list[float]  # of each step
    max_over_mean: float  # load of the fullest rank over the mean, all layers together


class Rebalanced(msgspec.Struct, frozen=True, kw_only=True, tag="rebalanced"):
    """The answer to `RunSteps`."""

    before: Steps
    during: list[float]  # seconds of the steps during which experts were planned or moved
    after: Steps


Answer: TypeAlias = list[float] | Rebalanced  # seconds of each call, or steps


class Ranks:
    """The processes of one worker group. Leaving the context terminates them."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        """Start the ranks of a layout.

        Args:
            folder: a folder with a config.json. Weights are only read by `RunSteps`.
            settings: the engine's settings.
        """
        options = parse_settings({"num_threads": 1} | settings)
        config: EngineConfig = resolve(options, read_facts(folder), MachineFacts(num_cores=usable_cores()))
        self.num_ranks = config.parallel.tensor_parallel_size * config.parallel.data_parallel_size
        self._store = start_store()
        self._children: list[WatchedProcess[Answer]] = [
            start_process(
                "moeserve.bench.ranks:work",
                rank_name(config, rank),
                RankStart(config=config, rank=rank, store=self._store.address),
                Answer,
                environment=environment_of_rank(config, usable_cores()),
            )
            for rank in range(self.num_ranks)
        ]

    def run(self, order: Order) -> list[Any]:
        """Send the order to all ranks, and return their answers by rank.

        Raises:
            EngineError: a rank has failed.
        """
        for child in self._children:
            child.channel.send(order)
        answers: dict[str, Answer] = {}
        while len(answers) < len(self._children):
            wait_for_messages(self._children, None)
            for child in self._children:
                for answer in child.receive():
                    answers[child.name] = answer
            if any(child.failures() for child in self._children if child.name not in answers):
                raise as_error(root_cause(collect_failures(self._children)), "while ranks were timed")
        return [answers[child.name] for child in self._children]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self._children)


def repeated(ranks: Ranks, order: Timed, sample_seconds: float) -> Callable[[], list[list[float]]]:
    """Return a measure of the order, with as many calls as take about `sample_seconds`."""
    ranks.run(order)  # connects and touches memory
    seconds = statistics.mean(itertools.chain(*ranks.run(order)))
    num_calls = max(LEAST_CALLS, int(sample_seconds / seconds))
    return lambda: ranks.run(msgspec.structs.replace(order, num_calls=num_calls))


# The following functions run in the child processes.


def work(parent: Parent) -> None:
    start = parent.config(RankStart)
    channel = parent.channel(Order)
    set_num_threads(start.config.compute.num_threads)
    groups = join(start)
    group_of_transport: dict[TransportName, GroupCoordinator] = {"auto": groups.world}
    while True:
        for order in channel.receive(None):
            match order:
                case TimeAgreements(num_calls=num_calls):
                    channel.send(time_agreements(groups, num_calls))
                case TimeDispatch():
                    channel.send(time_dispatch(groups, order))
                case TimeCollective(transport=transport):
                    if transport not in group_of_transport:
                        group_of_transport[transport] = _connect(start, transport)
                    channel.send(time_collective(group_of_transport[transport], order))
                case RunSteps():
                    channel.send(run_steps(Worker(start.config, groups, show_progress=False), start, order))


def _timed(group: GroupCoordinator, num_calls: int, call: Callable[[], object]) -> list[float]:
    seconds = []
    group.barrier()  # collective: all ranks
    for _ in range(num_calls):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def time_agreements(groups: Groups, num_calls: int) -> list[float]:
    num_replicas = groups.dp.world_size
    row = make_row(Intent(num_tokens=1, is_decode_only=True), number=0, replica=groups.dp.rank_in_group)

    def reach_agreement() -> None:
        rows = groups.dp.all_gather(torch.tensor([row]), [1] * num_replicas).tolist()  # collective: all dp ranks
        agree(rows, number=0, num_replicas=num_replicas)

    return _timed(groups.world, num_calls, reach_agreement)


@torch.inference_mode()
def time_dispatch(groups: Groups, order: TimeDispatch) -> list[float]:
    placement = Placement.even(order.num_experts, groups.ep.world_size)
    device = torch.device("cpu")
    context = ModelContext(select_backend(device), groups, torch.bfloat16, device)
    max_tokens = order.num_tokens * groups.ep.world_size
    is_shared = order.dispatcher == "shared_memory"
    rows = share_rows(groups.ep, max_tokens, order.top_k, order.hidden_size, context.dtype) if is_shared else None
    dispatcher = TorchDispatchers(order.dispatcher, groups.ep, context, rows).make(placement)
    hidden_TD, routing = random_tokens(order, groups.rank)
    step = _step((order.num_tokens,) * groups.ep.world_size)

    def exchange() -> None:
        arrived = dispatcher.dispatch(hidden_TD, routing, step).wait()  # collective: all ep ranks
        assert isinstance(arrived.tokens, PackedTokens)
        output_RD, out_RD = plain_rows(arrived.tokens.rows_RD), arrived.tokens.out_RD
        output_RD = output_RD if out_RD is None else out_RD.copy_(output_RD)
        arrived.combine(output_RD).wait()  # collective: all ep ranks

    return _timed(groups.world, order.num_calls, exchange)


def time_collective(group: GroupCoordinator, order: TimeCollective) -> list[float]:
    num_ranks = group.world_size
    dtype = getattr(torch, order.dtype)
    num_values = order.num_bytes // dtype.itemsize
    sizes = [num_values] * num_ranks
    x = torch.ones(num_values, dtype=dtype)
    parts = x.repeat(num_ranks)
    calls: Mapping[str, Callable[[], object]] = {  # collective: all ranks
        "all_to_all": lambda: group.all_to_all(parts, sizes, sizes).wait(),
        "all_gather": lambda: group.all_gather(x, sizes),
        "reduce_scatter": lambda: group.reduce_scatter(parts, sizes),
    }
    return _timed(group, order.num_calls, calls[order.operation])


def _connect(start: RankStart, transport: TransportName) -> GroupCoordinator:
    return connect(
        Mesh(tp=start.config.parallel.tensor_parallel_size, dp=start.config.parallel.data_parallel_size),
        start.rank,
        Rendezvous(start.store, start.config.failure.collective_timeout, transport),
        transport=transport,
    ).world


def random_tokens(order: TimeDispatch, rank: int) -> tuple[Tensor, Routing]:
    """Return the tokens that a rank sends, the same in every call. All experts are equally likely."""
    generator = torch.Generator().manual_seed(rank)
    hidden_TD = torch.randn(order.num_tokens, order.hidden_size, generator=generator).bfloat16()
    scores_TE = torch.rand(order.num_tokens, order.num_experts, generator=generator)
    experts_TK = scores_TE.topk(order.top_k, dim=-1).indices
    return hidden_TD, Routing(experts_TK, torch.full(experts_TK.shape, 1 / order.top_k))


def _step(tokens_per_rank: tuple[int, ...]) -> StepInputs:
    """Return a step for dispatchers, which read only the numbers of tokens."""
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


@torch.inference_mode()
def run_steps(worker: Worker, start: RankStart, order: RunSteps) -> Rebalanced:
    """Run steps of random prompts as an engine does. Without rebalancing, no experts move."""
    rebalancer = worker.rebalancer
    _skew_routers(worker.runner.model, order.hottest)
    random_source = random.Random(start.rank)
    step_index = 0
    window: LoadWindow | None = None

    def step(*, collects_load: bool = False) -> float:
        nonlocal step_index, window
        step_index += 1
        began = time.perf_counter()
        intent = Intent(
            num_tokens=order.num_tokens,
            is_decode_only=False,
            flags=IntentFlags(requests_load=collects_load),
        )
        row = make_row(intent, number=step_index - 1, replica=start.dp_index)
        plan = _prefill_plan(random_source, start, step_index, order.num_tokens)
        result = worker.execute(Round(row=row, plan=plan)).result
        assert result is not None
        window = result.load or window
        return time.perf_counter() - began

    def load_since_last() -> float:
        collected = worker.load_meter.collect(rebalancer.epoch if rebalancer else 0)  # collective: all ranks
        assert collected is not None
        return ranks_max_over_mean(collected.window)

    for _ in range(WARM_UP_STEPS):
        step()
    before = [step() for _ in range(order.num_steps)]
    during = [step(collects_load=True)]
    assert window is not None
    max_over_mean = ranks_max_over_mean(window)
    while rebalancer and rebalancer.is_busy and len(during) < order.max_steps:
        during.append(step())
    load_since_last()
    after = [step() for _ in range(order.num_steps)]
    return Rebalanced(
        before=Steps(seconds=before, max_over_mean=max_over_mean),
        during=during,
        after=Steps(seconds=after, max_over_mean=load_since_last()),
    )


def _prefill_plan(random_source: random.Random, start: RankStart, step: int, num_tokens: int) -> StepPlan:
    """Return a step with one prompt of random tokens."""
    num_blocks = -(-num_tokens // start.config.cache.block_size)
    token_ids = [random_source.randrange(start.config.texts.vocab_size) for _ in range(num_tokens)]
    registration = Registration(
        slot=0,
        token_ids=[*token_ids, 0],  # one more than the chunk, so that nothing is sampled
        num_prompt_tokens=num_tokens + 1,
        cache=CacheStart([list(range(num_blocks))]),
        params=RequestParams(),
        seed=0,
        end_token_ids=[],
    )
    return StepPlan(step=step, slots=[0], starts=[0], lengths=[num_tokens], registrations=[registration])


def _skew_routers(model: RankModel, hottest: float) -> None:
    """Make router rows longer with the index of the expert: experts with longer rows are chosen more often."""
    for layer in model.moe_layers.values():
        scale = torch.logspace(0, 1, len(layer.router.weight), base=hottest)
        layer.router.weight.data.mul_(scale[:, None])
