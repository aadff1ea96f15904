"""Measures whose attention is fastest on the GPU at hand, and writes what attention_backend="auto" goes by.

    python -m moeserve.bench.gpu.tune_attention --heads 32 --kv-heads 8 --head-size 128

Heads are those of one rank: a model's, divided by tensor_parallel_size. A library counts if it can do all steps of a
kind, with the geometric mean of its times, under graph replay with a cold cache.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from moeserve.bench.gpu.attention_peers import problem_of
from moeserve.bench.gpu.kernels import DECODE_BATCHES, attention_calls
from moeserve.bench.gpu.limits import ColdTimer
from moeserve.bench.gpu.shapes import AttentionShape
from moeserve.ops.libraries.attention_times import OWN, STEP_KINDS, StepKind, fastest, save_times, times_path

Chunks = Sequence[tuple[int, int]]  # rows, and length of the context with them
STEPS: dict[StepKind, tuple[Chunks, ...]] = {
    "decode": tuple([(1, context)] * batch for batch, context in DECODE_BATCHES),
    "chunks": ([(4096, 4096)], [(512, 512)] * 8, [(1024, 8192)], [(1, 2048)] * 63 + [(1024, 1024)]),
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    told = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m moeserve.bench.gpu.tune_attention", description=told)
    parser.add_argument("--heads", type=_positive, required=True, help="query heads of one rank")
    parser.add_argument("--kv-heads", type=_positive, required=True, help="key-value heads of one rank")
    parser.add_argument("--head-size", type=_positive, required=True)
    parser.add_argument("--window", type=_positive, help="positions that a token attends to at most")
    parser.add_argument("--sinks", action="store_true", help="a score for each head that takes a share (gpt-oss)")
    parser.add_argument("--block-size", type=_positive, default=16, help="of the KV cache, as the setting")
    parser.add_argument("--out", type=Path, help="a file to add to; default: that of this GPU, beside the code")
    options = parser.parse_args(arguments)
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} is no multiple of --kv-heads {options.kv_heads}")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


@torch.inference_mode()
def measure(shape: AttentionShape, steps: Sequence[Chunks], block_size: int, timer: ColdTimer) -> dict[str, float]:
    """Geometric means of seconds, by label. One that cannot do a step is told, and left out."""
    seconds: dict[str, list[float]] = {}
    for chunks in steps:
        for label, call in attention_calls(shape, chunks, block_size).items():
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
        print("error: there is no GPU to measure: torch sees none (torch.cuda.is_available())", file=sys.stderr)
        return 1
    path = options.out or times_path(torch.device("cuda"))
    shape = AttentionShape(options.heads, options.kv_heads, options.head_size, options.window, options.sinks)
    problem = problem_of(shape, torch.bfloat16, options.block_size)
    print(f"{torch.cuda.get_device_name()}, {problem.key}; the file is {path}")
    timer = ColdTimer()
    measured = {kind: measure(shape, STEPS[kind], options.block_size, timer) for kind in STEP_KINDS}
    save_times(path, problem, measured)
    for kind, seconds in measured.items():
        times = ", ".join(f"{label} {each * 1e6:.1f} us" for label, each in sorted(seconds.items()))
        print(f"{kind}: {times}; auto takes {fastest(seconds, seconds)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
