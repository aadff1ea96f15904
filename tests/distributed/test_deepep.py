"""The DeepEP dispatcher on a stand-in of its package: outputs within what bfloat16 rounds, the order of its calls, and
what it is refused. On GPUs, with the package itself, nothing of this file has run.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
from deepep_stand_in import Buffer, ElasticBuffer, FirstBuffer, Refused, quantised, stand_in
from joining import join
from model_context import cpu_context
from ranks import Place, Ranks
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from moeserve.distributed.groups import Groups
from moeserve.distributed.nccl import as_torch_group
from moeserve.expert_placement.placement import Placement
from moeserve.layers.weights import allocate_weights
from moeserve.moe.dispatch.all_to_all import AllToAllDispatcher
from moeserve.moe.dispatch.base import Dispatcher, PackedTokens, SlottedTokens
from moeserve.moe.dispatch.deepep.communicator import DeepEPCommunicator, DeepEPShape
from moeserve.moe.dispatch.deepep.dispatcher import DeepEPDispatcher
from moeserve.moe.dispatch.deepep.factory import open_communicator
from moeserve.moe.dispatch.factory import TorchDispatchers
from moeserve.moe.layer import MoEConfig, MoELayer
from moeserve.moe.router import Routing
from moeserve.moe.shared import SharedExpertsConfig
from moeserve.ops.interfaces import RouterConfig
from moeserve.step_inputs import StepInputs

CPU = torch.device("cpu")
WIDTH = 2048  # the least that the low-latency kernels take
MOST_TOKENS = 12
ROUNDING = 2.0**-8  # of bfloat16, relative: half of the distance between neighbours
SLACK = 1.01  # for products of roundings
FLOAT32_SUMS = 2.0**-18  # what two orders of adding a few float32 may differ by, relative to the terms

PACKAGES: dict[str, list[type]] = {
    "legacy": [Buffer],
    "legacy 1.0": [FirstBuffer],
    "elastic": [ElasticBuffer],
}


@dataclass(frozen=True)
class Case:
    """A step: where the experts are, and the experts of each token of each rank."""

    name: str
    logical_of_slot: list[list[int]]
    experts: list[list[list[int]]]  # by rank, token and k
    top_k: int

    @property
    def placement(self) -> Placement:
        slots = tuple(map(tuple, self.logical_of_slot))
        return Placement(slots, 1 + max(map(max, slots)))

    @property
    def step(self) -> StepInputs:
        return cast(StepInputs, StepOf(tuple(map(len, self.experts))))

    def routing(self, rank: int) -> Routing:
        generator = torch.Generator().manual_seed(rank)
        experts_TK = torch.tensor(self.experts[rank], dtype=torch.int64).reshape(-1, self.top_k)
        return Routing(experts_TK, torch.rand(experts_TK.shape, generator=generator))

    def hidden_TD(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 + rank)
        return torch.randn(len(self.experts[rank]), WIDTH, generator=generator).to(torch.bfloat16)


@dataclass(frozen=True)
class StepOf:
    """All that dispatch, or a layer of experts, reads of a step."""

    tokens_per_rank: tuple[int, ...]
    padding: None = None


def any_tokens(num_tokens: list[int], num_logical: int, top_k: int, padding: float = 0.0) -> list[list[list[int]]]:
    chance = random.Random(sum(num_tokens))

    def chosen() -> list[int]:
        return [-1 if chance.random() < padding else e for e in chance.sample(range(num_logical), top_k)]

    return [[chosen() for _ in range(count)] for count in num_tokens]


def slots_of(num_ranks: int, num_each: int) -> list[list[int]]:
    return [[*range(rank * num_each, (rank + 1) * num_each)] for rank in range(num_ranks)]


TWO_COPIES = [[0, 1, 2], [0, 3, 1]]
FOUR_COPIES = [[0, 1], [2, 0], [3, 0], [0, 2]]
CASES = [
    Case("any", slots_of(2, 4), any_tokens([5, 3], 8, 3), 3),
    Case("eight of eight", slots_of(2, 4), any_tokens([2, 4], 8, 8), 8),
    Case("one expert on each rank", slots_of(2, 1), any_tokens([3, 1], 2, 1), 1),
    Case("padding", slots_of(2, 2), [[[-1, -1], [0, 3], [-1, -1]], [[-1, -1]]], 2),
    Case("padding in pairs", slots_of(2, 4), any_tokens([6, 5], 8, 4, padding=0.4), 4),
    Case("a rank without tokens", slots_of(2, 2), [[], [[0, 3], [2, 1], [3, 2]]], 2),
    Case("no tokens", slots_of(2, 2), [[], []], 2),
    Case("all to one rank", slots_of(2, 2), [[[2, 3]] * 7, [[3, 2]] * 5], 2),
    Case("copies", TWO_COPIES, any_tokens([7, 4], 4, 3), 3),
    Case("copies and padding", TWO_COPIES, any_tokens([6, 6], 4, 2, padding=0.3), 2),
    Case("any on four", slots_of(4, 3), any_tokens([4, 0, 1, 6], 12, 6), 6),
    Case("all to one rank of four", slots_of(4, 1), [[[1]] * 3, [[1]], [], [[1]] * 4], 1),
    Case("copies on four", FOUR_COPIES, any_tokens([3, 5, 0, 2], 4, 2, padding=0.1), 2),
    Case("eight of eight on four", slots_of(4, 2), any_tokens([1, 2, 3, 2], 8, 8), 8),
]


@dataclass(frozen=True)
class Exact:
    """Token by token, pair by pair: outputs times weights, in float64."""

    total_TD: Tensor
    terms_TD: Tensor  # the magnitudes of what is added
    has_several_T: Tensor


@dataclass(frozen=True)
class Way:
    """How DeepEP is set up."""

    package: str
    low_latency_tokens: int  # 0: never
    is_float8: bool = False
    is_deterministic: bool = True

    @property
    def is_elastic(self) -> bool:
        return ElasticBuffer in PACKAGES[self.package]

    def allowed(self, exact: Exact) -> Tensor:
        """What the result may differ from the exact sum by.

        The sum is rounded once everywhere. Where ranks add first, the sums of each are rounded before: together they
        are no greater than the terms. Elastic buffers get terms that were rounded each. With a single term, all these
        are one and the same rounding.
        """
        roundings = 2 if self.is_elastic else int(self.low_latency_tokens == 0)
        before_TD = (roundings * ROUNDING * SLACK * exact.has_several_T[:, None] + FLOAT32_SUMS) * exact.terms_TD
        return before_TD + ROUNDING * SLACK * (exact.total_TD.abs() + before_TD)


PLAIN_WAYS = [
    Way("legacy", 0),
    Way("legacy", MOST_TOKENS),
    Way("legacy 1.0", MOST_TOKENS),
    Way("elastic", 0),
    Way("elastic", MOST_TOKENS),
    Way("elastic", MOST_TOKENS, is_deterministic=False),
]
WAYS = [
    *PLAIN_WAYS,
    *(Way(package, tokens, is_float8=True) for package in ("legacy", "elastic") for tokens in (0, MOST_TOKENS)),
]


@dataclass
class Ground:
    """What a test on a rank stands on."""

    place: Place
    groups: Groups
    process_group: Any
    communicators: list[DeepEPCommunicator] = field(default_factory=list)

    def dispatcher(self, case: Case, way: Way) -> DeepEPDispatcher:
        shape = DeepEPShape(
            hidden_size=WIDTH,
            top_k=case.top_k,
            dtype=torch.bfloat16,
            num_slots=case.placement.num_slots,
            max_tokens_per_rank=MOST_TOKENS,
            low_latency_tokens=way.low_latency_tokens,
            is_float8=way.is_float8,
        )
        communicator = open_communicator(
            stand_in(*PACKAGES[way.package]),
            shape,
            self.process_group,
            self.groups.ep,
            cpu_context(),
            is_required=True,
            is_deterministic=way.is_deterministic,
        )
        assert communicator is not None
        self.communicators.append(communicator)
        return DeepEPDispatcher(self.groups.ep, case.placement, cpu_context(), communicator=communicator)


@contextmanager
def ground(place: Place) -> Iterator[Ground]:
    groups = join(place, timeout_s=50.0)
    store = PrefixStore("stand-in", TCPStore(place.store_host, place.store_port, is_master=False))
    backend = ProcessGroupGloo(store, place.rank, place.num_ranks, timedelta(seconds=50))
    process_group = as_torch_group(PrefixStore("group", store), place.rank, place.num_ranks, backend)
    made = Ground(place, groups, process_group)
    yield made
    for communicator in made.communicators:
        communicator.close()
    groups.leave("done")


def expert_output(rows_RD: Tensor, logical: int) -> Tensor:
    """A network whose bytes do not depend on how many rows it gets at once."""
    return rows_RD * (1.0 + 0.37 * logical) - 0.11 * (logical + 1) * rows_RD.abs()


def serve(dispatcher: Dispatcher[Any], case: Case, rank: int) -> tuple[Tensor, list[int]]:
    """One rank's part of a step: its outputs, and how many rows each of its physical experts had."""
    arrived = dispatcher.dispatch(case.hidden_TD(rank), case.routing(rank), case.step).wait()
    tokens = arrived.tokens
    assert tokens.counts_e.dtype == torch.int64
    has_room = isinstance(tokens, SlottedTokens) or tokens.has_spare_rows  # for what may come, and mostly does not
    num_pairs = sum(map(len, case.experts)) * case.top_k
    assert tokens.expected_rows == (math.ceil(num_pairs / len(case.experts)) if has_room else None)
    output = computed(tokens, case.logical_of_slot[rank])
    # A copy: results of DeepEP's low-latency kernels must not be held
    return dispatcher.combine(output, arrived.handle).wait().clone(), tokens.counts_e.tolist()


