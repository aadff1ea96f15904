"""Decode attention on the CPU, grouped-query and latent: the C++ kernel against the torch reference, in turns.

    python -m moeserve.bench.attention [--rounds 20] [--json PATH]

- *median*: one layer's attention for a batch of requests that each bring one row, bf16. Calls go through as many
  caches as fill 64 MB in turn, like the layers of a model, so that the keys and values of one call are not still in
  the processor's own caches from the last.
- *limit*: the bytes of keys and values that a call must read, at the memory bandwidth measured in the same run. A
  machine with a large last-level cache can pass it.

Knows no model. Grouped-query attention has the shape of a small one, latent attention that of DeepSeek-V2-Lite.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeserve.bench.harness import (
    MachineLimits,
    environment,
    interleave,
    measure_limits,
    ratio_of_medians,
    write_jsonl,
)
from moeserve.machine import usable_cores
from moeserve.ops.attention import AttentionBackend, choose_attention
from moeserve.ops.latent_attention import LatentAttentionBackend, choose_latent_attention
from moeserve.ops.native import native_kernels
from moeserve.ops.threads import set_num_threads
from moeserve.step_inputs import ChunkSpan, StepInputs

BATCHES = (1, 8, 32)
CONTEXT_LENS = (64, 1024, 4096)
CACHE_BYTES = 64 << 20
CALL_SECONDS = 0.02  # a sample is the mean of as many calls as take about so long


@dataclass(frozen=True)
class Shape:
    """`batch` requests of one row each, with contexts of `context_len` positions.

    With a latent size, all heads share one vector of `head_size` values per position, and keys are values.
    """

    batch: int
    context_len: int
    num_heads: int = 16
    num_kv_heads: int = 4
    head_size: int = 64
    latent_size: int | None = None
    block_size: int = 16

    @property
    def kind(self) -> str:
        return "grouped-query" if self.latent_size is None else "latent"

    @property
    def blocks_per_request(self) -> int:
        return -(-self.context_len // self.block_size)

    @property
    def key_value_bytes(self) -> int:
        num_tensors = 2 if self.latent_size is None else 1
        size = num_tensors * self.num_kv_heads * self.head_size
        return torch.bfloat16.itemsize * self.batch * self.context_len * size


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.attention", description="Decode attention: the C++ kernel against torch."
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--json", type=Path, help="append the results to this file, one JSON object per line")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.threads) < 1:
        parser.error("--rounds and --threads must be at least 1")

    set_num_threads(options.threads)
    limits = measure_limits()
    print(f"{options.threads} threads, {limits.read_bandwidth:.1f} GB/s of memory reads")
    print(
        f"{'attention':<14}{'batch':>5} {'context':>8} {'torch':>12} {'C++':>12} {'speed-up':>9} {'of the limit':>13}"
    )
    grouped = [Shape(*sizes) for sizes in itertools.product(BATCHES, CONTEXT_LENS)]
    latent = [dataclasses.replace(shape, num_kv_heads=1, head_size=576, latent_size=512) for shape in grouped]
    for shape in grouped + latent:
        samples = measure(shape, options.rounds)
        rows = _rows(shape, samples, limits)
        torch_row, kernel_row = rows
        name = f"{shape.kind:<14}{shape.batch:>5} {shape.context_len:>8}"
        print(
            f"{name} {torch_row['median_us']:>9.1f} us {kernel_row['median_us']:>9.1f} us "
            f"{kernel_row['ratio']:>9.1f} {kernel_row['fraction_of_limit']:>13.0%}"
        )
        if options.json:
            write_jsonl(options.json, rows)


@torch.inference_mode()
def measure(shape: Shape, num_rounds: int) -> dict[str, list[float]]:
    """Seconds per call of each implementation, one mean per round, after a round that is not counted."""
    if native_kernels() is None:
        raise SystemExit("the C++ kernels are not built: there is nothing to compare torch with")
    step = _decode_step(shape)
    query_TNH = torch.randn(shape.batch, shape.num_heads, shape.head_size).bfloat16()
    num_blocks, scale = shape.batch * shape.blocks_per_request, shape.head_size**-0.5
    kernel: Any
    attend: Callable[[Any, Tensor, list[Tensor], StepInputs], None]
    cache_shapes: list[tuple[int, ...]]
    if shape.latent_size is None:
        kernel, attend = choose_attention("cpu", scale=scale, window=None), _attend
        cache_shape = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_size)
        cache_shapes = [cache_shape, cache_shape]
    else:
        kernel = choose_latent_attention("cpu", scale=scale, latent_size=shape.latent_size)
        attend = _attend_latent
        cache_shapes = [(num_blocks, shape.block_size, shape.head_size)]
    caches = [
        [torch.randn(cache_shape).bfloat16() for cache_shape in cache_shapes]
        for _ in range(max(2, CACHE_BYTES // shape.key_value_bytes))
    ]

    def seconds_per_call(backend: Any) -> Callable[[], float]:
        layers = itertools.cycle(caches)

        def run(num_calls: int) -> float:
            start = time.perf_counter()
            for cache in itertools.islice(layers, num_calls):
                attend(backend, query_TNH, cache, step)
            return (time.perf_counter() - start) / num_calls

        run(1)
        num_calls = max(1, int(CALL_SECONDS / run(2)))
        return lambda: run(num_calls)

    measures = {"torch": seconds_per_call(kernel.reference), "C++": seconds_per_call(kernel)}
    interleave(measures, 1)
    return interleave(measures, num_rounds)


def _attend(backend: AttentionBackend, query_TNH: Tensor, cache: list[Tensor], step: StepInputs) -> None:
    keys, values = cache
    backend.attend(query_TNH, keys, values, step)


def _attend_latent(backend: LatentAttentionBackend, query_TNP: Tensor, cache: list[Tensor], step: StepInputs) -> None:
    (latents,) = cache
    backend.attend(query_TNP, latents, step, max_rows=1)


def _decode_step(shape: Shape) -> StepInputs:
    """One row per request, whose blocks lie scattered over the cache."""
    batch, num_blocks = shape.batch, shape.blocks_per_request
    block_table = torch.randperm(batch * num_blocks).view(batch, num_blocks).int()
    last = shape.context_len - 1
    return StepInputs(
        token_ids=torch.zeros(batch, dtype=torch.int64),
        positions=torch.full((batch,), last),
        cache_slots=block_table[:, -1].long() * shape.block_size + last % shape.block_size,
        row_starts=torch.arange(batch + 1, dtype=torch.int32),
        context_lens=torch.full((batch,), shape.context_len, dtype=torch.int32),
        block_table=block_table,
        logits_rows=torch.arange(batch),
        spans=tuple(ChunkSpan(row, 1, shape.context_len) for row in range(batch)),
        tp_sizes=(batch,),
        tokens_per_rank=(batch,),
    )


def _rows(shape: Shape, samples: dict[str, list[float]], limits: MachineLimits) -> list[dict[str, Any]]:
    """One row per implementation, each complete in itself."""
    limit_seconds = shape.key_value_bytes / limits.read_bandwidth / 1e9
    machine = environment()
    return [
        {
            "benchmark": "attention",
            "name": name,
            "shape": asdict(shape),
            "median_us": statistics.median(seconds) * 1e6,
            "ratio": ratio_of_medians(samples["torch"], seconds),
            "fraction_of_limit": limit_seconds / statistics.median(seconds),
            "samples": seconds,
            "limits": asdict(limits),
            "environment": machine,
        }
        for name, seconds in samples.items()
    ]


if __name__ == "__main__":
    main()
