"""Measures how grouped products are best cut into tiles on the GPU at hand, and writes what `tuning` reads.

python -m moeserve.triton_kernels.tune --experts 8 --hidden 4096 --width 14336 --top-k 2
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moeserve.triton_kernels.tuning import (
    FP8_BLOCK,
    MAX_SHARED_BYTES,
    SM_SHARED_BYTES,
    TUNED_FOLDER,
    Config,
    Problem,
    config_by_rule,
    file_name,
    save_table,
)

# E experts, T tokens, K experts per token, R rows = T * K, e weights, O outputs, I inputs

DEFAULT_TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384]
NUM_LAUNCHES = 10  # in a graph
NUM_REPLAYS = 7  # of which the median counts
FLUSHED_BYTES = 2**27  # read between launches: more than any L2 cache holds
SM_REGISTERS = 65536
OTHER_REGISTERS = 80  # of a thread, beside accumulators: addresses, mostly


@dataclass(frozen=True)
class Layer:
    """The shapes of a layer's experts on one GPU."""

    kind: str  # "bf16" or "fp8"
    num_experts: int
    hidden_size: int
    expert_width: int
    top_k: int

    def problems(self, num_tokens: int) -> list[Problem]:
        """Gates and ups; and down."""
        shapes = ((True, 2 * self.expert_width, self.hidden_size), (False, self.hidden_size, self.expert_width))
        return [
            Problem(
                kind=self.kind,  # type: ignore[arg-type]
                is_gated=is_gated,
                num_experts=self.num_experts,
                num_outputs=num_outputs,
                num_inputs=num_inputs,
                num_rows=num_tokens * self.top_k,
            )
            for is_gated, num_outputs, num_inputs in shapes
        ]


def candidates(problem: Problem) -> list[Config]:
    """Those that fill a multiprocessor and fit the problem. The one by rule is the first."""
    found = [config_by_rule(problem)]
    for values in itertools.product((16, 32, 64, 128), (64, 128, 256), (64, 128), (4, 8), (3, 4, 5, 6), (1, 2, 3, 4)):
        config = Config(*values)
        one_more = dataclasses.replace(config, programs_per_sm=config.programs_per_sm + 1)
        is_full = config.programs_per_sm == 4 or not is_possible(one_more, problem)
        if is_full and config not in found and is_possible(config, problem) and suits(config, problem):
            found.append(config)
    return found


def is_possible(config: Config, problem: Problem) -> bool:
    """Whether its programs find place, and none has to spill registers."""
    shared_bytes = config.shared_bytes(problem.element_size) + 2048  # and what the compiler adds
    if shared_bytes > MAX_SHARED_BYTES or config.programs_per_sm * (shared_bytes + 1024) > SM_SHARED_BYTES:
        return False
    num_threads = 32 * config.num_warps
    accumulator = config.block_m * config.block_n // num_threads
    registers = accumulator * (2 if problem.kind == "fp8" else 1) + OTHER_REGISTERS
    if registers > 255 or config.programs_per_sm * num_threads * registers > SM_REGISTERS:
        return False
    if problem.kind != "fp8":
        return True
    return config.block_n // (2 if problem.is_gated else 1) <= FP8_BLOCK and config.block_k == FP8_BLOCK


def suits(config: Config, problem: Problem) -> bool:
    """Whether it is worth a measurement: tiles are not mostly empty, and there are enough steps under way."""
    rows = problem.rows_per_expert
    if config.block_m > max(16, 4 * rows) or config.block_m < min(rows / 2, 64):
        return False
    # Few rows wait for memory: one multiprocessor's share of it, or as good as all that it has room for.
    under_way = config.programs_per_sm * (config.num_stages - 1) * config.block_n * config.block_k
    return rows > 64 or under_way * problem.element_size >= 48 * 1024


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m moeserve.triton_kernels.tune", description=__doc__.split("\n")[0])
    parser.add_argument("--experts", type=_positive, required=True, help="experts on this GPU")
    parser.add_argument("--hidden", type=_positive, required=True, help="width of the model")
    parser.add_argument("--width", type=_positive, required=True, help="width of an expert, on this GPU")
    parser.add_argument("--top-k", type=_positive, required=True, help="experts of each token, on this GPU")
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16", help="fp8: blocks of 128 with scales")
    parser.add_argument(
        "--rows",
        type=_positive,
        nargs="+",
        default=DEFAULT_TOKENS,
        metavar="TOKENS",
        help="of the steps to measure; each token has a row for each of its experts",
    )
    parser.add_argument("--out", type=Path, help="a table to add to; default: that of this GPU, beside the code")
    arguments_read = parser.parse_args(arguments)
    if arguments_read.top_k > arguments_read.experts:
        parser.error(f"--top-k {arguments_read.top_k} of --experts {arguments_read.experts}")
    return arguments_read


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("error: there is no GPU to measure: torch sees none (torch.cuda.is_available())", file=sys.stderr)
        return 1
    device_name = torch.cuda.get_device_name()
    path = options.out or TUNED_FOLDER / file_name(device_name)
    layer = Layer(options.dtype, options.experts, options.hidden, options.width, options.top_k)
    print(f"{device_name}; the table is {path}")
    for is_gated in (True, False):
        weights = _weights(layer.problems(1)[0 if is_gated else 1])
        for num_tokens in options.rows:
            problem = layer.problems(num_tokens)[0 if is_gated else 1]
            launch = _launch_of(problem, layer, num_tokens, weights)
            seconds = {config: _measure(launch, config) for config in candidates(problem)}
            best, by_rule = min(seconds, key=seconds.__getitem__), config_by_rule(problem)
            save_table(path, [(problem, best)])  # at once: what was measured stays if this is stopped
            teraflops = 2 * problem.num_rows * problem.num_outputs * problem.num_inputs / seconds[best] / 1e12
            print(
                f"{problem.weights_key}, {num_tokens} tokens: {seconds[best] * 1e6:.1f} us "
                f"(by rule {seconds[by_rule] * 1e6:.1f}), {teraflops:.0f} TFLOP/s, {best}",
                flush=True,
            )
        del weights, launch
    return 0