def computed(tokens: PackedTokens | SlottedTokens, logical_of_slot: list[int]) -> Tensor:
    counts = tokens.counts_e.tolist()
    match tokens:
        case PackedTokens(rows_RD=rows_RD, has_spare_rows=has_spare_rows):
            assert has_spare_rows or len(rows_RD) == sum(counts)
            output = torch.full_like(rows_RD, torch.nan)  # where nobody computes
            firsts = torch.tensor([0, *counts]).cumsum(0).tolist()
            for expert, first, count in zip(logical_of_slot, firsts, counts, strict=False):
                output[first : first + count] = expert_output(rows_RD[first : first + count], expert)
        case SlottedTokens(slots_eSD=slots_eSD):
            output = torch.full_like(slots_eSD, torch.nan)
            for slot, (expert, count) in enumerate(zip(logical_of_slot, counts, strict=True)):
                output[slot, :count] = expert_output(slots_eSD[slot, :count], expert)
    return output


def exact(case: Case, rank: int, is_float8: bool) -> Exact:
    hidden_TD, weights_TK = case.hidden_TD(rank), case.routing(rank).weights_TK.double()
    total_TD = torch.zeros(hidden_TD.shape, dtype=torch.float64)
    terms_TD = total_TD.clone()
    for token, experts in enumerate(case.experts[rank]):
        row_D = hidden_TD[token]
        if is_float8:
            values, scales = quantised(row_D)
            row_D = (values.float().view(len(scales), -1) * scales[:, None]).flatten().to(torch.bfloat16)
        for k, expert in enumerate(experts):
            if expert >= 0:
                term_D = expert_output(row_D, expert).double() * weights_TK[token, k]
                total_TD[token] += term_D
                terms_TD[token] += term_D.abs()
    return Exact(total_TD, terms_TD, (case.routing(rank).experts_TK >= 0).sum(dim=1) > 1)


