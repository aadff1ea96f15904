"""The parts of the GPU benchmark, each of which runs in processes of its own.

A process receives its job as a line of JSON. It prints its plan, each item that it begins, and the rows of results, as
lines of JSON after a mark; all its other output is its log. If a process dies, a CUDA error makes it unusable, or an
item takes too long, the process is replaced for the items that it has not begun, so a fault fails only one item.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

MARK = "@moeserve "
COMMAND = sys.executable, "-m", "moeserve.bench.gpu.parts"
PROCESS_OF = "a process of "  # in the name of a row that belongs to no item
FINISHING_SHARE = 0.15  # last fraction of a part's time, in which no item is begun
END_SECONDS = 10.0  # time for a killed process and its children to close their output

Process = subprocess.Popen[str]
Row = dict[str, Any]
Report = Callable[[Row], None]
SecondsLeft = Callable[[], float]
Item = tuple[str, Callable[[], Iterable[Row]]]  # a name, and a function that measures


@dataclass(frozen=True)
class Part:
    """A part of the benchmark."""

    name: str
    module: str  # of this package; its `items(job)` yields the part's items
    seconds: float  # its share of the time of a run
    num_processes: int  # maximum number of concurrent processes
    item_seconds: float  # an item that takes longer has failed
    needs_gpu: bool = True
    is_timed: bool = False  # its results are times, which another commit changes


PARTS = {
    part.name: part
    for part in (
        Part("compile", "launches", 90, 16, 300, needs_gpu=False),
        Part("checks", "cases", 110, 6, 40),
        Part("engine", "engine", 110, 10, 45),  # one process for each family and dtype
        Part("steps", "steps", 40, 1, 25, is_timed=True),
        Part("throughput", "throughput", 180, 1, 110, is_timed=True),
        Part("kernels", "kernels", 170, 1, 12, is_timed=True),
    )
}


@dataclass(frozen=True)
class Job:
    """The work of one process of a part."""

    part: str
    seed: int
    on_cpu: bool = False  # rehearse on a CPU
    is_small: bool = False  # check small shapes, as in a rehearsal
    match: str = ""  # only items whose name contains this text
    finished: tuple[str, ...] = ()  # items that an earlier run or process has completed
    begin_before: float = float("inf")  # time of the monotonic clock after which no item is begun
    share: int = 0  # number of this process among those of the part
    num_shares: int = 1

    @property
    def device(self) -> str:
        return "cpu" if self.on_cpu else "cuda"

    def seconds_left(self) -> float:
        return self.begin_before - time.monotonic()


def run_part(
    part: Part,
    seconds: float,
    job: Job,
    report: Report,
    command: Sequence[str] = COMMAND,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a part for at most `seconds`. Report each row at once, and each completed item as {"finished": name}.

    Args:
        environment: environment of its processes; None: this process's.
    """
    lock, ends_at = threading.Lock(), time.monotonic() + seconds
    job = replace(job, begin_before=ends_at - FINISHING_SHARE * seconds, num_shares=part.num_processes)
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    start = partial(subprocess.Popen, command, env=environment, errors="replace", start_new_session=True, **pipes)

    def add(row: Row) -> None:
        with lock:
            report(row)

    shares = [(part, replace(job, share=share), ends_at, add, start) for share in range(part.num_processes)]
    threads = [threading.Thread(target=_run_share, args=share, daemon=True) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends_at + END_SECONDS - time.monotonic()))
        if thread.is_alive():
            add(failed(f"{PROCESS_OF}{part.name}", "it does not end"))


