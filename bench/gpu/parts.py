"""The parts of the GPU benchmark, each of which runs in separate processes.

A process prints its plan, each item that it begins, and the rows of results, as lines of JSON after a mark. All its
other output is its log. If a process dies, or a CUDA error makes it unusable, it is restarted for the items that it has
not begun, so a fault fails only one item. Items that an earlier run has finished are not planned.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeserve.config.environment import environment_without

MARK = "@moeserve "
PROCESS_OF = "a process of "  # in the name of a row that belongs to no item
FINISHING_SHARE = 0.15  # last fraction of a part's time, in which no item is begun
STUCK_SHARE = 0.7  # fraction of a part's time after which a running item has failed
END_SECONDS = 10.0  # time for a killed process and its children to close their output

Row = dict[str, Any]
SecondsLeft = Callable[[], float]
Item = tuple[str, Callable[[], Iterable[Row]]]  # a name, and a function that measures


@dataclass(frozen=True)
class Part:
    """A part's fraction of the time, and the number of its concurrent processes."""

    name: str
    share: float
    num_processes: int
    num_gpus: int = 1  # number of GPUs that it needs


# The most important parts come first, for runs that are cut short. `compile` runs before all checks and measurements.
PARTS = (
    Part("compile", 0.20, num_processes=16, num_gpus=0),
    Part("sanitizer", 0.12, num_processes=4),
    Part("checks", 0.16, num_processes=6),
    Part("engine", 0.20, num_processes=10),  # one for each family and dtype
    Part("kernels", 0.22, num_processes=1),
    Part("throughput", 0.24, num_processes=1),
    Part("ranks", 0.22, num_processes=4, num_gpus=2),
)


def run_part(
    part: Part,
    seconds: float,
    seed: int,
    report: Callable[[Row], None],
    finished: Collection[str] = (),
    command: Sequence[str] = (sys.executable, "-m", "moeserve.bench.gpu.parts"),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a part for at most `seconds`. Report each row at once, and each completed item as {"finished": name}.

    Args:
        finished: items to skip, because an earlier run has completed them.
        command: command line, to which the part's name and options are appended.
        environment: environment of its processes; None: this process's, without Triton's interpreter.
    """
    environment = environment_without("TRITON_INTERPRET") if environment is None else environment
    lock = threading.Lock()

    def add(row: Row) -> None:
        with lock:
            report(row)

    ends_at = time.monotonic() + seconds
    last_begin = ends_at - FINISHING_SHARE * seconds
    threads = []
    for index in range(part.num_processes):
        options = [part.name, f"--seed={seed}", f"--ends-at={last_begin:.3f}", f"--share={index}/{part.num_processes}"]
        own_name = f"{PROCESS_OF}{part.name}"
        arguments = ([*command, *options], own_name, environment, seconds, ends_at, sorted(finished), add)
        threads.append(threading.Thread(target=run_share, args=arguments, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(max(0.0, ends_at + END_SECONDS - time.monotonic()))
        if thread.is_alive():
            add({"name": f"{PROCESS_OF}{part.name}", "status": "failed", "error": "it does not end"})


def run_share(
    command: Sequence[str],
    own_name: str,
    environment: Mapping[str, str],
    seconds: float,
    ends_at: float,
    finished: Sequence[str],
    add: Callable[[Row], None],
) -> None:
    """Run one process, and its successors after faults, until all of its items are done or the time is over."""
    plan: list[str] = []
    num_begun = 0
    while True:
        num_before, began_at = num_begun, time.monotonic()
        log: collections.deque[str] = collections.deque(maxlen=30)
        process = subprocess.Popen(
            [*command, f"--skip={num_begun}"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        timer = threading.Timer(max(0.0, ends_at - time.monotonic()), process.kill)
        timer.start()
        assert process.stdin
        assert process.stdout
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(finished))
        for line in process.stdout:
            if not line.startswith(MARK):
                log.append(line)
                continue
            match json.loads(line.removeprefix(MARK)):
                case {"plan": plan}:
                    pass
                case {"begun": num_begun}:
                    began_at = time.monotonic()
                case row:
                    add(row)
        code = process.wait()
        timer.cancel()
        if code == 0:
            return
        name = plan[num_begun - 1] if num_begun > num_before else own_name
        is_over, ran = time.monotonic() >= ends_at, time.monotonic() - began_at
        if is_over and ran < STUCK_SHARE * seconds:
            add(left_out(name, f"the part's {seconds:.0f} s were over"))
        else:
            error = f"its process ended with exit code {code} after {ran:.0f} s"
            add({"name": name, "status": "failed", "error": error, "log": "".join(log)})
            add({"finished": name})
        if is_over or num_begun == num_before or num_begun == len(plan):
            for name in plan[num_begun:]:
                add(left_out(name, "its process ended before it"))
            return


# The following functions run in the processes of a part.


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m moeserve.bench.gpu.parts", description="Run by `run.py`.")
    parser.add_argument("part", choices=[part.name for part in PARTS])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--ends-at", type=float, required=True, help="monotonic clock after which nothing is begun")
    parser.add_argument("--share", required=True, metavar="I/N", help="items I, I + N, I + 2 N ...")
    parser.add_argument("--skip", type=int, required=True, help="items that were begun before")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU")
    options = parser.parse_args(arguments)

    def seconds_left() -> float:
        ends_at: float = options.ends_at
        return ends_at - time.monotonic()

    first, step = map(int, options.share.split("/"))
    finished = set(json.loads(sys.stdin.read() or "[]"))

    from moeserve.bench.gpu.items import Setting, items_of

    setting = Setting(options.seed, seconds_left, on_cpu=options.rehearse)
    # Compilation does not use the interpreter.
    with contextlib.nullcontext() if options.part == "compile" else setting.installed():
        left = [item for item in items_of(options.part, setting) if item[0] not in finished]
        work_through(left[first::step], options.skip, seconds_left)


def work_through(items: Sequence[Item], num_skipped: int, seconds_left: SecondsLeft) -> None:
    """Run each item and print its rows.

    Raises:
        Exception: a CUDA error, after which this process can no longer use the GPU.
    """
    send({"plan": [name for name, _ in items]})
    for index, (name, rows) in enumerate(items[num_skipped:], num_skipped):
        send({"begun": index + 1})
        if seconds_left() <= 0:
            send(left_out(name, "no time was left"))
            continue
        try:
            for row in rows():
                send({"name": name} | row)
        except Exception as error:
            if is_cuda_error(error):
                raise
            message, trace = f"{type(error).__name__}: {error}"[:2000], traceback.format_exc(limit=-4)
            send({"name": name, "status": "failed", "error": message, "log": trace})
        send({"finished": name})


def send(line: Row) -> None:
    print(f"\n{MARK}{json.dumps(line, default=str)}", flush=True)


def left_out(name: str, reason: str) -> Row:
    return {"name": name, "status": "left out", "reason": reason}


def is_cuda_error(error: BaseException) -> bool:
    """True if an error or its cause comes from CUDA, so that the process may have lost the GPU."""
    text = str(error)
    if any(each in text for each in ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and is_cuda_error(before)


if __name__ == "__main__":
    main()
