"""All checks of kernels: those of rows, attention and sampling are here, those of experts in `checks_experts.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from moeserve.bench.gpu.check import WRONG, Case, Check, Place, compare, compare_exactly, dtype_name
from moeserve.bench.gpu.checks_experts import ALPHA, EXPERT_CHECKS, FP8_BLOCK, LIMIT
from moeserve.bench.gpu.costs import ATTENTION_SHAPES, LATENT_SHAPES, VOCAB_SIZES, AttentionShape, Chunks, LatentShape
from moeserve.bench.gpu.libraries import installed_libraries, problem_of, step_of
from moeserve.ops.interfaces import KeyValueCache
from moeserve.ops.libraries.attention_times import StepKind
from moeserve.triton_kernels.activation import clamped_silu_multiply, silu_multiply
from moeserve.triton_kernels.fp8 import dequantize_blocks, dequantize_weight_blocks, quantize_blocks
from moeserve.triton_kernels.latent_attention import latent_attention, write_latents
from moeserve.triton_kernels.paged_attention import paged_attention, write_cache
from moeserve.triton_kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_in_place
from moeserve.triton_kernels.rotary import rotary, rotary_with_cache_write
from moeserve.triton_kernels.sampling import greedy_rows, row_maximum, sample_rows

# T tokens, D width, N query heads, G key-value heads, H head size, F rotated pairs, C positions of a context, V
# vocabulary

EPSILON = 1e-5
LARGEST_CODE = 448.0  # of float8_e4m3fn
BLOCK_SIZE = 16
LIBRARY_BLOCK_SIZES = (16, 64, 256)
SAMPLING_SLACK = 2e-6  # of the kept mass, by which a draw may miss the border between two tokens
SMALL_CHUNKS: dict[str, Chunks] = {"decode": [(1, 1), (1, 40)], "prefill": [(9, 9), (5, 37), (1, 20)]}
LARGE_CHUNKS: dict[str, Chunks] = {
    "decode": [(1, 1), (1, 17), (1, 500), (1, 4097), (1, 256), (1, 10000), (0, 3)],
    "prefill": [(700, 700), (300, 1500), (2, 513)],
    "mixed": [(1, 3000), (65, 65), (1, 1), (130, 2178)],
}


def check_norms(place: Place) -> Iterator[Case]:
    """Rows of a model's width, and heads inside a fused projection."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPSILON) * weight.double()

    shapes = [(3, 40), (2, 130)] if place.is_small else [(1, 4096), (129, 2048), (64, 2880), (33, 7168), (4096, 4096)]
    for dtype, (num_rows, width) in itertools.product(place.dtypes, shapes):
        name = f"{dtype_name(dtype)} {num_rows} x {width}"
        x, update = place.normal(num_rows, width, dtype=dtype), place.normal(num_rows, width, dtype=dtype)
        weight = (1 + place.normal(width, scale=0.2)).to(dtype)
        yield Case(f"rms_norm {name}", compare(rms_norm(x, weight, EPSILON), normed(x, weight), roundings=2))
        total, output = add_rms_norm(x, update, weight, EPSILON)
        added = (x.float() + update.float()).to(dtype)
        yield Case(f"add_rms_norm, sum {name}", compare_exactly(total, added))
        yield Case(f"add_rms_norm {name}", compare(output, normed(added, weight), roundings=2))
    head_shapes = [(3, 2, 16)] if place.is_small else [(4096, 32, 128), (5, 4, 64)]
    for dtype, (num_rows, num_heads, head_size) in itertools.product(place.dtypes, head_shapes):
        projected = place.normal(num_rows, num_heads + 3, head_size, dtype=dtype)
        before, weight = projected.clone(), (1 + place.normal(head_size, scale=0.2)).to(dtype)
        rms_norm_in_place(projected[:, :num_heads], weight, EPSILON)
        name = f"{dtype_name(dtype)} {num_rows} x {num_heads} x {head_size}"
        exact = normed(before[:, :num_heads], weight)
        yield Case(f"rms_norm_in_place {name}", compare(projected[:, :num_heads], exact, roundings=2))
        beside = compare_exactly(projected[:, num_heads:], before[:, num_heads:])
        yield Case(f"rms_norm_in_place, other heads {name}", beside)


