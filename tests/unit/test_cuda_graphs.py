"""CUDA graphs: which graph a step replays, its padding, and the order of captures. A fake capture stands for a GPU."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from build_contexts import cpu_context
from chunks import make_chunk
from gpu_stand_ins import captured
from torch import Tensor

from moeserve.distributed.groups import groups_of_one_rank
from moeserve.distributed.mesh import Mesh
from moeserve.kv.rules import CacheRules, KeepAll, KeepState, KeepWindow
from moeserve.ops import side_stream
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import Intent, agree, make_row
from moeserve.step_inputs import StepInputs
from moeserve.worker import cuda_graphs
from moeserve.worker.cuda_graphs import CudaGraphs, TorchCapture, graph_sizes, memory_of_graphs
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.overlap import OverlapLimits
from moeserve.worker.rank_context import RankContext
from moeserve.worker.request_table import ChunkStates, RequestTable
from moeserve.worker.step_runner import StepOutputs

ONE_RANK = Mesh(tp=1, dp=1)
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())


class FakeDispatchers:
    def __init__(self) -> None:
        self.prepared: list[Sequence[int]] = []  # tokens of each rank

    def prepare(self, tokens_per_rank: Sequence[int]) -> None:
        self.prepared.append(tokens_per_rank)


class FakeModel:
    """Returns tokens, positions and context lengths as hidden states; keeps every step that it runs."""

    def __init__(self) -> None:
        self.context = cpu_context()
        self.embedding = torch.nn.Linear(1, 1)
        self.head = None
        self.groups = groups_of_one_rank()
        self.dispatchers = FakeDispatchers()
        self.steps: list[StepInputs] = []

    def __call__(self, step: StepInputs, caches: list[Any]) -> Tensor:
        self.steps.append(step)
        return torch.stack([step.token_ids, step.positions, step.context_lens.long()], dim=1).float()


class FakeCapture:
    def __init__(self) -> None:
        self.captured: list[int] = []  # sizes
        self.replayed: list[int] = []

    def __call__(self, run: Callable[[], StepOutputs]) -> tuple[Callable[[], None], StepOutputs]:
        replay, outputs = captured(run)
        size = len(outputs.hidden_TD)
        self.captured.append(size)

        def counted_replay() -> None:
            self.replayed.append(size)
            replay()

        return counted_replay, outputs


class Rank:
    """A runner whose steps are replayed from graphs of some sizes."""

    def __init__(
        self,
        sizes: Sequence[int],
        mesh: Mesh = ONE_RANK,
        tp_rank: int = 0,
        overlap: OverlapLimits = OverlapLimits(),  # noqa: B008 - frozen
        rules: CacheRules = CacheRules(),  # noqa: B008 - frozen
    ) -> None:
        self.model, self.capture = FakeModel(), FakeCapture()
        context = RankContext(
            mesh=mesh,
            tp_rank=tp_rank,
            max_blocks=4,
            device=torch.device("cpu"),
            overlap=overlap,
            rules=rules,
        )
        model = cast(Any, self.model)
        self.graphs = CudaGraphs(model, [], context, sizes, self.capture)
        self.table = RequestTable(8, 4, len(rules.tables))
        self.runner = ModelRunner(model, context, self.graphs, self.table)

    def inputs(self, num_tokens: int, tokens_of_replicas: tuple[int, ...], padded_to: int | None = None) -> StepInputs:
        """Return a decode step of this rank. Request r has token 10 + r at position r."""
        greedy = RequestParams(temperature=0)
        chunks = [
            make_chunk(self.table, row, [10 + row], row, [row, row + 1], params=greedy)._replace(
                states=ChunkStates(store=20 + row)
            )
            for row in range(num_tokens)
        ]
        return self.runner.build_inputs(chunks, tokens_of_replicas, padded_to)


@pytest.mark.parametrize(
    ("max_num_seqs", "tp", "largest_share", "sizes"),
    [
        (1, 1, 999, (1,)),
        (3, 1, 999, (1, 2, 3)),
        (20, 1, 999, (1, 2, 4, 8, 16, 20)),
        (10_000, 1, 999, (1, 2, 4, 8, *range(16, 128, 8), *range(128, 513, 32))),
        (19, 4, 999, (4, 8, 16, 20)),
        (3, 8, 999, (8,)),
        (20, 2, 4, (2, 4, 8)),
    ],
)
def test_sizes_of_graphs(max_num_seqs: int, tp: int, largest_share: int, sizes: tuple[int, ...]) -> None:
    """The ranks of a replica have equal shares of each size, and only shares that can be captured."""
    assert graph_sizes(max_num_seqs, Mesh(tp=tp, dp=2), lambda shares: max(shares) <= largest_share) == sizes


def test_graphs_are_captured_from_the_largest_and_chosen_from_the_smallest() -> None:
    """Replicas agree on one size, with fewer tokens or none. A prompt on any replica prevents a replay."""
    rank = Rank((1, 2, 4, 8))
    assert rank.capture.captured == [8, 4, 2, 1]

    def padded_size(*tokens: int, is_decode_only: bool = True) -> int | None:
        intents = [Intent(num_tokens=num, is_decode_only=is_decode_only or num < 3) for num in tokens]
        rows = [make_row(intent, number=0, replica=replica) for replica, intent in enumerate(intents)]
        return rank.graphs.padded_size(agree(rows, number=0, num_replicas=len(rows)))

    assert [padded_size(count) for count in range(10)] == [None, 1, 2, 4, 4, 8, 8, 8, 8, None]
    assert padded_size(0, 3, 1) == 4
    assert padded_size(0, 3, 1, is_decode_only=False) is None


def test_inputs_of_a_replay() -> None:
    """They are padded, and lie in the same memory in each step."""
    rank = Rank((2, 4), rules=CacheRules((KeepAll(), KeepWindow(7, 16)), KeepState(4)))
    addresses = {step.token_ids.data_ptr() for step in rank.model.steps}
    for number, num_tokens in enumerate((4, 1, 3, 0), start=1):
        result_TD = rank.graphs(rank.inputs(num_tokens, (num_tokens,), 4)).hidden_TD
        assert rank.capture.replayed == [4] * number
        seen, missing = rank.model.steps[-1], 4 - num_tokens
        addresses.add(seen.token_ids.data_ptr())
        assert seen.padding is not None
        assert seen.padding.tolist() == [False] * num_tokens + [True] * missing
        assert seen.token_ids.tolist() == [10 + row for row in range(num_tokens)] + [0] * missing
        assert seen.cache_slots.tolist() == [row * 16 + row for row in range(num_tokens)] + [-1] * missing
        assert seen.context_lens.tolist() == [row + 1 for row in range(num_tokens)] + [0] * missing
        assert seen.row_starts.tolist() == [0, 1, 2, 3, 4]
        assert seen.block_table[:num_tokens, 0].tolist() == list(range(num_tokens))
        assert seen.states is not None
        assert seen.states.store_S.tolist() == [20 + row for row in range(num_tokens)] + [-1] * missing
        of_second = seen.of_group(1)
        assert of_second.cache_slots.tolist() == seen.cache_slots.tolist()
        assert of_second.block_table[:num_tokens, 0].tolist() == list(range(num_tokens))
        assert of_second.cache_slots.data_ptr() != seen.cache_slots.data_ptr()
        assert seen.max_rows_per_chunk == 1
        assert result_TD[:num_tokens, 0].tolist() == [10.0 + row for row in range(num_tokens)]
    assert len(addresses) == 1


def test_padding_is_divided_over_the_ranks_of_a_replica() -> None:
    mesh = Mesh(tp=2, dp=3)
    padding = []
    for tp_rank in range(2):
        rank = Rank((5,), mesh, tp_rank)
        step = rank.inputs(3, (3, 1, 0), 5)
        assert rank.model.steps[0].tokens_per_rank == step.tokens_per_rank == (2, 3) * 3
        assert step.padding is not None
        padding += step.padding[step.own_rows].tolist()
    assert padding == [False] * 3 + [True] * 2


def test_overlap_in_captured_steps() -> None:
    """Graphs of enough rows have halves, in the memory of their inputs; the number of tokens does not matter."""
    rank = Rank((2, 4), Mesh(tp=1, dp=2), overlap=OverlapLimits(decode=4))
    assert [len(step.halves) for step in rank.model.steps] == [2, 2, 0, 0]  # each is run and then captured
    rank.graphs(rank.inputs(3, (3, 1), 4))
    first, second = rank.model.steps[-1].halves
    assert [half.token_ids.tolist() for half in (first, second)] == [[10, 11], [12, 0]]
    assert [half.context_lens.tolist() for half in (first, second)] == [[1, 2], [3, 0]]
    assert [half.block_table[:, 0].tolist() for half in (first, second)] == [[0, 1], [2, 0]]
    assert first.row_starts.tolist() == second.row_starts.tolist() == [0, 1, 2]
    assert first.tokens_per_rank == second.tokens_per_rank == (2, 2)
    assert (first.rows_before, second.rows_before) == (0, 4)
    assert second.padding is not None
    assert second.padding.tolist() == [False, True]


def test_buffers_are_prepared_for_what_a_graph_dispatches() -> None:
    """The halves of a step may use DeepEP's low-latency kernels although the whole step would not."""
    rank = Rank((2, 6), Mesh(tp=1, dp=2), overlap=OverlapLimits(decode=4))
    for num_tokens, size in ((5, 6), (1, 2)):
        rank.graphs(rank.inputs(num_tokens, (num_tokens, 1), size))
    assert rank.model.dispatchers.prepared == [(3, 3), (2, 2)]


