"""Runs each part of the GPU benchmark in processes of its own, within a share of the time.

A process writes a line of JSON for everything that is planned, begun and done. One that dies, or that a CUDA error has
made useless, is started again for the items that it has not begun, so a fault fails one item only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from moeserve.config.environment import environment_without

PartName = Literal["checks", "engine", "ranks", "kernels", "throughput"]
PART_NAMES: tuple[PartName, ...] = get_args(PartName)
POLL_SECONDS = 0.2
END_SECONDS = 5.0  # between SIGTERM and SIGKILL
FINISHING_SHARE = 0.15  # of a part's time, after nothing more is begun
JUDGED: tuple[PartName, ...] = ("checks", "engine", "ranks")  # an item of these that runs too long has failed
STUCK_SHARE = 0.7  # of a part's time

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A part's share of the time, and the number of processes that work on it at once."""

    name: PartName
    share: float
    num_processes: int  # parts that are not timed compile their kernels in parallel


PARTS = (
    Part("checks", 0.26, num_processes=6),
    Part("engine", 0.22, num_processes=10),  # one for each family and dtype
    Part("kernels", 0.28, num_processes=1),
    Part("throughput", 0.24, num_processes=1),
)
RANKS = Part("ranks", 0.22, num_processes=4)  # each starts two ranks at a time


@dataclass(frozen=True)
class PartResult:
    """The rows of a part."""

    part: PartName
    budget: float  # seconds
    seconds: float
    rows: list[Row]


def parts_for(num_gpus: int) -> tuple[Part, ...]:
    return PARTS if num_gpus < 2 else (*PARTS[:2], RANKS, *PARTS[2:])


def budget(part: Part, later: Sequence[Part], seconds_left: float) -> float:
    """Return the seconds of a part: time that earlier parts did not use is shared among it and the later ones."""
    return max(0.0, seconds_left) * part.share / (part.share + sum(other.share for other in later))


def append_line(path: Path, line: Row) -> None:
    """Write one line of a process's file: {"planned": names}, {"begun": name}, {"done": row} or {"ended": name}."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, default=str) + "\n")


@dataclass
class Progress:
    """The content of a process's file so far."""

    path: Path
    planned: list[str] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)
    running: str | None = None
    running_since: float = 0.0  # of this process's clock
    rows: list[Row] = field(default_factory=list)
    num_read: int = 0  # bytes

    def read(self) -> None:
        """Read the lines written since. An unfinished line is left for later."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.num_read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self.num_read += len(whole) + len(newline)
        for line in map(json.loads, whole.splitlines()):
            match line:
                case {"planned": names}:
                    self.planned = names
                case {"begun": name}:
                    self.begun.add(name)
                    self.running, self.running_since = name, time.monotonic()
                case {"ended": _}:
                    self.running = None
                case {"done": row}:
                    self.rows.append(row)


class Worker:
    """One process of a part, and its successors."""

    def __init__(self, command: Sequence[str], folder: Path, index: int) -> None:
        self.command = [*command, "--rows", str(folder / f"{index}.jsonl")]
        self.progress = Progress(folder / f"{index}.jsonl")
        self.log = folder / f"{index}.log"
        self.num_begun = 0  # before the latest start
        self.has_failed = False  # and is not started again
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.command,
                env=environment_without("TRITON_INTERPRET"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # processes that it starts end with it
            )

    def poll(self) -> bool:
        """Read the file, and return True while there is work. Restart a failed process for its remaining items."""
        code = self.process.poll()
        self.progress.read()
        if not code:
            return code is None
        if self.progress.running is not None or not self.progress.planned:
            log = self.log.read_text(errors="replace")[-2000:]
            name, error = self.progress.running or "a process", f"its process ended with exit code {code}"
            append_line(self.progress.path, {"done": {"name": name, "status": "failed", "error": error, "log": log}})
            append_line(self.progress.path, {"ended": name})
            self.progress.read()
        num_begun = len(self.progress.begun)
        if num_begun == len(self.progress.planned) or num_begun == self.num_begun:
            self.has_failed = True
            return False
        self.num_begun = num_begun
        self.process = self._start()
        return True

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(END_SECONDS)

    def unfinished(self, part: PartName, seconds: float) -> Iterable[Row]:
        """Yield rows for what has not ended when the part is over."""
        reason = f"the part's {seconds:.0f} s were over"
        if not self.progress.planned and not self.progress.rows:
            yield {"name": f"{part}, a process", "status": "failed", "error": f"nothing was begun when {reason}"}
        for name in self.progress.planned:
            running_for = time.monotonic() - self.progress.running_since
            if name == self.progress.running and part in JUDGED and running_for > STUCK_SHARE * seconds:
                yield {"name": name, "status": "failed", "error": f"still running after {running_for:.0f} s"}
            elif name not in self.progress.begun and self.has_failed:
                yield {"name": name, "status": "failed", "error": "its process ended before it"}
            elif name == self.progress.running or name not in self.progress.begun:
                yield {"name": name, "status": "left out", "reason": reason}


def run_part(
    part: Part,
    seconds: float,
    seed: int,
    report: Callable[[Row], None],
    command: Sequence[str] = (sys.executable, "-m", "moeserve.bench.gpu.parts"),
) -> PartResult:
    """Run a part for at most `seconds`, and report each row at once.

    Args:
        command: is extended by the part's name and options.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--seed", str(seed), "--ends-at", f"{started + seconds * (1 - FINISHING_SHARE):.3f}"]
        workers = [
            Worker([*command, part.name, *options, "--share", f"{index}/{part.num_processes}"], Path(folder), index)
            for index in range(part.num_processes)
        ]
        rows: list[Row] = []
        num_reported = [0] * len(workers)

        def report_new_rows() -> None:
            for index, worker in enumerate(workers):
                new = worker.progress.rows[num_reported[index] :]
                num_reported[index] += len(new)
                for row in new:
                    report(row)
                rows.extend(new)

        running = list(workers)
        try:
            while running and time.monotonic() - started < seconds:
                time.sleep(POLL_SECONDS)
                running = [worker for worker in running if worker.poll()]
                report_new_rows()
        finally:
            for worker in running:
                worker.stop()
        for worker in workers:
            worker.progress.read()
            worker.progress.rows += worker.unfinished(part.name, seconds)
        report_new_rows()
    return PartResult(part.name, seconds, time.monotonic() - started, rows)
