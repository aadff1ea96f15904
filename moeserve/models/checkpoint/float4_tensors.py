"""Weights of 4-bit floats: MXFP4 (an E8M0 scale for each 32 values) and NVFP4 (an E4M3 scale for each 16 values)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from moeserve.models.checkpoint.tensors import CheckpointTensor, PlainTensor, ReadRows, StoredTensor
from moeserve.ops.products.interface import MXFP4_GROUP

# O: rows, I: columns, G: groups of 16 or 32 values in a row, e: experts


E8M0_NAN = 255
NVFP4_GROUP = 16  # inputs that share a scale
FP4_CODES = ("U8", "I8")  # dtypes of pairs of codes
E8M0_DTYPES = ("U8", "F8_E8M0")
FP4_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # E2M1 values of codes 0 to 7; codes 8 to 15 negate them
_FP4 = torch.tensor(FP4_MAGNITUDES + [-magnitude for magnitude in FP4_MAGNITUDES])
# The two values of each byte, low nibble first, as one int64, so that one look-up returns both.
_FP4_PAIR_OF_BYTE = torch.stack([_FP4.repeat(16), _FP4.repeat_interleave(16)], dim=1).view(torch.int64)[:, 0]
_POWER_OF_BYTE = torch.tensor([2.0 ** (byte - 127) for byte in range(E8M0_NAN)])


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


@runtime_checkable
class Mxfp4Matrices(CheckpointTensor, Protocol):
    """Matrices [..., O, I] whose codes and scales may be in MXFP4."""

    @property
    def is_mxfp4(self) -> bool:
        """True if codes and scales are in MXFP4, so that `read_mxfp4` can return them."""

    def read_mxfp4(self, read_rows: ReadRows, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return slices `start` to `stop` of the first dimension as codes [..., O, I / 2] and exponents [..., O, G].

        Both are uint8.

        Raises:
            CheckpointError: a scale is NaN.
        """


@dataclass(frozen=True)
class Fp4Tensor:
    """Matrices [..., O, I] of E2M1 codes in pairs, with a scale for each group of 16 (NVFP4) or 32 (MXFP4) inputs.

    Experts may be stored transposed, as [e, I, O]; the codes of a pair are then neighbours along I.
    """

    is_encoded: ClassVar[bool] = True
    codes: StoredTensor  # [..., O, I / 2], or [e, I / 2, O], 8 bits
    scales: StoredTensor  # [..., O, G], or [e, G, O]: E4M3 in NVFP4, E8M0 in MXFP4
    global_scale: StoredTensor | None = None  # NVFP4's scale: one for all matrices, or one for each
    has_divisor: bool = False  # True: weights are divided by the global scale, as in compressed-tensors

    @property
    def is_transposed(self) -> bool:
        """True if pairs of codes and groups are along the second to last dimension."""
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
        return self.global_scale is None and not self.is_transposed

    def read_mxfp4(self, read_rows: ReadRows, start: int, stop: int) -> tuple[Tensor, Tensor]:
        codes, scales = (read_rows(part, start, stop).view(torch.uint8) for part in (self.codes, self.scales))
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
