"""Checks of the kernels around experts: routing, the order of pairs, grouped products, the weighted sum."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.bench.gpu.check import (
    FLOAT32_SLACK,
    FP8_SLACK,
    WRONG,
    Case,
    Check,
    Place,
    compare,
    compare_exactly,
    dtype_name,
)
from moeserve.bench.gpu.costs import MOE_SHAPES, ExpertActivation, MoEShape
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

# T tokens, E experts, K experts per token, R rows, D width, O outputs, I inputs, B and G blocks of 128 inputs and
# outputs

ALPHA, LIMIT = 1.702, 7.0
FP8 = torch.float8_e4m3fn
FP8_BLOCK = 128
EXPECTED_ROWS = (1, 10**6)  # choose other tiles, which must not change a byte
CLEAR_GAP = 1e-6  # scores that are nearer to each other may be ordered either way
SMALL_SHAPES = {
    "Mixtral-8x7B": MoEShape(3, 48, 24, 2),
    "DeepSeek-V2-Lite": MoEShape(2, 20, 40, 2),
    "Qwen3-30B-A3B": MoEShape(6, 17, 9, 3),
    "gpt-oss-20b": MoEShape(5, 33, 20, 3, "clamped_swiglu", has_bias=True),
}
FP8_SHAPES = MOE_SHAPES | {"DeepSeek-V3, 32 of 256": MoEShape(32, 7168, 2048, 8)}  # the experts of one of 8 GPUs
SMALL_FP8_SHAPE = MoEShape(2, 260, 136, 2)
DEEPSEEK_V3: dict[str, Any] = dict(
    scoring="sigmoid", num_groups=8, num_chosen_groups=4, experts_rating_group=2, is_normalized=True, scale=2.5
)
# Experts, experts per token, arguments of `route`, and a correction of the scores.
ROUTINGS: dict[str, tuple[int, int, dict[str, Any], bool]] = {
    "Mixtral": (8, 2, dict(scoring="softmax", is_normalized=True), False),
    "DeepSeek-V2": (160, 6, dict(scoring="softmax", num_groups=8, num_chosen_groups=3, scale=16.0), False),
    "DeepSeek-V3": (256, 8, DEEPSEEK_V3, True),
    "gpt-oss": (32, 4, dict(scoring="softmax_of_chosen"), False),
}


def check_routing(place: Place) -> Iterator[Case]:
    """Compare experts and weights of the tokens whose choice is clear of rounding."""
    num_tokens_of = (12,) if place.is_small else (4, 256, 32768)
    for (name, routing), num_tokens in itertools.product(ROUTINGS.items(), num_tokens_of):
        num_experts, top_k, rules, has_correction = routing
        logits = place.normal(num_tokens, num_experts)
        correction = place.normal(num_experts, scale=0.1) if has_correction else None
        experts, weights = route(logits, correction, top_k=top_k, **rules)
        exact_experts, exact, is_clear = _routed(logits, correction, top_k, **rules)
        title = f"{name}, {num_tokens} tokens"
        if int(is_clear.sum()) < num_tokens / 2:
            yield Case(f"route, too few clear tokens: {title}", WRONG)
        yield Case(f"route, experts {title}", compare_exactly(experts[is_clear], exact_experts[is_clear]))
        yield Case(f"route, weights {title}", compare(weights[is_clear], exact[is_clear]))


def _routed(
    logits_TE: Tensor,
    correction_E: Tensor | None,
    top_k: int,
    *,
    scoring: str,
    num_groups: int = 1,
    num_chosen_groups: int = 1,
    experts_rating_group: int = 1,
    is_normalized: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return experts [T, K], their weights in float64, and a mask of the tokens whose choice is clear."""
    scores = logits_TE.double()
    if scoring == "softmax":
        scores = scores.softmax(-1)
    elif scoring == "sigmoid":
        scores = scores.sigmoid()
    ranks = scores if correction_E is None else scores + correction_E.double()
    is_clear = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    if num_groups > 1:
        grouped = ranks.unflatten(-1, (num_groups, -1))
        ratings = grouped.topk(experts_rating_group, dim=-1).values.sum(-1)
        best = ratings.topk(num_chosen_groups + 1, dim=-1)
        is_clear &= best.values[:, -2] - best.values[:, -1] > CLEAR_GAP
        is_chosen = torch.zeros_like(ratings, dtype=torch.bool).scatter_(1, best.indices[:, :-1], True)
        ranks = grouped.masked_fill(~is_chosen[..., None], -torch.inf).flatten(1)
    best = ranks.topk(top_k + 1, dim=-1)
    is_clear &= (-best.values.diff(dim=-1)).amin(-1) > CLEAR_GAP
    experts = best.indices[:, :-1]
    weights = scores.gather(1, experts)
    if scoring == "softmax_of_chosen":
        weights = weights.softmax(-1)
    if is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * scale, is_clear


