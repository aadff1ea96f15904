"""Times of kernels under graph replay, as fractions of the measured limits of this GPU, beside torch and transformers.

- a layer's experts with random routing. *products*: the two grouped products, with gather and activation, beside
  torch's `grouped_mm`. *experts*: also the order of pairs and the weighted sum, beside transformers' experts in eager
  form. All have the same weights; torch and transformers compute SwiGLU without biases.
- attention, beside torch's `scaled_dot_product_attention` over contiguous keys and values, and grouped-query attention
  also beside the installed libraries on the same pages.
- norms, rotary embedding, activations, quantisation, routing and the choice of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.bench.gpu import costs
from moeserve.bench.gpu.checks_experts import DEEPSEEK_V3
from moeserve.bench.gpu.costs import Bar, Chunks, GpuLimits, LatentShape, MoEShape, Work
from moeserve.bench.gpu.libraries import installed_libraries, problem_of, step_of
from moeserve.bench.gpu.limits import ColdTimer
from moeserve.ops.interfaces import KeyValueCache
from moeserve.ops.libraries.attention_times import OWN, StepKind
from moeserve.triton_kernels.activation import silu_multiply
from moeserve.triton_kernels.fp8 import quantize_blocks
from moeserve.triton_kernels.grouped_matmul import grouped_matmul, grouped_matmul_fp8
from moeserve.triton_kernels.latent_attention import latent_attention
from moeserve.triton_kernels.paged_attention import paged_attention
from moeserve.triton_kernels.pairs import order_pairs, weigh_rows, weighted_sum
from moeserve.triton_kernels.rms_norm import add_rms_norm, rms_norm
from moeserve.triton_kernels.rotary import rotary_with_cache_write
from moeserve.triton_kernels.routing import route
from moeserve.triton_kernels.sampling import greedy_rows, sample_rows

# T tokens, K experts per token, P pairs, D model width, O outputs, I inputs, E experts, N query heads

NUM_TOKENS = (1, 16, 128, 4096, 16384)
BLOCK_SIZE = 16
DECODE_BATCHES = ((1, 4096), (16, 4096), (64, 512), (128, 4096))  # requests, context of each
PREFILL_ROWS = 4096
LATENT_ROWS = 64  # of a chunk for which keys and values are not expanded
ROW_COUNTS = (64, 8192)
WIDTH, EXPERT_WIDTH, LARGE_WIDTH = 4096, 14336, 7168
WEIGHT_SCALE = 0.02
DEVICE = "cuda"

Call = Callable[[], object]


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
    row = {"name": item.name, "status": "measured"} | figures(timer.seconds(timed.call), timed.work, limits)
    row["others"] = {}
    for calls, seconds_of in ((timed.others, timer.seconds), (timed.eager_others, timer.seconds_without_graph)):
        for name, call in calls.items():
            try:
                seconds = seconds_of(call)
                row["others"][name] = {"seconds": seconds, "times_as_fast": seconds / row["seconds"]}
            except Exception as error:  # this shape is not supported, or does not fit into memory
                if "CUDA error" in str(error):
                    raise
                row["others"][name] = {"error": f"{type(error).__name__}: {error}"[:300]}
                torch.cuda.empty_cache()
    if timed.bar is not None:
        row["bars"] = [timed.bar.verdict(row)]
    return row | {"notes": list(timed.notes)}


def figures(seconds: float, work: Work, limits: GpuLimits) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "bytes": work.num_bytes,
        "operations": work.operations,
        "bytes_per_second": work.num_bytes / seconds,
        "operations_per_second": work.operations / seconds,
        "fraction_of_memory_bound": work.memory_seconds(limits) / seconds,
        "fraction_of_bound": work.bound_seconds(limits) / seconds,
    }


def items() -> Iterator[Item]:
    """Yield all measurements, the most important first.

    The weights of a shape are made once and freed when the next shape is requested, so make each item before the next.
    """
    for name, shape in costs.MOE_SHAPES.items():
        layer = functools.cache(functools.partial(ExpertWeights, shape))
        for num_tokens in NUM_TOKENS:
            yield Item(f"products bf16 {name}, {num_tokens} tokens", functools.partial(_products, layer, num_tokens))
            yield Item(f"experts bf16 {name}, {num_tokens} tokens", functools.partial(_experts, layer, num_tokens))
        layer.cache_clear()
    for name, shape in costs.MOE_SHAPES.items():
        layer_8 = functools.cache(functools.partial(Fp8ExpertWeights, shape))
        for num_tokens in NUM_TOKENS:
            make = functools.partial(_products_fp8, layer_8, num_tokens)
            yield Item(f"products fp8 {name}, {num_tokens} tokens", make)
        layer_8.cache_clear()
    for name, attention in costs.ATTENTION_SHAPES.items():
        for title, chunks in _attention_steps([(PREFILL_ROWS, PREFILL_ROWS)]).items():
            yield Item(f"attention {name}, {title}", functools.partial(_attention, attention, chunks))
    for name, latent in costs.LATENT_SHAPES.items():
        for title, chunks in _attention_steps([(LATENT_ROWS, PREFILL_ROWS)] * 4).items():
            yield Item(f"latent attention {name}, {title}", functools.partial(_latent_attention, latent, chunks))
    for num_rows in ROW_COUNTS:
        for title, make_rows in ROW_ITEMS.items():
            yield Item(f"{title}, {num_rows} rows", functools.partial(make_rows, num_rows))
    for name, width in costs.VOCAB_SIZES.items():
        yield Item(f"greedy_rows {name}, 64 x {width}", functools.partial(_greedy, 64, width))
        yield Item(f"sample_rows, top_p 0.9 {name}, 64 x {width}", functools.partial(_draw, 64, width))


def _attention_steps(prefill: list[tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
    steps = {f"decode {batch} x {context}": [(1, context)] * batch for batch, context in DECODE_BATCHES}
    return steps | {f"{len(prefill)} chunks of {prefill[0][0]} rows of {prefill[0][1]}": prefill}


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(std=scale)


def _random_codes(*shape: int) -> Tensor:
    """Draw magnitudes below 2: without the exponent's highest bit, none is NaN."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE).bitwise_and_(0xBF).view(torch.float8_e4m3fn)


