"""Which graph a step plays, how it is padded, and in what order graphs are made: with a recorder in place of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moeserve.distributed.group import single
from moeserve.distributed.mesh import Mesh
from moeserve.messages import Chunk, SampleSpec, SamplingParams, StepPlan
from moeserve.ops import side_stream
from moeserve.scheduling.lockstep import Agreement, Intent, Lockstep, alone
from moeserve.step_inputs import StepInputs
from moeserve.worker import cuda_graphs
from moeserve.worker.cuda_graphs import CudaGraphs, graph_sizes, memory_of_graphs
from moeserve.worker.model_runner import ModelRunner

WIDTH = 3
MAX_BLOCKS = 4


class Model:
    """Gives each row numbers that tell where it came from; sees every step that it is given."""

    def __init__(self) -> None:
        self.embedding = torch.nn.Linear(1, 1)
        self.groups = single()
        self.carrier: Any = None
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
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (10_000, (1, 2, 4, 8, *range(16, 128, 8), *range(128, 513, 32))),
    ],
)
def test_sizes_of_graphs(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


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


def test_without_a_size_that_can_be_captured_all_steps_run_layer_by_layer() -> None:
    class CarriesNone:
        def is_capturable(self, tokens_per_rank: Sequence[int]) -> bool:
            return False

    model, recorder = Model(), Recorder()
    model.carrier = CarriesNone()
    graphs = CudaGraphs(cast(Any, model), [], ONE_RANK, 0, MAX_BLOCKS, (1, 2), recorder)
    assert recorder.sizes == []
    assert graphs.size_for(alone(0, 1, is_decode_only=True)) is None


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
    """A gigabyte for the largest, three megabytes for each other one, and nothing of it is kept."""
    free = [80 * 2**30]

    class Taken:
        def __init__(self, sizes: Sequence[int]) -> None:
            self.num_bytes = 2**30 + 3 * 2**20 * (len(sizes) - 1)
            free[0] -= self.num_bytes

        def __del__(self) -> None:
            free[0] += self.num_bytes

    monkeypatch.setattr(cuda_graphs, "_free_bytes", lambda: free[0])
    assert memory_of_graphs(Taken, (1, 2, 4, 8)) == 2**30 + 3 * 3 * 2**20
    assert memory_of_graphs(Taken, (8,)) == 2**30
    assert free[0] == 80 * 2**30


def test_the_second_stream_waits_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Stream:
        def __init__(self, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            told.append(f"{self.name} waits for {other.name}")

        def __enter__(self) -> None:
            told.append(f"into {self.name}")

        def __exit__(self, *error: object) -> None:
            told.append(f"out of {self.name}")

    main = Stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    aside = side_stream.SideStream()
    pending = aside(lambda x: x + 1, torch.zeros(2))
    told.append("meanwhile")
    assert pending.wait().tolist() == [1.0, 1.0]
    assert told == ["side waits for main", "into side", "out of side", "meanwhile", "main waits for side"]
    assert side_stream.choose_aside("cpu")(lambda x: x + 1, torch.zeros(2)).wait().tolist() == [1.0, 1.0]
