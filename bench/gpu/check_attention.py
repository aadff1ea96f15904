"""Checks of the kernels over paged caches, and of those that choose tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moeserve.bench.gpu.attention_peers import installed_peers, problem_of, step_of
from moeserve.bench.gpu.check import (
    FUNCTION_SLACK,
    SUM_SLACK,
    WRONG,
    Case,
    Check,
    Expected,
    Place,
    compare,
    compare_exactly,
    dtype_name,
    rounding_unit,
)
from moeserve.bench.gpu.shapes import ATTENTION_SHAPES, LATENT_SHAPES, VOCAB_SIZES, AttentionShape, LatentShape
from moeserve.ops.interfaces import KeyValueCache
from moeserve.ops.libraries.attention_times import StepKind
from moeserve.triton_kernels.latent_attention import latent_attention, write_latents
from moeserve.triton_kernels.paged_attention import paged_attention, write_cache
from moeserve.triton_kernels.sampling import greedy_rows, row_maximum, sample_rows

# T tokens, N query heads, G key-value heads, H head size, C positions of a context, R rows, V width of a row of scores

BLOCK_SIZE = 16
PEER_BLOCK_SIZES = (16, 64, 256)
Chunks = Sequence[tuple[int, int]]  # rows, and length of the context with them
# The mass by which a draw may miss a border between tokens, of the whole: `sample_rows` says 1e-6.
SAMPLING_SLACK = 2e-6

SMALL_CHUNKS: dict[str, Chunks] = {"decode": [(1, 1), (1, 40)], "prefill": [(9, 9), (5, 37), (1, 20)]}
LARGE_CHUNKS: dict[str, Chunks] = {
    "decode": [(1, 1), (1, 17), (1, 500), (1, 4097), (1, 256), (1, 10000), (0, 3)],
    "prefill": [(700, 700), (300, 1500), (2, 513)],
    "mixed": [(1, 3000), (65, 65), (1, 1), (130, 2178)],
}


def check_attention(place: Place) -> Iterator[Case]:
    """Contexts in scattered blocks; where no row may look there is NaN."""
    shapes = (
        {"window and sinks": AttentionShape(4, 2, 16, window=11, has_sinks=True), "plain": AttentionShape(3, 1, 20)}
        if place.is_small
        else ATTENTION_SHAPES
    )
    for dtype, (name, shape) in itertools.product(place.dtypes, shapes.items()):
        for kind, chunks in (SMALL_CHUNKS if place.is_small else LARGE_CHUNKS).items():
            num_rows = sum(rows for rows, _ in chunks)
            query = place.normal(num_rows, shape.num_heads, shape.head_size, dtype=dtype)
            block_table, slots = _blocks(place, chunks)
            num_blocks = int(block_table.max()) + 1
            caches = torch.full(
                (2, num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_size),
                torch.nan,
                dtype=dtype,
                device=place.device,
            )
            keys, values = (
                place.normal(len(slots), shape.num_kv_heads, shape.head_size, dtype=dtype) for _ in range(2)
            )
            expected_caches = caches.clone()
            for cache, rows in zip(expected_caches, (keys, values), strict=True):
                cache.transpose(1, 2)[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = rows
            write_cache(keys, values, caches[0], caches[1], slots)
            title = f"{dtype_name(dtype)} {name}, {kind}"
            yield Case(f"write_cache {title}", compare_exactly(caches, expected_caches))

            sinks = place.normal(shape.num_heads, scale=2.0) if shape.has_sinks else None
            scale = shape.head_size**-0.5
            attended = paged_attention(
                query,
                expected_caches[0],
                expected_caches[1],
                block_table,
                _row_starts(place, chunks),
                _context_lens(place, chunks),
                scale=scale,
                window=shape.window,
                sinks_N=sinks,
                max_rows_per_chunk=max(rows for rows, _ in chunks),
                max_context=block_table.shape[1] * BLOCK_SIZE,
            )
            expected = _attended(query, keys, values, chunks, scale=scale, window=shape.window, sinks_N=sinks)
            yield Case(f"paged_attention {title}", compare(attended, expected))


def check_peers(place: Place) -> Iterator[Case]:
    """Attention of the libraries that are installed, in blocks of the sizes that they take.

    Where no row may look there are other numbers, but numbers: see `moeserve.ops.libraries.flashinfer`.
    """
    shapes = {"window": AttentionShape(4, 2, 64, window=11)} if place.is_small else ATTENTION_SHAPES
    cases = SMALL_CHUNKS if place.is_small else LARGE_CHUNKS
    for peer, block_size, dtype, (name, shape), (steps, with_empty) in itertools.product(
        installed_peers(place.device), PEER_BLOCK_SIZES, place.dtypes, shapes.items(), cases.items()
    ):
        chunks = [(rows, context) for rows, context in with_empty if rows]
        problem = problem_of(shape, dtype, block_size)
        kind: StepKind = "decode" if all(rows == 1 for rows, _ in chunks) else "chunks"
        if peer.why_unavailable(problem, kind):
            continue
        query = place.normal(sum(rows for rows, _ in chunks), shape.num_heads, shape.head_size, dtype=dtype)
        block_table, slots = _blocks(place, chunks, block_size)
        num_blocks = int(block_table.max()) + 1
        caches = place.normal(2, num_blocks, shape.num_kv_heads, block_size, shape.head_size, dtype=dtype)
        keys, values = (place.normal(len(slots), shape.num_kv_heads, shape.head_size, dtype=dtype) for _ in range(2))
        for cache, rows in zip(caches, (keys, values), strict=True):
            cache.transpose(1, 2)[slots // block_size, slots % block_size] = rows
        sinks = place.normal(shape.num_heads, scale=2.0) if shape.has_sinks else None
        attended = peer.make_attend(problem, kind)(query, KeyValueCache(*caches), step_of(chunks, block_table), sinks)
        expected = _attended(query, keys, values, chunks, scale=problem.shape.scale, window=shape.window, sinks_N=sinks)
        yield Case(f"{peer.label} {dtype_name(dtype)} {name}, {steps}, {block_size}", compare(attended, expected))


def check_latent_attention(place: Place) -> Iterator[Case]:
    shapes = {"small": LatentShape(5, latent_size=24, rotary_size=8)} if place.is_small else LATENT_SHAPES
    for dtype, (name, shape) in itertools.product(place.dtypes, shapes.items()):
        for kind, chunks in (SMALL_CHUNKS if place.is_small else LARGE_CHUNKS).items():
            size = shape.latent_size + shape.rotary_size
            query = place.normal(sum(rows for rows, _ in chunks), shape.num_heads, size, dtype=dtype)
            block_table, slots = _blocks(place, chunks)
            cache = torch.full(
                (int(block_table.max()) + 1, BLOCK_SIZE, size), torch.nan, dtype=dtype, device=place.device
            )
            latents = place.normal(len(slots), size, dtype=dtype)
            expected_cache = cache.clone()
            expected_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = latents
            write_latents(latents, cache, slots)
            title = f"{dtype_name(dtype)} {name}, {kind}"
            yield Case(f"write_latents {title}", compare_exactly(cache, expected_cache))
            attended = latent_attention(
                query,
                expected_cache,
                block_table,
                _row_starts(place, chunks),
                _context_lens(place, chunks),
                scale=size**-0.5,
                latent_size=shape.latent_size,
                max_rows_per_chunk=max(rows for rows, _ in chunks),
                max_context=block_table.shape[1] * BLOCK_SIZE,
            )
            keys, values = latents[:, None], latents[:, None, : shape.latent_size]
            expected = _attended(query, keys, values, chunks, scale=size**-0.5, window=None, sinks_N=None)
            yield Case(f"latent_attention {title}", compare(attended, expected))


def _blocks(place: Place, chunks: Chunks, block_size: int = BLOCK_SIZE) -> tuple[Tensor, Tensor]:
    """A table of scattered blocks, and the slot of each position of all contexts, one after another."""
    counts = [-(-context // block_size) for _, context in chunks]
    free = place.order(sum(counts) + 3)
    table = torch.zeros(len(chunks), max(counts), dtype=torch.int32, device=place.device)
    slots = []
    for chunk, ((_, context), ids) in enumerate(zip(chunks, free[: sum(counts)].split(counts), strict=True)):
        table[chunk, : len(ids)] = ids
        places = torch.arange(context, device=place.device)
        slots.append(ids[places // block_size] * block_size + places % block_size)
    return table, torch.cat(slots)


def _row_starts(place: Place, chunks: Chunks) -> Tensor:
    starts = [0, *itertools.accumulate(rows for rows, _ in chunks)]
    return torch.tensor(starts, dtype=torch.int32, device=place.device)


def _context_lens(place: Place, chunks: Chunks) -> Tensor:
    return torch.tensor([context for _, context in chunks], dtype=torch.int32, device=place.device)


def _attended(
    query_TNH: Tensor,
    keys_XGH: Tensor,  # of all contexts, one after another
    values_XGH: Tensor,
    chunks: Chunks,
    *,
    scale: float,
    window: int | None,
    sinks_N: Tensor | None,
) -> Expected:
    """Float64. What may be off: scores as float32 sums, which is a share of each weight; weights as they are rounded
    before they multiply values; and the result's rounding.
    """
    unit = rounding_unit(query_TNH.dtype)
    group = query_TNH.shape[1] // keys_XGH.shape[1]
    rows_of_chunk = query_TNH.split([rows for rows, _ in chunks])
    contexts = [context for _, context in chunks]
    values, slacks = [], []
    for query, keys, vectors in zip(rows_of_chunk, keys_XGH.split(contexts), values_XGH.split(contexts), strict=True):
        if not len(query):
            continue
        context = len(keys)
        positions = torch.arange(context - len(query), context, device=query.device)[:, None]
        others = torch.arange(context, device=query.device)
        is_hidden = others > positions
        if window is not None:
            is_hidden = is_hidden | (others <= positions - window)
        found = []
        for head in range(query.shape[1]):  # one at a time: all of them would take much memory
            query_RH, keys_CH = query[:, head].double(), keys[:, head // group].double()
            vectors_CH = vectors[:, head // group].double()
            scores = (query_RH @ keys_CH.T * scale).masked_fill(is_hidden, -torch.inf)
            if sinks_N is not None:
                sink = sinks_N[head].double().expand(len(query), 1)
                weights = torch.cat([scores, sink], dim=1).softmax(-1)[:, :-1]
            else:
                weights = scores.softmax(-1)
            score_slack = SUM_SLACK * scale * (query_RH.abs() @ keys_CH.abs().T).amax(-1, keepdim=True)
            value = weights @ vectors_CH
            spread = weights @ vectors_CH.abs()
            found.append((value, (unit + 2 * score_slack + FUNCTION_SLACK) * spread))
        values.append(torch.stack([value for value, _ in found], dim=1))
        slacks.append(torch.stack([slack for _, slack in found], dim=1))
    # Sums of values of either sign are smaller than their parts, whose rounding stays: up to 4 times as large a share.
    expected = Expected(torch.cat(values), torch.cat(slacks)).rounded_to(query_TNH.dtype)
    return Expected(expected.value, expected.slack, expected.rms + 4 * unit)


def check_greedy(place: Place) -> Iterator[Case]:
    """Of equal numbers, of which there are many in 16 bits, the first counts."""
    widths = (3, 300) if place.is_small else tuple(VOCAB_SIZES.values())
    for dtype, width, num_rows in itertools.product(place.dtypes, widths, (2,) if place.is_small else (1, 64)):
        logits = place.normal(num_rows, width, dtype=dtype, scale=3.0)
        if num_rows > 1:
            logits[-1, width // 2] = torch.inf
        largest = logits.double().amax(-1, keepdim=True)
        ids = torch.arange(width, device=place.device)
        first = torch.where(logits.double() == largest, ids, width).amin(-1)
        name = f"{dtype_name(dtype)} {num_rows} x {width}"
        found, indices = row_maximum(logits)
        yield Case(f"row_maximum {name}", compare_exactly(found, largest[:, 0].float()))
        yield Case(f"row_maximum, index {name}", compare_exactly(indices, first))
        tokens, are_usable = greedy_rows(logits)
        yield Case(f"greedy_rows {name}", compare_exactly(tokens, first))
        yield Case(f"greedy_rows, usable {name}", compare_exactly(are_usable, largest[:, 0].isfinite()))


def check_sampling(place: Place) -> Iterator[Case]:
    """The token's share of the kept mass must hold the random number, or be next to it by no more than the slack."""
    widths = (40,) if place.is_small else tuple(VOCAB_SIZES.values())
    for width, (top_k, top_p, min_p) in itertools.product(
        widths, ((0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (50, 0.8, 0.01))
    ):
        num_rows = 2 if place.is_small else 64
        scores = place.normal(num_rows, width, scale=3.0)
        scores[:, ::7] = -torch.inf
        temperature = place.uniform(num_rows) * 1.5 + 0.3
        numbers = place.uniform(num_rows, dtype=torch.float64)

        top_k_R = torch.full((num_rows,), top_k, device=place.device)
        top_p_R, min_p_R = torch.tensor([[top_p], [min_p]], device=place.device).expand(2, num_rows).contiguous()
        tokens = sample_rows(scores, temperature, top_k_R, top_p_R, min_p_R, numbers)
        exact_top_p, exact_min_p = float(top_p_R[0]), float(min_p_R[0])  # as float32 has them
        ratio = _draw_error(scores, temperature.double(), top_k, exact_top_p, exact_min_p, numbers, tokens)
        yield Case(f"sample_rows {num_rows} x {width}, top_k {top_k}, top_p {top_p}, min_p {min_p}", ratio)


def _draw_error(
    scores_RV: Tensor,
    temperature_R: Tensor,
    top_k: int,
    top_p: float,
    min_p: float,
    numbers_R: Tensor,
    tokens_R: Tensor,
) -> float:
    """How far numbers lie outside of their tokens' shares, in slacks.

    Where a bound of what is kept falls next to a border between tokens, either side of it is right: a number must then
    find its token for some kept mass from that of the least tokens to that of the most.
    """
    width = scores_RV.shape[1]
    if int(tokens_R.min()) < 0 or int(tokens_R.max()) >= width:
        return WRONG
    ordered, order = scores_RV.double().sort(dim=-1, descending=True, stable=True)
    weights = ((ordered - ordered[:, :1]) / temperature_R[:, None]).exp()
    top_p_slack = SAMPLING_SLACK if top_p < 1 else 0.0  # from 1, all are kept
    fewest = _kept(weights, top_k, top_p - top_p_slack, min_p * (1 + SAMPLING_SLACK))
    most = _kept(weights, top_k, top_p + top_p_slack, min_p * (1 - SAMPLING_SLACK))
    place_R1 = (order == tokens_R[:, None]).int().argmax(-1, keepdim=True)
    mass_R = most.gather(1, place_R1)[:, 0]
    end_R = most.cumsum(-1).gather(1, place_R1)[:, 0]
    least_total_R, total_R = fewest.sum(-1), most.sum(-1)
    outside_R = torch.maximum(numbers_R * least_total_R - end_R, end_R - mass_R - numbers_R * total_R) / total_R
    outside_R = outside_R.clamp(min=0.0) + (mass_R <= 0)  # a token that is not kept must not be drawn
    return float(outside_R.max() / SAMPLING_SLACK)


def _kept(weights_RV: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The same weights, most likely tokens first, with zeros for what is left out."""
    kept_RV = torch.where(weights_RV >= min_p, weights_RV, 0.0)
    if top_k > 0:
        kept_RV[:, top_k:] = 0.0
    cumulative_RV = kept_RV.cumsum(-1)
    return torch.where(cumulative_RV - kept_RV < top_p * cumulative_RV[:, -1:], kept_RV, 0.0)


CHECKS = (
    Check("attention", ("paged_attention", "write_cache"), check_attention),
    Check("latent attention", ("latent_attention", "write_latents"), check_latent_attention),
    Check("attention of other libraries", (), check_peers),
    Check("greedy choice", ("row_maximum", "greedy_rows"), check_greedy),
    Check("random draws", ("sample_rows",), check_sampling),
)
