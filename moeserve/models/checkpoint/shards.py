"""The tensors of a checkpoint in safetensors shards, read from the shards' headers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.machine import resource_limits, shown_bytes
from moeserve.models.checkpoint.tensors import CheckpointTensor, StoredTensor
from moeserve.models.checkpoint.weight_format import WeightFormat
from moeserve.models.config_values import read_json

logger = logging.getLogger(__name__)

MAX_NAMES_SHOWN = 5
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
REMAP_BYTES = 256 * 1024 * 1024  # shards are mapped again after this many bytes have been read
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")
GGUF_PART = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<total>\d{5})\.gguf")
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint. The scales and zero points of a tensor are part of it."""

    folder: Path
    tensors: dict[str, CheckpointTensor]
    stored_as: str | None  # description of the encoding; None for weights that are not encoded
    stored_bytes: int  # size of all shards
    stored_names: dict[str, str] = field(default_factory=dict)  # by translated name; empty: names are not translated

    @property
    def names(self) -> KeysView[str]:
        """Names of the tensors."""
        return self.tensors.keys()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def shown(self, names: Iterable[str]) -> list[str]:
        """Return the stored names of tensors, sorted. The name of a missing tensor is formed like those of its kind."""
        names = list(names)
        if not names:
            return []
        kinds = {NUMBER.sub("#", name): stored for name, stored in self.stored_names.items()}
        return sorted(_shown(name, self.stored_names.get(name), kinds.get(NUMBER.sub("#", name))) for name in names)


def open_checkpoint(folder: Path, weight_format: WeightFormat) -> Checkpoint:
    """Read the headers of all shards. No weights are read, except small tables of shapes if needed.

    Raises:
        CheckpointError: there are no shards, a shard is missing or damaged, the index is wrong, or a tensor lacks a
            part.
    """
    if weight_format.is_gguf:
        from moeserve.models.gguf.checkpoint import tensors_of  # needs the gguf package

        tensors = tensors_of(folder)
        files = set(folder.glob("*.gguf"))
    else:
        stored = read_headers(folder)
        tensors = weight_format.group(stored, Shards().read_rows)
        files = {tensor.shard for tensor in stored.values()}
    stored_bytes = sum(file.stat().st_size for file in files)
    return Checkpoint(folder, tensors, weight_format.stored_as, stored_bytes)


def has_shards(folder: Path) -> bool:
    """Return True if a folder holds safetensors files."""
    return any(folder.glob("*.safetensors"))


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor that a checkpoint stores, by name.

    The index maps tensors to shards. It is ignored if none of its shards exist, and a single file has all weights.
    Without an index, the headers of all files are read.

    Raises:
        CheckpointError: there are no shards, a shard is missing or damaged, or the index is wrong.
    """
    index_path, single = folder / INDEX, folder / SINGLE
    if not os.path.lexists(index_path):  # a dangling link is an error
        return _headers_of_shards(folder, single)
    names_in_shard = shards_of_index(index_path)
    if single.is_file() and not any(os.path.isfile(folder / file_name) for file_name in names_in_shard):
        logger.warning("%s names shards that are not there, and is not used: %s has the weights", index_path, single)
        return read_header(single)
    stored = {}
    for file_name, names in sorted(names_in_shard.items()):
        held = read_header(folder / file_name)
        for name in names:
            if name not in held:
                raise CheckpointError(f"{index_path} places tensor {name!r} in {file_name}, which does not hold it")
            stored[name] = held[name]
    return stored


def shards_of_index(index_path: Path) -> dict[str, list[str]]:
    """Return the names of the tensors in each shard, by the name of the shard.

    Raises:
        CheckpointError: the index is wrong.
    """
    shard_of_name = read_json(index_path).get("weight_map")
    if not isinstance(shard_of_name, dict) or not shard_of_name:
        raise CheckpointError(f"{index_path}: weight_map must map tensor names to file names")
    names_in_shard: dict[str, list[str]] = {}
    for name, file_name in shard_of_name.items():
        names_in_shard.setdefault(str(file_name), []).append(name)
    for file_name in sorted(names_in_shard):
        if Path(file_name).name != file_name or Path(file_name).suffix != ".safetensors":
            raise CheckpointError(f"{index_path}: {file_name!r} is not the name of a safetensors file in this folder")
    return names_in_shard


def names_of_parts(match: re.Match[str]) -> list[str]:
    """Return the names of all parts of a model, given the match of NUMBERED or GGUF_PART with one part's name."""
    digits, (_, suffix) = match["total"], os.path.splitext(match.string)
    return [f"{match['stem']}-{number + 1:0{len(digits)}}-of-{digits}{suffix}" for number in range(int(digits))]


