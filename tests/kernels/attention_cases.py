"""Steps of attention over a cache in blocks, the same keys and values without blocks, and their float64 results."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from paged_steps import NUM_SPARE_BLOCKS, make_step, scatter_blocks
from torch import Tensor

from moeserve.ops import attention as attention_ops
from moeserve.ops import latent_attention as latent_attention_ops
from moeserve.ops.attention.dense import first_visible
from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.ops.backend import Backend
from moeserve.ops.latent_attention.interface import LatentShape
from moeserve.step_inputs import StepInputs

# T tokens, N query heads, G key-value heads, H head size, L size of a value; R rows of one chunk, C positions of its
# context


@dataclass(frozen=True)
class Shape:
    """Sizes of attention. With a latent size, a value is the first elements of its key, and G is 1.

    A value may be smaller than a key.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    with_sinks: bool = False
    with_token_sinks: bool = False
    latent_size: int | None = None
    scale: float | None = None
    whole_group_size: int | None = None  # None: N / G
    value_size: int | None = None  # None: as large as a key
    num_distances: int | None = None  # of biases; None: there are none

    @property
    def group_size(self) -> int:
        return self.whole_group_size or self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Case:
    """One step over caches that hold NaN, or another number, at all positions that no row attends to."""

    shape: Shape
    step: StepInputs
    query_TNH: Tensor
    key_cache: Tensor  # [num_blocks, G, block_size, H]
    value_cache: Tensor  # the key cache itself for latent attention
    keys_CGH: list[Tensor]  # per chunk, the same keys and values without blocks
    values_CGL: list[Tensor]
    sinks_N: Tensor | None  # or [T, N]
    biases_TNE: Tensor | None = None

    @property
    def scale(self) -> float:
        return self.shape.scale or self.shape.head_size**-0.5


