"""Fills a model's weights from safetensors shards, one tensor at a time. Knows names and shapes, no family.

Little beyond the model itself is in memory: shards are mapped, and the mapping is dropped often so that pages already
copied do not pile up.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from moeserve.errors import CheckpointError
from moeserve.models.config_json import read_json

logger = logging.getLogger(__name__)

REMAP_BYTES = 256 * 1024 * 1024  # a shard is mapped anew after this much was read from it
NAMES_SHOWN = 5
DUMMY_STD = 0.02


@dataclass(frozen=True)
class Destinations:
    """Where each published tensor belongs: its name, and the part of the model's memory that it fills."""

    into: dict[str, Tensor]
    ignored: frozenset[str] = frozenset()  # names that a checkpoint may hold and the model does not need


def shards_by_tensor(folder: Path) -> dict[str, Path]:
    """Every tensor that a checkpoint holds, and the shard that holds it.

    Raises:
        CheckpointError: no shards, a shard that is missing or damaged, or an index that is wrong.
    """
    index_path = folder / "model.safetensors.index.json"
    if not index_path.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise CheckpointError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
        shards = dict.fromkeys(_names_in(single), single)
        if not shards:
            raise CheckpointError(f"{single} holds no tensors")
        return shards
    shard_of_name = read_json(index_path).get("weight_map")
    if not isinstance(shard_of_name, dict) or not shard_of_name:
        raise CheckpointError(f"{index_path}: weight_map must map tensor names to file names")
    for file_name in sorted({str(file_name) for file_name in shard_of_name.values()}):
        if Path(file_name).name != file_name or Path(file_name).suffix != ".safetensors":
            raise CheckpointError(f"{index_path}: {file_name!r} is not the name of a safetensors file in this folder")
        held = _names_in(folder / file_name)
        for name in (name for name, shard in shard_of_name.items() if shard == file_name):
            if name not in held:
                raise CheckpointError(f"{index_path} places tensor {name!r} in {file_name}, which does not hold it")
    return {name: folder / file_name for name, file_name in shard_of_name.items()}


def load_weights(shard_of_name: dict[str, Path], destinations: Destinations, *, show_progress: bool) -> None:
    """Copies every tensor of a checkpoint to where it belongs, in the model's dtype.

    Raises:
        CheckpointError: tensors that are missing, unknown, or of a wrong shape or dtype.
    """
    folder = next(iter(shard_of_name.values())).parent
    missing = sorted(destinations.into.keys() - shard_of_name.keys())
    extra = sorted(shard_of_name.keys() - destinations.into.keys() - destinations.ignored)
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} tensors that the model needs: {_shown(missing)}")
    if extra:
        raise CheckpointError(f"{folder} holds {len(extra)} tensors that the model does not know: {_shown(extra)}")

    names_in_shard: dict[Path, list[str]] = {}
    for name, shard in shard_of_name.items():
        if name in destinations.into:
            names_in_shard.setdefault(shard, []).append(name)
    num_bytes = sum(tensor.nbytes for tensor in destinations.into.values())
    with tqdm(
        total=num_bytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc="weights",
        disable=None if show_progress else True,  # None: shown on a terminal only
    ) as progress:
        for shard, names in sorted(names_in_shard.items()):
            _load_shard(shard, names, destinations.into, progress)


def fill_randomly(model: nn.Module, seed: int) -> None:
    """Dummy weights: normal with standard deviation 0.02, norms one. The same seed gives the same weights."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, DUMMY_STD, generator=generator)


def _load_shard(shard: Path, names: list[str], into: dict[str, Tensor], progress: tqdm) -> None:
    waiting = list(reversed(names))
    while waiting:
        num_bytes_mapped = 0
        with _open(shard) as tensors:
            while waiting and num_bytes_mapped < REMAP_BYTES:
                name = waiting.pop()
                destination = into[name]
                shape, dtype = tensors.get_slice(name).get_shape(), tensors.get_slice(name).get_dtype()
                if list(destination.shape) != shape:
                    raise CheckpointError(
                        f"{shard}: tensor {name!r} has shape {shape}, the model needs {list(destination.shape)}"
                    )
                if dtype not in ("F32", "F16", "BF16"):
                    raise CheckpointError(f"{shard}: tensor {name!r} is {dtype}; supported: F32, F16, BF16")
                destination.copy_(tensors.get_tensor(name))
                num_bytes_mapped += destination.nbytes
                progress.update(destination.nbytes)


def _names_in(shard: Path) -> set[str]:
    if not shard.is_file():
        raise CheckpointError(f"{shard} is missing, but the checkpoint's index names it")
    with _open(shard) as tensors:
        return set(tensors.keys())


def _open(shard: Path) -> safe_open:
    try:
        return safe_open(shard, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(
            f"{shard} is damaged or incomplete ({shard.stat().st_size} bytes: {error}); fetch it again"
        ) from None


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
