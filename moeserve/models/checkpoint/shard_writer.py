"""Writes checkpoints as shards with an index. A folder gets its final name when all its files are complete."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.models.checkpoint.shards import INDEX
from moeserve.progress import ProgressBar

MAX_SHARD_BYTES = 10**9


def check_unused(out: Path) -> None:
    """Raise CheckpointError if the path of a new folder exists already, and is not an empty folder."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise CheckpointError(f"{out} exists already and is not an empty folder; remove it or choose another name")


@contextlib.contextmanager
def all_or_nothing(out: Path) -> Iterator[Path]:
    """Provide a folder to write into, which is renamed to `out` on success and removed on failure."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        yield partial
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], progress: ProgressBar, max_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write tensors to shards, and an index of them. The tensors must not share memory.

    Args:
        max_bytes: maximum bytes of the tensors in a file. A larger tensor gets a file of its own.
    """
    shard_of_name: dict[str, str] = {}
    waiting: dict[str, Tensor] = {}
    num_waiting_bytes = total_size = 0

    def write_waiting() -> None:
        path = folder / f"model-{len(set(shard_of_name.values())) + 1:05}.safetensors"
        save_file(waiting, path, metadata={"format": "pt"})
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors creates files that only their owner may read
        shard_of_name.update(dict.fromkeys(waiting, path.name))
        waiting.clear()

    for name, tensor in tensors:
        if waiting and num_waiting_bytes + tensor.nbytes > max_bytes:
            write_waiting()
            num_waiting_bytes = 0
        waiting[name] = tensor
        num_waiting_bytes += tensor.nbytes
        total_size += tensor.nbytes
        progress.update(tensor.nbytes)
    write_waiting()
    write_json(folder / INDEX, {"metadata": {"total_size": total_size}, "weight_map": shard_of_name})


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
