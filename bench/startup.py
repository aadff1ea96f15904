"""Seconds from start-up to the first token, from the checkpoint and from a packed copy of it.

- *start*: each sample is a new process. *seconds* are from making the `LLM` to the first token after a prompt of 32
  tokens; *loading* is the part until the model is loaded. *imports* is the time from the start of the process until
  moeserve is imported, and *beyond_torch* the time from the end of `import torch` to the first token.
- *source*: the checkpoint, with packed copies disabled, or the packed copy that an earlier start has written to a
  folder of the benchmark.
- *cold*: the kernel was asked to drop the files' pages from its cache; otherwise the files are read into memory first.
  Pages that another process has mapped stay.
- *memory*: the host of a virtual machine may reclaim memory that was free for seconds. Using it again takes .5 to 2.5 s
  of processor time per GiB instead of .13, so starts from a checkpoint vary by that amount.
- *peers*: the seconds from making the engine to the first token, in a new process each time.

Sources and peers alternate.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.harness import Row, add_choices, add_models, interleave, make_parser
from moeserve.bench.peers.peers import PEERS, start_peer
from moeserve.bench.report import show_and_save
from moeserve.config.environment import cache_folder
from moeserve.errors import EngineError
from moeserve.ops.native import set_num_threads

MODELS = ("mixtral-mini",)
START_ONCE = "moeserve.bench.start_once"
PARTS = ("seconds", "loading", "imports", "beyond_torch")  # the parts of a start of moeserve

Start = dict[str, float]  # seconds by part; for other engines only "seconds"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("startup", __doc__, rounds=5)
    add_models(parser, MODELS)
    parser.add_argument("--quantization", choices=["int8", "int4"])
    add_choices(parser, "--engine", ["moeserve", *PEERS], "moeserve")
    options = parser.parse_args(arguments)

    set_num_threads(options.threads)
    names = options.engine or ["moeserve"]
    own_settings = {"num_threads": options.threads, "quantization": options.quantization}
    for model in map(find_checkpoint, options.model or MODELS):
        show_and_save(options.json, measure(model, names, own_settings, options.rounds))


def measure(model: Path, names: Sequence[str], own_settings: dict[str, Any], num_rounds: int) -> list[Row]:
    """Return one row for each source and each peer.

    Args:
        own_settings: moeserve's settings.
    """
    parent = cache_folder() / "bench"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".startup-") as folder:
        measures: dict[str, Callable[[], Start]] = {}
        if "moeserve" in names:
            start = functools.partial(start_once, model, Path(folder), own_settings)
            start(is_packed=True, is_cold=False)  # writes the packed copy
            has_copy = any(Path(folder).glob("packed/*.safetensors"))
            if not has_copy:
                print(f"{model.name}: no packed copy was written; small models have none", file=sys.stderr)
            for is_packed, is_cold in itertools.product((False, True) if has_copy else (False,), (False, True)):
                name = ("packed copy" if is_packed else "checkpoint") + (", cold" if is_cold else "")
                measures[name] = functools.partial(start, is_packed=is_packed, is_cold=is_cold)
        for name in (name for name in names if name in PEERS):
            measures[name] = functools.partial(start_peer_once, name, model, own_settings["num_threads"])
            measures[name]()  # writes the files and caches that later starts use
        starts = interleave(measures, num_rounds)
    return [
        {
            "benchmark": "startup",
            "model": model.name,
            "engine": name if name in PEERS else "moeserve",
            "source": "its own" if name in PEERS else name,
            "quantization": None if name in PEERS else own_settings["quantization"],
            "checkpoint_bytes": sum(path.stat().st_size for path in model.glob("*.safetensors")),
            **{part: median(start.get(part) for start in each) for part in PARTS},
            "rounds": each,
        }
        for name, each in starts.items()
    ]


def start_once(model: Path, cache: Path, own_settings: dict[str, Any], *, is_packed: bool, is_cold: bool) -> Start:
    """Start moeserve in a new process, and wait until it exits.

    Raises:
        EngineError: the process failed; the message has the end of its output.
    """
    files = [*model.glob("*.safetensors"), *cache.glob("packed/*.safetensors")]
    (drop_from_memory if is_cold else read_into_memory)(files)
    settings = own_settings | {"model": str(model), "packed_cache": "16GiB" if is_packed else 0}
    command = ["env", f"MOESERVE_CACHE={cache}", sys.executable, "-m", START_ONCE, json.dumps(settings)]
    started = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise EngineError(f"`{' '.join(command)}` ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    clock = json.loads(ended.stdout.splitlines()[-1])
    return {
        "seconds": clock["first_token"] - clock["imported"],
        "loading": clock["loaded"] - clock["imported"],
        "imports": clock["imported"] - started,
        "beyond_torch": clock["first_token"] - clock["torch"],
    }


def start_peer_once(name: str, model: Path, threads: int) -> Start:
    with start_peer(name, model, threads) as peer:
        return {"seconds": peer.startup_seconds}


def read_into_memory(files: Iterable[Path]) -> None:
    """Read all files, so that a start after a cold one does not have to load the dropped pages."""
    for path in files:
        path.read_bytes()


def drop_from_memory(files: Iterable[Path]) -> None:
    """Ask the kernel to drop its cached pages of these files, once they are on disk."""
    if sys.platform == "linux":
        for path in files:
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    else:
        raise NotImplementedError("starts from the disk are measured on Linux only")


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
