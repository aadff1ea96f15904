"""Dispatch between ranks, byte for byte against a loop over pairs, and the bytes that it sends."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from build_contexts import cpu_context
from hypothesis import given, settings
from hypothesis import strategies as st
from joining import join
from ranks import Place, Ranks
from thread_ranks import Record, Table, ThreadGroup, run
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moeserve.distributed.groups import groups_of_one_rank
from moeserve.distributed.mesh import Mesh
from moeserve.layers.moe.dispatch import allgather
from moeserve.layers.moe.dispatch.allgather import AllGatherDispatcher, DispatcherBySize
from moeserve.layers.moe.dispatch.base import Dispatcher, PackedTokens, StepLimits
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.moe.dispatch.shared_rows import share_rows
from moeserve.layers.moe.layer import MoELayer, MoESpec
from moeserve.layers.moe.placement.eplb import eplb
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.moe.router import Routing
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.layers.network import Run
from moeserve.layers.weights import allocate_weights
from moeserve.ops.backend import REFERENCE
from moeserve.ops.pairs.interface import PairKernels
from moeserve.ops.routing.interface import RouterSpec
from moeserve.ops.select import select_backend
from moeserve.step_inputs import StepInputs
from moeserve.worker.cuda_graphs import graph_sizes

CPU = torch.device("cpu")
WIDTH = 5
ANYWHERE = ["allgather", "all_to_all"]  # between ranks on any hosts and devices
DISTRIBUTED = [*ANYWHERE, "shared_memory"]
MAX_TOKENS, MAX_TOP_K = 64, 8  # of a step here


@dataclass(frozen=True)
class Case:
    """A step: the placement, and the experts of each token of each rank."""

    logical_of_slot: list[list[int]]
    num_logical: int
    experts: list[list[list[int]]]  # by rank, token and k
    top_k: int
    dtype: str = "float32"

    @property
    def placement(self) -> Placement:
        return Placement(tuple(map(tuple, self.logical_of_slot)), self.num_logical)

    @property
    def num_ranks(self) -> int:
        return len(self.logical_of_slot)

    @property
    def step(self) -> StepInputs:
        return cast(StepInputs, StepOf(tuple(map(len, self.experts))))

    def experts_TK(self, rank: int) -> Tensor:
        return torch.tensor(self.experts[rank], dtype=torch.int64).reshape(-1, self.top_k)

    def tokens(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the hidden states and router weights of a rank's tokens."""
        generator = torch.Generator().manual_seed(rank)
        num_tokens = len(self.experts[rank])
        hidden_TD = torch.randn(num_tokens, WIDTH, generator=generator).to(getattr(torch, self.dtype))
        return hidden_TD, torch.rand(num_tokens, self.top_k, generator=generator)


@dataclass(frozen=True)
class StepOf:
    """The fields of a step that dispatch and a layer of experts read."""

    tokens_per_rank: tuple[int, ...]
    padding: None = None
    rows_before: int = 0
    most_per_rank: tuple[int, ...] = ()


def expert_output(rows_RD: Tensor, logical: int) -> Tensor:
    """An expert network whose result for a row does not depend on the number of rows, unlike torch's products."""
    return rows_RD * (1.0 + 0.37 * logical) - 0.11 * (logical + 1) * rows_RD.abs()


def make_dispatchers(
    name: Any, group: Any, dtype: torch.dtype = torch.float32, keeps_bytes: bool = True
) -> TorchDispatchers:
    """Return dispatchers of a group, with kernels that are batch-invariant or are not. Shared memory is full of NaN."""
    rows = None
    if name == "shared_memory":
        rows = share_rows(group, MAX_TOKENS, MAX_TOP_K, WIDTH, dtype)
        rows.hidden_ND.fill_(torch.nan)
        rows.output_PD.fill_(torch.nan)
        group.barrier()
    backend = REFERENCE
    if keeps_bytes:
        backend = dataclasses.replace(select_backend(CPU, dtype), is_batch_invariant=True)
    return TorchDispatchers(name, group, dataclasses.replace(cpu_context(dtype), backend=backend), rows)


