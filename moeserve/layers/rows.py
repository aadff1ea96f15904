"""Rows of the weight mapping: which part of a checkpoint's tensor is copied to which memory of a rank's model.

Networks yield their own rows, by the names that all families share: a family translates the names that its checkpoints
store (`moeserve/models/family.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from moeserve.layers.weights import AnyWeights


@dataclass(frozen=True)
class Destination:
    """A part of the model's memory, and the part of a checkpoint's tensor that is copied to it."""

    memory: Tensor  # a view with the elements of the part in order; dimensions may be split further
    shape: tuple[int, ...]  # shape of the whole tensor in the checkpoint
    part: tuple[slice, ...]  # slices of the tensor's leading dimensions; other dimensions are complete
    owner: AnyWeights | None = None  # the weights that own the memory; None: a parameter that is never packed
    offset: float = 0.0  # added to the checkpoint's values
    factor: float = 1.0  # multiplies them before
    mxfp4_scales: Tensor | None = None  # memory for the scales of a matrix in MXFP4; `memory` then gets its codes

    def __post_init__(self) -> None:
        sizes = [part.stop - part.start for part in self.part]
        values_of_element = 1 if self.mxfp4_scales is None else 2
        assert self.memory.numel() * values_of_element == math.prod([*sizes, *self.shape[len(sizes) :]])

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are filled."""
        return [self.memory] if self.mxfp4_scales is None else [self.memory, self.mxfp4_scales]

    @property
    def is_in_blocks(self) -> bool:
        """True if the memory holds 8-bit blocks with scales."""
        return self.owner is not None and self.owner.scales is not None and not self.owner.is_mxfp4

    @property
    def is_stored(self) -> bool:
        """True if stored codes are packed without decoding. `memory` then has only a shape and a place."""
        return self.owner is not None and bool(self.owner.stored_rows)

    @property
    def int4_scales(self) -> Tensor | None:
        """The memory [rows, groups] for scales if int4 codes are kept, otherwise None."""
        if self.owner is None or self.owner.int4_scales is None:
            return None
        num_rows = math.prod(self.memory.shape[:-1])
        return self.owner.int4_scales.flatten(0, 1)[self.first_row : self.first_row + num_rows]

    @property
    def first_row(self) -> int:
        """The first of the memory's rows, counted over all weights of its owner."""
        assert self.owner is not None
        weight_eOI = self.owner.open.weight_eOI
        return (self.memory.storage_offset() - weight_eOI.storage_offset()) // weight_eOI.shape[2]


Row = tuple[str, Destination | None]  # tensor name and destination; None: only other ranks need the tensor


@dataclass(frozen=True)
class At:
    """A place in the names of a checkpoint's tensors: that of a layer, a network or a part of it."""

    prefix: str  # "model.layers.3.self_attn"
    stored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of all tensors, by name
    norm_offset: float = 0.0  # added to the weights of norms, which checkpoints store as differences from it

    def __call__(self, name: str) -> str:
        """Return the name of a tensor at this place."""
        return f"{self.prefix}.{name}"

    def under(self, name: str) -> At:
        """Return the place of a part."""
        return dataclasses.replace(self, prefix=self(name))

    def has(self, name: str) -> bool:
        """Return True if the checkpoint stores a tensor of this name at this place."""
        return self(name) in self.stored


def whole(memory: Tensor, owner: AnyWeights | None = None, offset: float = 0.0, factor: float = 1.0) -> Destination:
    """Return the destination of a whole tensor."""
    return Destination(memory, tuple(memory.shape), (), owner, offset, factor)


def some_rows(memory: Tensor, share: slice, num_rows: int, owner: AnyWeights | None = None) -> Destination:
    """Return the destination of some of a tensor's `num_rows` rows (its first dimension)."""
    return Destination(memory, (num_rows, *memory.shape[1:]), (share,), owner)


def some_columns(memory: Tensor, share: slice, num_columns: int, owner: AnyWeights | None = None) -> Destination:
    """Return the destination [rows, columns] of some of a matrix's `num_columns` columns."""
    return Destination(memory, (memory.shape[0], num_columns), (slice(0, memory.shape[0]), share), owner)


def residual_taps(name: str, taps_WC: Tensor, share: slice, num_channels: int) -> Iterator[Row]:
    """Yield the rows of the taps of a convolution of some channels whose input is added to its output."""
    num_taps = len(taps_WC)
    for part, offset in ((slice(0, num_taps - 1), 0.0), (slice(num_taps - 1, num_taps), 1.0)):
        memory = taps_WC[part].T[:, None]
        yield name, Destination(memory, (num_channels, 1, num_taps), (share, slice(0, 1), part), offset=offset)


def mxfp4_matrix(codes_OI: Tensor, scales_OG: Tensor, owner: AnyWeights) -> Destination:
    """Return the destination of a whole matrix in MXFP4 whose codes and scales are kept."""
    shape = codes_OI.shape[0], 2 * codes_OI.shape[1]
    return Destination(codes_OI, shape, (), owner, mxfp4_scales=scales_OG)


def one_of_stack(matrix: Destination, index: int, num_matrices: int) -> Destination:
    """Return the destination of a matrix in MXFP4 that the checkpoint stores in a stack of several."""
    assert matrix.mxfp4_scales is not None
    return dataclasses.replace(
        matrix,
        memory=matrix.memory[None],
        shape=(num_matrices, *matrix.shape),
        part=(slice(index, index + 1),),
        mxfp4_scales=matrix.mxfp4_scales[None],
    )


def rows_of_heads(share: slice, size: int) -> slice:
    """Return the rows of a share of heads of `size` rows each."""
    return slice(share.start * size, share.stop * size)
