"""Attention to a window and to compressed entries in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moeserve.ops.compressed_attention.interface import CompressedCache, CompressedShape
from moeserve.ops.indexer.interface import ChosenEntries
from moeserve.step_inputs import StepInputs

# I size of an indexer's key, m tokens of a window, s series of values, C entries, L maximum number of vectors that a
# row attends to, Y = s * H

MAX_GATHERED = 2**24  # maximum number of elements of vectors, or of scores, in memory at a time


class TorchCompressedAttention:
    """A `CompressedAttention` that pools token by token, and gathers the vectors that each row attends to."""

    def __init__(self, shape: CompressedShape) -> None:
        self.shape = shape

    def pool(self, projected_TX: Tensor, bias_mY: Tensor, tails: Tensor, block_size: int, step: StepInputs) -> Tensor:
        ratio, num_series = len(bias_mY), self.shape.num_series
        size = bias_mY.shape[1] // num_series
        value_TsH, gate_TsH = (part.unflatten(1, (num_series, size)) for part in projected_TX.float().chunk(2, dim=1))
        bias_msH = bias_mY.unflatten(1, (num_series, size))
        pooled_TH = torch.zeros(len(projected_TX), size, dtype=projected_TX.dtype, device=projected_TX.device)
        empty_s3H = torch.zeros(num_series, 3, size, device=projected_TX.device)
        empty_s3H[:, 0] = -math.inf
        slots = step.cache_slots.tolist()
        for span, blocks in zip(step.spans, step.block_table.tolist(), strict=True):
            start = span.context_len - span.num_rows
            if start < 0 or slots[span.first_row] < 0:
                continue
            tail_s3H = empty_s3H
            if start > 0:
                tail_s3H = tails[blocks[(start - 1) // block_size]].view(num_series, 3, size)
            for row in range(span.first_row, span.last_row + 1):
                position = start + row - span.first_row
                offset = position % ratio
                if offset == 0:  # the tail of the previous window becomes the start of this window's entry
                    tail_s3H = torch.cat([tail_s3H[1:], empty_s3H[:1]])
                # The series for the current window comes last in the projection and first in the tail.
                gates_sH, values_sH = (gate_TsH[row] + bias_msH[offset]).flip(0), value_TsH[row].flip(0)
                tail_s3H = _added(tail_s3H, gates_sH, values_sH)
                if offset == ratio - 1:
                    pooled_TH[row] = (tail_s3H[0, 2] / tail_s3H[0, 1]).to(pooled_TH.dtype)
                last_kept = span.last_row - span.num_drafts
                if row == last_kept or (row < last_kept and (position + 1) % block_size == 0):
                    tails[blocks[position // block_size]] = tail_s3H.flatten()
        return pooled_TH

    def write(
        self,
        vector_TH: Tensor,
        entry_TH: Tensor | None,
        index_key_TI: Tensor | None,
        cache: CompressedCache,
        step: StepInputs,
        windows: StepInputs,
    ) -> None:
        _store(vector_TH, cache.tokens.flatten(0, 1), windows.cache_slots)
        if entry_TH is None or self.shape.ratio is None:
            return
        entries = [(entry_TH, cache.entries)]
        if index_key_TI is not None and cache.index_keys is not None:
            entries.append((index_key_TI, cache.index_keys))
        self.write_entries(cache.block_size, step, *entries)

    def write_entries(self, block_size: int, step: StepInputs, *entries: tuple[Tensor, Tensor]) -> None:
        assert self.shape.ratio is not None
        slot_T, position_T = step.cache_slots, step.positions
        block_T, offset_T = slot_T // block_size, slot_T % block_size
        in_block_T = position_T // self.shape.ratio - (position_T - offset_T) // self.shape.ratio
        is_last_T = (slot_T >= 0) & ((position_T + 1) % self.shape.ratio == 0)
        entry_slot_T = torch.where(is_last_T, block_T * entries[0][1].shape[1] + in_block_T, -1)
        for rows_TH, memory in entries:
            _store(rows_TH, memory.flatten(0, 1), entry_slot_T)

    def attend(
        self,
        query_TNH: Tensor,
        chosen: ChosenEntries | None,
        sinks_N: Tensor,
        cache: CompressedCache,
        step: StepInputs,
        windows: StepInputs,
    ) -> Tensor:
        out_TNH = torch.zeros(query_TNH.shape, dtype=query_TNH.dtype, device=query_TNH.device)
        listed_TL, count_T = self._listed(chosen, cache, step, windows)
        vectors = cache.vectors
        rows_at_once = max(1, MAX_GATHERED // max(1, listed_TL.shape[1] * vectors.shape[1]))
        for first in range(0, len(query_TNH), rows_at_once):
            rows = slice(first, first + rows_at_once)
            vector_RLH = vectors[listed_TL[rows].long()].float()
            score_RNL = (query_TNH[rows].float() * self.shape.scale) @ vector_RLH.transpose(1, 2)
            is_listed_RL = torch.arange(listed_TL.shape[1], device=count_T.device) < count_T[rows, None]
            score_RNL.masked_fill_(~is_listed_RL[:, None], -math.inf)
            sink_RN1 = sinks_N[None, :, None].expand(len(score_RNL), -1, 1)
            weight_RNL = torch.cat([score_RNL, sink_RN1], dim=2).softmax(dim=2)[..., :-1]
            attended_RNH = weight_RNL @ vector_RLH.masked_fill(~is_listed_RL[..., None], 0.0)
            out_TNH[rows] = attended_RNH.to(out_TNH.dtype)
        return out_TNH

    def _listed(
        self, chosen: ChosenEntries | None, cache: CompressedCache, step: StepInputs, windows: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """Return the indices of the vectors that each row attends to [T, L], and their counts [T], both int32.

        The tokens of the window come first, ordered by position, followed by the entries in their order.
        """
        window, ratio, block_size = self.shape.window, self.shape.ratio, cache.block_size
        first_entry = cache.tokens.shape[0] * block_size
        num_rows, device = len(step.positions), step.positions.device
        most_positions = max((span.context_len for span in step.spans), default=0)
        num_entries = 0 if ratio is None else most_positions // ratio
        if chosen is not None:
            num_entries = chosen.slots_TC.shape[1]
        listed_TL = torch.zeros(num_rows, min(window, most_positions) + num_entries, dtype=torch.int32, device=device)
        count_T = torch.zeros(num_rows, dtype=torch.int32, device=device)
        for span, blocks, window_blocks in zip(step.spans, step.block_table, windows.block_table, strict=True):
            for row in range(span.first_row, span.last_row + 1):
                position = span.context_len - span.num_rows + row - span.first_row
                if position < 0:
                    continue
                token_W = torch.arange(max(0, position - window + 1), position + 1, device=device)
                parts = [window_blocks[token_W // block_size].long() * block_size + token_W % block_size]
                if chosen is not None:
                    parts.append(first_entry + chosen.slots_TC[row, : int(chosen.counts_T[row])].long())
                elif ratio is not None:
                    entry_C = torch.arange((position + 1) // ratio, device=device)
                    index_C = ((entry_C + 1) * ratio - 1) // block_size  # index of the block in which the window ends
                    in_block_C = entry_C - index_C * block_size // ratio
                    parts.append(first_entry + blocks[index_C].long() * cache.entries.shape[1] + in_block_C)
                slots_L = torch.cat(parts)
                listed_TL[row, : len(slots_L)] = slots_L
                count_T[row] = len(slots_L)
        return listed_TL, count_T


def _added(tail_s3H: Tensor, gates_sH: Tensor, values_sH: Tensor) -> Tensor:
    """Return the tails updated with one more token."""
    largest_sH = torch.maximum(tail_s3H[:, 0], gates_sH)
    factor_sH, weight_sH = (tail_s3H[:, 0] - largest_sH).exp(), (gates_sH - largest_sH).exp()
    sums_sH = tail_s3H[:, 1] * factor_sH + weight_sH
    return torch.stack([largest_sH, sums_sH, tail_s3H[:, 2] * factor_sH + weight_sH * values_sH], dim=1)


def _store(rows_TX: Tensor, memory: Tensor, slots_T: Tensor) -> None:
    kept_T = slots_T >= 0
    memory[slots_T[kept_T]] = rows_TX[kept_T].to(memory.dtype)
