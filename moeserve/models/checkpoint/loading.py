"""Loads a model's weights from the shards of a checkpoint, or fills them with random numbers.

Loading uses little memory besides the model. Shards are mapped, the mapping is dropped often so that pages that were
copied do not accumulate, and encoded tensors are decoded in slices.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from moeserve.errors import CheckpointError
from moeserve.layers.moe.router import Router
from moeserve.layers.norm import RMSNorm
from moeserve.layers.rows import Destination
from moeserve.layers.weights import AnyWeights, Weights
from moeserve.machine import shown_bytes
from moeserve.models.checkpoint import stored_codes
from moeserve.models.checkpoint.float4_tensors import Mxfp4Matrices
from moeserve.models.checkpoint.float8_tensors import ScaledTensor
from moeserve.models.checkpoint.integer_tensors import GroupedTensor
from moeserve.models.checkpoint.shards import Checkpoint, Shards, list_names
from moeserve.models.checkpoint.tensors import CheckpointTensor, PlainTensor, ReadRows
from moeserve.models.checkpoint.unused_tensors import harmful
from moeserve.ops.products.interface import INT4_GROUP, PANEL_ROWS
from moeserve.ops.products.weight_blocks import BLOCK, blocks_of, num_blocks, quantize
from moeserve.progress import ProgressBar, progress_bar

logger = logging.getLogger(__name__)


PIECE_VALUES = 2 * 1024 * 1024
DUMMY_STD = 0.02
DUMMY_MXFP4_SCALE = 127 - 7  # random codes have standard deviation 2.9, times 2**-7


def _none_is_ignored(name: str) -> bool:
    return False


@dataclass(frozen=True)
class Destinations:
    """The destinations of each tensor of a checkpoint, by name. A tensor may have several destinations."""

    into: dict[str, list[Destination]]
    is_ignored: Callable[[str], bool] = _none_is_ignored  # True for names of tensors that this rank does not need
    frequencies: tuple[Tensor, ...] = ()  # computed frequencies of rotary embeddings, [F] each


def _do_nothing(place: Destination) -> None:
    return


def _can_keep_int4(place: Destination, tensor: CheckpointTensor, read_rows: ReadRows) -> bool:
    """Return True if the codes and scales of a checkpoint's tensor can be packed unchanged."""
    owner = place.owner
    if not isinstance(tensor, GroupedTensor) or owner is None or not owner.packs:
        return False
    is_whole_rows = place.memory.stride()[-2:] == (owner.shape[2], 1)
    first_column = place.part[-1].start if len(place.part) == len(place.shape) else 0
    chunks = owner.open.chunks
    is_aligned = first_column % INT4_GROUP == 0 and (chunks is None or chunks.size % INT4_GROUP == 0)
    return is_whole_rows and is_aligned and tensor.has_packed_groups(read_rows)


def keep_int4(checkpoint: Checkpoint, destinations: Destinations) -> None:
    """Prepare weights that a checkpoint stores in int4 to be packed with the same codes and scales.

    Raises:
        CheckpointError: a tensor in int4 has a wrong shape or dtype.
    """
    is_kept: dict[AnyWeights, bool] = {}
    shards = Shards()
    for name, places in destinations.into.items():
        tensor = checkpoint.tensors.get(name)
        if isinstance(tensor, GroupedTensor):
            tensor.check()
        for place in places:
            if place.owner is not None and tensor is not None:
                is_kept[place.owner] = is_kept.get(place.owner, True) and _can_keep_int4(
                    place, tensor, shards.read_rows
                )
    for weights in (weights for weights, keeps in is_kept.items() if keeps):
        weights.keep_int4()