def _weights(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Random ones, and scales."""
    shape = (problem.num_experts, problem.num_outputs, problem.num_inputs)
    if problem.kind == "bf16":
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=0.02), None
    columns = problem.num_outputs // (2 if problem.is_gated else 1)
    num_blocks = problem.num_outputs // columns * -(-columns // FP8_BLOCK)
    scale_eGB = torch.rand(problem.num_experts, num_blocks, -(-problem.num_inputs // FP8_BLOCK), device="cuda")
    return _random_fp8(*shape), scale_eGB


def _random_fp8(*shape: int) -> Tensor:
    """Of magnitudes below 2: without the highest bit of the exponent, nothing is "not a number"."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda").bitwise_and_(0xBF).view(torch.float8_e4m3fn)


def _launch_of(
    problem: Problem, layer: Layer, num_tokens: int, weights: tuple[Tensor, Tensor | None]
) -> Callable[[Config], Tensor]:
    """One product as a step has it: each token's experts drawn at random, gates and ups gather their rows."""
    from moeserve.triton_kernels.grouped_matmul import grouped_matmul, grouped_matmul_fp8

    torch.manual_seed(0)
    experts_TK = torch.rand(num_tokens, layer.num_experts, device="cuda").topk(layer.top_k, dim=1).indices
    indices_R = experts_TK.flatten().argsort(stable=True) if problem.is_gated else None
    counts_e = experts_TK.flatten().bincount(minlength=layer.num_experts)
    num_sources = num_tokens if problem.is_gated else problem.num_rows
    activation = "swiglu" if problem.is_gated else None
    weight_eOI, weight_scale_eGB = weights
    if weight_scale_eGB is None:
        source_SI = torch.randn(num_sources, problem.num_inputs, device="cuda").bfloat16()
        return lambda config: grouped_matmul(
            source_SI,
            weight_eOI,
            counts_e,
            indices_R=indices_R,
            divisor=layer.top_k,
            activation=activation,  # type: ignore[arg-type]
            config=config,
        )
    fp8_SI = _random_fp8(num_sources, problem.num_inputs)
    row_scale_SB = torch.rand(num_sources, -(-problem.num_inputs // FP8_BLOCK), device="cuda")
    return lambda config: grouped_matmul_fp8(
        fp8_SI,
        row_scale_SB,
        weight_eOI,
        weight_scale_eGB,
        counts_e,
        indices_R=indices_R,
        divisor=layer.top_k,
        activation=activation,  # type: ignore[arg-type]
        config=config,
    )


def _measure(launch: Callable[[Config], Tensor], config: Config) -> float:
    """Seconds of a launch with a cold L2 cache, replayed from a graph: with flushes, less the flushes alone.

    One that cannot run here takes forever.
    """
    from triton.runtime.errors import OutOfResources

    flushed = torch.ones(FLUSHED_BYTES // 4, dtype=torch.int32, device="cuda")
    try:
        launch(config)  # compiles
    except OutOfResources:
        return float("inf")

    def both() -> None:
        flushed.sum()
        launch(config)

    return max(_replay(both) - _replay(lambda: flushed.sum()), 1e-9)


def _replay(work: Callable[[], object]) -> float:
    """Seconds of a piece of work in a graph of several."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_LAUNCHES):
            work()
    graph.replay()
    seconds = []
    for _ in range(NUM_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / NUM_LAUNCHES)
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
