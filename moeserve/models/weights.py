"""Fills a model's weights from safetensors shards, a slice at a time. Knows names and shapes, no family.

Little beyond the model itself is in memory: shards are mapped, and the mapping is dropped often so that pages already
copied do not pile up; what is encoded is decoded a slice at a time.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, KeysView
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from moeserve.errors import CheckpointError
from moeserve.layers.norm import RMSNorm
from moeserve.layers.weights import Weights
from moeserve.machine import shown_bytes
from moeserve.models.config_values import read_json
from moeserve.models.quantization import (
    Fp8Tensor,
    PlainTensor,
    PublishedTensor,
    ReadRows,
    StoredTensor,
    WeightFormat,
)
from moeserve.ops.products import OpenWeights
from moeserve.ops.weight_blocks import BLOCK, blocks_of, num_blocks, quantize

logger = logging.getLogger(__name__)

REMAP_BYTES = 256 * 1024 * 1024  # shards are mapped anew after this much was read from them
PIECE_VALUES = 2 * 1024 * 1024  # copied at a time, or one slice of the first dimension if that is more
NAMES_SHOWN = 5
DUMMY_STD = 0.02
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Destination:
    """A part of the model's memory, and the part of a published tensor that fills it."""

    memory: Tensor  # a view; its elements, in order, are those of the part; its dimensions may be split further
    shape: tuple[int, ...]  # of the whole tensor, as published
    part: tuple[slice, ...]  # what of it, in its first dimensions; all of the others
    codes_of: OpenWeights | None = None  # 8-bit blocks, of which the memory is a part; None: it is for numbers

    def __post_init__(self) -> None:
        sizes = [part.stop - part.start for part in self.part]
        assert self.memory.numel() == math.prod([*sizes, *self.shape[len(sizes) :]])


def whole(memory: Tensor, shape: tuple[int, ...] | None = None) -> Destination:
    """Memory that a whole tensor fills. `shape` is the published one where it is not the memory's own."""
    return Destination(memory, tuple(memory.shape) if shape is None else shape, ())


def rows(memory: Tensor, share: slice, num_rows: int) -> Destination:
    """Memory for some of a tensor's `num_rows` rows (its first dimension)."""
    return Destination(memory, (num_rows, *memory.shape[1:]), (share,))


def columns(memory: Tensor, share: slice, num_columns: int) -> Destination:
    """Memory [rows, columns] for some of a matrix's `num_columns` columns."""
    return Destination(memory, (memory.shape[0], num_columns), (slice(0, memory.shape[0]), share))


def _nothing_follows(memory: Tensor) -> None:
    return


def _none_is_ignored(name: str) -> bool:
    return False


@dataclass(frozen=True)
class Destinations:
    """Where each published tensor belongs, by name: to several places, or parts of it to one."""

    into: dict[str, list[Destination]]
    is_ignored: Callable[[str], bool] = _none_is_ignored  # names that a checkpoint may hold, of no use to the model
    # tensors that a checkpoint may hold a second time, under these names: what it holds there must be the same
    copies: dict[str, Destination] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """What the headers of a checkpoint's shards say. Scales and the like are part of the tensor that they belong to."""

    folder: Path
    tensors: dict[str, PublishedTensor]
    stored_as: str | None  # in words; None when weights are stored as they are
    stored_bytes: int  # of all shards

    @property
    def names(self) -> KeysView[str]:
        """Of the tensors that are published."""
        return self.tensors.keys()