def _run_share(part: Part, job: Job, ends_at: float, add: Report, start: Callable[[], Process]) -> None:
    """Run one process, and its successors after faults, until all of its items are done or the time is over."""
    plan: list[str] = []
    is_done = False
    while not is_done and time.monotonic() < ends_at:
        item, began_at = f"{PROCESS_OF}{part.name}", time.monotonic()
        has_result = has_begun = False  # the item has reported a row
        log: collections.deque[str] = collections.deque(maxlen=30)
        process = start()
        timer = _kill_after(process, ends_at - began_at)
        assert process.stdin
        assert process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asdict(job)) + "\n")
            process.stdin.flush()  # stays open: its end is the end of this process
        for line in process.stdout:
            match json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else line.strip():
                case str(text):
                    log.extend([line] if text else [])
                case {"plan": plan}:
                    pass
                case {"done": is_done}:
                    pass
                case {"begun": item}:
                    began_at, has_begun, has_result = time.monotonic(), True, False
                    timer.cancel()
                    timer = _kill_after(process, min(part.item_seconds, ends_at - began_at))
                case row:
                    has_result = has_result or "status" in row
                    add(row)
                    if "finished" in row:
                        job = replace(job, finished=(*job.finished, row["finished"]))
        code = process.wait()
        timer.cancel()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        ran = time.monotonic() - began_at
        is_cut = time.monotonic() >= ends_at and ran < part.item_seconds
        if not is_done and not is_cut and item not in job.finished:
            reason = f"its process ended with exit code {code} after {ran:.0f} s"
            if ran >= part.item_seconds:
                reason = f"it did not end within {part.item_seconds:.0f} s"
            row = failed(f"{item}, after its result" if has_result else item, reason, "".join(log))
            add(row | {"item": item})
            job = replace(job, finished=(*job.finished, item))
            is_done = not has_begun
            if has_begun:
                add({"finished": item})
    for name in plan:
        if name not in job.finished:
            add(left_out(name, "no time was left"))


def _kill_after(process: Process, seconds: float) -> threading.Timer:
    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(max(0.0, seconds), kill)
    timer.daemon = True
    timer.start()
    return timer


# The following functions run in the processes of a part.


def main() -> None:
    """Run the job of standard input."""
    job = Job(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from moeserve.bench.gpu.rehearsal import rehearsing

    module = importlib.import_module(f"moeserve.bench.gpu.{PARTS[job.part].module}")
    with rehearsing() if job.on_cpu and job.part != "compile" else contextlib.nullcontext():
        work_through([item for item in module.items(job) if job.match in item[0]], job)


def _end_with_parent() -> None:
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def work_through(items: Sequence[Item], job: Job) -> None:
    """Run each item of this process that is not finished, and print its rows.

    Raises:
        Exception: a CUDA error, after which this process can no longer use the GPU.
    """
    own = [item for item in items[job.share :: job.num_shares] if item[0] not in job.finished]
    send({"plan": [name for name, _ in own]})
    for name, rows in own:
        if job.seconds_left() <= 0:
            break
        send({"begun": name})
        try:
            for row in rows():
                send({"name": name, "item": name} | row)
        except Exception as error:
            if is_cuda_error(error):
                raise
            send(failed(name, f"{type(error).__name__}: {error}"[:2000], traceback.format_exc(limit=-4)))
        send({"finished": name})
    send({"done": True})


def one_row(measure: Callable[..., Row], *arguments: Any) -> Iterator[Row]:
    yield measure(*arguments)


def send(line: Row) -> None:
    print(f"\n{MARK}{json.dumps(line, default=str)}", flush=True)


def left_out(name: str, reason: str) -> Row:
    return {"name": name, "item": name, "status": "left out", "reason": reason}


def failed(name: str, error: str, log: str = "") -> Row:
    return {"name": name, "item": name, "status": "failed", "error": error} | ({"log": log} if log else {})


def bar(figures: Row, figure: str, least: float) -> Row:
    """Return the minimum value that a figure should reach. A missed bar is reported, but does not fail the run."""
    reached = figures[figure]
    return {"bar": {"figure": figure, "least": least, "reached": reached, "is_met": reached >= least}}


def is_cuda_error(error: BaseException) -> bool:
    """True if an error or its cause comes from CUDA, so that the process may have lost the GPU."""
    text = str(error)
    if any(each in text for each in ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and is_cuda_error(before)


if __name__ == "__main__":
    main()
