"""The table of all cases: each operation of the Triton kernels, at small shapes and at those of published models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.bench.gpu import attention_cases, entry_cases, expert_cases
from moeserve.bench.gpu.check import CODES_SLACK, Case, NamedCases, Operation, cases_of, crossed, run_check
from moeserve.bench.gpu.inputs import Source, source_of
from moeserve.bench.gpu.parts import Item, Job, one_row
from moeserve.ops import pairs as pairs_ops
from moeserve.ops import routing as routing_ops
from moeserve.ops import rows as rows_ops
from moeserve.ops import sampling as sampling_ops
from moeserve.ops.backend import REFERENCE, Backend
from moeserve.ops.pairs.interface import Keys, PairKernels
from moeserve.ops.routing.interface import RouterSpec
from moeserve.ops.select import select_backend

# T tokens, D width, N heads, H head size, R rows, V vocabulary, W fields of settings, E experts, K experts per token

EPSILON = 1e-5
DRAW_SLACK = 1e-4  # allowed distance from the border between two tokens, in kept probability
MOST_TIES = 0.01  # maximum fraction of tokens whose experts rounding may change
ROUTERS = {
    "Mixtral": RouterSpec(num_experts=8, top_k=2, is_normalized=True),
    "DeepSeek-V2": RouterSpec(num_experts=160, top_k=6, num_groups=8, num_chosen_groups=3, scale=16.0),
    "DeepSeek-V3": RouterSpec(
        num_experts=256, top_k=8, scoring="sigmoid", num_groups=8, num_chosen_groups=4, experts_rating_group=2,
        is_normalized=True, scale=2.5, has_correction=True,
    ),
    "gpt-oss": RouterSpec(num_experts=32, top_k=4, scoring="softmax_of_chosen", has_bias=True),
}  # fmt: skip
SMALL_NORMS, NORMS = [(3, 40), (2, 130)], [(1, 4096), (129, 2048), (64, 2880), (33, 7168), (4096, 4096)]
ROWS = [(1, 2048), (64, 4096), (8192, 4096)]
WIDTHS = 32000, 151936  # vocabularies of Mixtral-8x7B and Qwen3-30B-A3B
SMALL_SCORES, SCORES, DRAWN = [(2, 3), (2, 300)], crossed([1, 64], WIDTHS), crossed([1, 64, 256], WIDTHS[1:])
FILTERS = [(0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (50, 0.8, 0.01)]  # top_k, top_p, min_p


def draw_norm(source: Source, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, an update of them, and the weight of a norm."""
    return source.normal(*shape), source.normal(*shape), 1 + source.normal(shape[-1], scale=0.2)


@cases_of("norms", SMALL_NORMS, NORMS, ROWS)
def rms_norm(source: Source, num_rows: int, width: int) -> Case:
    rows_TD, _, weight_D = draw_norm(source, num_rows, width)
    return Case(lambda backend: rows_ops.make(backend).rms_norm, (rows_TD, weight_D, EPSILON))


@cases_of("norms", SMALL_NORMS, NORMS, ROWS)
def add_rms_norm(source: Source, num_rows: int, width: int) -> Case:
    return Case(lambda backend: rows_ops.make(backend).add_rms_norm, (*draw_norm(source, num_rows, width), EPSILON))


@cases_of("norms", [(3, 2, 16)], [(4096, 32, 128), (5, 4, 64)])
def rms_norm_in_place(source: Source, num_rows: int, num_heads: int, size: int) -> Case:
    """Normalise some heads of a fused projection; the others must not change."""

    def call(backend: Backend, heads_TNH: Tensor, _: Tensor, weight_H: Tensor) -> Tensor:
        rows_ops.make(backend).rms_norm_in_place(heads_TNH[:, :-3], weight_H, EPSILON)
        return heads_TNH

    return Case(lambda backend: partial(call, backend), draw_norm(source, num_rows, num_heads + 3, size))