def faults(case: Case, way: Way, ground: Ground, dispatcher: DeepEPDispatcher, others_TD: Tensor | None) -> list[str]:
    """What is wrong with a step on this rank, in words; others: what another dispatcher makes of it."""
    output_TD, counts = serve(dispatcher, case, ground.place.rank)
    expected = exact(case, ground.place.rank, way.is_float8)
    total_TD, allowed_TD = expected.total_TD, way.allowed(expected)
    where = f"{case.name} by {way}"
    found = []
    if output_TD.dtype != torch.bfloat16 or output_TD.shape != total_TD.shape:
        found.append(f"{where}: {output_TD.dtype} {tuple(output_TD.shape)}")
    elif not ((output_TD - total_TD).abs() <= allowed_TD).all():
        found.append(f"{where}: off by {float(((output_TD - total_TD).abs() - allowed_TD).nan_to_num(9e9).max())}")
    elif others_TD is not None and not ((output_TD - others_TD).abs() <= 2 * allowed_TD).all():
        found.append(f"{where}: far from all_to_all")
    flat = ground.groups.ep.all_gather(torch.tensor(counts), case.placement.num_slots).tolist()
    chosen = [expert for tokens in case.experts for experts in tokens for expert in experts]
    for logical, copies in enumerate(case.placement.physical_of_logical):
        if sum(flat[copy] for copy in copies) != chosen.count(logical):
            found.append(f"{where}: expert {logical} computed another number of rows than chose it")
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_outputs(ranks: Ranks, num_ranks: int) -> None:
    """Both interfaces and both modes, bfloat16 and float8, against the exact sum and against all_to_all."""
    cases = [asdict(case) for case in CASES if len(case.experts) == num_ranks]
    assert len(cases) >= 4
    for found in ranks.run(num_ranks, "test_deepep:faults_of_cases", 120.0, cases=cases):
        assert found == []


