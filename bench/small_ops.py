"""The small operations of a layer on the CPU: the C++ kernels against the torch references, in turns.

    python -m moeserve.bench.small_ops [--rounds 20] [--json PATH]

- *median*: one call through the operation's Python side, in microseconds, for 1, 32 and 2048 rows in bf16. A sample is
  the mean of many calls, on the same tensors: with few rows they are in the processor's caches.
- *of the limit*: for 2048 rows, the bytes that a call must read and write at the memory bandwidth measured in the same
  run; of the router its multiply-adds in float32 at the rate that torch reaches. Caches can pass the former.
- *floor*: what one allocation by torch, an empty `nn.Module` and one C++ call without arguments take.

Shapes are those of a model 1024 wide with 16 heads of 64, of which 4 are keys, and 64 experts, of which 8 are chosen.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from moeserve.bench.harness import add_options, environment, interleave, ratio_of_medians, write_jsonl
from moeserve.bench.limits import MachineLimits, measure_limits
from moeserve.ops.native import native_kernels
from moeserve.ops.norm import add_then_norm, choose_add_rms_norm, choose_rms_norm, torch_rms_norm
from moeserve.ops.pairs import Keys, TorchPairs, choose_pairs
from moeserve.ops.rotary import choose_rotary, torch_rotary
from moeserve.ops.routing import RouterConfig, TorchRouting, choose_routing
from moeserve.ops.threads import set_num_threads

NUM_ROWS = (1, 32, 2048)
WIDTH, NUM_HEADS, NUM_KEY_HEADS, HEAD_SIZE = 1024, 16, 4, 64
NUM_EXPERTS, TOP_K = 64, 8
EPSILON = 1e-5
CALL_SECONDS = 0.01  # a sample is the mean of as many calls as take about so long


@dataclass(frozen=True)
class Operation:
    """One operation on some rows, and the same in plain torch."""

    name: str
    num_rows: int
    kernel: Callable[[], object]
    reference: Callable[[], object]
    num_bytes: int = 0  # read and written at least
    operations: float = 0.0  # in float32, where they say more than the bytes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.small_ops", description="Small operations: the C++ kernels against torch."
    )
    add_options(parser, rounds=20)
    options = parser.parse_args(arguments)
    if native_kernels() is None:
        raise SystemExit("the C++ kernels are not built: there is nothing to compare torch with")

    set_num_threads(options.threads)
    limits, float32_rate = measure_limits(), measure_float32_rate()
    print(
        f"{options.threads} threads, {limits.read_bandwidth:.1f} GB/s of memory reads, "
        f"{float32_rate:.0f} float32 GFLOP/s in torch"
    )
    for name, seconds in interleave(floor(), options.rounds).items():
        print(f"floor: {name:<20}{statistics.median(seconds) * 1e6:>8.2f} us")
    print(f"{'operation':<18}{'rows':>5} {'torch':>13} {'C++':>12} {'speed-up':>9} {'of the limit':>13}")
    for operation in [made for num_rows in NUM_ROWS for made in operations_on(num_rows)]:
        samples = measure(operation, options.rounds)
        rows = _rows(operation, samples, limits, float32_rate)
        torch_row, kernel_row = rows
        fraction = kernel_row["fraction_of_limit"]
        print(
            f"{operation.name:<18}{operation.num_rows:>5} {torch_row['median_us']:>10.1f} us "
            f"{kernel_row['median_us']:>9.1f} us {kernel_row['ratio']:>9.1f} "
            + (f"{fraction:>13.0%}" if operation.num_rows == max(NUM_ROWS) else "")
        )
        if options.json:
            write_jsonl(options.json, rows)


def measure_float32_rate(size: int = 2048) -> float:
    """GFLOP/s of torch's float32 product, the best of some."""
    rows, weight = torch.randn(size, size), torch.randn(size, size)
    seconds = min(_seconds(lambda: torch.mm(rows, weight)) for _ in range(5))
    return 2 * size**3 / seconds / 1e9


def floor() -> dict[str, Callable[[], float]]:
    """What no operation can do without."""

    class Nothing(nn.Module):
        def forward(self, x: object) -> object:
            return x

    kernels, nothing, like = native_kernels(), Nothing(), torch.empty(1, WIDTH, dtype=torch.bfloat16)
    assert kernels is not None
    calls: dict[str, Callable[[], object]] = {
        "torch.empty_like": lambda: torch.empty_like(like),
        "torch.empty": lambda: torch.empty(1, WIDTH, dtype=torch.bfloat16),
        "an empty nn.Module": lambda: nothing(like),
        "an empty C++ call": kernels.num_threads,
    }
    return {name: _seconds_per_call(call) for name, call in calls.items()}


