"""Overlapped steps: their tensors, and trial steps before serving. For results see test_overlap.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from build_contexts import cpu_context
from torch import Tensor

from moeserve.distributed.groups import groups_of_one_rank
from moeserve.distributed.mesh import Mesh
from moeserve.step_inputs import ChunkSpan, GroupTable, StepInputs
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.overlap import OverlapLimits, overlapped
from moeserve.worker.profiling import run_all_sizes
from moeserve.worker.rank_context import RankContext
from moeserve.worker.request_table import RequestTable
from moeserve.worker.step_runner import EagerSteps

TENSORS = ("token_ids", "positions", "cache_slots", "row_starts", "context_lens", "block_table")


def prompt_step(lengths: list[int]) -> StepInputs:
    """Return a step of chunks after 7 positions each. All numbers differ."""
    total, starts = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    return StepInputs(
        token_ids=torch.arange(total),
        positions=torch.arange(total) + 1000,
        cache_slots=torch.arange(total) + 2000,
        row_starts=starts.int(),
        context_lens=torch.tensor(lengths, dtype=torch.int32) + 7,
        block_table=torch.arange(5 * len(lengths), dtype=torch.int32).view(-1, 5),
        logits_rows=starts[1:] - 1,
        spans=tuple(map(ChunkSpan, starts.tolist(), lengths, [length + 7 for length in lengths])),
        tp_sizes=(total,),
        tokens_per_rank=(total,),
        other_tables=(
            GroupTable(
                torch.arange(total) + 3000, torch.arange(5 * len(lengths), dtype=torch.int32).view(-1, 5) + 4000
            ),
        ),
    )


@pytest.mark.parametrize("lengths", [[1] * 5, [1] * 81, [3, 50, 2, 40, 1], [9, 1, 1], [70]], ids=str)
def test_tensors_of_eager_halves_begin_where_triton_compiles_no_other_kernel(lengths: list[int]) -> None:
    step = prompt_step(lengths)
    halves = overlapped(step, tp=1, tp_rank=0).halves
    for half in halves:
        assert [name for name in TENSORS if getattr(half, name).data_ptr() % 16] == []
        of_second = half.of_group(1)
        assert [name for name in TENSORS if getattr(of_second, name).data_ptr() % 16] == []
        assert torch.equal(of_second.cache_slots, half.cache_slots + 1000)
        assert torch.equal(of_second.block_table, half.block_table + 4000)
        assert half.row_starts.tolist() == [0, *(span.last_row + 1 for span in half.spans)]
        assert half.context_lens.tolist() == [span.context_len for span in half.spans]
    for name in ("token_ids", "positions", "cache_slots"):
        assert torch.equal(torch.cat([getattr(half, name) for half in halves]), getattr(step, name))
    of_chunks = torch.cat([half.block_table for half in halves])
    assert torch.equal(of_chunks.unique(dim=0), step.block_table)  # a divided chunk is in both
    assert halves[-1].context_lens[-1] == step.context_lens[-1]


class NotedSizes:
    """A model without a head, which notes the rows of each step and whether it has halves."""

    head = None

    def __init__(self) -> None:
        self.context = cpu_context()
        self.groups = groups_of_one_rank()
        self.seen: list[tuple[int, bool]] = []

    def __call__(self, step: StepInputs, caches: list[Any]) -> Tensor:
        self.seen.append((len(step.token_ids), bool(step.halves)))
        return torch.zeros(len(step.token_ids), 1)


@pytest.mark.parametrize(
    "overlap", [OverlapLimits(prefill=8), OverlapLimits(decode=8), OverlapLimits(decode=8, prefill=30)], ids=str
)
def test_halves_of_all_sizes_run_before_serving(overlap: OverlapLimits) -> None:
    model = cast(Any, NotedSizes())
    context = RankContext(mesh=Mesh(tp=1, dp=2), tp_rank=0, max_blocks=4, device=torch.device("cpu"), overlap=overlap)
    runner = ModelRunner(model, context, EagerSteps(model, []), RequestTable(3, 4), appends_samples=False)
    sizes = dict(max_num_batched_tokens=20, max_num_seqs=3, max_model_len=64, block_size=16)
    values = SimpleNamespace(**sizes, device="cpu", vocab_size=10)
    run_all_sizes(runner, cast(Any, SimpleNamespace(schedule=values, cache=values, compute=values, texts=values)))
    whole = [1, 2, 4, 8, 16, 20]
    assert sorted(model.seen) == sorted([(size, False) for size in whole] + [(size, True) for size in (8, 16, 20)])
