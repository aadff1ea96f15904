"""Measures which attention is fastest on this GPU, and writes the file that `attention_backend="auto"` reads.

    python -m moeserve.bench.gpu.tune_attention --heads 32 --kv-heads 8 --head-size 128

Heads are those of one rank: a model's, divided by `tensor_parallel_size`. A library counts if it supports all steps of
a kind, with the geometric mean of its times, under graph replay with a cold cache.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from moeserve.bench.gpu.costs import AttentionShape, Chunks
from moeserve.bench.gpu.inputs import gpu_source, layer_shape
from moeserve.bench.gpu.kernels import DECODE_BATCHES, attention_calls
from moeserve.bench.gpu.limits import ColdTimer
from moeserve.bench.harness import at_least
from moeserve.ops.libraries.attention_times import (
    OWN,
    STEP_KINDS,
    AttentionProblem,
    StepKind,
    fastest,
    save_times,
    times_path,
)

STEPS: dict[StepKind, tuple[Chunks, ...]] = {
    "decode": tuple([(1, context)] * batch for batch, context in DECODE_BATCHES),
    "chunks": ([(4096, 4096)], [(512, 512)] * 8, [(1024, 8192)], [(1, 2048)] * 63 + [(1024, 1024)]),
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.gpu.tune_attention",
        description='Measure which attention is fastest on this GPU, for attention_backend="auto".',
    )
    parser.add_argument("--heads", type=at_least(1), required=True, help="query heads of one rank")
    parser.add_argument("--kv-heads", type=at_least(1), required=True, help="key-value heads of one rank")
    parser.add_argument("--head-size", type=at_least(1), required=True)
    parser.add_argument("--window", type=at_least(1), help="sliding window, in positions")
    parser.add_argument("--sinks", action="store_true", help="with attention sinks (gpt-oss)")
    parser.add_argument("--block-size", type=at_least(1), default=16, help="block size of the KV cache (default: 16)")
    parser.add_argument("--out", type=Path, help="the file to extend (default: that of this GPU, beside the code)")
    options = parser.parse_args(arguments)
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} is not a multiple of --kv-heads {options.kv_heads}")
    return options


@torch.inference_mode()
def measure(
    calls_of: Callable[[Chunks], Mapping[str, Callable[[], object]]], steps: Sequence[Chunks], timer: ColdTimer
) -> dict[str, float]:
    """Return the geometric mean of the seconds of each implementation that supports all steps."""
    seconds: dict[str, list[float]] = {}
    for chunks in steps:
        for label, call in calls_of(chunks).items():
            try:
                seconds.setdefault(label, []).append(timer.seconds(call))
            except Exception as error:
                if label == OWN:
                    raise
                print(f"{label} is left out: {type(error).__name__}: {error}"[:500], flush=True)
    return {label: statistics.geometric_mean(each) for label, each in seconds.items() if len(each) == len(steps)}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("error: torch sees no GPU (torch.cuda.is_available())", file=sys.stderr)
        return 1
    path = options.out or times_path(torch.device("cuda"))
    shape = AttentionShape(options.heads, options.kv_heads, options.head_size, options.window, options.sinks)
    problem = AttentionProblem(layer_shape(shape, torch.bfloat16), options.block_size)
    print(f"{torch.cuda.get_device_name()}, {problem.key}; the file is {path}")
    timer = ColdTimer()
    calls_of = partial(attention_calls, gpu_source(0), shape, block_size=options.block_size)
    measured = {kind: measure(calls_of, STEPS[kind], timer) for kind in STEP_KINDS}
    save_times(path, problem, measured)
    for kind, seconds in measured.items():
        times = ", ".join(f"{label} {each * 1e6:.1f} us" for label, each in sorted(seconds.items()))
        print(f'{kind}: {times}; "auto" chooses {fastest(seconds, seconds)}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
