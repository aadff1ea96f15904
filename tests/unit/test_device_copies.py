"""The host waits for a GPU once in each step: for the results of the step before. Events are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from gpu_stand_ins import captured
from planted_operations import plant
from torch import Tensor

from moeserve.distributed.groups import groups_of_one_rank
from moeserve.distributed.mesh import Mesh
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.ops import sampling as sampling_ops
from moeserve.ops.backend import REFERENCE
from moeserve.ops.sampling.interface import SamplingOperations
from moeserve.protocol import CacheStart, Registration, StepPlan
from moeserve.sampling_params import RequestParams
from moeserve.step_inputs import StepInputs
from moeserve.worker.cuda_graphs import CudaGraphs
from moeserve.worker.device_copies import GpuCopies
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.pending_step import PendingStep
from moeserve.worker.rank_context import RankContext
from moeserve.worker.request_table import UNKNOWN_TOKEN, RequestTable

CPU = torch.device("cpu")
VOCABULARY = 50
SIZES = (2, 4)


class Event:
    """Records what is done with events, in the order of all of them."""

    log: list[str]

    def record(self) -> None:
        self.log.append("record")

    def query(self) -> bool:
        self.log.append("query")
        return False

    def synchronize(self) -> None:
        self.log.append("synchronize")


class UnpinnedCopies(GpuCopies):
    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


@pytest.fixture(autouse=True)
def _greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the most likely tokens without reading settings on the host."""

    def greedy(right: SamplingOperations) -> SamplingOperations:
        return right._replace(choose_tokens=lambda scores_RV, *arguments: right.row_maximum(scores_RV))

    plant(monkeypatch, sampling_ops.TABLE, "reference", greedy)


class CountingModel:
    """After token t at position p, the most likely token is t + p + 1."""

    head = object()

    def __init__(self) -> None:
        self.groups = groups_of_one_rank()
        self.dispatchers = TorchDispatchers("local", self.groups.ep, cast(Any, None))
        self.context = type("Context", (), {"backend": REFERENCE, "block_size": 4})

    def __call__(self, step: StepInputs, caches: Any) -> Tensor:
        return (step.token_ids + step.positions + 1).float()[:, None]

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return -(torch.arange(VOCABULARY) - hidden_TD % VOCABULARY).abs()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(Event, "log", [], raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Event.log


@pytest.fixture
def no_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Tensor.__getitem__

    def checked(tensor: Tensor, key: Any) -> Tensor:
        assert not isinstance(key, list), "a list is copied to a GPU, and the host waits for that"
        return index(tensor, key)

    monkeypatch.setattr(Tensor, "__getitem__", checked)


class Rank:
    """Requests in slots 0, 1, ... that decode with graphs, after a step in which their prompts were computed."""

    def __init__(self, params: Sequence[RequestParams]) -> None:
        self.table = RequestTable(4, 8)
        context = RankContext(mesh=Mesh(tp=1, dp=1), tp_rank=0, max_blocks=8, device=CPU)
        model = cast(Any, CountingModel())
        self.runner = ModelRunner(model, context, CudaGraphs(model, [], context, SIZES, captured), self.table)
        self.runner.copies = UnpinnedCopies(self.table, CPU)
        self.slots = list(range(len(params)))
        self.prompts = [
            Registration(
                slot=slot,
                token_ids=[slot, slot + 1],
                num_prompt_tokens=2,
                cache=CacheStart([[7 * slot + block for block in range(7)]]),
                params=each,
                seed=slot,
                end_token_ids=[49],
            )
            for slot, each in enumerate(params)
        ]

    def start(self, position: int, length: int = 1, previous: PendingStep | None = None) -> PendingStep:
        size = len(self.slots)
        plan = StepPlan(
            step=0,
            slots=self.slots,
            starts=[position] * size,
            lengths=[length] * size,
            registrations=self.prompts if position == 0 else [],
        )
        padded_to = next(each for each in SIZES if each >= size) if position and length == 1 else None
        return self.runner.start(self.table.apply(plan), (length * size,), padded_to, previous)


def tokens(step: PendingStep) -> list[int | None]:
    return [result.token_ids[0] if result.token_ids else None for result in step.finish()]


def expected(slot: int, number: int) -> int:
    """Return the token that follows `number` sampled ones."""
    token = slot + 1
    for position in range(1, number + 2):
        token = (token + position + 1) % VOCABULARY
    return token


GREEDY, RANDOM = RequestParams(temperature=0), RequestParams(temperature=1.0)
# The bias keeps the most likely token, and so does a stop token that is not likely.
BIASED = RequestParams(temperature=1.0, logit_bias={0: -0.25, 2**40: 1.0})
BARRED = RequestParams(temperature=0, min_tokens=1000, max_tokens=None)
LOGPROBS = RequestParams(temperature=1.0, logprobs=3)


@pytest.mark.usefixtures("no_lists")
@pytest.mark.parametrize(
    "params",
    [[GREEDY] * 3, [GREEDY, RANDOM, GREEDY], [RANDOM] * 2, [BIASED, BARRED, LOGPROBS], [GREEDY, LOGPROBS] * 2],
)
def test_the_host_waits_for_the_step_before_only(params: list[RequestParams], log: list[str]) -> None:
    rank = Rank(params)
    running = rank.start(0, 2)
    for number in range(8):
        log.clear()
        following = rank.start(2 + number, previous=running)
        assert log == ["record"]
        assert tokens(running) == [expected(slot, number) for slot in rank.slots]
        assert tokens(running), "results can be read again"
        assert log == ["record", "synchronize"]
        running = following
    assert rank.table._requests[0].token_ids[-1] == UNKNOWN_TOKEN
    running.finish()
    assert rank.table._requests[0].token_ids == [0, 1, *(expected(0, number) for number in range(9))]


@pytest.mark.usefixtures("no_lists")
def test_a_part_of_a_prompt_is_not_waited_for(log: list[str]) -> None:
    rank = Rank([GREEDY] * 2)
    first = rank.start(0, 1)
    second = rank.start(1, previous=first)
    assert log == ["record"] * 2
    assert tokens(first) == [None] * 2
    assert tokens(second) == [expected(slot, 0) for slot in rank.slots]


def test_a_penalty_waits(log: list[str]) -> None:
    rank = Rank([GREEDY, RequestParams(temperature=0, repetition_penalty=1.1)])
    first = rank.start(0, 2)
    second = rank.start(2, previous=first)
    assert log == ["record", "synchronize", "record"]
    assert tokens(second) == [expected(slot, 1) for slot in rank.slots]


def test_graphs_share_the_memory_of_logits() -> None:
    model = cast(Any, CountingModel())
    context = RankContext(mesh=Mesh(tp=1, dp=1), tp_rank=0, max_blocks=8, device=CPU)
    memory: list[Tensor] = []

    def capture(run: Any) -> Any:
        replay, outputs = captured(run)
        assert outputs.logits_TV is not None
        memory.append(run().logits_TV)
        return replay, outputs

    CudaGraphs(model, [], context, (1, 2, 4), capture)
    assert [len(each) for each in memory] == [4, 2, 1]
    assert len({each.untyped_storage().data_ptr() for each in memory}) == 1
