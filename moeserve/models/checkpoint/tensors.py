"""Plain and encoded tensors of a checkpoint, and the decoding of 8-bit codes and 4-bit floats.

Encoded weights are decoded to float32, slice by slice. Formats may also specify how to quantise activations; this is
ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.ops.products.interface import MXFP4_GROUP

# O rows, I columns, B blocks in a row, G blocks in a column, or groups of 16 or 32 values in a row, e experts

PLAIN_DTYPES = ("F32", "F16", "BF16")
INTEGER_DTYPES = ("I64", "I32")  # dtypes of tables, such as the experts of each token id
FP8_NAN = 0x7F  # E4M3 has no infinities, and one NaN for each sign
E8M0_NAN = 255
NVFP4_GROUP = 16  # inputs that share a scale
FP4_CODES = ("U8", "I8")  # dtypes of pairs of codes
E8M0_DTYPES = ("U8", "F8_E8M0")
FP4_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # E2M1 values of codes 0 to 7; codes 8 to 15 negate them

_FP4 = torch.tensor(FP4_MAGNITUDES + [-magnitude for magnitude in FP4_MAGNITUDES])
# The two values of each byte, low nibble first, as one int64, so that one look-up returns both.
_FP4_PAIR_OF_BYTE = torch.stack([_FP4.repeat(16), _FP4.repeat_interleave(16)], dim=1).view(torch.int64)[:, 0]
_POWER_OF_BYTE = torch.tensor([2.0 ** (byte - 127) for byte in range(E8M0_NAN)])


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor, described by the header of its shard."""

    name: str
    shard: Path
    dtype: str  # safetensors' name, such as "BF16"
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the shard, from the width in bits that safetensors' name of the dtype contains."""
        bits = 8 if self.dtype == "BOOL" else int(re.findall(r"\d+", self.dtype)[0])
        return math.prod(self.shape) * bits // 8

    def wrong(self, why: str) -> CheckpointError:
        """Return an error that names shard and tensor, followed by `why`."""
        return CheckpointError(f"{self.shard}: tensor {self.name!r} {why}")


ReadRows = Callable[[StoredTensor, int, int], Tensor]  # (tensor, start, stop) -> slices of the first dimension


class CheckpointTensor(Protocol):
    """A tensor of the model, stored plain or encoded."""

    is_encoded: ClassVar[bool]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape after decoding. Valid only after `check`."""

    @property
    def shard(self) -> Path:
        """The shard that stores the tensor, or the largest part of it."""

    def check(self) -> None:
        """Raise CheckpointError if dtypes or shapes in the headers are not supported."""

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        """Return a slice [stop - start, *shape[1:]] of the first dimension. Encoded tensors are decoded to float32."""


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


def decode_fp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Return values [..., G * N] float32 from pairs of E2M1 codes, with one scale for each group of N values.

    Args:
        codes: [..., G, N / 2] uint8, the first code of a pair in the low bits.
        scales: [..., G] float32.
    """
    pairs = _FP4_PAIR_OF_BYTE.index_select(0, codes.flatten().int())
    values = pairs.view(torch.float32).view(*scales.shape, 2 * codes.shape[-1])
    return values.mul_(scales[..., None]).flatten(-2)


def e8m0_values(stored: StoredTensor, exponents: Tensor) -> Tensor:
    """Return the float32 values of E8M0 scales (8 bits).

    Raises:
        CheckpointError: a scale is NaN.
    """
    exponents = exponents.view(torch.uint8)
    check_mxfp4_scales(stored, exponents)
    return _POWER_OF_BYTE[exponents.int()]


def check_mxfp4_scales(stored: StoredTensor, scales: Tensor) -> None:
    """Raise CheckpointError if a scale is NaN, because the output of every token would become NaN."""
    if int(scales.amax()) == E8M0_NAN:
        raise stored.wrong(f"holds a scale of {E8M0_NAN}, which is NaN; download it again")


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

    @property
    def is_integer(self) -> bool:
        return self.stored.dtype in INTEGER_DTYPES

    def check(self) -> None:
        if self.stored.dtype not in PLAIN_DTYPES + INTEGER_DTYPES:
            raise self.stored.wrong(f"is {self.stored.dtype}; supported: {', '.join(PLAIN_DTYPES)}")

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        return read_rows(self.stored, start, stop)


