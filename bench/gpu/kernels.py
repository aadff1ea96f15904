"""Times of kernels under graph replay, as fractions of the measured limits of this GPU, beside torch and transformers.

- a layer's experts with random routing, after the router: order of pairs, both grouped products with gather and
  activation, weighted sum. Beside torch's `grouped_mm`, which does not order or sum, and transformers' experts in eager
  form, and SGLang's Triton kernels. torch and transformers compute SwiGLU without biases.
- attention, beside torch's `scaled_dot_product_attention` over contiguous keys and values, and grouped-query attention
  also beside the installed libraries on the same pages.
- norms, rotary embedding, activations, quantisation, routing and the choice of tokens, beside plain torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.bench.gpu import costs
from moeserve.bench.gpu.costs import Bar, Chunks, GpuLimits, LatentShape, MoEShape, Work
from moeserve.bench.gpu.inputs import (
    Source,
    draw_attention,
    draw_cache,
    draw_routed,
    draw_weights,
    num_cache_blocks,
)
from moeserve.bench.gpu.libraries import installed_libraries, sglang_experts
from moeserve.bench.gpu.limits import ColdTimer, Timer, limits_row, measure_limits
from moeserve.bench.gpu.parts import Item, Row, is_cuda_error
from moeserve.errors import SettingsError
from moeserve.ops.interfaces import (
    AttentionShape,
    Float8Rows,
    Gather,
    Kernels,
    Keys,
    OpenWeights,
    Product,
    Rotation,
    SwiGLU,
)
from moeserve.ops.libraries.deep_gemm import why_unavailable, with_deep_gemm
from moeserve.ops.libraries.interface import AttentionProblem, StepKind
from moeserve.ops.torch.table import TORCH_KERNELS
from moeserve.ops.triton.table import TRITON_KERNELS
from moeserve.triton_kernels.activation import gated_activation
from moeserve.triton_kernels.fp8 import quantize_blocks
from moeserve.triton_kernels.rms_norm import quantize_rms_norm

# E experts, K experts per token, P pairs, T tokens, D model width, O outputs, I inputs, N heads

BLOCK_SIZE = 16
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
    decode_batches: tuple[tuple[int, int], ...] = ((1, 4096), (16, 4096), (64, 512), (128, 4096))  # requests, context
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
    note: str | None = None


def timed_items(
    source: Source,
    sizes: Sizes,
    measure_limits: Callable[[], GpuLimits] = measure_limits,
    make_timer: Callable[[], Timer] = ColdTimer,
) -> Iterator[Item]:
    """Yield all measurements on this GPU, with the same limits, which are measured again at the end."""
    limits, timer = functools.cache(measure_limits), functools.cache(make_timer)

    def rows(make: Callable[[], Timed]) -> Iterator[Row]:
        yield measure(make(), timer(), limits())

    yield "limits before", lambda: [limits_row(limits())]
    for name, make in items(source, sizes):
        yield name, partial(rows, make)
    yield "limits after", lambda: [limits_row(measure_limits())]


@torch.inference_mode()
def measure(timed: Timed, timer: Timer, limits: GpuLimits) -> Row:
    """Return a row. An implementation of others that fails is recorded with its error.

    Raises:
        Exception: our own call failed, or a CUDA error.
    """
    seconds = timer.seconds(timed.call)
    row: dict[str, Any] = {
        "status": "measured",
        "seconds": seconds,
        "bytes": timed.work.num_bytes,
        "operations": timed.work.operations,
        "operations_per_second": timed.work.operations / seconds,
        "fraction_of_memory_bound": timed.work.memory_seconds(limits) / seconds,
        "fraction_of_bound": timed.work.bound_seconds(limits) / seconds,
        "others": {},
    }
    rates = f"{row['bytes'] / seconds / 1e9:,.0f} GB/s, {row['operations_per_second'] / 1e12:,.1f} TFLOP/s"
    lines = [f"{seconds * 1e6:,.1f} us, {rates}, {row['fraction_of_bound']:.0%} of the bound"]
    for calls, seconds_of in ((timed.others, timer.seconds), (timed.eager_others, timer.seconds_without_graph)):
        for name, call in calls.items():
            try:
                other = seconds_of(call)
                row["others"][name] = {"seconds": other, "times_as_fast": other / seconds}
                lines.append(f"{name}: {other * 1e6:,.1f} us, ours is {other / seconds:.2f} times as fast")
            except Exception as error:  # this shape is not supported, or does not fit into memory
                if is_cuda_error(error):
                    raise
                row["others"][name] = {"error": f"{type(error).__name__}: {error}"[:300]}
                lines.append(f"{name}: not measured ({row['others'][name]['error']})")
                torch.cuda.empty_cache()
    row["lines"] = [*lines, *([timed.note] if timed.note else [])]
    return row if timed.bar is None else row | {"bars": [timed.bar.verdict(row)]}


def items(source: Source, sizes: Sizes) -> Iterator[tuple[str, Callable[[], Timed]]]:
    """Yield all measurements, the most important first.

    The weights of a shape are made once and freed when the next shape is measured.
    """
    make_layer = functools.lru_cache(maxsize=1)(partial(Experts, source))
    for format in ("bf16", "fp8"):
        for name, moe_shape in sizes.moe.items():
            for num_tokens in sizes.num_tokens:
                make_one = partial(make_layer, moe_shape, format)
                yield f"experts {format} {name}, {num_tokens} tokens", partial(_experts, make_one, num_tokens)
    steps = {f"decode {batch} x {context}": [(1, context)] * batch for batch, context in sizes.decode_batches}
    prefill = {f"prefill of {sizes.prefill_rows}": [(sizes.prefill_rows, sizes.prefill_rows)]}
    for name, shape in sizes.attention.items():
        for title, chunks in (steps | prefill).items():
            yield f"attention {name}, {title}", partial(_attention, source, shape, chunks)
    prefill = {f"4 chunks of {sizes.latent_rows} rows": [(sizes.latent_rows, sizes.prefill_rows)] * 4}
    for name, latent_shape in sizes.latent.items():
        for title, chunks in (steps | prefill).items():
            yield f"latent attention {name}, {title}", partial(_latent_attention, source, latent_shape, chunks)
    for num_rows, make in ((num_rows, make) for num_rows in sizes.row_counts for make in ROW_OPERATIONS):
        yield f"{make.__name__.removeprefix('_')}, {num_rows} rows", partial(make, source, sizes, num_rows)
    for name, width in sizes.vocab.items():
        yield f"row_maximum {name}, 64 x {width}", partial(_row_maximum, source, width)
        yield f"choose_tokens, top_p 0.9 {name}, 64 x {width}", partial(_choose_tokens, source, width)


class Experts:
    """A layer's experts in bf16 or in 8-bit blocks."""

    def __init__(self, source: Source, shape: MoEShape, format: costs.Format) -> None:
        self.source, self.shape, self.format = source, shape, format
        is_fp8 = format == "fp8"
        draw = partial(draw_weights, source, shape.num_experts, is_fp8=is_fp8, has_bias=shape.has_bias and not is_fp8)
        gate_up: OpenWeights = draw(2 * shape.width, shape.hidden, activation=shape.activation)
        self.gate_up = dataclasses.replace(gate_up, feeds_blocks=is_fp8)
        self.down: OpenWeights = draw(shape.hidden, shape.width)
        self.products = [TRITON_KERNELS.make_product(weights) for weights in (self.gate_up, self.down)]

    def others(self) -> Iterator[tuple[str, list[Product]]]:
        """Yield the products of other libraries for weights in 8-bit blocks."""
        if self.source.device.type == "cuda":
            try:
                table = with_deep_gemm(TRITON_KERNELS, self.source.device, self.source.dtype)
            except SettingsError as error:
                print(f"deep_gemm is left out: {error}", flush=True)
                return
            if not why_unavailable(self.gate_up) and not why_unavailable(self.down):
                yield "deep_gemm", [table.make_product(weights) for weights in (self.gate_up, self.down)]

    def in_transformers(self) -> Any:
        """Return Mixtral's experts over the same memory."""
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config = MixtralConfig(
            hidden_size=self.shape.hidden,
            intermediate_size=self.shape.width,
            num_local_experts=self.shape.num_experts,
            num_experts_per_tok=self.shape.top_k,
        )
        config._experts_implementation = "eager"
        with torch.device("meta"):
            module = MixtralExperts(config)
        module.gate_up_proj = torch.nn.Parameter(self.gate_up.weight_eOI, requires_grad=False)
        module.down_proj = torch.nn.Parameter(self.down.weight_eOI, requires_grad=False)
        return module


