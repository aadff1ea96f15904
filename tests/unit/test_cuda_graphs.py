"""Which graph a step plays, how it is padded, and in what order graphs are made: with a recorder in place of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from moeserve.distributed.group import single
from moeserve.distributed.mesh import Mesh
from moeserve.moe.dispatch.factory import TorchDispatchers
from moeserve.ops import side_stream
from moeserve.protocol import Chunk, SampleSpec, StepPlan
from moeserve.sampling_params import SamplingParams
from moeserve.scheduling.lockstep import Agreement, Intent, Lockstep, alone
from moeserve.step_inputs import StepInputs
from moeserve.worker import cuda_graphs
from moeserve.worker.cuda_graphs import CudaGraphs, TorchCapture, graph_sizes, memory_of_graphs
from moeserve.worker.model_runner import ModelRunner

WIDTH = 3
MAX_BLOCKS = 4


class Model:
    """Gives each row numbers that tell where it came from; sees every step that it is given."""

    def __init__(self) -> None:
        self.embedding = torch.nn.Linear(1, 1)
        self.groups = single()
        self.dispatchers = TorchDispatchers("local", self.groups.ep, torch.device("cpu"))
        self.steps: list[StepInputs] = []

    def __call__(self, step: StepInputs, caches: list[Any]) -> Tensor:
        self.steps.append(step)
        return torch.stack([step.token_ids, step.positions, step.context_lens.long()], dim=1).float()


class Recorder:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.played: list[int] = []

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = run().clone()
        self.sizes.append(len(result))

        def play() -> None:
            self.played.append(len(result))
            result.copy_(run())

        return play, result


ONE_RANK = Mesh(tp=1, dp=1)


def graphs_of(sizes: Sequence[int], mesh: Mesh = ONE_RANK, tp_rank: int = 0) -> tuple[CudaGraphs, Any, Recorder]:
    model, recorder = Model(), Recorder()
    return CudaGraphs(cast(Any, model), [], mesh, tp_rank, MAX_BLOCKS, sizes, recorder), model, recorder


def decode_plan(num_tokens: int) -> StepPlan:
    return StepPlan(
        step=0,
        chunks=[
            Chunk(
                token_ids=[10 + row],
                start=row,
                block_ids=[row, row + 1],
                sample=SampleSpec(params=SamplingParams(temperature=0), seed=0, position=0),
            )
            for row in range(num_tokens)
        ],
    )


def runner(graphs: CudaGraphs, model: Any, mesh: Mesh = ONE_RANK, tp_rank: int = 0) -> ModelRunner:
    return ModelRunner(model, graphs.caches, mesh, 16, "cpu", forward=graphs, tp_rank=tp_rank)


@pytest.mark.parametrize(
    ("max_num_seqs", "tp", "sizes"),
    [
        (1, 1, (1,)),
        (3, 1, (1, 2, 3)),
        (8, 1, (1, 2, 4, 8)),
        (20, 1, (1, 2, 4, 8, 16, 20)),
        (10_000, 1, (1, 2, 4, 8, *range(16, 128, 8), *range(128, 513, 32))),
        (8, 2, (2, 4, 8)),
        (19, 4, (4, 8, 16, 20)),
        (3, 8, (8,)),
    ],
)
def test_sizes_of_graphs(max_num_seqs: int, tp: int, sizes: tuple[int, ...]) -> None:
    """The ranks of a replica have equal shares of each."""
    assert graph_sizes(max_num_seqs, Mesh(tp=tp, dp=2), lambda tokens_per_rank: True) == sizes


def test_sizes_that_graphs_cannot_hold() -> None:
    """Steps of those sizes run layer by layer."""
    seen: list[tuple[int, ...]] = []

    def is_capturable(tokens_per_rank: Sequence[int]) -> bool:
        seen.append(tuple(tokens_per_rank))
        return sum(tokens_per_rank) <= 24

    assert graph_sizes(20, Mesh(tp=2, dp=3), is_capturable) == (2, 4, 8)
    assert seen == [(share,) * 6 for share in (1, 2, 4, 8, 10)]
    graphs, _, recorder = graphs_of(())
    assert recorder.sizes == []
    assert graphs.size_for(alone(0, 1, is_decode_only=True)) is None


def test_the_largest_is_made_first() -> None:
    _, _, recorder = graphs_of((1, 2, 4, 8))
    assert recorder.sizes == [8, 4, 2, 1]


def test_a_step_plays_the_least_graph_that_holds_it() -> None:
    graphs, _, _ = graphs_of((1, 2, 4, 8))

    def size(num_tokens: int, is_decode_only: bool = True) -> int | None:
        return graphs.size_for(alone(0, num_tokens, is_decode_only=is_decode_only))

    assert [size(count) for count in range(10)] == [None, 1, 2, 4, 4, 8, 8, 8, 8, None]
    assert size(3, is_decode_only=False) is None


def test_replicas_agree_on_one_size() -> None:
    """Whoever has fewer tokens, or none, pads to the same; a prompt anywhere, and nobody plays a graph."""
    graphs, _, _ = graphs_of((1, 2, 4, 8))

    def sizes(*intents: Intent) -> set[int | None]:
        sides = [Lockstep(rank=rank, num_replicas=len(intents)) for rank in range(len(intents))]
        rows = [side.begin(intent) for side, intent in zip(sides, intents, strict=True)]
        agreements: list[Agreement] = [side.finish(rows) for side in sides]
        return {graphs.size_for(agreement) for agreement in agreements}

    nothing = Intent(num_tokens=0, is_decode_only=True)
    assert sizes(nothing, Intent(num_tokens=3, is_decode_only=True), Intent(num_tokens=1, is_decode_only=True)) == {4}
    assert sizes(nothing, Intent(num_tokens=3, is_decode_only=False), nothing) == {None}


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4])
def test_what_a_graph_is_given(num_tokens: int) -> None:
    graphs, model, recorder = graphs_of((2, 4))
    model.steps.clear()
    run = runner(graphs, model)
    step = run._padded(run.build_inputs(decode_plan(num_tokens), (num_tokens,)), 4)
    result_TD = graphs(step, graphs.caches)
    assert recorder.played == [4]
    (seen,) = model.steps
    assert seen.padding is not None
    assert seen.padding.tolist() == [False] * num_tokens + [True] * (4 - num_tokens)
    assert seen.token_ids.tolist() == [10 + row for row in range(num_tokens)] + [0] * (4 - num_tokens)
    assert seen.cache_slots.tolist() == [row * 16 + row for row in range(num_tokens)] + [-1] * (4 - num_tokens)
    assert seen.context_lens.tolist() == [row + 1 for row in range(num_tokens)] + [0] * (4 - num_tokens)
    assert seen.row_starts.tolist() == [0, 1, 2, 3, 4]
    assert seen.block_table[:num_tokens, :2].tolist() == [[row, row + 1] for row in range(num_tokens)]
    assert seen.max_rows_per_chunk == 1
    assert result_TD[:num_tokens, 0].tolist() == [10.0 + row for row in range(num_tokens)]


def test_memory_stays_and_old_numbers_go() -> None:
    graphs, model, _ = graphs_of((4,))
    addresses = {step.token_ids.data_ptr() for step in model.steps}
    run = runner(graphs, model)
    for num_tokens in (4, 1, 3):
        graphs(run._padded(run.build_inputs(decode_plan(num_tokens), (num_tokens,)), 4), graphs.caches)
        seen = model.steps[-1]
        addresses.add(seen.token_ids.data_ptr())
        assert (seen.cache_slots[num_tokens:] == -1).all()
        assert (seen.context_lens[num_tokens:] == 0).all()
    assert len(addresses) == 1


def test_other_steps_run_layer_by_layer() -> None:
    graphs, model, recorder = graphs_of((4,))
    step = runner(graphs, model).build_inputs(decode_plan(3), (3,))
    assert len(graphs(step, graphs.caches)) == 3
    assert model.steps[-1] is step
    assert recorder.played == []


def test_ranks_of_a_replica_have_their_share_of_the_padding() -> None:
    mesh = Mesh(tp=2, dp=3)
    shares = []
    for tp_rank in range(2):
        graphs, model, _ = graphs_of((5,), mesh, tp_rank)
        assert model.steps[0].tokens_per_rank == (2, 3) * 3
        run = runner(graphs, model, mesh, tp_rank)
        step = run._padded(run.build_inputs(decode_plan(3), (3, 1, 0)), 5)
        assert step.tokens_per_rank == (2, 3) * 3
        assert step.padding is not None
        shares += step.padding[step.own_rows].tolist()
    assert shares == [False] * 3 + [True] * 2


def test_memory_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte for the largest, three megabytes for each other one, and nothing of it is kept but what the first
    recording takes besides: that is taken no second time, so it hides nothing of the others.
    """
    free = [80 * 2**30]
    num_recorded = 0

    class Taken:
        def __init__(self, sizes: Sequence[int]) -> None:
            nonlocal num_recorded
            num_recorded += 1
            self.num_bytes = 2**30 + 3 * 2**20 * (len(sizes) - 1)
            free[0] -= self.num_bytes + (2**29 if num_recorded == 1 else 0)

        def __del__(self) -> None:
            free[0] += self.num_bytes

    monkeypatch.setattr(cuda_graphs, "free_gpu_memory", lambda: free[0])
    assert memory_of_graphs(Taken, (1, 2, 4, 8)) == 2**30 + 3 * 3 * 2**20
    assert memory_of_graphs(Taken, (8,)) == 2**30
    assert memory_of_graphs(Taken, ()) == 0
    assert free[0] == 80 * 2**30 - 2**29


