"""The tensors of a checkpoint, plain or encoded, and the decoding of 8-bit floats and MXFP4.

An encoded weight is decoded to float32, slice by slice. Only weights are decoded: rules of a format for quantising
activations are not applied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.ops.interfaces import MXFP4_GROUP

# O rows, I columns, B blocks in a row, G blocks in a column, or groups of 32 values in a row, e experts

PLAIN_DTYPES = ("F32", "F16", "BF16")
FP8_NAN = 0x7F  # E4M3 has no infinities, and one NaN of each sign
E8M0_NAN = 255
FP4_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # E2M1, by code; codes 8 to 15 are their negatives

_FP4 = torch.tensor(FP4_MAGNITUDES + [-magnitude for magnitude in FP4_MAGNITUDES])
# The two values of each byte, low nibble first, as one int64, so that one look-up returns both.
_FP4_PAIR_OF_BYTE = torch.stack([_FP4.repeat(16), _FP4.repeat_interleave(16)], dim=1).view(torch.int64)[:, 0]
_POWER_OF_BYTE = torch.tensor([2.0 ** (byte - 127) for byte in range(E8M0_NAN)])


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor, as the header of its shard describes it."""

    name: str
    shard: Path
    dtype: str  # safetensors' name, such as "BF16"
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the shard. The number in safetensors' name of a dtype is its width in bits."""
        bits = 8 if self.dtype == "BOOL" else int(re.findall(r"\d+", self.dtype)[0])
        return math.prod(self.shape) * bits // 8

    def wrong(self, why: str) -> CheckpointError:
        """Return an error that names shard and tensor."""
        return CheckpointError(f"{self.shard}: tensor {self.name!r} {why}")


ReadRows = Callable[[StoredTensor, int, int], Tensor]  # (tensor, start, stop) -> slices of the first dimension


class CheckpointTensor(Protocol):
    """A tensor of the model, stored plain or encoded."""

    is_encoded: ClassVar[bool]

    @property
    def shape(self) -> tuple[int, ...]:
        """The decoded shape. Valid after `check`."""

    @property
    def shard(self) -> Path:
        """The shard with the largest part of the tensor, if several shards store parts of it."""

    def check(self) -> None:
        """Raise CheckpointError if dtypes or shapes in the headers are not supported."""

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        """Return [stop - start, *shape[1:]], slices of the first dimension; encoded tensors in float32."""