def _experts(make_layer: Callable[[], Experts], num_tokens: int) -> Timed:
    layer = make_layer()
    shape, pairs = layer.shape, TRITON_KERNELS.pairs
    hidden_TD = layer.source.normal(num_tokens, shape.hidden)
    routed = draw_routed(layer.source, shape, num_tokens)

    def run(gate_up: Product, down: Product) -> Tensor:
        order_P, counts_E = pairs.order(routed.experts_TK, Keys(shape.num_experts))
        middle = gate_up.multiply_rows(hidden_TD, counts_E, True, Gather(order_P, shape.top_k))
        output = down.multiply_rows(middle, counts_E, True)
        return pairs.weighted_sum(output, order_P, routed.weights_TK, hidden_TD.dtype)

    work = costs.experts_work(shape, num_tokens=num_tokens, num_hit=routed.num_hit, format=layer.format)
    bar = costs.experts_bar(num_tokens, layer.format)
    note = f"{routed.num_hit} of {shape.num_experts} experts have rows"
    own = partial(run, *layer.products)
    others: dict[str, Call] = {label: partial(run, *products) for label, products in layer.others()}
    sglang = sglang_experts(layer.source.device)
    if sglang is not None and shape.activation == SwiGLU():
        scales = {"w1_scale": layer.gate_up.scales_eGB, "w2_scale": layer.down.scales_eGB}
        fp8 = {"use_fp8_w8a8": True, "block_shape": [costs.SCALE_BLOCK] * 2} | scales if layer.format == "fp8" else {}
        weights = layer.gate_up.weight_eOI, layer.down.weight_eOI
        others["sglang"] = partial(
            sglang, hidden_TD, *weights, routed.weights_TK, routed.experts_TK.int(), filter_expert=False, **fp8
        )
    if layer.format == "fp8":
        return Timed(own, work, bar, others, note=note)
    gate_up_EIO, down_EIO = (weights.weight_eOI.transpose(1, 2) for weights in (layer.gate_up, layer.down))
    source_P, offsets_E = routed.order_P // shape.top_k, routed.counts_E.cumsum(0).int()
    module, weights_TK = layer.in_transformers(), routed.weights_TK.to(hidden_TD.dtype)

    def run_torch() -> object:
        gate, up = functional.grouped_mm(hidden_TD[source_P], gate_up_EIO, offs=offsets_E).chunk(2, dim=-1)
        return functional.grouped_mm(functional.silu(gate) * up, down_EIO, offs=offsets_E)

    others["torch grouped_mm"] = run_torch
    eager: dict[str, Call] = {"transformers": lambda: module(hidden_TD, routed.experts_TK, weights_TK)}
    return Timed(own, work, bar, others, eager, note)


