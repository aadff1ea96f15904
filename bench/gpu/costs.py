"""Bytes and operations that a kernel's call must take, whoever does it, and the bars that moeserve is measured with.

Which bytes count stands in each kernel's docstring. Knows no tensors: counts come from shapes and from how many experts
have rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moeserve.bench.gpu.shapes import AttentionShape, LatentShape, MoEShape

Format = Literal["bf16", "fp8"]
ELEMENT_SIZE = {"bf16": 2, "fp8": 1}
RESULT_SIZE = 2  # bytes: results are bf16, whatever they are computed from
SCALE_BLOCK = 128  # values of a row, or rows and columns of a weight, that share a scale of 4 bytes


@dataclass(frozen=True)
class GpuLimits:
    """What this GPU did when it was asked for nothing else, just before."""

    copy_bandwidth: float  # bytes/s, read and written ones counted
    bf16_rate: float  # operations/s of a dense product; a multiply-add counts two
    fp8_rate: float | None  # None: torch has no such product here

    def rate(self, format: Format) -> float:
        """Operations per second. Without an 8-bit product, twice that of bf16, as the hardware has it."""
        if format == "bf16":
            return self.bf16_rate
        return 2 * self.bf16_rate if self.fp8_rate is None else self.fp8_rate


@dataclass(frozen=True)
class Work:
    """What a call moves between memory and the processors, and multiplies."""

    num_bytes: float
    operations: float = 0.0
    format: Format = "bf16"

    def __add__(self, other: Work) -> Work:
        assert self.format == other.format, (self, other)
        return Work(self.num_bytes + other.num_bytes, self.operations + other.operations, self.format)

    def memory_seconds(self, limits: GpuLimits) -> float:
        return self.num_bytes / limits.copy_bandwidth

    def bound_seconds(self, limits: GpuLimits) -> float:
        """Of one who wastes nothing: moving and computing overlap, and the slower of the two takes all the time."""
        return max(self.memory_seconds(limits), self.operations / limits.rate(self.format))


@dataclass(frozen=True)
class Bar:
    """What a figure is to reach. A bar that is not met is told, and fails nothing."""

    figure: Literal["fraction_of_memory_bound", "operations_per_second", "times_transformers"]
    least: float

    def verdict(self, figures: dict[str, Any]) -> dict[str, Any]:
        """With what was reached; None where the figure could not be measured, which does not meet the bar."""
        reached = figures.get(self.figure)
        is_met = reached is not None and reached >= self.least
        return {"figure": self.figure, "least": self.least, "reached": reached, "is_met": is_met}


def product_work(
    shape: MoEShape, *, num_rows: int, num_hit: int, is_gated: bool, format: Format, num_read: int
) -> Work:
    """One grouped product: the weights of experts that have rows, the rows, and the results.

    Args:
        num_rows: of the product.
        num_hit: experts that have rows.
        num_read: different rows that are read: gathered ones may be the same.
    """
    num_outputs, num_inputs = (2 * shape.width, shape.hidden) if is_gated else (shape.hidden, shape.width)
    columns = shape.width if is_gated else shape.hidden
    size = ELEMENT_SIZE[format]
    num_bytes = num_hit * num_outputs * num_inputs * size + num_read * num_inputs * size
    if format == "fp8":
        num_blocks = -(-num_inputs // SCALE_BLOCK)
        parts = num_outputs // columns
        num_bytes += 4 * num_blocks * (num_hit * parts * -(-columns // SCALE_BLOCK) + num_read)
    elif shape.has_bias:
        num_bytes += num_hit * num_outputs * size
    num_bytes += num_rows * columns * RESULT_SIZE
    return Work(num_bytes, 2.0 * num_rows * num_outputs * num_inputs, format)


def products_work(shape: MoEShape, *, num_tokens: int, num_hit: int, format: Format) -> Work:
    """Both products of all of a layer's tokens, each of which is read once."""
    num_rows = num_tokens * shape.top_k
    gated = product_work(shape, num_rows=num_rows, num_hit=num_hit, is_gated=True, format=format, num_read=num_tokens)
    down = product_work(shape, num_rows=num_rows, num_hit=num_hit, is_gated=False, format=format, num_read=num_rows)
    return gated + down