@cases_of("norms", SMALL_NORMS, NORMS, ROWS)
def quantize_rms_norm(source: Source, num_rows: int, width: int) -> Case:
    """Normalise and quantise, with an addition and without, and also return the plain rows, as for a router."""

    def call(backend: Backend, x_TD: Tensor, update_TD: Tensor, weight_D: Tensor) -> Any:
        operations = rows_ops.make(backend)
        if operations.quantize_rms_norm is None:
            sum_TD, normed_TD = operations.add_rms_norm(x_TD, update_TD, weight_D, EPSILON)
            return operations.rms_norm(x_TD, weight_D, EPSILON), sum_TD, normed_TD, normed_TD
        _, normed = operations.quantize_rms_norm(x_TD, None, weight_D, EPSILON, False)
        sum_TD, rows = operations.quantize_rms_norm(x_TD, update_TD, weight_D, EPSILON, True)
        return normed, sum_TD, rows.rows, rows

    inputs = draw_norm(source, num_rows, width)
    return Case(lambda backend: partial(call, backend), inputs, slack=CODES_SLACK)


@cases_of("norms", SMALL_NORMS, NORMS, ROWS)
def quantize_rows(source: Source, num_rows: int, width: int) -> Case:
    inputs = (source.normal(num_rows, width),)
    return Case(lambda backend: rows_ops.make(backend).quantize or (lambda rows: rows), inputs, slack=CODES_SLACK)


@cases_of(
    "routing",
    [*crossed(ROUTERS, [6], [64]), ("gpt-oss", 6, 64, True)],
    [*crossed(ROUTERS, [4], [2048], [True, False]), *crossed(ROUTERS, [256, 32768], [64])],
    crossed(["DeepSeek-V3"], [4, 64, 8192], [4096]),  # 4 tokens take one launch
)
def route(source: Source, name: str, num_tokens: int, width: int, is_ordered: bool = False) -> Case:
    """Route. For the few tokens for which rounding may select other experts, torch's weights are compared."""
    config = ROUTERS[name]
    correction_E = source.float32(config.num_experts, scale=0.1) if config.has_correction else None
    bias_E = source.float32(config.num_experts, scale=0.1) if config.has_bias else None
    weight_ED = source.float32(config.num_experts, width, scale=width**-0.5)
    inputs = source.normal(num_tokens, width), weight_ED, bias_E, correction_E

    def defined(results: tuple[Tensor, Tensor], *inputs: Any) -> Any:
        (experts_TK, weights_TK), (torch_TK, torch_weights_TK) = results, routing_ops.make(REFERENCE, config)(*inputs)
        is_equal_T = (experts_TK == torch_TK).all(-1)
        are_enough = (~is_equal_T).float().mean() <= MOST_TIES
        return are_enough, torch.where(is_equal_T[:, None], weights_TK, torch_weights_TK)

    return Case(lambda backend: routing_ops.make(backend, config), inputs, defined, is_ordered=is_ordered)