def load_weights(
    checkpoint: Checkpoint,
    destinations: Destinations,
    *,
    on_filled: Callable[[Destination], None] = _do_nothing,
    ignore_unused: bool = False,
    show_progress: bool,
    piece_values: int = PIECE_VALUES,
) -> None:
    """Copy every tensor of a checkpoint to its destinations, in the model's dtype.

    Names, shapes and dtypes are checked before the first byte is copied. `destinations.into` is emptied during loading,
    so that the memory of unpacked weights is released once they have been packed.

    Args:
        on_filled: called with each destination when its memory has been filled.
        ignore_unused: True: tensors that the model does not read are no error, even if they could change its output.
        piece_values: number of values to copy at once; at least one slice of the first dimension is copied.

    Raises:
        CheckpointError: tensors are missing or unknown, have a wrong shape or dtype, or contain an encoded NaN.
    """
    into = destinations.into
    shards = Shards()
    _check_names(checkpoint, destinations, shards.read_rows, ignore_unused)
    check_tensors(checkpoint, into)
    num_bytes = sum(_num_bytes(place) for places in into.values() for place in places)
    decoded = [name for name, places in into.items() if _is_decoded(checkpoint.tensors[name], places[0])]
    if decoded:
        counts = {
            "mxfp4": sum(places[0].mxfp4_scales is not None for places in into.values()),
            "their stored types": sum(places[0].is_stored for places in into.values()),
        }
        is_int4 = "int4" in str(checkpoint.stored_as)
        keeps_int4 = any(place.int4_scales is not None for places in into.values() for place in places)
        logger.warning(
            "%s stores its weights as %s, %s on disk; %d tensors are dequantised%s, and all take %s in memory%s",
            checkpoint.folder,
            checkpoint.stored_as,
            shown_bytes(checkpoint.stored_bytes),
            len(decoded),
            "".join(f", {count} stay in {form}" for form, count in counts.items() if count),
            shown_bytes(num_bytes),
            " (quantization='int4' keeps them in int4 on CPUs)" if is_int4 and not keeps_int4 else "",
        )

    with progress_bar("weights", total=num_bytes, is_shown=show_progress) as progress:
        for name in sorted(into, key=lambda name: checkpoint.tensors[name].shard):
            for place in into.pop(name):
                fill_place(place, checkpoint.tensors[name], shards.read_rows, piece_values, progress)
                on_filled(place)


