"""The results of a simulation, and their tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.machine import shown_bytes
from moeserve.planner.expert_balance import Rebalance
from moeserve.planner.formula import shown_seconds

MAX_LISTED = 12  # rebalances


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of some values; 0 without values."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        ordered = sorted(values) or [0.0]
        at = [ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] for percent in (50, 90, 99)]
        return cls(*at)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of serving the traffic. Times are in virtual seconds."""

    num_finished: int
    prompt_tokens: int  # prompt tokens of finished requests; the next two fields also count finished requests only
    cached_tokens: int  # prompt tokens found in the prefix cache when the request was first admitted
    output_tokens: int
    seconds: float  # from the first arrival to the last end
    busy_s: float  # the part of these in which steps ran
    output_tokens_per_s: float
    first_token_s: Percentiles  # after the arrival
    gap_s: Percentiles  # between one token of a request and the next; of all tokens
    output_token_s: Percentiles  # between tokens after the first; mean of each request with several
    num_steps: int
    step_s: Percentiles  # on the accelerators, from the first pipeline stage to the last
    decode_only_share: float  # of the steps
    host_s: float  # work of the host for all steps
    host_waited_s: float  # the part of it in which the accelerators waited; the rest was hidden
    fullest_rank: Percentiles  # rows over the mean in each step, by placement and chance
    tokens_per_step: float
    idle_step_share: float  # share of all replicas' steps in which one had nothing to run while another had
    num_replicas_used: int
    num_preemptions: int
    cache_used_most: float  # maximum share of one replica's blocks
    # Expected rows of the fullest rank over the mean, by the placements; mean of the layers, without chance:
    balance_at_start: float
    balance_mean: float  # mean of the time in which steps ran
    balance_at_end: float
    rebalances: tuple[Rebalance, ...]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The layout and the traffic of a simulation, and its outcome."""

    hardware: str
    num_nodes: int
    ranks_per_node: int
    tp: int
    dp: int
    pp: int
    cache_tokens: int  # capacity of a replica
    num_requests: int
    requests_per_s: float
    outcome: Outcome


def as_text(found: Simulation) -> str:
    """Return the results as tables."""
    outcome = found.outcome
    pp = f", pp {found.pp}" if found.pp > 1 else ""
    hidden = 1 - outcome.host_waited_s / outcome.host_s if outcome.host_s else 1.0
    lines = [
        f"{found.num_nodes} x {found.ranks_per_node} {found.hardware}, tp {found.tp}, dp {found.dp}{pp}, "
        f"{found.cache_tokens} tokens in the KV cache of a replica",
        f"{found.num_requests} requests, {found.requests_per_s:.2f} in a second",
        "",
        f"{'finished requests':<28}{outcome.num_finished}, in {outcome.seconds:.2f} s, with steps in "
        f"{outcome.busy_s:.2f} s of them",
        f"{'prompt tokens':<28}{outcome.prompt_tokens} ({outcome.cached_tokens} from the prefix cache)",
        f"{'output tokens':<28}{outcome.output_tokens}, {outcome.output_tokens_per_s:.0f} in a second",
        f"{'steps':<28}{outcome.num_steps}, of {outcome.tokens_per_step:.1f} tokens; "
        f"{outcome.decode_only_share:.1%} only decode",
        f"{'work of the host':<28}{outcome.host_s:.2f} s, {hidden:.1%} hidden behind steps",
        f"{'idle steps':<28}{outcome.idle_step_share:.1%}; {outcome.num_replicas_used} of {found.dp} replicas served",
        f"{'KV cache in use':<28}at most {outcome.cache_used_most:.1%} of a replica's; "
        f"{outcome.num_preemptions} preemptions",
        "",
        f"{'':<28}{'p50':>12}{'p90':>12}{'p99':>12}",
        _times("time to the first token", outcome.first_token_s),
        _times("between two tokens", outcome.gap_s),
        _times("time per output token", outcome.output_token_s),
        _times("step", outcome.step_s),
        f"{'fullest rank in a step':<28}" + "".join(f"{value:>12.2f}" for value in vars(outcome.fullest_rank).values()),
        "",
        f"{'fullest rank by placement':<28}{outcome.balance_at_start:.2f} at the start, "
        f"{outcome.balance_mean:.2f} on average, {outcome.balance_at_end:.2f} at the end",
    ]
    if outcome.rebalances:
        lines += ["", f"{'rebalanced at':>13}{'layers':>8}{'moved':>12}{'takes':>12}{'balance':>16}"]
        lines += map(_rebalance_line, outcome.rebalances[:MAX_LISTED])
        if len(outcome.rebalances) > MAX_LISTED:
            lines.append(f"{'':>13}and {len(outcome.rebalances) - MAX_LISTED} more, which --json shows")
    return "\n".join(lines)


def _rebalance_line(each: Rebalance) -> str:
    return (
        f"{each.at_s:>11.0f} s{each.num_layers:>8}{shown_bytes(round(each.num_bytes)):>12}"
        f"{shown_seconds(each.transfer_s):>12}{each.balance_before:>8.2f} ->{each.balance_after:>5.2f}"
    )


def _times(name: str, values: Percentiles) -> str:
    return f"{name:<28}" + "".join(f"{shown_seconds(value):>12}" for value in vars(values).values())
