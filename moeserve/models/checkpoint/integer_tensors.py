"""Weights as integers of 2 to 8 bits, in the formats of GPTQ, AWQ and compressed-tensors: codes with scales and zeros.

weight = (code - zero point) * scale, with one scale and one zero point for each output and group of inputs. Codes and
zero points are packed into int32 words without gaps, beginning with the lowest bits.

Sources: https://github.com/AutoGPTQ/AutoGPTQ, https://github.com/casper-hansen/AutoAWQ,
https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from moeserve.models.checkpoint.tensors import CheckpointTensor, ReadRows, StoredTensor
from moeserve.ops.products.interface import INT4_GROUP

# O: outputs, I: inputs, G: groups of inputs, R: some of the outputs

NUM_BITS = (2, 3, 4, 8)  # sizes of codes that are supported
WORD_BITS = 32


@runtime_checkable
class GroupedTensor(CheckpointTensor, Protocol):
    """A tensor whose codes and scales may be kept in packed int4 weights."""

    def has_packed_groups(self, read_rows: ReadRows) -> bool:
        """Return True if codes have 4 bits, and each group has all inputs or a whole number of packed groups."""

    def read_scales(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        """Return scales [stop - start, ..., ceil(I / INT4_GROUP)] of slices of the first dimension, all at least 0."""


@dataclass(frozen=True)
class IntegerStorage:
    """The layout of codes, scales and zero points in their tensors.

    Without transposition, the shapes are [O, I] for codes, and [O, G] for scales and zero points. The packed dimension
    is divided by the number of codes in a word.
    """

    is_transposed: bool
    code_dim: int  # dimension of the stored tensor along which codes are packed into words
    zero_dim: int  # dimension along which zero points are packed into words
    order: tuple[int, ...] | None = None  # index of each code of a word in unpacked order; None: the codes are in order
    zero_offset: int = 0  # added to stored zero points


GPTQ = IntegerStorage(is_transposed=True, code_dim=0, zero_dim=1, zero_offset=1)
GPTQ_V2 = IntegerStorage(is_transposed=True, code_dim=0, zero_dim=1)
AWQ = IntegerStorage(is_transposed=True, code_dim=1, zero_dim=1, order=(0, 2, 4, 6, 1, 3, 5, 7))
COMPRESSED_TENSORS = IntegerStorage(is_transposed=False, code_dim=1, zero_dim=0)


def unpack(words: Tensor, dim: int, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the codes (uint8) in a matrix of int32 words. Dimension `dim` becomes 32 / `bits` times as long."""
    rows = words if dim == 1 else words.T
    bytes_ = rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    num_bytes = bits // math.gcd(bits, 8)  # the smallest number that holds whole codes
    if num_bytes > 1:
        bytes_ = torch.nn.functional.pad(bytes_, (0, -bytes_.shape[1] % num_bytes))
        shifts = 8 * torch.arange(num_bytes, device=words.device)
        bytes_ = bytes_.unflatten(1, (-1, num_bytes)).long().bitwise_left_shift_(shifts).sum(-1)
    starts = range(0, 8 * num_bytes, bits)
    codes = torch.stack([bytes_ >> start & (1 << bits) - 1 for start in starts], dim=-1).to(torch.uint8).flatten(1)
    if order is not None:
        codes = codes.unflatten(1, (-1, len(order)))[:, :, [order.index(place) for place in range(len(order))]]
        codes = codes.flatten(1)
    return codes if dim == 1 else codes.T


