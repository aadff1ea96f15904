"""Hashes of a checkpoint's files, which ensure that ranks that start later load the same weights as the first ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from moeserve.errors import WeightsChangedError
from moeserve.models.checkpoint.packed_cache import sampled_digest
from moeserve.models.checkpoint.shards import list_names

FileHashes: TypeAlias = tuple[tuple[str, str], ...]  # name and hash of each file, sorted

LEADING_BYTES = 2**20  # number of bytes at the start of each file that are hashed


def hash_files(files: Iterable[Path], *, are_copies: bool) -> FileHashes:
    """Return hashes that change with the contents of files, although large files are not read completely.

    A hash covers a file's size, the time of its last change, and its first bytes.

    Args:
        are_copies: each host has its own copy of the files, with other times. Hash samples of the contents instead.
    """
    hashes = {path.name: sampled_digest([path]) if are_copies else _hash_of(path) for path in files}
    return tuple(sorted(hashes.items()))


def require_same(expected: FileHashes, found: FileHashes) -> None:
    """Raise WeightsChangedError if files have changed, or other files are read."""
    changed = sorted({name for name, _ in {*expected} ^ {*found}})
    if changed:
        raise WeightsChangedError(
            f"files of the model have changed since the engine has read them: {list_names(changed)}. Requests must not "
            "continue with other weights; start a new engine, which loads the new files"
        )


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(LEADING_BYTES))
    status = path.stat()
    digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()
