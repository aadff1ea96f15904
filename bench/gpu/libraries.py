"""The installed libraries that can replace our attention kernels, and steps for them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moeserve.bench.gpu.costs import AttentionShape, Chunks
from moeserve.ops import interfaces
from moeserve.ops.libraries.attention import LIBRARY_NAMES, open_library
from moeserve.ops.libraries.attention_times import AttentionProblem
from moeserve.ops.libraries.interface import AttentionLibrary, LibraryUnusable
from moeserve.step_inputs import ChunkSpan, StepInputs


@functools.cache
def installed_libraries(device: torch.device) -> tuple[AttentionLibrary, ...]:
    """Return those that can be used on a GPU, and print why the others cannot."""
    found = []
    for name in LIBRARY_NAMES if device.type == "cuda" else ():
        try:
            found.append(open_library(name, device))
        except LibraryUnusable as error:
            print(f"{name} is left out: {error}", flush=True)
    return tuple(found)


def problem_of(shape: AttentionShape, dtype: torch.dtype, block_size: int) -> AttentionProblem:
    layer = interfaces.AttentionShape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        dtype=dtype,
        scale=shape.head_size**-0.5,
        window=shape.window,
        has_sinks=shape.has_sinks,
    )
    return AttentionProblem(layer, block_size)


def step_of(chunks: Chunks, block_table: Tensor) -> StepInputs:
    """Return a step for attention, which does not read the other fields."""
    spans: list[ChunkSpan] = []
    num_rows = 0
    for rows, context in chunks:
        spans.append(ChunkSpan(num_rows, rows, context))
        num_rows += rows
    device = block_table.device
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    starts = [*(span.first_row for span in spans), num_rows]
    return StepInputs(
        token_ids=nothing,
        positions=nothing,
        cache_slots=nothing,
        row_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor([span.context_len for span in spans], dtype=torch.int32, device=device),
        block_table=block_table,
        logits_rows=nothing,
        spans=tuple(spans),
        tp_sizes=(num_rows,),
        tokens_per_rank=(num_rows,),
    )