def faults_of_cases(place: Place, cases: list[dict[str, Any]]) -> list[str]:
    found = []
    with ground(place) as here:
        for case in (Case(**fields) for fields in cases):
            others_TD, _ = serve(AllToAllDispatcher(here.groups.ep, case.placement, cpu_context()), case, place.rank)
            for way in WAYS:
                dispatcher = here.dispatcher(case, way)
                found += faults(case, way, here, dispatcher, None if way.is_float8 else others_TD)
    return found


SIZES = [[2, 4], [1, 6], [5, 5], [4, 0], [3, 3], [12, 0], [0, 0], [7, 4], [1, 1]]  # tokens of each rank


def test_a_buffer_that_one_rank_cannot_open(ranks: Ranks) -> None:
    """No rank has one then, and they go on together."""
    assert ranks.run(2, "test_deepep:open_on_one_rank") == [[False, True]] * 2


class OpenedOnRank0(ElasticBuffer):
    @functools.wraps(ElasticBuffer.__init__)  # by which it is known
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.rank:
            raise RuntimeError("no way to rank 0")


def open_on_one_rank(place: Place) -> list[bool]:
    broken = stand_in()
    broken.ElasticBuffer = OpenedOnRank0  # type: ignore[attr-defined]
    shape = DeepEPShape(
        hidden_size=WIDTH, top_k=2, dtype=torch.bfloat16, num_slots=(2, 2), max_tokens_per_rank=MOST_TOKENS
    )
    with ground(place) as here:
        communicators = [
            open_communicator(package, shape, here.process_group, here.groups.ep, cpu_context(), is_required=False)
            for package in (broken, stand_in(ElasticBuffer))
        ]
        here.communicators += filter(None, communicators)
        return [communicator is not None for communicator in communicators]


