"""Cases of layers that keep other state than keys and values, and of hyper-connections."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.bench.gpu.check import Case, bytes_of, cases_of, crossed
from moeserve.bench.gpu.inputs import Source, draw_chosen, num_cache_blocks
from moeserve.bench.limits import Work
from moeserve.ops import compressed_attention as compressed_attention_ops
from moeserve.ops import convolution as convolution_ops
from moeserve.ops import linear_attention as linear_attention_ops
from moeserve.ops import streams as streams_ops
from moeserve.ops.compressed_attention.interface import CompressedCache, CompressedShape
from moeserve.ops.convolution.interface import ConvolutionShape, ConvolutionWeights
from moeserve.ops.linear_attention.interface import LinearAttentionShape, LinearAttentionWeights
from moeserve.ops.streams.interface import StreamsSpec, StreamsWeights
from moeserve.step_inputs import StateRows, StepInputs

# T tokens, N query heads, H head size, m tokens of an entry, X values and gates of a token

# Tiles of tokens are multiplied in TF32, which cuts numbers off after 11 bits. Errors of all tokens add up in a state.
TF32_SLACK = 2.0**-9
BLOCK_SIZE, SMALL_BLOCK_SIZE = 128, 8
FLASH = CompressedShape(
    num_heads=64, whole_num_heads=64, head_size=512, scale=512**-0.5, window=128, ratio=4, index_size=128
)
SMALL = dataclasses.replace(FLASH, num_heads=3, head_size=20, scale=0.3, window=6, index_size=12)
LENGTHS = {
    "shortest": (10, 1), "short": (20, 1), "prompts": (300, 1, 65),
    **{f"{batch} decodes": (1,) * batch for batch in (1, 8, 32, 64)},
    **{f"prompt of {size}": (size,) for size in (512, 4096)},
}  # fmt: skip
SHAPES = {
    "V4, chosen entries": FLASH,
    "V4, all entries": dataclasses.replace(FLASH, ratio=128, index_size=None),
    "V4, window": dataclasses.replace(FLASH, ratio=None, index_size=None),
    "small, chosen entries": SMALL,
    "small, all entries": dataclasses.replace(SMALL, ratio=5, index_size=None),
    "small, window": dataclasses.replace(SMALL, ratio=None, index_size=None),
}
STREAMS = StreamsSpec(num_streams=4, num_iterations=20, epsilon=1e-6)
linear_shape = partial(LinearAttentionShape, key_dim=128, norm_epsilon=1e-3)
channels: Any = dict(has_channel_decays=True, gate="sigmoid")
LINEAR = {
    "Qwen3-Next": linear_shape(num_heads=32, num_key_heads=16, value_dim=128, is_delta=True),
    "Kimi-Linear": linear_shape(num_heads=32, num_key_heads=32, value_dim=128, is_delta=True, **channels),
    "Nemotron-3-Nano": linear_shape(num_heads=64, num_key_heads=8, value_dim=64, is_delta=False),
    "granite-4.0-h-small": linear_shape(num_heads=128, num_key_heads=1, value_dim=64, is_delta=False),
}
SMALL_LINEAR = {
    f"small {name}": dataclasses.replace(shape, num_heads=2, num_key_heads=1, key_dim=16, value_dim=24)
    for name, shape in LINEAR.items()
}


@cases_of(
    "compressed attention",
    [(name, "shortest", 2) for name in SHAPES if "small" in name],
    [(name, "prompts", 40) for name in SHAPES if "V4" in name],
)
def compressed_attention(source: Source, name: str, kind: str, top_k: int) -> Case:
    """Pool and attend from prompts."""
    shape, lengths = SHAPES[name], LENGTHS[kind]
    block_size = BLOCK_SIZE if shape.head_size == FLASH.head_size else SMALL_BLOCK_SIZE
    num_tokens, ratio, size = sum(lengths), shape.ratio or 1, shape.num_series * shape.head_size
    step = source.step([(length, length) for length in lengths], block_size)
    num_blocks = step.block_table.numel() + 3
    chosen = draw_chosen(source, num_tokens, num_blocks * block_size // ratio, top_k) if shape.index_size else None
    vector_TH, projected_TX = source.normal(num_tokens, shape.head_size), source.normal(num_tokens, 2 * size)
    query_TNH = source.normal(num_tokens, shape.num_heads, shape.head_size)
    inputs = vector_TH, projected_TX, source.float32(ratio, size), query_TNH, source.float32(shape.num_heads)

    def call(
        attention: Any, vector_TH: Tensor, projected_TX: Tensor, bias: Tensor, query_TNH: Tensor, sinks: Tensor
    ) -> Any:
        sizes: Any = dict(num_blocks=num_blocks, num_window_blocks=num_blocks, block_size=block_size)
        cache = CompressedCache.empty(shape, **sizes, dtype=vector_TH.dtype, device=vector_TH.device)
        cache.clear()
        pooled_TH = None
        if cache.tails is not None:
            pooled_TH = attention.pool(projected_TX, bias, cache.tails, block_size, step)
        attention.write(vector_TH, pooled_TH, None, cache, step, step)
        return attention.attend(query_TNH, chosen, sinks, cache, step, step), pooled_TH, cache.entries, cache.tails

    return Case(lambda backend: partial(call, compressed_attention_ops.make(backend, shape)), inputs)


@cases_of(
    "compressed attention",
    [("small, chosen entries", 2, 40, 3), ("small, all entries", 2, 40, 0)],
    (),
    crossed(["V4, chosen entries"], [1, 64], [4096, 65536], [512])
    + crossed(["V4, all entries"], [1, 64], [65536], [0]),
)
def attend_to_entries(source: Source, name: str, num_rows: int, context: int, top_k: int) -> Case:
    """Attend at the end of a long context. The work counts the positions of one row once."""
    shape, block_size = SHAPES[name], BLOCK_SIZE if name.startswith("V4") else SMALL_BLOCK_SIZE
    step = source.step([(num_rows, context)], block_size)
    num_blocks, seen = num_cache_blocks(step), context // (shape.ratio or 1)
    is_chosen = shape.index_size is not None
    chosen = draw_chosen(source, num_rows, num_blocks * block_size // 4, top_k, is_full=True) if is_chosen else None
    sizes: Any = dict(num_blocks=num_blocks, num_window_blocks=num_blocks, block_size=block_size)
    cache = CompressedCache.empty(shape, **sizes, dtype=source.dtype, device=source.device)
    cache.vectors.normal_(generator=source.generator)
    inputs = source.normal(num_rows, shape.num_heads, shape.head_size), chosen, source.float32(shape.num_heads)
    attended = min(shape.window, context) + (min(top_k, seen) if is_chosen else seen)
    work = Work(
        attended * shape.head_size * inputs[0].element_size(),
        4.0 * num_rows * attended * shape.num_heads * shape.head_size,
    )
    return Case(
        lambda backend: compressed_attention_ops.make(backend, shape).attend, (*inputs, cache, step, step), work=work
    )


@cases_of(
    "hyper-connections",
    crossed([3], [40], [False, True]),
    crossed([5, 300], [4096], [False, True]),
    crossed([64, 4096], [4096], [False]),
)
def collapse_streams(source: Source, num_tokens: int, width: int, is_last: bool) -> Case:
    num_coefficients, size = STREAMS.num_streams if is_last else STREAMS.num_coefficients, STREAMS.num_streams * width
    maps = source.float32(num_coefficients, size, scale=size**-0.5)
    weights = StreamsWeights(maps, source.float32(num_coefficients), source.float32(1 if is_last else 3))
    return Case(
        lambda backend: streams_ops.make(backend, STREAMS, 1e-6).collapse, (source.normal(num_tokens, size), weights)
    )


@cases_of("hyper-connections", [(3, 40)], crossed([5, 300], [4096]), crossed([64, 4096], [4096]))
def expand_streams(source: Source, num_tokens: int, width: int) -> Case:
    streams_TX, rows_TD = (source.normal(num_tokens, count * width) for count in (STREAMS.num_streams, 1))
    inputs = streams_TX, rows_TD, source.float32(num_tokens, STREAMS.num_coefficients)
    return Case(lambda backend: streams_ops.make(backend, STREAMS, 1e-6).expand, inputs)


def case_of_states(make: Any, source: Source, kind: str, *inputs: Any, **more: Any) -> Case:
    """Run two steps of some requests. The second step begins with the states that the first step has stored.

    Args:
        make: makes the operation from a table.
        inputs: tensors of tokens, weights, and states.
    """
    lengths = LENGTHS[kind]
    rows = torch.arange(len(lengths), device=source.device)
    none, ones = torch.full_like(rows, -1), torch.ones_like(rows)
    step = source.step([(length, length) for length in lengths], 16)
    steps = [dataclasses.replace(step, states=StateRows(load, rows, none, ones)) for load in (none, rows)]

    def call(operation: Any, inputs: Any, weights: Any, states: Tensor, steps: list[StepInputs]) -> Any:
        return [operation(*inputs, weights, states, step) for step in steps], states

    return Case(lambda backend: partial(call, make(backend)), (*inputs, steps), **more)


@cases_of(
    "linear attention",
    crossed(SMALL_LINEAR, ["short"]),
    crossed(LINEAR, ["prompts"]),
    crossed(LINEAR, ["prompt of 4096", "64 decodes"]),
)
def linear_attention(source: Source, name: str, kind: str) -> Case:
    shape, num_tokens = (LINEAR | SMALL_LINEAR)[name], sum(LENGTHS[kind])
    num_heads, value_size = shape.num_heads, shape.num_heads * shape.value_dim
    weights = LinearAttentionWeights(
        source.float32(num_heads),
        source.float32(shape.num_decays),
        source.float32(shape.value_dim if shape.is_delta else value_size),
        None if shape.is_delta else source.float32(num_heads),
    )
    inputs = (
        source.float32(num_tokens, shape.num_channels),
        source.normal(num_tokens, value_size),
        source.normal(num_tokens, shape.num_decays),
        source.normal(num_tokens, num_heads) if shape.is_delta else None,
    )
    states = torch.zeros(len(LENGTHS[kind]), num_heads, shape.key_dim, shape.value_dim, device=source.device)
    operations = num_tokens * states[0].numel() * (12.0 if shape.is_delta else 8.0)  # of both steps, with states
    work = Work(2 * (bytes_of(inputs) + inputs[1].nbytes) + 3 * states.nbytes, operations)
    return case_of_states(
        lambda backend: linear_attention_ops.make(backend, shape),
        *(source, kind, inputs, weights, states),
        slack=TF32_SLACK,
        work=work,
    )


@cases_of(
    "short convolutions",
    [(300, 4, False, "short"), (300, 3, True, "short")],
    [(8192, 4, False, "prompts"), (2048, 3, True, "prompts")],  # Qwen3-Next, LFM2
)
def short_convolution(source: Source, num_channels: int, num_taps: int, is_gated: bool, kind: str) -> Case:
    shape = ConvolutionShape(num_channels=num_channels, num_taps=num_taps, is_gated=is_gated)
    weights = ConvolutionWeights(source.float32(num_taps, num_channels), source.float32(num_channels))
    rows_TX = source.normal(sum(LENGTHS[kind]), num_channels * (3 if is_gated else 1))
    states = rows_TX.new_zeros(len(LENGTHS[kind]), num_taps - 1, num_channels)
    return case_of_states(
        lambda backend: convolution_ops.make(backend, shape), source, kind, (rows_TX,), weights, states
    )


OPERATIONS = [
    *(linear_attention, short_convolution, compressed_attention, attend_to_entries),
    *(collapse_streams, expand_streams),
]
