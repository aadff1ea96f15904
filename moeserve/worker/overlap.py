"""Two-batch overlap: a step runs as two halves, of which one computes while rows of the other travel between ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moeserve.distributed.mesh import share_of, share_sizes
from moeserve.step_inputs import ChunkSpan, GroupTable, StepInputs

# A long half begins at a multiple of this number of rows, to align tiles of GPU kernels. Tensors begin at a multiple of
# this number of bytes, because Triton compiles different kernels for other addresses.
ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class OverlapLimits:
    """The minimum number of rows on the largest replica for a step to overlap. None: never."""

    decode: int | None = None
    prefill: int | None = None

    def applies(self, num_rows: int, *, is_decode_only: bool) -> bool:
        """Return True if a step runs as two halves. The result is the same on all ranks.

        Args:
            num_rows: maximum number of rows of any replica, on which the replicas agreed before the step.
        """
        least = self.decode if is_decode_only else self.prefill
        return least is not None and num_rows >= least


def overlapped(step: StepInputs, *, tp: int, tp_rank: int) -> StepInputs:
    """Return the step with its two halves.

    The halves of a padded step are views of its memory, because a CUDA graph reads this memory in each replay.
    """
    all_counts = [sum(step.tokens_per_rank[first : first + tp]) for first in range(0, len(step.tokens_per_rank), tp)]
    firsts = [_first_half(count) for count in all_counts]
    seconds = [count - first for count, first in zip(all_counts, firsts, strict=True)]
    num_rows = len(step.token_ids)
    middle = _first_half(num_rows)
    first = _part(step, 0, middle, firsts, tp, tp_rank)
    second = _part(step, middle, num_rows, seconds, tp, tp_rank)
    most = tuple(map(max, first.tokens_per_rank, second.tokens_per_rank))
    first = dataclasses.replace(first, most_per_rank=most)
    second = dataclasses.replace(second, most_per_rank=most, rows_before=sum(firsts))
    return dataclasses.replace(step, halves=(first, second))


def _first_half(num_rows: int) -> int:
    half = (num_rows + 1) // 2
    return half if half < 2 * ALIGNMENT else half // ALIGNMENT * ALIGNMENT


def _part(step: StepInputs, start: int, end: int, counts: Sequence[int], tp: int, tp_rank: int) -> StepInputs:
    """Return the step of the rows `start` to `end - 1`, in which the replicas have `counts` rows."""
    inside = [index for index, span in enumerate(step.spans) if span.first_row < end and span.last_row >= start]
    chunks = slice(inside[0], inside[-1] + 1) if inside else slice(0, 0)
    spans = []
    for span in step.spans[chunks]:
        first, last = max(span.first_row, start), min(span.last_row, end - 1)
        spans.append(ChunkSpan(first - start, last - first + 1, span.context_len - (span.last_row - last)))

    def part_of(x_R: Tensor, rows: slice) -> Tensor:
        part_R = x_R[rows]
        return part_R if step.padding is not None or part_R.data_ptr() % ALIGNMENT == 0 else part_R.clone()

    tokens, context_lens = slice(start, end), part_of(step.context_lens, chunks)
    if spans and (num_later := step.spans[chunks][-1].context_len - spans[-1].context_len):
        context_lens = context_lens.clone()
        context_lens[-1] -= num_later
    return StepInputs(
        token_ids=part_of(step.token_ids, tokens),
        positions=part_of(step.positions, tokens),
        cache_slots=part_of(step.cache_slots, tokens),
        row_starts=(step.row_starts[chunks.start : chunks.stop + 1] - start).clamp_(0, end - start),
        context_lens=context_lens,
        block_table=part_of(step.block_table, chunks),
        logits_rows=step.logits_rows[:0],
        spans=tuple(spans),
        tp_sizes=share_sizes(end - start, tp),
        tokens_per_rank=tuple(share for count in counts for share in share_sizes(count, tp)),
        padding=None if step.padding is None else step.padding[start:end],
        own_rows=share_of(end - start, tp_rank, tp),
        other_tables=tuple(
            GroupTable(part_of(table.cache_slots, tokens), part_of(table.block_table, chunks))
            for table in step.other_tables
        ),
    )