def test_small_and_large_steps_in_turn(ranks: Ranks) -> None:
    """One buffer for both modes, cleaned between them, and chosen alike on all ranks though each has its own tokens."""
    are_large = [max(size) > 4 for size in SIZES]
    for found, cleaned, timeline in ranks.run(2, "test_deepep:steps_in_turn", package="legacy"):
        assert found == []
        assert cleaned == 3
        first, then = ("dispatch", "combine"), ("low_latency_dispatch", "low_latency_combine")
        modes = [first if is_large else then for is_large in are_large]
        wanted: list[str] = []
        for number, mode in enumerate(modes):
            if mode is then and number and modes[number - 1] is first:
                wanted.append("cleaned")
            wanted += ["host waited"] if mode is first else []
            wanted += [f"{kernel} {stage}" for kernel in mode for stage in ("issued", "waited")]
        assert timeline == wanted
    for found, _, timeline in ranks.run(2, "test_deepep:steps_in_turn", package="elastic"):
        assert found == []
        four = ["dispatch issued", "dispatch waited", "combine issued", "combine waited"]
        assert timeline == [step for large in are_large for step in (["host waited", *four] if large else four)]


def steps_in_turn(place: Place, package: str) -> tuple[list[str], int, list[str]]:
    """Steps of which no rank has more than 4 tokens are small; each buffer has served others before."""
    found = []
    with ground(place) as here:
        cases = [Case(f"{size}", slots_of(2, 4), any_tokens(size, 8, 3), 3) for size in SIZES]
        dispatcher = here.dispatcher(cases[0], Way(package, 4))
        for case in cases:
            is_large = max(map(len, case.experts)) > 4
            assert dispatcher.communicator.is_capturable(case.step.tokens_per_rank) == (
                package == "legacy" and not is_large
            )
            found += faults(case, Way(package, 0 if is_large else 4), here, dispatcher, None)
        buffer = cast(Any, dispatcher.communicator).buffer
    return found, getattr(buffer, "num_cleaned", 0), [entry for entry in buffer.timeline if "destroy" not in entry]


def test_replayed_steps_are_prepared(ranks: Ranks) -> None:
    """A graph that is replayed cannot clean the buffer: `prepare` does, and what follows finds it clean."""
    assert ranks.run(2, "test_deepep:replayed_steps") == [[1, 1, 1]] * 2


def replayed_steps(place: Place) -> list[int]:
    small = Case("small", slots_of(2, 2), any_tokens([2, 1], 4, 2), 2)
    large = Case("large", slots_of(2, 2), any_tokens([9, 1], 4, 2), 2)
    cleaned = []
    with ground(place) as here:
        dispatcher = here.dispatcher(small, Way("legacy", 4))
        serve(dispatcher, large, place.rank)
        dispatcher.communicator.prepare(large.step.tokens_per_rank)  # nothing
        for _ in range(2):
            dispatcher.communicator.prepare(small.step.tokens_per_rank)
            cleaned.append(cast(Any, dispatcher.communicator).buffer.num_cleaned)
        serve(dispatcher, small, place.rank)
        cleaned.append(cast(Any, dispatcher.communicator).buffer.num_cleaned)
    return cleaned


def test_two_dispatches_under_way(ranks: Ranks) -> None:
    """Handles are returned, not stored. Of small steps by the first interface, at most two may be under way."""
    for found in ranks.run(2, "test_deepep:two_under_way"):
        assert found == []


def two_under_way(place: Place) -> list[str]:
    found = []
    sizes = [[3, 2], [2, 3]]
    with ground(place) as here:
        cases = [Case(f"{size}", slots_of(2, 4), any_tokens(size, 8, 3), 3) for size in sizes]
        for way in (Way("legacy", 0), Way("elastic", 4), Way("elastic", 0), Way("legacy", 4)):
            dispatcher = here.dispatcher(cases[0], way)
            rank = place.rank
            pending = [dispatcher.dispatch(case.hidden_TD(rank), case.routing(rank), case.step) for case in cases]
            if way == Way("legacy", 4):
                with pytest.raises(AssertionError, match="combine what was dispatched before"):
                    dispatcher.dispatch(cases[0].hidden_TD(rank), cases[0].routing(rank), cases[0].step)
            for case in reversed(cases):
                arrived = pending.pop().wait()
                output = computed(arrived.tokens, case.logical_of_slot[rank])
                handle = arrived.handle
                del arrived  # or two results, and a third of combine, are held
                output_TD = dispatcher.combine(output, handle).wait().clone()
                expected = exact(case, rank, False)
                if not ((output_TD - expected.total_TD).abs() <= way.allowed(expected)).all():
                    found.append(f"{case.name} by {way}")
    return found