def check_pairs(place: Place) -> Iterator[Case]:
    """Few tokens, which one launch serves, and many. Some pairs belong to experts of other ranks."""
    # tokens, experts of each, experts, width
    shapes = (
        [(3, 2, 5, 40), (40, 3, 7, 17)]
        if place.is_small
        else [(1, 8, 256, 7168), (64, 6, 64, 2048), (4096, 2, 8, 4096), (16384, 8, 128, 2048), (1000, 4, 32, 2880)]
    )
    for dtype, (num_tokens, top_k, num_experts, width) in itertools.product(place.dtypes, shapes):
        name = f"{dtype_name(dtype)} {num_tokens} x {top_k} of {num_experts}, {width} wide"
        first, num_own = num_experts // 4, num_experts - num_experts // 4
        keys = place.integers(0, num_experts, num_tokens, top_k)
        order, counts = order_pairs(keys, first, num_own)
        flat = keys.flatten()
        is_own = (flat >= first) & (flat < first + num_own)
        by_key = torch.where(is_own, flat - first, num_own).argsort(stable=True)
        num_rows, num_pairs = int(is_own.sum()), len(flat)
        exact_order = torch.cat([by_key[:num_rows], torch.full_like(by_key[num_rows:], -1)])
        yield Case(f"order_pairs {name}", compare_exactly(order, exact_order))
        exact_counts = (flat[is_own] - first).bincount(minlength=num_own)
        yield Case(f"order_pairs, counts {name}", compare_exactly(counts, exact_counts))

        source = place.normal(num_tokens, width, dtype=dtype)
        gathered = gather_rows(source, exact_order, top_k)[:num_rows]
        yield Case(f"gather_rows {name}", compare_exactly(gathered, source[by_key[:num_rows] // top_k]))
        inverse = torch.full((num_pairs,), -1, dtype=torch.int32, device=place.device)
        inverse[by_key[:num_rows]] = torch.arange(num_rows, dtype=torch.int32, device=place.device)
        yield Case(f"row_of_pair {name}", compare_exactly(row_of_pair(exact_order, num_pairs), inverse))

        output, weights = place.normal(num_pairs, width, dtype=dtype), place.uniform(num_tokens, top_k)
        rows = torch.zeros_like(output)
        rows[by_key[:num_rows]] = output[:num_rows]
        yield Case(f"scatter_rows {name}", compare_exactly(scatter_rows(output, exact_order, num_pairs), rows))
        exact = (rows.view(num_tokens, top_k, width).double() * weights.double()[..., None]).sum(1)
        yield Case(f"weighted_sum {name}", compare(weighted_sum(output, exact_order, weights, dtype), exact))
        weights_R = place.uniform(num_pairs)
        weighed = weigh_rows(output, weights_R, counts.sum()[None])[:num_rows]
        exact_rows = (output.float() * weights_R[:, None]).to(dtype)[:num_rows]
        yield Case(f"weigh_rows {name}", compare_exactly(weighed, exact_rows))


@dataclass(frozen=True)
class Weight:
    """The weights of one grouped product, which may be blocks of 8-bit floats with scales."""

    values_eOI: Tensor
    scale_eGB: Tensor | None
    columns: int  # of a result: outputs, or half as many with an activation

    def exact(self, expert: int) -> Tensor:
        """Return one expert's weights in float64: those of all experts would not fit into memory."""
        values = self.values_eOI[expert].double()
        if self.scale_eGB is None:
            return values
        scale = self.scale_eGB[expert].double().repeat_interleave(FP8_BLOCK, dim=1)[:, : values.shape[1]]
        parts = scale.chunk(values.shape[0] // self.columns)
        return values * torch.cat([part.repeat_interleave(FP8_BLOCK, dim=0)[: self.columns] for part in parts])


def check_products(place: Place, name: str, *, is_fp8: bool) -> Iterator[Case]:
    """Both products of a layer's experts, on gathered rows, packed rows and slots, with every choice of tiles."""
    shape = (FP8_SHAPES if is_fp8 else MOE_SHAPES)[name]
    if place.is_small:
        shape = SMALL_FP8_SHAPE if is_fp8 else SMALL_SHAPES[name]
    kernel, suffix, slack = ("grouped_matmul", "_fp8", FP8_SLACK) if is_fp8 else ("grouped_matmul", "", FLOAT32_SLACK)
    for dtype, is_gated in itertools.product(place.dtypes, (True, False)):
        num_outputs, num_inputs = (2 * shape.width, shape.hidden) if is_gated else (shape.hidden, shape.width)
        activation = shape.activation if is_gated else None
        columns = num_outputs // 2 if is_gated else num_outputs
        num_blocks = -(-num_inputs // FP8_BLOCK)
        bias = place.normal(shape.num_experts, num_outputs, dtype=dtype) if shape.has_bias and not is_fp8 else None
        options: dict[str, Any] = dict(activation=activation, alpha=ALPHA, limit=LIMIT)
        options |= dict(out_dtype=dtype) if is_fp8 else dict(bias_eO=bias)
        values = place.weights(shape.num_experts, num_outputs, num_inputs, dtype=FP8 if is_fp8 else dtype)
        scale = None
        if is_fp8:
            scale_rows = num_outputs // columns * -(-columns // FP8_BLOCK)
            scale = place.uniform(shape.num_experts, scale_rows, num_blocks) * 0.1
        else:
            values *= num_inputs**-0.5
        weight = Weight(values, scale, columns)

        def multiply(
            function: Any, function_fp8: Any, rows: Tensor, row_scale: Tensor, counts: Tensor, **more: Any
        ) -> Tensor:
            result: Tensor = (
                function(rows, values, counts, **more)  # noqa: B023
                if scale is None  # noqa: B023
                else function_fp8(rows, row_scale, values, scale, counts, **more)  # noqa: B023
            )
            return result

        def exact_rows(rows: Tensor, row_scale: Tensor) -> Tensor:
            if not is_fp8:
                return rows.double()
            return rows.double() * row_scale.double().repeat_interleave(FP8_BLOCK, dim=-1)[..., : rows.shape[-1]]

        title = f"{dtype_name(dtype)} {name}, {'gate, up' if is_gated else 'down'}"
        for num_tokens in _token_counts(place, shape):
            num_rows, indices, counts, sources = _routed_rows(place, shape, num_tokens, is_gated)
            rows = place.weights(num_rows, num_inputs, dtype=FP8 if is_fp8 else dtype)
            row_scale = place.uniform(num_rows, num_blocks)
            run = partial(
                multiply, grouped_matmul, grouped_matmul_fp8, rows, row_scale, counts,
                indices_R=indices, divisor=shape.top_k, **options,
            )  # fmt: skip
            output = run()[: len(sources)]
            exact = _product(exact_rows(rows, row_scale)[sources], weight, counts, bias, activation)
            yield Case(f"{kernel}{suffix} {title}, {num_tokens} tokens", compare(output, exact, slack=slack))
            for expected_rows in () if place.is_small else EXPECTED_ROWS:  # the interpreter's sums are numpy's
                other = run(expected_rows=expected_rows)[: len(sources)]
                case = f"{kernel}{suffix} {title}, {num_tokens} tokens, tiles for {expected_rows} rows"
                yield Case(case, compare_exactly(other, output))
        num_slots = 9 if place.is_small else 64
        counts = place.integers(0, num_slots + 1, shape.num_experts)
        counts[0], counts[-1] = num_slots, 0
        slots = place.weights(shape.num_experts, num_slots, num_inputs, dtype=FP8 if is_fp8 else dtype)
        slot_scale = place.uniform(shape.num_experts, num_slots, num_blocks)
        output = multiply(
            grouped_matmul_slots, grouped_matmul_slots_fp8, slots, slot_scale, counts,
            expected_rows=int(counts.sum()), **options,
        )  # fmt: skip
        exact = _product(_used(exact_rows(slots, slot_scale), counts), weight, counts, bias, activation)
        yield Case(f"{kernel}_slots{suffix} {title}", compare(_used(output, counts), exact, slack=slack))


def _token_counts(place: Place, shape: MoEShape) -> tuple[int, ...]:
    """Return numbers of tokens that give experts about 1, 12, 32 and 128 rows, for which tiles differ."""
    rows_of_expert = (6,) if place.is_small else (12, 32, 128)
    return (1, *(max(2, shape.num_experts * rows // shape.top_k) for rows in rows_of_expert))


def _routed_rows(
    place: Place, shape: MoEShape, num_tokens: int, is_gathered: bool
) -> tuple[int, Tensor | None, Tensor, Tensor]:
    """Return the number of rows, the indices of gathered ones, rows per expert, and the row of each result.

    Some pairs belong to experts of other ranks: behind the used rows there are spare ones.
    """
    experts = place.uniform(num_tokens, shape.num_experts + 1).topk(shape.top_k, dim=1).indices.flatten()
    order = experts.argsort(stable=True)
    counts = experts.bincount(minlength=shape.num_experts + 1)[: shape.num_experts]
    num_used = int(counts.sum())
    if not is_gathered:
        return len(order), None, counts, torch.arange(num_used, device=place.device)
    order[num_used:] = -1
    return num_tokens, order, counts, order[:num_used] // shape.top_k


def _used(slots_eSX: Tensor, counts_e: Tensor) -> Tensor:
    """Return the used slots of all experts, one after another."""
    return torch.cat([slots_SX[:count] for slots_SX, count in zip(slots_eSX, counts_e.tolist(), strict=True)])


def _product(
    rows_RI: Tensor, weight: Weight, counts_e: Tensor, bias_eO: Tensor | None, activation: ExpertActivation | None
) -> Tensor:
    """Return the grouped product in float64."""
    results = []
    for expert, rows in enumerate(rows_RI.split(counts_e.tolist())):
        value = rows @ weight.exact(expert).T
        if bias_eO is not None:
            value = value + bias_eO[expert].double()
        if activation is not None:
            gate, up = value.chunk(2, dim=-1)
            alpha = 1.0
            if activation == "clamped_swiglu":
                alpha, gate, up = ALPHA, gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
            value = gate * torch.sigmoid(alpha * gate) * up
        results.append(value)
    return torch.cat(results)


PAIR_KERNELS = ("order_pairs", "gather_rows", "scatter_rows", "row_of_pair", "weighted_sum", "weigh_rows")
# One check for each model: several processes share the compilation of their kernels. The longest come first.
EXPERT_CHECKS = (
    *(
        Check(
            f"grouped products, fp8, {name}",
            ("grouped_matmul_fp8", "grouped_matmul_slots_fp8"),
            partial(check_products, name=name, is_fp8=True),
        )
        for name in reversed(FP8_SHAPES)
    ),
    *(
        Check(
            f"grouped products, {name}",
            ("grouped_matmul", "grouped_matmul_slots"),
            partial(check_products, name=name, is_fp8=False),
        )
        for name in reversed(MOE_SHAPES)
    ),
    Check("pairs", PAIR_KERNELS, check_pairs),
    Check("routing", ("route",), check_routing),
)
