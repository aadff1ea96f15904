"""Weights as 8-bit floats (E4M3) with a scale for each block of 128 x 128: DeepSeek-V3's format (arXiv 2412.19437)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.products.interface import OpenWeights

# O rows, I columns, G blocks of rows, R rows of a block, B blocks of columns, C columns of a block

BLOCK = 128  # rows and columns that share a scale
CODES = torch.float8_e4m3fn
LARGEST_CODE = 448.0
MIN_BLOCK_MAXIMUM = 1e-30  # so that a block of zeros has a scale above zero
# Number of values quantised at once, but at least one row of blocks. This bounds the memory of copies.
QUANTIZED_AT_ONCE = 2 * 1024 * 1024


def num_blocks(size: int) -> int:
    """Return the number of blocks along a dimension. The last block may be partial."""
    return -(-size // BLOCK)


@dataclass(frozen=True)
class Blocks:
    """Codes and block scales of consecutive rows within one part of a weight. The first row begins a block."""

    codes_OI: Tensor
    scales_GB: Tensor

    def copy_from(self, codes_OI: Tensor, scales_GB: Tensor) -> None:
        """Store the codes and scales of a checkpoint unchanged."""
        self.codes_OI.view(torch.uint8).copy_(codes_OI.view(torch.uint8))
        self.scales_GB.copy_(scales_GB)

    def quantize(self, values_OI: Tensor) -> None:
        """Quantise and store values.

        A block's scale is its largest absolute value / 448. A code is value / scale, rounded to the nearest.
        """
        num_rows, width = values_OI.shape
        step = max(1, QUANTIZED_AT_ONCE // (BLOCK * width)) * BLOCK
        for start in range(0, num_rows, step):
            piece_OI = values_OI[start : start + step].to(self.codes_OI.device, torch.float32)
            groups, blocks = num_blocks(len(piece_OI)), num_blocks(width)
            padding = (0, blocks * BLOCK - width, 0, groups * BLOCK - len(piece_OI))
            piece_GRBC = functional.pad(piece_OI, padding).view(groups, BLOCK, blocks, BLOCK)
            scales_GB = piece_GRBC.abs().amax((1, 3)).clamp(min=MIN_BLOCK_MAXIMUM) / LARGEST_CODE
            # Clamp, because values that rounding raised above the largest code would become NaN.
            scaled_GRBC = (piece_GRBC / scales_GB[:, None, :, None]).clamp(-LARGEST_CODE, LARGEST_CODE)
            codes_OI = scaled_GRBC.to(CODES).view(groups * BLOCK, blocks * BLOCK)
            self.codes_OI[start : start + step] = codes_OI[: len(piece_OI), :width]
            self.scales_GB[start // BLOCK : start // BLOCK + groups] = scales_GB


def blocks_of(weights: OpenWeights, memory: Tensor) -> Iterator[Blocks]:
    """Yield the `Blocks` of each part of a weight that `memory` covers. `memory` is a view of whole rows of codes."""
    assert weights.scales_eGB is not None
    _, num_outputs, num_inputs = weights.weight_eOI.shape
    rows_of_part = num_outputs // weights.num_parts
    codes_OI, scales_GB = weights.weight_eOI.view(-1, num_inputs), weights.scales_eGB.flatten(0, 1)
    row = (memory.storage_offset() - weights.weight_eOI.storage_offset()) // num_inputs
    last = row + memory.numel() // num_inputs
    while row < last:
        part, row_of_part = divmod(row, rows_of_part)
        assert row_of_part % BLOCK == 0, f"row {row_of_part} is inside a block"
        stop = min(last, (part + 1) * rows_of_part)
        group = part * num_blocks(rows_of_part) + row_of_part // BLOCK
        yield Blocks(codes_OI[row:stop], scales_GB[group : group + num_blocks(stop - row)])
        row = stop


def quantize(weights: OpenWeights, memory: Tensor, values: Tensor) -> None:
    """Quantise values into `memory`, a view of the weights' codes with the same shape, and set the scales."""
    num_inputs = weights.weight_eOI.shape[2]
    ordered = torch.empty_strided(memory.shape, memory.stride(), dtype=values.dtype, device=values.device)
    rows_OI = ordered.copy_(values).as_strided((memory.numel() // num_inputs, num_inputs), (num_inputs, 1))
    first = 0
    for blocks in blocks_of(weights, memory):
        last = first + len(blocks.codes_OI)
        blocks.quantize(rows_OI[first:last])
        first = last
