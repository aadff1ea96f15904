"""Measure the fastest tiles of grouped products on this GPU, and write them to the file that `tuning` reads.

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
from typing import Any

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
    num_splits,
    save_table,
)

# T tokens, K experts per token, P pairs = T * K, S source rows, R rows, e experts, O outputs, I inputs, B blocks of 128
# inputs, G blocks of 128 outputs

DEFAULT_TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384]
MXFP4_GROUP = 32  # inputs that share an exponent
NUM_LAUNCHES = 10  # launches in a graph
NUM_REPLAYS = 7  # replays, of which the median is reported
FLUSHED_BYTES = 2**27  # bytes read between launches, more than an L2 cache holds
SM_REGISTERS = 65536
OTHER_REGISTERS = 80  # registers of a thread beside its accumulators, mostly for addresses


@dataclass(frozen=True)
class Layer:
    """Shapes of the experts of a layer on one GPU."""

    kind: str  # "bf16", "fp8" or "mxfp4"
    num_experts: int
    hidden_size: int
    expert_width: int
    top_k: int

    def problems(self, num_tokens: int) -> list[Problem]:
        """Return the products of a layer: gates and ups, then down."""
        shapes = ((True, 2 * self.expert_width, self.hidden_size), (False, self.hidden_size, self.expert_width))
        return [
            Problem(
                kind=self.kind,  # type: ignore[arg-type]
                is_gated=is_gated,
                num_experts=self.num_experts,
                num_outputs=num_outputs,
                num_inputs=num_inputs,
                num_rows=num_tokens * self.top_k,
                can_split=self.kind == "fp8" and self.num_experts == 1,
            )
            for is_gated, num_outputs, num_inputs in shapes
        ]


def candidates(problem: Problem) -> list[Config]:
    """Return the configs to measure: the config by rule, then all that fill a multiprocessor and suit the problem."""
    found = [config_by_rule(problem)]
    for values in itertools.product((16, 32, 64, 128), (64, 128, 256), (64, 128), (4, 8), (3, 4, 5, 6), (1, 2, 3, 4)):
        config = Config(*values)
        one_more = dataclasses.replace(config, programs_per_sm=config.programs_per_sm + 1)
        is_full = config.programs_per_sm == 4 or not is_possible(one_more, problem)
        if is_full and config not in found and is_possible(config, problem) and suits(config, problem):
            found.append(config)
    if not problem.can_split:
        return found
    counts = {config: num_splits(dataclasses.replace(config, num_splits=1), problem) for config in found}
    split = [
        dataclasses.replace(each, num_splits=n) for each in found for n in {1, counts[each], -(-counts[each] // 2)}
    ]
    return list(dict.fromkeys([*found[:1], *split]))


def is_possible(config: Config, problem: Problem) -> bool:
    """True if the programs fit a multiprocessor and need not spill registers."""
    shared_bytes = config.shared_bytes(problem.element_size) + 2048  # an allowance for the compiler
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
    """True if a config is worth a measurement: its tiles are well filled, and enough bytes are in flight."""
    rows = problem.rows_per_expert
    if config.block_m > max(16, 4 * rows) or config.block_m < min(rows / 2, 64):
        return False
    # With few rows, memory bounds the time: at least 48 KiB must be in flight on each multiprocessor.
    num_in_flight = config.programs_per_sm * (config.num_stages - 1) * config.block_n * config.block_k
    return rows > 64 or num_in_flight * problem.element_size >= 48 * 1024


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m moeserve.triton_kernels.tune", description=__doc__.split("\n")[0])
    parser.add_argument("--experts", type=_positive, required=True, help="experts on this GPU")
    parser.add_argument("--hidden", type=_positive, required=True, help="hidden size of the model")
    parser.add_argument("--width", type=_positive, required=True, help="intermediate size of an expert on this GPU")
    parser.add_argument("--top-k", type=_positive, required=True, help="experts of each token on this GPU")
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp8", "mxfp4"),
        default="bf16",
        help="of weights; fp8: 8-bit blocks with scales; of a single weight (--experts 1) also split-K (default: bf16)",
    )
    parser.add_argument(
        "--rows",
        type=_positive,
        nargs="+",
        default=DEFAULT_TOKENS,
        metavar="TOKENS",
        help="numbers of tokens to measure (default: 1 to 16384); a token has one row for each of its experts",
    )
    parser.add_argument("--out", type=Path, help="the file to extend (default: that of this GPU, beside the code)")
    options = parser.parse_args(arguments)
    if options.top_k > options.experts:
        parser.error(f"--top-k {options.top_k} exceeds --experts {options.experts}")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("error: torch sees no GPU (torch.cuda.is_available())", file=sys.stderr)
        return 1
    device_name = torch.cuda.get_device_name()
    path = options.out or TUNED_FOLDER / file_name(device_name)
    layer = Layer(options.dtype, options.experts, options.hidden, options.width, options.top_k)
    print(f"{device_name}; the file is {path}")
    for num_tokens in options.rows:
        for problem in layer.problems(num_tokens):
            launch = _make_launch(problem, layer, num_tokens)
            seconds = {config: _measure(launch, config) for config in candidates(problem)}
            best, by_rule = min(seconds, key=seconds.__getitem__), config_by_rule(problem)
            save_table(path, [(problem, best)])  # at once, so that an interruption loses nothing
            teraflops = 2 * problem.num_rows * problem.num_outputs * problem.num_inputs / seconds[best] / 1e12
            print(
                f"{problem.weights_key}, {num_tokens} tokens: {seconds[best] * 1e6:.1f} us "
                f"(by rule {seconds[by_rule] * 1e6:.1f}), {teraflops:.0f} TFLOP/s, {best}",
                flush=True,
            )
            del launch  # frees the weights before the next ones are drawn
    return 0


def _random_operands(problem: Problem, num_sources: int) -> dict[str, Any]:
    """Draw rows, weights and, for fp8, their scales, as arguments of `grouped_matmul`."""
    shape = (problem.num_experts, problem.num_outputs, problem.num_inputs)
    if problem.kind == "bf16":
        rows = torch.randn(num_sources, problem.num_inputs, device="cuda").bfloat16()
        return {
            "rows_SI": rows,
            "weight_eOI": torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=0.02),
        }
    if problem.kind == "mxfp4":
        codes, exponents = (
            torch.randint(low, high, (*shape[:2], problem.num_inputs // size), dtype=torch.uint8, device="cuda")
            for low, high, size in ((0, 256, 2), (120, 128, MXFP4_GROUP))
        )
        rows = torch.randn(num_sources, problem.num_inputs, device="cuda").bfloat16()
        return {"rows_SI": rows, "weight_eOI": codes, "weight_scale_eGB": exponents}
    num_parts = 2 if problem.is_gated else 1
    num_blocks = -(-problem.num_inputs // FP8_BLOCK)
    num_output_blocks = num_parts * -(-problem.num_outputs // num_parts // FP8_BLOCK)
    return {
        "rows_SI": _random_codes(num_sources, problem.num_inputs),
        "row_scale_SB": torch.rand(num_sources, num_blocks, device="cuda"),
        "weight_eOI": _random_codes(*shape),
        "weight_scale_eGB": torch.rand(problem.num_experts, num_output_blocks, num_blocks, device="cuda"),
    }


def _random_codes(*shape: int) -> Tensor:
    """Draw magnitudes below 2: without the exponent's highest bit, none is NaN."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda").bitwise_and_(0xBF).view(torch.float8_e4m3fn)