def num_words(num_codes: int, bits: int) -> int:
    """Return the number of 32-bit words that hold `num_codes` codes."""
    return -(-num_codes * bits // WORD_BITS)


@dataclass(frozen=True)
class IntegerTensor:
    """A matrix [O, I] of codes with a scale and a zero point for each group of inputs."""

    is_encoded: ClassVar[bool] = True
    storage: IntegerStorage
    bits: int
    codes: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None = None  # None: the zero point is the middle code
    group_of_input: StoredTensor | None = None  # [I]; None: the inputs of a group are consecutive
    is_reordered: bool = False  # a group may consist of any inputs, so `group_of_input` is needed
    num_inputs: int | None = None  # None: rows have no padding, so the size of `codes` determines it

    @classmethod
    def build(
        cls,
        storage: IntegerStorage,
        options: Sequence[int],
        codes: StoredTensor,
        scales: StoredTensor,
        zeros: StoredTensor | None = None,
        group_of_input: StoredTensor | None = None,
        shape: Sequence[int] | None = None,
        is_reordered: bool = False,
    ) -> IntegerTensor:
        """Return a tensor whose codes have the first number of bits in `options` that fits the shapes of the parts.

        Args:
            shape: the tensor's shape, if a checkpoint stores it.
        """
        num_inputs = None if shape is None or len(shape) != 2 else int(shape[1])

        def fits(bits: int) -> bool:
            if num_inputs is not None:
                return codes.shape[-1:] == (num_words(num_inputs, bits),)
            if zeros is None or len(zeros.shape) != 2 or len(scales.shape) != 2:
                return True
            return zeros.shape[storage.zero_dim] == num_words(scales.shape[storage.zero_dim], bits)

        bits = next(filter(fits, options), options[0])
        return cls(storage, bits, codes, scales, zeros, group_of_input, is_reordered, num_inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = list(self.codes.shape)
        sizes[self.storage.code_dim] = sizes[self.storage.code_dim] * WORD_BITS // self.bits
        num_outputs, num_inputs = reversed(sizes) if self.storage.is_transposed else sizes
        return num_outputs, self.num_inputs or num_inputs

    @property
    def shard(self) -> Path:
        return self.codes.shard

    @property
    def num_groups(self) -> int:
        return self.scales.shape[0 if self.storage.is_transposed else 1]

    @property
    def group_size(self) -> int:
        """Number of inputs in a group, if all groups have the same size."""
        return self.shape[1] // self.num_groups

    def has_packed_groups(self, read_rows: ReadRows) -> bool:
        is_whole = self.group_size % INT4_GROUP == 0 or self.group_size == self.shape[1]
        return self.bits == 4 and is_whole and self._read_groups(read_rows) is None

    def check(self) -> None:
        for stored in (self.codes, self.zeros, self.group_of_input):
            if stored is not None and stored.dtype != "I32":
                raise stored.wrong(f"is {stored.dtype}; it must be I32")
        if self.scales.dtype not in ("F16", "BF16", "F32"):
            raise self.scales.wrong(f"is {self.scales.dtype}; supported for scales: F16, BF16, F32")
        if len(self.codes.shape) != 2 or len(self.scales.shape) != 2:
            raise self.codes.wrong(f"has shape {list(self.codes.shape)}; int{self.bits} is supported for matrices only")
        num_outputs, num_inputs = self.shape
        size_of_codes = num_outputs if self.storage.is_transposed == bool(self.storage.code_dim) else num_inputs
        if self.codes.shape[self.storage.code_dim] != num_words(size_of_codes, self.bits):
            raise self.codes.wrong(
                f"has shape {list(self.codes.shape)}; that is not of whole codes of {self.bits} bits"
            )
        num_groups = self.num_groups
        if (
            self.scales.shape[1 if self.storage.is_transposed else 0] != num_outputs
            or num_groups == 0
            or (num_inputs % num_groups and self.group_of_input is None)
        ):
            raise self.scales.wrong(
                f"has shape {list(self.scales.shape)}, which does not divide a weight of shape {list(self.shape)} into "
                "groups of inputs"
            )
        zero_shape = list(self.scales.shape)
        zero_shape[self.storage.zero_dim] = num_words(zero_shape[self.storage.zero_dim], self.bits)
        if self.zeros is not None and list(self.zeros.shape) != zero_shape:
            raise self.zeros.wrong(
                f"has shape {list(self.zeros.shape)}; {self.scales.name!r} with {self.bits} bits needs {zero_shape}"
            )
        if self.group_of_input is not None and self.group_of_input.shape != (num_inputs,):
            raise self.group_of_input.wrong(f"has shape {list(self.group_of_input.shape)}, not {[num_inputs]}")
        if self.is_reordered and self.group_of_input is None and num_groups > 1:
            raise self.codes.wrong("has inputs in the order of their activations, but no g_idx with their groups")

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        codes_RI = self._read_outputs(read_rows, self.codes, self.storage.code_dim, start, stop)
        codes_RI = codes_RI[:, : self.shape[1]]
        scales_RG = self._read_outputs(read_rows, self.scales, None, start, stop).float()
        if not bool(scales_RG.isfinite().all()):
            # A NaN in a weight turns the output of every token into NaN.
            raise self.scales.wrong("holds NaN or infinity; fetch it again")
        zeros_RG = torch.full_like(scales_RG, 1 << self.bits - 1)
        if self.zeros is not None:
            zeros_RG = self._read_outputs(read_rows, self.zeros, self.storage.zero_dim, start, stop).float()
            zeros_RG += self.storage.zero_offset
        group_I = self._read_groups(read_rows)
        if group_I is not None:
            return (codes_RI - zeros_RG[:, group_I]) * scales_RG[:, group_I]
        groups_RGN = codes_RI.float().unflatten(1, (-1, self.group_size))
        return groups_RGN.sub_(zeros_RG[:, :, None]).mul_(scales_RG[:, :, None]).flatten(1)

    def read_scales(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        # Only magnitudes matter: packing derives the zero point from the values, and negating a scale is equivalent to
        # replacing each code c by 15 - c.
        scales_RG = self._read_outputs(read_rows, self.scales, None, start, stop).abs()
        num_packed_groups = -(-self.group_size // INT4_GROUP)
        return scales_RG.repeat_interleave(num_packed_groups, dim=1)

    def _read_groups(self, read_rows: ReadRows) -> Tensor | None:
        """Return the group of each input [I]; None if groups are equally large and consist of consecutive inputs.

        Raises:
            CheckpointError: a group does not exist.
        """
        if self.group_of_input is None:
            return None
        group_I = read_rows(self.group_of_input, 0, self.shape[1]).long()
        if int(group_I.amin()) < 0 or int(group_I.amax()) >= self.num_groups:
            raise self.group_of_input.wrong(f"names groups that {self.scales.name!r} has not; fetch it again")
        in_order = torch.arange(len(group_I), device=group_I.device) // max(self.group_size, 1)
        return None if torch.equal(group_I, in_order) and len(group_I) % self.num_groups == 0 else group_I

    def _read_outputs(
        self, read_rows: ReadRows, stored: StoredTensor, packed_dim: int | None, start: int, stop: int
    ) -> Tensor:
        """Return the part of a stored tensor for outputs `start` to `stop`, [R, I] or [R, G]."""
        output_dim = 1 if self.storage.is_transposed else 0
        # If outputs are packed, read whole words. Codes of 3 bits cross words, so read runs of words that end with a
        # code.
        words = self.bits // math.gcd(self.bits, WORD_BITS) if packed_dim == output_dim else 1
        outputs = words * WORD_BITS // self.bits if packed_dim == output_dim else 1
        first, last = start // outputs * words, -(-stop // outputs) * words
        if output_dim == 0:
            part = read_rows(stored, first, min(last, stored.shape[0]))
        else:
            part = read_rows(stored, 0, stored.shape[0])[:, first:last]
        values = part if packed_dim is None else unpack(part, packed_dim, self.bits, self.storage.order)
        values_of_outputs = values.T if self.storage.is_transposed else values
        skipped = start - start // outputs * outputs
        return values_of_outputs[skipped : skipped + stop - start]
