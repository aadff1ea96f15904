"""Attention of one layer: the C++ kernel of the CPU compared with torch.

    python -m moeserve.bench.attention [--rounds 20] [--json PATH]

A sample is the mean of many calls in bf16; torch and C++ alternate, after an uncounted round. Grouped-query attention
has the shapes of small models, and latent attention those of DeepSeek-V2-Lite, and also the 128 heads of DeepSeek-V3.
All requests have the same number of rows, at the end of their contexts. Calls cycle through 64 MB of caches, so that
keys and values are no longer in the processor's caches. Prefill with latent attention is compared with expanded keys
and values, which are faster in torch; projections are not counted for either.

The limit is the time to move the bytes of a call at the memory bandwidth measured in the same run, or the time for its
multiply-adds at the measured rate of matrix products, whichever is longer. A rate can exceed it thanks to caches, or if
the kernel multiplies faster than torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.bench.gpu.inputs import Source, num_cache_blocks
from moeserve.bench.harness import Row, call_timer, interleave, make_parser, ratio_of_medians
from moeserve.bench.limits import measure_limits
from moeserve.bench.report import show_and_save
from moeserve.ops import attention as attention_ops
from moeserve.ops import latent_attention as latent_attention_ops
from moeserve.ops.attention.dense import attend_causally
from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.ops.backend import REFERENCE
from moeserve.ops.latent_attention.interface import LatentShape
from moeserve.ops.native import set_num_threads
from moeserve.ops.select import select_backend

NATIVE = select_backend(torch.device("cpu"))
DECODE_BATCHES = (1, 8, 32)
DECODE_CONTEXT_LENS = (64, 1024, 4096)
PREFILL_ROWS = (64, 512, 2048)
CACHE_BYTES = 64 << 20
SAMPLE_SECONDS = 0.02

Call = Callable[[int], object]  # its argument is the index of the call, which selects a cache


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("attention", "Attention by the C++ kernel of the CPU, beside torch.", rounds=20)
    options = parser.parse_args(arguments)
    if NATIVE is REFERENCE:
        raise SystemExit("the C++ kernels are not built, so there is nothing to compare with torch")
    set_num_threads(options.threads)
    limits = asdict(measure_limits())
    rows = [row for shape in attention_shapes() for row in measure(shape, options.rounds, limits)]
    show_and_save(options.json, rows)


@torch.inference_mode()
def measure(shape: Shape, num_rounds: int, limits: Row) -> list[Row]:
    """Return one row for torch, and one for C++."""
    measures = {name: call_timer(call, SAMPLE_SECONDS) for name, call in attention_calls(shape).items()}
    samples = interleave(measures, num_rounds, warms_up=True)
    limit_seconds = max(
        shape.key_value_bytes / limits["read_bandwidth"] / 1e9, shape.num_operations / limits["matmul_rate"] / 1e9
    )
    return [
        {
            "benchmark": "attention",
            "name": name,
            "shape": asdict(shape),
            "median_us": statistics.median(seconds) * 1e6,
            "ratio": ratio_of_medians(samples["torch"], seconds),
            "fraction_of_limit": limit_seconds / statistics.median(seconds),
            "samples": seconds,
            "limits": limits,
        }
        for name, seconds in samples.items()
    ]


@dataclass(frozen=True)
class Shape:
    """`batch` requests with `num_rows` rows each, at the end of contexts of `context_len` positions.

    With a latent size, all heads share one vector of `head_size` values per position, which serves as key and value.
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
    def num_operations(self) -> int:
        first, last = self.context_len - self.num_rows + 1, self.context_len
        num_pairs = self.batch * self.num_heads * (first + last) * self.num_rows // 2
        return 2 * num_pairs * (self.head_size + (self.latent_size or self.head_size))

    @property
    def key_value_bytes(self) -> int:
        num_tensors = 2 if self.latent_size is None else 1
        return (
            torch.bfloat16.itemsize * self.batch * self.context_len * num_tensors * self.num_kv_heads * self.head_size
        )


def attention_shapes() -> list[Shape]:
    decode = [Shape(*sizes) for sizes in itertools.product(DECODE_BATCHES, DECODE_CONTEXT_LENS)]
    prefill = [Shape(1, num_rows, num_rows) for num_rows in PREFILL_ROWS]
    grouped = decode + prefill + [dataclasses.replace(shape, head_size=128) for shape in prefill]
    latent = [dataclasses.replace(shape, num_kv_heads=1, head_size=576, latent_size=512) for shape in decode + prefill]
    many_heads = [
        dataclasses.replace(shape, num_heads=128) for shape in latent if shape.context_len == 1024 and shape.batch <= 8
    ]
    return grouped + latent + many_heads


def attention_calls(shape: Shape) -> dict[str, Call]:
    """Return the attention of one step in torch and in C++, in this order."""
    source = Source(torch.device("cpu"), torch.Generator().manual_seed(0), torch.bfloat16)
    step = source.step([(shape.num_rows, shape.context_len)] * shape.batch, shape.block_size)
    query_TNH = torch.randn(shape.batch * shape.num_rows, shape.num_heads, shape.head_size).bfloat16()
    num_blocks, scale = num_cache_blocks(step), shape.head_size**-0.5
    num_caches = max(2, CACHE_BYTES // shape.key_value_bytes)

    def make_caches(*cache_shape: int, per_layer: int) -> list[list[Tensor]]:
        return [[torch.randn(cache_shape).bfloat16() for _ in range(per_layer)] for _ in range(num_caches)]

    def attend(backend: Any, caches: list[list[Tensor]]) -> Call:
        return lambda index: backend.attend(query_TNH, *caches[index % num_caches], step)

    if shape.latent_size is None:
        pairs = make_caches(num_blocks, shape.num_kv_heads, shape.block_size, shape.head_size, per_layer=2)
        caches: list[list[Any]] = [[KeyValueCache(*pair)] for pair in pairs]
        heads = AttentionShape(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            dtype=torch.bfloat16,
            scale=scale,
        )
        kernel = attend(attention_ops.make(NATIVE, heads), caches)
        reference = attend(attention_ops.make(REFERENCE, heads), caches)
    else:
        caches = make_caches(num_blocks, shape.block_size, shape.head_size, per_layer=1)
        sizes = scale, shape.latent_size, shape.num_heads
        kernel = attend(latent_attention_ops.make(NATIVE, LatentShape(*sizes)), caches)
        reference = attend(latent_attention_ops.make(REFERENCE, LatentShape(*sizes)), caches)
        if shape.num_rows > 1:
            reference = _attend_expanded(shape, scale)
    return {"torch": reference, "C++": kernel}


def _attend_expanded(shape: Shape, scale: float) -> Call:
    """Return attention with separate keys and values for each head, of the sizes of DeepSeek's heads."""
    query_RNH = torch.randn(shape.num_rows, shape.num_heads, 192).bfloat16()
    key_NCH = torch.randn(shape.num_heads, shape.context_len, 192).bfloat16()
    value_NCV = torch.randn(shape.num_heads, shape.context_len, 128).bfloat16()
    return lambda _: attend_causally(query_RNH, key_NCH, value_NCV, scale=scale)


if __name__ == "__main__":
    main()