def experts_work(shape: MoEShape, *, num_tokens: int, num_hit: int) -> Work:
    """The whole layer after routing, in bf16: also the order of pairs, and the weighted sum of the outputs."""
    num_pairs = num_tokens * shape.top_k
    order = Work(2 * 8 * num_pairs)
    weighted_sum = Work(RESULT_SIZE * shape.hidden * (num_pairs + num_tokens) + (8 + 4) * num_pairs)
    return order + products_work(shape, num_tokens=num_tokens, num_hit=num_hit, format="bf16") + weighted_sum


def attention_work(shape: AttentionShape, chunks: Sequence[tuple[int, int]]) -> Work:
    """Keys and values of each chunk once, queries and results; operations for each row and position it attends to.

    Args:
        chunks: rows, and length of the context with them.
    """
    per_position = 2 * shape.num_kv_heads * shape.head_size * RESULT_SIZE
    per_row = 2 * shape.num_heads * shape.head_size * RESULT_SIZE
    num_bytes = operations = 0
    for num_rows, context in chunks:
        first = 0 if shape.window is None else max(0, context - num_rows + 1 - shape.window)
        num_bytes += (context - first) * per_position + num_rows * per_row
        operations += 4 * shape.num_heads * shape.head_size * attended_positions(num_rows, context, shape.window)
    return Work(num_bytes, operations)


def latent_work(shape: LatentShape, chunks: Sequence[tuple[int, int]]) -> Work:
    """The same of latent attention: vectors once for each 64 heads of a chunk of one row, as the docstring says."""
    size = shape.latent_size + shape.rotary_size
    num_bytes = operations = 0
    for num_rows, context in chunks:
        num_reads = -(-shape.num_heads // 64) if num_rows == 1 else 1
        num_bytes += num_reads * context * size * RESULT_SIZE
        num_bytes += num_rows * shape.num_heads * (size + shape.latent_size) * RESULT_SIZE
        operations += 2 * shape.num_heads * (size + shape.latent_size) * attended_positions(num_rows, context, None)
    return Work(num_bytes, operations)


def attended_positions(num_rows: int, context: int, window: int | None) -> int:
    """Pairs of a row and a position that it attends to."""
    positions = range(context - num_rows + 1, context + 1)
    return sum(number if window is None else min(number, window) for number in positions)


def norm_work(num_rows: int, width: int, *, adds: bool) -> Work:
    return Work(RESULT_SIZE * ((4 if adds else 2) * num_rows * width + width))


def activation_work(num_rows: int, width: int) -> Work:
    return Work(RESULT_SIZE * 3 * num_rows * width)


def rotary_work(shape: AttentionShape, num_tokens: int) -> Work:
    """With the cache write: whole heads turn."""
    num_pairs = shape.head_size // 2
    values = 4 * num_tokens * (shape.num_heads * num_pairs + shape.num_kv_heads * shape.head_size)
    return Work(values * RESULT_SIZE + 8 * num_tokens * num_pairs)


def quantize_work(num_rows: int, width: int) -> Work:
    return Work(num_rows * width * (RESULT_SIZE + 1) + 4 * num_rows * -(-width // SCALE_BLOCK))


def route_work(num_tokens: int, num_experts: int, top_k: int) -> Work:
    return Work(num_tokens * (4 * num_experts + 12 * top_k))


def weigh_work(num_rows: int, width: int) -> Work:
    return Work(num_rows * (2 * RESULT_SIZE * width + 4))


def greedy_work(num_rows: int, width: int) -> Work:
    return Work(num_rows * width * RESULT_SIZE)


def draw_work(num_rows: int, width: int) -> Work:
    return Work(4 * num_rows * width)


def products_bar(num_tokens: int, format: Format) -> Bar | None:
    """Of a layer's products: a share of the memory bound for few tokens, a rate for many."""
    if num_tokens <= 16:
        return Bar("fraction_of_memory_bound", 0.70)
    if num_tokens == 128:
        return Bar("fraction_of_memory_bound", 0.85)
    if num_tokens >= 4096:
        return Bar("operations_per_second", 500e12 if format == "bf16" else 1000e12)
    return None
