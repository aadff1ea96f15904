"""Weights of 8-bit codes, which are floats (FP8) or integers, with a scale for each block of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from moeserve.models.checkpoint.float4_tensors import E8M0_DTYPES, e8m0_values
from moeserve.models.checkpoint.tensors import PLAIN_DTYPES, ReadRows, StoredTensor
from moeserve.ops.products.interface import PackedFormat, StoredCodes

# O: rows, I: columns, B: blocks in a row, G: blocks in a column


PACKED_INPUTS = 128  # inputs that share a scale in packed weights
FP8_NAN = 0x7F  # E4M3 has no infinities, and one NaN for each sign


def decode_fp8(codes_OI: Tensor, scale_OB: Tensor, block_width: int) -> Tensor:
    """Return values [O, I] float32 of E4M3 codes [O, I] (uint8, no NaN), each times the scale of its block.

    `scale_OB` is float32, with B = ceil(I / block_width). Source: OCP 8-bit floating point specification, E4M3.
    """
    # Moving E4M3's exponent and mantissa to those of float16 gives 2**-8 times the value, because the exponent biases
    # are 7 and 15. This is also correct for subnormals, and three times as fast as torch's conversion.
    halves_OI = codes_OI.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    values_OI = halves_OI.view(torch.float16).float()
    scale_OB = scale_OB * 2.0**8
    num_whole = values_OI.shape[1] // block_width
    whole, rest = values_OI.split([num_whole * block_width, values_OI.shape[1] - num_whole * block_width], dim=1)
    whole.unflatten(1, (num_whole, block_width)).mul_(scale_OB[:, :num_whole, None])
    rest.mul_(scale_OB[:, num_whole:])
    return values_OI


@dataclass(frozen=True)
class ScaledTensor:
    """Matrices [..., O, I] of 8-bit codes, floats (E4M3) or integers, with a scale for each block of values."""

    is_encoded: ClassVar[bool] = True
    weight: StoredTensor
    scale: StoredTensor
    dtype: str = "F8_E4M3"  # or "I8"
    block_size: tuple[int, int] | None = None  # the last blocks may be smaller; None: scale per row, column or matrix

    @classmethod
    def build(
        cls, options: Sequence[tuple[str, tuple[int, int] | None]], weight: StoredTensor, scale: StoredTensor
    ) -> ScaledTensor:
        """Return a tensor with the first dtype and block size in `options` that fit the stored dtype and shapes."""
        candidates = [cls(weight, scale, dtype, block_size) for dtype, block_size in options]
        fitting = (each for each in candidates if each.weight.dtype == each.dtype and each.scale_dims is not None)
        return next(fitting, candidates[0])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def shard(self) -> Path:
        return self.weight.shard

    @property
    def scale_dims(self) -> tuple[int, ...] | None:
        """Number of scales along each dimension; None if the scales do not fit the matrices."""
        stored, rank = self.scale.shape, len(self.shape)
        if rank not in (2, 3):
            return None
        if self.block_size is not None:
            needed = tuple(-(-size // step) for size, step in zip(self.shape, self.block, strict=True))
            return stored if stored == needed else None
        if math.prod(stored) == 1:
            return (1,) * rank
        # Trailing ones may be left out of a scale's shape. A shape [e, n] may also mean one scale per column of [e, I,
        # n].
        forms = {stored + (1,) * (rank - len(stored))}
        if rank == 3 and len(stored) == 2:
            forms.add((stored[0], 1, stored[1]))
        fitting = [
            form
            for form in forms
            if len(form) == rank and all(num in (1, size) for num, size in zip(form, self.shape, strict=True))
        ]
        return fitting[0] if len(fitting) == 1 else None

    @property
    def block(self) -> tuple[int, ...]:
        """Number of values along each dimension that share a scale."""
        if self.block_size is not None:
            return (1,) * (len(self.shape) - 2) + self.block_size
        dims = self.scale_dims
        assert dims is not None
        return tuple(size if num == 1 else 1 for num, size in zip(dims, self.shape, strict=True))

    def check(self) -> None:
        if self.weight.dtype != self.dtype:
            raise self.weight.wrong(
                f"is {self.weight.dtype}; with the scales {self.scale.name!r} it must be {self.dtype}"
            )
        if self.scale.dtype not in (*PLAIN_DTYPES, "F8_E8M0", *(("U8",) if self.block_size else ())):
            raise self.scale.wrong(f"is {self.scale.dtype}; supported for scales: {', '.join(PLAIN_DTYPES)}")
        if len(self.shape) not in (2, 3):
            raise self.weight.wrong(f"has shape {list(self.shape)}; 8-bit weights must be matrices")
        if self.scale_dims is None:
            needs = ""
            if self.block_size is not None:
                needed = [-(-size // step) for size, step in zip(self.shape, self.block, strict=True)]
                needs = f" in blocks of {self.block_size[0]} x {self.block_size[1]}, which needs {needed}"
            raise self.scale.wrong(
                f"has shape {list(self.scale.shape)}, which does not fit a weight of shape {list(self.shape)}{needs}"
            )

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        *leading, height, width = self.block
        codes, scales = self.read_blocks(read_rows, start, stop)
        first = self.block[0]
        scales = scales[torch.arange(start, stop) // first - start // first]  # scales of each row, or of each matrix
        if leading:
            scales = scales[:, torch.arange(codes.shape[1]) // height].flatten(0, 1)
        codes_OI = codes.flatten(0, -2)
        values_OI = decode_fp8(codes_OI, scales, width) if self.dtype != "I8" else _scaled(codes_OI, scales, width)
        return values_OI.view(codes.shape)

    def read_blocks(self, read_rows: ReadRows, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the codes [..., O, I] uint8 of some slices, and the scales [..., G, B] float32 of their blocks."""
        codes = read_rows(self.weight, start, stop).view(torch.uint8)
        if self.dtype != "I8" and int((codes & FP8_NAN).amax()) == FP8_NAN:
            raise self.weight.wrong("holds NaN; fetch it again")
        return codes, self._read_scales(read_rows, start, stop)

    @property
    def type_name(self) -> str:
        return "int8" if self.dtype == "I8" else "fp8"

    @property
    def stored_name(self) -> str:
        return self.weight.name

    @property
    def packed_format(self) -> PackedFormat | None:
        """The format of packed weights with the same codes and scales; None also if `check` refuses the tensor."""
        is_fp8 = self.dtype == self.weight.dtype == "F8_E4M3"
        return "fp8" if is_fp8 and self.scale_dims is not None else None

    @property
    def block_inputs(self) -> int:
        """Number of inputs in a packed group that share a scale; a divisor of PACKED_INPUTS."""
        width = self.block[-1]
        return PACKED_INPUTS if width == self.shape[-1] else math.gcd(width, PACKED_INPUTS)

    def read_codes(self, read_rows: ReadRows, part: tuple[slice, ...], inputs: slice, unit: int) -> StoredCodes:
        first, others = part[0], (slice(None), *part[1:])
        codes = read_rows(self.weight, first.start, first.stop).view(torch.uint8)[others][..., inputs]
        scales = self._read_scales(read_rows, first.start, first.stop)
        places = [torch.arange(first.start, first.stop) // self.block[0] - first.start // self.block[0]]
        full = [slice(0, size) for size in self.shape[1:-1]]
        for cut, size in zip([*part[1:], *full[len(part) - 1 :]], self.block[1:-1], strict=True):
            places.append(torch.arange(cut.start, cut.stop) // size)
        places.append(torch.arange(inputs.start, inputs.stop, unit) // self.block[-1])
        for dim, index in enumerate(places):
            scales = scales.index_select(dim, index)
        return StoredCodes(codes.reshape(-1, codes.shape[-1]), scales.flatten(0, -2).contiguous())

    def _read_scales(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        """Return the scales [..., G, B] float32 of the blocks of slices `start` to `stop` of the first dimension."""
        assert self.scale_dims is not None
        first = self.block[0]
        scales = read_rows(self.scale, start // first, -(-stop // first))
        scales = e8m0_values(self.scale, scales) if self.scale.dtype in E8M0_DTYPES else scales.float()
        return scales.reshape(-1, *self.scale_dims[1:])


def _scaled(codes_OI: Tensor, scale_OB: Tensor, block_width: int) -> Tensor:
    """Return values [O, I] float32 of integers [O, I] (int8 in uint8), each times the scale of its block."""
    scale_OI = scale_OB.repeat_interleave(block_width, dim=1)[:, : codes_OI.shape[1]]
    return codes_OI.view(torch.int8) * scale_OI
