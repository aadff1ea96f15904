"""Rows of the weight mapping: which part of a checkpoint's tensor is copied to which memory of a rank's model.

Networks yield rows under tensor names that all model families share. Each family translates the names that its
checkpoints store to these names (`moeserve/models/family.py`).
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
    factor: float = 1.0  # multiplies the checkpoint's values before the offset is added
    mxfp4_scales: Tensor | None = None  # memory for the scales of a matrix in MXFP4; `memory` then gets its codes

    def __post_init__(self) -> None:
        sizes = [part.stop - part.start for part in self.part]
        values_of_element = 1 if self.mxfp4_scales is None else 2
        assert self.memory.numel() * values_of_element == math.prod([*sizes, *self.shape[len(sizes) :]])

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the checkpoint fills."""
        return [self.memory] if self.mxfp4_scales is None else [self.memory, self.mxfp4_scales]

    @property
    def is_in_blocks(self) -> bool:
        """True if the memory holds 8-bit blocks with scales."""
        return self.owner is not None and self.owner.scales is not None and not self.owner.is_mxfp4

    @property
    def is_stored(self) -> bool:
        """True if a checkpoint's quantised codes are packed without decoding. `memory` then has a shape but no data."""
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
        """The index of the memory's first row among the rows of all weights of its owner."""
        assert self.owner is not None
        weight_eOI = self.owner.open.weight_eOI
        return (self.memory.storage_offset() - weight_eOI.storage_offset()) // weight_eOI.shape[2]


Row = tuple[str, Destination | None]  # tensor name and destination; None: only other ranks need the tensor


@dataclass(frozen=True)
class At:
    """The place of a layer, a network or a part of a network in the names of a checkpoint's tensors."""

    prefix: str  # "model.layers.3.self_attn"
    stored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of all tensors, by name
    norm_offset: float = 0.0  # added to the weights of norms, if checkpoints store them without this number

    def __call__(self, name: str) -> str:
        """Return the name of a tensor at this place."""
        return f"{self.prefix}.{name}"

    def under(self, name: str) -> At:
        """Return the place of the part `name` of this place."""
        return dataclasses.replace(self, prefix=self(name))

    def has(self, name: str) -> bool:
        """Return True if the checkpoint stores a tensor called `name` at this place."""
        return self(name) in self.stored


def whole(memory: Tensor, owner: AnyWeights | None = None, offset: float = 0.0, factor: float = 1.0) -> Destination:
    """Return the destination of a whole tensor."""
    return Destination(memory, tuple(memory.shape), (), owner, offset, factor)


def some_rows(memory: Tensor, share: slice, num_rows: int, owner: AnyWeights | None = None) -> Destination:
    """Return the destination of rows `share` of a tensor with `num_rows` rows (the first dimension)."""
    return Destination(memory, (num_rows, *memory.shape[1:]), (share,), owner)


def some_columns(memory: Tensor, share: slice, num_columns: int, owner: AnyWeights | None = None) -> Destination:
    """Return the destination of columns `share` of a matrix [rows, num_columns]."""
    return Destination(memory, (memory.shape[0], num_columns), (slice(0, memory.shape[0]), share), owner)


def residual_taps(name: str, taps_WC: Tensor, share: slice, num_channels: int) -> Iterator[Row]:
    """Yield the weight mapping of the taps of a convolution that adds its input to its output.

    The last tap in memory is the stored tap plus one, which adds the input. `share`: this rank's channels.
    """
    num_taps = len(taps_WC)
    for part, offset in ((slice(0, num_taps - 1), 0.0), (slice(num_taps - 1, num_taps), 1.0)):
        memory = taps_WC[part].T[:, None]
        yield name, Destination(memory, (num_channels, 1, num_taps), (share, slice(0, 1), part), offset=offset)


def mxfp4_matrix(codes_OI: Tensor, scales_OG: Tensor, owner: AnyWeights) -> Destination:
    """Return the destination of a whole matrix that stays in MXFP4, with memory for its codes and scales."""
    shape = codes_OI.shape[0], 2 * codes_OI.shape[1]
    return Destination(codes_OI, shape, (), owner, mxfp4_scales=scales_OG)


def one_of_stack(matrix: Destination, index: int, num_matrices: int) -> Destination:
    """Return the destination of a matrix in MXFP4 that the checkpoint stores as matrix `index` of a stack."""
    assert matrix.mxfp4_scales is not None
    return dataclasses.replace(
        matrix,
        memory=matrix.memory[None],
        shape=(num_matrices, *matrix.shape),
        part=(slice(index, index + 1),),
        mxfp4_scales=matrix.mxfp4_scales[None],
    )


def rows_of_heads(share: slice, size: int) -> slice:
    """Return the range of rows of a range of heads with `size` rows each."""
    return slice(share.start * size, share.stop * size)