def test_what_follows_a_call_runs_meanwhile(ranks: Ranks) -> None:
    """Nothing is waited for before it is asked for: shared experts, say, run between a dispatch and its wait."""
    for seen in ranks.run(2, "test_deepep:seen_between"):
        for kernels, (between_first, between_second) in seen:
            assert [entry for entry in between_first if entry != "host waited"] == [f"{kernels}dispatch issued"]
            assert between_second[-1:] == [f"{kernels}combine issued"]


def seen_between(place: Place) -> list[tuple[str, tuple[list[str], list[str]]]]:
    seen = []
    case = CASES[0]
    with ground(place) as here:
        for package, limit in (("legacy", 0), ("legacy", 8), ("elastic", 0), ("elastic", 8)):
            dispatcher = here.dispatcher(case, Way(package, limit))
            timeline = cast(Any, dispatcher.communicator).buffer.timeline
            pending = dispatcher.dispatch(case.hidden_TD(place.rank), case.routing(place.rank), case.step)
            first = timeline.copy()
            arrived = pending.wait()
            returning = dispatcher.combine(computed(arrived.tokens, case.logical_of_slot[place.rank]), arrived.handle)
            second = timeline.copy()
            returning.wait()
            kernels = "low_latency_" if package == "legacy" and limit else ""
            seen.append((kernels, (first, second)))
    return seen


def test_what_the_kernels_are_given(ranks: Ranks) -> None:
    """Contiguous hidden states, int64 and float32, whatever the router gave; or else they are refused."""
    assert ranks.run(2, "test_deepep:given_otherwise") == [[]] * 2


def given_otherwise(place: Place) -> list[str]:
    case, found = CASES[0], []
    with ground(place) as here:
        for way in PLAIN_WAYS:
            dispatcher = here.dispatcher(case, way)
            expected_TD, _ = serve(dispatcher, case, place.rank)
            routing, hidden_TD = case.routing(place.rank), case.hidden_TD(place.rank)
            other = Routing(routing.experts_TK.int(), routing.weights_TK.double().t().contiguous().t())
            arrived = dispatcher.dispatch(hidden_TD.t().contiguous().t(), other, case.step).wait()
            output = computed(arrived.tokens, case.logical_of_slot[place.rank])
            handle = arrived.handle
            del arrived
            output_TD = dispatcher.combine(output, handle).wait().clone()
            if not torch.equal(output_TD, expected_TD):
                found.append(f"{way}")
            few = Routing(routing.experts_TK[:, :2], routing.weights_TK[:, :2])
            for rows_TD, chosen in (
                (hidden_TD.float(), routing),
                (hidden_TD[:, :-128], routing),
                (hidden_TD[:1], routing),
                (hidden_TD, few),
            ):
                with pytest.raises(AssertionError):
                    dispatcher.dispatch(rows_TD, chosen, case.step)
    return found


def is_refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Refused:
        return True
    return False


def test_the_layer(ranks: Ranks) -> None:
    """The whole layer, with real experts and shared ones, is near that with all_to_all."""
    for found in ranks.run(2, "test_deepep:faults_of_layers"):
        assert found == []


