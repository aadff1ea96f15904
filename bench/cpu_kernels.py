"""The C++ kernels of the CPU beside their torch references: attention and the small operations of a layer.

    python -m moeserve.bench.cpu_kernels [--only attention|small_ops] [--rounds 20] [--json PATH]

A sample is the mean of many calls in bf16; torch and C++ alternate, after a round that is not counted.

- *attention*: one layer, grouped-query with the shapes of small models, and latent with those of DeepSeek-V2-Lite, also
  with the 128 heads of DeepSeek-V3. Every request brings equally many rows, at the end of its context. Calls cycle
  through as many caches as fill 64 MB, so that keys and values are not still in the processor's caches. Prefill of
  latent attention is compared with expanded keys and values, which torch computes faster; projections are counted for
  neither.
- *small operations*: norms, rotary embedding, routing, and the sorting, gathering and summing around experts, for 1, 32
  and 2048 rows of a model that is 1024 wide, with 16 heads of 64, 4 key heads, and 8 of 64 experts. With few rows, data
  stays in the caches.
- *of the limit*: the bytes that a call must move, at the memory bandwidth measured in the same run, or its
  multiply-adds at the measured product rate (float32 for the router), whichever takes longer. Caches, or products
  faster than torch's, can exceed it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.bench.harness import (
    Row,
    call_timer,
    environment,
    interleave,
    make_parser,
    number,
    ratio_of_medians,
    save,
    show,
)
from moeserve.bench.limits import measure_limits
from moeserve.ops.interfaces import AttentionShape, Keys, KeyValueCache, Rotation, RouterConfig
from moeserve.ops.select import select_kernels
from moeserve.ops.threads import set_num_threads
from moeserve.ops.torch.table import TORCH_KERNELS
from moeserve.step_inputs import ChunkSpan, StepInputs

KERNELS = select_kernels(torch.device("cpu"))
DECODE_BATCHES = (1, 8, 32)
DECODE_CONTEXT_LENS = (64, 1024, 4096)
PREFILL_ROWS = (64, 512, 2048)
CACHE_BYTES = 64 << 20
NUM_ROWS = (1, 32, 2048)
WIDTH, NUM_HEADS, NUM_KEY_HEADS, HEAD_SIZE = 1024, 16, 4, 64
NUM_EXPERTS, TOP_K = 64, 8
EPSILON = 1e-5
SAMPLE_SECONDS = 0.02

Call = Callable[[int], object]  # gets the index of the call, to choose a cache


@dataclass(frozen=True)
class Operation:
    """One operation by the C++ kernel and by torch."""

    benchmark: str
    name: str
    facts: Row  # added to the result
    kernel: Call
    reference: Call
    num_bytes: int = 0  # least memory traffic of a call
    operations: float = 0.0  # a multiply-add counts as two
    is_float32: bool = False  # the operations, otherwise bf16


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("cpu_kernels", "The C++ kernels of the CPU beside torch.", rounds=20)
    parser.add_argument("--only", choices=["attention", "small_ops"], help="default: both")
    options = parser.parse_args(arguments)
    if KERNELS is TORCH_KERNELS:
        raise SystemExit("the C++ kernels are not built, so there is nothing to compare with torch")
    set_num_threads(options.threads)
    limits = asdict(measure_limits()) | {"float32_rate": measure_float32_rate()}
    show(
        f"{options.threads} threads, {limits['read_bandwidth']:.1f} GB/s of memory reads, {limits['matmul_rate']:.0f} "
        f"GFLOP/s of bf16 products, {limits['float32_rate']:.0f} in float32"
    )
    show(f"{'':<48}{'torch, us':>11}{'C++, us':>11}{'speed-up':>10}{'of the limit':>14}")
    machine = environment()
    for operation in operations():
        if options.only in (None, operation.benchmark):
            rows = measure(operation, options.rounds, limits)
            torch_row, kernel_row = rows
            show(
                f"{operation.name:<48}{number(torch_row['median_us']):>11}{number(kernel_row['median_us']):>11}"
                f"{kernel_row['ratio']:>10.1f}{kernel_row['fraction_of_limit']:>14.0%}"
            )
            save(options.json, [row | {"environment": machine} for row in rows])


def operations() -> Iterator[Operation]:
    """Make the operations one by one, since each has its own tensors."""
    for shape in attention_shapes():
        yield attention_operation(shape)
    for num_rows in NUM_ROWS:
        yield from small_operations(num_rows)


@torch.inference_mode()
def measure(operation: Operation, num_rounds: int, limits: Row) -> list[Row]:
    """Return one row for torch and one for C++."""
    measures = {
        "torch": call_timer(operation.reference, SAMPLE_SECONDS),
        "C++": call_timer(operation.kernel, SAMPLE_SECONDS),
    }
    interleave(measures, 1)
    samples = interleave(measures, num_rounds)
    rate = limits["float32_rate" if operation.is_float32 else "matmul_rate"]
    limit_seconds = max(operation.num_bytes / limits["read_bandwidth"], operation.operations / rate) / 1e9
    return [
        {
            "benchmark": operation.benchmark,
            "name": name,
            **operation.facts,
            "median_us": statistics.median(seconds) * 1e6,
            "ratio": ratio_of_medians(samples["torch"], seconds),
            "fraction_of_limit": limit_seconds / statistics.median(seconds),
            "samples": seconds,
            "limits": limits,
        }
        for name, seconds in samples.items()
    ]


def measure_float32_rate(size: int = 2048) -> float:
    """Return the GFLOP/s of torch's float32 product, the best of some."""
    rows, weight = torch.randn(size, size), torch.randn(size, size)
    seconds = min(call_timer(lambda _: torch.mm(rows, weight), 0.0)() for _ in range(5))
    return 2 * size**3 / seconds / 1e9


