"""Times of kernels under graph replay, as fractions of the measured limits of this GPU, beside torch and transformers.

- a layer's experts with random routing. *products*: the two grouped products, with gather and activation, beside
  torch's `grouped_mm`; in 8 bits with the quantisation of rows. *experts*: also the order of pairs and the weighted
  sum, beside transformers' experts in eager form. torch and transformers compute SwiGLU without biases.
- attention, beside torch's `scaled_dot_product_attention` over contiguous keys and values, and grouped-query attention
  also beside the installed libraries on the same pages.
- norms, rotary embedding, activations, quantisation, routing and the choice of tokens, beside plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.bench.gpu import costs
from moeserve.bench.gpu.costs import AttentionShape, Bar, Chunks, GpuLimits, LatentShape, MoEShape, Work
from moeserve.bench.gpu.inputs import Source, draw_routed, draw_weights, layer_shape, num_cache_blocks
from moeserve.bench.gpu.libraries import installed_libraries
from moeserve.bench.gpu.limits import ColdTimer
from moeserve.ops.interfaces import Gather, Kernels, Keys, KeyValueCache, OpenWeights, Rotation
from moeserve.ops.libraries.attention_times import OWN, AttentionProblem, StepKind
from moeserve.ops.torch.table import TORCH_KERNELS
from moeserve.ops.triton.table import TRITON_KERNELS
from moeserve.triton_kernels.activation import silu_multiply
from moeserve.triton_kernels.fp8 import quantize_blocks

# T tokens, K experts per token, P pairs, D model width

BLOCK_SIZE = 16
DECODE_BATCHES = ((1, 4096), (16, 4096), (64, 512), (128, 4096))  # requests, context of each
EPSILON = 1e-5

Call = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure."""

    moe: Mapping[str, MoEShape] = field(default_factory=lambda: costs.MOE_SHAPES)
    attention: Mapping[str, AttentionShape] = field(default_factory=lambda: costs.ATTENTION_SHAPES)
    latent: Mapping[str, LatentShape] = field(default_factory=lambda: costs.LATENT_SHAPES)
    vocab: Mapping[str, int] = field(default_factory=lambda: costs.VOCAB_SIZES)
    num_tokens: tuple[int, ...] = (1, 16, 128, 4096, 16384)
    decode_batches: tuple[tuple[int, int], ...] = DECODE_BATCHES
    prefill_rows: int = 4096
    latent_rows: int = 64  # of a chunk for which keys and values are not expanded
    row_counts: tuple[int, ...] = (64, 8192)
    width: int = 4096
    expert_width: int = 14336


@dataclass(frozen=True)
class Timed:
    """A call to measure, its least work, and other implementations of it."""

    call: Call
    work: Work
    bar: Bar | None = None
    others: dict[str, Call] = field(default_factory=dict)
    eager_others: dict[str, Call] = field(default_factory=dict)  # which no graph can hold
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """A measurement, whose tensors are made when its turn comes."""

    name: str
    make: Callable[[], Timed]


@torch.inference_mode()
def measure(item: Item, timer: ColdTimer, limits: GpuLimits) -> dict[str, Any]:
    """Return a row. An implementation of others that fails is recorded with its error.

    Raises:
        Exception: our own call failed.
    """
    timed = item.make()
    seconds = timer.seconds(timed.call)
    row: dict[str, Any] = {
        "name": item.name,
        "status": "measured",
        "seconds": seconds,
        "bytes": timed.work.num_bytes,
        "operations": timed.work.operations,
        "bytes_per_second": timed.work.num_bytes / seconds,
        "operations_per_second": timed.work.operations / seconds,
        "fraction_of_memory_bound": timed.work.memory_seconds(limits) / seconds,
        "fraction_of_bound": timed.work.bound_seconds(limits) / seconds,
        "others": {},
        "notes": list(timed.notes),
    }
    for calls, seconds_of in ((timed.others, timer.seconds), (timed.eager_others, timer.seconds_without_graph)):
        for name, call in calls.items():
            try:
                other = seconds_of(call)
                row["others"][name] = {"seconds": other, "times_as_fast": other / seconds}
            except Exception as error:  # this shape is not supported, or does not fit into memory
                if "CUDA error" in str(error):
                    raise
                row["others"][name] = {"error": f"{type(error).__name__}: {error}"[:300]}
                torch.cuda.empty_cache()
    return row if timed.bar is None else row | {"bars": [timed.bar.verdict(row)]}


