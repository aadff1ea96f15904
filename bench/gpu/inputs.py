"""Random inputs for GPU kernels: tensors, steps over scattered blocks of a cache, routed pairs, and weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.bench.gpu.parts import Job
from moeserve.ops.attention.float8_rows import encode_rows
from moeserve.ops.attention.interface import KeyValueCache
from moeserve.ops.indexer.interface import ChosenEntries
from moeserve.ops.products.interface import MXFP4_GROUP, OpenWeights
from moeserve.ops.products.weight_blocks import BLOCK, CODES, LARGEST_CODE, num_blocks
from moeserve.ops.rows.activations import Activation, num_parts_of
from moeserve.ops.sampling.reference import uniform
from moeserve.step_inputs import SAMPLING_SETTINGS, ChunkSpan, StepInputs, as_integers

# T tokens, K experts of a token, D model width, O outputs, I inputs, B and G blocks of 128 inputs
# and outputs, S chunks, C positions of a block table

MXFP4_NUMBERS = [sign * number for sign in (1, -1) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]  # by code
MXFP4_BIAS = 127  # of exponents
Chunks = Sequence[tuple[int, int]]  # (rows, context length including them) of each request


@dataclass(frozen=True)
class Source:
    """Random numbers on a device."""

    device: torch.device
    generator: torch.Generator  # of this device
    dtype: torch.dtype  # of activations and weights

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return drawn.mul_(scale).to(dtype or self.dtype)

    def float32(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.normal(*shape, dtype=torch.float32, scale=scale)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def raw_bytes(self, *shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator, device=self.device)

    def codes(self, *shape: int) -> Tensor:
        """Draw 8-bit floats with magnitudes below 2. Without the exponent's highest bit, none is NaN."""
        return self.raw_bytes(*shape).bitwise_and_(0xBF).view(CODES)

    def encoded(self, cache: KeyValueCache) -> KeyValueCache:
        """Return a cache in 8-bit floats with scales."""
        (keys, key_scales), (values, value_scales) = map(encode_rows, (cache.keys, cache.values))
        return KeyValueCache(keys, values, key_scales, value_scales)

    def fill_unread(self, cache: Tensor, step: StepInputs, value: float) -> None:
        """Fill the positions of a cache that belong to no context."""
        block_size = cache.shape[-2]
        is_read = torch.zeros(len(cache), block_size, dtype=torch.bool, device=self.device)
        for blocks, context_len in zip(step.block_table.long(), step.context_lens.tolist(), strict=True):
            positions = torch.arange(context_len, device=self.device)
            is_read[blocks[positions // block_size], positions % block_size] = True
        cache.movedim(-2, 1)[~is_read] = value

    def settings(self, num_rows: int, **fields: Any) -> tuple[Tensor, Tensor]:
        """Return settings [R, W] for `ChooseTokens`, and their random numbers [R] after one output token.

        Args:
            fields: values for fields of `SAMPLING_SETTINGS`, one for all rows or one per row. Seeds are drawn, and
                other fields are zero.
        """
        records = np.zeros(num_rows, SAMPLING_SETTINGS)
        records["seed"] = self.integers(0, 2**62, num_rows).cpu().numpy()
        for name, values in fields.items():
            records[name] = values
        numbers = [uniform(seed, 1) for seed in records["seed"].tolist()]
        settings_RW = torch.from_numpy(as_integers(records)).to(self.device)
        return settings_RW, torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def step(self, chunks: Chunks, block_size: int) -> StepInputs:
        """Return a step whose requests have scattered blocks."""
        counts = [-(-context // block_size) for _, context in chunks]
        ids = torch.randperm(sum(counts) + 3, generator=self.generator, device=self.device)[: sum(counts)]
        table = torch.zeros(len(chunks), max(counts), dtype=torch.int32, device=self.device)
        spans: list[ChunkSpan] = []
        starts, slots, positions = [0], [], []
        for chunk, ((num_rows, context), own) in enumerate(zip(chunks, ids.split(counts), strict=True)):
            table[chunk, : len(own)] = own
            spans.append(ChunkSpan(starts[-1], num_rows, context))
            starts.append(starts[-1] + num_rows)
            positions.append(torch.arange(context - num_rows, context, device=self.device))
            slots.append(own[positions[-1] // block_size] * block_size + positions[-1] % block_size)
        return StepInputs(
            token_ids=torch.zeros(starts[-1], dtype=torch.int64, device=self.device),
            positions=torch.cat(positions),
            cache_slots=torch.cat(slots),
            row_starts=torch.tensor(starts, dtype=torch.int32, device=self.device),
            context_lens=torch.tensor([context for _, context in chunks], dtype=torch.int32, device=self.device),
            block_table=table,
            logits_rows=torch.tensor([span.last_row for span in spans], device=self.device),
            spans=tuple(spans),
            tp_sizes=(starts[-1],),
            tokens_per_rank=(starts[-1],),
        )


def source_of(job: Job, index: int = 0) -> Source:
    """Return the random inputs of a job. Items with another index get other ones."""
    device = torch.device(job.device)
    generator = torch.Generator(device).manual_seed(job.seed + index)
    return Source(device, generator, torch.float32 if job.on_cpu else torch.bfloat16)


def num_cache_blocks(step: StepInputs) -> int:
    return int(step.block_table.max()) + 1


def attended_positions(num_rows: int, context: int, window: int | None) -> int:
    """Return the number of pairs of a row and a position that the row attends to."""
    positions = range(context - num_rows + 1, context + 1)
    return sum(number if window is None else min(number, window) for number in positions)


def draw_cache(source: Source, step: StepInputs, block_size: int, *sizes: int, unread: float | None = None) -> Tensor:
    """Draw a cache [num_blocks, *heads, block_size, size], with `unread`, if given, at positions of no context."""
    *heads, size = sizes
    cache = source.normal(num_cache_blocks(step), *heads, block_size, size)
    if unread is not None:
        source.fill_unread(cache, step, unread)
    return cache


def draw_chosen(source: Source, num_tokens: int, num_slots: int, top_k: int, is_full: bool = False) -> ChosenEntries:
    slots_TC = source.integers(0, num_slots, num_tokens, top_k)
    counts_T = source.integers(top_k if is_full else 0, top_k + 1, num_tokens)
    starts = torch.arange(num_tokens + 1, device=source.device)
    return ChosenEntries(slots_TC.int(), counts_T.int(), starts.int())


def draw_weights(
    source: Source,
    *shape: int,
    is_fp8: bool = False,
    is_mxfp4: bool = False,
    has_bias: bool = False,
    activation: Activation | None = None,
) -> OpenWeights:
    """Draw weights [e, O, I] whose products are about one."""
    num_weights, num_outputs, num_inputs = shape
    bias = source.normal(num_weights, num_outputs) if has_bias else None
    scales = None
    if is_fp8:
        weight, num_parts = source.codes(*shape), num_parts_of(activation)
        blocks = num_parts * num_blocks(num_outputs // num_parts), num_blocks(num_inputs)
        scales = source.uniform(num_weights, *blocks) * 2 * num_inputs**-0.5
    elif is_mxfp4:
        weight = source.raw_bytes(num_weights, num_outputs, num_inputs // 2)
        exponent = MXFP4_BIAS - round(math.log2(4 * num_inputs**0.5))  # the codes' mean square is 8.6
        groups = num_weights, num_outputs, num_inputs // MXFP4_GROUP
        scales = source.integers(exponent - 1, exponent + 2, *groups).to(torch.uint8)
    else:
        weight = source.normal(*shape, scale=num_inputs**-0.5)
    return OpenWeights(weight, bias, activation, scales)


def dequantized(weights: OpenWeights) -> OpenWeights:
    """Return weights in 8-bit blocks or MXFP4 as float32; return others unchanged."""
    if weights.scales_eGB is None:
        return weights
    if weights.is_mxfp4:
        codes = torch.stack([weights.weight_eOI & 0xF, weights.weight_eOI >> 4], dim=-1).flatten(-2).int()
        numbers = torch.tensor(MXFP4_NUMBERS, device=codes.device)[codes]
        exponents = (weights.scales_eGB.int() - MXFP4_BIAS).repeat_interleave(MXFP4_GROUP, dim=2)
        return replace(weights, weight_eOI=torch.ldexp(numbers, exponents), scales_eGB=None)
    _, num_outputs, num_inputs = weights.weight_eOI.shape
    scales = weights.scales_eGB.unflatten(1, (weights.num_parts, -1)).repeat_interleave(BLOCK, dim=2)
    scales = scales[:, :, : num_outputs // weights.num_parts].flatten(1, 2).repeat_interleave(BLOCK, dim=2)
    return replace(weights, weight_eOI=weights.weight_eOI.float() * scales[..., :num_inputs], scales_eGB=None)


def draw_rows(source: Source, num_rows: int, width: int, *, is_fp8: bool) -> Tensor:
    """Draw rows. For 8-bit products they are exact in 8 bits: scales are powers of two, and each block has a 448."""
    if not is_fp8:
        return source.normal(num_rows, width)
    codes = source.codes(num_rows, width).float() * 64
    codes[:, ::BLOCK] = LARGEST_CODE
    exponents = source.integers(-8, -5, num_rows, num_blocks(width)).repeat_interleave(BLOCK, dim=1)[:, :width]
    return torch.ldexp(codes, exponents).to(source.dtype)


def draw_routing(source: Source, num_tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Draw each token's experts [T, K], and their weights."""
    weights_TK, experts_TK = source.uniform(num_tokens, num_experts).topk(top_k, dim=1)
    return experts_TK, weights_TK / weights_TK.sum(1, keepdim=True)