@dataclass(frozen=True)
class Shape:
    """`batch` requests with `num_rows` rows each, at the end of contexts of `context_len` positions.

    With a latent size, all heads share one vector of `head_size` values per position, which is key and value.
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
    def name(self) -> str:
        kind = "grouped-query" if self.latent_size is None else "latent"
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"
        return f"{kind}, {heads}, {self.batch} x {self.num_rows} of {self.context_len}"

    @property
    def blocks_per_request(self) -> int:
        return -(-self.context_len // self.block_size)

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


def attention_operation(shape: Shape) -> Operation:
    step = _make_step(shape)
    query_TNH = torch.randn(shape.batch * shape.num_rows, shape.num_heads, shape.head_size).bfloat16()
    num_blocks, scale = shape.batch * shape.blocks_per_request, shape.head_size**-0.5
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
        kernel = attend(KERNELS.make_attention(heads), caches)
        reference = attend(TORCH_KERNELS.make_attention(heads), caches)
    else:
        caches = make_caches(num_blocks, shape.block_size, shape.head_size, per_layer=1)
        kernel = attend(KERNELS.make_latent_attention(scale, shape.latent_size), caches)
        reference = attend(TORCH_KERNELS.make_latent_attention(scale, shape.latent_size), caches)
        if shape.num_rows > 1:
            reference = _attend_expanded(shape, scale)
    return Operation(
        "attention",
        shape.name,
        {"shape": asdict(shape)},
        kernel,
        reference,
        shape.key_value_bytes,
        shape.num_operations,
    )


def _attend_expanded(shape: Shape, scale: float) -> Call:
    """Attention over the keys and values of each head, with the sizes of DeepSeek's heads."""
    query_RNH = torch.randn(shape.num_rows, shape.num_heads, 192).bfloat16()
    key_NCH = torch.randn(shape.num_heads, shape.context_len, 192).bfloat16()
    value_NCV = torch.randn(shape.num_heads, shape.context_len, 128).bfloat16()
    return lambda _: TORCH_KERNELS.attend_causally(query_RNH, key_NCH, value_NCV, scale=scale)


