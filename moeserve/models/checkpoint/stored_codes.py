"""Weights that are packed with the codes and scales that the checkpoint stores. CPU kernels can read them."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Protocol, runtime_checkable

from moeserve.errors import CheckpointError
from moeserve.layers.rows import Destination
from moeserve.layers.weights import AnyWeights
from moeserve.models.checkpoint.shards import Checkpoint
from moeserve.models.checkpoint.tensors import CheckpointTensor, ReadRows
from moeserve.ops.products import SINGLE
from moeserve.ops.products.interface import (
    PANEL_ROWS,
    STORED_GROUP,
    InputChunks,
    PackedFormat,
    StoredCodes,
    StoredRows,
)


@runtime_checkable
class TypedTensor(CheckpointTensor, Protocol):
    """A tensor of the model that a checkpoint stores in a named type, such as Q4_K."""

    @property
    def type_name(self) -> str: ...


@runtime_checkable
class CodedTensor(TypedTensor, Protocol):
    """A tensor whose stored codes and scales can be kept in packed weights."""

    @property
    def stored_name(self) -> str:
        """The tensor's name in the file."""

    @property
    def packed_format(self) -> PackedFormat | None:
        """The format of packed weights with the same codes and scales; None: there is no such format."""

    @property
    def block_inputs(self) -> int:
        """Number of inputs in a block, which has its own scales."""

    def read_codes(self, read_rows: ReadRows, part: tuple[slice, ...], inputs: slice, unit: int) -> StoredCodes:
        """Return the rows of a part of the tensor, in their stored form.

        Args:
            part: slices of all dimensions but the last.
            inputs: slice of the last dimension.
            unit: number of inputs that share a scale in the packed weights.
        """


def keep_stored(checkpoint: Checkpoint, into: dict[str, list[Destination]]) -> str:
    """Prepare weights to keep the checkpoint's codes, if kernels can read these.

    Args:
        into: the destinations of each tensor, by name. The memory of weights may be on the meta device.

    Returns:
        The number of other weights and why they are dequantised, for a message. Empty if there are none.
    """
    parts: dict[AnyWeights, list[tuple[Destination, CheckpointTensor | None]]] = {}
    for name, places in into.items():
        for place in places:
            owner = place.owner
            if owner is not None and owner.packs and not owner.is_borrowed and not owner.is_mxfp4:
                parts.setdefault(owner, []).append((place, checkpoint.tensors.get(name)))
    others: Counter[str] = Counter()
    for weights, found in parts.items():
        rows = _stored_rows(weights, found)
        if isinstance(rows, str):
            others[rows] += 1
        elif rows:
            weights.fill_panels(rows)
    return "; ".join(f"{count} {reason}" for reason, count in others.most_common())


def fill(place: Destination, tensor: CheckpointTensor, read_rows: ReadRows) -> None:
    """Pack the part of a tensor that belongs to a destination.

    Raises:
        CheckpointError: a scale is not finite, or a code is NaN.
    """
    assert isinstance(tensor, CodedTensor)
    assert place.owner is not None
    part = (place.part or (slice(0, place.shape[0]),))[: len(place.shape) - 1]
    unit = _unit_of(tensor.block_inputs, place.owner)
    if not place.owner.fill_stored(place.first_row, tensor.read_codes(read_rows, part, _inputs_of(place), unit)):
        raise CheckpointError(
            f"{tensor.shard}: tensor {tensor.stored_name!r} holds NaN or a scale that is not finite; fetch it again"
        )


def num_bytes(place: Destination) -> int:
    """Return the size of a destination in bytes after packing."""
    assert place.owner is not None
    return place.owner.num_packed_bytes * place.memory.numel() // math.prod(place.owner.shape)


def _inputs_of(place: Destination) -> slice:
    return place.part[-1] if len(place.part) == len(place.shape) else slice(0, place.shape[-1])


def _stored_rows(
    weights: AnyWeights, parts: list[tuple[Destination, CheckpointTensor | None]]
) -> tuple[StoredRows, ...] | str:
    """Return the stored rows of each weight; empty if not quantised; or a text why the codes cannot be kept."""
    formats: dict[int, tuple[int, PackedFormat]] = {}  # number of rows and format, by first row
    for place, tensor in parts:
        if not isinstance(tensor, TypedTensor) or tensor.type_name in ("F32", "F16", "BF16"):
            return ()
        if not isinstance(tensor, CodedTensor) or tensor.packed_format not in weights.stored_formats:
            return f"in {tensor.type_name}"
        if tensor.shape != place.shape or not is_aligned(place, tensor.block_inputs, weights):
            return "in another order of rows or inputs"
        formats[place.first_row] = math.prod(place.memory.shape[:-1]), tensor.packed_format
    num_weights, num_outputs, _ = weights.shape
    part_rows = num_outputs // weights.num_parts
    of_slot = {first: rows for first, rows in sorted(formats.items()) if first < num_outputs}
    expected = {slot * num_outputs + first: rows for slot in range(num_weights) for first, rows in of_slot.items()}
    ends = [first + rows for first, (rows, _) in of_slot.items()]
    if formats != expected or [0, *ends] != [*of_slot, num_outputs]:
        return "that differ from expert to expert"
    merged: list[StoredRows] = []
    for first, (rows, packed_format) in of_slot.items():
        start = sum(each.num_rows for each in merged)
        if not merged or merged[-1].format != packed_format or first % part_rows == 0:
            merged.append(StoredRows(packed_format, rows))
        else:
            start -= merged[-1].num_rows
            merged[-1] = StoredRows(packed_format, merged[-1].num_rows + rows)
        if (first - start) % PANEL_ROWS:
            return f"with parts that do not begin at multiples of {PANEL_ROWS} rows"
    has_several = any(a.format != b.format for a, b in pairwise(merged))
    if has_several and (weights.num_parts > 1 or not weights.is_kind(SINGLE)):
        return f"with parts in {' and '.join(sorted({each.format for each in merged}))}"
    return tuple(merged)


def is_aligned(place: Destination, block_inputs: int, weights: AnyWeights) -> bool:
    """Return True if a destination has whole rows of one weight, and blocks can be cut where its chunks begin."""
    num_outputs, num_inputs = weights.shape[1:]
    num_rows = math.prod(place.memory.shape[:-1])
    is_whole_rows = place.memory.stride()[-2:] == (num_inputs, 1) and place.memory.shape[-1] == num_inputs
    is_in_one = place.first_row // num_outputs == (place.first_row + num_rows - 1) // num_outputs
    inputs, unit = _inputs_of(place), _unit_of(block_inputs, weights)
    is_cut_between = unit % STORED_GROUP == 0 and inputs.start % unit == 0 and num_inputs % unit == 0
    return is_whole_rows and is_in_one and is_cut_between and (place.offset, place.factor) == (0.0, 1.0)


def _unit_of(block_inputs: int, weights: AnyWeights) -> int:
    """Return the number of inputs that share a scale in packed weights."""
    chunks = weights.chunks or InputChunks(weights.shape[2], keeps_float32=False)
    return math.gcd(block_inputs, chunks.size)
