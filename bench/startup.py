"""How long it takes until the first token, from the checkpoint and from a packed copy of it.

    moeserve bench startup [--model NAME ...] [--engine NAME ...] [--rounds 5] [--json PATH]

- *start*: a fresh process for each sample (`first_token.py`). *seconds* count from making the `LLM` to the first token
  after a prompt of 32; *imports*, from starting the process to there, are told beside them. *loading* is the part of
  the seconds until the model is loaded.
- *source*: the checkpoint, with packed copies switched off; or the packed copy that an earlier start has kept, in a
  folder of the benchmark's own.
- *cold*: the kernel was asked to drop what it had cached of the files. Otherwise they are read into memory first. A
  file that another process has mapped is not dropped.
- *peers*: the seconds that they take from making the engine to the first token, in a fresh process each time.

Sources and peers take turns.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.harness import add_options, environment, interleave, write_jsonl
from moeserve.bench.peers.peers import PeerName, start_peer
from moeserve.config.environment import cache_folder
from moeserve.config.settings import QuantizationName
from moeserve.errors import EngineError
from moeserve.ops.threads import set_num_threads

MODELS = ("mixtral-mini",)
PEER_NAMES: tuple[PeerName, ...] = get_args(PeerName)


@dataclass(frozen=True)
class Source:
    """Where a start takes the weights from."""

    packed: bool
    cold: bool

    @property
    def name(self) -> str:
        return ("packed copy" if self.packed else "checkpoint") + (", cold" if self.cold else "")


@dataclass(frozen=True)
class Start:
    """What one start took, in seconds."""

    seconds: float  # from making the engine to the first token
    imports: float | None = None  # before that; not told of peers
    loading: float | None = None  # of the seconds, those until the model was loaded


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="moeserve bench startup", description="Seconds until the first token.")
    parser.add_argument(
        "--model", action="append", help=f"a checkpoint by name or folder; repeatable; default: {', '.join(MODELS)}"
    )
    parser.add_argument("--quantization", choices=["int8", "int4"])
    known = ["moeserve", *PEER_NAMES]
    parser.add_argument("--engine", action="append", choices=known, help="repeatable; default: moeserve")
    add_options(parser, rounds=5)
    options = parser.parse_args(arguments)

    set_num_threads(options.threads)
    names = options.engine or ["moeserve"]
    for model in map(find_checkpoint, options.model or MODELS):
        rows = measure(model, names, options.quantization, options.threads, options.rounds)
        print(as_text(rows), flush=True)
        if options.json:
            write_jsonl(options.json, rows)


def measure(
    model: Path, names: Sequence[str], quantization: QuantizationName | None, threads: int, num_rounds: int
) -> list[dict[str, Any]]:
    """One row for each source and peer."""
    with tempfile.TemporaryDirectory(dir=_made(cache_folder() / "bench"), prefix=".startup-") as folder:
        measures: dict[str, Callable[[], Start]] = {}
        if "moeserve" in names:
            start = functools.partial(start_once, model, Path(folder), quantization, threads)
            start(Source(packed=True, cold=False))  # makes the copy
            has_copy = any(Path(folder).glob("packed/*.safetensors"))
            if not has_copy:
                print(f"{model.name}: no packed copy was kept; small models have none", file=sys.stderr)
            for packed, cold in itertools.product((False, True) if has_copy else (False,), (False, True)):
                source = Source(packed, cold)
                measures[source.name] = functools.partial(start, source)
        peers = [name for name in PEER_NAMES if name in names]
        for name in peers:
            start_peer_once(name, model, threads)  # makes files and caches that later starts find
            measures[name] = functools.partial(start_peer_once, name, model, threads)
        starts = interleave(measures, num_rounds)
    machine = environment()
    return [
        {
            "benchmark": "startup",
            "model": model.name,
            "engine": name if name in peers else "moeserve",
            "source": "its own" if name in peers else name,
            "quantization": None if name in peers else quantization,
            "checkpoint_bytes": sum(path.stat().st_size for path in model.glob("*.safetensors")),
            "seconds": statistics.median(start.seconds for start in each),
            "imports": _median(start.imports for start in each),
            "loading": _median(start.loading for start in each),
            "rounds": [asdict(start) for start in each],
            "environment": machine,
        }
        for name, each in starts.items()
    ]


def start_once(model: Path, cache: Path, quantization: QuantizationName | None, threads: int, source: Source) -> Start:
    """Starts moeserve in a new process and waits until that has ended.

    Raises:
        EngineError: it failed; the message holds what it said.
    """
    files = [*model.glob("*.safetensors"), *cache.glob("packed/*.safetensors")]
    (drop_from_memory if source.cold else read_into_memory)(files)
    command = ["env", f"MOESERVE_CACHE={cache}", sys.executable, "-m", "moeserve.bench.first_token"]
    command += [str(model), "--threads", str(threads)]
    command += [] if source.packed else ["--no-packed-cache"]
    command += ["--quantization", quantization] if quantization else []
    started = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise EngineError(f"`{' '.join(command)}` ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    clock = json.loads(ended.stdout.splitlines()[-1])
    return Start(
        seconds=clock["first_token"] - clock["imported"],
        imports=clock["imported"] - started,
        loading=clock["loaded"] - clock["imported"],
    )


def start_peer_once(name: PeerName, model: Path, threads: int) -> Start:
    with start_peer(name, model, num_threads=threads) as peer:
        return Start(peer.startup_seconds)


def read_into_memory(files: Iterable[Path]) -> None:
    """What an earlier source had dropped is not this one's to read again."""
    buffer = bytearray(2**24)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_from_memory(files: Iterable[Path]) -> None:
    """Asks the kernel to forget what it has cached of some files, once all of it is on disk."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows for people."""
    lines = [f"{rows[0]['model']}, {rows[0]['checkpoint_bytes'] / 1e9:.2f} GB, seconds until the first token"]
    lines.append(f"{'':<34}{'seconds':>8}{'loading':>9}{'imports':>9}   rounds")
    for row in rows:
        name = f"{row['engine']}, {row['source']}" + (f", {row['quantization']}" if row["quantization"] else "")
        parts = "".join(f"{'' if part is None else f'{part:.2f}':>9}" for part in (row["loading"], row["imports"]))
        rounds = " ".join(f"{each['seconds']:.2f}" for each in row["rounds"])
        lines.append(f"{name:<34}{row['seconds']:>8.2f}{parts}   {rounds}")
    return "\n".join(lines)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    main()