def faults_of_layers(place: Place) -> list[str]:
    torch.manual_seed(0)
    config = MoEConfig(
        router=RouterConfig(num_experts=6, top_k=3, is_normalized=True),
        expert_width=16,
        has_expert_bias=True,
        shared=SharedExpertsConfig(width=16),
    )
    placement = Placement.even(6, 2, 2)
    case = Case("layer", [list(slots) for slots in placement.logical_of_slot], [[[0, 1, 2]] * 5, [[0, 1, 2]] * 3], 3)
    found = []
    with ground(place) as here, torch.inference_mode():
        context = cpu_context(torch.bfloat16)
        layer = MoELayer(config, WIDTH, placement, TorchDispatchers("all_to_all", here.groups.ep, context), context)
        allocate_weights(layer)
        for name, weight in layer.named_parameters():
            weight.normal_(0.0, 0.05)
            if name.startswith("experts."):  # a copy has the weights of the first
                for slot, expert in enumerate(layer.local_experts):
                    generator = torch.Generator().manual_seed(expert + len(name))
                    weight[slot].copy_(torch.randn(weight[slot].shape, generator=generator) * 0.05)
        hidden_TD = case.hidden_TD(place.rank)
        expected_TD = layer(hidden_TD, case.step)
        for way in PLAIN_WAYS:
            layer.dispatcher = here.dispatcher(case, way)
            rows = layer.load.rows_e.clone()
            output_TD = layer(hidden_TD, case.step).clone()
            off = float((output_TD - expected_TD).abs().max() / expected_TD.abs().max())
            if not off < 4 * ROUNDING:
                found.append(f"{way}: off by {off}")
            counted = int(here.groups.ep.all_reduce((layer.load.rows_e - rows).sum()))
            if counted != 3 * 8:
                found.append(f"{way}: {counted} rows counted")
    return found


def test_what_the_stand_in_refuses(ranks: Ranks) -> None:
    """So that what passes there was called as published."""
    assert ranks.run(2, "test_deepep:let_through") == [[]] * 2


X = torch.zeros(2, WIDTH, dtype=torch.bfloat16)
IDS, WEIGHTS = torch.tensor([[0, 3], [1, -1]]), torch.ones(2, 2)


def let_through(place: Place) -> list[str]:
    """What should have been refused and was not."""
    with ground(place) as here:
        legacy = Buffer(
            here.process_group,
            num_nvl_bytes=5 * WIDTH * 4,
            num_rdma_bytes=Buffer.get_low_latency_rdma_size_hint(4, WIDTH, 2, 4),
            low_latency_mode=True,
        )
        elastic = ElasticBuffer(here.process_group, num_max_tokens_per_rank=4, hidden=WIDTH, num_topk=2)
        return let_through_by(legacy, elastic, place.rank)


