"""Weights that `moeserve quantize` writes to safetensors files, in blocks of GGUF's formats Q4_K, Q5_K or Q6_K.

A weight is stored as two tensors: its blocks, [..., bytes of a row] uint8, and its shape. The last block of each row
may be padded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from moeserve.errors import missing_extra
from moeserve.models.checkpoint.tensors import ReadRows, StoredTensor
from moeserve.ops.products.interface import PackedFormat, StoredCodes

METHOD = "moeserve"  # the `quant_method` in the config
BLOCKS, SHAPE = "_blocks", "_shape"  # suffixes of a weight's tensors
BLOCK_INPUTS = 256
BLOCK_BYTES: dict[PackedFormat, int] = {"q4_k": 144, "q5_k": 176, "q6_k": 210}


def row_bytes(packed_format: PackedFormat, num_inputs: int) -> int:
    """Return the size in bytes of a stored row, whose last block may be padded."""
    return -(-num_inputs // BLOCK_INPUTS) * BLOCK_BYTES[packed_format]


@dataclass(frozen=True)
class BlockTensor:
    """A weight in blocks."""

    is_encoded: ClassVar[bool] = True
    blocks: StoredTensor
    shape: tuple[int, ...]
    options: tuple[PackedFormat, ...]

    @classmethod
    def build(
        cls, blocks: StoredTensor, options: tuple[PackedFormat, ...], shape: Sequence[int] | None = None
    ) -> BlockTensor:
        """Return the weight whose blocks are `blocks`.

        Args:
            options: the formats that the checkpoint uses. The length of a row determines the format of this weight.
        """
        return cls(blocks, tuple(shape or ()), options)

    @functools.cached_property
    def packed_format(self) -> PackedFormat | None:
        """The packed format with the same codes and scales as the stored blocks; None: the tensor is damaged."""
        stored = self.blocks.shape
        fitting = (each for each in self.options if self.shape and stored[-1] == row_bytes(each, self.shape[-1]))
        return next(fitting, None) if stored[:-1] == self.shape[:-1] else None

    @property
    def type_name(self) -> str:
        return str(self.packed_format).upper()

    @property
    def shard(self) -> Path:
        return self.blocks.shard

    @property
    def stored_name(self) -> str:
        return self.blocks.name

    def check(self) -> None:
        if self.packed_format is None:
            raise self.blocks.wrong(
                f"has shape {list(self.blocks.shape)}, which is not that of blocks of a weight {list(self.shape)}"
            )

    @property
    def block_inputs(self) -> int:
        return BLOCK_INPUTS

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        try:
            import gguf
        except ImportError as error:
            raise missing_extra("decoding weights in blocks needs the gguf package", "demo", error) from None
        blocks = read_rows(self.blocks, start, stop)
        values = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[self.type_name])
        return torch.from_numpy(values)[..., : self.shape[-1]]

    def read_codes(self, read_rows: ReadRows, part: tuple[slice, ...], inputs: slice, unit: int) -> StoredCodes:
        assert self.packed_format is not None
        size = BLOCK_BYTES[self.packed_format]
        columns = slice(inputs.start // BLOCK_INPUTS * size, -(-inputs.stop // BLOCK_INPUTS) * size)
        others: tuple[slice, ...] = (slice(None), *part[1:])
        rows = read_rows(self.blocks, part[0].start, part[0].stop)[others][..., columns]
        return StoredCodes(rows.reshape(-1, rows.shape[-1]), None, inputs.start % BLOCK_INPUTS)
