"""Attention on the CPU, grouped-query and latent, decode and prefill: the C++ kernel against torch, in turns.

    python -m moeserve.bench.attention [--rounds 20] [--json PATH]

- *median*: one layer's attention, bf16, for a batch of requests that each bring the same number of rows, at the end of
  their contexts. Calls go through as many caches as fill 64 MB in turn, like the layers of a model, so that the keys
  and values of one call are not still in the processor's own caches from the last.
- *limit*: the bytes of keys and values that a call must read, at the memory bandwidth measured in the same run, or its
  multiply-adds at the rate of torch's bf16 products, whichever takes longer. A machine with a large last-level cache,
  or products that are faster than torch's, can pass it.
- *torch*: the reference. Many rows of latent attention are cheaper there with keys and values expanded for each head,
  so that is what they are compared with. What turns queries and results, or keys and values, from one form into the
  other takes the same multiply-adds both ways, and is counted for neither.

Knows no model. Grouped-query attention has the shapes of small ones, latent attention that of DeepSeek-V2-Lite, also
with the 128 heads of DeepSeek-V3.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.bench.harness import add_options, environment, interleave, ratio_of_medians, write_jsonl
from moeserve.bench.limits import MachineLimits, measure_limits
from moeserve.ops.attention import AttentionBackend, TorchAttention, choose_attention
from moeserve.ops.dense_attention import attend_causally
from moeserve.ops.latent_attention import LatentAttentionBackend, TorchLatentAttention, choose_latent_attention
from moeserve.ops.native import native_kernels
from moeserve.ops.threads import set_num_threads
from moeserve.step_inputs import ChunkSpan, StepInputs

DECODE_BATCHES = (1, 8, 32)
DECODE_CONTEXT_LENS = (64, 1024, 4096)
PREFILL_ROWS = (64, 512, 2048)
CACHE_BYTES = 64 << 20
CALL_SECONDS = 0.02  # a sample is the mean of as many calls as take about so long


@dataclass(frozen=True)
class Shape:
    """`batch` requests of `num_rows` rows each, at the end of contexts of `context_len` positions.

    With a latent size, all heads share one vector of `head_size` values per position, and keys are values.
    """

    batch: int
    context_len: int
    num_rows: int = 1
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
    def value_size(self) -> int:
        return self.latent_size or self.head_size

    @property
    def num_operations(self) -> int:
        """A multiply-add counts two."""
        first, last = self.context_len - self.num_rows + 1, self.context_len
        num_pairs = self.batch * self.num_heads * (first + last) * self.num_rows // 2
        return 2 * num_pairs * (self.head_size + self.value_size)

    @property
    def key_value_bytes(self) -> int:
        num_tensors = 2 if self.latent_size is None else 1
        size = num_tensors * self.num_kv_heads * self.head_size
        return torch.bfloat16.itemsize * self.batch * self.context_len * size


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.attention", description="Attention: the C++ kernel against torch."
    )
    add_options(parser, rounds=20)
    options = parser.parse_args(arguments)

    set_num_threads(options.threads)
    limits = measure_limits()
    print(
        f"{options.threads} threads, {limits.read_bandwidth:.1f} GB/s of memory reads, "
        f"{limits.matmul_rate:.0f} GFLOP/s of bf16 products"
    )
    print(
        f"{'attention':<14}{'heads':>9} {'size':>5} {'batch':>5} {'rows':>5} {'context':>8} {'torch':>13} {'C++':>13} "
        f"{'speed-up':>9} {'of the limit':>13}"
    )
    for shape in all_shapes():
        samples = measure(shape, options.rounds)
        rows = _rows(shape, samples, limits)
        torch_row, kernel_row = rows
        heads = f"{shape.num_heads}/{shape.num_kv_heads}"
        print(
            f"{shape.kind:<14}{heads:>9} {shape.head_size:>5} {shape.batch:>5} {shape.num_rows:>5} "
            f"{shape.context_len:>8} "
            f"{torch_row['median_us']:>10.1f} us {kernel_row['median_us']:>10.1f} us "
            f"{kernel_row['ratio']:>9.1f} {kernel_row['fraction_of_limit']:>13.0%}",
            flush=True,
        )
        if options.json:
            write_jsonl(options.json, rows)


def all_shapes() -> list[Shape]:
    decode = [Shape(*sizes) for sizes in itertools.product(DECODE_BATCHES, DECODE_CONTEXT_LENS)]
    prefill = [Shape(1, num_rows, num_rows) for num_rows in PREFILL_ROWS]
    grouped = decode + prefill + [dataclasses.replace(shape, head_size=128) for shape in prefill]
    latent = [dataclasses.replace(shape, num_kv_heads=1, head_size=576, latent_size=512) for shape in decode + prefill]
    many_heads = [
        dataclasses.replace(shape, num_heads=128) for shape in latent if shape.context_len == 1024 and shape.batch <= 8
    ]
    return grouped + latent + many_heads


@torch.inference_mode()
def measure(shape: Shape, num_rounds: int) -> dict[str, list[float]]:
    """Seconds per call of each implementation, one mean per round, after a round that is not counted."""
    if native_kernels() is None:
        raise SystemExit("the C++ kernels are not built: there is nothing to compare torch with")
    step = _make_step(shape)
    query_TNH = torch.randn(shape.batch * shape.num_rows, shape.num_heads, shape.head_size).bfloat16()
    num_blocks, scale = shape.batch * shape.blocks_per_request, shape.head_size**-0.5
    cache_shapes: list[tuple[int, ...]]
    attend: dict[str, Callable[[list[Tensor]], object]]
    if shape.latent_size is None:
        kernel = choose_attention("cpu", scale=scale, window=None)
        attend = {
            name: functools.partial(_attend, backend, query_TNH, step)
            for name, backend in (("torch", TorchAttention(scale=scale, window=None)), ("C++", kernel))
        }
        cache_shape = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_size)
        cache_shapes = [cache_shape, cache_shape]
    else:
        latent_kernel = choose_latent_attention("cpu", scale=scale, latent_size=shape.latent_size)
        reference = TorchLatentAttention(scale=scale, latent_size=shape.latent_size)
        attend = {
            "torch": functools.partial(_attend_latent, reference, query_TNH, step),
            "C++": functools.partial(_attend_latent, latent_kernel, query_TNH, step),
        }
        if shape.num_rows > 1:
            attend["torch"] = _attend_expanded(shape, scale)
        cache_shapes = [(num_blocks, shape.block_size, shape.head_size)]
    caches = [
        [torch.randn(cache_shape).bfloat16() for cache_shape in cache_shapes]
        for _ in range(max(2, CACHE_BYTES // shape.key_value_bytes))
    ]

    def seconds_per_call(attend_to: Callable[[list[Tensor]], object]) -> Callable[[], float]:
        layers = itertools.cycle(caches)

        def run(num_calls: int) -> float:
            start = time.perf_counter()
            for cache in itertools.islice(layers, num_calls):
                attend_to(cache)
            return (time.perf_counter() - start) / num_calls

        run(1)
        num_calls = max(1, int(CALL_SECONDS / run(2)))
        return lambda: run(num_calls)

    measures = {name: seconds_per_call(attend_to) for name, attend_to in attend.items()}
    interleave(measures, 1)
    return interleave(measures, num_rounds)


def _attend(backend: AttentionBackend, query_TNH: Tensor, step: StepInputs, cache: list[Tensor]) -> None:
    keys, values = cache
    backend.attend(query_TNH, keys, values, step)


def _attend_latent(backend: LatentAttentionBackend, query_TNP: Tensor, step: StepInputs, cache: list[Tensor]) -> None:
    (latents,) = cache
    backend.attend(query_TNP, latents, step)


def _attend_expanded(shape: Shape, scale: float) -> Callable[[list[Tensor]], object]:
    """Attention to keys and values of each head that are there already, of the sizes that DeepSeek's have."""
    query_RNH = torch.randn(shape.num_rows, shape.num_heads, 192).bfloat16()
    key_NCH = torch.randn(shape.num_heads, shape.context_len, 192).bfloat16()
    value_NCV = torch.randn(shape.num_heads, shape.context_len, 128).bfloat16()
    return lambda _: attend_causally(query_RNH, key_NCH, value_NCV, scale=scale)