def operations_on(num_rows: int) -> list[Operation]:
    """All operations, on tensors of their own."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape).bfloat16()

    made: list[Operation] = []
    row_bytes = num_rows * WIDTH * torch.bfloat16.itemsize

    x, update, weight = draw(num_rows, WIDTH), draw(num_rows, WIDTH), draw(WIDTH)
    norm, add_norm = choose_rms_norm("cpu"), choose_add_rms_norm("cpu")
    made.append(
        Operation(
            "norm",
            num_rows,
            lambda: norm(x, weight, EPSILON),
            lambda: torch_rms_norm(x, weight, EPSILON),
            2 * row_bytes,
        )
    )
    made.append(
        Operation(
            "add and norm",
            num_rows,
            lambda: add_norm(x, update, weight, EPSILON),
            lambda: add_then_norm(torch_rms_norm, x, update, weight, EPSILON),
            4 * row_bytes,
        )
    )

    projected = draw(num_rows, (NUM_HEADS + 2 * NUM_KEY_HEADS) * HEAD_SIZE).unflatten(1, (-1, HEAD_SIZE))
    query, head_weight = projected[:, :NUM_HEADS], draw(HEAD_SIZE)
    made.append(
        Operation(
            "norm of heads",
            num_rows,
            lambda: norm(query, head_weight, EPSILON),
            lambda: torch_rms_norm(query, head_weight, EPSILON),
            2 * row_bytes,
        )
    )
    angles = torch.randn(num_rows, HEAD_SIZE // 2)
    cosines, sines = angles.cos(), angles.sin()
    rotary = choose_rotary("cpu")
    for is_interleaved in (False, True):
        made.append(
            Operation(
                "rotary, pairs" if is_interleaved else "rotary, halves",
                num_rows,
                lambda turned=is_interleaved: rotary(query, cosines, sines, turned),  # type: ignore[misc]
                lambda turned=is_interleaved: torch_rotary(query, cosines, sines, turned),  # type: ignore[misc]
                2 * row_bytes,
            )
        )

    config = RouterConfig(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        scoring="sigmoid",
        num_groups=8,
        num_chosen_groups=4,
        experts_rating_group=2,
        is_normalized=True,
        scale=2.5,
        has_correction=True,
    )
    router, reference = choose_routing("cpu", config), TorchRouting(config)
    router_weight, correction = torch.randn(NUM_EXPERTS, WIDTH) * WIDTH**-0.5, torch.randn(NUM_EXPERTS) * 0.1
    made.append(
        Operation(
            "routing",
            num_rows,
            lambda: router(x, router_weight, None, correction),
            lambda: reference(x, router_weight, None, correction),
            operations=2.0 * num_rows * NUM_EXPERTS * WIDTH,
        )
    )

    pairs, torch_pairs = choose_pairs("cpu"), TorchPairs()
    experts, weights = reference(x, router_weight, None, correction)
    keys = experts.flatten()
    order, _ = torch_pairs.sort(keys, Keys(NUM_EXPERTS))
    made.append(
        Operation(
            "sort",
            num_rows,
            lambda: pairs.sort(keys, Keys(NUM_EXPERTS)),
            lambda: torch_pairs.sort(keys, Keys(NUM_EXPERTS)),
            2 * keys.nbytes,
        )
    )
    made.append(
        Operation(
            "gather",
            num_rows,
            lambda: pairs.gather(x, order, TOP_K),
            lambda: torch_pairs.gather(x, order, TOP_K),
            row_bytes + TOP_K * row_bytes,
        )
    )
    output = draw(num_rows * TOP_K, WIDTH)
    made.append(
        Operation(
            "weighted sum",
            num_rows,
            lambda: pairs.weighted_sum(output, order, weights, torch.bfloat16),
            lambda: torch_pairs.weighted_sum(output, order, weights, torch.bfloat16),
            TOP_K * row_bytes + row_bytes,
        )
    )
    return made


@torch.inference_mode()
def measure(operation: Operation, num_rounds: int) -> dict[str, list[float]]:
    """Seconds per call of each implementation, one mean per round, after a round that is not counted."""
    measures = {"torch": _seconds_per_call(operation.reference), "C++": _seconds_per_call(operation.kernel)}
    interleave(measures, 1)
    return interleave(measures, num_rounds)


def _seconds_per_call(call: Callable[[], object]) -> Callable[[], float]:
    @torch.inference_mode()
    def run(num_calls: int) -> float:
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        return (time.perf_counter() - start) / num_calls

    run(1)
    num_calls = max(1, int(CALL_SECONDS / run(3)))
    return lambda: run(num_calls)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _rows(
    operation: Operation, samples: dict[str, list[float]], limits: MachineLimits, float32_rate: float
) -> list[dict[str, Any]]:
    """One row per implementation, each complete in itself."""
    limit_seconds = max(
        operation.num_bytes / limits.read_bandwidth / 1e9,
        operation.operations / float32_rate / 1e9,
    )
    machine = environment()
    return [
        {
            "benchmark": "small_ops",
            "name": name,
            "operation": operation.name,
            "num_rows": operation.num_rows,
            "median_us": statistics.median(seconds) * 1e6,
            "ratio": ratio_of_medians(samples["torch"], seconds),
            "fraction_of_limit": limit_seconds / statistics.median(seconds),
            "samples": seconds,
            "limits": asdict(limits) | {"float32_rate": float32_rate},
            "environment": machine,
        }
        for name, seconds in samples.items()
    ]


if __name__ == "__main__":
    main()
