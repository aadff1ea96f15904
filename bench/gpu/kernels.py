"""Times of kernels under graph replay, as fractions of what this GPU was measured to do, beside torch and transformers.

- a layer's experts, at the shapes of published models, with routing at random: *products* are the
  two grouped products, with the gather and the activation in them; *experts* add the order of pairs before and the
  weighted sum after them. Beside products: `torch.nn.functional.grouped_mm` (rows gathered, a product, SiLU and the
  multiplication, a product). Beside experts: transformers' class of Mixtral's, in its eager form. All are on the same
  weights; biases and other activations than Mixtral's are left out of torch's and transformers'.
- attention, beside torch's `scaled_dot_product_attention` on as many keys and values, contiguous and without pages, and
  grouped-query attention also beside FlashInfer's and torch's varlen on the same pages, where they can be used.
- norms, rotary embedding, activations, quantisation, routing and the choice of tokens, in bytes per second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.bench.gpu import costs
from moeserve.bench.gpu.attention_peers import installed_peers, problem_of, step_of
from moeserve.bench.gpu.costs import Bar, GpuLimits, Work
from moeserve.bench.gpu.limits import ColdTimer
from moeserve.bench.gpu.shapes import (
    ATTENTION_SHAPES,
    LATENT_SHAPES,
    MOE_SHAPES,
    VOCAB_SIZES,
    AttentionShape,
    LatentShape,
    MoEShape,
)
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

# T tokens, K experts per token, P pairs, D model width, F expert width, E experts, B blocks of 128 inputs, N query
# heads, G key-value heads, H head size

NUM_TOKENS = (1, 16, 128, 4096, 16384)
BLOCK_SIZE = 16
DECODE_BATCHES = ((1, 4096), (16, 4096), (64, 512), (128, 4096))  # requests, context of each
PREFILL_ROWS = 4096
LATENT_ROWS = 64  # of a chunk that is attended to without expanding keys and values
ROW_COUNTS = (64, 8192)
WEIGHT_SCALE = 0.02
DEVICE = "cuda"


@dataclass(frozen=True)
class Timed:
    """One thing to measure: the call, what it must take, and others that do the same."""

    call: Callable[[], object]
    work: Work
    bar: Bar | None = None
    peers: dict[str, Callable[[], object]] | None = None  # a graph holds these
    eager_peers: dict[str, Callable[[], object]] | None = None  # and these not
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """What is measured together, made when its turn comes."""

    name: str
    make: Callable[[], Timed]


@torch.inference_mode()
def measure(item: Item, timer: ColdTimer, limits: GpuLimits) -> dict[str, Any]:
    """A row. What a peer cannot do is told; what our own cannot do fails."""
    timed = item.make()
    row: dict[str, Any] = figures(timer.seconds(timed.call), timed.work, limits)
    row["peers"] = {}
    for peers, measure_peer in (
        (timed.peers, timer.seconds),
        (timed.eager_peers, timer.seconds_without_graph),
    ):
        for name, call in (peers or {}).items():
            try:
                seconds = measure_peer(call)
                row["peers"][name] = {"seconds": seconds, "times_as_fast": seconds / row["seconds"]}
            except Exception as error:  # one that cannot do this shape, or takes too much memory
                row["peers"][name] = {"error": f"{type(error).__name__}: {error}"[:300]}
                torch.cuda.empty_cache()
    if timed.bar is not None:
        row["bar"] = timed.bar.verdict(row)
    if timed.notes:
        row["notes"] = list(timed.notes)
    return {"name": item.name, "status": "told"} | row


def figures(seconds: float, work: Work, limits: GpuLimits) -> dict[str, Any]:
    """What a time says beside the limits."""
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
    """All, what matters most first. Weights of one shape are made once, and let go of when the next shape is asked for:
    not before, so items are to be made as they come.
    """
    for name, shape in MOE_SHAPES.items():
        layer = functools.cache(functools.partial(ExpertWeights, shape))
        for num_tokens in NUM_TOKENS:
            yield Item(f"products bf16 {name}, {num_tokens} tokens", functools.partial(_products, layer, num_tokens))
            yield Item(f"experts bf16 {name}, {num_tokens} tokens", functools.partial(_experts, layer, num_tokens))
        layer.cache_clear()
    for name, shape in MOE_SHAPES.items():
        layer_8 = functools.cache(functools.partial(Fp8ExpertWeights, shape))
        for num_tokens in NUM_TOKENS:
            make = functools.partial(_products_fp8, layer_8, num_tokens)
            yield Item(f"products fp8 {name}, {num_tokens} tokens", make)
        layer_8.cache_clear()
    for name, attention in ATTENTION_SHAPES.items():
        for batch, context in DECODE_BATCHES:
            make = functools.partial(_attention, attention, [(1, context)] * batch)
            yield Item(f"attention decode {name}, {batch} x {context}", make)
        make = functools.partial(_attention, attention, [(PREFILL_ROWS, PREFILL_ROWS)])
        yield Item(f"attention prefill {name}, {PREFILL_ROWS}", make)
    for name, latent in LATENT_SHAPES.items():
        for batch, context in DECODE_BATCHES:
            make = functools.partial(_latent_attention, latent, [(1, context)] * batch)
            yield Item(f"latent attention decode {name}, {batch} x {context}", make)
        make = functools.partial(_latent_attention, latent, [(LATENT_ROWS, PREFILL_ROWS)] * 4)
        yield Item(f"latent attention, 4 chunks of {LATENT_ROWS} rows of {PREFILL_ROWS} {name}", make)
    for num_rows in ROW_COUNTS:
        yield Item(f"rms_norm, {num_rows} x 4096", functools.partial(_norm, num_rows, 4096, adds=False))
        yield Item(f"add_rms_norm, {num_rows} x 4096", functools.partial(_norm, num_rows, 4096, adds=True))
        yield Item(f"silu_multiply, {num_rows} x 14336", functools.partial(_activation, num_rows, 14336))
        shape_ = ATTENTION_SHAPES["Mixtral-8x7B"]
        yield Item(f"rotary_with_cache_write Mixtral-8x7B, {num_rows}", functools.partial(_rotary, shape_, num_rows))
        yield Item(f"quantize_blocks, {num_rows} x 7168", functools.partial(_quantize, num_rows, 7168))
        yield Item(f"route 8 of 256, {num_rows} tokens", functools.partial(_route, num_rows, 256, 8))
        yield Item(f"weigh_rows, {num_rows} of {4 * num_rows} x 7168", functools.partial(_weigh, num_rows, 7168))
    for name, width in VOCAB_SIZES.items():
        yield Item(f"greedy_rows {name}, 64 x {width}", functools.partial(_greedy, 64, width))
        yield Item(f"sample_rows, top_p 0.9 {name}, 64 x {width}", functools.partial(_draw, 64, width))


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(std=scale)


def _random_codes(*shape: int) -> Tensor:
    """Magnitudes below 2: without the exponent's highest bit, all are numbers."""
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
    """The same in blocks of 8-bit floats."""

    def __init__(self, shape: MoEShape) -> None:
        self.shape = shape
        self.gate_up_EOI = _random_codes(shape.num_experts, 2 * shape.width, shape.hidden)
        self.down_EOI = _random_codes(shape.num_experts, shape.hidden, shape.width)
        blocks_D, blocks_F = -(-shape.hidden // 128), -(-shape.width // 128)
        self.gate_up_scale = torch.rand(shape.num_experts, 2 * blocks_F, blocks_D, device=DEVICE)
        self.down_scale = torch.rand(shape.num_experts, blocks_D, blocks_F, device=DEVICE)


@dataclass(frozen=True)
class Routed:
    """Tokens with experts drawn at random."""

    experts_TK: Tensor
    weights_TK: Tensor
    order_P: Tensor
    counts_E: Tensor

    @property
    def num_hit(self) -> int:
        return int((self.counts_E > 0).sum())


def _routed(shape: MoEShape, num_tokens: int) -> Routed:
    drawn = torch.rand(num_tokens, shape.num_experts, device=DEVICE).topk(shape.top_k, dim=1)
    order, counts = order_pairs(drawn.indices, 0, shape.num_experts)
    return Routed(drawn.indices, drawn.values / drawn.values.sum(1, keepdim=True), order, counts)


def _run_products(layer: ExpertWeights, hidden_TD: Tensor, order_P: Tensor, counts_E: Tensor) -> Tensor:
    shape = layer.shape
    middle = grouped_matmul(
        hidden_TD,
        layer.gate_up_EOI,
        counts_E,
        indices_R=order_P,
        divisor=shape.top_k,
        bias_eO=layer.gate_up_bias,
        activation=shape.activation,
    )
    return grouped_matmul(middle, layer.down_EOI, counts_E, bias_eO=layer.down_bias)


def _products(make_layer: Callable[[], ExpertWeights], num_tokens: int) -> Timed:
    layer = make_layer()
    shape = layer.shape
    hidden_TD, routed = _random(num_tokens, shape.hidden), _routed(shape, num_tokens)
    peers: dict[str, Callable[[], object]] = {}
    if grouped_mm := getattr(functional, "grouped_mm", None):
        source_P = routed.order_P // shape.top_k
        offsets_E = routed.counts_E.cumsum(0).int()

        def run_torch() -> Tensor:
            gate_up = grouped_mm(hidden_TD[source_P], layer.gate_up_EOI.transpose(1, 2), offs=offsets_E)
            gate, up = gate_up.chunk(2, dim=-1)
            result: Tensor = grouped_mm(functional.silu(gate) * up, layer.down_EOI.transpose(1, 2), offs=offsets_E)
            return result

        peers["torch grouped_mm"] = run_torch
    return Timed(
        lambda: _run_products(layer, hidden_TD, routed.order_P, routed.counts_E),
        costs.products_work(shape, num_tokens=num_tokens, num_hit=routed.num_hit, format="bf16"),
        costs.products_bar(num_tokens, "bf16"),
        peers,
        notes=(f"{routed.num_hit} of {shape.num_experts} experts have rows",),
    )


def _experts(make_layer: Callable[[], ExpertWeights], num_tokens: int) -> Timed:
    layer = make_layer()
    shape = layer.shape
    hidden_TD, routed = _random(num_tokens, shape.hidden), _routed(shape, num_tokens)

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
        eager_peers={"transformers": lambda: module(hidden_TD, routed.experts_TK, weights_TK)},
        notes=(f"{routed.num_hit} of {shape.num_experts} experts have rows",),
    )


