"""Seconds until the first token, from the checkpoint and from a packed copy of it.

    moeserve bench startup [--model NAME ...] [--engine NAME ...] [--rounds 5] [--json PATH]

- *start*: a new process for each sample. *seconds* count from making the `LLM` to the first token after a prompt of 32;
  *imports* is the time from the start of the process until then; *loading* is the part of the seconds until the model
  is loaded.
- *source*: the checkpoint, with packed copies switched off, or the packed copy that an earlier start has written to a
  folder of the benchmark.
- *cold*: the kernel was asked to drop its cached pages of the files; otherwise they are read into memory first. Pages
  that another process has mapped stay.
- *peers*: the seconds from making the engine to the first token, in a new process each time.

Sources and peers alternate.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from moeserve import LLM, SamplingParams
from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.harness import Row, environment, interleave, make_parser, save, show
from moeserve.bench.peers.peers import PeerName, start_peer
from moeserve.config.environment import cache_folder
from moeserve.config.settings import QuantizationName
from moeserve.errors import EngineError
from moeserve.models.packed_cache_writer import wait_for_cache_writers
from moeserve.ops.threads import set_num_threads

MODELS = ("mixtral-mini",)
PEER_NAMES: tuple[PeerName, ...] = get_args(PeerName)
PROMPT_TOKENS = 32
START_ONCE = "import sys; from moeserve.bench.startup import first_token; first_token(sys.argv[1:])"


@dataclass(frozen=True)
class Source:
    """Where a start reads the weights from."""

    packed: bool
    cold: bool

    @property
    def name(self) -> str:
        return ("packed copy" if self.packed else "checkpoint") + (", cold" if self.cold else "")


@dataclass(frozen=True)
class Start:
    """The times of one start, in seconds."""

    seconds: float  # from making the engine to the first token
    imports: float | None = None  # before that; unknown for peers
    loading: float | None = None  # the part of `seconds` until the model is loaded


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("moeserve bench startup", "Seconds until the first token.", rounds=5)
    parser.add_argument(
        "--model", action="append", help=f"name or folder of a checkpoint, repeatable (default: {', '.join(MODELS)})"
    )
    parser.add_argument("--quantization", choices=["int8", "int4"])
    known = ["moeserve", *PEER_NAMES]
    parser.add_argument(
        "--engine",
        action="append",
        choices=known,
        metavar="NAME",
        help=f"repeatable (default: moeserve) [{', '.join(known)}]",
    )
    options = parser.parse_args(arguments)

    set_num_threads(options.threads)
    names = options.engine or ["moeserve"]
    for model in map(find_checkpoint, options.model or MODELS):
        rows = measure(model, names, options.quantization, options.threads, options.rounds)
        show(as_text(rows))
        save(options.json, rows)


def measure(
    model: Path, names: Sequence[str], quantization: QuantizationName | None, threads: int, num_rounds: int
) -> list[Row]:
    """Return one row for each source and peer."""
    parent = cache_folder() / "bench"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".startup-") as folder:
        measures: dict[str, Callable[[], Start]] = {}
        if "moeserve" in names:
            start = functools.partial(start_once, model, Path(folder), quantization, threads)
            start(Source(packed=True, cold=False))  # writes the packed copy
            has_copy = any(Path(folder).glob("packed/*.safetensors"))
            if not has_copy:
                print(f"{model.name}: no packed copy was written; small models have none", file=sys.stderr)
            for packed, cold in itertools.product((False, True) if has_copy else (False,), (False, True)):
                source = Source(packed, cold)
                measures[source.name] = functools.partial(start, source)
        peers = [name for name in PEER_NAMES if name in names]
        for name in peers:
            start_peer_once(name, model, threads)  # writes files and caches that later starts use
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
    """Start moeserve in a new process and wait for its end.

    Raises:
        EngineError: the process failed; the message has the end of its output.
    """
    files = [*model.glob("*.safetensors"), *cache.glob("packed/*.safetensors")]
    (drop_from_memory if source.cold else read_into_memory)(files)
    command = ["env", f"MOESERVE_CACHE={cache}", sys.executable, "-c", START_ONCE]
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


def first_token(arguments: Sequence[str]) -> None:
    """Start moeserve, generate one token, and print readings of the monotonic clock, which all processes share."""
    imported = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--no-packed-cache", action="store_true")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(arguments)
    with LLM(
        options.model,
        packed_cache=0 if options.no_packed_cache else "16GiB",
        quantization=options.quantization,
        num_threads=options.threads,
        max_model_len=1024,
        device="cpu",
        show_progress=False,
    ) as llm:
        loaded = time.monotonic()
        prompt = random.Random(0).choices(range(llm.config.vocab_size), k=PROMPT_TOKENS)
        llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        print(json.dumps({"imported": imported, "loaded": loaded, "first_token": time.monotonic()}), flush=True)
        wait_for_cache_writers()  # the process would otherwise exit before the packed copy is written


def start_peer_once(name: PeerName, model: Path, threads: int) -> Start:
    with start_peer(name, model, num_threads=threads) as peer:
        return Start(peer.startup_seconds)


def read_into_memory(files: Iterable[Path]) -> None:
    """Read all files, so that a start after a cold one does not pay for the dropped pages."""
    buffer = bytearray(2**24)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_from_memory(files: Iterable[Path]) -> None:
    """Ask the kernel to drop its cached pages of these files, once they are on disk."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def as_text(rows: Sequence[Row]) -> str:
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


if __name__ == "__main__":
    main()