def items(source: Source, sizes: Sizes) -> Iterator[Item]:
    """Yield all measurements, the most important first.

    The weights of a shape are made once and freed when the next shape is requested, so make each item before the next.
    """
    for format, is_fp8 in (("bf16", False), ("fp8", True)):
        for name, shape in sizes.moe.items():
            layer = functools.cache(partial(Experts, source, shape, is_fp8))
            for num_tokens in sizes.num_tokens:
                yield Item(f"products {format} {name}, {num_tokens} tokens", partial(_products, layer, num_tokens))
                if not is_fp8:
                    yield Item(f"experts bf16 {name}, {num_tokens} tokens", partial(_experts, layer, num_tokens))
            layer.cache_clear()
    for name, attention in sizes.attention.items():
        for title, chunks in _steps(sizes, [(sizes.prefill_rows, sizes.prefill_rows)]).items():
            yield Item(f"attention {name}, {title}", partial(_attention, source, attention, chunks))
    for name, latent in sizes.latent.items():
        for title, chunks in _steps(sizes, [(sizes.latent_rows, sizes.prefill_rows)] * 4).items():
            yield Item(f"latent attention {name}, {title}", partial(_latent_attention, source, latent, chunks))
    for num_rows in sizes.row_counts:
        for operation in ROW_OPERATIONS:
            name = operation.__name__.removeprefix("_")
            yield Item(f"{name}, {num_rows} rows", partial(operation, source, sizes, num_rows))
    for name, width in sizes.vocab.items():
        yield Item(f"row_maximum {name}, 64 x {width}", partial(_row_maximum, source, width))
        yield Item(f"draw_tokens, top_p 0.9 {name}, 64 x {width}", partial(_draw_tokens, source, width))