def make_case(
    lengths: list[tuple[int, int]],
    shape: Shape,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    unread: float = float("nan"),
) -> Case:
    """Draw a step of chunks given as (rows, context length). The numbers do not depend on the block size.

    Args:
        unread: the content of the caches where no row may read.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    block_ids = scatter_blocks(lengths, block_size, seed)
    step = make_step(lengths, block_ids, block_size)
    num_kv_heads, head_size = shape.num_kv_heads, shape.head_size
    cache_shape = (sum(map(len, block_ids)) + NUM_SPARE_BLOCKS, num_kv_heads, block_size)
    value_size = shape.value_size or head_size
    key_cache, value_cache = (torch.full((*cache_shape, size), unread, dtype=dtype) for size in (head_size, value_size))
    keys, values = [], []
    for ids, (num_rows, context_len) in zip(block_ids, lengths, strict=True):
        keys.append(draw(context_len, num_kv_heads, head_size))
        values.append(
            draw(context_len, num_kv_heads, value_size)
            if shape.latent_size is None
            else keys[-1][..., : shape.latent_size]
        )
        first = 0 if shape.window is None else first_visible(context_len - num_rows, shape.window)
        for p in range(first, context_len):
            key_cache[ids[p // block_size], :, p % block_size] = keys[-1][p]
            if shape.latent_size is None:
                value_cache[ids[p // block_size], :, p % block_size] = values[-1][p]
    wide_TNH = draw(len(step.token_ids), shape.num_heads, head_size + 7)
    # Large enough for a share of the weights of short and of long contexts.
    sinks_N = torch.randn(shape.num_heads, generator=generator) * 3 + 4 if shape.with_sinks else None
    if shape.with_token_sinks:
        sinks_N = torch.randn(len(step.token_ids), shape.num_heads, generator=generator) * 3 + 4
    value_cache = value_cache if shape.latent_size is None else key_cache
    biases_TNE = None
    if shape.num_distances is not None:
        biases_TNE = draw(len(step.token_ids), shape.num_heads, shape.num_distances)
    return Case(shape, step, wide_TNH[..., 7:], key_cache, value_cache, keys, values, sinks_N, biases_TNE)


@functools.cache
def random_case(seed: int, dtype: torch.dtype, is_latent: bool) -> tuple[Case, Tensor, Tensor]:
    """Return a case and what `expected_attention` returns for it. All are shared and must not be modified."""
    draw = random.Random(seed)
    lengths = []
    for _ in range(draw.randint(1, 5)):
        num_rows = draw.choice([1, 1, 1, 2, 3, 8, 9, 20])
        lengths.append((num_rows, num_rows + draw.choice([0, 1, 15, 16, 40, 255, 256, 600])))
    scale = draw.choice([None, 0.3])
    if is_latent:
        latent_size, rotary_size = draw.choice([1, 12, 32, 64, 100]), draw.choice([0, 1, 8, 20, 64])
        num_heads = draw.choice([1, 2, 3, 5, 8, 16, 22, 37])
        shape = Shape(num_heads, 1, latent_size + rotary_size, latent_size=latent_size, scale=scale)
    else:
        num_kv_heads = draw.choice([1, 2, 3, 5])
        shape = Shape(
            num_heads=num_kv_heads * draw.choice([1, 2, 3, 4, 5, 7, 8]),
            num_kv_heads=num_kv_heads,
            head_size=draw.choice([1, 8, 20, 64, 80, 96, 128, 256]),
            window=draw.choice([None, None, 1, 5, 100, 300, 10_000, -7, -90]),
            with_sinks=draw.choice([False, True]),
            scale=scale,
            value_size=draw.choice([None, None, 1]),
        )
        if shape.value_size is not None:
            shape = dataclasses.replace(shape, value_size=draw.randint(1, shape.head_size))
    case = make_case(lengths, shape, block_size=draw.choice([1, 3, 7, 16, 32]), dtype=dtype, seed=seed)
    return case, *expected_attention(case)


def expected_attention(case: Case) -> tuple[Tensor, Tensor]:
    """Return dense softmax attention in float64, and for bfloat16 the weighted sum of the values' distances from it.

    A sink is an additional position with a value of zeros.
    """
    rows, spreads = [], []
    for span, keys_CGH, values_CGL in zip(case.step.spans, case.keys_CGH, case.values_CGL, strict=True):
        keys, values = keys_CGH.double(), values_CGL.double()
        for i in range(span.num_rows):
            last = span.context_len - span.num_rows + i
            first = 0 if case.shape.window is None else first_visible(last, case.shape.window)
            query_GnH = case.query_TNH[span.first_row + i].double().unflatten(0, (case.shape.num_kv_heads, -1))
            scores_GnC = torch.einsum("gnh,cgh->gnc", query_GnH, keys[first : last + 1]) * case.scale
            if case.biases_TNE is not None:
                nearest_NE = case.biases_TNE[span.first_row + i, :, : last + 1 - first].double()
                biases_NC = torch.zeros(len(nearest_NE), last + 1 - first, dtype=torch.float64)
                biases_NC[:, last + 1 - first - nearest_NE.shape[1] :] = nearest_NE.flip(1)
                scores_GnC += biases_NC.view_as(scores_GnC)
            if case.sinks_N is not None:
                sinks_N = case.sinks_N if case.sinks_N.dim() == 1 else case.sinks_N[span.first_row + i]
                sinks_Gn1 = sinks_N.double().view(*scores_GnC.shape[:2], 1)
                scores_GnC = torch.cat([scores_GnC, sinks_Gn1], dim=-1)
            weights_GnC = scores_GnC.softmax(-1)[..., : last + 1 - first]
            visible_CGL = values[first : last + 1]
            row_GnL = torch.einsum("gnc,cgl->gnl", weights_GnC, visible_CGL)
            rows.append(row_GnL.flatten(0, 1))
            if keys_CGH.dtype == torch.bfloat16:
                distances_CGnL = (visible_CGL[:, :, None] - row_GnL).abs()
                spreads.append(torch.einsum("gnc,cgnl->gnl", weights_GnC, distances_CGnL).flatten(0, 1))
    return torch.stack(rows), torch.stack(spreads or rows)


def attend(backend: Backend, case: Case, max_rows: int | None = None) -> Tensor:
    return attention_of(backend, case.shape)(case, max_rows)


def attention_of(backend: Backend, shape: Shape) -> Callable[[Case, int | None], Tensor]:
    scale = shape.scale or shape.head_size**-0.5
    if shape.latent_size is not None:
        latent = latent_attention_ops.make(backend, LatentShape(scale, shape.latent_size, shape.group_size))
        return lambda case, max_rows: latent.attend(case.query_TNH, case.key_cache[:, 0], case.step, max_rows)
    paged = attention_ops.make(backend, attention_shape(shape))
    return lambda case, _: paged.attend(
        case.query_TNH, KeyValueCache(case.key_cache, case.value_cache), case.step, case.sinks_N, case.biases_TNE
    )


def attention_shape(shape: Shape, dtype: torch.dtype = torch.float32) -> AttentionShape:
    return AttentionShape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        value_size=shape.value_size,
        dtype=dtype,
        scale=shape.scale or shape.head_size**-0.5,
        window=shape.window,
        has_sinks=shape.with_sinks,
        whole_group_size=shape.whole_group_size,
    )


def write(backend: Backend, case: Case, keys_TGH: Tensor, values_TGH: Tensor) -> None:
    """Write keys and values at the slots of the step; latent attention writes the keys alone."""
    if case.shape.latent_size is not None:
        attention = latent_attention_ops.make(
            backend, LatentShape(case.scale, case.shape.latent_size, case.shape.num_heads)
        )
        return attention.write(keys_TGH[:, 0], case.key_cache[:, 0], case.step)
    paged = attention_ops.make(backend, attention_shape(case.shape))
    return paged.write(keys_TGH, values_TGH, KeyValueCache(case.key_cache, case.value_cache), case.step)  # type: ignore[attr-defined]


def heads_of_rank(case: Case, rank: int, num_ranks: int) -> Case:
    """Return the same step with the heads of one of several ranks that divide them."""
    shape = case.shape
    num_heads = shape.num_heads // num_ranks
    heads = slice(rank * num_heads, (rank + 1) * num_heads)
    kv_heads = slice(heads.start // shape.group_size, -(-heads.stop // shape.group_size))
    key_cache = case.key_cache[:, kv_heads].contiguous()
    return dataclasses.replace(
        case,
        shape=dataclasses.replace(
            shape,
            num_heads=num_heads,
            num_kv_heads=kv_heads.stop - kv_heads.start,
            whole_group_size=shape.group_size,
        ),
        query_TNH=case.query_TNH[:, heads],
        key_cache=key_cache,
        value_cache=key_cache if shape.latent_size is not None else case.value_cache[:, kv_heads].contiguous(),
        sinks_N=None if case.sinks_N is None else case.sinks_N[..., heads].contiguous(),
        biases_TNE=None if case.biases_TNE is None else case.biases_TNE[:, heads].contiguous(),
    )


def with_step(case: Case, lengths: list[tuple[int, int]], rows: list[int] | slice) -> Case:
    """Return a step of other chunks of the same requests, with these rows of the queries, over the same caches."""
    step = make_step(lengths, case.step.block_table.tolist(), case.key_cache.shape[2])
    return _with_rows(case, step, rows)


def only_chunk(case: Case, chunk: int) -> Case:
    """Return a step with one chunk of a case, over the same caches."""
    span = case.step.spans[chunk]
    step = make_step(
        [(span.num_rows, span.context_len)], [case.step.block_table[chunk].tolist()], case.key_cache.shape[2]
    )
    return _with_rows(case, step, slice(span.first_row, span.first_row + span.num_rows))


def _with_rows(case: Case, step: StepInputs, rows: list[int] | slice) -> Case:
    biases_TNE = None if case.biases_TNE is None else case.biases_TNE[rows]
    sinks_N = case.sinks_N[rows] if case.shape.with_token_sinks and case.sinks_N is not None else case.sinks_N
    return dataclasses.replace(case, step=step, query_TNH=case.query_TNH[rows], sinks_N=sinks_N, biases_TNE=biases_TNE)