def check_activations(place: Place) -> Iterator[Case]:
    shapes = [(3, 20), (1, 1100)] if place.is_small else [(1, 14336), (64, 2880), (4096, 1408), (513, 768)]
    for dtype, (num_rows, width) in itertools.product(place.dtypes, shapes):
        name = f"{dtype_name(dtype)} {num_rows} x {width}"
        gate_up = place.normal(num_rows, 2 * width, dtype=dtype, scale=4)
        gate, up = gate_up.double().chunk(2, dim=-1)
        yield Case(f"silu_multiply {name}", compare(silu_multiply(gate_up), silu(gate) * up, roundings=2))
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        exact = gate * torch.sigmoid(ALPHA * gate) * (up + 1)
        clamped = clamped_silu_multiply(gate_up, alpha=ALPHA, limit=LIMIT)
        yield Case(f"clamped_silu_multiply {name}", compare(clamped, exact, roundings=4))


def check_rotary(place: Place) -> Iterator[Case]:
    """Whole heads and parts of them, in place and elsewhere, and with the write into a cache with unused slots."""
    # tokens, query heads, key-value heads, head size, pairs
    shapes = (
        [(5, 3, 1, 16, 8), (3, 4, 2, 20, 6)]
        if place.is_small
        else [(1, 32, 8, 128, 64), (4097, 64, 8, 64, 32), (128, 96, 8, 128, 32), (77, 16, 16, 192, 32)]
    )
    for dtype, shape, is_interleaved in itertools.product(place.dtypes, shapes, (False, True)):
        num_tokens, num_heads, num_kv_heads, head_size, num_pairs = shape
        name = f"{dtype_name(dtype)} {' x '.join(map(str, shape))}{' interleaved' if is_interleaved else ''}"
        angles = place.uniform(num_tokens, num_pairs) * 6.3
        cosines, sines = angles.cos(), angles.sin()
        fused = place.normal(num_tokens, num_heads + 2 * num_kv_heads, head_size, dtype=dtype)
        query, key, value = fused.clone().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        rotated = _rotated(query, cosines, sines, is_interleaved)
        output = rotary(query, cosines, sines, is_interleaved, torch.empty_like(query))
        yield Case(f"rotary {name}", compare(output, rotated))
        in_place = fused.clone()[:, :num_heads]
        yield Case(f"rotary in place {name}", compare(rotary(in_place, cosines, sines, is_interleaved), rotated))

        num_blocks = -(-num_tokens // BLOCK_SIZE) + 2
        slots = place.order(num_blocks * BLOCK_SIZE)[:num_tokens]
        slots[::5] = -1
        cache = place.normal(2, num_blocks, num_kv_heads, BLOCK_SIZE, head_size, dtype=dtype)
        before = cache.clone()
        written = rotary_with_cache_write(query, key, value, cosines, sines, is_interleaved, cache[0], cache[1], slots)
        yield Case(f"rotary_with_cache_write, queries {name}", compare(written, rotated))
        is_used = slots >= 0
        used = (slots[is_used] // BLOCK_SIZE, slots[is_used] % BLOCK_SIZE)
        keys = cache[0].transpose(1, 2)[used]
        exact_keys = _rotated(key, cosines, sines, is_interleaved)[is_used]
        yield Case(f"rotary_with_cache_write, keys {name}", compare(keys, exact_keys))
        before[0].transpose(1, 2)[used] = keys
        before[1].transpose(1, 2)[used] = value[is_used]
        yield Case(f"rotary_with_cache_write, cache {name}", compare_exactly(cache, before))


def _rotated(heads_TNH: Tensor, cosines_TF: Tensor, sines_TF: Tensor, is_interleaved: bool) -> Tensor:
    num_pairs = cosines_TF.shape[1]
    heads, cosines, sines = heads_TNH.double(), cosines_TF.double()[:, None], sines_TF.double()[:, None]
    firsts, seconds = slice(0, num_pairs), slice(num_pairs, 2 * num_pairs)
    if is_interleaved:
        firsts, seconds = slice(0, 2 * num_pairs, 2), slice(1, 2 * num_pairs, 2)
    first, second, rotated = heads[..., firsts], heads[..., seconds], heads.clone()
    rotated[..., firsts] = first * cosines - second * sines
    rotated[..., seconds] = second * cosines + first * sines
    return rotated


def check_fp8(place: Place) -> Iterator[Case]:
    """Quantised rows, and dequantised rows and weights."""
    shapes = [(3, 300), (2, 128)] if place.is_small else [(1, 4096), (128, 7168), (4096, 2048), (65, 1408)]
    for dtype, (num_rows, width) in itertools.product(place.dtypes, shapes):
        name = f"{dtype_name(dtype)} {num_rows} x {width}"
        x = (place.normal(num_rows, width) * 10 ** (place.uniform(num_rows, 1) * 4 - 3)).to(dtype)
        x[0, : min(width, FP8_BLOCK)] = 0
        codes, scales = quantize_blocks(x)
        num_blocks = -(-width // FP8_BLOCK)
        padded = torch.nn.functional.pad(x.double(), (0, num_blocks * FP8_BLOCK - width)).unflatten(1, (num_blocks, -1))
        largest = padded.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        yield Case(f"quantize_blocks, scales {name}", compare(scales, largest[..., 0] / LARGEST_CODE))
        scaled = (padded * (LARGEST_CODE / largest)).flatten(1)[:, :width]
        yield Case(f"quantize_blocks, codes {name}", compare(codes.float(), scaled, dtype=torch.float8_e4m3fn))
        codes, scales = place.codes(num_rows, width), place.uniform(*scales.shape)
        exact = codes.double() * scales.double().repeat_interleave(FP8_BLOCK, dim=1)[:, :width]
        yield Case(f"dequantize_blocks {name}", compare(dequantize_blocks(codes, scales, dtype), exact))
    weights = [(130, 257)] if place.is_small else [(4096, 7168), (2048, 1408), (300, 200)]
    for dtype, (num_outputs, num_inputs) in itertools.product(place.dtypes, weights):
        weight = place.codes(num_outputs, num_inputs)
        scale = place.uniform(-(-num_outputs // FP8_BLOCK), -(-num_inputs // FP8_BLOCK))
        rows = scale.double().repeat_interleave(FP8_BLOCK, dim=0)[:num_outputs]
        exact = weight.double() * rows.repeat_interleave(FP8_BLOCK, dim=1)[:, :num_inputs]
        name = f"{dtype_name(dtype)} {num_outputs} x {num_inputs}"
        yield Case(f"dequantize_weight_blocks {name}", compare(dequantize_weight_blocks(weight, scale, dtype), exact))


def check_attention(place: Place) -> Iterator[Case]:
    """Contexts in scattered blocks, with NaN wherever no row may read."""
    small = {"sinks": AttentionShape(4, 2, 16, window=11, has_sinks=True), "plain": AttentionShape(3, 1, 20)}
    shapes = small if place.is_small else ATTENTION_SHAPES
    chunk_lists = SMALL_CHUNKS if place.is_small else LARGE_CHUNKS
    for dtype, (name, shape), (kind, chunks) in itertools.product(place.dtypes, shapes.items(), chunk_lists.items()):
        query = place.normal(_num_rows(chunks), shape.num_heads, shape.head_size, dtype=dtype)
        step, slots = _blocks(place, chunks)
        caches = torch.full(
            (2, _num_blocks(step), shape.num_kv_heads, BLOCK_SIZE, shape.head_size),
            torch.nan,
            dtype=dtype,
            device=place.device,
        )
        keys, values = (place.normal(len(slots), shape.num_kv_heads, shape.head_size, dtype=dtype) for _ in range(2))
        exact_caches = caches.clone()
        for cache, rows in zip(exact_caches, (keys, values), strict=True):
            cache.transpose(1, 2)[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = rows
        write_cache(keys, values, caches[0], caches[1], slots)
        title = f"{dtype_name(dtype)} {name}, {kind}"
        yield Case(f"write_cache {title}", compare_exactly(caches, exact_caches))
        sinks = place.normal(shape.num_heads, scale=2.0) if shape.has_sinks else None
        options: dict[str, Any] = dict(scale=shape.head_size**-0.5, window=shape.window, sinks_N=sinks)
        attended = paged_attention(query, exact_caches[0], exact_caches[1], **step, **options)
        exact = _attended(query, keys, values, chunks, **options)
        yield Case(f"paged_attention {title}", compare(attended, exact, roundings=4))


def check_latent_attention(place: Place) -> Iterator[Case]:
    shapes = {"small": LatentShape(5, latent_size=24, rotary_size=8)} if place.is_small else LATENT_SHAPES
    chunk_lists = SMALL_CHUNKS if place.is_small else LARGE_CHUNKS
    for dtype, (name, shape), (kind, chunks) in itertools.product(place.dtypes, shapes.items(), chunk_lists.items()):
        size = shape.latent_size + shape.rotary_size
        query = place.normal(_num_rows(chunks), shape.num_heads, size, dtype=dtype)
        step, slots = _blocks(place, chunks)
        cache = torch.full((_num_blocks(step), BLOCK_SIZE, size), torch.nan, dtype=dtype, device=place.device)
        latents = place.normal(len(slots), size, dtype=dtype)
        exact_cache = cache.clone()
        exact_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = latents
        write_latents(latents, cache, slots)
        title = f"{dtype_name(dtype)} {name}, {kind}"
        yield Case(f"write_latents {title}", compare_exactly(cache, exact_cache))
        options: dict[str, Any] = dict(scale=size**-0.5, latent_size=shape.latent_size)
        attended = latent_attention(query, exact_cache, **step, **options)
        keys, values = latents[:, None], latents[:, None, : shape.latent_size]
        exact = _attended(query, keys, values, chunks, scale=size**-0.5, window=None, sinks_N=None)
        yield Case(f"latent_attention {title}", compare(attended, exact, roundings=4))


def check_libraries(place: Place) -> Iterator[Case]:
    """Attention of the installed libraries, with the block sizes that they take.

    Where no row may read there are finite numbers, since FlashInfer multiplies them by zero.
    """
    shapes = {"window": AttentionShape(4, 2, 64, window=11)} if place.is_small else ATTENTION_SHAPES
    chunk_lists = SMALL_CHUNKS if place.is_small else LARGE_CHUNKS
    for library, block_size, dtype, (name, shape), (steps, with_empty) in itertools.product(
        installed_libraries(place.device), LIBRARY_BLOCK_SIZES, place.dtypes, shapes.items(), chunk_lists.items()
    ):
        chunks = [(rows, context) for rows, context in with_empty if rows]
        problem = problem_of(shape, dtype, block_size)
        kind: StepKind = "decode" if all(rows == 1 for rows, _ in chunks) else "chunks"
        if library.why_unavailable(problem, kind):
            continue
        query = place.normal(_num_rows(chunks), shape.num_heads, shape.head_size, dtype=dtype)
        step, slots = _blocks(place, chunks, block_size)
        caches = place.normal(2, _num_blocks(step), shape.num_kv_heads, block_size, shape.head_size, dtype=dtype)
        keys, values = (place.normal(len(slots), shape.num_kv_heads, shape.head_size, dtype=dtype) for _ in range(2))
        for cache, rows in zip(caches, (keys, values), strict=True):
            cache.transpose(1, 2)[slots // block_size, slots % block_size] = rows
        sinks = place.normal(shape.num_heads, scale=2.0) if shape.has_sinks else None
        inputs = step_of(chunks, step["block_table"])
        attended = library.make_attend(problem, kind)(query, KeyValueCache(*caches), inputs, sinks)
        exact = _attended(query, keys, values, chunks, scale=problem.shape.scale, window=shape.window, sinks_N=sinks)
        title = f"{library.label} {dtype_name(dtype)} {name}, {steps}, {block_size}"
        yield Case(title, compare(attended, exact, roundings=4))


def _num_rows(chunks: Chunks) -> int:
    return sum(rows for rows, _ in chunks)


def _num_blocks(step: dict[str, Any]) -> int:
    return int(step["block_table"].max()) + 1


def _blocks(place: Place, chunks: Chunks, block_size: int = BLOCK_SIZE) -> tuple[dict[str, Any], Tensor]:
    """Return a kernel's arguments for scattered blocks, and the slots of all positions of all contexts."""
    counts = [-(-context // block_size) for _, context in chunks]
    free = place.order(sum(counts) + 3)
    table = torch.zeros(len(chunks), max(counts), dtype=torch.int32, device=place.device)
    slots = []
    for chunk, ((_, context), ids) in enumerate(zip(chunks, free[: sum(counts)].split(counts), strict=True)):
        table[chunk, : len(ids)] = ids
        positions = torch.arange(context, device=place.device)
        slots.append(ids[positions // block_size] * block_size + positions % block_size)
    starts = [0, *itertools.accumulate(rows for rows, _ in chunks)]
    contexts = [context for _, context in chunks]
    step = {
        "block_table": table,
        "row_starts": torch.tensor(starts, dtype=torch.int32, device=place.device),
        "context_lens": torch.tensor(contexts, dtype=torch.int32, device=place.device),
        "max_rows_per_chunk": max(rows for rows, _ in chunks),
        "max_context": table.shape[1] * block_size,
    }
    return step, torch.cat(slots)


def _attended(
    query_TNH: Tensor,
    keys_CGH: Tensor,
    values_CGH: Tensor,
    chunks: Chunks,
    *,
    scale: float,
    window: int | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Return attention in float64, one head at a time, since all heads would take much memory."""
    group = query_TNH.shape[1] // keys_CGH.shape[1]
    contexts = [context for _, context in chunks]
    results = []
    for query, keys, values in zip(
        query_TNH.split([rows for rows, _ in chunks]), keys_CGH.split(contexts), values_CGH.split(contexts), strict=True
    ):
        positions = torch.arange(len(keys) - len(query), len(keys), device=query.device)[:, None]
        others = torch.arange(len(keys), device=query.device)
        is_hidden = others > positions
        if window is not None:
            is_hidden = is_hidden | (others <= positions - window)
        heads = []
        for head in range(query.shape[1]):
            scores = query[:, head].double() @ keys[:, head // group].double().T * scale
            scores = scores.masked_fill(is_hidden, -torch.inf)
            if sinks_N is not None:
                scores = torch.cat([scores, sinks_N[head].double().expand(len(query), 1)], dim=1)
            heads.append(scores.softmax(-1)[:, : len(keys)] @ values[:, head // group].double())
        results.append(torch.stack(heads, dim=1))
    return torch.cat(results)


def check_greedy(place: Place) -> Iterator[Case]:
    """The first of equal maxima, of which there are many in 16 bits."""
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
    """Draws with each filter."""
    widths = (40,) if place.is_small else tuple(VOCAB_SIZES.values())
    filters = ((0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (50, 0.8, 0.01))
    for width, (top_k, top_p, min_p) in itertools.product(widths, filters):
        num_rows = 2 if place.is_small else 64
        scores = place.normal(num_rows, width, scale=3.0)
        scores[:, ::7] = -torch.inf
        temperature = place.uniform(num_rows) * 1.5 + 0.3
        numbers = place.uniform(num_rows, dtype=torch.float64)
        top_k_R = torch.full((num_rows,), top_k, device=place.device)
        top_p_R, min_p_R = torch.tensor([[top_p], [min_p]], device=place.device).expand(2, num_rows).contiguous()
        tokens = sample_rows(scores, temperature, top_k_R, top_p_R, min_p_R, numbers)
        # top_p and min_p as float32 has them
        ratio = draw_error(scores, temperature, top_k, float(top_p_R[0]), float(min_p_R[0]), numbers, tokens)
        yield Case(f"sample_rows {num_rows} x {width}, top_k {top_k}, top_p {top_p}, min_p {min_p}", ratio)


def draw_error(
    scores_RV: Tensor,
    temperature_R: Tensor,
    top_k: int,
    top_p: float,
    min_p: float,
    numbers_R: Tensor,
    tokens_R: Tensor,
) -> float:
    """Return how far the random numbers lie outside of the shares of their tokens, in units of `SAMPLING_SLACK`.

    Where the bound of top_p or min_p falls next to a border between tokens, both sides of it are right: a number must
    find its token for some kept mass between those of the smallest and the largest set.
    """
    if int(tokens_R.min()) < 0 or int(tokens_R.max()) >= scores_RV.shape[1]:
        return WRONG
    ordered, order = scores_RV.double().sort(dim=-1, descending=True, stable=True)
    weights = ((ordered - ordered[:, :1]) / temperature_R.double()[:, None]).exp()

    def kept(top_p: float, min_p: float) -> Tensor:
        kept_RV = torch.where(weights >= min_p, weights, 0.0)
        if top_k > 0:
            kept_RV[:, top_k:] = 0.0
        cumulative_RV = kept_RV.cumsum(-1)
        return torch.where(cumulative_RV - kept_RV < top_p * cumulative_RV[:, -1:], kept_RV, 0.0)

    slack = SAMPLING_SLACK if top_p < 1 else 0.0  # all are kept with top_p = 1
    fewest = kept(top_p - slack, min_p * (1 + SAMPLING_SLACK))
    most = kept(top_p + slack, min_p * (1 - SAMPLING_SLACK))
    place_R1 = (order == tokens_R[:, None]).int().argmax(-1, keepdim=True)
    mass_R, end_R = (each.gather(1, place_R1)[:, 0] for each in (most, most.cumsum(-1)))
    least_total_R, total_R = fewest.sum(-1), most.sum(-1)
    outside_R = torch.maximum(numbers_R * least_total_R - end_R, end_R - mass_R - numbers_R * total_R) / total_R
    outside_R = outside_R.clamp(min=0.0) + (mass_R <= 0)  # a token that is not kept must not be drawn
    return float(outside_R.max() / SAMPLING_SLACK)


# The longest first, so that the processes that share them end together.
CHECKS: tuple[Check, ...] = (
    *EXPERT_CHECKS,
    Check("attention", ("paged_attention", "write_cache"), check_attention),
    Check("latent attention", ("latent_attention", "write_latents"), check_latent_attention),
    Check("attention of other libraries", (), check_libraries),
    Check("greedy choice", ("row_maximum", "greedy_rows"), check_greedy),
    Check("random draws", ("sample_rows",), check_sampling),
    Check("norms", ("rms_norm", "rms_norm_in_place", "add_rms_norm"), check_norms),
    Check("activations", ("silu_multiply", "clamped_silu_multiply"), check_activations),
    Check("rotary embedding", ("rotary", "rotary_with_cache_write"), check_rotary),
    Check("8-bit blocks", ("quantize_blocks", "dequantize_blocks", "dequantize_weight_blocks"), check_fp8),
)