def _steps(sizes: Sizes, prefill: list[tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
    steps = {f"decode {batch} x {context}": [(1, context)] * batch for batch, context in sizes.decode_batches}
    return steps | {f"{len(prefill)} chunks of {prefill[0][0]} rows of {prefill[0][1]}": prefill}


class Experts:
    """A layer's experts in bf16 or in 8-bit blocks."""

    def __init__(self, source: Source, shape: MoEShape, is_fp8: bool) -> None:
        self.source, self.shape, self.is_fp8 = source, shape, is_fp8
        draw = partial(draw_weights, source, shape.num_experts, is_fp8=is_fp8, has_bias=shape.has_bias and not is_fp8)
        self.gate_up: OpenWeights = draw(2 * shape.width, shape.hidden, activation=shape.activation)
        self.down: OpenWeights = draw(shape.hidden, shape.width)
        self.products = [TRITON_KERNELS.make_product(weights) for weights in (self.gate_up, self.down)]

    def multiply(self, hidden_TD: Tensor, order_P: Tensor, counts_E: Tensor) -> Tensor:
        """Return the outputs [P, D] of both products for the pairs in their order."""
        gate_up, down = self.products
        middle = gate_up.multiply_rows(hidden_TD, counts_E, True, Gather(order_P, self.shape.top_k))
        return down.multiply_rows(middle, counts_E, True)


def _products(make_layer: Callable[[], Experts], num_tokens: int) -> Timed:
    layer = make_layer()
    shape, gate_up_EOI, down_EOI = layer.shape, layer.gate_up.weight_eOI, layer.down.weight_eOI
    hidden_TD = layer.source.normal(num_tokens, shape.hidden)
    routed = draw_routed(layer.source, shape, num_tokens)
    source_P, offsets_E = routed.order_P // shape.top_k, routed.counts_E.cumsum(0).int()

    def run_torch() -> Tensor:
        gate_up = functional.grouped_mm(hidden_TD[source_P], gate_up_EOI.transpose(1, 2), offs=offsets_E)
        gate, up = gate_up.chunk(2, dim=-1)
        middle = functional.silu(gate) * up
        result: Tensor = functional.grouped_mm(middle, down_EOI.transpose(1, 2), offs=offsets_E)
        return result

    format: costs.Format = "fp8" if layer.is_fp8 else "bf16"
    return Timed(
        lambda: layer.multiply(hidden_TD, routed.order_P, routed.counts_E),
        costs.products_work(shape, num_tokens=num_tokens, num_hit=routed.num_hit, format=format),
        costs.products_bar(num_tokens, format),
        {} if layer.is_fp8 else {"torch grouped_mm": run_torch},
        notes=(f"{routed.num_hit} of {shape.num_experts} experts have rows",),
    )


def _experts(make_layer: Callable[[], Experts], num_tokens: int) -> Timed:
    layer = make_layer()
    shape, pairs = layer.shape, TRITON_KERNELS.pairs
    hidden_TD = layer.source.normal(num_tokens, shape.hidden)
    routed = draw_routed(layer.source, shape, num_tokens)

    def run() -> Tensor:
        order_P, counts_E = pairs.order(routed.experts_TK, Keys(shape.num_experts))
        output = layer.multiply(hidden_TD, order_P, counts_E)
        return pairs.weighted_sum(output, order_P, routed.weights_TK, hidden_TD.dtype)

    module = _transformers_experts(layer)
    weights_TK = routed.weights_TK.to(hidden_TD.dtype)
    return Timed(
        run,
        costs.experts_work(shape, num_tokens=num_tokens, num_hit=routed.num_hit),
        costs.products_bar(num_tokens, "bf16"),
        eager_others={"transformers": lambda: module(hidden_TD, routed.experts_TK, weights_TK)},
        notes=(f"{routed.num_hit} of {shape.num_experts} experts have rows",),
    )


def _transformers_experts(layer: Experts) -> Any:
    """Return Mixtral's experts over the same memory."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    shape = layer.shape
    config = MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = "eager"
    with torch.device("meta"):
        module = MixtralExperts(config)
    module.gate_up_proj = torch.nn.Parameter(layer.gate_up.weight_eOI, requires_grad=False)
    module.down_proj = torch.nn.Parameter(layer.down.weight_eOI, requires_grad=False)
    return module


def attention_calls(
    source: Source, shape: AttentionShape, chunks: Chunks, block_size: int = BLOCK_SIZE
) -> dict[str, Call]:
    """Return one step by our kernels, as `OWN`, and by each library that supports it, on the same caches."""
    step, layer = source.step(chunks, block_size), layer_shape(shape, source.dtype)
    query_TNH = source.normal(len(step.positions), shape.num_heads, shape.head_size)
    cache_shape = (num_cache_blocks(step), shape.num_kv_heads, block_size, shape.head_size)
    cache = KeyValueCache(source.normal(*cache_shape), source.normal(*cache_shape))
    sinks_N = source.normal(shape.num_heads, dtype=torch.float32) if shape.has_sinks else None
    problem = AttentionProblem(layer, block_size)
    kind: StepKind = "decode" if step.max_rows_per_chunk == 1 else "chunks"
    attends: dict[str, Callable[..., object]] = {OWN: TRITON_KERNELS.make_attention(layer).attend}
    for library in installed_libraries(source.device):
        if not library.why_unavailable(problem, kind):
            attends[library.label] = library.make_attend(problem, kind)
    return {label: partial(attend, query_TNH, cache, step, sinks_N) for label, attend in attends.items()}


def _attention(source: Source, shape: AttentionShape, chunks: Chunks) -> Timed:
    batch, rows, context = len(chunks), chunks[0][0], chunks[0][1]
    seen = context if shape.window is None or rows > 1 else min(context, shape.window)
    query = source.normal(batch, shape.num_heads, rows, shape.head_size)
    keys, values = (source.normal(batch, shape.num_kv_heads, seen, shape.head_size) for _ in range(2))
    calls = attention_calls(source, shape, chunks)
    own = calls.pop(OWN)
    calls["torch SDPA"] = lambda: functional.scaled_dot_product_attention(
        query, keys, values, is_causal=rows > 1, enable_gqa=True
    )
    notes = ("torch's attention is without sinks, and in prefill without the window",) if shape.has_sinks else ()
    return Timed(own, costs.attention_work(shape, chunks), others=calls, notes=notes)


def _latent_attention(source: Source, shape: LatentShape, chunks: Chunks) -> Timed:
    step, size = source.step(chunks, BLOCK_SIZE), shape.latent_size + shape.rotary_size
    batch, rows, context = len(chunks), chunks[0][0], chunks[0][1]
    query_TNP = source.normal(batch * rows, shape.num_heads, size)
    cache, dense = source.normal(num_cache_blocks(step), BLOCK_SIZE, size), source.normal(batch, 1, context, size)
    dense_query = query_TNP.view(batch, rows, shape.num_heads, size).transpose(1, 2)
    backend = TRITON_KERNELS.make_latent_attention(size**-0.5, shape.latent_size)

    def run_torch() -> Tensor:
        values = dense[..., : shape.latent_size]
        return functional.scaled_dot_product_attention(dense_query, dense, values, enable_gqa=True)

    notes = ("torch's attention is without the causal mask",) if rows > 1 else ()
    work = costs.latent_work(shape, chunks)
    return Timed(lambda: backend.attend(query_TNP, cache, step), work, others={"torch SDPA": run_torch}, notes=notes)


def _bytes(*values: float) -> Work:
    return Work(costs.RESULT_SIZE * sum(values))


def beside_torch(run: Callable[[Kernels], object], work: Work) -> Timed:
    """Return a measurement of an operation by both tables."""
    return Timed(lambda: run(TRITON_KERNELS), work, others={"torch": lambda: run(TORCH_KERNELS)})


def _rms_norm(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    x, weight = source.normal(num_rows, sizes.width), source.normal(sizes.width)
    return beside_torch(lambda kernels: kernels.rms_norm(x, weight, EPSILON), _bytes(2 * x.numel(), sizes.width))


def _add_rms_norm(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    x, update, weight = (source.normal(*shape, sizes.width) for shape in ((num_rows,), (num_rows,), ()))
    work = _bytes(4 * x.numel(), sizes.width)
    return beside_torch(lambda kernels: kernels.add_rms_norm(x, update, weight, EPSILON), work)


def _silu_multiply(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    gate_up = source.normal(num_rows, 2 * sizes.expert_width)
    gate, up = gate_up.chunk(2, dim=1)
    others: dict[str, Call] = {"torch": lambda: functional.silu(gate) * up}
    return Timed(lambda: silu_multiply(gate_up), _bytes(1.5 * gate_up.numel()), others=others)


def _rotate_and_write(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    """Queries and keys of a prompt of Mixtral-8x7B."""
    shape = sizes.attention["Mixtral-8x7B"]
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    fused, step = source.normal(num_rows, sum(heads), shape.head_size), source.step([(num_rows, num_rows)], BLOCK_SIZE)
    query, key, value = fused.split(heads, dim=1)
    angles = source.uniform(num_rows, shape.head_size // 2)
    rotation = Rotation(angles.cos(), angles.sin(), is_interleaved=False)
    blocks = (num_cache_blocks(step), shape.num_kv_heads, BLOCK_SIZE, shape.head_size)
    cache = KeyValueCache(source.normal(*blocks), source.normal(*blocks))
    backend = TRITON_KERNELS.make_attention(layer_shape(shape, source.dtype))
    work = _bytes(2 * fused.numel(), 4 * angles.numel()) + Work(8 * num_rows)
    return Timed(lambda: backend.rotate_and_write(query, key, value, rotation, cache, step), work)


def _quantize_blocks(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    x = source.normal(num_rows, sizes.width)
    return Timed(lambda: quantize_blocks(x), Work(3 * x.numel() + 4 * num_rows * -(-sizes.width // costs.SCALE_BLOCK)))


def _route(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    """DeepSeek-V3's router, with the product of rows and weights."""
    config = costs.DEEPSEEK_V3_ROUTER
    hidden = source.normal(num_rows, sizes.width)
    weight, correction = (
        source.normal(config.num_experts, *shape, dtype=torch.float32) for shape in ((sizes.width,), ())
    )
    num_bytes = hidden.nbytes + weight.nbytes + 12 * config.top_k * num_rows
    work = Work(num_bytes, 2.0 * num_rows * weight.numel())
    return beside_torch(lambda kernels: kernels.make_router(config)(hidden, weight, None, correction), work)


def _weigh(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    """A quarter of the rows; the others are spare."""
    rows, weights = source.normal(4 * num_rows, sizes.width), source.uniform(4 * num_rows)
    num_used = torch.tensor([num_rows], device=source.device)
    work = _bytes(2 * num_rows * sizes.width) + Work(4 * num_rows)
    return beside_torch(lambda kernels: kernels.pairs.weigh(rows, weights, num_used), work)


ROW_OPERATIONS: tuple[Callable[[Source, Sizes, int], Timed], ...] = (
    _rms_norm,
    _add_rms_norm,
    _silu_multiply,
    _rotate_and_write,
    _quantize_blocks,
    _route,
    _weigh,
)


def _row_maximum(source: Source, width: int) -> Timed:
    logits = source.normal(64, width, scale=3.0)
    return beside_torch(lambda kernels: kernels.row_maximum(logits), _bytes(logits.numel()))


def _draw_tokens(source: Source, width: int) -> Timed:
    """The work is that of one pass; `sample_rows` describes how many it makes."""
    scores = source.normal(64, width, dtype=torch.float32, scale=3.0)
    ones, uniform_R = torch.ones(64, device=source.device), source.uniform(64, dtype=torch.float64)
    top_k_R = torch.zeros(64, dtype=torch.int64, device=source.device)
    draw = TRITON_KERNELS.draw_tokens
    assert draw is not None

    def run_torch() -> Tensor:
        ordered = scores.softmax(-1).sort(-1, descending=True)
        cumulative = ordered.values.cumsum(-1)
        kept = torch.where(cumulative - ordered.values < 0.9, ordered.values, 0.0)
        return ordered.indices.gather(1, (kept / torch.empty_like(kept).exponential_()).argmax(-1, keepdim=True))

    return Timed(
        lambda: draw(scores, ones, top_k_R, ones * 0.9, ones * 0, uniform_R),
        Work(4 * scores.numel()),
        others={"torch": run_torch},
    )
