"""Compressed entries in Triton's interpreter: chunks of a prompt. bench/gpu/entry_cases.py has whole prompts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moeserve.bench.gpu.entry_cases import SHAPES, SMALL_BLOCK_SIZE
from moeserve.bench.gpu.inputs import Source
from moeserve.ops.compressed_attention.reference import TorchCompressedAttention
from moeserve.ops.compressed_attention.triton import TritonCompressedAttention
from moeserve.step_inputs import ChunkSpan, StepInputs

LENGTH, ENDS = 30, (7, 8, 30)  # of the prompt, and of its chunks: windows and blocks are cut


def part_of(step: StepInputs, first: int, end: int) -> StepInputs:
    """Return a chunk of a step of one prompt."""
    return dataclasses.replace(
        step,
        positions=step.positions[first:end],
        cache_slots=step.cache_slots[first:end],
        row_starts=torch.tensor([0, end - first], dtype=torch.int32),
        context_lens=torch.tensor([end], dtype=torch.int32),
        spans=(ChunkSpan(0, end - first, end),),
    )


@pytest.mark.parametrize("name", ["small, chosen entries", "small, all entries"])
def test_chunks_change_no_byte_of_entries_and_tails(name: str) -> None:
    shape, source = SHAPES[name], Source(torch.device("cpu"), torch.Generator().manual_seed(1), torch.float32)
    step, size = source.step([(LENGTH, LENGTH)], SMALL_BLOCK_SIZE), shape.num_series * shape.head_size
    assert shape.ratio is not None
    projected_TX, bias_mY = source.normal(LENGTH, 2 * size), source.normal(shape.ratio, size)
    whole, cut, wanted = (torch.zeros(int(step.block_table.max()) + 1, 3 * size) for _ in range(3))
    expected = TorchCompressedAttention(shape).pool(projected_TX, bias_mY, wanted, SMALL_BLOCK_SIZE, step)
    attention = TritonCompressedAttention(shape)
    pooled = attention.pool(projected_TX, bias_mY, whole, SMALL_BLOCK_SIZE, step)
    parts = [
        attention.pool(projected_TX[first:end], bias_mY, cut, SMALL_BLOCK_SIZE, part_of(step, first, end))
        for first, end in zip((0, *ENDS), ENDS, strict=False)
    ]
    assert torch.equal(torch.cat(parts), pooled)
    assert torch.equal(cut, whole)
    torch.testing.assert_close(pooled, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole, wanted, rtol=1e-5, atol=1e-6)
