"""Cases of products in 16 bits, 8-bit blocks and MXFP4: of experts, of one weight, and of all experts of a layer."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moeserve.bench.gpu.check import (
    CODES_SLACK,
    FLOAT32_SLACK,
    Case,
    Operation,
    bytes_of,
    cases_of,
    crossed,
    in_float32,
)
from moeserve.bench.gpu.inputs import Source, dequantized, draw_routing, draw_rows, draw_weights
from moeserve.bench.limits import Work
from moeserve.errors import SettingsError
from moeserve.ops import pairs as pairs_ops
from moeserve.ops import products as products_ops
from moeserve.ops.backend import REFERENCE, TRITON, Backend
from moeserve.ops.measured import product_key
from moeserve.ops.pairs.interface import Keys
from moeserve.ops.products import GROUPED, SINGLE
from moeserve.ops.products.deep_gemm import why_unavailable, with_deep_gemm
from moeserve.ops.products.interface import Gather, GroupedProduct, InputChunks, OpenWeights, Product, RowGroups
from moeserve.ops.products.weight_blocks import num_blocks
from moeserve.ops.rows.activations import Activation, ClampedSwiGLU, SwiGLU
from moeserve.ops.rows.interface import Float8Rows

# E experts, K experts per token, T tokens, P pairs, R rows, S slots of a weight, D model width, I inputs, O outputs,
# C columns, e weights

Format = Literal["bf16", "fp8", "mxfp4"]


class MoEShape(NamedTuple):
    """The routed experts of one layer."""

    num_experts: int
    hidden: int
    width: int  # width of an expert
    top_k: int
    activation: Activation = SwiGLU()
    has_bias: bool = False


# Tensor cores of sm_90 keep 13 bits below the largest of 32 products of 8-bit floats.
SLACKS = {"bf16": FLOAT32_SLACK, "fp8": 2.0**-6, "mxfp4": FLOAT32_SLACK}
GPT_OSS = ClampedSwiGLU(alpha=1.702, limit=7.0), True
MODELS = {
    "Qwen3-30B-A3B": MoEShape(128, 2048, 768, 8),
    "Mixtral-8x7B": MoEShape(8, 4096, 14336, 2),
    "DeepSeek-V2-Lite": MoEShape(64, 2048, 1408, 6),
    "gpt-oss-20b": MoEShape(32, 2880, 2880, 4, *GPT_OSS),
}
V3_SHARE = "DeepSeek-V3, 32 of 256"  # the experts of one of 8 GPUs
SHAPES = MODELS | {
    V3_SHARE: MoEShape(32, 7168, 2048, 8),
    "small": MoEShape(3, 48, 24, 2),
    "small, clamped": MoEShape(5, 33, 20, 3, *GPT_OSS),
    "small blocks": MoEShape(2, 260, 136, 2),
    "small groups": MoEShape(3, 96, 64, 2, *GPT_OSS),
}
EXPECTED_ROWS = (None, 1, 10**6)  # select different tiles, which must not change a byte
NUM_TOKENS = (1, 16, 128, 4096)
PARTS = ("gate, up", "down")


def product_of(
    kind: products_ops.Kind[products_ops.AnyProduct], backend: Backend, weights: OpenWeights
) -> products_ops.AnyProduct:
    return kind.make(backend, in_float32(dequantized(weights)) if backend is REFERENCE else weights)


def deep_gemm_kernels(source: Source, *weights: OpenWeights) -> dict[str, Backend]:
    """Return the table with DeepGEMM's products by its name; an empty dict if it cannot be used."""
    if source.device.type != "cuda" or any(map(why_unavailable, weights)):
        return {}
    try:
        return {"deep_gemm": with_deep_gemm(TRITON, source.device, source.dtype)}
    except SettingsError as error:
        print(f"deep_gemm is left out: {error}", flush=True)
        return {}


def draw_experts(source: Source, shape: MoEShape, format: Format, part: str) -> OpenWeights:
    is_fp8, is_gated = format == "fp8", part == "gate, up"
    sizes = (2 * shape.width, shape.hidden) if is_gated else (shape.hidden, shape.width)
    options: Any = dict(is_fp8=is_fp8, is_mxfp4=format == "mxfp4", has_bias=shape.has_bias and not is_fp8)
    return draw_weights(source, shape.num_experts, *sizes, activation=shape.activation if is_gated else None, **options)


