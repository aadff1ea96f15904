"""The results of a simulation, and their tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.machine import shown_bytes
from moeserve.planner.costs import Assumptions
from moeserve.planner.expert_balance import Rebalance
from moeserve.planner.formula import shown_seconds
from moeserve.planner.simulation_settings import ExpertSettings, SimulationSettings

MAX_LISTED = 12  # rebalances


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Percentiles of some values; 0 without values."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        ordered = sorted(values)

        def at(percent: int) -> float:
            return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0

        return cls(p50=at(50), p90=at(90), p99=at(99))


@dataclass(frozen=True, kw_only=True)
class RankBalance:
    """Expected rows of the fullest rank over the mean, by the placements; mean of the layers, without chance."""

    at_start: float
    p50: float  # of the time in which steps ran
    worst: float
    at_end: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of serving the traffic. Times are in virtual seconds."""

    num_finished: int
    prompt_tokens: int  # of finished requests
    cached_tokens: int  # of these, found in the prefix cache when the request was first admitted
    output_tokens: int
    seconds: float  # from the first arrival to the last end
    busy_s: float  # of these, in which steps ran
    output_tokens_per_s: float
    output_tokens_per_busy_s: float
    first_token_s: Percentiles  # after the arrival
    output_token_s: Percentiles  # between tokens after the first; mean of each request with several
    num_steps: int
    step_s: Percentiles
    fullest_rank: Percentiles  # of steps: rows over the mean, by placement and chance; mean of the layers
    tokens_per_step: float
    empty_turn_share: float  # of all replicas' turns: one had nothing to run while another had
    num_replicas_used: int
    num_preemptions: int
    cache_used: float  # share of all replicas' blocks, mean over the time in which steps ran
    cache_used_most: float  # share of one replica's blocks, maximum
    rank_balance: RankBalance
    placement_epoch: int  # placements of layers that took effect
    moving_s: float  # by which moving experts made steps longer
    rebalances: tuple[Rebalance, ...]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The arguments of a simulation, and its outcome."""

    hardware: str
    num_nodes: int
    ranks_per_node: int
    tp: int
    dp: int
    cache_tokens: int  # capacity of a replica
    num_requests: int
    requests_per_s: float
    assumptions: Assumptions
    settings: SimulationSettings
    experts: ExpertSettings
    outcome: Outcome


def as_text(found: Simulation) -> str:
    """Return the results as tables."""
    outcome, balance = found.outcome, found.outcome.rank_balance
    lines = [
        f"{found.num_nodes} x {found.ranks_per_node} {found.hardware}, tp {found.tp}, dp {found.dp}, "
        f"{found.cache_tokens} tokens in the KV cache of a replica",
        f"{found.num_requests} requests, {found.requests_per_s:.2f} in a second",
        "",
        f"{'finished requests':<28}{outcome.num_finished}, in {outcome.seconds:.2f} s, with steps in "
        f"{outcome.busy_s:.2f} s of them",
        f"{'prompt tokens':<28}{outcome.prompt_tokens} ({outcome.cached_tokens} from the prefix cache)",
        f"{'output tokens':<28}{outcome.output_tokens}, {outcome.output_tokens_per_s:.0f} in a second, "
        f"{outcome.output_tokens_per_busy_s:.0f} in a second of steps",
        f"{'steps':<28}{outcome.num_steps}, of {outcome.tokens_per_step:.1f} tokens",
        f"{'empty turns':<28}{outcome.empty_turn_share:.1%}; {outcome.num_replicas_used} of {found.dp} replicas served",
        f"{'KV cache in use':<28}{outcome.cache_used:.2%}, at most {outcome.cache_used_most:.1%} of a replica's; "
        f"{outcome.num_preemptions} preemptions",
        "",
        f"{'':<28}{'p50':>12}{'p90':>12}{'p99':>12}",
        _times("time to the first token", outcome.first_token_s),
        _times("time per output token", outcome.output_token_s),
        _times("step", outcome.step_s),
        f"{'fullest rank in a step':<28}" + "".join(f"{value:>12.2f}" for value in vars(outcome.fullest_rank).values()),
        "",
        f"{'fullest rank by placement':<28}{balance.at_start:.2f} at the start, {balance.p50:.2f} p50, "
        f"{balance.worst:.2f} at its worst, {balance.at_end:.2f} at the end",
    ]
    if found.experts.rebalance == "auto":
        num_bytes = sum(each.num_bytes for each in outcome.rebalances)
        lines += [
            f"{'rebalances':<28}{len(outcome.rebalances)}, {shown_bytes(round(num_bytes))} moved, "
            f"{outcome.placement_epoch} new placements of layers, {shown_seconds(outcome.moving_s)} added to steps",
        ]
    if outcome.rebalances:
        lines += ["", f"{'at':>10}{'layers':>8}{'moves':>8}{'moved':>12}{'takes':>12}{'forecast':>12}{'balance':>16}"]
        lines += map(_rebalance_line, outcome.rebalances[:MAX_LISTED])
        if len(outcome.rebalances) > MAX_LISTED:
            lines.append(f"{'':>10}and {len(outcome.rebalances) - MAX_LISTED} more, which --json shows")
    return "\n".join(lines)


def _rebalance_line(each: Rebalance) -> str:
    return (
        f"{each.at_s:>8.0f} s{each.num_layers:>8}{each.num_moves:>8}{shown_bytes(round(each.num_bytes)):>12}"
        f"{shown_seconds(each.transfer_s):>12}{shown_seconds(each.gain_s):>12}"
        f"{each.balance_before:>8.2f} ->{each.balance_after:>5.2f}"
    )


def _times(name: str, values: Percentiles) -> str:
    return f"{name:<28}" + "".join(f"{shown_seconds(value):>12}" for value in vars(values).values())
