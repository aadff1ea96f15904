"""Cases of products in 16 bits, 8-bit blocks and MXFP4: of experts, of one weight, and of all experts of a layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.bench.gpu.check import CODES_SLACK, FLOAT32_SLACK, FP8_SLACK, Call, Case, Operation, in_float32, in_order
from moeserve.bench.gpu.costs import (
    MOE_SHAPES,
    SCALE_BLOCK,
    Format,
    MoEShape,
    Work,
    experts_bar,
    experts_work,
)
from moeserve.bench.gpu.inputs import Source, dequantized, draw_routed, draw_rows, draw_weights
from moeserve.bench.gpu.layer_cases import crossed
from moeserve.bench.gpu.libraries import deep_gemm_products, sglang_experts
from moeserve.ops.interfaces import (
    ClampedSwiGLU,
    Float8Rows,
    Gather,
    InputChunks,
    Kernels,
    Keys,
    OpenWeights,
    Product,
    SwiGLU,
)
from moeserve.ops.libraries.measured import product_key
from moeserve.ops.triton.table import TRITON_KERNELS

# E experts, K experts per token, T tokens, P pairs, R rows, S slots of a weight, D model width, I inputs, e weights

CLAMPED = ClampedSwiGLU(alpha=1.702, limit=7.0)
SHAPES = MOE_SHAPES | {
    "DeepSeek-V3, 32 of 256": MoEShape(32, 7168, 2048, 8),  # the experts of one of 8 GPUs
    "small": MoEShape(3, 48, 24, 2),
    "small, clamped": MoEShape(5, 33, 20, 3, CLAMPED, has_bias=True),
    "small blocks": MoEShape(2, 260, 136, 2),
    "small groups": MoEShape(3, 96, 64, 2, CLAMPED, has_bias=True),
}
EXPECTED_ROWS = (None, 1, 10**6)  # select different tiles, which must not change a byte
NUM_TOKENS = (1, 16, 128, 4096, 16384)


def slack_of(format: Format) -> float:
    return FP8_SLACK if format == "fp8" else FLOAT32_SLACK


def product_of(weights: OpenWeights) -> Callable[[Kernels], Product]:
    def make(kernels: Kernels) -> Product:
        return kernels.make_product(in_float32(dequantized(weights)) if kernels.name == "torch" else weights)

    return make


def draw_experts(source: Source, shape: MoEShape, format: Format, part: str) -> OpenWeights:
    is_gated = part == "gate, up"
    sizes = (2 * shape.width, shape.hidden) if is_gated else (shape.hidden, shape.width)
    activation = shape.activation if is_gated else None
    is_fp8, is_mxfp4 = format == "fp8", format == "mxfp4"
    options: Any = dict(has_bias=shape.has_bias and not is_fp8, activation=activation)
    return draw_weights(source, shape.num_experts, *sizes, is_fp8=is_fp8, is_mxfp4=is_mxfp4, **options)


def multiply_rows(source: Source, format: Format, name: str, part: str, rows_of_expert: int) -> Case:
    """Multiply gathered rows by gates and ups, or packed rows, with the tiles for several expected numbers of rows."""
    shape = SHAPES[name]
    weights, is_gated, slack = draw_experts(source, shape, format, part), part == "gate, up", slack_of(format)
    num_tokens = max(2, shape.num_experts * rows_of_expert // shape.top_k) if rows_of_expert else 1
    routed = draw_routed(source, shape, num_tokens, num_others=1)
    gather = Gather(routed.order_P, shape.top_k) if is_gated else None
    num_rows = num_tokens if is_gated else len(routed.order_P)
    rows_RI = draw_rows(source, num_rows, weights.num_inputs, is_fp8=format == "fp8")
    hints = EXPECTED_ROWS if source.device.type == "cuda" else EXPECTED_ROWS[:1]  # on a CPU, sums are numpy's

    def call(product: Product, rows_RI: Tensor, counts_e: Tensor, gather: Gather | None) -> list[Tensor]:
        return [product.multiply_rows(rows_RI, counts_e, True, gather, hint) for hint in hints]

    def defined(results: list[Tensor], rows_RI: Tensor, counts_e: Tensor, gather: Gather | None) -> Any:
        first, *others = (each[: int(counts_e.sum())] for each in results)
        are_equal = first.dtype == torch.float32 or all(torch.equal(first, each) for each in others)
        return first, torch.tensor(are_equal)

    return Case(call, (rows_RI, routed.counts_E, gather), product_of(weights), defined, slack)


def multiply_slots(source: Source, format: Format, name: str, part: str, num_slots: int) -> Case:
    shape = SHAPES[name]
    weights = draw_experts(source, shape, format, part)
    counts_e = source.integers(0, num_slots + 1, shape.num_experts)
    counts_e[0], counts_e[-1] = num_slots, 0
    slots_RI = draw_rows(source, shape.num_experts * num_slots, weights.num_inputs, is_fp8=format == "fp8")

    def call(product: Product, slots_eSI: Tensor, counts_e: Tensor) -> Tensor:
        return product.multiply_slots(slots_eSI, counts_e, slots_eSI.shape[0] * slots_eSI.shape[1])

    def defined(output_eSC: Tensor, slots_eSI: Tensor, counts_e: Tensor) -> Tensor:
        return torch.cat([rows[:count] for rows, count in zip(output_eSC, counts_e.tolist(), strict=True)])

    inputs = slots_RI.unflatten(0, (-1, num_slots)), counts_e
    return Case(call, inputs, product_of(weights), defined, slack_of(format))


def multiply(
    source: Source, format: Format, num_outputs: int, num_inputs: int, num_rows: int, feeds_blocks: bool
) -> Case:
    """Multiply by one weight, with an activation if the results feed another product of blocks.

    Programs split the inputs of an 8-bit weight with few tiles (split-K).
    """
    is_fp8 = format == "fp8"
    activation = SwiGLU() if feeds_blocks else None
    weights = draw_weights(source, 1, num_outputs, num_inputs, is_fp8=is_fp8, activation=activation)
    weights = dataclasses.replace(weights, feeds_blocks=feeds_blocks)
    rows: Any = source.normal(num_rows, num_inputs)
    if is_fp8:
        scales = source.uniform(num_rows, -(-num_inputs // SCALE_BLOCK))
        rows = Float8Rows(source.codes(num_rows, num_inputs), scales, source.dtype)
    others: dict[str, Call] = {
        label: partial(product.multiply, rows) for label, (product,) in deep_gemm_products(source, weights).items()
    }
    num_bytes = weights.weight_eOI.nbytes + num_rows * (
        num_inputs * weights.weight_eOI.element_size() + 2 * num_outputs
    )
    return Case(
        lambda product, rows: product.multiply(rows),
        (rows,),
        product_of(weights),
        slack=CODES_SLACK if feeds_blocks else slack_of(format),
        others=others,
        work=Work(num_bytes, 2.0 * num_rows * num_outputs * num_inputs, format),
        choices=((product_key(weights), num_rows),) if is_fp8 else (),
    )


def multiply_in_order(source: Source, num_outputs: int, num_inputs: int, num_rows: int, chunk_inputs: int) -> Case:
    """Multiply by one weight in chunks of inputs. The bytes of a row must not depend on the number of rows."""
    chunks = InputChunks(chunk_inputs, keeps_float32=False)
    weights = draw_weights(source, 1, num_outputs, num_inputs, has_bias=True)
    weights = dataclasses.replace(weights, chunks=chunks)

    def call(product: Product, rows_TI: Tensor) -> tuple[Tensor, Tensor]:
        return product.multiply(rows_TI), product.multiply(rows_TI[-1:])

    def defined(results: tuple[Tensor, Tensor], *_: Any) -> Any:
        output_TO, last_1O = results
        return output_TO, torch.tensor(last_1O.dtype == torch.float32 or torch.equal(output_TO[-1:], last_1O))

    rows_TI = source.normal(num_rows, num_inputs)
    work = Work(2.0 * weights.weight_eOI.nbytes, 2.0 * (num_rows + 1) * num_outputs * num_inputs)
    return Case(call, (rows_TI,), lambda kernels: product_of(weights)(in_order(kernels)), defined, work=work)


@functools.lru_cache(maxsize=1)
def draw_layer(source: Source, format: Format, name: str) -> tuple[OpenWeights, OpenWeights]:
    """Draw a layer's experts, which are freed when experts of another shape are drawn."""
    gate_up, down = (draw_experts(source, SHAPES[name], format, part) for part in ("gate, up", "down"))
    return dataclasses.replace(gate_up, feeds_blocks=format == "fp8"), down