def let_through_by(legacy: Buffer, elastic: ElasticBuffer, rank: int) -> list[str]:
    to_rank, _, to_expert, is_in_rank, _ = legacy.get_dispatch_layout(IDS, 4)
    layout: dict[str, Any] = dict(
        num_tokens_per_rank=to_rank, num_tokens_per_expert=to_expert, is_token_in_rank=is_in_rank
    )

    def normal(x: Any = X, ids: Tensor = IDS, weights: Tensor = WEIGHTS) -> Any:
        return legacy.dispatch(x, topk_idx=ids, topk_weights=weights, async_finish=True, **layout)

    def small(x: Any = X, ids: Tensor = IDS, limit: int = 4, num_experts: int = 4, use_fp8: bool = False) -> Any:
        return legacy.low_latency_dispatch(x, ids, limit, num_experts, use_fp8=use_fp8, async_finish=True)

    def expanded(x: Any = X, ids: Tensor = IDS, weights: Tensor = WEIGHTS, num_experts: int = 4) -> Any:
        options: dict[str, Any] = dict(num_experts=num_experts, do_expand=True, async_with_compute_stream=True)
        return elastic.dispatch(x, ids, weights, **options)

    calls: dict[str, Callable[[], Any]] = {}
    for kernel in (normal, small, expanded):
        wrong: list[dict[str, Any]] = [
            dict(x=X.float()),
            dict(x=X[:1]),
            dict(x=X.t().contiguous().t()),
            dict(x=(X.to(torch.float8_e4m3fn), torch.ones(2, WIDTH // 64))),
            dict(ids=IDS.int()),
            dict(ids=IDS.t().contiguous().t()),
            dict(ids=torch.tensor([[0, 3], [4, -1]])),
            dict(ids=torch.tensor([[0, 0], [1, 2]])),
        ]
        if kernel is not small:
            wrong += [dict(weights=WEIGHTS.double()), dict(weights=WEIGHTS[:, :1])]
        if kernel is not normal:
            wrong += [dict(num_experts=5)]
        for number, arguments in enumerate(wrong):
            calls[f"{kernel.__name__} {number}"] = functools.partial(kernel, **arguments)
    five = dict(x=X.repeat(3, 1)[:5], ids=IDS.repeat(3, 1)[:5])
    calls |= {
        "another layout": lambda: normal(ids=torch.tensor([[0, 1], [1, -1]])),
        "a hidden size": lambda: small(x=torch.zeros(2, 2176, dtype=torch.bfloat16)),
        "many experts for a token": lambda: small(ids=torch.full((2, 12), -1)),
        "short queues": lambda: small(limit=512),
        "a small buffer": lambda: small(limit=5),
        "a small elastic buffer": lambda: expanded(ids=torch.full((2, 3), -1), weights=torch.ones(2, 3)),
        "many tokens": lambda: small(**five),
        "many tokens for elastic": lambda: expanded(**five, weights=torch.ones(5, 2)),
        "no tokens for elastic": lambda: expanded(X[:0], IDS[:0], WEIGHTS[:0]),
        "no handle": lambda: legacy.combine(X, (1, 2, 3), async_finish=True),
        "no elastic handle": lambda: elastic.combine(X, cast(Any, (1, 2, 3))),
    }
    passed = [name for name, call in calls.items() if not is_refused(call)]

    def refuse(name: str, call: Callable[[], Any]) -> None:
        if not is_refused(call):
            passed.append(name)

    received, _, handle, event, _ = small()
    output = torch.zeros_like(received)

    def combine(output: Tensor = output, ids: Tensor = IDS, weights: Tensor = WEIGHTS, handle: Any = handle) -> Any:
        return legacy.low_latency_combine(output, ids, weights, handle, async_finish=True)

    refuse("weights of another dtype", lambda: combine(weights=WEIGHTS.double()))
    refuse("output of another dtype", lambda: combine(output.float()))
    refuse("fewer slots", lambda: combine(output[:, 1:].contiguous()))
    refuse("other experts", lambda: combine(ids=torch.tensor([[0, 2], [1, -1]])))
    refuse("a shorter handle", lambda: combine(handle=handle[:-1]))
    refuse("combine before the wait", combine)
    event.current_stream_wait()
    combine()
    refuse("combined twice", combine)
    del received

    rows, _, _, handle, event = expanded()
    refuse("elastic combine before the wait", lambda: elastic.combine(rows, handle, async_with_compute_stream=True))
    event.current_stream_wait()
    refuse("fewer rows", lambda: elastic.combine(rows[1:], handle, async_with_compute_stream=True))
    refuse("weights afterwards", lambda: elastic.combine(rows, handle, torch.ones(len(rows))))

    normal()
    refuse("a dirty buffer", small)
    legacy.clean_low_latency_buffer(4, WIDTH, 3)
    refuse("a buffer cleaned for others", small)
    legacy.clean_low_latency_buffer(4, WIDTH, 4)
    hidden = X.clone()
    held = [small(hidden), small()]
    refuse("a third result", small)
    hidden += 1
    refuse("a change meanwhile", held[0][3].current_stream_wait)
    held.clear()
    refuse("ranks that differ", lambda: small(use_fp8=rank == 1))
    return passed