class Stream:
    """Notes what it waits for, and what runs in it."""

    told: ClassVar[list[str]] = []

    def __init__(self, name: str = "side") -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        self.told.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.told.append(f"into {self.name}")

    def __exit__(self, *error: object) -> None:
        self.told.append(f"out of {self.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What streams are told, of which the current one is "main"."""
    main = Stream("main")
    monkeypatch.setattr(Stream, "told", [])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return Stream.told


def test_all_graphs_of_an_engine_are_recorded_in_its_stream(
    streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And warmed up there: what torch keeps for each stream is kept once, and given up with these graphs alone."""
    pools: list[object] = []

    class Graph:
        def replay(self) -> None:
            streams.append("replay")

        def pool(self) -> str:
            return "pool"

    def graph(graph: Graph, pool: object, stream: Stream) -> Stream:
        pools.append(pool)
        return stream

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)

    def run() -> Tensor:
        streams.append("run")
        return torch.ones(1)

    capture = TorchCapture(cast(Any, Stream("own")))
    warm_up = ["own waits for main", "into own", "run", "run", "out of own", "main waits for own"]
    for _ in range(2):
        play, _ = capture(run)
        assert streams == [*warm_up, "into own", "run", "out of own"]
        streams.clear()
    assert pools == [None, "pool"]
    play()
    assert streams == ["replay"]


def test_the_second_stream_waits_and_is_waited_for(streams: list[str]) -> None:
    aside = side_stream.SideStream()
    pending = aside(lambda x: x + 1, torch.zeros(2))
    streams.append("meanwhile")
    assert pending.wait().tolist() == [1.0, 1.0]
    assert streams == ["side waits for main", "into side", "out of side", "meanwhile", "main waits for side"]
    assert side_stream.choose_aside("cpu")(lambda x: x + 1, torch.zeros(2)).wait().tolist() == [1.0, 1.0]
