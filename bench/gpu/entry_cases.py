"""Cases of attention to compressed entries and of hyper-connections, at the shapes of DeepSeek-V4."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.bench.gpu.check import Case, Operation
from moeserve.bench.gpu.costs import Work
from moeserve.bench.gpu.inputs import Source
from moeserve.bench.gpu.layer_cases import crossed
from moeserve.ops.compressed_attention import CompressedCache, CompressedShape
from moeserve.ops.hyper_connections import StreamsConfig, StreamsWeights
from moeserve.ops.indexer import ChosenEntries
from moeserve.ops.interfaces import Kernels
from moeserve.step_inputs import StepInputs

# T tokens, N query heads, H head size, m tokens of a window, X values and gates of a token, E entries of a block,
# C entries that are chosen

BLOCK_SIZE, SMALL_BLOCK_SIZE, NUM_STREAMS = 128, 8, 4
FLASH = CompressedShape(
    num_heads=64, whole_num_heads=64, head_size=512, scale=512**-0.5, window=128, ratio=4, index_size=128
)
SMALL = dataclasses.replace(FLASH, num_heads=3, head_size=20, scale=0.3, window=6, index_size=12)
SHAPES = {
    "V4, chosen entries": FLASH,
    "V4, all entries": dataclasses.replace(FLASH, ratio=128, index_size=None),
    "V4, window": dataclasses.replace(FLASH, ratio=None, index_size=None),
    "small, chosen entries": SMALL,
    "small, all entries": dataclasses.replace(SMALL, ratio=5, index_size=None),
    "small, window": dataclasses.replace(SMALL, ratio=None, index_size=None),
}


def compressed_attention(source: Source, name: str, lengths: tuple[int, ...], top_k: int) -> Case:
    """Pool and attend from prompts of these lengths. The last entries of each token are chosen."""
    shape = SHAPES[name]
    block_size = BLOCK_SIZE if shape.head_size == FLASH.head_size else SMALL_BLOCK_SIZE
    num_tokens, ratio, size = sum(lengths), shape.ratio or 1, shape.num_series * shape.head_size
    step = source.step([(length, length) for length in lengths], block_size)
    chosen = None if shape.index_size is None else _last_entries(step, ratio, block_size, top_k)
    num_blocks = step.block_table.numel() + 3
    inputs = (
        source.normal(num_tokens, shape.head_size),
        source.normal(num_tokens, 2 * size),
        source.normal(ratio, size, dtype=torch.float32),
        source.normal(num_tokens, shape.num_heads, shape.head_size),
        source.normal(shape.num_heads, dtype=torch.float32),
    )

    def call(
        backend: Any, vector_TH: Tensor, projected_TX: Tensor, bias: Tensor, query_TNH: Tensor, sinks: Tensor
    ) -> Any:
        dtype, device = vector_TH.dtype, vector_TH.device
        make = partial(CompressedCache.empty, num_blocks=num_blocks, num_window_blocks=num_blocks)
        cache = make(shape, block_size=block_size, dtype=dtype, device=device)
        cache.clear()
        pooled_TH = None
        if cache.tails is not None:
            pooled_TH = backend.pool(projected_TX, bias, cache.tails, block_size, step)
        backend.write(vector_TH, pooled_TH, None, cache, step, step)
        attended_TNH = backend.attend(query_TNH, chosen, sinks, cache, step, step)
        return [each for each in (attended_TNH, pooled_TH, cache.entries, cache.tails) if each is not None]

    return Case(call, inputs, lambda kernels: kernels.make_compressed_attention(shape))


def _last_entries(step: StepInputs, ratio: int, block_size: int, top_k: int) -> ChosenEntries:
    seen_T = (step.positions + 1) // ratio
    counts_T = seen_T.clamp(max=top_k)
    entry_TC = (seen_T - counts_T)[:, None] + torch.arange(top_k, device=seen_T.device)
    num_entries = block_size // ratio
    lengths = torch.tensor([span.num_rows for span in step.spans], device=seen_T.device)
    table = step.block_table.repeat_interleave(lengths, dim=0).long()
    blocks_TC = table.gather(1, (entry_TC // num_entries).clamp(max=table.shape[1] - 1))
    slots_TC = blocks_TC * num_entries + entry_TC % num_entries
    starts = torch.arange(len(seen_T) + 1, dtype=torch.int32, device=seen_T.device)
    return ChosenEntries(slots_TC.int(), counts_T.int(), starts)


def collapse_streams(source: Source, num_tokens: int, width: int, is_last: bool) -> Case:
    config = _config()
    num_coefficients, size = config.num_streams if is_last else config.num_coefficients, config.num_streams * width
    float32 = partial(source.normal, dtype=torch.float32)
    weights = StreamsWeights(
        float32(num_coefficients, size, scale=size**-0.5), float32(num_coefficients), float32(1 if is_last else 3)
    )
    return Case(_collapse, (source.normal(num_tokens, size), weights), _make_streams, is_beside_torch=True)


def expand_streams(source: Source, num_tokens: int, width: int) -> Case:
    config = _config()
    inputs = (
        source.normal(num_tokens, config.num_streams * width),
        source.normal(num_tokens, width),
        source.normal(num_tokens, config.num_coefficients, dtype=torch.float32),
    )
    num_bytes = sum(each.nbytes for each in (*inputs, inputs[0]))
    return Case(_expand, inputs, _make_streams, is_beside_torch=True, work=Work(float(num_bytes)))


def _config() -> StreamsConfig:
    return StreamsConfig(num_streams=NUM_STREAMS, num_iterations=20, epsilon=1e-6)


def _make_streams(kernels: Kernels) -> Any:
    return kernels.make_streams(_config(), 1e-6)


def _collapse(streams: Any, *inputs: Any) -> Any:
    return streams.collapse(*inputs)


def _expand(streams: Any, *inputs: Any) -> Any:
    return streams.expand(*inputs)


ENTRY_CASES = {
    "compressed attention": [
        Operation(
            compressed_attention,
            crossed([name for name in SHAPES if name.startswith("small")], [(14, 1)], [2]),
            crossed([name for name in SHAPES if name.startswith("V4")], [(300, 1, 65)], [40]),
        )
    ],
    "hyper-connections": [
        Operation(
            collapse_streams,
            crossed([3], [40], [False, True]),
            crossed([5, 300], [4096], [False, True]),
            crossed([64, 4096], [4096], [False]),
        ),
        Operation(expand_streams, [(3, 40)], crossed([5, 300], [4096]), crossed([64, 4096], [4096])),
    ],
}