def _headers_of_shards(folder: Path, single: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint without an index, from a single file or from all numbered shards.

    Raises:
        CheckpointError: there are no shards, or a shard is missing.
    """
    if os.path.lexists(single):  # even a dangling link, so that the error names it
        return read_header(single)
    try:
        names = sorted(os.listdir(folder))
    except PermissionError:
        raise CheckpointError(
            f"{folder} has no index, and this user may not list its files; run chmod a+r on it"
        ) from None
    numbered = {folder / name: match for name in names if (match := NUMBERED.fullmatch(name))}
    if not numbered:
        raise CheckpointError(
            f"{folder} holds neither model.safetensors nor model.safetensors.index.json nor shards named like "
            "model-00001-of-00002.safetensors; fetch the checkpoint's safetensors files; other formats are not read"
        )
    total = max(int(match["total"]) for match in numbered.values())
    if missing := set(range(1, total + 1)) - {int(match["number"]) for match in numbered.values()}:
        raise CheckpointError(
            f"{folder} holds {len(numbered)} of {total} shards; fetch number {', '.join(map(str, sorted(missing)))}"
        )
    stored: dict[str, StoredTensor] = {}
    for shard in numbered:
        held = read_header(shard)
        if twice := sorted(stored.keys() & held.keys()):
            raise CheckpointError(f"{shard} and other shards hold the same tensors: {list_names(twice)}; keep one set")
        stored |= held
    return stored


class Shards:
    """Mapped shards. All mappings are released whenever REMAP_BYTES have been read."""

    def __init__(self) -> None:
        self._mapped: dict[Path, Any] = {}
        self._num_bytes_read = 0

    def read_rows(self, stored: StoredTensor, start: int, stop: int) -> Tensor:
        """Return a view of mapped rows, which the caller must copy and release at once. A scalar has one row."""
        if self._num_bytes_read >= REMAP_BYTES:
            self._mapped.clear()
            self._num_bytes_read = 0
        if stored.shard not in self._mapped:
            self._mapped[stored.shard] = open_shard(stored.shard)
        shard = self._mapped[stored.shard]
        rows: Tensor = shard.get_slice(stored.name)[start:stop] if stored.shape else shard.get_tensor(stored.name)
        self._num_bytes_read += rows.nbytes
        return rows


def open_shard(shard: Path) -> safe_open:
    """Open a shard, memory-mapped.

    Raises:
        CheckpointError: the file cannot be read, is damaged, is a Git LFS pointer, or exceeds the address space.
    """
    try:
        shard.open("rb").close()  # safetensors reports a file that this user may not read as missing
        return safe_open(shard, framework="pt")
    except OSError as error:
        linked = f" (a link to {shard.readlink()})" if shard.is_symlink() else ""
        raise CheckpointError(f"{shard}{linked} cannot be read: {error.strerror or error}") from None
    except (MemoryError, RuntimeError) as error:  # safetensors' and torch's errors of mmap
        limits = "; ".join(map(str, resource_limits())) or "the kernel allows no more"
        raise CheckpointError(
            f"{shard} ({shown_bytes(shard.stat().st_size)}) cannot be mapped: {error}; {limits}; raise the limit, or "
            "remove it with `ulimit -v unlimited`"
        ) from None
    except SafetensorError as error:
        with shard.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise CheckpointError(f"{shard} is a Git LFS pointer; fetch the file with `git lfs pull`") from None
        raise CheckpointError(
            f"{shard} is damaged or incomplete ({shard.stat().st_size} bytes: {error}); fetch it again"
        ) from None


def _shown(name: str, stored: str | None, other: str | None) -> str:
    """Return the stored name of a tensor; or else the name `other` of the same kind, with the numbers of `name`."""
    if stored is not None or other is None:
        return stored or name
    numbers = NUMBER.findall(name)
    if len(numbers) != len(NUMBER.findall(other)):
        return name
    rest = iter(numbers)
    return NUMBER.sub(lambda _: next(rest), other)


def list_names(names: list[str]) -> str:
    """Return a text with the first few names, and the number of remaining names."""
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more


def read_header(shard: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a safetensors file, by name.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    if not os.path.lexists(shard):  # False also for names that no file system allows
        raise CheckpointError(f"{shard} is missing, but the checkpoint's index names it; fetch it")
    stored = {}
    with open_shard(shard) as tensors:
        for name in tensors.keys():  # noqa: SIM118, this is no dict
            entry = tensors.get_slice(name)
            stored[name] = StoredTensor(name, shard, entry.get_dtype(), tuple(entry.get_shape()))
    return stored
