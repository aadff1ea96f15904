"""Cases of the operations that keep a state for each request."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.bench.gpu.check import Case, Operation
from moeserve.bench.gpu.costs import Work
from moeserve.bench.gpu.inputs import Source
from moeserve.bench.gpu.layer_cases import BLOCK_SIZE, crossed
from moeserve.ops.interfaces import Kernels
from moeserve.ops.linear_attention import LinearAttentionShape, LinearAttentionWeights
from moeserve.ops.short_convolution import ConvolutionShape, ConvolutionWeights
from moeserve.step_inputs import StateRows, StepInputs

# Tiles of tokens are multiplied in TF32, which cuts numbers off after 11 bits. Errors of all tokens add up in a state.
TF32_SLACK = 2.0**-9
PUBLISHED = {
    "Qwen3-Next": LinearAttentionShape(
        num_heads=32, num_key_heads=16, key_dim=128, value_dim=128, is_delta=True, norm_epsilon=1e-3
    ),
    "Kimi-Linear": LinearAttentionShape(
        num_heads=32,
        num_key_heads=32,
        key_dim=128,
        value_dim=128,
        is_delta=True,
        has_channel_decays=True,
        gate="sigmoid",
        norm_epsilon=1e-3,
    ),
    "Nemotron-3-Nano": LinearAttentionShape(
        num_heads=64, num_key_heads=8, key_dim=128, value_dim=64, is_delta=False, norm_epsilon=1e-3
    ),
}
SHAPES = PUBLISHED | {
    f"small {name}": dataclasses.replace(shape, num_heads=2, num_key_heads=1, key_dim=16, value_dim=24)
    for name, shape in PUBLISHED.items()
}


def linear_attention(source: Source, name: str, lengths: tuple[int, ...]) -> Case:
    """Compute two steps of some requests. The second step begins with the states that the first step has stored."""
    shape, num_tokens = SHAPES[name], sum(lengths)
    num_heads, value_size = shape.num_heads, shape.num_heads * shape.value_dim
    float32 = partial(source.normal, dtype=torch.float32)
    weights = LinearAttentionWeights(
        float32(num_heads),
        float32(shape.num_decays),
        float32(shape.value_dim if shape.is_delta else value_size),
        None if shape.is_delta else float32(num_heads),
    )
    tokens = (
        float32(num_tokens, shape.num_channels),
        source.normal(num_tokens, value_size),
        source.normal(num_tokens, shape.num_decays),
        source.normal(num_tokens, num_heads) if shape.is_delta else None,
    )
    states = torch.zeros(len(lengths), num_heads, shape.key_dim, shape.value_dim, device=source.device)
    inputs = tokens, weights, states, _two_steps(source, lengths)
    element_bytes = sum(each.nbytes for each in tokens if each is not None) + tokens[1].nbytes
    operations = num_tokens * states[0].numel() * (6.0 if shape.is_delta else 4.0)  # products with states
    return Case(
        _run,
        inputs,
        lambda kernels: kernels.make_linear_attention(shape),
        slack=TF32_SLACK,
        work=Work(2.0 * element_bytes + 3.0 * states.nbytes, 2.0 * operations),
    )


def linear_attention_of_equal_lengths(source: Source, name: str, num_requests: int, length: int) -> Case:
    return linear_attention(source, name, num_requests * (length,))


def short_convolution(
    source: Source, num_channels: int, num_taps: int, is_gated: bool, lengths: tuple[int, ...]
) -> Case:
    """Compute two steps, as in `linear_attention`."""
    shape = ConvolutionShape(num_channels=num_channels, num_taps=num_taps, is_gated=is_gated)
    float32 = partial(source.normal, dtype=torch.float32)
    weights = ConvolutionWeights(float32(num_taps, num_channels), float32(num_channels))
    tokens = (source.normal(sum(lengths), num_channels * (3 if is_gated else 1)),)
    states = torch.zeros_like(source.normal(len(lengths), num_taps - 1, num_channels))
    inputs = tokens, weights, states, _two_steps(source, lengths)

    def make(kernels: Kernels) -> Any:
        return kernels.make_short_convolution(shape)

    return Case(_run, inputs, make)


def _two_steps(source: Source, lengths: tuple[int, ...]) -> list[StepInputs]:
    rows = torch.arange(len(lengths), device=source.device)
    none, ones = torch.full_like(rows, -1), torch.ones_like(rows)
    step = source.step([(length, length) for length in lengths], BLOCK_SIZE)
    return [dataclasses.replace(step, states=StateRows(load, rows, none, ones)) for load in (none, rows)]


def _run(operation: Any, tokens: Any, weights: Any, states: Tensor, steps: list[StepInputs]) -> Any:
    return [operation(*tokens, weights, states, step) for step in steps], states


LENGTHS, SMALL_LENGTHS = (300, 1, 65), (20, 1)
STATE_CASES = {
    "linear attention": [
        Operation(
            linear_attention,
            crossed([f"small {name}" for name in PUBLISHED], [SMALL_LENGTHS]),
            crossed(PUBLISHED, [LENGTHS]),
        ),
        Operation(
            linear_attention_of_equal_lengths,
            crossed(["small Qwen3-Next"], [2], [2]),
            timed=[(name, *each) for name in PUBLISHED for each in ((1, 4096), (64, 1))],
        ),
    ],
    "short convolutions": [
        Operation(
            short_convolution,
            [(300, 4, False, SMALL_LENGTHS), (300, 3, True, SMALL_LENGTHS)],
            [(8192, 4, False, LENGTHS), (2048, 3, True, LENGTHS)],  # Qwen3-Next, LFM2
        )
    ],
}
