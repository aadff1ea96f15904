"""The tensors of a checkpoint, with weights quantised as `quantization="int4"` quantises them while loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType

import torch
from torch import Tensor

from moeserve.layers.rows import Destination
from moeserve.layers.weights import AnyWeights
from moeserve.models.checkpoint.block_tensors import BLOCK_BYTES, BLOCK_INPUTS, BLOCKS, SHAPE, row_bytes
from moeserve.models.checkpoint.shards import Checkpoint, Shards
from moeserve.models.checkpoint.stored_codes import is_aligned
from moeserve.models.checkpoint.tensors import CheckpointTensor, PlainTensor
from moeserve.ops.products.interface import PackedFormat


def quantized_tensors(
    checkpoint: Checkpoint,
    into: Mapping[str, list[Destination]],
    importances: Mapping[AnyWeights, Tensor],
    native: ModuleType,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a quantised copy, by their stored names.

    Weights stay as they are if several modules share them, if a row is divided over modules, or if the model does not
    quantise them.

    Args:
        into: the destinations of each tensor in a model for one rank, built for `quantization="int4"`.
        importances: importance of each input of a weight, [e, I]. Inputs of other weights are equally important.
        dtype: dtype of the model.
    """
    shards = Shards()
    for name, tensor in checkpoint.tensors.items():
        stored_name, places = checkpoint.stored_names.get(name, name), into.get(name, [])
        tensor.check()
        packed_format = _format_of(tensor, places)
        if packed_format is None:
            rows = tensor.read(shards.read_rows, 0, max(tensor.shape, default=1))
            yield stored_name, rows.clone() if isinstance(tensor, PlainTensor) else rows.to(dtype)
            continue
        blocks = torch.empty(*tensor.shape[:-1], row_bytes(packed_format, tensor.shape[-1]), dtype=torch.uint8)
        for place in places:
            first, *others = place.part or (slice(0, tensor.shape[0]),)
            others = others[: len(tensor.shape) - 2]  # inputs are not divided
            part: tuple[slice, ...] = (slice(None), *others)
            values = tensor.read(shards.read_rows, first.start, first.stop)[part].to(dtype).flatten(0, -2).contiguous()
            own: tuple[slice, ...] = (first, *others)
            target = blocks[own]
            rows = torch.empty(len(values), blocks.shape[-1], dtype=torch.uint8)
            native.quantize_gguf(packed_format, values, rows, _importances_of(place, importances))
            target.copy_(rows.view(target.shape))
        yield f"{stored_name}{BLOCKS}", blocks
        yield f"{stored_name}{SHAPE}", torch.tensor(tensor.shape)


def _format_of(tensor: CheckpointTensor, places: list[Destination]) -> PackedFormat | None:
    """Return the format in which a tensor can be stored; None: the tensor stays as it is."""
    formats = {_format_of_place(tensor, place) for place in places}
    return formats.pop() if len(formats) == 1 else None


def _format_of_place(tensor: CheckpointTensor, place: Destination) -> PackedFormat | None:
    owner = place.owner
    if owner is None or owner.is_borrowed or owner.packed_format not in BLOCK_BYTES:
        return None
    is_whole = tensor.shape == place.shape and is_aligned(place, BLOCK_INPUTS, owner)
    return owner.packed_format if is_whole else None


def _importances_of(place: Destination, importances: Mapping[AnyWeights, Tensor]) -> Tensor | None:
    owner = place.owner
    assert owner is not None
    of_owner_eI = importances.get(owner)
    return None if of_owner_eI is None else of_owner_eI[place.first_row // owner.shape[1]]