def fill_randomly(model: nn.Module, seed: int) -> None:
    """Fill a model with dummy weights: normal with standard deviation 0.02, norms with ones.

    The numbers of a weight depend only on the seed and its name, so replicated weights are equal on all ranks.
    """
    generator = torch.Generator(next(model.parameters()).device)
    for prefix, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            digest = hashlib.sha256(f"{seed} {prefix}.{name}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            match module:
                case RMSNorm():
                    weight.fill_(1.0)
                case Router() if name == "table":  # use consecutive experts, so that a token has no expert twice
                    first_V1 = torch.arange(len(weight), device=weight.device)[:, None] * 7
                    number_K = torch.arange(weight.shape[1], device=weight.device)
                    weight.copy_((first_V1 + number_K) % module.config.num_experts)
                case Weights(is_mxfp4=False, scales=nn.Parameter()) if name == "memory":
                    for blocks in blocks_of(module.open, weight):
                        values_OI = torch.empty(blocks.codes_OI.shape, device=weight.device)
                        blocks.quantize(values_OI.normal_(0.0, DUMMY_STD, generator=generator))
                case Weights(is_mxfp4=True) if name == "memory":
                    weight.random_(0, 256, generator=generator)
                case Weights(is_mxfp4=True) if name == "scales":
                    weight.fill_(DUMMY_MXFP4_SCALE)
                case Weights() if name == "scales":
                    pass  # filled together with the codes
                case _:
                    weight.normal_(0.0, DUMMY_STD, generator=generator)


def _check_names(checkpoint: Checkpoint, destinations: Destinations, read_rows: ReadRows, ignore_unused: bool) -> None:
    """Raise CheckpointError if tensors are missing, or if unused tensors could change the model's output."""
    folder, into = checkpoint.folder, destinations.into
    unused = sorted(name for name in checkpoint.names - into.keys() if not destinations.is_ignored(name))
    if missing := checkpoint.shown(into.keys() - checkpoint.names):
        if all(name.startswith("draft.") for name in into.keys() - checkpoint.names):
            raise CheckpointError(
                f"{folder} lacks {len(missing)} tensors of the modules for multi-token prediction (MTP) that its "
                f"config.json counts: {list_names(missing)}. speculative_config with method='ngram' needs no modules"
            )
        held = f"; it holds {len(unused)} others: {list_names(checkpoint.shown(unused))}" if unused else ""
        raise CheckpointError(
            f"{folder} lacks {len(missing)} tensors that its config.json requires: {list_names(missing)}{held}. "
            "config.json and weights are not of the same model, or the weights are in a form that is not supported"
        )
    if found := checkpoint.shown(harmful(unused, checkpoint.tensors, destinations.frequencies, read_rows)):
        if not ignore_unused:
            raise CheckpointError(
                f"{folder} holds {len(found)} tensors that its config.json does not account for: {list_names(found)}. "
                "Without them, the output could be wrong; ignore_unused_weights=True loads the model nevertheless"
            )
        logger.warning("%s: %d tensors are not used: %s", folder, len(found), list_names(found))


def check_tensors(checkpoint: Checkpoint, into: dict[str, list[Destination]]) -> None:
    """Raise CheckpointError if shapes or dtypes of tensors do not match the model."""
    for name, places in into.items():
        tensor, shown = checkpoint.tensors[name], checkpoint.stored_names.get(name, name)
        tensor.check()
        for place in places:
            if isinstance(tensor, PlainTensor) and tensor.is_integer != (place.memory.dtype == torch.int64):
                raise CheckpointError(f"{tensor.shard}: tensor {shown!r} is {tensor.stored.dtype}, which does not fit")
            if tensor.shape != place.shape:
                raise CheckpointError(
                    f"{tensor.shard}: tensor {shown!r} has shape {list(tensor.shape)}, "
                    f"the model needs {list(place.shape)}"
                )
            if place.mxfp4_scales is not None and not (isinstance(tensor, Mxfp4Matrices) and tensor.is_mxfp4):
                raise CheckpointError(
                    f"{tensor.shard}: tensor {shown!r} is not in mxfp4, as config.json says of experts"
                )


def _num_bytes(place: Destination) -> int:
    return stored_codes.num_bytes(place) if place.is_stored else sum(part.nbytes for part in place.tensors)


def fill_place(
    place: Destination, tensor: CheckpointTensor, read_rows: ReadRows, piece_values: int, progress: ProgressBar
) -> None:
    """Copy the part of a tensor that belongs to a destination. See `load_weights` for the arguments."""
    memory = place.memory
    if memory.numel() == 0:  # this rank has no part of the tensor
        return
    if place.is_stored:
        stored_codes.fill(place, tensor, read_rows)
        progress.update(stored_codes.num_bytes(place))
        return
    first, *others = place.part or (slice(0, place.shape[0]),)
    if place.mxfp4_scales is not None:
        assert isinstance(tensor, Mxfp4Matrices)
        for target, stored in zip(place.tensors, tensor.read_mxfp4(read_rows, first.start, first.stop), strict=True):
            target.copy_(stored)
            progress.update(target.nbytes)
        return
    part = (slice(None), *others)
    num_rows = (first.stop - first.start) // len(memory)  # rows of the checkpoint's tensor for one row of memory
    rows_of_each = math.prod(memory.shape[1:-1])
    step = max(1, piece_values * len(memory) // memory.numel())
    into_panels = place.owner if place.owner is not None and place.owner.fills_panels else None
    if into_panels is not None:
        unit = PANEL_ROWS // math.gcd(PANEL_ROWS, rows_of_each)
        step = -(-step // unit) * unit
    codes_of = place.owner.open if place.owner is not None and place.is_in_blocks else None
    if codes_of is not None:
        step = -(-step // BLOCK) * BLOCK
    for start in range(0, len(memory), step):
        piece = memory[start : start + step]
        begin = first.start + start * num_rows
        end = begin + len(piece) * num_rows
        if codes_of is None:
            values = tensor.read(read_rows, begin, end)[part].reshape(piece.shape)
            if place.offset != 0.0 or place.factor != 1.0:
                values = values.float() * place.factor + place.offset
            if into_panels is None:
                piece.copy_(values)
            else:
                rows_RI = values.to(memory.dtype).contiguous().view(-1, memory.shape[-1])
                into_panels.fill_rows(place.first_row + start * rows_of_each, rows_RI)
        elif _has_same_blocks(tensor):
            assert not any(cut.start % BLOCK for cut in (first, *others)), (place.part, "begins inside a block")
            codes_OI, scales_GB = tensor.read_blocks(read_rows, begin, end)
            part_of_scales = slice(None), *(slice(cut.start // BLOCK, num_blocks(cut.stop)) for cut in others)
            (blocks,) = blocks_of(codes_of, piece)
            blocks.copy_from(codes_OI[part], scales_GB[part_of_scales])
        else:
            quantize(codes_of, piece, tensor.read(read_rows, begin, end)[part].reshape(piece.shape))
        progress.update(piece.nbytes)
    scales_RG = place.int4_scales
    if scales_RG is not None:
        assert isinstance(tensor, GroupedTensor)
        cuts = list(others)
        if len(place.part) == len(place.shape):  # the last cut is along the inputs
            cuts[-1] = slice(cuts[-1].start // INT4_GROUP, -(-cuts[-1].stop // INT4_GROUP))
        part_of_scales = (slice(None), *cuts)
        scales = tensor.read_scales(read_rows, first.start, first.stop)[part_of_scales]
        scales_RG.copy_(scales.reshape(scales_RG.shape))


def _is_decoded(tensor: CheckpointTensor, place: Destination) -> bool:
    is_kept = place.is_in_blocks or place.int4_scales is not None or place.mxfp4_scales is not None or place.is_stored
    return tensor.is_encoded and not is_kept


def _has_same_blocks(tensor: CheckpointTensor) -> TypeGuard[ScaledTensor]:
    """Return True if the tensor has the same blocks as the model, so that codes and scales are copied undecoded."""
    return isinstance(tensor, ScaledTensor) and tensor.dtype != "I8" and tensor.block == (BLOCK, BLOCK)
