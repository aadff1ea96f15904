"""The minimum bytes and operations of kernel calls on layers of certain shapes, and the bars that they should reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moeserve.ops.interfaces import MXFP4_GROUP, Activation, AttentionShape, ClampedSwiGLU, RouterConfig, SwiGLU

Format = Literal["bf16", "fp8", "mxfp4"]
Chunks = Sequence[tuple[int, int]]  # (rows, context length including them) of each request
RESULT_SIZE = 2  # bytes: results are bf16 in all formats
SCALE_BLOCK = 128  # values of a row, or rows and columns of a weight, that share a scale of 4 bytes
GPT_OSS_ACTIVATION = ClampedSwiGLU(alpha=1.702, limit=7.0)
WEIGHT_SIZES = {"bf16": 2.0, "fp8": 1.0, "mxfp4": 0.5}  # bytes without scales


@dataclass(frozen=True)
class MoEShape:
    """The routed experts of one layer."""

    num_experts: int
    hidden: int
    width: int  # width of an expert
    top_k: int
    activation: Activation = SwiGLU()
    has_bias: bool = False


@dataclass(frozen=True)
class LatentShape:
    """The latent attention of one layer."""

    num_heads: int
    latent_size: int = 512
    rotary_size: int = 64

    @property
    def vector_size(self) -> int:
        return self.latent_size + self.rotary_size


def attention_shape(num_heads: int, num_kv_heads: int, head_size: int, **more: Any) -> AttentionShape:
    options = {"scale": head_size**-0.5, "dtype": torch.bfloat16} | more
    return AttentionShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, **options)


DEEPSEEK_V3_ROUTER = RouterConfig(
    num_experts=256, top_k=8, scoring="sigmoid", num_groups=8, num_chosen_groups=4, experts_rating_group=2,
    is_normalized=True, scale=2.5, has_correction=True
)  # fmt: skip


@dataclass(frozen=True)
class GpuLimits:
    """The rates that this GPU has just reached while otherwise idle."""

    copy_bandwidth: float  # bytes/s, counting reads and writes
    bf16_rate: float  # operations/s of a dense product; a multiply-add counts as two
    fp8_rate: float


@dataclass(frozen=True)
class Work:
    """The bytes that a call moves between memory and processors, and its operations."""

    num_bytes: float
    operations: float = 0.0
    format: Format = "bf16"

    def memory_seconds(self, limits: GpuLimits) -> float:
        return self.num_bytes / limits.copy_bandwidth

    def bound_seconds(self, limits: GpuLimits) -> float:
        """Return the minimum time. Moving and computing overlap, so it is the longer of the two."""
        rate = limits.fp8_rate if self.format == "fp8" else limits.bf16_rate
        return max(self.memory_seconds(limits), self.operations / rate)


@dataclass(frozen=True)
class Bar:
    """The minimum value that a figure should reach. A missed bar is reported, but does not fail the run."""

    figure: str  # name of a field of the row
    least: float

    def verdict(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Return the bar with the value that was reached; None if it was not measured, which counts as missed."""
        reached = figures.get(self.figure)
        is_met = reached is not None and reached >= self.least
        return {"figure": self.figure, "least": self.least, "reached": reached, "is_met": is_met}


def experts_work(shape: MoEShape, *, num_tokens: int, num_hit: int, format: Format) -> Work:
    """Return the work of a layer's experts: read `num_hit` experts and each token, and write each token's sum."""
    parameters = 3 * shape.hidden * shape.width
    num_blocks = 3 * math.ceil(shape.hidden / SCALE_BLOCK) * math.ceil(shape.width / SCALE_BLOCK)
    scale_bytes = {"bf16": 0.0, "fp8": 4.0 * num_blocks, "mxfp4": parameters / MXFP4_GROUP}[format]
    bias_bytes = 2 * (2 * shape.width + shape.hidden) if shape.has_bias and format != "fp8" else 0
    expert_bytes = parameters * WEIGHT_SIZES[format] + scale_bytes + bias_bytes
    num_bytes = num_hit * expert_bytes + 2 * num_tokens * shape.hidden * RESULT_SIZE
    return Work(num_bytes, 2.0 * num_tokens * shape.top_k * parameters, format)


def experts_bar(num_tokens: int, format: Format) -> Bar:
    """Return the bar of a layer's experts: a fraction of the memory bound for few tokens, a rate for many."""
    if num_tokens <= 128:
        return Bar("fraction_of_memory_bound", 0.70 if num_tokens <= 16 else 0.85)
    return Bar("operations_per_second", 1000e12 if format == "fp8" else 500e12)


def attention_work(shape: AttentionShape | LatentShape, chunks: Chunks, *, is_float8: bool = False) -> Work:
    """Return the work of a step: read the keys and values visible to each chunk once, read queries, write results.

    With latent attention, all heads read one vector of each position, whose first part is also the value.

    Args:
        is_float8: keys and values are 8-bit floats, with a scale of 2 bytes for each head.
    """
    if isinstance(shape, LatentShape):
        key_size, value_size, window = shape.vector_size, shape.latent_size, None
        position_bytes = key_size * RESULT_SIZE
    else:
        key_size, value_size, window = shape.head_size, shape.head_size, shape.window
        position_bytes = 2 * shape.num_kv_heads * (key_size + 2 if is_float8 else key_size * RESULT_SIZE)
    row_size = shape.num_heads * (key_size + value_size)
    num_bytes = operations = 0
    for num_rows, context in chunks:
        num_read = context if window is None else min(context, num_rows - 1 + window)
        num_bytes += num_read * position_bytes + num_rows * row_size * RESULT_SIZE
        operations += 2 * row_size * attended_positions(num_rows, context, window)
    return Work(num_bytes, operations)


def attended_positions(num_rows: int, context: int, window: int | None) -> int:
    """Return the number of pairs of a row and a position that the row attends to."""
    positions = range(context - num_rows + 1, context + 1)
    return sum(number if window is None else min(number, window) for number in positions)