def decode_fp8(codes_OI: Tensor, scale_OB: Tensor, block_width: int) -> Tensor:
    """Return values [O, I] float32 of E4M3 codes [O, I] (uint8, no NaN), each times the scale of its block.

    `scale_OB` is float32, with B = ceil(I / block_width). Source: OCP 8-bit floating point specification, E4M3.
    """
    # E4M3's exponent and mantissa in the place of float16's are 2**-8 times the value, since the exponents' biases are
    # 7 and 15. That holds for subnormals too, and is three times as fast as torch's conversion.
    halves_OI = codes_OI.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    values_OI = halves_OI.view(torch.float16).float()
    scale_OB = scale_OB * 2.0**8
    num_whole = values_OI.shape[1] // block_width
    whole, rest = values_OI.split([num_whole * block_width, values_OI.shape[1] - num_whole * block_width], dim=1)
    whole.unflatten(1, (num_whole, block_width)).mul_(scale_OB[:, :num_whole, None])
    rest.mul_(scale_OB[:, num_whole:])
    return values_OI


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return values [..., 32 G] float32 of blocks [..., G, 16] and scales [..., G] (both uint8, no scale of 255).

    Source: OCP Microscaling formats specification, MXFP4: E2M1 values with a shared E8M0 scale.
    """
    pairs = _FP4_PAIR_OF_BYTE.index_select(0, blocks.flatten().int())
    values = pairs.view(torch.float32).view(*scales.shape, MXFP4_GROUP)
    return values.mul_(_POWER_OF_BYTE[scales.int()][..., None]).flatten(-2)


def check_mxfp4_scales(stored: StoredTensor, scales: Tensor) -> None:
    """Raise CheckpointError for a NaN, which would turn the output of every token into NaN."""
    if int(scales.amax()) == E8M0_NAN:
        raise stored.wrong(f"holds a scale of {E8M0_NAN}, which is NaN; fetch it again")


@dataclass(frozen=True)
class PlainTensor:
    """A tensor that is not encoded."""

    is_encoded: ClassVar[bool] = False
    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def shard(self) -> Path:
        return self.stored.shard

    def check(self) -> None:
        if self.stored.dtype not in PLAIN_DTYPES:
            raise self.stored.wrong(f"is {self.stored.dtype}; supported: {', '.join(PLAIN_DTYPES)}")

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        return read_rows(self.stored, start, stop)


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix [O, I] of E4M3 codes with a scale for each block."""

    is_encoded: ClassVar[bool] = True
    weight: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]  # rows and columns; the last blocks may be smaller

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def shard(self) -> Path:
        return self.weight.shard

    def check(self) -> None:
        if self.weight.dtype != "F8_E4M3":
            raise self.weight.wrong(f"is {self.weight.dtype}; with the scales {self.scale.name!r} it must be F8_E4M3")
        if self.scale.dtype not in ("F32", "BF16"):
            raise self.scale.wrong(f"is {self.scale.dtype}; supported for scales: F32, BF16")
        if len(self.shape) != 2:
            raise self.weight.wrong(f"has shape {list(self.shape)}; fp8 blocks are supported for matrices only")
        scale_shape = [-(-size // step) for size, step in zip(self.shape, self.block, strict=True)]
        if list(self.scale.shape) != scale_shape:
            raise self.scale.wrong(
                f"has shape {list(self.scale.shape)}; a weight of shape {list(self.shape)} in blocks of "
                f"{self.block[0]} x {self.block[1]} needs {scale_shape}"
            )

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        height, width = self.block
        codes_OI, scales_GB = self.read_blocks(read_rows, start, stop)
        scale_OB = scales_GB[torch.arange(start, stop) // height - start // height]
        return decode_fp8(codes_OI, scale_OB, width)

    def read_blocks(self, read_rows: ReadRows, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return codes [O, I] uint8 of rows `start` to `stop`, and scales [G, B] float32 of their blocks."""
        height, _ = self.block
        codes_OI = read_rows(self.weight, start, stop).view(torch.uint8)
        if int((codes_OI & FP8_NAN).amax()) == FP8_NAN:
            raise self.weight.wrong("holds NaN; fetch it again")
        return codes_OI, read_rows(self.scale, start // height, -(-stop // height)).float()


@dataclass(frozen=True)
class Mxfp4Part(PlainTensor):
    """The codes or the scales of matrices in MXFP4, which are loaded as they are stored (uint8)."""

    def check(self) -> None:
        if self.stored.dtype != "U8":
            raise self.stored.wrong(f"is {self.stored.dtype}; mxfp4 is stored as U8")

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        part = super().read(read_rows, start, stop)
        if self.stored.name.endswith("_scales"):
            check_mxfp4_scales(self.stored, part)
        return part


@dataclass(frozen=True)
class Mxfp4Tensor:
    """Matrices [e, I, O], stored transposed as E2M1 codes [e, O, G, 16] with a scale for each 32 values along I."""

    is_encoded: ClassVar[bool] = True
    blocks: StoredTensor
    scales: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        num_experts, num_rows, num_groups, _ = self.blocks.shape
        return num_experts, num_groups * MXFP4_GROUP, num_rows

    @property
    def shard(self) -> Path:
        return self.blocks.shard

    def check(self) -> None:
        for stored in (self.blocks, self.scales):
            if stored.dtype != "U8":
                raise stored.wrong(f"is {stored.dtype}; mxfp4 is stored as U8")
        if len(self.blocks.shape) != 4 or self.blocks.shape[-1] != MXFP4_GROUP // 2:
            raise self.blocks.wrong(f"has shape {list(self.blocks.shape)}; mxfp4 needs [experts, rows, groups, 16]")
        if self.scales.shape != self.blocks.shape[:-1]:
            raise self.scales.wrong(
                f"has shape {list(self.scales.shape)}; {self.blocks.name!r} needs {list(self.blocks.shape[:-1])}"
            )

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        scales = read_rows(self.scales, start, stop)
        check_mxfp4_scales(self.scales, scales)
        return decode_mxfp4(read_rows(self.blocks, start, stop), scales).transpose(1, 2)
