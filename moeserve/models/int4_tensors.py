"""Weights in int4 in the formats of GPTQ, AWQ and compressed-tensors: codes with scales and zero points.

weight = (code - zero point) * scale, with one scale and one zero point for each output and group of inputs. An int32
holds eight codes or zero points, the first in its lowest bits.

Sources: https://github.com/AutoGPTQ/AutoGPTQ, https://github.com/casper-hansen/AutoAWQ,
https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from moeserve.models.quantization import CheckpointTensor, ReadRows, StoredTensor
from moeserve.ops.interfaces import INT4_GROUP

# O outputs, I inputs, G groups of inputs, R some of the outputs

CODES_PER_WORD = 8
MIDDLE_CODE = 8  # the zero point if none is stored


@runtime_checkable
class GroupedTensor(CheckpointTensor, Protocol):
    """A tensor whose codes and scales may be those of packed int4 weights."""

    @property
    def has_packed_groups(self) -> bool:
        """True if a group consists of whole groups of packed weights, or of all inputs."""

    def read_scales(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        """Return scales [stop - start, ..., ceil(I / INT4_GROUP)] of slices of the first dimension, none negative."""


@dataclass(frozen=True)
class Int4Storage:
    """The layout of codes, scales and zero points in their tensors.

    Without transposition, their shapes are [O, I], [O, G] and [O, G], with the packed dimension divided by eight.
    """

    is_transposed: bool
    code_dim: int  # dimension of the stored tensor along which codes are packed into words
    zero_dim: int  # the same for zero points
    order: tuple[int, ...] = tuple(range(CODES_PER_WORD))  # index of each code of a word in unpacked order
    zero_offset: int = 0  # added to stored zero points


GPTQ = Int4Storage(is_transposed=True, code_dim=0, zero_dim=1, zero_offset=1)
GPTQ_V2 = Int4Storage(is_transposed=True, code_dim=0, zero_dim=1)
AWQ = Int4Storage(is_transposed=True, code_dim=1, zero_dim=1, order=(0, 2, 4, 6, 1, 3, 5, 7))
COMPRESSED_TENSORS = Int4Storage(is_transposed=False, code_dim=1, zero_dim=0)


def unpack(words: Tensor, dim: int, order: tuple[int, ...]) -> Tensor:
    """Return the codes (uint8) in a matrix of int32 words. Dimension `dim` becomes eight times as long."""
    rows = words if dim == 1 else words.T
    bytes_ = rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    codes = torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).view(len(rows), -1, CODES_PER_WORD)
    if list(order) != sorted(order):
        codes = codes[:, :, [order.index(place) for place in range(CODES_PER_WORD)]]
    return codes.flatten(1) if dim == 1 else codes.flatten(1).T


@dataclass(frozen=True)
class Int4Tensor:
    """A matrix [O, I] of 4-bit codes with a scale and a zero point for each group of inputs."""

    is_encoded: ClassVar[bool] = True
    storage: Int4Storage
    codes: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None = None
    group_of_input: StoredTensor | None = None  # [I]; None: the inputs of a group are consecutive

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = list(self.codes.shape)
        sizes[self.storage.code_dim] *= CODES_PER_WORD
        return tuple(reversed(sizes) if self.storage.is_transposed else sizes)

    @property
    def shard(self) -> Path:
        return self.codes.shard

    @property
    def group_size(self) -> int:
        """Number of inputs in a group."""
        num_groups = self.scales.shape[0 if self.storage.is_transposed else 1]
        return self.shape[1] // num_groups

    @property
    def has_packed_groups(self) -> bool:
        is_whole = self.group_size % INT4_GROUP == 0 or self.group_size == self.shape[1]
        return self.group_of_input is None and is_whole

    def check(self) -> None:
        for stored in (self.codes, self.zeros, self.group_of_input):
            if stored is not None and stored.dtype != "I32":
                raise stored.wrong(f"is {stored.dtype}; it must be I32")
        if self.scales.dtype not in ("F16", "BF16", "F32"):
            raise self.scales.wrong(f"is {self.scales.dtype}; supported for scales: F16, BF16, F32")
        if len(self.codes.shape) != 2 or len(self.scales.shape) != 2:
            raise self.codes.wrong(f"has shape {list(self.codes.shape)}; int4 is supported for matrices only")
        num_outputs, num_inputs = self.shape
        group_dim = 0 if self.storage.is_transposed else 1
        num_groups = self.scales.shape[group_dim]
        if self.scales.shape[1 - group_dim] != num_outputs or num_groups == 0 or num_inputs % num_groups:
            raise self.scales.wrong(
                f"has shape {list(self.scales.shape)}, which does not divide a weight of shape {list(self.shape)} into "
                "groups of inputs"
            )
        zero_shape = list(self.scales.shape)
        zero_shape[self.storage.zero_dim] = -(-zero_shape[self.storage.zero_dim] // CODES_PER_WORD)
        if self.zeros is not None and list(self.zeros.shape) != zero_shape:
            raise self.zeros.wrong(f"has shape {list(self.zeros.shape)}; {self.scales.name!r} needs {zero_shape}")
        if self.group_of_input is not None and self.group_of_input.shape != (num_inputs,):
            raise self.group_of_input.wrong(f"has shape {list(self.group_of_input.shape)}, not {[num_inputs]}")

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        codes_RI = self._read_outputs(read_rows, self.codes, self.storage.code_dim, start, stop)
        scales_RG = self._read_outputs(read_rows, self.scales, None, start, stop).float()
        if not bool(scales_RG.isfinite().all()):
            # A NaN in a weight turns the output of every token into NaN.
            raise self.scales.wrong("holds NaN or infinity; fetch it again")
        zeros_RG = torch.full_like(scales_RG, MIDDLE_CODE)
        if self.zeros is not None:
            zeros_RG = self._read_outputs(read_rows, self.zeros, self.storage.zero_dim, start, stop).float()
            zeros_RG += self.storage.zero_offset
        if self.group_of_input is not None:
            group_I = read_rows(self.group_of_input, 0, self.shape[1]).long()
            if int(group_I.amin()) < 0 or int(group_I.amax()) >= scales_RG.shape[1]:
                raise self.group_of_input.wrong(f"names groups that {self.scales.name!r} has not; fetch it again")
            return (codes_RI - zeros_RG[:, group_I]) * scales_RG[:, group_I]
        groups_RGN = codes_RI.float().unflatten(1, (-1, self.group_size))
        return groups_RGN.sub_(zeros_RG[:, :, None]).mul_(scales_RG[:, :, None]).flatten(1)

    def read_scales(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        assert self.has_packed_groups
        # Only magnitudes matter: packing derives the zero point from the values, and negating a scale is equivalent to
        # replacing each code c by 15 - c.
        scales_RG = self._read_outputs(read_rows, self.scales, None, start, stop).abs()
        num_packed_groups = -(-self.group_size // INT4_GROUP)
        return scales_RG.repeat_interleave(num_packed_groups, dim=1)

    def _read_outputs(
        self, read_rows: ReadRows, stored: StoredTensor, packed_dim: int | None, start: int, stop: int
    ) -> Tensor:
        """Return the part of a stored tensor for outputs `start` to `stop`, [R, I] or [R, G]."""
        output_dim = 1 if self.storage.is_transposed else 0
        values_per_row = CODES_PER_WORD if packed_dim == output_dim else 1
        first, last = start // values_per_row, -(-stop // values_per_row)
        if output_dim == 0:
            part = read_rows(stored, first, last)
        else:
            part = read_rows(stored, 0, stored.shape[0])[:, first:last]
        values = part if packed_dim is None else unpack(part, packed_dim, self.storage.order)
        values_of_outputs = values.T if self.storage.is_transposed else values
        return values_of_outputs[start - first * values_per_row : stop - first * values_per_row]