@cases_of(
    "pairs",
    [(3, 2, 5, 40), (40, 3, 7, 17)],
    # The first shape, of few tokens, is ordered in a single launch.
    [(1, 8, 256, 7168), (64, 6, 64, 2048), (4096, 2, 8, 4096), (16384, 8, 128, 2048), (1000, 4, 32, 2880)],
)
def order_weigh_and_sum(source: Source, num_tokens: int, top_k: int, num_experts: int, width: int) -> Case:
    """Order, move, weigh and sum pairs, some of which belong to experts of other ranks."""
    keys = Keys(num_experts - num_experts // 4, first=num_experts // 4)
    experts_TK = source.integers(0, num_experts, num_tokens, top_k)
    order_P, counts = pairs_ops.make(REFERENCE).order(experts_TK, keys)
    used = slice(int(counts.sum()))
    rows_TD, output_PD = source.normal(num_tokens, width), source.normal(num_tokens * top_k, width)

    def call(pairs: PairKernels, rows_TD: Tensor, output_PD: Tensor, weights_TK: Tensor) -> Any:
        sum_TD = pairs.weighted_sum(output_PD[used], order_P[used], weights_TK, output_PD.dtype)
        gathered = pairs.gather(rows_TD, order_P, top_k)[used]
        moved = gathered, pairs.scatter(output_PD, order_P, len(output_PD))
        weighed = pairs.weigh(output_PD, weights_TK.flatten(), counts.sum(0, keepdim=True))[used]
        return pairs.order(experts_TK, keys), pairs.sort(experts_TK, keys), moved, weighed, sum_TD

    inputs = rows_TD, output_PD, source.uniform(num_tokens, top_k)
    return Case(lambda backend: partial(call, pairs_ops.make(backend)), inputs)


@cases_of("tokens", SMALL_SCORES, SCORES, SCORES[2:])
def row_maximum(source: Source, num_rows: int, width: int) -> Case:
    return Case(lambda backend: sampling_ops.make(backend).row_maximum, (source.normal(num_rows, width, scale=3.0),))


@cases_of("tokens", SMALL_SCORES, SCORES, DRAWN)
def choose_greedily(source: Source, num_rows: int, width: int) -> Case:
    settings_RW, _ = source.settings(num_rows)
    inputs = source.normal(num_rows, width, scale=3.0), settings_RW, settings_RW[:, 0].contiguous()
    return Case(lambda backend: sampling_ops.make(backend).choose_tokens, inputs)


@cases_of(
    "tokens",
    [(2, 40, *each) for each in FILTERS],
    [(64, width, *each) for width in WIDTHS for each in FILTERS],
    [(*shape, top_k, top_p, 0.0) for shape in DRAWN for top_k in (0, 20) for top_p in (0.95, 1.0)],
)
def choose_tokens(source: Source, num_rows: int, width: int, top_k: int, top_p: float, min_p: float) -> Case:
    """Draw tokens: the random number must lie within the token's range of the kept probability.

    The work counts one pass; the kernel documents the number of passes.
    """
    scores_RV = source.normal(num_rows, width, scale=3.0)
    scores_RV[:, ::7] = -torch.inf
    temperature_R = source.uniform(num_rows) * 1.5 + 0.3
    filters: Any = dict(temperature=temperature_R.cpu().numpy(), top_k=top_k, top_p=top_p, min_p=min_p)
    settings_RW, uniform_R = source.settings(num_rows, **filters)
    inputs = scores_RV, settings_RW, settings_RW.new_zeros(num_rows)

    def are_drawn(results: tuple[Tensor, Tensor], scores_RV: Tensor, *_: Any) -> Tensor:
        tokens_R = results[1]
        ordered_RV, order_RV = scores_RV.double().sort(dim=-1, descending=True, stable=True)
        kept_RV = ((ordered_RV - ordered_RV[:, :1]) / temperature_R[:, None]).exp()
        rank_V = torch.arange(width, device=source.device)
        kept_RV[(kept_RV < min_p) | (rank_V >= (top_k or width))] = 0.0
        ends_RV = kept_RV.cumsum(-1)
        kept_RV[ends_RV - kept_RV >= top_p * ends_RV[:, -1:]] = 0.0
        shares_RV = kept_RV / kept_RV.sum(-1, keepdim=True)
        place_R1 = (order_RV == tokens_R[:, None]).int().argmax(-1, keepdim=True)
        share_R, end_R = (each.gather(1, place_R1)[:, 0] for each in (shares_RV, shares_RV.cumsum(-1)))
        is_inside_R = (uniform_R < end_R + DRAW_SLACK) & (uniform_R >= end_R - share_R - DRAW_SLACK)
        return is_inside_R & (tokens_R >= 0) & (tokens_R < width)

    return Case(lambda backend: sampling_ops.make(backend).choose_tokens, inputs, are_drawn)


CASES: dict[str, list[Operation]] = {}
for _operation in (
    *attention_cases.OPERATIONS,
    *(rms_norm, add_rms_norm, rms_norm_in_place, quantize_rms_norm, quantize_rows, order_weigh_and_sum, route),
    *entry_cases.OPERATIONS,
    *(row_maximum, choose_greedily, choose_tokens),
    *expert_cases.OPERATIONS,
):
    CASES.setdefault(_operation.check, []).append(_operation)


def items(job: Job) -> Iterator[Item]:
    """Yield the checks."""
    for index, name in enumerate(CASES):
        source = source_of(job, index)
        cases = cases_of_check(name, source, is_small=job.is_small)
        yield name, partial(one_row, run_check, cases, job.seconds_left, select_backend(source.device))


def cases_of_check(name: str, source: Source, *, is_small: bool) -> NamedCases:
    return (case for each in CASES[name] for case in each.cases(source, each.small if is_small else each.large))
