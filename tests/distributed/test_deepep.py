"""The DeepEP dispatcher on a stand-in for its package: outputs within rounding, and the order of its calls.

Nothing of this has run with the package itself, which needs GPUs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from build_contexts import cpu_context
from deepep_stand_in import Buffer, ElasticBuffer, quantised, stand_in
from joining import join
from model_parts import networks_of
from ranks import Place, Ranks
from test_dispatch import StepOf, expert_output
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from moeserve.distributed.groups import Groups
from moeserve.distributed.store import connect_store
from moeserve.distributed.torch_group import as_torch_group
from moeserve.kv.layer_cache import Places
from moeserve.kv.rules import CacheRules
from moeserve.layers.moe.dispatch.base import Dispatcher, PackedTokens, SlottedTokens, StepLimits
from moeserve.layers.moe.dispatch.deepep import communicator as deepep
from moeserve.layers.moe.dispatch.deepep.communicator import DeepEPCommunicator, DeepEPShape, to_float8
from moeserve.layers.moe.dispatch.deepep.dispatcher import DeepEPDispatcher
from moeserve.layers.moe.dispatch.deepep.factory import open_communicator
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.moe.router import Routing
from moeserve.models.decoder import Decoder
from moeserve.models.registry import describe
from moeserve.ops.rows.interface import Float8Rows, Rows, plain_rows
from moeserve.step_inputs import ChunkSpan, StepInputs
from moeserve.worker.overlap import overlapped

CPU = torch.device("cpu")
WIDTH = 2048  # the smallest that the low-latency kernels support
MOST_TOKENS = 12
ROUNDING = 2.0**-8  # of bfloat16, relative: half of the distance between neighbours
SLACK = 1.01  # for products of roundings
FLOAT32_SUMS = 2.0**-18  # difference of two orders of adding a few float32, relative to the terms

PACKAGES = {"legacy": Buffer, "elastic": ElasticBuffer}


@dataclass(frozen=True)
class Case:
    """A step: the placement, and the experts of each token of each rank."""

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
    Case("one expert on each rank", slots_of(2, 1), any_tokens([3, 1], 2, 1), 1),
    Case("padding", slots_of(2, 2), [[[-1, -1], [0, 3], [-1, -1]], [[-1, -1]]], 2),
    Case("padding in pairs", slots_of(2, 4), any_tokens([6, 5], 8, 4, padding=0.4), 4),
    Case("a rank without tokens", slots_of(2, 2), [[], [[0, 3], [2, 1], [3, 2]]], 2),
    Case("no tokens", slots_of(2, 2), [[], []], 2),
    Case("all to one rank", slots_of(2, 2), [[[2, 3]] * 7, [[3, 2]] * 5], 2),
    Case("copies and padding", TWO_COPIES, any_tokens([6, 6], 4, 2, padding=0.3), 2),
    Case("any on four", slots_of(4, 3), any_tokens([4, 0, 1, 6], 12, 6), 6),
    Case("copies on four", FOUR_COPIES, any_tokens([3, 5, 0, 2], 4, 2, padding=0.1), 2),
    Case("eight of eight on four", slots_of(4, 2), any_tokens([1, 2, 3, 2], 8, 8), 8),
]


@dataclass(frozen=True)
class Exact:
    """The weighted outputs of a rank's tokens, in float64."""

    total_TD: Tensor
    terms_TD: Tensor  # sum of the magnitudes of the terms
    has_several_T: Tensor


@dataclass(frozen=True)
class Setup:
    """A configuration of DeepEP."""

    package: str
    low_latency_tokens: int  # 0: never
    is_float8: bool = False
    is_deterministic: bool = True
    waits: bool = False  # for the numbers of rows, in steps that are not of low latency
    gathers_late: bool = False  # products gather rows, as those for GPUs do

    @property
    def is_elastic(self) -> bool:
        return self.package == "elastic"

    def allowed(self, exact: Exact) -> Tensor:
        """Return the largest allowed difference from the exact sum.

        The final sum is rounded once. Where ranks add first, their sums are rounded before; together they are at most
        the sum of magnitudes. Elastic buffers also round each term. With a single term all these are one rounding.
        """
        roundings = 2 if self.is_elastic else int(self.low_latency_tokens == 0)
        before_TD = (roundings * ROUNDING * SLACK * exact.has_several_T[:, None] + FLOAT32_SUMS) * exact.terms_TD
        return before_TD + ROUNDING * SLACK * (exact.total_TD.abs() + before_TD)