def attention_calls(source: Source, shape: AttentionShape, chunks: Chunks) -> dict[str, Call]:
    """Return one step by our kernels, as "triton", and by each library that supports it, on the same caches."""
    step, shape = source.step(chunks, BLOCK_SIZE), dataclasses.replace(shape, dtype=source.dtype)
    cache = draw_cache(source, shape, step, BLOCK_SIZE)
    query_TNH, sinks_N = draw_attention(source, shape, step)
    problem = AttentionProblem(shape, BLOCK_SIZE)
    kind: StepKind = "decode" if step.max_rows_per_chunk == 1 else "chunks"
    attends: dict[str, Callable[..., object]] = {"triton": TRITON_KERNELS.make_attention(shape).attend}
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
    own = calls.pop("triton")
    calls["torch SDPA"] = lambda: functional.scaled_dot_product_attention(
        query, keys, values, is_causal=rows > 1, enable_gqa=True
    )
    note = "torch's attention is without sinks, and in prefill without the window" if shape.has_sinks else None
    return Timed(own, costs.attention_work(shape, chunks), others=calls, note=note)


def _latent_attention(source: Source, shape: LatentShape, chunks: Chunks) -> Timed:
    step, size = source.step(chunks, BLOCK_SIZE), shape.latent_size + shape.rotary_size
    batch, rows, context = len(chunks), chunks[0][0], chunks[0][1]
    query_TNP = source.normal(batch * rows, shape.num_heads, size)
    cache, dense = source.normal(num_cache_blocks(step), BLOCK_SIZE, size), source.normal(batch, 1, context, size)
    dense_query = query_TNP.view(batch, rows, shape.num_heads, size).transpose(1, 2)
    backend = TRITON_KERNELS.make_latent_attention(size**-0.5, shape.latent_size, shape.num_heads)

    def run_torch() -> Tensor:
        values = dense[..., : shape.latent_size]
        return functional.scaled_dot_product_attention(dense_query, dense, values, enable_gqa=True)

    note = "torch's attention is without the causal mask" if rows > 1 else None
    work = costs.latent_work(shape, chunks)
    return Timed(lambda: backend.attend(query_TNP, cache, step), work, others={"torch SDPA": run_torch}, note=note)