def test_garbage_is_collected_before_captures_and_not_within(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self

    num_frozen: list[int] = []
    dropped = weakref.ref(Node())
    run = FakeModel.__call__

    def counted_run(self: FakeModel, step: StepInputs, caches: list[Any]) -> Tensor:
        num_frozen.append(gc.get_freeze_count())
        return run(self, step, caches)

    monkeypatch.setattr(FakeModel, "__call__", counted_run)
    gc.disable()
    try:
        assert dropped() is not None
        Rank((1, 2))
        assert dropped() is None
        assert min(num_frozen) > 1000
    finally:
        gc.enable()
        gc.unfreeze()


def test_memory_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte for the largest, and 3 MiB per further one. What the first capture keeps is not counted."""
    free = [80 * 2**30]
    num_captures = 0

    class Graphs:
        def __init__(self, sizes: Sequence[int]) -> None:
            nonlocal num_captures
            num_captures += 1
            self.num_bytes = 2**30 + 3 * 2**20 * (len(sizes) - 1)
            free[0] -= self.num_bytes + (2**29 if num_captures == 1 else 0)

        def __del__(self) -> None:
            free[0] += self.num_bytes

    monkeypatch.setattr(cuda_graphs, "free_gpu_memory", lambda: free[0])
    assert memory_of_graphs(Graphs, (1, 2, 4, 8)) == 2**30 + 3 * 3 * 2**20
    assert memory_of_graphs(Graphs, (8,)) == 2**30
    assert memory_of_graphs(Graphs, ()) == 0
    assert free[0] == 80 * 2**30 - 2**29


class FakeStream:
    """Logs what it waits for and what runs in it."""

    log: ClassVar[list[str]] = []

    def __init__(self, name: str = "side") -> None:
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.log.append(f"into {self.name}")

    def __exit__(self, *error: object) -> None:
        self.log.append(f"out of {self.name}")


@pytest.fixture
def stream_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Log of all streams; the current one is "main"."""
    main = FakeStream("main")
    monkeypatch.setattr(FakeStream, "log", [])
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return FakeStream.log


def test_all_graphs_are_warmed_up_and_captured_in_one_stream(
    stream_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[object] = []

    class Graph:
        def replay(self) -> None:
            stream_log.append("replay")

        def pool(self) -> str:
            return "pool"

    def graph(graph: Graph, pool: object, stream: FakeStream) -> FakeStream:
        pools.append(pool)
        return stream

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)

    def run() -> Tensor:
        stream_log.append("run")
        return torch.ones(1)

    capture = TorchCapture(cast(Any, FakeStream("own")))
    warm_up = ["own waits for main", "into own", "run", "run", "out of own", "main waits for own"]
    for _ in range(2):
        replay, _ = capture(run)
        assert stream_log == [*warm_up, "into own", "run", "out of own"]
        stream_log.clear()
    assert pools == [None, "pool"]
    replay()
    assert stream_log == ["replay"]


def test_the_side_stream_waits_and_is_waited_for(stream_log: list[str]) -> None:
    side_stream_of_gpu = side_stream.CudaSideStream()
    pending = side_stream_of_gpu.start(lambda x: x + 1, torch.zeros(2))
    stream_log.append("meanwhile")
    assert pending.wait().tolist() == [1.0, 1.0]
    assert stream_log == ["side waits for main", "into side", "out of side", "meanwhile", "main waits for side"]