PLAIN_SETUPS = [
    Setup("legacy", 0),
    Setup("legacy", 0, waits=True),
    Setup("legacy", MOST_TOKENS),
    Setup("elastic", 0),
    Setup("elastic", 0, waits=True),
    Setup("elastic", MOST_TOKENS),
    Setup("elastic", MOST_TOKENS, is_deterministic=False),
]
SETUPS = [
    *PLAIN_SETUPS,
    *(Setup(package, tokens, is_float8=True) for package in ("legacy", "elastic") for tokens in (0, MOST_TOKENS)),
    *(Setup("legacy", 0, is_float8=is_float8, gathers_late=True) for is_float8 in (False, True)),
]


@dataclass
class RankUnderTest:
    """A rank's connections and the communicators that it opened."""

    place: Place
    groups: Groups
    process_group: Any
    communicators: list[DeepEPCommunicator] = field(default_factory=list)

    def dispatcher(self, case: Case, setup: Setup) -> DeepEPDispatcher:
        shape = DeepEPShape(
            hidden_size=WIDTH,
            top_k=case.top_k,
            dtype=torch.bfloat16,
            num_slots=case.placement.num_slots,
            max_tokens_per_rank=MOST_TOKENS,
            low_latency_tokens=setup.low_latency_tokens,
            is_float8=setup.is_float8,
        )
        context = cpu_context()
        if setup.gathers_late:
            backend = dataclasses.replace(context.backend, products_gather_rows=True)
            context = dataclasses.replace(context, backend=backend)
        communicator = open_communicator(
            stand_in(PACKAGES[setup.package]),
            shape,
            self.process_group,
            self.groups.ep,
            context,
            is_deterministic=setup.is_deterministic,
        )
        self.communicators.append(communicator)
        return DeepEPDispatcher(self.groups.ep, case.placement, context, communicator=communicator)


@contextmanager
def rank_under_test(place: Place) -> Iterator[RankUnderTest]:
    groups = join(place, timeout_s=50.0)
    store = connect_store(place.rank, place.store, 20.0, "stand-in")
    backend = ProcessGroupGloo(store, place.rank, place.num_ranks, timedelta(seconds=50))
    process_group = as_torch_group(store.within("group"), place.rank, place.num_ranks, backend)
    made = RankUnderTest(place, groups, process_group)
    yield made
    for communicator in made.communicators:
        communicator.close()
    groups.leave("done")


def serve(dispatcher: Dispatcher[Any], case: Case, rank: int) -> tuple[Tensor, list[int]]:
    """Run one rank's part of a step. Return its outputs and the rows of each of its physical experts."""
    hidden_TD: Rows = case.hidden_TD(rank)
    if dispatcher.takes_float8 and isinstance(hidden_TD, Tensor):  # as a norm gives them
        hidden_TD = Float8Rows(*to_float8(hidden_TD), hidden_TD.dtype, hidden_TD)
    dispatched = dispatcher.dispatch(hidden_TD, case.routing(rank), case.step).wait()
    tokens = dispatched.tokens
    assert tokens.groups.counts_e.dtype == torch.int64
    has_room = isinstance(tokens, SlottedTokens) or tokens.groups.has_spare_rows
    num_pairs = sum(map(len, case.experts)) * case.top_k
    assert tokens.groups.expected_rows == (math.ceil(num_pairs / len(case.experts)) if has_room else None)
    output = computed(tokens, case.logical_of_slot[rank])
    # A copy, since results of low-latency kernels must not be held
    return dispatched.combine(output).wait().clone(), tokens.groups.counts_e.tolist()