def open_checkpoint(folder: Path, weight_format: WeightFormat) -> Checkpoint:
    """Reads the headers of all shards, and no weights.

    Raises:
        CheckpointError: no shards, a shard that is missing or damaged, an index that is wrong, or a tensor of which a
            part is missing.
    """
    stored = read_headers(folder)
    return Checkpoint(
        folder=folder,
        tensors=weight_format.group(stored),
        stored_as=weight_format.stored_as,
        stored_bytes=sum(shard.stat().st_size for shard in {tensor.shard for tensor in stored.values()}),
    )


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor that a checkpoint stores, by name.

    Raises:
        CheckpointError: no shards, a shard that is missing or damaged, or an index that is wrong.
    """
    index_path = folder / "model.safetensors.index.json"
    if not index_path.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            shards = sorted(path.name for path in folder.glob("*.safetensors"))
            found = f" It holds {_shown(shards)}, but no index that says what is where." if shards else ""
            raise CheckpointError(
                f"{folder} holds neither model.safetensors nor model.safetensors.index.json.{found} "
                "Fetch the checkpoint's safetensors files; other formats are not read"
            )
        stored = _read_header(single)
        if not stored:
            raise CheckpointError(f"{single} holds no tensors")
        return stored
    shard_of_name = read_json(index_path).get("weight_map")
    if not isinstance(shard_of_name, dict) or not shard_of_name:
        raise CheckpointError(f"{index_path}: weight_map must map tensor names to file names")
    names_in_shard: dict[str, list[str]] = {}
    for name, file_name in shard_of_name.items():
        names_in_shard.setdefault(str(file_name), []).append(name)
    stored = {}
    for file_name, names in sorted(names_in_shard.items()):
        if Path(file_name).name != file_name or Path(file_name).suffix != ".safetensors":
            raise CheckpointError(f"{index_path}: {file_name!r} is not the name of a safetensors file in this folder")
        held = _read_header(folder / file_name)
        for name in names:
            if name not in held:
                raise CheckpointError(f"{index_path} places tensor {name!r} in {file_name}, which does not hold it")
            stored[name] = held[name]
    return stored


def load_weights(
    checkpoint: Checkpoint,
    destinations: Destinations,
    *,
    filled: Callable[[Tensor], None] = _nothing_follows,
    show_progress: bool,
) -> None:
    """Copies every tensor of a checkpoint to where it belongs, in the model's dtype.

    All that the headers can tell is checked before the first byte is copied.

    Args:
        filled: told of each destination's memory when it has got its values.

    Raises:
        CheckpointError: tensors that are missing, unknown, of a wrong shape or dtype, or that hold an encoded NaN.
    """
    folder, into = checkpoint.folder, destinations.into
    missing = sorted(into.keys() - checkpoint.names)
    copies = {name: place for name, place in destinations.copies.items() if name in checkpoint.names}
    extra = sorted(name for name in checkpoint.names - into.keys() - copies.keys() if not destinations.is_ignored(name))
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} tensors that its config.json asks for: {_shown(missing)}; "
            "fetch the whole checkpoint again, config.json and weights together"
        )
    if extra:
        raise CheckpointError(
            f"{folder} holds {len(extra)} tensors that its config.json does not account for: {_shown(extra)}; "
            "fetch the whole checkpoint again, config.json and weights together"
        )
    for name, places in into.items():
        tensor = checkpoint.tensors[name]
        tensor.check()
        for place in places:
            if tensor.shape != place.shape:
                raise CheckpointError(
                    f"{tensor.shard}: tensor {name!r} has shape {list(tensor.shape)}, "
                    f"the model needs {list(place.shape)}"
                )
    num_bytes = sum(place.memory.nbytes for places in into.values() for place in places)
    _report_decoding(checkpoint, into, num_bytes)

    shards = _Shards()
    with tqdm(
        total=num_bytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc="weights",
        disable=None if show_progress else True,  # None: shown on a terminal only
    ) as progress:
        for name in sorted(into, key=lambda name: checkpoint.tensors[name].shard):
            for place in into[name]:
                _fill(place, checkpoint.tensors[name], shards.read_rows, progress)
                filled(place.memory)
        for name, place in copies.items():
            _compare(name, place, checkpoint, shards)


def fill_randomly(model: nn.Module, seed: int) -> None:
    """Dummy weights: normal with standard deviation 0.02, norms one. The same seed gives the same weights.

    Each weight has random numbers of its own, so those that all ranks have are alike on all of them.
    """
    generator = torch.Generator(next(model.parameters()).device)
    for prefix, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            digest = hashlib.sha256(f"{seed} {prefix}.{name}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            match module:
                case RMSNorm():
                    weight.fill_(1.0)
                case Weights(scales=nn.Parameter()) if name == "memory":
                    for blocks in blocks_of(module.open, weight):
                        values_OI = torch.empty(blocks.codes_OI.shape, device=weight.device)
                        blocks.quantize(values_OI.normal_(0.0, DUMMY_STD, generator=generator))
                case Weights() if name == "scales":
                    pass  # filled with the codes
                case _:
                    weight.normal_(0.0, DUMMY_STD, generator=generator)


class _Shards:
    """Mapped shards, let go of together whenever REMAP_BYTES were read from them."""

    def __init__(self) -> None:
        self._mapped: dict[Path, Any] = {}
        self._num_bytes_read = 0

    def read_rows(self, stored: StoredTensor, start: int, stop: int) -> Tensor:
        """A view of the mapping: to be copied and dropped at once."""
        if self._num_bytes_read >= REMAP_BYTES:
            self._mapped.clear()
            self._num_bytes_read = 0
        if stored.shard not in self._mapped:
            self._mapped[stored.shard] = _open(stored.shard)
        rows: Tensor = self._mapped[stored.shard].get_slice(stored.name)[start:stop]
        self._num_bytes_read += rows.nbytes
        return rows


def _fill(place: Destination, tensor: PublishedTensor, read_rows: ReadRows, progress: tqdm) -> None:
    memory = place.memory
    if memory.numel() == 0:  # a rank may have no part of it
        return
    first, *others = place.part or (slice(0, place.shape[0]),)
    part = (slice(None), *others)
    num_rows = (first.stop - first.start) // len(memory)  # of the published tensor, for one row of memory
    step = max(1, PIECE_VALUES * len(memory) // memory.numel())
    if place.codes_of is not None:
        step = -(-step // BLOCK) * BLOCK
    for start in range(0, len(memory), step):
        piece = memory[start : start + step]
        begin = first.start + start * num_rows
        end = begin + len(piece) * num_rows
        if place.codes_of is None:
            piece.copy_(tensor.read(read_rows, begin, end)[part].reshape(piece.shape))
        elif _has_these_blocks(tensor):
            assert not any(cut.start % BLOCK for cut in (first, *others)), (place.part, "begins inside a block")
            codes_OI, scales_GB = tensor.read_blocks(read_rows, begin, end)
            part_of_scales = slice(None), *(slice(cut.start // BLOCK, num_blocks(cut.stop)) for cut in others)
            (blocks,) = blocks_of(place.codes_of, piece)
            blocks.take(codes_OI[part], scales_GB[part_of_scales])
        else:
            quantize(place.codes_of, piece, tensor.read(read_rows, begin, end)[part].reshape(piece.shape))
        progress.update(piece.nbytes)


def _has_these_blocks(tensor: PublishedTensor) -> TypeGuard[Fp8Tensor]:
    """Whether it is stored as the model can hold it, so that codes and scales are taken as they are."""
    return isinstance(tensor, Fp8Tensor) and tensor.block == (BLOCK, BLOCK)


def _compare(name: str, place: Destination, checkpoint: Checkpoint, shards: _Shards) -> None:
    """Refuses a copy that differs from what was loaded."""
    tensor, memory = checkpoint.tensors[name], place.memory
    tensor.check()
    is_same = tensor.shape == place.shape
    step = max(1, PIECE_VALUES * len(memory) // max(1, memory.numel()))
    first = place.part[0].start if place.part else 0
    for start in range(0, len(memory) if is_same else 0, step):
        piece = memory[start : start + step]
        is_same &= torch.equal(
            piece, tensor.read(shards.read_rows, first + start, first + start + len(piece)).to(piece)
        )
    if not is_same:
        raise CheckpointError(
            f"{checkpoint.folder}: its config.json has tie_word_embeddings=true, but {name!r} differs from the "
            "embedding; set tie_word_embeddings to false if the checkpoint's own output head is meant"
        )


def _report_decoding(checkpoint: Checkpoint, into: dict[str, list[Destination]], num_bytes: int) -> None:
    """A warning, because a machine that holds the files may not hold what becomes of them."""
    encoded = {name: into[name][0] for name in into if not isinstance(checkpoint.tensors[name], PlainTensor)}
    if not encoded or any(place.codes_of is not None for place in encoded.values()):  # 8 bits were asked for
        return
    dtypes = sorted({str(place.memory.dtype).removeprefix("torch.") for place in encoded.values()})
    could_be_kept = any(
        place.memory.device.type == "cuda" and _has_these_blocks(checkpoint.tensors[name])
        for name, place in encoded.items()
    )
    logger.warning(
        "%s stores its weights as %s, %s on disk; they are dequantised to %s and take %s in memory%s",
        checkpoint.folder,
        checkpoint.stored_as,
        shown_bytes(checkpoint.stored_bytes),
        " and ".join(dtypes),
        shown_bytes(num_bytes),
        "; quantization='fp8' keeps them as they are stored" if could_be_kept else "",
    )


def _read_header(shard: Path) -> dict[str, StoredTensor]:
    if not shard.is_file():
        raise CheckpointError(f"{shard} is missing, but the checkpoint's index names it; fetch it")
    stored = {}
    with _open(shard) as tensors:
        for name in tensors.keys():  # noqa: SIM118, this is no dict
            entry = tensors.get_slice(name)
            stored[name] = StoredTensor(name, shard, entry.get_dtype(), tuple(entry.get_shape()))
    return stored


def _open(shard: Path) -> safe_open:
    try:
        return safe_open(shard, framework="pt")
    except SafetensorError as error:
        with shard.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise CheckpointError(f"{shard} only says where the file is; fetch it with `git lfs pull`") from None
        raise CheckpointError(
            f"{shard} is damaged or incomplete ({shard.stat().st_size} bytes: {error}); fetch it again"
        ) from None


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