def _beside_torch(run: Callable[[Kernels], object], num_bytes: float, operations: float = 0.0) -> Timed:
    """Return a measurement of an operation by both tables."""
    work = Work(num_bytes, operations)
    return Timed(lambda: run(TRITON_KERNELS), work, others={"torch": lambda: run(TORCH_KERNELS)})


def _rms_norm(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    x, weight = source.normal(num_rows, sizes.width), source.normal(sizes.width)
    return _beside_torch(lambda kernels: kernels.rms_norm(x, weight, EPSILON), 2 * x.nbytes + weight.nbytes)


def _add_rms_norm(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    x, update, weight = (source.normal(*shape, sizes.width) for shape in ((num_rows,), (num_rows,), ()))
    num_bytes = 4 * x.nbytes + weight.nbytes
    return _beside_torch(lambda kernels: kernels.add_rms_norm(x, update, weight, EPSILON), num_bytes)


def _silu_multiply(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    gate_up = source.normal(num_rows, 2 * sizes.expert_width)
    gate, up = gate_up.chunk(2, dim=1)
    others: dict[str, Call] = {"torch": lambda: functional.silu(gate) * up}
    return Timed(lambda: gated_activation(gate_up, "swiglu"), Work(1.5 * gate_up.nbytes), others=others)


def _rotate_and_write(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    """Queries and keys of a prompt of Mixtral-8x7B."""
    shape = sizes.attention["Mixtral-8x7B"]
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    fused, step = source.normal(num_rows, sum(heads), shape.head_size), source.step([(num_rows, num_rows)], BLOCK_SIZE)
    query, key, value = fused.split(heads, dim=1)
    angles = source.uniform(num_rows, shape.head_size // 2)
    rotation = Rotation(angles.cos(), angles.sin(), is_interleaved=False)
    cache = draw_cache(source, shape, step, BLOCK_SIZE)
    backend = TRITON_KERNELS.make_attention(dataclasses.replace(shape, dtype=source.dtype))
    work = Work(2 * fused.nbytes + 2 * angles.nbytes + 8 * num_rows)
    return Timed(lambda: backend.rotate_and_write(query, key, value, rotation, cache, step), work)


def _quantize_blocks(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    x = source.normal(num_rows, sizes.width)
    return Timed(lambda: quantize_blocks(x), Work(3 * x.numel() + 4 * num_rows * -(-sizes.width // costs.SCALE_BLOCK)))


def _quantize_rms_norm(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    """Normalise with the addition before it, and keep the plain rows, as for a router."""
    x, update, weight = (source.normal(*shape, sizes.width) for shape in ((num_rows,), (num_rows,), ()))
    num_bytes = 4 * x.nbytes + weight.nbytes + x.numel() + 4 * num_rows * -(-sizes.width // costs.SCALE_BLOCK)
    return Timed(lambda: quantize_rms_norm(x, update, weight, EPSILON, True), Work(num_bytes))


def _quantize_activation(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    """Apply the activation to slots of which half are in use, as after DeepGEMM's products."""
    gate_up = source.normal(2 * num_rows, 2 * sizes.expert_width)
    counts = torch.full((1,), num_rows, dtype=torch.int64, device=source.device)
    call = partial(quantize_blocks, gate_up, counts_e=counts, num_slots=2 * num_rows, activation="swiglu")
    return Timed(call, Work(1.25 * gate_up.nbytes / 2))


def _fp8_projection(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    """Compute DeepSeek-V3's compressed queries from FP8 rows: few tiles, so programs split their inputs (split-K)."""
    return _fp8_product(source, sizes, num_rows, draw_weights(source, 1, 1536, sizes.width, is_fp8=True))


def _fp8_shared_experts(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    """Compute gates and ups with the activation, and return FP8 rows."""
    shape = (2 * sizes.expert_width, sizes.width)
    weights = draw_weights(source, 1, *shape, is_fp8=True, activation=SwiGLU())
    return _fp8_product(source, sizes, num_rows, dataclasses.replace(weights, feeds_blocks=True))


def _fp8_product(source: Source, sizes: Sizes, num_rows: int, weights: OpenWeights) -> Timed:
    codes = source.codes(num_rows, sizes.width)
    scales = source.uniform(num_rows, -(-sizes.width // costs.SCALE_BLOCK))
    product = TRITON_KERNELS.make_product(weights)
    num_outputs = weights.weight_eOI.shape[1]
    num_bytes = weights.weight_eOI.nbytes + codes.nbytes + 2 * num_rows * num_outputs
    rows = Float8Rows(codes, scales, source.dtype)
    return Timed(lambda: product.multiply(rows), Work(num_bytes, 2.0 * num_rows * weights.weight_eOI.numel()))


def _route(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    """DeepSeek-V3's router, with the product of rows and weights."""
    config = costs.DEEPSEEK_V3_ROUTER
    hidden = source.normal(num_rows, sizes.width)
    weight, correction = (
        source.normal(config.num_experts, *shape, dtype=torch.float32) for shape in ((sizes.width,), ())
    )
    num_bytes = hidden.nbytes + weight.nbytes + 12 * config.top_k * num_rows
    run = lambda kernels: kernels.make_router(config)(hidden, weight, None, correction)  # noqa: E731
    return _beside_torch(run, num_bytes, 2.0 * num_rows * weight.numel())


def _weigh(source: Source, sizes: Sizes, num_rows: int) -> Timed:
    """A quarter of the rows; the others are spare."""
    rows, weights = source.normal(4 * num_rows, sizes.width), source.uniform(4 * num_rows)
    num_used = torch.tensor([num_rows], device=source.device)
    num_bytes = rows.nbytes / 2 + 4 * num_rows
    return _beside_torch(lambda kernels: kernels.pairs.weigh(rows, weights, num_used), num_bytes)


ROW_OPERATIONS = (
    *(_rms_norm, _add_rms_norm, _quantize_rms_norm, _silu_multiply, _rotate_and_write),
    *(_quantize_blocks, _quantize_activation, _fp8_projection, _fp8_shared_experts, _route, _weigh),
)


def _row_maximum(source: Source, width: int) -> Timed:
    logits = source.normal(64, width, scale=3.0)
    return _beside_torch(lambda kernels: kernels.row_maximum(logits), logits.nbytes)


def _choose_tokens(source: Source, width: int) -> Timed:
    """Choose tokens. The work counts one pass; `choose_tokens` documents the number of passes."""
    scores = source.normal(64, width, scale=3.0)
    settings, _ = source.settings(64, temperature=1.0, top_p=0.9)
    positions = torch.zeros(64, dtype=torch.int64, device=source.device)

    def run_torch() -> Tensor:
        ordered = scores.float().softmax(-1).sort(-1, descending=True)
        cumulative = ordered.values.cumsum(-1)
        kept = torch.where(cumulative - ordered.values < 0.9, ordered.values, 0.0)
        return ordered.indices.gather(1, (kept / torch.empty_like(kept).exponential_()).argmax(-1, keepdim=True))

    call = partial(TRITON_KERNELS.choose_tokens, scores, settings, positions)
    return Timed(call, Work(scores.nbytes), others={"torch": run_torch})