def _make_launch(problem: Problem, layer: Layer, num_tokens: int) -> Callable[[Config], Tensor]:
    """Return the product of a step with random routing. Gates and ups gather their rows."""
    from moeserve.triton_kernels.grouped_matmul import NUM_ARRIVALS, grouped_matmul

    torch.manual_seed(0)
    experts_P = torch.rand(num_tokens, layer.num_experts, device="cuda").topk(layer.top_k, dim=1).indices.flatten()
    operands = _random_operands(problem, num_tokens if problem.is_gated else problem.num_rows)
    operands["counts_e"] = None if problem.can_split else experts_P.bincount(minlength=layer.num_experts)
    if problem.can_split:
        operands["arrivals"] = torch.zeros(NUM_ARRIVALS, dtype=torch.int32, device="cuda")
    if problem.is_gated:
        order = {} if problem.can_split else {"indices_R": experts_P.argsort(stable=True), "divisor": layer.top_k}
        operands |= {"activation": "swiglu"} | order
        if problem.kind == "fp8":
            num_blocks = -(-problem.num_outputs // 2 // FP8_BLOCK)
            operands["out_scale_RF"] = torch.empty(problem.num_rows, num_blocks, device="cuda")
    return lambda config: grouped_matmul(**operands, config=config)


def _measure(launch: Callable[[Config], Tensor], config: Config) -> float:
    """Return the seconds of a launch with a cold L2 cache: replayed with flushes, minus the flushes alone.

    Return infinity if the config exceeds the resources of this GPU.
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
    """Return the seconds of one call, replayed from a graph of several."""
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
