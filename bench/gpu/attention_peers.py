"""The libraries that can attend in the place of our kernels, where they are installed, and steps to give them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.bench.gpu.shapes import AttentionShape
from moeserve.ops import interfaces
from moeserve.ops.libraries.attention import LIBRARY_NAMES, open_library
from moeserve.ops.libraries.attention_times import AttentionProblem
from moeserve.ops.libraries.interface import AttentionLibrary, LibraryUnusable
from moeserve.step_inputs import ChunkSpan, StepInputs


@functools.cache
def installed_peers(device: torch.device) -> tuple[AttentionLibrary, ...]:
    """Those that can be used on a GPU. Why the others cannot is printed."""
    peers = []
    for name in LIBRARY_NAMES if device.type == "cuda" else ():
        try:
            peers.append(open_library(name, device))
        except LibraryUnusable as error:
            print(f"{name} is left out: {error}", flush=True)
    return tuple(peers)


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


def step_of(chunks: Sequence[tuple[int, int]], block_table: Tensor) -> StepInputs:
    """What attention reads of a step.

    Args:
        chunks: rows, and length of the context with them.
    """
    spans: list[ChunkSpan] = []
    num_rows = 0
    for rows, context in chunks:
        spans.append(ChunkSpan(num_rows, rows, context))
        num_rows += rows
    device = block_table.device
    none = torch.zeros(0, dtype=torch.int64, device=device)
    starts = [*(span.first_row for span in spans), num_rows]
    return StepInputs(
        token_ids=none,
        positions=none,
        cache_slots=none,
        row_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor([span.context_len for span in spans], dtype=torch.int32, device=device),
        block_table=block_table,
        logits_rows=none,
        spans=tuple(spans),
        tp_sizes=(num_rows,),
        tokens_per_rank=(num_rows,),
    )
