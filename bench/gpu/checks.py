"""The checks of all kernels: each operation of the Triton table, at the shapes of published models."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from moeserve.bench.gpu.check import FLOAT32_SLACK, FP8_SLACK, Case, Check, Results, compare
from moeserve.bench.gpu.costs import (
    ATTENTION_SHAPES,
    DEEPSEEK_V3_ROUTER,
    LATENT_SHAPES,
    MOE_SHAPES,
    VOCAB_SIZES,
    Chunks,
    LatentShape,
    MoEShape,
    attention_shape,
)
from moeserve.bench.gpu.inputs import (
    Source,
    context_slots,
    dequantized,
    draw_attention,
    draw_cache,
    draw_routed,
    draw_rows,
    draw_weights,
    num_cache_blocks,
)
from moeserve.bench.gpu.libraries import installed_libraries
from moeserve.ops.gated_delta import GatedDeltaCache, GatedDeltaShape, GatedDeltaWeights
from moeserve.ops.interfaces import (
    AttentionShape,
    ClampedSwiGLU,
    Gather,
    Kernels,
    Keys,
    KeyValueCache,
    OpenWeights,
    Product,
    Rotation,
    RouterConfig,
    plain_rows,
)
from moeserve.ops.libraries.attention import LibraryChoice
from moeserve.ops.libraries.interface import AttentionProblem, StepKind
from moeserve.ops.torch.table import TORCH_KERNELS
from moeserve.ops.triton.table import TRITON_KERNELS
from moeserve.step_inputs import StateRows, StepInputs

# T tokens, D width, N query heads, G key-value heads, H head size, P elements of a latent vector, R rows, V vocabulary,
# E experts, K experts per token, e weights side by side, S slots of a weight, I inputs

DELTA_HEADS = dict(num_heads=32, num_key_heads=16, key_dim=128, value_dim=128)  # Qwen3-Next
EPSILON = 1e-5
BLOCK_SIZE = 16
LIBRARY_BLOCK_SIZES = (16, 64, 256)
DRAW_SLACK = 1e-4  # of the kept probability, by which a draw may miss the border between two tokens
MOST_TIES = 0.01  # of the tokens, whose experts rounding may change
EXPECTED_ROWS = (1, 10**6)  # choose other tiles, which must not change a byte
SMALL_CHUNKS: dict[str, Chunks] = {"decode": [(1, 1), (1, 40)], "prefill": [(9, 9), (5, 37), (1, 20)]}
LARGE_CHUNKS: dict[str, Chunks] = {
    "decode": [(1, 1), (1, 17), (1, 500), (1, 4097), (1, 256), (1, 10000), (0, 3)],
    "prefill": [(700, 700), (300, 1500), (2, 513)],
    "mixed": [(1, 3000), (65, 65), (1, 1), (130, 2178)],
}
SMALL_ATTENTION = {
    "windowed": attention_shape(4, 2, 16, window=11, has_sinks=True),
    "plain": attention_shape(3, 1, 20),
}
SMALL_EXPERTS = {
    "Mixtral-8x7B": MoEShape(3, 48, 24, 2),
    "DeepSeek-V2-Lite": MoEShape(2, 20, 40, 2),
    "Qwen3-30B-A3B": MoEShape(6, 17, 9, 3),
    "gpt-oss-20b": MoEShape(5, 33, 20, 3, ClampedSwiGLU(alpha=1.702, limit=7.0), has_bias=True),
}
FP8_SHAPES = MOE_SHAPES | {"DeepSeek-V3, 32 of 256": MoEShape(32, 7168, 2048, 8)}  # the experts of one of 8 GPUs
ROUTERS = {
    "Mixtral": RouterConfig(num_experts=8, top_k=2, is_normalized=True),
    "DeepSeek-V2": RouterConfig(num_experts=160, top_k=6, num_groups=8, num_chosen_groups=3, scale=16.0),
    "DeepSeek-V3": DEEPSEEK_V3_ROUTER,
    "gpt-oss": RouterConfig(num_experts=32, top_k=4, scoring="softmax_of_chosen", has_bias=True),
}


def norms(source: Source, is_small: bool) -> Iterator[Case]:
    shapes = [(3, 40), (2, 130)] if is_small else [(1, 4096), (129, 2048), (64, 2880), (33, 7168), (4096, 4096)]
    for num_rows, width in shapes:
        x, update = source.normal(num_rows, width), source.normal(num_rows, width)
        weight = 1 + source.normal(width, scale=0.2)
        yield Case(f"{num_rows} x {width}", run_norms, (x, update, weight))
        exact = draw_rows(source, num_rows, width, is_fp8=True)
        yield Case(f"{num_rows} x {width} in 8 bits", run_quantized_norms, (x, update, weight, exact))
    for num_rows, num_heads, head_size in [(3, 2, 16)] if is_small else [(4096, 32, 128), (5, 4, 64)]:
        projected = source.normal(num_rows, num_heads + 3, head_size)
        weight = 1 + source.normal(head_size, scale=0.2)
        yield Case(f"{num_rows} x {num_heads} x {head_size}", run_norm_of_heads, (projected, weight))


def run_norms(kernels: Kernels, x_TD: Tensor, update_TD: Tensor, weight_D: Tensor) -> Results:
    total, normed = kernels.add_rms_norm(x_TD, update_TD, weight_D, EPSILON)
    return {"rms_norm": kernels.rms_norm(x_TD, weight_D, EPSILON), "add_rms_norm": normed, "its sum": total}


def run_quantized_norms(
    kernels: Kernels, x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, exact_TD: Tensor
) -> Results:
    """Quantise rows that lose nothing, and norms with the bytes of two operations."""
    quantize, quantize_norm = kernels.quantize_rows, kernels.quantize_rms_norm
    if quantize is None or quantize_norm is None:
        return {"quantize_rows": exact_TD, "quantize_rms_norm": torch.ones(2, dtype=torch.bool)}
    are_equal = []
    for update in (update_TD, None):
        total_TD, normed_TD = x_TD, kernels.rms_norm(x_TD, weight_D, EPSILON)
        if update is not None:
            total_TD, normed_TD = kernels.add_rms_norm(x_TD, update, weight_D, EPSILON)
        expected, (sum_TD, found) = quantize(normed_TD), quantize_norm(x_TD, update, weight_D, EPSILON, True)
        are_codes_equal = torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        are_scales_equal = torch.equal(found.scales, expected.scales)
        is_rest_equal = torch.equal(sum_TD, total_TD) and torch.equal(plain_rows(found), normed_TD)
        are_equal.append(are_codes_equal and are_scales_equal and is_rest_equal)
    return {"quantize_rows": plain_rows(quantize(exact_TD)), "quantize_rms_norm": torch.tensor(are_equal)}


def run_norm_of_heads(kernels: Kernels, projected_TNH: Tensor, weight_H: Tensor) -> Results:
    """Normalise some heads of a fused projection in place; the others must not change."""
    projected_TNH = projected_TNH.clone()
    kernels.rms_norm_in_place(projected_TNH[:, :-3], weight_H, EPSILON)
    return {"rms_norm_in_place": projected_TNH}


def gated_delta(source: Source, is_small: bool) -> Iterator[Case]:
    """Compute two steps of a few requests. The second step begins with the states that the first one has stored."""
    size = dict(num_heads=4, num_key_heads=2, key_dim=16, value_dim=24) if is_small else DELTA_HEADS
    shape = GatedDeltaShape(**size, num_taps=4, norm_epsilon=1e-3)
    lengths = [5, 1] if is_small else [300, 1, 65]
    step = source.step([(length, length) for length in lengths], BLOCK_SIZE)
    rows = torch.arange(len(lengths), device=source.device)
    weights = GatedDeltaWeights(
        source.normal(4, shape.num_channels).float(),
        source.normal(shape.num_heads).float(),
        source.normal(shape.num_heads).float(),
        source.normal(shape.value_dim).float(),
    )
    inputs = (
        source.normal(sum(lengths), shape.num_channels),
        source.normal(sum(lengths), shape.num_heads * shape.value_dim),
        source.normal(sum(lengths), 2 * shape.num_heads),
    )
    yield Case(f"{sum(lengths)} tokens", run_gated_delta, (shape, inputs, weights, step, rows))


def run_gated_delta(
    kernels: Kernels,
    shape: GatedDeltaShape,
    inputs: Sequence[Tensor],
    weights: GatedDeltaWeights,
    step: StepInputs,
    rows: Tensor,
) -> Results:
    mix, none, ones = kernels.make_gated_delta(shape), torch.full_like(rows, -1), torch.ones_like(rows)
    input_TC, gates_TX, rates_T2N = inputs
    states_shape = len(rows), shape.num_heads, shape.key_dim, shape.value_dim
    cache = GatedDeltaCache(
        input_TC.new_zeros(len(rows), shape.num_taps - 1, shape.num_channels),
        torch.zeros(states_shape, device=input_TC.device),
    )
    results = {}
    for name, load in (("first step", none), ("second step", rows)):
        states = StateRows(load, rows, none, ones)
        results[name] = mix(input_TC, gates_TX, rates_T2N, weights, cache, dataclasses.replace(step, states=states))
    return results | {"states": cache.states}


def attention(
    source: Source, is_small: bool, block_size: int = BLOCK_SIZE, has_empty_chunks: bool = True
) -> Iterator[Case]:
    """Contexts in scattered blocks, with NaN where no row may read."""
    shapes = SMALL_ATTENTION if is_small else ATTENTION_SHAPES
    chunk_lists = SMALL_CHUNKS if is_small else LARGE_CHUNKS
    for (name, shape), (kind, chunks) in itertools.product(shapes.items(), chunk_lists.items()):
        chosen = [(num_rows, context) for num_rows, context in chunks if num_rows or has_empty_chunks]
        step, layer = source.step(chosen, block_size), dataclasses.replace(shape, dtype=source.dtype)
        cache, used = (draw_cache(source, layer, step, block_size) for _ in range(2))
        slots = context_slots(step, block_size)
        places = slots // block_size, slice(None), slots % block_size
        for part, drawn in ((cache.keys, used.keys), (cache.values, used.values)):
            part.fill_(torch.nan)[places] = drawn[places]
        query, sinks = draw_attention(source, layer, step)
        yield Case(
            f"{name}, {kind}",
            lambda kernels, layer, *inputs: {"attend": kernels.make_attention(layer).attend(*inputs)},
            (layer, query, cache, step, sinks),
        )


def cache_writes(source: Source, is_small: bool) -> Iterator[Case]:
    """Rotary embedding of whole heads and of parts of them, alone and with the write into a cache."""
    # tokens, query heads, key-value heads, head size, pairs
    small = ((5, 3, 1, 16, 8), (3, 4, 2, 20, 6))
    large = ((1, 32, 8, 128, 64), (4097, 64, 8, 64, 32), (128, 96, 8, 128, 32), (77, 16, 16, 192, 32))
    for shape, is_interleaved in itertools.product(small if is_small else large, (False, True)):
        num_tokens, num_heads, num_kv_heads, head_size, num_pairs = shape
        layer = attention_shape(num_heads, num_kv_heads, head_size, dtype=source.dtype)
        fused = source.normal(num_tokens, num_heads + 2 * num_kv_heads, head_size)
        angles = source.uniform(num_tokens, num_pairs) * 6.3
        step = source.step([(num_tokens, num_tokens + 1)], BLOCK_SIZE)
        step = dataclasses.replace(step, cache_slots=step.cache_slots.masked_fill(step.positions % 5 == 1, -1))
        cache = draw_cache(source, layer, step, BLOCK_SIZE)
        rotation = Rotation(angles.cos(), angles.sin(), is_interleaved)
        name = f"{' x '.join(map(str, shape))}{' interleaved' if is_interleaved else ''}"
        yield Case(name, run_cache_writes, (layer, fused, rotation, cache, step))


def run_cache_writes(
    kernels: Kernels,
    layer: AttentionShape,
    fused: Tensor,
    rotation: Rotation,
    cache: KeyValueCache,
    step: StepInputs,
) -> Results:
    heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    query, key, value = fused.clone().split(heads, dim=1)
    backend = kernels.make_attention(layer)
    written = KeyValueCache(cache.keys.clone(), cache.values.clone())
    in_memory = torch.empty_like(query)
    results = {"apply_rope elsewhere": kernels.apply_rope(query.clone(), rotation, in_memory)}
    results["apply_rope"] = kernels.apply_rope(fused.clone()[:, : layer.num_heads], rotation)
    results["rotate_and_write"] = backend.rotate_and_write(query, key, value, rotation, written, step)
    return results | {"written keys": written.keys, "written values": written.values}


def latent_attention(source: Source, is_small: bool) -> Iterator[Case]:
    shapes = {"small": LatentShape(5, latent_size=24, rotary_size=8)} if is_small else LATENT_SHAPES
    chunk_lists = SMALL_CHUNKS if is_small else LARGE_CHUNKS
    for (name, shape), (kind, chunks) in itertools.product(shapes.items(), chunk_lists.items()):
        step, size = source.step(chunks, BLOCK_SIZE), shape.latent_size + shape.rotary_size
        cache = source.normal(num_cache_blocks(step), BLOCK_SIZE, size).fill_(torch.nan)
        slots = context_slots(step, BLOCK_SIZE)
        cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = source.normal(len(slots), size)
        rows = source.normal(len(step.positions), size)
        query = source.normal(len(step.positions), shape.num_heads, size)
        yield Case(f"{name}, {kind}", partial(run_latent, shape), (query, rows, cache, step))


def run_latent(
    shape: LatentShape, kernels: Kernels, query_TNP: Tensor, latent_TP: Tensor, cache: Tensor, step: StepInputs
) -> Results:
    backend = kernels.make_latent_attention(query_TNP.shape[-1] ** -0.5, shape.latent_size, shape.num_heads)
    written = torch.ones_like(cache)
    backend.write(latent_TP, written, step)
    return {"latent attend": backend.attend(query_TNP, cache, step), "latent write": written}


def expanded_attention(source: Source, is_small: bool) -> Iterator[Case]:
    """Latent attention with the keys and values of heads, from all chunks of more than one row."""
    shapes = {"small": LatentShape(2, latent_size=24, rotary_size=8)} if is_small else LATENT_SHAPES
    chunk_lists = SMALL_CHUNKS if is_small else LARGE_CHUNKS | {"long context": [(200, 33000), (70, 70)]}
    head_size = 16 if is_small else 128
    for (name, shape), (kind, chunks) in itertools.product(shapes.items(), chunk_lists.items()):
        step, size = source.step(chunks, BLOCK_SIZE), shape.latent_size + shape.rotary_size
        cache = source.normal(num_cache_blocks(step), BLOCK_SIZE, size)
        query = source.normal(len(step.positions), shape.num_heads, head_size + shape.rotary_size)
        maps = source.normal(2, shape.num_heads, shape.latent_size, head_size) * shape.latent_size**-0.5
        yield Case(f"{name}, {kind}", partial(run_expanded, shape), (query, maps, cache, step))


def run_expanded(
    shape: LatentShape, kernels: Kernels, query_TNQ: Tensor, maps: Tensor, cache: Tensor, step: StepInputs
) -> Results:
    num_tokens, num_heads, query_size = query_TNQ.shape
    head_size = query_size - shape.rotary_size

    def expand(latent_CL: Tensor, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        keys, values = maps[:, heads]
        latent_nCL = latent_CL.expand(len(keys), -1, -1)
        return torch.bmm(latent_nCL, keys), torch.bmm(latent_nCL, values)

    backend = kernels.make_latent_attention(query_size**-0.5, shape.latent_size, shape.num_heads)
    out_TNV = query_TNQ.new_zeros(num_tokens, num_heads, head_size)
    query_TNH, query_TNE = query_TNQ.split([head_size, shape.rotary_size], dim=-1)
    backend.attend_expanded(query_TNH, query_TNE, cache, step, 1, expand, out_TNV)
    return {"expanded attend": out_TNV}


def library_attention(source: Source, is_small: bool) -> Iterator[Case]:
    """Attention of the installed libraries, with the block sizes that they take.

    Where no row may read there are zeros, since FlashInfer multiplies them by zero.
    """
    for library, block_size in itertools.product(installed_libraries(source.device), LIBRARY_BLOCK_SIZES):
        choice = LibraryChoice(TRITON_KERNELS, library, block_size)
        table = dataclasses.replace(TRITON_KERNELS, make_attention=choice.make_attention)
        for case in attention(source, is_small, block_size, has_empty_chunks=False):
            layer, query, cache, step, sinks = case.inputs
            kind: StepKind = "decode" if step.max_rows_per_chunk == 1 else "chunks"
            if library.why_unavailable(AttentionProblem(layer, block_size), kind):
                continue
            finite = KeyValueCache(cache.keys.nan_to_num(0.0), cache.values.nan_to_num(0.0))
            name, inputs = f"{library.label}, {case.name}, {block_size}", (layer, query, finite, step, sinks)
            yield dataclasses.replace(case, name=name, inputs=inputs, kernels=table)


def routing(source: Source, is_small: bool) -> Iterator[Case]:
    for (name, config), num_tokens in itertools.product(ROUTERS.items(), (12,) if is_small else (4, 256, 32768)):
        hidden = source.normal(num_tokens, 64)
        weight = source.normal(config.num_experts, 64, dtype=torch.float32, scale=0.125)
        bias, correction = (
            source.normal(config.num_experts, dtype=torch.float32, scale=0.1) if is_used else None
            for is_used in (config.has_bias, config.has_correction)
        )
        yield Case(f"{name}, {num_tokens} tokens", partial(run_routing, config), (hidden, weight, bias, correction))


def run_routing(
    config: RouterConfig,
    kernels: Kernels,
    hidden_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    correction_E: Tensor | None,
) -> Results:
    """Route, and take torch's weights of the few tokens for which rounding may choose other experts."""
    inputs = (hidden_TD, weight_ED, bias_E, correction_E)
    experts, weights = kernels.make_router(config)(*inputs)
    torch_experts, torch_weights = TORCH_KERNELS.make_router(config)(*inputs)
    is_equal_T = (experts == torch_experts).all(-1)
    are_enough = (~is_equal_T).float().mean() <= MOST_TIES
    return {"experts of route": are_enough, "route": torch.where(is_equal_T[:, None], weights, torch_weights)}