class ExpertWeights:
    """A layer's experts in bf16."""

    def __init__(self, shape: MoEShape) -> None:
        self.shape = shape
        self.gate_up_EOI = _random(shape.num_experts, 2 * shape.width, shape.hidden, scale=WEIGHT_SCALE)
        self.down_EOI = _random(shape.num_experts, shape.hidden, shape.width, scale=WEIGHT_SCALE)
        self.gate_up_bias = _random(shape.num_experts, 2 * shape.width) if shape.has_bias else None
        self.down_bias = _random(shape.num_experts, shape.hidden) if shape.has_bias else None


class Fp8ExpertWeights:
    """A layer's experts in blocks of 8-bit floats."""

    def __init__(self, shape: MoEShape) -> None:
        self.shape = shape
        self.gate_up_EOI = _random_codes(shape.num_experts, 2 * shape.width, shape.hidden)
        self.down_EOI = _random_codes(shape.num_experts, shape.hidden, shape.width)
        blocks_D, blocks_F = -(-shape.hidden // 128), -(-shape.width // 128)
        self.gate_up_scale = torch.rand(shape.num_experts, 2 * blocks_F, blocks_D, device=DEVICE)
        self.down_scale = torch.rand(shape.num_experts, blocks_D, blocks_F, device=DEVICE)


class Routed:
    """Tokens with experts drawn at random."""

    def __init__(self, shape: MoEShape, num_tokens: int) -> None:
        drawn = torch.rand(num_tokens, shape.num_experts, device=DEVICE).topk(shape.top_k, dim=1)
        self.experts_TK = drawn.indices
        self.weights_TK = drawn.values / drawn.values.sum(1, keepdim=True)
        self.order_P, self.counts_E = order_pairs(drawn.indices, 0, shape.num_experts)
        self.num_hit = int((self.counts_E > 0).sum())
        self.note = f"{self.num_hit} of {shape.num_experts} experts have rows"


def _run_products(layer: ExpertWeights, hidden_TD: Tensor, order_P: Tensor, counts_E: Tensor) -> Tensor:
    middle = grouped_matmul(
        hidden_TD,
        layer.gate_up_EOI,
        counts_E,
        indices_R=order_P,
        divisor=layer.shape.top_k,
        bias_eO=layer.gate_up_bias,
        activation=layer.shape.activation,
    )
    return grouped_matmul(middle, layer.down_EOI, counts_E, bias_eO=layer.down_bias)


def _products(make_layer: Callable[[], ExpertWeights], num_tokens: int) -> Timed:
    layer = make_layer()
    shape = layer.shape
    hidden_TD, routed = _random(num_tokens, shape.hidden), Routed(shape, num_tokens)
    source_P, offsets_E = routed.order_P // shape.top_k, routed.counts_E.cumsum(0).int()

    def run_torch() -> Tensor:
        gate_up = functional.grouped_mm(hidden_TD[source_P], layer.gate_up_EOI.transpose(1, 2), offs=offsets_E)
        gate, up = gate_up.chunk(2, dim=-1)
        result: Tensor = functional.grouped_mm(
            functional.silu(gate) * up, layer.down_EOI.transpose(1, 2), offs=offsets_E
        )
        return result

    return Timed(
        lambda: _run_products(layer, hidden_TD, routed.order_P, routed.counts_E),
        costs.products_work(shape, num_tokens=num_tokens, num_hit=routed.num_hit, format="bf16"),
        costs.products_bar(num_tokens, "bf16"),
        {"torch grouped_mm": run_torch},
        notes=(routed.note,),
    )


def _experts(make_layer: Callable[[], ExpertWeights], num_tokens: int) -> Timed:
    layer = make_layer()
    shape = layer.shape
    hidden_TD, routed = _random(num_tokens, shape.hidden), Routed(shape, num_tokens)

    def run() -> Tensor:
        order_P, counts_E = order_pairs(routed.experts_TK, 0, shape.num_experts)
        output = _run_products(layer, hidden_TD, order_P, counts_E)
        return weighted_sum(output, order_P, routed.weights_TK, torch.bfloat16)

    module = _transformers_experts(layer)
    weights_TK = routed.weights_TK.bfloat16()
    return Timed(
        run,
        costs.experts_work(shape, num_tokens=num_tokens, num_hit=routed.num_hit),
        costs.products_bar(num_tokens, "bf16"),
        eager_others={"transformers": lambda: module(hidden_TD, routed.experts_TK, weights_TK)},
        notes=(routed.note,),
    )


def _transformers_experts(layer: ExpertWeights) -> Any:
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
    module.gate_up_proj = torch.nn.Parameter(layer.gate_up_EOI, requires_grad=False)
    module.down_proj = torch.nn.Parameter(layer.down_EOI, requires_grad=False)
    return module


def _products_fp8(make_layer: Callable[[], Fp8ExpertWeights], num_tokens: int) -> Timed:
    """Both products from 8-bit rows, without the time to quantise the rows between them."""
    layer = make_layer()
    shape = layer.shape
    routed = Routed(shape, num_tokens)
    hidden, hidden_scale = quantize_blocks(_random(num_tokens, shape.hidden))
    middle, middle_scale = quantize_blocks(_random(num_tokens * shape.top_k, shape.width))
    gathered: dict[str, Any] = dict(indices_R=routed.order_P, divisor=shape.top_k, activation=shape.activation)

    def run() -> None:
        grouped_matmul_fp8(hidden, hidden_scale, layer.gate_up_EOI, layer.gate_up_scale, routed.counts_E, **gathered)
        grouped_matmul_fp8(middle, middle_scale, layer.down_EOI, layer.down_scale, routed.counts_E)

    return Timed(
        run,
        costs.products_work(shape, num_tokens=num_tokens, num_hit=routed.num_hit, format="fp8"),
        costs.products_bar(num_tokens, "fp8"),
        notes=(routed.note, "without biases"),
    )


def _step(chunks: Chunks, block_size: int = BLOCK_SIZE) -> tuple[dict[str, Any], int]:
    """Return a kernel's arguments for scattered blocks, and the number of blocks."""
    counts = [-(-context // block_size) for _, context in chunks]
    ids = torch.randperm(sum(counts), device=DEVICE, dtype=torch.int32)
    table = torch.zeros(len(chunks), max(counts), dtype=torch.int32, device=DEVICE)
    for chunk, own in enumerate(ids.split(counts)):
        table[chunk, : len(own)] = own
    step = {
        "block_table": table,
        "row_starts": torch.tensor([0, *[rows for rows, _ in chunks]], device=DEVICE).cumsum(0).int(),
        "context_lens": torch.tensor([context for _, context in chunks], dtype=torch.int32, device=DEVICE),
        "max_rows_per_chunk": max(rows for rows, _ in chunks),
        "max_context": table.shape[1] * block_size,
    }
    return step, sum(counts)


def attention_calls(
    shape: costs.AttentionShape, chunks: Chunks, block_size: int = BLOCK_SIZE
) -> dict[str, Callable[[], object]]:
    """Return one step by our kernels, as `OWN`, and by each library that supports it, on the same caches."""
    arguments, num_blocks = _step(chunks, block_size)
    query_TNH = _random(sum(rows for rows, _ in chunks), shape.num_heads, shape.head_size)
    keys, values = (_random(num_blocks, shape.num_kv_heads, block_size, shape.head_size) for _ in range(2))
    sinks_N = torch.randn(shape.num_heads, device=DEVICE) if shape.has_sinks else None
    problem, step = problem_of(shape, query_TNH.dtype, block_size), step_of(chunks, arguments["block_table"])
    options: dict[str, Any] = dict(scale=problem.shape.scale, window=shape.window, sinks_N=sinks_N)
    calls: dict[str, Call] = {OWN: lambda: paged_attention(query_TNH, keys, values, **arguments, **options)}
    kind: StepKind = "decode" if arguments["max_rows_per_chunk"] == 1 else "chunks"
    for library in installed_libraries(torch.device(DEVICE)):
        if not library.why_unavailable(problem, kind):
            calls[library.label] = functools.partial(
                library.make_attend(problem, kind), query_TNH, KeyValueCache(keys, values), step, sinks_N
            )
    return calls


def _attention(shape: costs.AttentionShape, chunks: Chunks) -> Timed:
    batch, rows, context = len(chunks), chunks[0][0], chunks[0][1]
    seen = context if shape.window is None or rows > 1 else min(context, shape.window)
    query = _random(batch, shape.num_heads, rows, shape.head_size)
    keys, values = (_random(batch, shape.num_kv_heads, seen, shape.head_size) for _ in range(2))
    calls = attention_calls(shape, chunks)
    own = calls.pop(OWN)
    calls["torch SDPA"] = lambda: functional.scaled_dot_product_attention(
        query, keys, values, is_causal=rows > 1, enable_gqa=True
    )
    notes = ("torch's attention is without sinks, and in prefill without the window",) if shape.has_sinks else ()
    return Timed(own, costs.attention_work(shape, chunks), others=calls, notes=notes)


def _latent_attention(shape: LatentShape, chunks: Chunks) -> Timed:
    arguments, num_blocks = _step(chunks)
    size = shape.latent_size + shape.rotary_size
    batch, rows, context = len(chunks), chunks[0][0], chunks[0][1]
    query_TNP = _random(batch * rows, shape.num_heads, size)
    cache, dense = _random(num_blocks, BLOCK_SIZE, size), _random(batch, 1, context, size)
    dense_query = query_TNP.view(batch, rows, shape.num_heads, size).transpose(1, 2)
    options: dict[str, Any] = dict(scale=size**-0.5, latent_size=shape.latent_size)
    return Timed(
        lambda: latent_attention(query_TNP, cache, **arguments, **options),
        costs.latent_work(shape, chunks),
        others={
            "torch SDPA": lambda: functional.scaled_dot_product_attention(
                dense_query, dense, dense[..., : shape.latent_size], enable_gqa=True
            )
        },
        notes=("torch's attention is without the causal mask",) if rows > 1 else (),
    )


def _bytes(*values: float) -> Work:
    return Work(costs.RESULT_SIZE * sum(values))


def _norm(num_rows: int) -> Timed:
    x, weight = _random(num_rows, WIDTH), _random(WIDTH)
    return Timed(
        lambda: rms_norm(x, weight, 1e-5),
        _bytes(2 * x.numel(), WIDTH),
        others={"torch": lambda: functional.rms_norm(x, (WIDTH,), weight, 1e-5)},
    )


def _add_norm(num_rows: int) -> Timed:
    x, update, weight = _random(num_rows, WIDTH), _random(num_rows, WIDTH), _random(WIDTH)
    return Timed(
        lambda: add_rms_norm(x, update, weight, 1e-5),
        _bytes(4 * x.numel(), WIDTH),
        others={"torch": lambda: functional.rms_norm(x + update, (WIDTH,), weight, 1e-5)},
    )


def _activation(num_rows: int) -> Timed:
    gate_up = _random(num_rows, 2 * EXPERT_WIDTH)
    return Timed(
        lambda: silu_multiply(gate_up),
        _bytes(1.5 * gate_up.numel()),
        others={"torch": lambda: functional.silu(gate_up[:, :EXPERT_WIDTH]) * gate_up[:, EXPERT_WIDTH:]},
    )


def _rotary(num_tokens: int) -> Timed:
    shape = costs.ATTENTION_SHAPES["Mixtral-8x7B"]
    fused = _random(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_size)
    query, key, value = fused.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    angles = torch.rand(num_tokens, shape.head_size // 2, device=DEVICE)
    cosines, sines = angles.cos(), angles.sin()
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    keys, values = (_random(num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_size) for _ in range(2))
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=DEVICE)[:num_tokens]
    return Timed(
        lambda: rotary_with_cache_write(query, key, value, cosines, sines, False, keys, values, slots),
        _bytes(2 * fused.numel(), 4 * angles.numel()) + Work(8 * num_tokens),
    )


def _quantize(num_rows: int) -> Timed:
    x = _random(num_rows, LARGE_WIDTH)
    return Timed(lambda: quantize_blocks(x), Work(3 * x.numel() + 4 * num_rows * -(-LARGE_WIDTH // 128)))


def _route(num_tokens: int) -> Timed:
    logits, correction = torch.randn(num_tokens, 256, device=DEVICE), torch.randn(256, device=DEVICE)
    return Timed(
        lambda: route(logits, correction, top_k=8, **DEEPSEEK_V3), Work(4 * logits.numel() + 12 * 8 * num_tokens)
    )


def _weigh(num_rows: int) -> Timed:
    """A quarter of the rows; the others are spare."""
    rows, weights = _random(4 * num_rows, LARGE_WIDTH), torch.rand(4 * num_rows, device=DEVICE)
    num_used = torch.tensor([num_rows], device=DEVICE)
    return Timed(
        lambda: weigh_rows(rows, weights, num_used),
        _bytes(2 * num_rows * LARGE_WIDTH) + Work(4 * num_rows),
        others={"torch, spare rows too": lambda: (rows * weights[:, None]).bfloat16()},
    )


ROW_ITEMS: dict[str, Callable[[int], Timed]] = {
    f"rms_norm, {WIDTH} wide": _norm,
    f"add_rms_norm, {WIDTH} wide": _add_norm,
    f"silu_multiply, {EXPERT_WIDTH} wide": _activation,
    "rotary_with_cache_write Mixtral-8x7B": _rotary,
    f"quantize_blocks, {LARGE_WIDTH} wide": _quantize,
    "route 8 of 256": _route,
    f"weigh_rows, {LARGE_WIDTH} wide": _weigh,
}


def _greedy(num_rows: int, width: int) -> Timed:
    logits = _random(num_rows, width, scale=3.0)
    return Timed(lambda: greedy_rows(logits), _bytes(logits.numel()), others={"torch": lambda: logits.max(dim=-1)})


def _draw(num_rows: int, width: int) -> Timed:
    """The work is that of one pass; `sample_rows` describes how many it makes."""
    scores = torch.randn(num_rows, width, device=DEVICE) * 3
    ones = torch.ones(num_rows, device=DEVICE)
    none = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
    numbers = torch.rand(num_rows, dtype=torch.float64, device=DEVICE)

    def run_torch() -> Tensor:
        ordered = scores.softmax(-1).sort(-1, descending=True)
        cumulative = ordered.values.cumsum(-1)
        kept = torch.where(cumulative - ordered.values < 0.9, ordered.values, 0.0)
        return ordered.indices.gather(1, (kept / torch.empty_like(kept).exponential_()).argmax(-1, keepdim=True))

    return Timed(
        lambda: sample_rows(scores, ones, none, ones * 0.9, ones * 0, numbers),
        Work(4 * scores.numel()),
        others={"torch": run_torch},
    )