def multiply_rows_and_slots(source: Source, format: Format, name: str, part: str, rows_of_expert: int) -> Case:
    """Multiply gathered rows by gates and ups, or packed rows, with the tiles for several expected numbers of rows.

    Slots have the same numbers of rows. Some tokens have an expert on another rank, whose pairs are -1 in the order.
    """
    shape, weights = SHAPES[name], draw_experts(source, SHAPES[name], format, part)
    num_tokens, num_known = max(1, shape.num_experts * rows_of_expert // shape.top_k), shape.num_experts + 1
    experts_TK, _ = draw_routing(source, num_tokens, num_known, shape.top_k)
    order_P, counts_E = pairs_ops.make(REFERENCE).order(experts_TK, Keys(shape.num_experts, num_known=num_known))
    gather = Gather(order_P, shape.top_k) if part == "gate, up" else None
    num_rows, num_slots = len(order_P) if gather is None else num_tokens, int(counts_E.max()) + 1
    hints = EXPECTED_ROWS if source.device.type == "cuda" else EXPECTED_ROWS[:1]  # on a CPU, sums are numpy's
    rows_RI, slots_RI = (
        draw_rows(source, number, weights.num_inputs, is_fp8=format == "fp8")
        for number in (num_rows, shape.num_experts * num_slots)
    )
    inputs = rows_RI, slots_RI.unflatten(0, (-1, num_slots)), counts_E, gather

    def call(
        product: GroupedProduct, rows_RI: Tensor, slots_eSI: Tensor, counts_e: Tensor, gather: Gather | None
    ) -> Any:
        results = [product.multiply(rows_RI, RowGroups(counts_e, True, hint), gather) for hint in hints]
        return results, product.multiply_slots(slots_eSI, RowGroups(counts_e, expected_rows=num_rows))

    def defined(results: Any, rows_RI: Tensor, slots_eSI: Tensor, counts_e: Tensor, gather: Gather | None) -> Any:
        first, *others = (each[: int(counts_e.sum())] for each in results[0])
        are_equal = first.dtype == torch.float32 or all(torch.equal(first, each) for each in others)
        used = [slots_SC[:count] for slots_SC, count in zip(results[1], counts_e.tolist(), strict=True)]
        return first, torch.tensor(are_equal), torch.cat(used)

    return Case(lambda backend: partial(call, product_of(GROUPED, backend, weights)), inputs, defined, SLACKS[format])


@cases_of(
    "products of one weight",
    [("bf16", 24, 20, 3, True), ("fp8", 130, 260, 3, False), ("fp8", 272, 260, 3, True)],
    crossed(["bf16", "fp8"], [1536], [7168], [1, 64, 500], [False, True]),
    # DeepSeek-V3's compressed queries, and the gates and ups of shared experts
    crossed(["fp8"], [1536], [4096], [64, 8192], [False]) + crossed(["fp8"], [28672], [4096], [64, 8192], [True]),
)
def multiply(source: Source, format: Format, num_outputs: int, num_inputs: int, num_rows: int, is_gated: bool) -> Case:
    """Multiply by one weight. An 8-bit weight with an activation feeds another product of blocks.

    Programs split the inputs of an 8-bit weight with few tiles (split-K).
    """
    is_fp8, activation = format == "fp8", SwiGLU() if is_gated else None
    weights = draw_weights(source, 1, num_outputs, num_inputs, is_fp8=is_fp8, activation=activation)
    weights = dataclasses.replace(weights, feeds_blocks=is_fp8 and is_gated)
    rows: Any = source.normal(num_rows, num_inputs)
    if is_fp8:
        scales = source.uniform(num_rows, num_blocks(num_inputs))
        rows = Float8Rows(source.codes(num_rows, num_inputs), scales, source.dtype)
    num_bytes = bytes_of((weights, rows)) + 2 * num_rows * num_outputs // weights.num_parts
    return Case(
        lambda backend: product_of(SINGLE, backend, weights).multiply,
        (rows,),
        slack=CODES_SLACK if weights.feeds_blocks else SLACKS[format],
        libraries=deep_gemm_kernels(source, weights),
        work=Work(num_bytes, 2.0 * num_rows * num_outputs * num_inputs),
        is_fp8=is_fp8,
        choices=((product_key(weights), num_rows),) if is_fp8 else (),
    )


@cases_of(
    "products of one weight",
    [(40, 70, 3, 70), (33, 150, 2, 20)],  # one chunk, and eight
    crossed([1536], [7168], [1, 65, 500], [7168, 896, 1024]),
    crossed([5120], [4096], [64, 8192], [4096, 512]),
)
def multiply_in_order(source: Source, num_outputs: int, num_inputs: int, num_rows: int, chunk_inputs: int) -> Case:
    """Multiply by one weight in chunks of inputs. The bytes of a row must not depend on the number of rows."""
    weights = draw_weights(source, 1, num_outputs, num_inputs, has_bias=True)
    weights = dataclasses.replace(weights, chunks=InputChunks(chunk_inputs, keeps_float32=False))

    def defined(results: tuple[Tensor, Tensor], *_: Any) -> Any:
        output_TO, last_1O = results
        return output_TO, torch.tensor(last_1O.dtype == torch.float32 or torch.equal(output_TO[-1:], last_1O))

    def call(product: Product, rows_TI: Tensor) -> Any:
        return product.multiply(rows_TI), product.multiply(rows_TI[-1:])

    return Case(
        lambda backend: partial(call, product_of(SINGLE, backend, weights)),
        (source.normal(num_rows, num_inputs),),
        defined,
        is_ordered=True,
        work=Work(2 * bytes_of(weights), 2.0 * (num_rows + 1) * num_outputs * num_inputs),
    )


@functools.lru_cache(maxsize=1)
def draw_layer(source: Source, format: Format, name: str) -> tuple[OpenWeights, OpenWeights]:
    """Draw a layer's experts, which are freed when experts of another shape are drawn."""
    gate_up, down = (draw_experts(source, SHAPES[name], format, part) for part in PARTS)
    return dataclasses.replace(gate_up, feeds_blocks=format == "fp8"), down


@cases_of(
    "experts",
    [("bf16", "small", 1), ("fp8", "small blocks", 2), ("bf16", "small, clamped", 4), ("mxfp4", "small groups", 2)],
    [*crossed(["bf16", "fp8"], ["Qwen3-30B-A3B"], [128]), ("mxfp4", "gpt-oss-20b", 128)],
    crossed(["bf16", "fp8"], ["Qwen3-30B-A3B", "Mixtral-8x7B"], NUM_TOKENS)
    + crossed(["mxfp4"], ["gpt-oss-20b"], NUM_TOKENS)
    + crossed(["bf16", "fp8"], ["DeepSeek-V2-Lite", "gpt-oss-20b"], NUM_TOKENS),
)
def experts(source: Source, format: Format, name: str, num_tokens: int) -> Case:
    """Run a layer's experts after the router: order of pairs, both products, and weighted sum.

    The work is to read each expert with rows and each token once, and to write the sums.
    """
    shape, weights, is_fp8 = SHAPES[name], draw_layer(source, format, name), format == "fp8"
    experts_TK, weights_TK = draw_routing(source, num_tokens, shape.num_experts, shape.top_k)
    hidden_TD, share_hit = source.normal(num_tokens, shape.hidden), len(experts_TK.unique()) / shape.num_experts
    operations = 6.0 * num_tokens * shape.top_k * shape.hidden * shape.width
    rate = "operations_per_second", 1000e12 if is_fp8 else 500e12

    def call(
        pairs: Any, made: list[GroupedProduct], hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        order_P, counts_E = pairs.order(experts_TK, Keys(shape.num_experts))
        groups = RowGroups(counts_E, has_spare_rows=True)
        output = made[1].multiply(made[0].multiply(hidden_TD, groups, Gather(order_P, shape.top_k)), groups)
        return pairs.weighted_sum(output, order_P, weights_TK, hidden_TD.dtype)

    return Case(
        lambda backend: partial(
            call, pairs_ops.make(backend), [product_of(GROUPED, backend, each) for each in weights]
        ),
        (hidden_TD, experts_TK, weights_TK),
        slack=2 * CODES_SLACK if is_fp8 else FLOAT32_SLACK,  # rows and gates are rounded to 8 bits
        libraries=deep_gemm_kernels(source, *weights),
        work=Work(share_hit * bytes_of(weights) + 2 * hidden_TD.nbytes, operations),
        is_fp8=is_fp8,
        bar=rate if num_tokens > 128 else ("fraction_of_memory_bound", 0.70 if num_tokens <= 16 else 0.85),
        choices=tuple((product_key(each), num_tokens * shape.top_k) for each in weights if is_fp8),
    )


def products(format: Format, name: str, small: str) -> Operation:
    """Return the products of one model's experts. Several processes share the compilation of the models' kernels."""
    check, large = f"products, {format}, {name}", crossed([format], [name], PARTS, (0, 12, 32, 128))
    return Operation(multiply_rows_and_slots, check, crossed([format], [small], PARTS, (0, 6)), large)


OPERATIONS = [
    *(products("bf16", name, "small, clamped" if name == "gpt-oss-20b" else "small") for name in MODELS),
    *(products("fp8", name, "small blocks") for name in (*MODELS, V3_SHARE)),
    products("mxfp4", "gpt-oss-20b", "small groups"),
    *(multiply, multiply_in_order, experts),
]