def experts(source: Source, format: Format, name: str, num_tokens: int) -> Case:
    """Run a layer's experts after the router: order of pairs, both products, and weighted sum.

    The comparisons are SGLang's kernels, and torch's `grouped_mm`, which does not order or sum and computes SwiGLU.
    """
    shape, weights = SHAPES[name], draw_layer(source, format, name)
    hidden_TD, routed = source.normal(num_tokens, shape.hidden), draw_routed(source, shape, num_tokens)
    inputs = hidden_TD, routed.experts_TK, routed.weights_TK

    def made(kernels: Kernels) -> Any:
        return kernels.pairs, *(product_of(each)(kernels) for each in weights)

    def call(made: Any, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        pairs, gate_up, down = made
        order_P, counts_E = pairs.order(experts_TK, Keys(shape.num_experts))
        middle = gate_up.multiply_rows(hidden_TD, counts_E, True, Gather(order_P, shape.top_k))
        output = down.multiply_rows(middle, counts_E, True)
        return pairs.weighted_sum(output, order_P, weights_TK, hidden_TD.dtype)

    others: dict[str, Call] = {
        label: partial(call, (TRITON_KERNELS.pairs, *products), *inputs)
        for label, products in deep_gemm_products(source, *weights).items()
    }
    beside: dict[str, Call] = {}
    gate_up, down = weights
    sglang = sglang_experts(source.device) if shape.activation == SwiGLU() else None
    if sglang is not None:
        scales = {"w1_scale": gate_up.scales_eGB, "w2_scale": down.scales_eGB}
        fp8 = {"use_fp8_w8a8": True, "block_shape": [SCALE_BLOCK] * 2} | scales if format == "fp8" else {}
        arguments = (gate_up.weight_eOI, down.weight_eOI, routed.weights_TK, routed.experts_TK.int())
        others["sglang"] = partial(sglang, hidden_TD, *arguments, filter_expert=False, **fp8)
    if format == "bf16":
        maps = [each.weight_eOI.transpose(1, 2) for each in weights]
        source_P, offsets_E = routed.order_P // shape.top_k, routed.counts_E.cumsum(0).int()

        def run_torch() -> object:
            gate, up = functional.grouped_mm(hidden_TD[source_P], maps[0], offs=offsets_E).chunk(2, dim=-1)
            return functional.grouped_mm(functional.silu(gate) * up, maps[1], offs=offsets_E)

        beside["torch grouped_mm"] = run_torch
    return Case(
        call,
        inputs,
        made,
        slack=2 * CODES_SLACK if format == "fp8" else FLOAT32_SLACK,  # rows and gates are rounded to 8 bits
        others=others,
        beside=beside,
        work=experts_work(shape, num_tokens=num_tokens, num_hit=routed.num_hit, format=format),
        bar=experts_bar(num_tokens, format),
        choices=tuple((product_key(each), num_tokens * shape.top_k) for each in weights if format == "fp8"),
        note=f"{routed.num_hit} of {shape.num_experts} experts have rows",
    )


def products(format: Format, small: str, name: str) -> list[Operation]:
    """Return the operations of one model's experts."""
    parts = ("gate, up", "down")
    return [
        Operation(
            multiply_rows,
            crossed([format], [small], parts, (0, 6)),
            crossed([format], [name], parts, (0, 12, 32, 128)),  # for which tiles differ
        ),
        Operation(multiply_slots, crossed([format], [small], parts, [9]), crossed([format], [name], parts, [64])),
    ]


SMALL_SHAPES = {"gpt-oss-20b": "small, clamped"}
MODELS = ["Mixtral-8x7B", *(name for name in MOE_SHAPES if name != "Mixtral-8x7B")]
# One check per model for its products, so that several processes share the compilation of their kernels.
EXPERT_CASES = {
    **{f"products, {name}": products("bf16", SMALL_SHAPES.get(name, "small"), name) for name in MODELS},
    **{f"products, fp8, {name}": products("fp8", "small blocks", name) for name in (*MODELS, "DeepSeek-V3, 32 of 256")},
    "products, mxfp4, gpt-oss-20b": products("mxfp4", "small groups", "gpt-oss-20b"),
    "products of one weight": [
        Operation(
            multiply,
            [("bf16", 24, 20, 3, False), ("fp8", 130, 260, 3, False), ("fp8", 272, 260, 3, True)],
            crossed(["bf16", "fp8"], [1536], [7168], [1, 64, 500], [False]),
            # DeepSeek-V3's compressed queries, and the gates and ups of shared experts
            crossed(["fp8"], [1536], [4096], [64, 8192], [False])
            + crossed(["fp8"], [28672], [4096], [64, 8192], [True]),
        ),
        Operation(
            multiply_in_order,
            [(40, 70, 3, 70), (33, 150, 2, 20)],  # one chunk, and eight
            crossed([1536], [7168], [1, 65, 500], [7168, 896, 1024]),
            crossed([5120], [4096], [64, 8192], [4096, 512]),
        ),
    ],
    "experts": [
        Operation(
            experts,
            [
                ("bf16", "small", 1),
                ("bf16", "small, clamped", 4),
                ("fp8", "small blocks", 2),
                ("mxfp4", "small groups", 2),
            ],
            [("bf16", "Qwen3-30B-A3B", 128), ("fp8", "Qwen3-30B-A3B", 128), ("mxfp4", "gpt-oss-20b", 128)],
            crossed(["bf16", "fp8"], MOE_SHAPES, NUM_TOKENS) + crossed(["mxfp4"], ["gpt-oss-20b"], NUM_TOKENS),
        )
    ],
}