def pairs(source: Source, is_small: bool) -> Iterator[Case]:
    """Few tokens, which one launch serves, and many. Some pairs belong to experts of other ranks."""
    # tokens, experts of each, experts, width
    small = [(3, 2, 5, 40), (40, 3, 7, 17)]
    large = [(1, 8, 256, 7168), (64, 6, 64, 2048), (4096, 2, 8, 4096), (16384, 8, 128, 2048), (1000, 4, 32, 2880)]
    for num_tokens, top_k, num_experts, width in small if is_small else large:
        experts = source.integers(0, num_experts, num_tokens, top_k)
        keys = Keys(num_experts - num_experts // 4, first=num_experts // 4)
        rows, output = source.normal(num_tokens, width), source.normal(num_tokens * top_k, width)
        inputs = (experts, keys, rows, output, source.uniform(num_tokens, top_k))
        yield Case(f"{num_tokens} x {top_k} of {num_experts}, {width} wide", run_pairs, inputs)


def run_pairs(
    kernels: Kernels, experts_TK: Tensor, keys: Keys, rows_TD: Tensor, output_RD: Tensor, weights_TK: Tensor
) -> Results:
    own = kernels.pairs
    order, counts = own.order(experts_TK, keys)
    ordered, sorted_counts = own.sort(experts_TK, keys)
    padded, _ = TORCH_KERNELS.pairs.order(experts_TK, keys)
    num_used = int((padded >= 0).sum())
    weighed = own.weigh(output_RD, weights_TK.flatten(), torch.full((1,), num_used, device=padded.device))
    # Only kernels for which the host need not know the counts take the padding.
    used = slice(None) if kernels.products_gather_rows else slice(num_used)
    return {
        "order": order,
        "counts of order": counts,
        "sort": ordered,
        "counts of sort": sorted_counts,
        "gather": own.gather(rows_TD, padded, experts_TK.shape[1])[:num_used],
        "scatter": own.scatter(output_RD, padded, len(output_RD)),
        "weighted_sum": own.weighted_sum(output_RD[used], padded[used], weights_TK, output_RD.dtype),
        "weigh": weighed[:num_used],
    }


def products(source: Source, is_small: bool, *, name: str, is_fp8: bool) -> Iterator[Case]:
    """Both products of a layer's experts, on gathered rows, packed rows and slots, and the product of one weight."""
    shape = (FP8_SHAPES if is_fp8 else MOE_SHAPES)[name]
    if is_small:
        shape = MoEShape(2, 260, 136, 2) if is_fp8 else SMALL_EXPERTS[name]
    slack = FP8_SLACK if is_fp8 else FLOAT32_SLACK
    for is_gated in (True, False):
        num_outputs, num_inputs = (2 * shape.width, shape.hidden) if is_gated else (shape.hidden, shape.width)
        activation = shape.activation if is_gated else None
        facts = partial(
            draw_weights,
            num_outputs=num_outputs,
            num_inputs=num_inputs,
            is_fp8=is_fp8,
            has_bias=shape.has_bias and not is_fp8,
            activation=activation,
        )
        weights, title = facts(source, shape.num_experts), "gate, up" if is_gated else "down"
        rows_of_expert = (6,) if is_small else (12, 32, 128)  # for which tiles differ
        token_counts = (1, *(max(2, shape.num_experts * rows // shape.top_k) for rows in rows_of_expert))
        for num_tokens in token_counts:
            routed = draw_routed(source, shape, num_tokens, num_others=1)
            gather = Gather(routed.order_P, shape.top_k) if is_gated else None
            rows = draw_rows(source, num_tokens if is_gated else len(routed.order_P), num_inputs, is_fp8=is_fp8)
            inputs = (weights, rows, routed.counts_E, gather)
            yield Case(f"{title}, {num_tokens} tokens", run_multiply_rows, inputs, slack)
        num_slots = 9 if is_small else 64
        counts = source.integers(0, num_slots + 1, shape.num_experts)
        counts[0], counts[-1] = num_slots, 0
        slots = draw_rows(source, shape.num_experts * num_slots, num_inputs, is_fp8=is_fp8)
        yield Case(title, run_multiply_slots, (weights, slots.unflatten(0, (-1, num_slots)), counts), slack)
        rows = draw_rows(source, num_slots, num_inputs, is_fp8=is_fp8)
        run = lambda kernels, weights, rows: {"multiply": make_product(kernels, weights).multiply(rows)}  # noqa: E731
        yield Case(title, run, (facts(source, 1), rows), slack)


def make_product(kernels: Kernels, weights: OpenWeights) -> Product:
    return kernels.make_product(dequantized(weights) if kernels.name == "torch" else weights)


def run_multiply_rows(
    kernels: Kernels, weights: OpenWeights, rows_RI: Tensor, counts_e: Tensor, gather: Gather | None
) -> Results:
    product, num_used = make_product(kernels, weights), int(counts_e.sum())
    results = [
        product.multiply_rows(rows_RI, counts_e, True, gather, expected_rows)[:num_used]
        for expected_rows in ((None, *EXPECTED_ROWS) if rows_RI.is_cuda else (None,))  # on a CPU, sums are numpy's
    ]
    are_equal = all(torch.equal(results[0], other) for other in results[1:]) or kernels.name == "torch"
    return {"multiply_rows": results[0], "multiply_rows with any tiles": torch.tensor(are_equal)}


def run_multiply_slots(kernels: Kernels, weights: OpenWeights, slots_eSI: Tensor, counts_e: Tensor) -> Results:
    output = make_product(kernels, weights).multiply_slots(slots_eSI, counts_e, int(counts_e.sum()))
    used = [rows[:count] for rows, count in zip(output, counts_e.tolist(), strict=True)]
    return {"multiply_slots": torch.cat(used)}


def graphs(source: Source, is_small: bool) -> Iterator[Case]:
    """A decode step of one layer, captured with padding and replayed with other steps in the same memory."""
    layer = attention_shape(4, 2, 16, dtype=source.dtype) if is_small else ATTENTION_SHAPES["Qwen3-30B-A3B"]
    shape = MoEShape(5, 48, 24, 2) if is_small else MOE_SHAPES["Qwen3-30B-A3B"]
    heads, size = layer.num_heads + 2 * layer.num_kv_heads, layer.head_size
    weights = LayerWeights(
        norm_D=1 + source.normal(shape.hidden, scale=0.2),
        fused=draw_weights(source, 1, heads * size, shape.hidden, is_fp8=False),
        output=draw_weights(source, 1, shape.hidden, layer.num_heads * size, is_fp8=False),
        router_ED=source.normal(shape.num_experts, shape.hidden, dtype=torch.float32, scale=0.125),
        gate_up=draw_weights(
            source, shape.num_experts, 2 * shape.width, shape.hidden, is_fp8=False, activation=shape.activation
        ),
        down=draw_weights(source, shape.num_experts, shape.hidden, shape.width, is_fp8=False),
        shared=draw_weights(source, 1, shape.hidden, shape.hidden, is_fp8=False),
    )
    steps = [source.step([(1, context) for context in contexts], BLOCK_SIZE) for contexts in ((20, 40), (37, 5))]
    cache = draw_cache(source, layer, steps[0], BLOCK_SIZE)
    rows = [source.normal(len(step.positions), shape.hidden) for step in steps]
    yield Case("one layer", run_graph, (layer, shape.top_k, weights, cache, steps, rows))


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer of a model."""

    norm_D: Tensor
    fused: OpenWeights
    output: OpenWeights
    router_ED: Tensor
    gate_up: OpenWeights
    down: OpenWeights
    shared: OpenWeights


def run_graph(
    kernels: Kernels,
    layer: AttentionShape,
    top_k: int,
    weights: LayerWeights,
    cache: KeyValueCache,
    steps: Sequence[StepInputs],
    rows: Sequence[Tensor],
) -> Results:
    """Return True for each step whose replay gives what the same kernels give eagerly."""
    if kernels.name == "torch":
        return {"replay": torch.ones(len(steps), dtype=torch.bool)}
    from moeserve.worker.cuda_graphs import TorchCapture  # needs msgspec, which other checks do without

    run = make_layer(kernels, layer, top_k, weights)
    own = padding_step(steps[0])
    own_rows_TD = torch.zeros_like(rows[0])
    memory = KeyValueCache(cache.keys.clone(), cache.values.clone())
    with torch.inference_mode():
        replay, result_TD = TorchCapture(torch.cuda.Stream())(partial(run, own_rows_TD, memory, own))
        are_equal = []
        for step, rows_TD in zip(steps, rows, strict=True):
            expected_TD = run(rows_TD, KeyValueCache(cache.keys.clone(), cache.values.clone()), step)
            memory.keys.copy_(cache.keys)
            memory.values.copy_(cache.values)
            own_rows_TD.copy_(rows_TD)
            for name in ("positions", "cache_slots", "context_lens", "block_table"):
                getattr(own, name).copy_(getattr(step, name))
            replay()
            are_equal.append(compare(result_TD, expected_TD.float()) <= 1)
    return {"replay": torch.tensor(are_equal)}


def make_layer(
    kernels: Kernels, layer: AttentionShape, top_k: int, weights: LayerWeights
) -> Callable[[Tensor, KeyValueCache, StepInputs], Tensor]:
    """Return a layer's decode step, with its shared experts in the side stream."""
    fused, output, gate_up, down, shared = (
        kernels.make_product(each)
        for each in (weights.fused, weights.output, weights.gate_up, weights.down, weights.shared)
    )
    num_experts = len(weights.router_ED)
    route = kernels.make_router(RouterConfig(num_experts=num_experts, top_k=top_k))
    backend = kernels.make_attention(layer)
    heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]

    def run(rows_TD: Tensor, cache: KeyValueCache, step: StepInputs) -> Tensor:
        normed_TD = kernels.rms_norm(rows_TD, weights.norm_D, EPSILON)
        query, key, value = fused.multiply(normed_TD).unflatten(1, (sum(heads), layer.head_size)).split(heads, dim=1)
        angles = step.positions[:, None].float() * torch.arange(layer.head_size // 2, device=rows_TD.device) * 0.1
        query = backend.rotate_and_write(query, key, value, Rotation(angles.cos(), angles.sin(), False), cache, step)
        update_TD = output.multiply(backend.attend(query, cache, step).flatten(1))
        _, normed_TD = kernels.add_rms_norm(rows_TD, update_TD, weights.norm_D, EPSILON)
        beside = kernels.side_stream.start(shared.multiply, normed_TD)
        experts_TK, weights_TK = route(normed_TD, weights.router_ED, None, None)
        order_P, counts_E = kernels.pairs.order(experts_TK, Keys(num_experts))
        middle = gate_up.multiply_rows(normed_TD, counts_E, True, Gather(order_P, top_k))
        routed_TD = kernels.pairs.weighted_sum(
            down.multiply_rows(middle, counts_E, True), order_P, weights_TK, rows_TD.dtype
        )
        return routed_TD + beside.wait()

    return run


def padding_step(step: StepInputs) -> StepInputs:
    """Return a step of padding rows with the sizes of another."""
    return dataclasses.replace(
        step,
        positions=torch.zeros_like(step.positions),
        cache_slots=torch.full_like(step.cache_slots, -1),
        context_lens=torch.zeros_like(step.context_lens),
        block_table=torch.zeros_like(step.block_table),
        spans=tuple(span._replace(context_len=0) for span in step.spans),
    )


def tokens(source: Source, is_small: bool) -> Iterator[Case]:
    """Greedy tokens, the first of equal maxima, and draws with each filter."""
    for width in (3, 300) if is_small else VOCAB_SIZES.values():
        for num_rows in (2,) if is_small else (1, 64):
            yield Case(
                f"{num_rows} x {width}",
                run_greedy,
                (source.normal(num_rows, width, scale=3.0), source.settings(num_rows)[0]),
            )
    filters = ((0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (50, 0.8, 0.01))
    for width, (top_k, top_p, min_p) in itertools.product((40,) if is_small else VOCAB_SIZES.values(), filters):
        num_rows = 2 if is_small else 64
        scores = source.normal(num_rows, width, scale=3.0)
        scores[:, ::7] = -torch.inf
        temperatures = source.uniform(num_rows) * 1.5 + 0.3
        settings, numbers = source.settings(
            num_rows, temperature=temperatures.cpu().numpy(), top_k=top_k, top_p=top_p, min_p=min_p
        )
        inputs = (scores, settings, numbers, temperatures)
        run = partial(run_draw, top_k, top_p, min_p)
        yield Case(f"top_k {top_k}, top_p {top_p}, min_p {min_p}, {num_rows} x {width}", run, inputs)


def run_greedy(kernels: Kernels, scores_RV: Tensor, settings_RW: Tensor) -> Results:
    results: Results = {}
    for name, (highest_R, tokens_R) in {
        "row_maximum": kernels.row_maximum(scores_RV),
        "choose_tokens": kernels.choose_tokens(scores_RV, settings_RW, settings_RW[:, 0].contiguous()),
    }.items():
        results |= {name: highest_R, f"{name}, index": tokens_R}
    return results


def run_draw(
    top_k: int,
    top_p: float,
    min_p: float,
    kernels: Kernels,
    scores_RV: Tensor,
    settings_RW: Tensor,
    uniform_R: Tensor,
    temperature_R: Tensor,
) -> Results:
    """Return True for each row whose token has its number within its share of the kept probability."""
    positions_R = torch.zeros(len(scores_RV), dtype=torch.int64, device=scores_RV.device)
    tokens_R = kernels.choose_tokens(scores_RV, settings_RW, positions_R)[1]
    ordered_RV, order_RV = scores_RV.double().sort(dim=-1, descending=True, stable=True)
    kept_RV = ((ordered_RV - ordered_RV[:, :1]) / temperature_R[:, None]).exp()
    rank_V = torch.arange(scores_RV.shape[1], device=scores_RV.device)
    kept_RV[(kept_RV < min_p) | (rank_V >= (top_k or len(rank_V)))] = 0.0
    ends_RV = kept_RV.cumsum(-1)
    kept_RV[ends_RV - kept_RV >= top_p * ends_RV[:, -1:]] = 0.0
    shares_RV = kept_RV / kept_RV.sum(-1, keepdim=True)
    place_R1 = (order_RV == tokens_R[:, None]).int().argmax(-1, keepdim=True)
    share_R, end_R = (each.gather(1, place_R1)[:, 0] for each in (shares_RV, shares_RV.cumsum(-1)))
    is_inside_R = (uniform_R < end_R + DRAW_SLACK) & (uniform_R >= end_R - share_R - DRAW_SLACK)
    is_known_R = (tokens_R >= 0) & (tokens_R < scores_RV.shape[1])
    return {"choose_tokens": is_inside_R & is_known_R}


# What a decode step in bf16 runs comes first: a run that is cut short has checked it. One check for each model's
# products: several processes share the compilation of their kernels.
CHECKS: dict[str, Check] = {
    "graphs": graphs,
    "attention": attention,
    "products, Mixtral-8x7B": partial(products, name="Mixtral-8x7B", is_fp8=False),
    "latent attention": latent_attention,
    "expanded attention": expanded_attention,
    "pairs": pairs,
    "routing": routing,
    "norms": norms,
    "rotary embedding and cache writes": cache_writes,
    "gated delta networks": gated_delta,
    "tokens": tokens,
    **{f"products, {name}": partial(products, name=name, is_fp8=False) for name in list(MOE_SHAPES)[1:]},
    **{f"products, fp8, {name}": partial(products, name=name, is_fp8=True) for name in reversed(FP8_SHAPES)},
    "attention of other libraries": library_attention,
}
