"""Products of rows with weights, and the weights that they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moeserve.ops.rows.activations import Activation, num_parts_of

# C columns: the outputs, or half as many after a gated activation (gates first, then ups)


class RowGroups(NamedTuple):
    """The rows of each weight, ordered by weight: the first counts_e[0] rows belong to the first weight, and so on."""

    counts_e: Tensor  # int64
    has_spare_rows: bool = False  # rows may follow whose results are undefined; otherwise all rows are counted
    expected_rows: int | None = None  # estimate of the number of counted rows, for speed only; None: all rows


class Gather(NamedTuple):
    """Indices by which a product gathers its rows: row r is row indices_R[r] // divisor of the source."""

    indices_R: Tensor
    divisor: int


@dataclass(frozen=True)
class InputChunks:
    """The order in which a product adds its inputs if they are divided over ranks.

    Each chunk is summed separately, in float32, and the sums of the chunks are added in a tree, neighbours first. The
    total therefore does not depend on the number of ranks. A bias is added to the sum of the first chunk.

    Only batch-invariant backends use chunks; other backends add inputs in any order.
    """

    size: int  # inputs per chunk; the last chunk may have fewer
    keeps_float32: bool  # results are not rounded, because they are logits, or partial sums that the ranks add


PackedFormat = str  # a name in the table of formats in csrc/cpu/weight_format.h
STORED_GROUP = 32  # inputs; formats that keep a checkpoint's codes can be cut at multiples of this number
PANEL_ROWS = 32  # outputs of a panel; rows can be packed one after another if cut at multiples of this number


@dataclass(frozen=True)
class StoredRows:
    """Rows of a weight that keep the codes of a checkpoint."""

    format: PackedFormat
    num_rows: int


class StoredCodes(NamedTuple):
    """Rows of a weight as a checkpoint stores them."""

    codes_RB: Tensor  # uint8, rows contiguous
    scales_RG: Tensor | None = None  # scales that are not among the codes, one for each unit of inputs
    first_input: int = 0  # number of inputs of the first block that are left out


@dataclass(frozen=True)
class OpenWeights:
    """Weights [e, O, I] in the row-major layout of checkpoints, not packed.

    Weights in MXFP4 are codes [e, O, I / 2] uint8, with the first of two inputs in the low half of a byte, and
    exponents [e, O, I / MXFP4_GROUP] uint8 as scales (OCP Microscaling formats specification).
    """

    weight_eOI: Tensor
    bias_eO: Tensor | None = None
    activation: Activation | None = None
    scales_eGB: Tensor | None = None  # scales of weights in MXFP4 or in 8-bit blocks, see weight_blocks.py
    chunks: InputChunks | None = None  # None: a product adds all inputs in one chunk
    feeds_blocks: bool = False  # the results are read only by another product of weights in 8-bit blocks
    # [e, O, G] float16: a scale for each INT4_GROUP inputs. Weights that are integers times these scales, with fewer
    # than 16 distinct integers in a group, are packed as int4 without loss; no other weights are packed as int4.
    int4_scales_eOG: Tensor | None = None
    stored_rows: tuple[StoredRows, ...] = ()  # formats of rows that stay as stored; empty: none

    @property
    def is_mxfp4(self) -> bool:
        return self.weight_eOI.dtype == torch.uint8

    @property
    def is_in_blocks(self) -> bool:
        return self.scales_eGB is not None and not self.is_mxfp4

    @property
    def num_inputs(self) -> int:
        return self.weight_eOI.shape[2] * (2 if self.is_mxfp4 else 1)

    @property
    def num_parts(self) -> int:
        """Number of parts of a weight's outputs: two before a gated activation (gates and ups), otherwise one."""
        return num_parts_of(self.activation)

    @property
    def num_columns(self) -> int:
        return self.weight_eOI.shape[1] // self.num_parts


class Product(Protocol):
    """The operation activation(input @ weight.T + bias) for one weight.

    Here and below, inputs and results are tensors. Results have contiguous rows and the dtype of the input, or float32
    if `InputChunks.keeps_float32`. Products of weights in 8-bit blocks also accept `Float8Rows`, and return them if
    `OpenWeights.feeds_blocks`.
    """

    def multiply(self, input_TI: Any) -> Any:
        """Return the results [T, C]."""
        ...


class GroupedProduct(Protocol):
    """The operation of `Product` for several weights of one shape, each of which multiplies its own rows."""

    def multiply(
        self, rows_RI: Any, groups: RowGroups, gather: Gather | None = None, out_RC: Tensor | None = None
    ) -> Any:
        """Return the results [R, C].

        Args:
            rows_RI: the rows, or the source of `gather`.
            gather: on the GPU, allowed only if `Backend.products_gather_rows`.
            out_RC: memory for the results, on CPUs only; None: new memory.
        """
        ...

    def multiply_slots(self, slots_eSI: Any, groups: RowGroups) -> Any:
        """Return the results [e, S, C]. A weight's rows are in its first slots; other slots have undefined results."""
        ...


class HeadProduct(Protocol):
    """The operation of `Product` for several weights of one shape. Each token has an input for each weight."""

    def multiply(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        """Return the results [T, e, C].

        Args:
            out_TeC: memory for the results, which may be a view of a wider tensor; None: new memory.
        """
        ...


INT4_GROUP = 32  # inputs of int4 weights that share a scale and a zero point
MXFP4_GROUP = 32  # inputs of weights in MXFP4 that share a scale


@dataclass(frozen=True)
class PackedWeights:
    """Weights packed in the order in which CPU kernels read them (csrc/cpu/weight_format.h)."""

    format: PackedFormat  # format of all rows, or of the first rows if `stored_rows` lists several formats
    panels: Tensor  # [e, bytes] uint8
    num_outputs: int
    num_inputs: int
    bias_eO: Tensor | None
    activation: Activation | None
    chunks: InputChunks | None = None
    stored_rows: tuple[StoredRows, ...] = ()

    @classmethod
    def from_panels(cls, weights: OpenWeights, packed_format: PackedFormat, panels: Tensor) -> PackedWeights:
        """Return packed weights with `panels`, and with the bias, activation and shape of the open weights."""
        return cls(
            packed_format,
            panels,
            weights.weight_eOI.shape[1],
            weights.num_inputs,
            weights.bias_eO,
            weights.activation,
            weights.chunks,
            weights.stored_rows,
        )

    @property
    def num_columns(self) -> int:
        return self.num_outputs // num_parts_of(self.activation)

    @property
    def keeps_float32(self) -> bool:
        return self.chunks is not None and self.chunks.keeps_float32
