"""Descriptions of checkpoints in a hub: config, tokenizer, and the headers of weights, without the weights.

A description is a folder in moeserve's cache that is read like the checkpoint itself. Each file of weights has its full
size, but contains only its header. The rest is a hole, which takes no space on a disk and reads as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moeserve.config.environment import cache_folder
from moeserve.errors import CheckpointError
from moeserve.models.checkpoint.cache_folders import written_once
from moeserve.models.checkpoint.hub_client import HubClient
from moeserve.models.gguf.file import LONGROPE_FACTORS, ROPE_FACTORS
from moeserve.models.gguf.reader import open_gguf

FILES_AT_ONCE = 8
BYTES_OF_LENGTH = 8  # a safetensors file begins with the length of its header
FIRST_BYTES = 2**17  # bytes of a safetensors file that are read first: most headers are shorter
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
FIRST_GGUF_BYTES = 2**24  # bytes of a GGUF file that are read first: its header holds the vocabulary


def write_description(hub: HubClient, companions: Sequence[str], weights: Sequence[str]) -> Path:
    """Return the folder of a description, which is written on first use.

    Args:
        companions: names of the files beside the weights. The hub's cache must have these files.
        weights: names of the safetensors or GGUF files whose headers are wanted.

    Raises:
        CheckpointError: a header cannot be read or is damaged, or the cache cannot be written.
    """
    repository = hub.model.repository.replace("/", "--")
    kind = ("headers" if hub.model.gguf is None else weights[0].replace("/", "--")) if weights else "config"
    folder = cache_folder() / "hub" / repository / f"{hub.folder.name}-{kind}"

    def is_complete() -> bool:
        return folder.is_dir() and all(
            file.exists() for file in folder.rglob("*")
        )  # True only if the hub's cache has the files that links point to

    def write(partial: Path) -> None:
        for name in (*companions, *weights):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
        for name in companions:
            (partial / name).symlink_to(hub.folder / name)
        with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
            list(threads.map(lambda name: _copy_header(hub, name, partial / name), weights))

    return written_once(folder, is_complete, write)


def _copy_header(hub: HubClient, name: str, path: Path) -> None:
    """Write a file that has the header and the size of a file of weights, but no weights."""
    if path.suffix == ".gguf":
        _copy_gguf_header(hub, name, path)
    else:
        _copy_length_and_header(hub, name, path)


def _copy_length_and_header(hub: HubClient, name: str, path: Path) -> None:
    data, size = hub.read(name, 0, FIRST_BYTES)
    end = BYTES_OF_LENGTH + int.from_bytes(data[:BYTES_OF_LENGTH], "little")
    if end > min(size, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{name} of {hub.model.repository} is damaged: its header would take {end} of {size} bytes"
        )
    if end > len(data):
        data += hub.read(name, len(data), end - len(data))[0]
    _write(path, 0, data[:end], size)


def _copy_gguf_header(hub: HubClient, name: str, path: Path) -> None:
    """Copy the header, and the factors of rotary frequencies, which belong to the model's config."""
    num_bytes = FIRST_GGUF_BYTES
    while True:
        data, size = hub.read(name, 0, num_bytes)
        _write(path, 0, data, size)
        is_whole = len(data) == size
        try:
            _, tensors = open_gguf(path)
        except CheckpointError:
            if is_whole or len(data) > MAX_HEADER_BYTES:
                raise
        else:
            if is_whole or len(data) >= min((tensor.start for tensor in tensors.values()), default=0):
                break
        num_bytes *= 4
    for factors in (tensors[each] for each in (ROPE_FACTORS, *LONGROPE_FACTORS.values()) if each in tensors):
        _write(path, factors.start, hub.read(name, factors.start, factors.data.nbytes)[0], size)


def _write(path: Path, start: int, data: bytes, size: int) -> None:
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(start)
        file.write(data)
        file.truncate(size)
