"""The cost of several ranks on one CPU host: agreement before a step, dispatch to experts, and collectives.

Ranks are processes that are started and connected like the engine's, and execute timed orders. The parent uses
`Ranks`, each child runs `work`. Ranks without an order sleep. `moeserve bench compare ranks` measures whole engines.

- *agreement*: the exchange before every step, in which replicas send their intents and reach the same decision.
- *dispatch*: the tokens of one layer are sent to the ranks of their experts and back, without the experts' computation.
  Random tokens, random experts. *ratio* is the speed-up over allgather.
- *collectives*: each collective through shared memory and over gloo, as called from Python, on float32, and sums also
  on bfloat16. *bytes* are sent from each rank to each rank. *ratio* is the speed-up over gloo.

A sample is the median over calls and ranks; a 99th percentile is over all calls of all rounds. The entries of a table
are measured alternately, after an uncounted round. With more ranks than cores, an exchange waits until every rank has
been scheduled on a core.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import torch
from torch import Tensor

from moeserve.bench.checkpoints import CONFIGS
from moeserve.bench.gpu.inputs import Source
from moeserve.bench.harness import (
    Row,
    add_choices,
    at_least,
    environment,
    interleave,
    make_parser,
    percentile,
    ratio_of_medians,
)
from moeserve.bench.report import show_and_save
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
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.base import PackedTokens
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.moe.dispatch.shared_rows import share_rows
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.moe.router import Routing
from moeserve.machine import usable_cores
from moeserve.models.registry import read_facts
from moeserve.ops.native import set_num_threads
from moeserve.ops.rows.interface import plain_rows
from moeserve.ops.select import select_backend
from moeserve.processes.child import Parent
from moeserve.processes.failures import as_error, root_cause
from moeserve.processes.local import start_process
from moeserve.processes.supervision import WatchedProcess, collect_failures, end_all, wait_for_messages
from moeserve.scheduling.lockstep import Intent, agree, make_row
from moeserve.worker.protocol import RankStart, rank_name
from moeserve.worker.rank_process import join

# T tokens of this rank, D model width, E experts, K experts per token

DispatcherName: TypeAlias = Literal["allgather", "all_to_all", "shared_memory"]
DISPATCHERS: tuple[DispatcherName, ...] = ("allgather", "all_to_all", "shared_memory")
LEAST_CALLS = 3  # minimum number of calls in a sample
SAMPLE_SECONDS = 0.2  # duration of one sample
NUM_RANKS = (2, 4)
TOKENS_PER_RANK = (1, 16, 128, 1024)
SHAPE = {"hidden_size": 2048, "num_experts": 64, "top_k": 8}  # close to DeepSeek-V2-Lite and OLMoE
OPERATIONS = ("all_to_all", "all_gather", "reduce_scatter")
NUM_BYTES = (64, 2**11, 2**16, 2**21)


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


Timed: TypeAlias = TimeAgreements | TimeDispatch | TimeCollective


class Ranks:
    """The processes of one worker group. Leaving the context terminates them."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        """Start the ranks of a layout.

        Args:
            folder: a folder with a config.json. Weights are not read.
            settings: the engine's settings.
        """
        options = parse_settings({"num_threads": 1} | settings)
        config: EngineConfig = resolve(options, read_facts(folder), MachineFacts(num_cores=usable_cores()))
        self.num_ranks = config.parallel.tensor_parallel_size * config.parallel.data_parallel_size
        self._store = start_store()
        self._children: list[WatchedProcess[list[float]]] = [
            start_process(
                "moeserve.bench.ranks:work",
                rank_name(config, rank),
                RankStart(config=config, rank=rank, store=self._store.address),
                list[float],
                environment=environment_of_rank(config, usable_cores()),
            )
            for rank in range(self.num_ranks)
        ]

    def run(self, order: Timed) -> list[list[float]]:
        """Send the order to all ranks, and return their answers by rank.

        Raises:
            EngineError: a rank has failed.
        """
        for child in self._children:
            child.channel.send(order)
        answers: dict[str, list[float]] = {}
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("ranks", __doc__, rounds=3, threads=False)
    add_choices(parser, "--table", TABLES, "all")
    parser.add_argument(
        "--ranks", type=at_least(2), action="append", help=f"number of ranks, repeatable (default: {NUM_RANKS})"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(usable_cores())
    machine = environment()  # recorded before the benchmark causes load
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS["mixtral-small"]))
        for table in options.table or TABLES:
            rows: list[Row] = []
            for num_ranks in options.ranks or NUM_RANKS:
                with Ranks(Path(folder), data_parallel_size=num_ranks) as ranks:
                    for facts, orders in TABLES[table]():
                        facts = {"benchmark": "ranks", "table": table, "num_ranks": num_ranks} | facts
                        rows += [facts | row for row in timed(ranks, orders, options.rounds)]
            show_and_save(options.json, rows, machine)


def timed(ranks: Ranks, orders: Mapping[str, Timed], num_rounds: int) -> Iterator[Row]:
    """Yield the row of each order. The ratio is its speed-up over the first one."""

    def repeated(order: Timed) -> Callable[[], list[list[float]]]:
        """Return a function that times the call of this order, repeated for about `SAMPLE_SECONDS`."""
        ranks.run(order)  # connects and touches memory
        seconds = statistics.mean(itertools.chain(*ranks.run(order)))
        num_calls = max(LEAST_CALLS, int(SAMPLE_SECONDS / seconds))
        return lambda: ranks.run(msgspec.structs.replace(order, num_calls=num_calls))

    # Seconds of each call, by round and rank.
    rounds = interleave({name: repeated(order) for name, order in orders.items()}, num_rounds, warms_up=True)
    calls = {name: [list(itertools.chain(*of_ranks)) for of_ranks in each] for name, each in rounds.items()}
    samples = {name: [statistics.median(seconds) for seconds in each] for name, each in calls.items()}
    for name, each in samples.items():
        yield {
            "way": name,
            "median_us": statistics.median(each) * 1e6,
            "p99_us": percentile(itertools.chain(*calls[name]), 0.99) * 1e6,
            "ratio": ratio_of_medians(next(iter(samples.values())), each),
            "samples": each,
        }


Orders: TypeAlias = Iterator[tuple[Row, Mapping[str, Timed]]]  # facts of the rows, and what is compared


def agreement() -> Orders:
    yield {}, {"agreement": TimeAgreements()}


def dispatch() -> Orders:
    for num_tokens in TOKENS_PER_RANK:
        yield (
            {"tokens_per_rank": num_tokens, "shape": SHAPE},
            {name: TimeDispatch(dispatcher=name, num_tokens=num_tokens, **SHAPE) for name in DISPATCHERS},
        )


def collectives() -> Orders:
    for operation, dtype, num_bytes in itertools.product(OPERATIONS, ("float32", "bfloat16"), NUM_BYTES):
        if dtype == "float32" or operation == "reduce_scatter":
            facts: dict[str, Any] = {"operation": operation, "dtype": dtype, "num_bytes": num_bytes}
            gloo, shared = (TimeCollective(transport=transport, **facts) for transport in ("gloo", "auto"))
            yield facts, {"gloo": gloo, "shared memory": shared}


TABLES = {"agreement": agreement, "dispatch": dispatch, "collectives": collectives}


# The following functions run in the child processes.


def work(parent: Parent) -> None:
    start = parent.config(RankStart)
    channel = parent.channel(Timed)
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
    context = BuildContext(select_backend(device), groups, torch.bfloat16, device)
    max_tokens = order.num_tokens * groups.ep.world_size
    is_shared = order.dispatcher == "shared_memory"
    rows = share_rows(groups.ep, max_tokens, order.top_k, order.hidden_size, context.dtype) if is_shared else None
    dispatcher = TorchDispatchers(order.dispatcher, groups.ep, context, rows).make(placement)
    hidden_TD, routing = random_tokens(order, groups.rank)
    # Dispatchers read only the numbers of tokens of a step.
    step = Source(device, torch.Generator(), context.dtype).step([(order.num_tokens, order.num_tokens)], 16)
    step = dataclasses.replace(step, tokens_per_rank=(order.num_tokens,) * groups.ep.world_size)

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