def _make_step(shape: Shape) -> StepInputs:
    """A step whose requests have blocks scattered over the cache."""
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


def small_operations(num_rows: int) -> Iterator[Operation]:
    """Make the small operations on `num_rows` rows."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).bfloat16()

    def make(name: str, kernel: Callable[[], object], reference: Callable[[], object], **work: Any) -> Operation:
        title = f"{name}, {num_rows} rows"
        facts = {"operation": name, "num_rows": num_rows}
        return Operation("small_ops", title, facts, lambda _: kernel(), lambda _: reference(), **work)

    row_bytes = num_rows * WIDTH * torch.bfloat16.itemsize
    x, update, weight = draw(num_rows, WIDTH), draw(num_rows, WIDTH), draw(WIDTH)
    norm, add_norm = KERNELS.rms_norm, KERNELS.add_rms_norm
    yield make(
        "norm",
        lambda: norm(x, weight, EPSILON),
        lambda: TORCH_KERNELS.rms_norm(x, weight, EPSILON),
        num_bytes=2 * row_bytes,
    )
    yield make(
        "add and norm",
        lambda: add_norm(x, update, weight, EPSILON),
        lambda: TORCH_KERNELS.add_rms_norm(x, update, weight, EPSILON),
        num_bytes=4 * row_bytes,
    )

    projected = draw(num_rows, (NUM_HEADS + 2 * NUM_KEY_HEADS) * HEAD_SIZE).unflatten(1, (-1, HEAD_SIZE))
    query, head_weight = projected[:, :NUM_HEADS], draw(HEAD_SIZE)
    yield make(
        "norm of heads",
        lambda: norm(query, head_weight, EPSILON),
        lambda: TORCH_KERNELS.rms_norm(query, head_weight, EPSILON),
        num_bytes=2 * row_bytes,
    )
    angles = torch.randn(num_rows, HEAD_SIZE // 2)
    for name, is_interleaved in (("rotary, halves", False), ("rotary, pairs", True)):
        rotation = Rotation(angles.cos(), angles.sin(), is_interleaved)
        yield make(
            name,
            functools.partial(KERNELS.apply_rope, query, rotation),
            functools.partial(TORCH_KERNELS.apply_rope, query, rotation),
            num_bytes=2 * row_bytes,
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
    router, reference = KERNELS.make_router(config), TORCH_KERNELS.make_router(config)
    router_weight, correction = torch.randn(NUM_EXPERTS, WIDTH) * WIDTH**-0.5, torch.randn(NUM_EXPERTS) * 0.1
    yield make(
        "routing",
        lambda: router(x, router_weight, None, correction),
        lambda: reference(x, router_weight, None, correction),
        operations=2.0 * num_rows * NUM_EXPERTS * WIDTH,
        is_float32=True,
    )

    pairs, torch_pairs = KERNELS.pairs, TORCH_KERNELS.pairs
    experts, weights = reference(x, router_weight, None, correction)
    keys = experts.flatten()
    order, _ = torch_pairs.sort(keys, Keys(NUM_EXPERTS))
    output = draw(num_rows * TOP_K, WIDTH)
    yield make(
        "sort",
        lambda: pairs.sort(keys, Keys(NUM_EXPERTS)),
        lambda: torch_pairs.sort(keys, Keys(NUM_EXPERTS)),
        num_bytes=2 * keys.nbytes,
    )
    yield make(
        "gather",
        lambda: pairs.gather(x, order, TOP_K),
        lambda: torch_pairs.gather(x, order, TOP_K),
        num_bytes=row_bytes + TOP_K * row_bytes,
    )
    yield make(
        "weighted sum",
        lambda: pairs.weighted_sum(output, order, weights, torch.bfloat16),
        lambda: torch_pairs.weighted_sum(output, order, weights, torch.bfloat16),
        num_bytes=TOP_K * row_bytes + row_bytes,
    )


if __name__ == "__main__":
    main()
