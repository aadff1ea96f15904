"""Steps over scattered blocks, and the settings of the C++ kernels, for tests of attention and of kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from moeserve.ops.native import native_kernels, set_num_threads
from moeserve.ops.select import select_backend
from moeserve.step_inputs import ChunkSpan, StepInputs

NUM_SPARE_BLOCKS = 3
kernels = native_kernels()
INSTRUCTION_SETS: tuple[str, ...] = tuple(kernels.usable_isas()) if kernels else ()  # best first
NATIVE = select_backend(torch.device("cpu"))
needs_kernels = pytest.mark.skipif(kernels is None, reason="moeserve._cpu is not built")


@contextmanager
def settings_restored() -> Iterator[None]:
    """Run with two threads. Restore the number of threads and the instruction set afterwards."""
    num_threads = torch.get_num_threads()
    isa = kernels.isa() if kernels else None
    set_num_threads(2)
    yield
    set_num_threads(num_threads)
    if kernels:
        kernels.set_isa(isa)


def scatter_blocks(lengths: list[tuple[int, int]], block_size: int, seed: int) -> list[list[int]]:
    """Return shuffled block ids for the context of each chunk, out of slightly more blocks than needed."""
    num_blocks = [-(-context_len // block_size) for _, context_len in lengths]
    free = list(range(sum(num_blocks) + NUM_SPARE_BLOCKS))
    random.Random(seed).shuffle(free)
    return [[free.pop() for _ in range(count)] for count in num_blocks]


def drawn_chunks(spans: Sequence[ChunkSpan], draw: random.Random) -> Iterator[tuple[list[tuple[int, int]], list[int]]]:
    """Divide requests that begin at position 0 into steps of random sizes.

    Yields, for each step, (rows, context length) of each request, and the indices of the rows among all rows.
    """
    num_done = [0] * len(spans)
    while any(done < span.num_rows for done, span in zip(num_done, spans, strict=True)):
        lengths, rows = [], []
        for request, span in enumerate(spans):
            count = min(span.num_rows - num_done[request], draw.choice([0, 1, 2, 7, 30, 130, 1000]))
            first = span.first_row + num_done[request]
            num_done[request] += count
            lengths.append((count, num_done[request]))
            rows += range(first, first + count)
        yield lengths, rows


def make_step(lengths: list[tuple[int, int]], block_ids: list[list[int]], block_size: int) -> StepInputs:
    """Return a step of chunks given as (rows, context length)."""
    spans, slots, first_row = [], [], 0
    table = torch.zeros(len(lengths), max(map(len, block_ids), default=0), dtype=torch.int32)
    for chunk, ((num_rows, context_len), ids) in enumerate(zip(lengths, block_ids, strict=True)):
        table[chunk, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        slots += [
            ids[p // block_size] * block_size + p % block_size for p in range(context_len - num_rows, context_len)
        ]
        spans.append(ChunkSpan(first_row, num_rows, context_len))
        first_row += num_rows
    return StepInputs(
        token_ids=torch.zeros(first_row, dtype=torch.int64),
        positions=torch.tensor([p for rows, length in lengths for p in range(length - rows, length)]),
        cache_slots=torch.tensor(slots, dtype=torch.int64),
        row_starts=torch.tensor([0, *(span.first_row + span.num_rows for span in spans)], dtype=torch.int32),
        context_lens=torch.tensor([length for _, length in lengths], dtype=torch.int32),
        block_table=table,
        logits_rows=torch.zeros(0, dtype=torch.int64),
        spans=tuple(spans),
        tp_sizes=(first_row,),
        tokens_per_rank=(first_row,),
    )


def within_bfloat16_rounding(actual: Tensor, expected: Tensor, spread: Tensor | None = None) -> bool:
    """Return True if rounding of the result explains all differences, and with `spread` also rounding of the weights.

    Args:
        expected: in float64.
        spread: the weighted sum of the distances of the values from the result. Rounding each weight to bfloat16, and
            then dividing by the sum of the rounded weights, moves the result by at most this times the rounding.
    """
    bound = expected.abs() * 2**-8 * 1.01 + 2e-5
    if spread is not None:
        bound += spread * 2**-8 * 1.02
    return bool(((actual.double() - expected).abs() <= bound).all())


def rounds_weights() -> bool:
    """Return True if the kernels round the weights of bfloat16 values with the selected instruction set."""
    return kernels is not None and kernels.isa() in ("amx", "avx512_bf16", "neon_bf16")


def same_bytes(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return a.numel() == 0 or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