def _transformers_experts(layer: ExpertWeights) -> Any:
    """Mixtral's, over the same memory."""
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
    """Both from 8-bit rows: those between them are quantised once, beforehand, and have no part in the time."""
    layer = make_layer()
    shape = layer.shape
    routed = _routed(shape, num_tokens)
    hidden_TD, hidden_scale_TB = quantize_blocks(_random(num_tokens, shape.hidden))
    middle_PF, middle_scale_PB = quantize_blocks(_random(num_tokens * shape.top_k, shape.width))

    def run() -> None:
        grouped_matmul_fp8(
            hidden_TD,
            hidden_scale_TB,
            layer.gate_up_EOI,
            layer.gate_up_scale,
            routed.counts_E,
            indices_R=routed.order_P,
            divisor=shape.top_k,
            activation=shape.activation,
        )
        grouped_matmul_fp8(middle_PF, middle_scale_PB, layer.down_EOI, layer.down_scale, routed.counts_E)

    return Timed(
        run,
        costs.products_work(shape, num_tokens=num_tokens, num_hit=routed.num_hit, format="fp8"),
        costs.products_bar(num_tokens, "fp8"),
        notes=(f"{routed.num_hit} of {shape.num_experts} experts have rows", "without biases"),
    )


def _tables(chunks: Sequence[tuple[int, int]], block_size: int = BLOCK_SIZE) -> tuple[Tensor, Tensor, Tensor, int]:
    """Block table of scattered blocks, row starts, context lengths, and the number of blocks."""
    counts = [-(-context // block_size) for _, context in chunks]
    ids = torch.randperm(sum(counts), device=DEVICE, dtype=torch.int32)
    table = torch.zeros(len(chunks), max(counts), dtype=torch.int32, device=DEVICE)
    for chunk, own in enumerate(ids.split(counts)):
        table[chunk, : len(own)] = own
    starts = torch.tensor([0, *[rows for rows, _ in chunks]], device=DEVICE).cumsum(0).int()
    contexts = torch.tensor([context for _, context in chunks], dtype=torch.int32, device=DEVICE)
    return table, starts, contexts, sum(counts)


def attention_calls(
    shape: AttentionShape, chunks: Sequence[tuple[int, int]], block_size: int = BLOCK_SIZE
) -> dict[str, Callable[[], object]]:
    """One step by our kernels, under `OWN`, and by the other libraries that can, on the same caches."""
    table, starts, contexts, num_blocks = _tables(chunks, block_size)
    query_TNH = _random(sum(rows for rows, _ in chunks), shape.num_heads, shape.head_size)
    keys, values = (_random(num_blocks, shape.num_kv_heads, block_size, shape.head_size) for _ in range(2))
    sinks_N = torch.randn(shape.num_heads, device=DEVICE) if shape.has_sinks else None
    most_rows = max(rows for rows, _ in chunks)
    calls: dict[str, Callable[[], object]] = {
        OWN: lambda: paged_attention(
            query_TNH,
            keys,
            values,
            table,
            starts,
            contexts,
            scale=shape.head_size**-0.5,
            window=shape.window,
            sinks_N=sinks_N,
            max_rows_per_chunk=most_rows,
            max_context=table.shape[1] * block_size,
        )
    }
    problem, step = problem_of(shape, query_TNH.dtype, block_size), step_of(chunks, table)
    kind: StepKind = "decode" if most_rows == 1 else "chunks"
    for peer in installed_peers(torch.device(DEVICE)):
        if not peer.why_unavailable(problem, kind):
            attend = peer.make_attend(problem, kind)
            calls[peer.label] = functools.partial(attend, query_TNH, KeyValueCache(keys, values), step, sinks_N)
    return calls


def _attention(shape: AttentionShape, chunks: list[tuple[int, int]]) -> Timed:
    batch, rows, context = len(chunks), chunks[0][0], chunks[0][1]
    seen = context if shape.window is None or rows > 1 else min(context, shape.window)
    dense_query = _random(batch, shape.num_heads, rows, shape.head_size)
    dense_keys, dense_values = (_random(batch, shape.num_kv_heads, seen, shape.head_size) for _ in range(2))
    notes: tuple[str, ...] = ()
    if shape.has_sinks:
        notes = ("torch computes no sinks" + (" and no window" if rows > 1 else ", and only what the window shows"),)
    calls = attention_calls(shape, chunks)
    own = calls.pop(OWN)
    calls["torch SDPA"] = lambda: functional.scaled_dot_product_attention(
        dense_query, dense_keys, dense_values, is_causal=rows > 1, enable_gqa=True
    )
    return Timed(own, costs.attention_work(shape, chunks), peers=calls, notes=notes)


def _latent_attention(shape: LatentShape, chunks: list[tuple[int, int]]) -> Timed:
    table, starts, contexts, num_blocks = _tables(chunks)
    size = shape.latent_size + shape.rotary_size
    batch, rows, context = len(chunks), chunks[0][0], chunks[0][1]
    query_TNP = _random(batch * rows, shape.num_heads, size)
    cache = _random(num_blocks, BLOCK_SIZE, size)
    dense_query = query_TNP.view(batch, rows, shape.num_heads, size).transpose(1, 2)
    dense = _random(batch, 1, context, size)
    return Timed(
        lambda: latent_attention(
            query_TNP,
            cache,
            table,
            starts,
            contexts,
            scale=size**-0.5,
            latent_size=shape.latent_size,
            max_rows_per_chunk=rows,
            max_context=table.shape[1] * BLOCK_SIZE,
        ),
        costs.latent_work(shape, chunks),
        peers={
            "torch SDPA": lambda: functional.scaled_dot_product_attention(
                dense_query, dense, dense[..., : shape.latent_size], enable_gqa=True
            )
        },
        notes=("torch attends to the whole context from each row",) if rows > 1 else (),
    )


def _norm(num_rows: int, width: int, *, adds: bool) -> Timed:
    x, update, weight = _random(num_rows, width), _random(num_rows, width), _random(width)
    if adds:
        return Timed(
            lambda: add_rms_norm(x, update, weight, 1e-5),
            costs.norm_work(num_rows, width, adds=True),
            peers={"torch": lambda: functional.rms_norm(x + update, (width,), weight, 1e-5)},
        )
    return Timed(
        lambda: rms_norm(x, weight, 1e-5),
        costs.norm_work(num_rows, width, adds=False),
        peers={"torch": lambda: functional.rms_norm(x, (width,), weight, 1e-5)},
    )


def _activation(num_rows: int, width: int) -> Timed:
    gate_up = _random(num_rows, 2 * width)
    return Timed(
        lambda: silu_multiply(gate_up),
        costs.activation_work(num_rows, width),
        peers={"torch": lambda: functional.silu(gate_up[:, :width]) * gate_up[:, width:]},
    )


def _rotary(shape: AttentionShape, num_tokens: int) -> Timed:
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    fused = _random(num_tokens, num_heads, shape.head_size)
    query, key, value = fused.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    angles = torch.rand(num_tokens, shape.head_size // 2, device=DEVICE)
    cosines, sines = angles.cos(), angles.sin()
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    keys, values = (_random(num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_size) for _ in range(2))
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=DEVICE)[:num_tokens]
    return Timed(
        lambda: rotary_with_cache_write(query, key, value, cosines, sines, False, keys, values, slots),
        costs.rotary_work(shape, num_tokens),
    )


def _quantize(num_rows: int, width: int) -> Timed:
    x = _random(num_rows, width)
    return Timed(lambda: quantize_blocks(x), costs.quantize_work(num_rows, width))


def _route(num_tokens: int, num_experts: int, top_k: int) -> Timed:
    logits = torch.randn(num_tokens, num_experts, device=DEVICE)
    correction = torch.randn(num_experts, device=DEVICE)
    rules: dict[str, Any] = dict(
        scoring="sigmoid", num_groups=8, num_chosen_groups=4, experts_rating_group=2, is_normalized=True, scale=2.5
    )
    return Timed(
        lambda: route(logits, correction, top_k=top_k, **rules), costs.route_work(num_tokens, num_experts, top_k)
    )


def _weigh(num_rows: int, width: int) -> Timed:
    """Of four times as many rows: the others are spare."""
    rows, weights = _random(4 * num_rows, width), torch.rand(4 * num_rows, device=DEVICE)
    num_counted = torch.tensor([num_rows], device=DEVICE)
    return Timed(
        lambda: weigh_rows(rows, weights, num_counted),
        costs.weigh_work(num_rows, width),
        peers={"torch, spare rows too": lambda: (rows * weights[:, None]).bfloat16()},
    )


def _greedy(num_rows: int, width: int) -> Timed:
    logits = _random(num_rows, width, scale=3.0)
    return Timed(
        lambda: greedy_rows(logits), costs.greedy_work(num_rows, width), peers={"torch": lambda: logits.max(dim=-1)}
    )


def _draw(num_rows: int, width: int) -> Timed:
    """The bytes are those of one pass: see `sample_rows` for how many there are."""
    scores = torch.randn(num_rows, width, device=DEVICE) * 3
    ones = torch.ones(num_rows, device=DEVICE)
    none = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
    uniform = torch.rand(num_rows, dtype=torch.float64, device=DEVICE)

    def run_torch() -> Tensor:
        ordered = scores.softmax(-1).sort(-1, descending=True)
        cumulative = ordered.values.cumsum(-1)
        kept = torch.where(cumulative - ordered.values < 0.9, ordered.values, 0.0)
        return ordered.indices.gather(1, (kept / torch.empty_like(kept).exponential_()).argmax(-1, keepdim=True))

    return Timed(
        lambda: sample_rows(scores, ones, none, ones * 0.9, ones * 0, uniform),
        costs.draw_work(num_rows, width),
        peers={"torch": run_torch},
    )