@dataclass(frozen=True)
class ScaledTensor:
    """Matrices [..., O, I] of 8-bit codes, floats (E4M3) or integers, with a scale for each block of values."""

    is_encoded: ClassVar[bool] = True
    weight: StoredTensor
    scale: StoredTensor
    dtype: str = "F8_E4M3"  # or "I8"
    block_size: tuple[int, int] | None = None  # the last blocks may be smaller; None: whole rows, columns or matrices

    @classmethod
    def build(
        cls, options: Sequence[tuple[str, tuple[int, int] | None]], weight: StoredTensor, scale: StoredTensor
    ) -> ScaledTensor:
        """Return a tensor with the first dtype and block size of `options` that fit dtype and shapes of its parts."""
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
        # Trailing ones may be left out. [e, n] may also be the scales of columns in [e, I, n].
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
        scales = scales[torch.arange(start, stop) // first - start // first]  # of each row, or of each matrix
        if leading:
            scales = scales[:, torch.arange(codes.shape[1]) // height].flatten(0, 1)
        codes_OI = codes.flatten(0, -2)
        values_OI = decode_fp8(codes_OI, scales, width) if self.dtype != "I8" else _scaled(codes_OI, scales, width)
        return values_OI.view(codes.shape)

    def read_blocks(self, read_rows: ReadRows, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return codes [..., O, I] uint8 of some slices, and scales [..., G, B] float32 of their blocks."""
        assert self.scale_dims is not None
        first = self.block[0]
        codes = read_rows(self.weight, start, stop).view(torch.uint8)
        if self.dtype != "I8" and int((codes & FP8_NAN).amax()) == FP8_NAN:
            raise self.weight.wrong("holds NaN; fetch it again")
        scales = read_rows(self.scale, start // first, -(-stop // first))
        scales = e8m0_values(self.scale, scales) if self.scale.dtype in E8M0_DTYPES else scales.float()
        return codes, scales.reshape(-1, *self.scale_dims[1:])


def _scaled(codes_OI: Tensor, scale_OB: Tensor, block_width: int) -> Tensor:
    """Return values [O, I] float32 of integers [O, I] (int8 in uint8), each times the scale of its block."""
    scale_OI = scale_OB.repeat_interleave(block_width, dim=1)[:, : codes_OI.shape[1]]
    return codes_OI.view(torch.int8) * scale_OI


@dataclass(frozen=True)
class Fp4Tensor:
    """Matrices [..., O, I] of E2M1 codes in pairs, with a scale for each group of 16 (NVFP4) or 32 (MXFP4) inputs.

    Experts may be stored transposed, as [e, I, O]; the codes of a pair are then neighbours along I.
    """

    is_encoded: ClassVar[bool] = True
    codes: StoredTensor  # [..., O, I / 2], or [e, I / 2, O], 8 bits
    scales: StoredTensor  # [..., O, G], or [e, G, O]: E4M3 in NVFP4, E8M0 in MXFP4
    global_scale: StoredTensor | None = None  # NVFP4's scale for all matrices or for each
    has_divisor: bool = False  # True: weights are divided by the global scale, as in compressed-tensors

    @property
    def is_transposed(self) -> bool:
        """True if pairs and groups are along the last dimension but one."""
        return len(self.codes.shape) == 3 and self.codes.shape[-1] == self.scales.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, num_rows, num_columns = self.codes.shape
        return (*leading, 2 * num_rows, num_columns) if self.is_transposed else (*leading, num_rows, 2 * num_columns)

    @property
    def shard(self) -> Path:
        return self.codes.shard

    def check(self) -> None:
        is_nvfp4 = self.global_scale is not None
        group = NVFP4_GROUP if is_nvfp4 else MXFP4_GROUP
        of_codes, of_scales = (("U8",), ("F8_E4M3",)) if is_nvfp4 else (FP4_CODES, E8M0_DTYPES)
        for stored, dtypes in ((self.codes, of_codes), (self.scales, of_scales), (self.global_scale, ("F32",))):
            if stored is not None and stored.dtype not in dtypes:
                name = "nvfp4" if is_nvfp4 else "mxfp4"
                raise stored.wrong(f"is {stored.dtype}; {name} needs {' or '.join(dtypes)}")
        if len(self.codes.shape) not in (2, 3) or self.shape[input_dim := -2 if self.is_transposed else -1] % group:
            raise self.codes.wrong(
                f"has shape {list(self.codes.shape)}; it must be of matrices of whole groups of {group} codes in pairs"
            )
        scale_shape = list(self.shape)
        scale_shape[input_dim] //= group
        if list(self.scales.shape) != scale_shape:
            raise self.scales.wrong(f"has shape {list(self.scales.shape)}; {self.codes.name!r} needs {scale_shape}")
        if self.global_scale is not None:
            num_scales = math.prod(self.global_scale.shape)
            num_experts = self.shape[0] if len(self.shape) == 3 else 1
            if num_scales != 1 and not num_scales == num_experts == self.global_scale.shape[0]:
                raise self.global_scale.wrong(
                    f"has shape {list(self.global_scale.shape)}; it must be one number, or one for each expert"
                )

    @property
    def is_mxfp4(self) -> bool:
        return self.global_scale is None

    def read_mxfp4(self, read_rows: ReadRows) -> tuple[Tensor, Tensor]:
        """Return the stored codes [O, I / 2] and exponents [O, G] of a matrix in MXFP4, both uint8."""
        assert self.is_mxfp4
        codes, scales = (read_rows(part, 0, self.shape[0]).view(torch.uint8) for part in (self.codes, self.scales))
        check_mxfp4_scales(self.scales, scales)
        return codes, scales

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        codes, scales = read_rows(self.codes, start, stop).view(torch.uint8), read_rows(self.scales, start, stop)
        if self.global_scale is None:
            scales = e8m0_values(self.scales, scales)
        else:
            is_of_each = math.prod(self.global_scale.shape) > 1
            global_scale = read_rows(self.global_scale, *((start, stop) if is_of_each else (0, 1)))
            global_scale = global_scale.reshape(-1, *(1,) * (scales.dim() - 1))
            scales = scales.float() / global_scale if self.has_divisor else scales.float() * global_scale
            if not bool(scales.isfinite().all()):
                # A NaN in a weight would turn the output of every token into NaN.
                raise self.scales.wrong(f"or {self.global_scale.name!r} holds NaN or infinity; download them again")
        if self.is_transposed:
            codes, scales = codes.transpose(1, 2), scales.transpose(1, 2)
        values = decode_fp4(codes.unflatten(-1, (scales.shape[-1], -1)), scales)
        return values.transpose(1, 2) if self.is_transposed else values


@dataclass(frozen=True)
class Mxfp4Part(PlainTensor):
    """The codes or the scales of matrices in MXFP4, which are loaded without decoding (uint8)."""

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
        scales = e8m0_values(self.scales, read_rows(self.scales, start, stop))
        return decode_fp4(read_rows(self.blocks, start, stop), scales).transpose(1, 2)
