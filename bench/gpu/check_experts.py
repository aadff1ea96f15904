"""Checks of the kernels around experts: routing, the order of pairs, grouped products, the weighted sum."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.bench.gpu.check import (
    FP8_RMS_SLACK,
    FP8_SUM_SLACK,
    FUNCTION_SLACK,
    RMS_SLACK,
    SUM_SLACK,
    WRONG,
    Case,
    Check,
    Expected,
    Place,
    compare,
    compare_exactly,
    dtype_name,
)
from moeserve.bench.gpu.shapes import MOE_SHAPES, ExpertActivation, MoEShape
from moeserve.triton_kernels.grouped_matmul import (
    grouped_matmul,
    grouped_matmul_fp8,
    grouped_matmul_slots,
    grouped_matmul_slots_fp8,
)
from moeserve.triton_kernels.pairs import (
    gather_rows,
    order_pairs,
    row_of_pair,
    scatter_rows,
    weigh_rows,
    weighted_sum,
)
from moeserve.triton_kernels.routing import route

# T tokens, E experts, K experts per token, P pairs = T * K, R rows, S source rows, D width, O outputs, I inputs, C
# columns: outputs, or half as many after an activation, B and G blocks of 128 inputs and outputs

ALPHA, LIMIT = 1.702, 7.0
FP8_BLOCK = 128
CUTS = (1, 10**6)  # rows that are expected: how the work is cut changes no result
CLEAR_GAP = 1e-6  # between numbers that are compared: float32 decides such as are nearer
SMALL_SHAPES = {
    "Mixtral-8x7B": MoEShape(3, 48, 24, 2),
    "DeepSeek-V2-Lite": MoEShape(2, 20, 40, 2),
    "Qwen3-30B-A3B": MoEShape(6, 17, 9, 3),
    "gpt-oss-20b": MoEShape(5, 33, 20, 3, "clamped_swiglu", has_bias=True),
}
# Of DeepSeek-V3's 256 experts, as many as one of 8 GPUs has.
FP8_SHAPES = MOE_SHAPES | {"DeepSeek-V3, 32 of 256": MoEShape(32, 7168, 2048, 8)}
SMALL_FP8_SHAPE = MoEShape(2, 260, 136, 2)


@dataclass(frozen=True)
class Routing:
    """How a published model chooses experts: arguments of `route`."""

    num_experts: int
    top_k: int
    rules: dict[str, Any]
    has_correction: bool = False


ROUTINGS = {
    "Mixtral": Routing(8, 2, dict(scoring="softmax", is_normalized=True)),
    "DeepSeek-V2-Lite": Routing(64, 6, dict(scoring="softmax")),
    "DeepSeek-V2": Routing(160, 6, dict(scoring="softmax", num_groups=8, num_chosen_groups=3, scale=16.0)),
    "DeepSeek-V3": Routing(
        256,
        8,
        dict(
            scoring="sigmoid", num_groups=8, num_chosen_groups=4, experts_rating_group=2, is_normalized=True, scale=2.5
        ),
        has_correction=True,
    ),
    "Qwen3": Routing(128, 8, dict(scoring="softmax", is_normalized=True)),
    "gpt-oss": Routing(32, 4, dict(scoring="softmax_of_chosen")),
}


def check_routing(place: Place) -> Iterator[Case]:
    """Tokens for which rounding could decide are not used: those are few."""
    for (name, routing), num_tokens in itertools.product(ROUTINGS.items(), (3,) if place.is_small else (1, 64, 8192)):
        drawn = place.normal(4 * num_tokens, routing.num_experts)
        correction = place.normal(routing.num_experts, scale=0.1) if routing.has_correction else None
        logits = drawn[_routed(drawn, correction, routing)[2]][:num_tokens]
        title = f"{name}, {num_tokens} tokens"
        if len(logits) < num_tokens:
            yield Case(f"route, too few clear tokens: {title}", WRONG)
        experts, weights = route(logits, correction, top_k=routing.top_k, **routing.rules)
        expected_experts, expected, _ = _routed(logits, correction, routing)
        yield Case(f"route, experts {title}", compare_exactly(experts, expected_experts))
        yield Case(f"route, weights {title}", compare(weights, expected))


def _routed(logits_TE: Tensor, correction_E: Tensor | None, routing: Routing) -> tuple[Tensor, Expected, Tensor]:
    """Experts [T, K], their weights, and of each token whether its choice is beyond any rounding."""
    rules: dict[str, Any] = dict(
        num_groups=1, num_chosen_groups=1, experts_rating_group=1, is_normalized=False, scale=1.0
    )
    rules |= routing.rules
    scores = logits_TE.double()
    if rules["scoring"] == "softmax":
        scores = scores.softmax(-1)
    elif rules["scoring"] == "sigmoid":
        scores = scores.sigmoid()
    ranks = scores if correction_E is None else scores + correction_E.double()
    gaps = []
    if rules["num_groups"] > 1:
        grouped = ranks.unflatten(-1, (rules["num_groups"], -1))
        ratings = grouped.topk(rules["experts_rating_group"], dim=-1).values.sum(-1)
        best = ratings.topk(rules["num_chosen_groups"] + 1, dim=-1).values
        gaps.append(best[:, -2] - best[:, -1])
        chosen = ratings.topk(rules["num_chosen_groups"], dim=-1).indices
        is_chosen = torch.zeros_like(ratings, dtype=torch.bool).scatter_(1, chosen, True)
        ranks = grouped.masked_fill(~is_chosen[..., None], -torch.inf).flatten(1)
    gaps.append(-ranks.topk(routing.top_k + 1, dim=-1).values.diff(dim=-1).amax(-1))
    experts = ranks.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if rules["scoring"] == "softmax_of_chosen":
        weights = weights.softmax(-1)
    if rules["is_normalized"]:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * rules["scale"]
    # float32 throughout: exponentials, and sums of up to 256 of them
    slack = 4 * FUNCTION_SLACK * weights.abs() + 1e-30
    return experts, Expected(weights, slack), torch.stack(gaps).amin(0) > CLEAR_GAP


def check_pairs(place: Place) -> Iterator[Case]:
    """A few tokens, which one launch serves, and many. Some keys are others' experts."""
    # tokens, experts of each, experts, width
    shapes = (
        [(3, 2, 5, 40), (40, 3, 7, 17)]
        if place.is_small
        else [(1, 8, 256, 7168), (64, 6, 64, 2048), (4096, 2, 8, 4096), (16384, 8, 128, 2048), (1000, 4, 32, 2880)]
    )
    for dtype, (num_tokens, top_k, num_experts, width) in itertools.product(place.dtypes, shapes):
        name = f"{dtype_name(dtype)} {num_tokens} x {top_k} of {num_experts}, {width} wide"
        first, num_counted = num_experts // 4, num_experts - num_experts // 4
        keys = place.integers(0, num_experts, num_tokens, top_k)
        order, counts = order_pairs(keys, first, num_counted)
        flat = keys.flatten()
        is_counted = (flat >= first) & (flat < first + num_counted)
        by_key = torch.where(is_counted, flat - first, num_counted).argsort(stable=True)
        num_rows = int(is_counted.sum())
        expected_order = torch.cat([by_key[:num_rows], torch.full_like(by_key[num_rows:], -1)])
        yield Case(f"order_pairs {name}", compare_exactly(order, expected_order))
        expected_counts = (flat[is_counted] - first).bincount(minlength=num_counted)
        yield Case(f"order_pairs, counts {name}", compare_exactly(counts, expected_counts))

        source = place.normal(num_tokens, width, dtype=dtype)
        gathered = gather_rows(source, expected_order, top_k)[:num_rows]
        yield Case(f"gather_rows {name}", compare_exactly(gathered, source[by_key[:num_rows] // top_k]))
        inverse = torch.full((num_tokens * top_k,), -1, dtype=torch.int32, device=place.device)
        inverse[by_key[:num_rows]] = torch.arange(num_rows, dtype=torch.int32, device=place.device)
        found = row_of_pair(expected_order, num_tokens * top_k)
        yield Case(f"row_of_pair {name}", compare_exactly(found, inverse))

        output = place.normal(num_tokens * top_k, width, dtype=dtype)
        scattered = scatter_rows(output, expected_order, num_tokens * top_k)
        expected_rows = torch.zeros_like(output)
        expected_rows[by_key[:num_rows]] = output[:num_rows]
        yield Case(f"scatter_rows {name}", compare_exactly(scattered, expected_rows))
        weights = place.uniform(num_tokens, top_k)
        products = expected_rows.view(num_tokens, top_k, width).double() * weights.double()[..., None]
        expected = Expected(products.sum(1), top_k * 2.0**-23 * products.abs().sum(1)).rounded_to(dtype)
        total = weighted_sum(output, expected_order, weights, dtype)
        yield Case(f"weighted_sum {name}", compare(total, expected))
        weights_R = place.uniform(len(output))
        weighed = weigh_rows(output, weights_R, counts.sum()[None])[:num_rows]
        expected_rows = (output.float() * weights_R[:, None]).to(dtype)[:num_rows]
        yield Case(f"weigh_rows {name}", compare_exactly(weighed, expected_rows))


def check_products(place: Place, name: str) -> Iterator[Case]:
    """Both products of a layer's experts: gates and ups of gathered rows, and down, for each way to cut the work."""
    shape = (SMALL_SHAPES if place.is_small else MOE_SHAPES)[name]
    for dtype in place.dtypes:
        for is_gated in (True, False):
            num_outputs, num_inputs = _sizes(shape, is_gated)
            weight = place.normal(shape.num_experts, num_outputs, num_inputs, dtype=dtype, scale=num_inputs**-0.5)
            bias = place.normal(shape.num_experts, num_outputs, dtype=dtype) if shape.has_bias else None
            activation = shape.activation if is_gated else None
            for num_tokens in _tokens(place, shape):
                title = f"{dtype_name(dtype)} {name}, {'gate, up' if is_gated else 'down'}, {num_tokens} tokens"
                rows, indices, counts, sources = _routed_rows(place, shape, num_tokens, num_inputs, is_gated, dtype)
                arguments: dict[str, Any] = dict(
                    indices_R=indices,
                    divisor=shape.top_k,
                    bias_eO=bias,
                    activation=activation,
                    alpha=ALPHA,
                    limit=LIMIT,
                )
                output = grouped_matmul(rows, weight, counts, **arguments)
                expected = _product(rows[sources], weight, counts, bias, activation)
                yield Case(f"grouped_matmul {title}", compare(output[: len(sources)], expected.rounded_to(dtype)))
                for expected_rows in () if place.is_small else CUTS:  # the interpreter's sums are numpy's
                    cut = grouped_matmul(rows, weight, counts, expected_rows=expected_rows, **arguments)
                    is_same = compare_exactly(cut[: len(sources)], output[: len(sources)])
                    yield Case(f"grouped_matmul {title}, cut as for {expected_rows} rows", is_same)
            slots, counts = _slots(place, shape, num_inputs, dtype)
            output = grouped_matmul_slots(
                slots,
                weight,
                counts,
                bias_eO=bias,
                activation=activation,
                alpha=ALPHA,
                limit=LIMIT,
                expected_rows=int(counts.sum()),
            )
            title = f"{dtype_name(dtype)} {name}, {'gate, up' if is_gated else 'down'}, slots"
            expected = _product(_used(slots, counts), weight, counts, bias, activation).rounded_to(dtype)
            yield Case(f"grouped_matmul_slots {title}", compare(_used(output, counts), expected))


def check_products_fp8(place: Place, name: str) -> Iterator[Case]:
    """The same with blocks of 8-bit floats, whose results are of an activation's dtype."""
    shape = SMALL_FP8_SHAPE if place.is_small else FP8_SHAPES[name]
    for dtype in place.dtypes:
        for is_gated in (True, False):
            num_outputs, num_inputs = _sizes(shape, is_gated)
            activation = shape.activation if is_gated else None
            columns = num_outputs // 2 if is_gated else num_outputs
            num_blocks = -(-num_inputs // FP8_BLOCK)
            weight = place.codes(shape.num_experts, num_outputs, num_inputs)
            parts = num_outputs // columns
            weight_scale = place.uniform(shape.num_experts, parts * -(-columns // FP8_BLOCK), num_blocks) * 0.1
            exact_weight = _DequantisedWeight(weight, weight_scale, columns)
            arguments: dict[str, Any] = dict(activation=activation, alpha=ALPHA, limit=LIMIT, out_dtype=dtype)
            for num_tokens in _tokens(place, shape):
                title = f"{dtype_name(dtype)} {name}, {'gate, up' if is_gated else 'down'}, {num_tokens} tokens"
                rows, indices, counts, sources = _routed_rows(
                    place, shape, num_tokens, num_inputs, is_gated, torch.float8_e4m3fn
                )
                row_scale = place.uniform(len(rows), num_blocks)
                gathered: dict[str, Any] = arguments | dict(indices_R=indices, divisor=shape.top_k)
                output = grouped_matmul_fp8(rows, row_scale, weight, weight_scale, counts, **gathered)
                exact_rows = _dequantised_rows(rows[sources], row_scale[sources])
                expected = _product(exact_rows, exact_weight, counts, None, activation, is_fp8=True).rounded_to(dtype)
                yield Case(f"grouped_matmul_fp8 {title}", compare(output[: len(sources)], expected))
                for expected_rows in () if place.is_small else CUTS:
                    cut = grouped_matmul_fp8(
                        rows, row_scale, weight, weight_scale, counts, expected_rows=expected_rows, **gathered
                    )
                    is_same = compare_exactly(cut[: len(sources)], output[: len(sources)])
                    yield Case(f"grouped_matmul_fp8 {title}, cut as for {expected_rows} rows", is_same)
            slots, counts = _slots(place, shape, num_inputs, torch.float8_e4m3fn)
            slot_scale = place.uniform(*slots.shape[:2], num_blocks)
            output = grouped_matmul_slots_fp8(
                slots, slot_scale, weight, weight_scale, counts, expected_rows=int(counts.sum()), **arguments
            )
            exact_rows = _dequantised_rows(_used(slots, counts), _used(slot_scale, counts))
            expected = _product(exact_rows, exact_weight, counts, None, activation, is_fp8=True).rounded_to(dtype)
            title = f"{dtype_name(dtype)} {name}, {'gate, up' if is_gated else 'down'}, slots"
            yield Case(f"grouped_matmul_slots_fp8 {title}", compare(_used(output, counts), expected))


def _sizes(shape: MoEShape, is_gated: bool) -> tuple[int, int]:
    """Outputs and inputs."""
    return (2 * shape.width, shape.hidden) if is_gated else (shape.hidden, shape.width)


def _tokens(place: Place, shape: MoEShape) -> tuple[int, ...]:
    """So many that experts have about 1, 12, 32 and 128 rows, for which the work is cut in four ways."""
    rows_of_each = (6,) if place.is_small else (12, 32, 128)
    return (1, *(max(2, shape.num_experts * rows // shape.top_k) for rows in rows_of_each))


def _routed_rows(
    place: Place, shape: MoEShape, num_tokens: int, width: int, is_gathered: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Rows, indices of gathered ones, rows of each expert, and of each result the row that it is of.

    Some pairs are of other ranks' experts: behind those that count there are spare rows.
    """
    experts = place.uniform(num_tokens, shape.num_experts + 1).topk(shape.top_k, dim=1).indices.flatten()
    order = experts.argsort(stable=True)
    counts = experts.bincount(minlength=shape.num_experts + 1)[: shape.num_experts]
    num_counted = int(counts.sum())
    num_rows = num_tokens if is_gathered else len(order)
    is_fp8 = dtype == torch.float8_e4m3fn
    rows = place.codes(num_rows, width) if is_fp8 else place.normal(num_rows, width, dtype=dtype)
    if not is_gathered:
        return rows, None, counts, torch.arange(num_counted, device=place.device)
    order[num_counted:] = -1
    return rows, order, counts, order[:num_counted] // shape.top_k


def _slots(place: Place, shape: MoEShape, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_slots = 9 if place.is_small else 64
    counts = place.integers(0, num_slots + 1, shape.num_experts)
    counts[0] = num_slots
    counts[-1] = 0
    size = (shape.num_experts, num_slots, width)
    is_fp8 = dtype == torch.float8_e4m3fn
    return (place.codes(*size) if is_fp8 else place.normal(*size, dtype=dtype)), counts


def _used(slots_eSX: Tensor, counts_e: Tensor) -> Tensor:
    """The slots that hold rows, one after another."""
    return torch.cat([slots_SX[:count] for slots_SX, count in zip(slots_eSX, counts_e.tolist(), strict=True)])


def _dequantised_rows(codes_RI: Tensor, scale_RB: Tensor) -> Tensor:
    return codes_RI.double() * scale_RB.double().repeat_interleave(FP8_BLOCK, dim=1)[:, : codes_RI.shape[1]]


class _DequantisedWeight:
    """Weights in float64, one expert at a time: all of them together would not fit."""

    def __init__(self, codes_eOI: Tensor, scale_eGB: Tensor, columns: int) -> None:
        self.codes_eOI = codes_eOI
        self.scale_eGB = scale_eGB
        self.columns = columns

    def __getitem__(self, expert: int) -> Tensor:
        codes = self.codes_eOI[expert].double()
        scale = self.scale_eGB[expert].double().repeat_interleave(FP8_BLOCK, dim=1)[:, : codes.shape[1]]
        parts = scale.chunk(codes.shape[0] // self.columns)
        return codes * torch.cat([part.repeat_interleave(FP8_BLOCK, dim=0)[: self.columns] for part in parts])


def _product(
    rows_RI: Tensor,
    weight: Tensor | _DequantisedWeight,
    counts_e: Tensor,
    bias_eO: Tensor | None,
    activation: ExpertActivation | None,
    *,
    is_fp8: bool = False,
) -> Expected:
    """Float64 products, with what float32 sums and the functions after them may be off, before any rounding."""
    sum_slack = FP8_SUM_SLACK if is_fp8 else SUM_SLACK
    values, slacks = [], []
    counts = counts_e.tolist()
    for expert, rows in enumerate(rows_RI.split(counts)):
        if not counts[expert]:
            continue
        weight_OI, rows = weight[expert].double(), rows.double()
        value = rows @ weight_OI.T
        slack = sum_slack * (rows.abs() @ weight_OI.abs().T)
        if bias_eO is not None:
            value = value + bias_eO[expert].double()
            slack = slack + 2.0**-23 * bias_eO[expert].double().abs()
        if activation is not None:
            value, slack = _activated(value, slack, activation)
        values.append(value)
        slacks.append(slack)
    if not values:
        columns = weight[0].shape[0] // (1 if activation is None else 2)
        empty = rows_RI.new_zeros(0, columns, dtype=torch.float64)
        return Expected(empty, empty)
    rms = FP8_RMS_SLACK if is_fp8 else RMS_SLACK
    return Expected(torch.cat(values), torch.cat(slacks), rms)


def _activated(value: Tensor, slack: Tensor, activation: ExpertActivation) -> tuple[Tensor, Tensor]:
    """The slope of x * sigmoid(a * x) is at most 1.1; clamping makes no error larger."""
    (gate, up), (gate_slack, up_slack) = value.chunk(2, dim=-1), slack.chunk(2, dim=-1)
    if activation == "swiglu":
        gated = gate * torch.sigmoid(gate)
    else:
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
        gated = gate * torch.sigmoid(ALPHA * gate)
    result = gated * up
    off = 1.1 * gate_slack * (up.abs() + up_slack) + gated.abs() * up_slack + FUNCTION_SLACK * result.abs()
    return result, off


def _of_model(check: Callable[[Place, str], Iterator[Case]], name: str) -> Callable[[Place], Iterator[Case]]:
    def run(place: Place) -> Iterator[Case]:
        return check(place, name)

    return run


# One for each model: their kernels take longest to compile, which several processes share.
CHECKS = (
    Check("routing", ("route",), check_routing),
    Check(
        "pairs",
        ("order_pairs", "gather_rows", "scatter_rows", "row_of_pair", "weighted_sum", "weigh_rows"),
        check_pairs,
    ),
    *(
        Check(f"grouped products, {name}", ("grouped_matmul", "grouped_matmul_slots"), _of_model(check_products, name))
        for name in MOE_SHAPES
    ),
    *(
        Check(
            f"grouped products, fp8, {name}",
            ("grouped_matmul_fp8", "grouped_matmul_slots_fp8"),
            _of_model(check_products_fp8, name),
        )
        for name in FP8_SHAPES
    ),
)
