"""What ranks of one host gain by sharing memory: each collective through it and over gloo, in one run.

    python -m moeserve.bench.collectives [--ranks 2] [--rounds 3] [--json PATH]

Ranks are processes, started and connected as the engine's are. A collective follows the other at once, as called from
Python, on float32; sums also on bfloat16, of which tensor parallelism adds. *bytes* are those of x for all_reduce, and
for the others what goes from each rank to each. A sample is the median over calls of all ranks; both transports take
turns, round by round, after a round that is not counted. *faster* is the ratio of the medians of samples.

With more ranks than cores each collective waits until all ranks have had their turn on a core.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from moeserve.bench.checkpoints import make_checkpoint
from moeserve.bench.harness import add_options, at_least, environment, interleave, ratio_of_medians, write_jsonl
from moeserve.bench.parallel import Ranks, mean_seconds, median_seconds
from moeserve.bench.parallel_rank import Collective, SummedDtype, TimeCollective
from moeserve.distributed.group import TransportName
from moeserve.machine import shown_bytes

NUM_RANKS = (2, 4, 8)
OPERATIONS: tuple[Collective, ...] = get_args(Collective)
DTYPES: tuple[SummedDtype, ...] = get_args(SummedDtype)
SUMS: tuple[Collective, ...] = ("reduce_scatter", "all_reduce")
NUM_BYTES = (64, 2**11, 2**16, 2**21)
TRANSPORTS: dict[str, TransportName] = {"shared memory": "auto", "gloo": "gloo"}
SAMPLE_SECONDS = 0.2  # a sample is of as many calls as take about so long, of 3 at least


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.collectives", description="What ranks of one host gain by sharing memory."
    )
    parser.add_argument(
        "--ranks", type=at_least(2), action="append", help=f"may be repeated; if not given: {NUM_RANKS}"
    )
    add_options(parser, rounds=3, threads=False)
    options = parser.parse_args(arguments)

    machine = environment()  # before any of our own load
    _show(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}")
    _show(f"{'ranks':>5}   {'collective':<24}{'bytes':>9}{'shared memory':>16}{'gloo':>12}{'faster':>8}")
    rows = []
    with contextlib.ExitStack() as stack:
        # Of a checkpoint that is not loaded: a rank's configuration names one.
        folder = make_checkpoint("mixtral-tiny", Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model")
        for num_ranks in options.ranks or NUM_RANKS:
            with Ranks(num_ranks, folder) as ranks:
                for operation, dtype, num_bytes in itertools.product(OPERATIONS, DTYPES, NUM_BYTES):
                    if dtype == "float32" or operation in SUMS:
                        rows += measure(ranks, num_ranks, operation, dtype, num_bytes, options.rounds)
    if options.json:
        write_jsonl(options.json, [{"benchmark": "collectives", **row, "environment": machine} for row in rows])


def measure(
    ranks: Ranks, num_ranks: int, operation: Collective, dtype: SummedDtype, num_bytes: int, num_rounds: int
) -> list[dict[str, Any]]:
    """Prints a line and returns its rows, one for each transport."""

    def measured(transport: TransportName) -> Callable[[], float]:
        def run(num_calls: int) -> Any:
            return ranks.time(
                TimeCollective(
                    transport=transport, operation=operation, dtype=dtype, num_bytes=num_bytes, num_calls=num_calls
                )
            )

        run(3)  # connects, and touches memory
        num_calls = max(3, int(SAMPLE_SECONDS / mean_seconds(run(3))))
        return lambda: median_seconds(run(num_calls))

    measures = {name: measured(transport) for name, transport in TRANSPORTS.items()}
    interleave(measures, 1)
    samples = interleave(measures, num_rounds)
    ratio = ratio_of_medians(samples["gloo"], samples["shared memory"])
    medians = {name: statistics.median(each) * 1e6 for name, each in samples.items()}
    _show(
        f"{num_ranks:>5}   {f'{operation} {dtype}':<24}{shown_bytes(num_bytes):>9}{medians['shared memory']:>13.1f} us"
        f"{medians['gloo']:>9.0f} us{ratio:>8.1f}"
    )
    return [
        {
            "transport": name,
            "num_ranks": num_ranks,
            "operation": operation,
            "dtype": dtype,
            "num_bytes": num_bytes,
            "median_us": medians[name],
            "ratio_to_gloo": ratio if name != "gloo" else 1.0,  # how many times as fast
            "samples": each,
        }
        for name, each in samples.items()
    ]


def _show(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