def computed(tokens: PackedTokens | SlottedTokens, logical_of_slot: list[int]) -> Tensor:
    counts = tokens.groups.counts_e.tolist()
    match tokens:
        case PackedTokens(groups=groups, gather=gather):
            rows_RD = plain_rows(tokens.rows_RD)
            if gather is not None:
                rows_RD = rows_RD[gather.indices_R // gather.divisor]
            assert groups.has_spare_rows or len(rows_RD) == sum(counts)
            output = torch.full_like(rows_RD, torch.nan)
            firsts = torch.tensor([0, *counts]).cumsum(0).tolist()
            for expert, first, count in zip(logical_of_slot, firsts, counts, strict=False):
                output[first : first + count] = expert_output(rows_RD[first : first + count], expert)
        case SlottedTokens():
            slots_eSD = plain_rows(tokens.slots_eSD)
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


def faults(
    case: Case, setup: Setup, here: RankUnderTest, dispatcher: DeepEPDispatcher, others_TD: Tensor | None
) -> list[str]:
    """Return descriptions of what is wrong with a step on this rank. `others_TD`: the outputs of another dispatcher."""
    output_TD, counts = serve(dispatcher, case, here.place.rank)
    expected = exact(case, here.place.rank, setup.is_float8)
    total_TD, allowed_TD = expected.total_TD, setup.allowed(expected)
    where = f"{case.name} by {setup}"
    found = []
    if output_TD.dtype != torch.bfloat16 or output_TD.shape != total_TD.shape:
        found.append(f"{where}: {output_TD.dtype} {tuple(output_TD.shape)}")
    elif not ((output_TD - total_TD).abs() <= allowed_TD).all():
        found.append(f"{where}: off by {float(((output_TD - total_TD).abs() - allowed_TD).nan_to_num(9e9).max())}")
    elif others_TD is not None and not ((output_TD - others_TD).abs() <= 2 * allowed_TD).all():
        found.append(f"{where}: far from all_to_all")
    flat = here.groups.ep.all_gather(torch.tensor(counts), case.placement.num_slots).tolist()
    chosen = [expert for tokens in case.experts for experts in tokens for expert in experts]
    for logical, copies in enumerate(case.placement.physical_of_logical):
        if sum(flat[copy] for copy in copies) != chosen.count(logical):
            found.append(f"{where}: expert {logical} computed the wrong number of rows")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_outputs(ranks: Ranks, num_ranks: int) -> None:
    """Both APIs and both modes, in bfloat16 and float8, equal the exact sum and all_to_all within rounding."""
    cases = [asdict(case) for case in CASES if len(case.experts) == num_ranks]
    assert cases
    for found in ranks.run(num_ranks, "test_deepep:faults_of_cases", 120.0, cases=cases):
        assert found == []


def room(has_room: bool) -> Any:
    """Change the room for pairs that no rank may compute: as much as steps here need, or none."""
    room = StepLimits(eager=2**26 if has_room else -1, captured=2**29)
    return mock.patch.object(deepep, "ROOM_FOR_PAIRS", room)


def faults_of_cases(place: Place, cases: list[dict[str, Any]]) -> list[str]:
    found = []
    with rank_under_test(place) as here:
        for case in (Case(**fields) for fields in cases):
            others_TD, _ = serve(
                TorchDispatchers("all_to_all", here.groups.ep, cpu_context()).make(case.placement), case, place.rank
            )
            for setup in SETUPS:
                dispatcher = here.dispatcher(case, setup)
                with room(not setup.waits):
                    found += faults(case, setup, here, dispatcher, None if setup.is_float8 else others_TD)
                timeline = cast(Any, dispatcher.communicator).buffer.timeline
                if "host waited" in timeline and not setup.waits and any(map(len, case.experts)):
                    found.append(f"{case.name} by {setup}: the host waited")
    return found


SIZES = [[2, 4], [1, 6], [5, 5], [4, 0], [3, 3], [12, 0], [0, 0], [7, 4], [1, 1]]  # tokens of each rank


def test_small_and_large_steps_alternate(ranks: Ranks) -> None:
    """One buffer serves both modes, is cleaned between them, and all ranks choose the same mode."""
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
    """Run steps of one buffer; those with at most 4 tokens on each rank are small."""
    found = []
    with rank_under_test(place) as here, room(False):
        cases = [Case(f"{size}", slots_of(2, 4), any_tokens(size, 8, 3), 3) for size in SIZES]
        dispatcher = here.dispatcher(cases[0], Setup(package, 4))
        for case in cases:
            is_large = max(map(len, case.experts)) > 4
            # A graph has more room. The elastic buffer sorts, and waits for that.
            assert dispatcher.communicator.is_capturable(case.step.tokens_per_rank) == (package == "legacy")
            found += faults(case, Setup(package, 0 if is_large else 4), here, dispatcher, None)
        buffer = cast(Any, dispatcher.communicator).buffer
    return found, getattr(buffer, "num_cleaned", 0), [entry for entry in buffer.timeline if "destroy" not in entry]


def test_replayed_steps_are_prepared(ranks: Ranks) -> None:
    """`prepare` cleans the buffer before a replay, once."""
    assert ranks.run(2, "test_deepep:replayed_steps") == [[1, 1, 1]] * 2


def replayed_steps(place: Place) -> list[int]:
    small = Case("small", slots_of(2, 2), any_tokens([2, 1], 4, 2), 2)
    large = Case("large", slots_of(2, 2), any_tokens([9, 1], 4, 2), 2)
    cleaned = []
    with rank_under_test(place) as here:
        dispatcher = here.dispatcher(small, Setup("legacy", 4))
        serve(dispatcher, large, place.rank)
        dispatcher.communicator.prepare(large.step.tokens_per_rank)  # large steps need no cleaning
        for _ in range(2):
            dispatcher.communicator.prepare(small.step.tokens_per_rank)
            cleaned.append(cast(Any, dispatcher.communicator).buffer.num_cleaned)
        serve(dispatcher, small, place.rank)
        cleaned.append(cast(Any, dispatcher.communicator).buffer.num_cleaned)
    return cleaned


def test_two_dispatches_in_progress(ranks: Ranks) -> None:
    """Two dispatches may be in progress; a third low-latency one is an error."""
    for found in ranks.run(2, "test_deepep:two_in_progress"):
        assert found == []


def two_in_progress(place: Place) -> list[str]:
    found = []
    sizes = [[3, 2], [2, 3]]
    with rank_under_test(place) as here:
        cases = [Case(f"{size}", slots_of(2, 4), any_tokens(size, 8, 3), 3) for size in sizes]
        for setup in (Setup("legacy", 0), Setup("elastic", 4), Setup("elastic", 0), Setup("legacy", 4)):
            dispatcher = here.dispatcher(cases[0], setup)
            rank = place.rank
            timeline = cast(Any, dispatcher.communicator).buffer.timeline
            pending = [dispatcher.dispatch(case.hidden_TD(rank), case.routing(rank), case.step) for case in cases]
            if any("waited" in entry for entry in timeline if entry != "host waited"):
                found.append(f"{setup} waits for its kernels")  # shared experts could not run meanwhile
            if setup == Setup("legacy", 4):
                with pytest.raises(AssertionError, match="combine"):
                    dispatcher.dispatch(cases[0].hidden_TD(rank), cases[0].routing(rank), cases[0].step)
            for case in reversed(cases):
                dispatched = pending.pop().wait()
                output = computed(dispatched.tokens, case.logical_of_slot[rank])
                combine = dispatched.combine
                del dispatched  # else three results are held
                output_TD = combine(output).wait().clone()
                expected = exact(case, rank, False)
                if not ((output_TD - expected.total_TD).abs() <= setup.allowed(expected)).all():
                    found.append(f"{case.name} by {setup}")
    return found


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "torch_dtype": "bfloat16", "hidden_act": "silu",
    "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip


@dataclass(frozen=True)
class OneDispatcher:
    """A factory whose layers share a dispatcher, since they have the same placement."""

    group: Any
    dispatcher: DeepEPDispatcher

    def make(self, placement: Placement, load_e: Tensor | None = None) -> DeepEPDispatcher:
        return self.dispatcher


def test_one_half_computes_while_the_other_is_dispatched_or_combined(ranks: Ranks, tmp_path: Path) -> None:
    """Overlapped steps have the results of whole ones, and low-latency kernels never have more than two results.

    Nothing but the order of calls is shown: the stand-in has no streams.
    """
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    for timelines in ranks.run(2, "test_deepep:run_overlapped", folder=str(tmp_path)):
        for name, timeline in timelines.items():
            prefix = "low_latency_" if name == "low latency" else ""
            attend = ["attention", f"{prefix}dispatch issued"]
            experts = [f"{prefix}dispatch waited", "experts", f"{prefix}combine issued"]
            waited = f"{prefix}combine waited"
            assert timeline == [*attend, *attend, *experts, *experts, waited, *attend, waited, *attend, *experts,
                                *experts, waited, waited]  # fmt: skip


def run_overlapped(place: Place, folder: str) -> dict[str, list[str]]:
    """Return the calls of an overlapped step with each kind of kernels."""
    case = Case("", slots_of(2, 2), [[], []], 2)  # the placement
    timelines = {}
    with rank_under_test(place) as here, torch.inference_mode():
        for name, package, most_of_whole, tokens in (
            ("low latency", "legacy", 8, (7, 3)),
            ("normal", "legacy", 4, (9, 2)),  # halves of 5 and 4 tokens: only one of them has few
            ("elastic", "elastic", 4, (8, 0)),
        ):
            num_own = tokens[place.rank]
            step = prompt_step(num_own, tokens)
            whole = model_of(folder, here.dispatcher(case, Setup(package, most_of_whole)))
            whole_TD = whole(step, whole.make_caches(Places.equal(CacheRules(), 1)))
            dispatcher = here.dispatcher(case, Setup(package, 4))
            timeline = cast(Any, dispatcher.communicator).buffer.timeline
            model = model_of(folder, dispatcher)
            for mixer, moe in networks_of(model):
                mixer.register_forward_pre_hook(lambda *_, log=timeline: log.append("attention"))
                moe.experts.register_forward_pre_hook(lambda *_, log=timeline: log.append("experts"))
            overlapped_TD = model(overlapped(step, tp=1, tp_rank=0), model.make_caches(Places.equal(CacheRules(), 1)))
            timelines[name] = list(timeline)
            assert torch.equal(overlapped_TD, whole_TD), name
            assert len(overlapped_TD) == num_own
    return timelines


def model_of(folder: str, dispatcher: DeepEPDispatcher) -> Decoder:
    """Return a model with the same random weights each time."""
    config = describe(folder).model
    dispatchers = cast(Any, OneDispatcher(dispatcher.group, dispatcher))
    model = Decoder(config, config.place_experts(2), dispatchers, cpu_context(torch.bfloat16))
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.normal_(0.0, 0.1, generator=generator)
    return model


def prompt_step(num_tokens: int, tokens_per_rank: tuple[int, ...]) -> StepInputs:
    """Return the step of a prompt, or of nothing."""
    numbers = torch.arange(num_tokens)
    spans = (ChunkSpan(0, num_tokens, num_tokens),) if num_tokens else ()
    return StepInputs(
        token_ids=numbers,
        positions=numbers,
        cache_slots=numbers,
        row_starts=torch.tensor([0, num_tokens][: len(spans) + 1], dtype=torch.int32),
        context_lens=torch.tensor([num_tokens] * len(spans), dtype=torch.int32),
        block_table=torch.zeros(len(spans), 1, dtype=torch.int32),
        logits_rows=numbers[:0],
        spans=spans,
        tp_sizes=(num_tokens,),
        tokens_per_rank=tokens_per_rank,
    )
