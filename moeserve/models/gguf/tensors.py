"""Tensors of GGUF files, presented as the matrices of a Hugging Face checkpoint."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.models.checkpoint.float4_tensors import E8M0_NAN
from moeserve.models.checkpoint.tensors import ReadRows
from moeserve.models.gguf.reader import StoredArray
from moeserve.ops.products.interface import PackedFormat, StoredCodes

_Q4_0_BYTES = 18  # bytes of a group: a float16 scale, then the codes
_MXFP4_BYTES = 17  # bytes of a group: an exponent, then the codes

# H: heads, K and V: rows of a head's keys and values, L: size of the latent vector


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file, of any number of dimensions."""

    is_encoded: ClassVar[bool] = True
    shard: Path
    stored: StoredArray
    rows: np.ndarray | None = None  # indices of stored rows, in the model's order; None: all rows in stored order
    columns: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.stored.shape
        return shape if self.rows is None else (len(self.rows), *shape[1:])

    def check(self) -> None:
        stored = self.stored
        stored.check()
        for order, size in ((self.rows, stored.shape[0]), (self.columns, stored.shape[-1])):
            if order is not None and int(order.max()) >= size:
                raise CheckpointError(
                    f"{self.shard}: tensor {stored.name!r} has shape {list(stored.shape)}, less than the heads in the "
                    "metadata need"
                )

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        rows = slice(start, stop) if self.rows is None else self.rows[start:stop]
        values = self.stored.read(rows)
        return torch.from_numpy(values if self.columns is None else values[..., self.columns])

    def has_packed_groups(self, read_rows: ReadRows) -> bool:
        """Return True for Q4_0, whose groups have the same inputs as groups of packed weights."""
        return self.stored.kind.name == "Q4_0" and self.stored.scale is None and self.columns is None

    def read_scales(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        """Return the magnitudes of Q4_0's scales. For a negative scale, packed weights store 15 - c for code c."""
        rows = slice(start, stop) if self.rows is None else self.rows[start:stop]
        blocks = self.stored.data[rows]
        groups = blocks.reshape(*blocks.shape[:-1], -1, _Q4_0_BYTES)
        return torch.from_numpy(groups[..., :2].copy().view(np.float16)[..., 0]).abs()

    @property
    def stored_name(self) -> str:
        return self.stored.name

    @property
    def type_name(self) -> str:
        return self.stored.kind.name

    @property
    def packed_format(self) -> PackedFormat | None:
        """The format of packed weights with the same codes and scales, even if no kernel supports it; None: none."""
        is_as_stored = self.stored.scale is None and self.columns is None
        return self.type_name.lower() if is_as_stored and self.type_name != "MXFP4" else None

    @property
    def block_inputs(self) -> int:
        return self.stored.block[0]

    def read_codes(self, read_rows: ReadRows, part: tuple[slice, ...], inputs: slice, unit: int) -> StoredCodes:
        first, others = part[0], (slice(None), *part[1:])
        blocks = self.stored.data[first if self.rows is None else self.rows[first]]
        with warnings.catch_warnings():  # the mapped file is read-only, which torch warns about
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            codes = torch.from_numpy(blocks)
        size, num_bytes = self.stored.block
        columns = slice(inputs.start // size * num_bytes, -(-inputs.stop // size) * num_bytes)
        rows = codes[others][..., columns]
        return StoredCodes(rows.reshape(-1, rows.shape[-1]), None, inputs.start % size)

    @property
    def is_mxfp4(self) -> bool:
        is_as_stored = self.stored.scale is None and self.rows is None and self.columns is None
        return self.stored.kind.name == "MXFP4" and is_as_stored

    def read_mxfp4(self, read_rows: ReadRows, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return codes in the order of safetensors. GGUF stores the first half of a group in the low bits."""
        blocks = self.stored.data[start:stop]
        groups = blocks.reshape(*blocks.shape[:-1], -1, _MXFP4_BYTES)
        exponents, halves = groups[..., 0], groups[..., 1:]
        if exponents.max() == E8M0_NAN:
            raise CheckpointError(
                f"{self.shard}: tensor {self.stored.name!r} holds a scale that is NaN; fetch it again"
            )
        codes = np.concatenate([halves & 15, halves >> 4], axis=-1)
        pairs = codes[..., 0::2] | codes[..., 1::2] << 4
        return torch.from_numpy(pairs.reshape(*blocks.shape[:-1], -1)), torch.from_numpy(exponents.copy())


@dataclass(frozen=True)
class SmallTensor:
    """A tensor that is not quantised, and has another shape in the model than in the file."""

    is_encoded: ClassVar[bool] = True
    stored: GgufTensor
    shape: tuple[int, ...]
    is_decay: bool = False  # the file stores -exp(value)

    @property
    def shard(self) -> Path:
        return self.stored.shard

    def check(self) -> None:
        self.stored.check()  # the shape has as many elements as the stored tensor

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        values = self.stored.read(read_rows, 0, self.stored.shape[0]).reshape(self.shape)
        if not self.is_decay:
            return values[start:stop]
        if bool((values >= 0).any()):
            raise CheckpointError(
                f"{self.shard}: tensor {self.stored.stored.name!r} holds values that are not negative"
            )
        return values[start:stop].neg().log()


@dataclass(frozen=True)
class HeadMapsTensor:
    """The up-projections from the latent to keys and values [H * (K + V), L], which GGUF stores as two tensors."""

    is_encoded: ClassVar[bool] = True
    keys: GgufTensor  # [H, L, K], transposed
    values: GgufTensor  # [H, V, L]

    @property
    def shape(self) -> tuple[int, ...]:
        num_heads, latent, key_size = self.keys.shape
        return num_heads * (key_size + self.values.shape[1]), latent

    @property
    def type_name(self) -> str:
        return self.values.type_name

    @property
    def shard(self) -> Path:
        return self.keys.shard

    def check(self) -> None:
        self.keys.check()
        self.values.check()
        if [len(self.keys.shape), len(self.values.shape)] != [3, 3] or self.keys.shape[:2] != self.values.shape[::2]:
            raise CheckpointError(
                f"{self.shard}: {self.keys.stored.name!r} has shape {list(self.keys.shape)} and "
                f"{self.values.stored.name!r} {list(self.values.shape)}; both must have the same heads and latent"
            )

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        size = self.shape[0] // self.keys.shape[0]
        first, last = start // size, -(-stop // size)
        keys_HKL = self.keys.read(read_rows, first, last).transpose(1, 2)
        maps = torch.cat([keys_HKL, self.values.read(read_rows, first, last)], dim=1).flatten(0, 1)
        return maps[start - first * size : stop - first * size]