def make_dispatcher(name: str, group: Any, case: Case, keeps_bytes: bool = True) -> Dispatcher[Any]:
    return make_dispatchers(name, group, getattr(torch, case.dtype), keeps_bytes).make(case.placement)


def check_expected_rows(tokens: PackedTokens, case: Case, rank: int) -> None:
    """Check the estimate: none if all rows count, else the slots' share of the step's pairs."""
    num_slots = [*map(len, case.logical_of_slot)]
    num_pairs = sum(map(len, case.experts)) * case.top_k
    share = math.ceil(Fraction(num_pairs * num_slots[rank], sum(num_slots)))
    assert tokens.groups.expected_rows == (share if tokens.groups.has_spare_rows else None)


def serve(group: Any, case: Case, dispatcher: Dispatcher[Any]) -> tuple[Tensor, list[int]]:
    """Run one rank's part of a step. Return its outputs and the rows of each of its physical experts."""
    hidden_TD, weights_TK = case.tokens(group.rank_in_group)
    routing = Routing(case.experts_TK(group.rank_in_group), weights_TK)
    dispatched = dispatcher.dispatch(hidden_TD, routing, case.step).wait()
    tokens = dispatched.tokens
    assert isinstance(tokens, PackedTokens)
    check_expected_rows(tokens, case, group.rank_in_group)
    counts = tokens.groups.counts_e.tolist()
    rows_RD = tokens.rows_RD
    if tokens.gather is not None:
        rows_RD = rows_RD[tokens.gather.indices_R // tokens.gather.divisor]
    output = compute(rows_RD, counts, case.logical_of_slot[group.rank_in_group])
    output = output if tokens.out_RD is None else tokens.out_RD.copy_(output)
    return dispatched.combine(output).wait(), counts


def compute(rows_RD: Tensor, counts: list[int], experts: list[int]) -> Tensor:
    """Return the experts' outputs, with NaN in the spare rows."""
    output = torch.full_like(rows_RD, torch.nan)
    output[: sum(counts)] = rows_RD[: sum(counts)]
    for expert, rows in zip(experts, output[: sum(counts)].split(counts), strict=True):
        rows.copy_(expert_output(rows, expert))
    return output


def expected(case: Case, rank: int) -> Tensor:
    """Return weighted outputs, token by token, added in float32 in the order of k. Padding adds 0."""
    hidden_TD, weights_TK = case.tokens(rank)
    total_TD = torch.zeros_like(hidden_TD)
    for token, experts in enumerate(case.experts[rank]):
        parts = [
            (expert_output(hidden_TD[token], expert) if expert >= 0 else torch.zeros(WIDTH)).float() * weight
            for expert, weight in zip(experts, weights_TK[token], strict=True)
        ]
        total_TD[token] = functools.reduce(torch.add, parts)
    return total_TD


def bytes_of(x: Tensor) -> tuple[str, torch.Size, list[int]]:
    return str(x.dtype), x.shape, x.contiguous().view(torch.uint8).flatten().tolist()


def check_counts(case: Case, counts: list[list[int]]) -> None:
    """Check that each pair was computed once, by a copy of its expert."""
    chosen = [expert for tokens in case.experts for experts in tokens for expert in experts]
    for logical, copies in enumerate(case.placement.physical_of_logical):
        flat = [count for of_rank in counts for count in of_rank]
        assert sum(flat[copy] for copy in copies) == chosen.count(logical)


ONE_RANK = [[0, 1, 2, 3]]
TWO_RANKS = [[0, 1], [2, 3]]
UNEVEN = [[2], [], [0, 3, 1]]
COPIES = [[0, 1], [0, 2], [3, 0]]
CASES = {
    "one rank": Case(ONE_RANK, 4, [[[0, 3], [1, 0]]], 2),
    "all tokens to one expert": Case(TWO_RANKS, 4, [[[2]] * 7, [[2]] * 5], 1),
    "all experts of a token on one rank": Case(TWO_RANKS, 4, [[[0, 1], [3, 2]], [[1, 0]]], 2, "bfloat16"),
    "a rank without tokens": Case(TWO_RANKS, 4, [[], [[0, 3], [2, 1]]], 2),
    "one token": Case(TWO_RANKS, 4, [[], [[0, 3]]], 2, "bfloat16"),
    "one token for the other rank": Case(TWO_RANKS, 4, [[[3, 2]], []], 2),
    "no tokens at all": Case(TWO_RANKS, 4, [[], []], 2),
    "tokens on the last of four ranks": Case([[0], [1], [2], [3]], 4, [[], [], [], [[1, 2, 0]]], 3),
    "padding": Case(TWO_RANKS, 4, [[[-1, -1], [0, 3], [-1, -1]], [[-1, -1]]], 2, "bfloat16"),
    "padding in a pair": Case(TWO_RANKS, 4, [[[-1, 2], [0, -1]], [[1, 0]]], 2),
    "a rank without experts": Case(UNEVEN, 4, [[[0, 1]], [[2, 3], [3, 0]], [[1, 2]]], 2),
    "copies": Case(COPIES, 4, [[[0, 1], [0, 3]], [[0, 2]], [[3, 0], [0, 1], [2, 0]]], 2, "bfloat16"),
    "eight of eight": Case([[0, 5, 6], [1], [2, 3, 4, 7]], 8, [[[*range(8)]], [], [[*range(7, -1, -1)]] * 3], 8),
}


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("dispatcher", DISTRIBUTED)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cases(case: Case, dispatcher: str, is_small: bool) -> None:
    check(case, dispatcher, is_small)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw experts with copies on any ranks, and tokens of which some are padding."""
    num_ranks, num_logical = draw(st.integers(1, 5)), draw(st.integers(1, 10))
    chance = random.Random(draw(st.integers(0, 2**32)))
    slots = [*range(num_logical), *chance.choices(range(num_logical), k=draw(st.integers(0, 6)))]
    logical_of_slot: list[list[int]] = [[] for _ in range(num_ranks)]
    for logical in chance.sample(slots, len(slots)):
        logical_of_slot[chance.randrange(num_ranks)].append(logical)
    top_k = draw(st.integers(1, min(8, num_logical)))
    favoured = draw(st.integers(top_k, num_logical))  # the other experts get no tokens
    padding = draw(st.sampled_from([0.0, 0.3]))
    experts = []
    for _ in range(num_ranks):
        chosen = [chance.sample(range(favoured), top_k) for _ in range(draw(st.integers(0, 6)))]
        experts.append([[-1 if chance.random() < padding else expert for expert in of_one] for of_one in chosen])
    return Case(logical_of_slot, num_logical, experts, top_k, draw(st.sampled_from(["float32", "bfloat16"])))


@given(cases(), st.sampled_from(DISTRIBUTED), st.booleans())
@settings(max_examples=250, deadline=None, derandomize=True)
def test_any_case(case: Case, dispatcher: str, is_small: bool) -> None:
    check(case, dispatcher, is_small)


def of_size(is_small: bool) -> Any:
    """Make every step small, or none."""
    return limited_to(2**19 if is_small else -1)


def limited_to(max_bytes: int) -> Any:
    """Change the size of the largest small step in both of its forms."""
    limits = {name: StepLimits(max_bytes, 2**26) for name in ("ROWS_OF_PAIRS", "SUMS_OF_RANKS")}
    return mock.patch.multiple(allgather, **limits)


def check(case: Case, name: str, is_small: bool) -> None:
    def serve_rank(group: ThreadGroup) -> tuple[Tensor, list[int], list[Record], int]:
        dispatcher = make_dispatcher(name, group, case)
        output_TD, counts = serve(group, case, dispatcher)
        return output_TD, counts, group.records, group.num_bytes_sent

    with of_size(is_small):
        ranks = run(case.num_ranks, serve_rank)
    for rank, (output_TD, _, records, _) in enumerate(ranks):
        assert bytes_of(output_TD) == bytes_of(expected(case, rank))
        assert [(r.operation, r.dtype) for r in records] == [(r.operation, r.dtype) for r in ranks[0][2]]
    check_counts(case, [counts for _, counts, _, _ in ranks])
    by_rank = [records for _, _, records, _ in ranks]
    if name == "shared_memory" and not is_small:
        check_bytes_read(case, sum(num_bytes for _, _, _, num_bytes in ranks))
    if is_small:
        assert [record.operation for record in by_rank[0]] == ["all_gather", "reduce_scatter"]
        check_that_each_pair_has_one_term(by_rank)
    else:
        check_traffic(case, name, by_rank)


@given(cases())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_sums_of_ranks(case: Case) -> None:
    """Ranks add their own outputs of each token and round, then these sums: a row for each token, and no byte more.

    A row is what the routing takes, rounded up to 32 bytes, and the hidden state.
    """
    with of_size(True):
        ranks = run(case.num_ranks, lambda group: serve_and_record(group, case))
    check_counts(case, [counts for _, counts, _ in ranks])
    num_tokens = sum(map(len, case.experts))
    item_bytes = getattr(torch, case.dtype).itemsize
    for rank, (output_TD, _, records) in enumerate(ranks):
        first, second = records
        assert (first.operation, second.operation) == ("all_gather", "reduce_scatter")
        assert first.row_shape[0] * item_bytes == math.ceil(12 * case.top_k / 32) * 32 + WIDTH * item_bytes
        assert second.row_shape == (WIDTH,)
        assert sum(map(len, second.sent)) == num_tokens
        exact_TD, terms_TD = in_float64(case, rank)
        step = torch.finfo(output_TD.dtype).eps / 2
        # A sum of a rank is rounded once and at most the sum of magnitudes, as is the sum of these sums. In float32,
        # each addition and product rounds too.
        num_roundings = 2 if output_TD.dtype == torch.bfloat16 else 2 * case.top_k + case.num_ranks
        assert ((output_TD.double() - exact_TD).abs() <= 1.01 * num_roundings * step * terms_TD).all()


def serve_and_record(group: ThreadGroup, case: Case) -> tuple[Tensor, list[int], list[Record]]:
    output_TD, counts = serve(group, case, make_dispatcher("allgather", group, case, keeps_bytes=False))
    return output_TD, counts, group.records


def in_float64(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """Return the weighted outputs of a rank's tokens, and the sums of their magnitudes."""
    hidden_TD, weights_TK = case.tokens(rank)
    terms_TKD = torch.zeros(len(hidden_TD), case.top_k, WIDTH, dtype=torch.float64)
    for token, experts in enumerate(case.experts[rank]):
        for k, expert in enumerate(experts):
            if expert >= 0:
                terms_TKD[token, k] = expert_output(hidden_TD[token], expert).double() * weights_TK[token, k]
    return terms_TKD.sum(1), terms_TKD.abs().sum(1)


def check_bytes_read(case: Case, num_bytes: int) -> None:
    """Check that each pair for another rank was read there, and its output back. With copies, at most so."""
    held = [set(of_one) for of_one in case.logical_of_slot]
    num_away = sum(
        expert >= 0 and expert not in held[rank]
        for rank, tokens in enumerate(case.experts)
        for experts in tokens
        for expert in experts
    )
    num_pairs = sum(expert >= 0 for tokens in case.experts for experts in tokens for expert in experts)
    most = num_pairs if sum(case.placement.num_slots) > case.num_logical else num_away
    row_bytes = WIDTH * getattr(torch, case.dtype).itemsize
    assert 2 * num_away * row_bytes <= num_bytes <= 2 * most * row_bytes


def check_that_each_pair_has_one_term(by_rank: list[list[Record]]) -> None:
    """Check that the reduce-scatter adds only one non-zero term, so that nothing is rounded."""
    terms = torch.stack([torch.cat(records[-1].sent).ne(0).any(dim=1) for records in by_rank])
    assert terms.sum(0).le(1).all()


def check_traffic(case: Case, name: str, by_rank: list[list[Record]]) -> None:
    """Check the rows sent: hidden states once to each rank that needs them or to all, outputs once for each pair."""
    operations = [record.operation for record in by_rank[0]]
    if name == "shared_memory":
        assert operations == ["all_gather", "all_gather"]
        for routing, nothing in by_rank:
            assert routing.dtype == torch.int64
            assert not any(map(len, nothing.sent))
        return
    num_pairs = sum(expert >= 0 for tokens in case.experts for experts in tokens for expert in experts)
    assert sum(len(sent) for records in by_rank for sent in records[-1].sent) == num_pairs
    if name == "allgather":
        assert operations == ["all_gather", "all_to_all"]
        return
    assert operations == ["all_gather", "all_to_all", "all_to_all"]
    firsts = case.placement.first_physical
    physical = [set(range(first, first + n)) for first, n in zip(firsts, case.placement.num_slots, strict=True)]
    for source, (routing, rows, _) in enumerate(by_rank):
        chosen = routing.sent[0].tolist()
        hidden_TD, _ = case.tokens(source)
        for held, sent in zip(physical, rows.sent, strict=True):
            needed = torch.tensor([bool(held & set(experts)) for experts in chosen], dtype=torch.bool)
            assert torch.equal(sent, hidden_TD[needed])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@given(case=cases())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_slices_of_experts_add_up_to_whole_ones(dtype: str, case: Case) -> None:
    """A slice yields a part of an expert's output; the parts are powers of two, which have no rounding of their own."""
    case = dataclasses.replace(case, dtype=dtype)
    placement, context = Placement.sliced(case.num_logical, case.num_ranks), cpu_context(getattr(torch, dtype))
    adds_pairs = context.is_batch_invariant  # in float32 and bfloat16

    def serve_rank(group: ThreadGroup) -> tuple[Tensor, list[int], list[Record]]:
        dispatcher = TorchDispatchers("allgather", cast(Any, group), context).make(placement)
        hidden_TD, weights_TK = case.tokens(group.rank_in_group)
        routing = Routing(case.experts_TK(group.rank_in_group), weights_TK)
        dispatched = dispatcher.dispatch(hidden_TD, routing, case.step).wait()
        tokens = dispatched.tokens
        assert isinstance(tokens, PackedTokens)
        counts = tokens.groups.counts_e.tolist()
        output_RD = compute(tokens.rows_RD, counts, [*range(case.num_logical)])
        exponent = min(group.rank_in_group + 1, case.num_ranks - 1)  # the parts of all ranks are 1 together
        partial_RD = (output_RD.float() if adds_pairs else output_RD) * 2.0**-exponent
        return dispatched.combine(partial_RD).wait(), counts, group.records

    chosen = [expert for tokens in case.experts for experts in tokens for expert in experts]
    for rank, (output_TD, counts, records) in enumerate(run(case.num_ranks, serve_rank)):
        if adds_pairs and dtype == "bfloat16":  # sums of parts are exact in float32
            assert bytes_of(output_TD) == bytes_of(expected(case, rank))
        else:
            tolerance = 1e-5 if dtype == "float32" else 2e-3 * case.num_ranks  # each rank rounds its sum
            torch.testing.assert_close(output_TD, expected(case, rank), rtol=tolerance, atol=tolerance)
        assert counts == [chosen.count(expert) for expert in range(case.num_logical)]
        if case.num_ranks > 1:
            assert [record.operation for record in records] == ["all_gather", "reduce_scatter"]


def test_no_rank_overwrites_shared_rows_that_another_reads() -> None:
    """Ranks that are late at any place of a layer get the rows of that layer, whatever the others do meanwhile."""
    cases = [case for case in CASES.values() if case.num_ranks == 2 and case.dtype == "float32"]

    def serve_rank(group: ThreadGroup) -> None:
        late = random.Random(group.rank_in_group)
        dispatcher = cast(DispatcherBySize, make_dispatcher("shared_memory", group, cases[0]))
        exchange = dispatcher.small.exchange
        pairs = exchange.pairs

        def gather(*arguments: Any) -> Tensor:
            time.sleep(late.choice([0, 0.01]))
            return pairs.gather(*arguments)

        def weighted_sum(*arguments: Any) -> Tensor:
            time.sleep(late.choice([0, 0.01]))
            return pairs.weighted_sum(*arguments)

        exchange.pairs = cast(PairKernels, SimpleNamespace(sort=pairs.sort, gather=gather, weighted_sum=weighted_sum))
        for case in cases * 10:
            output_TD, _ = serve(group, case, dispatcher)
            assert bytes_of(output_TD) == bytes_of(expected(case, group.rank_in_group))

    with of_size(False):
        run(2, serve_rank)


def test_local_with_copies_and_padding() -> None:
    case = Case([[0, 1, 0, 2]], 3, [[[0, 1], [-1, -1], [0, 2], [1, -1]]], 2, "bfloat16")
    output_TD, counts = serve(groups_of_one_rank().ep, case, make_dispatcher("local", None, case))
    assert bytes_of(output_TD) == bytes_of(expected(case, 0))
    assert counts == [2, 2, 0, 1]  # tokens 0 and 2 use the first copy; token 1 is padding
    assert not output_TD[1].any()


def test_copies_take_turns() -> None:
    """Copies take turns over all ranks, also if each rank has a single token, as in decode steps."""
    for tokens in ([[[0]] * 8, [], [], []], [[[0]]] * 4, [[[0]] * 3, [[0]], [[0]] * 4, []]):
        case = Case([[0], [0, 1], [0], [0]], 2, tokens, 1)
        ranks = run(4, lambda group, case=case: serve(group, case, make_dispatcher("all_to_all", group, case)))
        num_each = sum(map(len, tokens)) // 4
        assert [counts for _, counts in ranks] == [[num_each], [num_each, 0], [num_each], [num_each]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_which_steps_are_small(dtype: torch.dtype) -> None:
    """The tokens of all ranks count, so that ranks agree."""
    with limited_to(2**12):
        dispatcher = AllGatherDispatcher(
            cast(Any, ThreadGroup(Table(2), 0)), CASES["one token"].placement, cpu_context()
        )
    most = 2**12 // (4 * WIDTH * dtype.itemsize)
    routing = Routing(torch.zeros(3, 4, dtype=torch.int64), torch.ones(3, 4))
    for others, is_small in ((0, True), (most - 3, True), (most - 2, False)):
        step = cast(StepInputs, StepOf((3, others)))
        assert dispatcher.is_small(torch.zeros(3, WIDTH, dtype=dtype), routing, step) == is_small


class HostWaits(TorchFunctionMode):
    """Records operations that would make the host wait for a GPU."""

    WAITING = frozenset(
        {"tolist", "item", "numpy", "cpu", "__int__", "__bool__", "__index__"}
        | {"nonzero", "unique", "masked_select", "repeat_interleave", "bincount"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        is_mask = name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool
        if name in self.WAITING or is_mask:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


class PairsOfGpu:
    """Pair kernels as on a GPU, where only `sort` makes the host wait."""

    def __init__(self, pairs: PairKernels) -> None:
        self.pairs = pairs

    def __getattr__(self, name: str) -> Any:
        assert name != "sort", "the host waits for the number of pairs"
        operation = getattr(self.pairs, name)

        def launch(*arguments: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return operation(*arguments)

        return launch


@pytest.mark.parametrize(("is_small", "keeps_bytes"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("name", ANYWHERE)
@pytest.mark.parametrize("case_name", ["copies", "padding", "a rank without tokens"])
def test_host_waits_once(case_name: str, name: str, is_small: bool, keeps_bytes: bool) -> None:
    """The host waits once in the dispatch of a large step, and never in a small one."""
    case = CASES[case_name]

    def serve_rank(group: ThreadGroup) -> tuple[list[str], Tensor]:
        dispatcher = cast(Any, make_dispatcher(name, group, case, keeps_bytes))
        exchange = getattr(dispatcher, "small", dispatcher).exchange
        exchange.pairs = PairsOfGpu(exchange.pairs)
        hidden_TD, weights_TK = case.tokens(group.rank_in_group)
        routing = Routing(case.experts_TK(group.rank_in_group), weights_TK)
        with HostWaits() as mode:
            dispatched = dispatcher.dispatch(hidden_TD, routing, case.step).wait()
        counts = dispatched.tokens.groups.counts_e.tolist()
        output = compute(dispatched.tokens.rows_RD, counts, case.logical_of_slot[group.rank_in_group])
        with mode:
            output_TD = dispatched.combine(output).wait()
        return mode.names, output_TD

    with of_size(is_small):
        for rank, (names, output_TD) in enumerate(run(case.num_ranks, serve_rank)):
            assert names == ([] if is_small else ["tolist"])
            if keeps_bytes:
                assert bytes_of(output_TD) == bytes_of(expected(case, rank))


def test_tensors_of_captured_steps_stay_alive() -> None:
    """Graphs of small steps are replayed after larger steps, so the memory that they read must not be freed."""
    case = CASES["one rank"]
    dispatcher = AllGatherDispatcher(groups_of_one_rank().ep, case.placement, cpu_context())

    def address(num_tokens: int) -> int:
        hidden_TD, routing = (
            torch.ones(num_tokens, WIDTH),
            Routing(torch.zeros(num_tokens, 2, dtype=torch.int64) + torch.arange(2), torch.ones(num_tokens, 2)),
        )
        step = cast(StepInputs, StepOf((num_tokens,)))
        dispatched = dispatcher.dispatch(hidden_TD, routing, step).wait()
        assert isinstance(dispatched.tokens, PackedTokens)
        returned = dispatched.combine(dispatched.tokens.rows_RD)
        assert isinstance(returned, allgather.SmallOutput)
        assert returned.pairs_p.tolist() == [*range(2 * num_tokens)]
        return returned.pairs_p.data_ptr()

    first = address(3)
    assert address(500) != first
    assert address(3) == first


@pytest.mark.parametrize("name", ANYWHERE)
def test_capturable_steps(name: Any) -> None:
    """A step is captured if the rows of all pairs, for which padded steps have room, are few enough."""
    config = MoESpec(router=RouterSpec(num_experts=4, top_k=2), expert_width=6)
    placement = CASES["one token"].placement
    group = cast(Any, ThreadGroup(Table(2), 0))
    for keeps_bytes, max_bytes in ((True, 2**26), (False, 2**29)):
        context = make_dispatchers(name, group, torch.bfloat16, keeps_bytes).context
        layer = MoELayer(config, 64, placement, TorchDispatchers(name, group, context), context)
        most = max_bytes // (2 * 64 * 2)
        assert layer.is_capturable((most // 2, most // 2))
        assert not layer.is_capturable((most // 2, most // 2 + 1))
        one = TorchDispatchers("local", groups_of_one_rank().ep, context)
        alone = MoELayer(config, 64, Placement.even(4, 1), one, context)
        assert alone.is_capturable((2 * most,))


@pytest.mark.parametrize("max_num_seqs", [256, 512])
@pytest.mark.parametrize(
    ("num_ranks", "top_k", "hidden_size"),
    [(8, 8, 7168), (8, 2, 4096), (8, 8, 4096), (8, 8, 2048), (8, 4, 2880)],
    ids=["DeepSeek-V3", "Mixtral-8x7B", "Qwen3-235B", "Qwen3-30B", "gpt-oss"],
)
def test_graphs_reach_all_sequences(num_ranks: int, top_k: int, hidden_size: int, max_num_seqs: int) -> None:
    """Between the GPUs of a host, decode steps of all sizes are graphs, also with a replica on each rank."""
    case = Case([[rank] for rank in range(num_ranks)], num_ranks, [[] for _ in range(num_ranks)], top_k)
    group = ThreadGroup(Table(num_ranks), 0)
    dispatcher = make_dispatcher("all_to_all", group, case, keeps_bytes=False)

    def is_capturable(tokens_per_rank: Sequence[int]) -> bool:
        return dispatcher.is_capturable(tokens_per_rank, top_k * hidden_size * 2)

    for mesh in (Mesh(tp=1, dp=num_ranks), Mesh(tp=2, dp=num_ranks // 2)):
        assert max(graph_sizes(max_num_seqs, mesh, is_capturable)) == max_num_seqs


def run_of(*sizes: int) -> Run:
    return Run(cast(Any, StepOf(sizes)), {})


@pytest.mark.parametrize("dispatcher", DISTRIBUTED)
@pytest.mark.parametrize(
    "placement",
    [Placement.even(10, 4), Placement.even(10, 4, 5), eplb([*range(10)], 4, 13)],
    ids=["uneven", "redundant", "by load"],
)
def test_layer(dispatcher: Any, placement: Placement) -> None:
    """The whole layer, with experts and shared experts, equals that of one rank within rounding."""
    torch.manual_seed(0)
    config = MoESpec(
        router=RouterSpec(num_experts=10, top_k=3, is_normalized=True),
        expert_width=6,
        has_expert_bias=True,
        shared=SharedExpertsSpec(width=7, is_gated=True),
    )
    context = cpu_context()
    whole = MoELayer(
        config, WIDTH, Placement.even(10, 1), TorchDispatchers("local", groups_of_one_rank().ep, context), context
    )
    allocate_weights(whole)
    for weight in whole.parameters():
        weight.normal_(0.0, 0.5)
    hidden = torch.randn(13, WIDTH).split([5, 0, 1, 7])
    expected = whole(torch.cat(hidden), run_of(13)).split([5, 0, 1, 7])

    def serve_rank(group: Any) -> Tensor:
        layer = MoELayer(config, WIDTH, placement, make_dispatchers(dispatcher, group), context)
        allocate_weights(layer)
        slots = list(placement.logical_of_slot[group.rank_in_group])
        assert layer.experts.gate_up.open.weight_eOI.shape == (len(slots), 12, WIDTH)
        given = whole.state_dict()
        layer.load_state_dict({n: w[slots] if n.startswith("experts.") else w for n, w in given.items()})
        with torch.inference_mode():
            return layer(hidden[group.rank_in_group], run_of(5, 0, 1, 7))

    for one, other in zip(run(4, serve_rank), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_on_processes(ranks: Ranks, num_ranks: int) -> None:
    """Dispatch in processes, over the groups that serve, with the order of collectives checked."""
    chosen = [asdict(case) for case in CASES.values() if case.num_ranks == num_ranks]
    assert chosen
    for mismatches in ranks.run(num_ranks, "test_dispatch:mismatches_on_this_rank", cases=chosen):
        assert mismatches == []


def mismatches_on_this_rank(place: Place, cases: list[dict[str, Any]]) -> list[str]:
    groups = join(place, timeout_s=50.0, check_order=True)
    found = []
    for case in (Case(**fields) for fields in cases):
        for name in DISTRIBUTED:
            output_TD, _ = serve(groups.ep, case, make_dispatcher(name, groups.ep, case))
            if bytes_of(output_TD) != bytes_of(expected(case, place.rank)):
                found.append(f"{name}: {case}")
    groups.leave("done")
    return found