def _make_step(shape: Shape) -> StepInputs:
    """The rows of each request, whose blocks lie scattered over the cache."""
    batch, num_rows, num_blocks = shape.batch, shape.num_rows, shape.blocks_per_request
    block_table = torch.randperm(batch * num_blocks).view(batch, num_blocks).int()
    positions_R = torch.arange(shape.context_len - num_rows, shape.context_len)
    slots_BR = block_table[:, positions_R // shape.block_size].long() * shape.block_size
    return StepInputs(
        token_ids=torch.zeros(batch * num_rows, dtype=torch.int64),
        positions=positions_R.repeat(batch),
        cache_slots=(slots_BR + positions_R % shape.block_size).flatten(),
        row_starts=torch.arange(batch + 1, dtype=torch.int32) * num_rows,
        context_lens=torch.full((batch,), shape.context_len, dtype=torch.int32),
        block_table=block_table,
        logits_rows=torch.arange(1, batch + 1) * num_rows - 1,
        spans=tuple(ChunkSpan(index * num_rows, num_rows, shape.context_len) for index in range(batch)),
        tp_sizes=(batch * num_rows,),
        tokens_per_rank=(batch * num_rows,),
    )


def _rows(shape: Shape, samples: dict[str, list[float]], limits: MachineLimits) -> list[dict[str, Any]]:
    """One row per implementation, each complete in itself."""
    limit_seconds = max(
        shape.key_value_bytes / limits.read_bandwidth / 1e9, shape.num_operations / limits.matmul_rate / 1e9
    )
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
