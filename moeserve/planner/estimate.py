"""Estimates for the layouts of a model on accelerators: KV cache, exchange, balance, and tokens per second.

Estimates are computed from the hardware and from `Assumptions` about how well an engine uses it. Nothing is measured.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, get_args

from moeserve.machine import shown_bytes
from moeserve.models.expert_store.budget import AUTO_SHARE, outlook
from moeserve.models.experts_beside_gpu import host_outlook
from moeserve.models.registry import describe
from moeserve.models.summary import Part
from moeserve.planner.costs import LayoutCosts, ReplicaLoad, StepLoad, has_mxfp4, is_fp8
from moeserve.planner.formula import Formula, shown_seconds
from moeserve.planner.hardware import Hardware
from moeserve.planner.layout import Layout, Layouts, Stage
from moeserve.planner.settings import Assumptions, Speed
from moeserve.planner.traffic import Lengths, Traffic

DECODE_REQUESTS = 128
PREFILL_TOKENS = 4096
# All other parts are small, or lose too much accuracy in fp8.
FP8_PARTS = ("attention", "dense networks", "routed experts", "shared experts", "latent projections")


@dataclass(frozen=True, kw_only=True)
class OverlapGain:
    """Effect of two-batch overlap: the time of a step divided into two micro-batches, and of the undivided step."""

    whole_s: float
    halves_s: float
    least_tokens: int | None  # minimum tokens per replica for a gain, within 10%; None: no gain even at this load

    def as_text(self) -> str:
        from_tokens = "never faster" if self.least_tokens is None else f"faster from {self.least_tokens} tokens"
        return f"{shown_seconds(self.halves_s)} instead of {shown_seconds(self.whole_s)}, {from_tokens}"


@dataclass(frozen=True, kw_only=True)
class PhaseEstimate:
    """An estimate of steps that only decode, or only compute prompts. All replicas have the same number of tokens."""

    tokens_per_replica: int  # in one step
    # At the optimum, and with the calibrated terms:
    step_s: float  # from the first pipeline stage to the last
    tokens_per_s: float  # of all replicas together
    calibrated_step_s: float
    calibrated_tokens_per_s: float
    # At the speed that `Assumptions.speed` selects:
    slowest_stage_s: float  # in a full pipeline, one step ends in each such interval
    exchange_s: float  # dispatch and combine of one MoE layer
    sent_bytes: float  # bytes that a rank sends to other ranks in one MoE layer
    fullest_rank: float  # rows of the fullest rank over the mean
    overlap: OverlapGain
    calibrated_overlap: OverlapGain
    formulas: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of one layout."""

    tp: int
    dp: int
    pp: int
    weight_bytes: int  # on the rank with the most weights
    cache_tokens: int  # capacity of a replica's cache
    cache_requests: int  # the same capacity in decoding requests of average length
    refusal: str | None  # the reason why no request fits into the memory; None: requests fit
    memory_formulas: tuple[str, ...]
    decode: PhaseEstimate | None  # None: the cache does not hold a request
    prefill: PhaseEstimate | None


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The estimates of all possible layouts, in the order of `Layouts`."""

    hardware: str
    num_nodes: int
    ranks_per_node: int
    weights: str  # format of attention, experts and dense networks: fp8, or the name of a dtype
    assumptions: Assumptions
    lengths: Lengths
    traffic_note: str  # see `Traffic`
    layouts: tuple[Estimate, ...]


def estimate_layouts(
    found: Layouts,
    hardware: Hardware,
    traffic: Traffic,
    assumptions: Assumptions,
    *,
    ranks_per_node: int,
    decode_requests: int = DECODE_REQUESTS,
    prefill_tokens: int = PREFILL_TOKENS,
) -> Estimates:
    """Estimate every possible layout.

    Args:
        found: layouts over whole nodes.
        decode_requests: concurrent requests of each replica, limited by the capacity of its KV cache. They are divided
            equally over the pipeline stages.
        prefill_tokens: prompt tokens that each replica computes in a step.

    Raises:
        CheckpointError: see `describe`.
    """
    assert found.num_ranks % ranks_per_node == 0
    description = describe(found.model, hf_overrides=found.hf_overrides)

    def estimate(layout: Layout) -> Estimate:
        def costs_of(speed: Speed, overlap: bool) -> LayoutCosts:
            assumed = replace(assumptions, speed=speed, overlap=overlap)
            return LayoutCosts(description, found, layout, hardware, assumed, ranks_per_node)

        costs = {(speed, overlap): costs_of(speed, overlap) for speed in get_args(Speed) for overlap in (False, True)}
        return _estimate(layout, costs, assumptions, hardware, traffic.lengths, decode_requests, prefill_tokens)

    in_mxfp4 = ", experts in mxfp4" if has_mxfp4(description, assumptions, found.dtype) else ""
    return Estimates(
        hardware=hardware.name,
        num_nodes=found.num_ranks // ranks_per_node,
        ranks_per_node=ranks_per_node,
        weights=("fp8" if is_fp8(description, assumptions) else found.dtype) + in_mxfp4,
        assumptions=assumptions,
        lengths=traffic.lengths,
        traffic_note=traffic.note,
        layouts=tuple(estimate(layout) for layout in found.layouts if layout.refusal is None),
    )


_Costs: TypeAlias = dict[tuple[Speed, bool], LayoutCosts]  # by speed, and by the use of two-batch overlap


def _estimate(
    layout: Layout,
    costs: _Costs,
    assumptions: Assumptions,
    hardware: Hardware,
    lengths: Lengths,
    decode_requests: int,
    prefill_tokens: int,
) -> Estimate:
    weights, cache = _memory(layout, costs["optimum", False], hardware, lengths.decode_context)
    numbers = {"tokens": cache.value, "tokens_of_a_request": lengths.decode_context}
    requests = Formula("the same", "{tokens} / {tokens_of_a_request}", numbers, "requests")
    cache_tokens, cache_requests = int(cache.value), int(requests.value)
    decoding = -(-min(decode_requests, cache_requests) // layout.pp)
    prefilling = min(prefill_tokens, cache_tokens)
    decode = ReplicaLoad(num_decoding=decoding, decode_pairs=decoding * lengths.decode_context)
    prefill = ReplicaLoad(num_prefill=prefilling, prefill_pairs=prefilling * lengths.pairs_per_prompt_token)
    return Estimate(
        tp=layout.tp,
        dp=layout.dp,
        pp=layout.pp,
        weight_bytes=int(weights.value),
        cache_tokens=cache_tokens,
        cache_requests=cache_requests,
        refusal=None if cache_requests else _shortage(layout, costs["optimum", False], weights.value, hardware.memory),
        memory_formulas=(weights.as_text(), cache.as_text(), requests.as_text()),
        decode=_phase(costs, assumptions, decode) if decoding else None,
        prefill=_phase(costs, assumptions, prefill) if prefilling else None,
    )


def _memory(layout: Layout, costs: LayoutCosts, hardware: Hardware, context: float) -> tuple[Formula, Formula]:
    """Return the bytes of a rank's weights and the tokens of a replica's cache, in the stage that can cache the fewest.

    Args:
        context: tokens of a request in the cache.
    """

    def of_stage(stage: Stage) -> tuple[Formula, Formula]:
        # Layers with a sliding window keep only the last tokens of each request.
        shares = (min(1, rule.num_kept(sys.maxsize) / context) for rule in stage.cache.rules.tables)
        bytes_per_token = (-(-num_bytes // stage.cache.block_size) for num_bytes in stage.cache.block_bytes)
        numbers: dict[str, float] = {
            "fp8_parameters": sum(part.num_parameters for part in stage.parts if _is_fp8(part, costs)),
            "bytes_of_others": sum(part.num_bytes for part in stage.parts if not _is_fp8(part, costs)),
        }
        weights = Formula("weights of a rank", "{fp8_parameters} + {bytes_of_others}", numbers, "bytes")
        numbers = {
            "memory": hardware.memory,
            "share": costs.assumptions.memory_share,
            "weights": weights.value,
            "bytes_of_a_token": sum(map(operator.mul, bytes_per_token, shares)),
        }
        template = "max(0, ({memory} x {share} - {weights}) / {bytes_of_a_token})"
        return weights, Formula("KV cache of a replica", template, numbers, "tokens")

    return min(map(of_stage, layout.stages), key=lambda formulas: formulas[1].value)


def as_text(found: Estimates) -> str:
    """Return the estimates as two tables. With a single layout, its formulas follow."""
    lengths = found.lengths
    note = f"{found.traffic_note}; " if found.traffic_note else ""
    lines = [
        f"Estimates for {found.num_nodes} x {found.ranks_per_node} {found.hardware}, weights in {found.weights}, and "
        f"requests of {lengths.prompt_tokens:.0f} + {lengths.output_tokens:.0f} tokens ({note}"
        f"{lengths.decode_context:.0f} in the cache while they decode)",
        *_assumed(found.assumptions, max((layout.pp for layout in found.layouts), default=1)),
        "",
        f"{'tp':>4}{'dp':>5}{'weights':>11}{'KV cache of a replica':>23}" + _PHASE_HEADS[0].format("requests decoded"),
        f"{'':>9}{'per rank':>11}{'tokens':>12}{'requests':>11}" + _PHASE_HEADS[1].format("by a replica"),
    ]
    for layout in found.layouts:
        start = f"{layout.tp:>4}{layout.dp:>5}{shown_bytes(layout.weight_bytes):>11}"
        if layout.decode is None:
            lines.append(f"{start}  does not fit: {layout.refusal}")
        else:
            lines.append(f"{start}{layout.cache_tokens:>12}{layout.cache_requests:>11}{_phase_text(layout.decode)}")
    prefills = [(layout, layout.prefill) for layout in found.layouts if layout.prefill is not None]
    if prefills:
        lines += [
            "",
            f"{'tp':>4}{'dp':>5}{'':>34}" + _PHASE_HEADS[0].format("tokens of prompts"),
            f"{'':>43}" + _PHASE_HEADS[1].format("in a replica"),
        ]
    for layout, prefill in prefills:
        lines.append(f"{layout.tp:>4}{layout.dp:>5}{'':>34}{_phase_text(prefill)}")
    if len(found.layouts) == 1:
        (layout,) = found.layouts
        lines += ["", "Memory:", *layout.memory_formulas]
        for name, phase in (("decode", layout.decode), ("prefill", layout.prefill)):
            if phase is not None:
                lines += ["", f"A step of {name}:", *phase.formulas]
                lines.append(f"in halves: {phase.overlap.as_text()}; calibrated: {phase.calibrated_overlap.as_text()}")
    return "\n".join(lines)


_PHASE_HEADS = (
    f"{{:>19}}{'optimum:':>12}{'':>10}{'calibrated:':>14}{'':>10}{'a layer with experts:':>24}{'fullest':>10}",
    f"{{:>19}}{'step':>12}{'tokens/s':>10}{'step':>14}{'tokens/s':>10}{'exchange':>12}{'sent':>12}{'rank':>10}",
)


def _phase_text(phase: PhaseEstimate) -> str:
    return (
        f"{phase.tokens_per_replica:>19}{shown_seconds(phase.step_s):>12}{phase.tokens_per_s:>10.0f}"
        f"{shown_seconds(phase.calibrated_step_s):>14}{phase.calibrated_tokens_per_s:>10.0f}"
        f"{shown_seconds(phase.exchange_s):>12}{shown_bytes(round(phase.sent_bytes)):>12}{phase.fullest_rank:>10.2f}"
    )


def _assumed(assumptions: Assumptions, pp: int) -> list[str]:
    overlap = "halves of a step overlap" if assumptions.overlap else "no overlap"
    pipeline = f"Pipeline: {pp} stages with a step each. A step passes all stages; the slowest one limits tokens/s"
    return [
        f"Optimum: {assumptions.memory_efficiency:g} of the memory bandwidth, {assumptions.compute_efficiency:g} of "
        f"the rate of products, {assumptions.link_efficiency:g} of the links, "
        f"{shown_seconds(assumptions.exchange_latency)} for an exchange",
        f"Calibrated: terms of published kernels and engines, fullest rank at least {assumptions.expert_imbalance:g}",
        f"Both: {assumptions.exchange} exchange, {overlap}. Exchange and fullest rank below: {assumptions.speed}",
        *([pipeline] if pp > 1 else []),
    ]


def _phase(costs: _Costs, assumptions: Assumptions, of_replica: ReplicaLoad) -> PhaseEstimate:
    """Estimate a step in which all replicas have this load."""
    chosen = costs["optimum", False]
    load = StepLoad.of((of_replica,) * chosen.dp)
    at_speed = {speed: costs[speed, assumptions.overlap].for_step(load) for speed in get_args(Speed)}
    chosen = at_speed[assumptions.speed]
    best, expected = (at_speed[speed].stage_seconds(load) for speed in get_args(Speed))
    exchange = (term for term in chosen.terms(load) if term.formula.name in ("dispatch", "combine"))
    overlap, calibrated_overlap = (
        _overlap_gain(costs[speed, False], costs[speed, True], of_replica) for speed in get_args(Speed)
    )
    return PhaseEstimate(
        tokens_per_replica=round(load.most_tokens),
        step_s=sum(best),
        tokens_per_s=load.num_tokens / max(best),
        calibrated_step_s=sum(expected),
        calibrated_tokens_per_s=load.num_tokens / max(expected),
        slowest_stage_s=max(chosen.stage_seconds(load)),
        exchange_s=sum(term.seconds for term in exchange) / max(1, chosen.num_sparse_layers),
        sent_bytes=chosen.sent_bytes_per_token * load.most_tokens / chosen.tp,
        fullest_rank=chosen.imbalance(load.num_tokens).value,
        overlap=overlap,
        calibrated_overlap=calibrated_overlap,
        formulas=tuple(_formulas(chosen, load)),
    )


def _overlap_gain(whole: LayoutCosts, halves: LayoutCosts, of_replica: ReplicaLoad) -> OverlapGain:
    """Compare a step with two-batch overlap to the same step without it, for this load and for smaller ones."""

    def seconds(costs: LayoutCosts, num_tokens: int) -> float:
        share = num_tokens / most
        load = ReplicaLoad(**{name: number * share for name, number in vars(of_replica).items()})
        return sum(costs.stage_seconds(StepLoad.of((load,) * costs.dp)))

    most = of_replica.num_decoding + of_replica.num_prefill
    least, fewer = None, most
    while fewer and seconds(halves, fewer) < seconds(whole, fewer):
        least, fewer = fewer, fewer * 9 // 10
    return OverlapGain(whole_s=seconds(whole, most), halves_s=seconds(halves, most), least_tokens=least)


def _formulas(costs: LayoutCosts, load: StepLoad) -> Iterator[str]:
    """Yield the formula of each term of a step with its numbers, and the formula of their sum."""
    for term in costs.terms(load):
        where = f"Stage {term.stage}: " if costs.pp > 1 else ""
        yield f"{where}{term.formula.as_text()}\n    x {term.count} = {shown_seconds(term.seconds)}"
    if costs.has_exchange:
        for formula in (*costs.leaving_rows, costs.imbalance(load.num_tokens)):
            yield formula.as_text()
    numbers: dict[str, float] = {"tokens_of_all_replicas": load.num_tokens}
    if costs.pp == 1:
        step = costs.step_seconds(load).formula
        numbers, slowest = numbers | {"step": step.value}, "{step}"
    else:
        of_stages = {f"stage_{number}": seconds for number, seconds in enumerate(costs.stage_seconds(load))}
        names = [f"{{{name}}}" for name in of_stages]
        step = Formula("step", " + ".join(names), of_stages)
        numbers, slowest = numbers | of_stages, f"max({', '.join(names)})"
    yield step.as_text()
    yield Formula("tokens per second", f"{{tokens_of_all_replicas}} / {slowest}", numbers, unit="").as_text()


def _shortage(layout: Layout, costs: LayoutCosts, weight_bytes: float, memory: float) -> str:
    usable_bytes = memory * costs.assumptions.memory_share
    if weight_bytes < usable_bytes:
        return "no room for the KV cache of a request"
    parts = max(layout.stages, key=lambda stage: stage.weight_bytes).parts
    counted = [replace(part, num_bytes=part.num_parameters) if _is_fp8(part, costs) else part for part in parts]
    from_disk = outlook(counted, int(usable_bytes * (1 - AUTO_SHARE)))
    beside = None
    if len(layout.holders) == 1:
        beside = host_outlook(parts, costs.sparse_layers, int(usable_bytes))
    return (
        f"the weights of a rank take {shown_bytes(round(weight_bytes))}, and weights and KV cache may take "
        f"{shown_bytes(round(usable_bytes))} of its memory"
        + (f"; on a CPU, {from_disk}" if from_disk else "")
        + (f"; {beside}" if beside else "")
    )


def _is_fp8(part: Part, costs: LayoutCosts) -> bool:
    return costs.is_fp8 and part.name in FP8_PARTS and not (costs.has_mxfp4 and part.dtype == "mxfp4")
