"""The results of a simulation, and their tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moeserve.machine import shown_bytes
from moeserve.planner.expert_balance import Rebalance
from moeserve.planner.formula import shown_seconds

MAX_LISTED = 12  # maximum number of rebalances in the table


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
class TransferTotals:
    """KV cache transfers of one kind, summed over all replicas of a pool."""

    num_transfers: int
    num_tokens: int
    num_bytes: int  # on one rank of each replica
    busy_s: float  # sum of the times for which links were busy
    takes_s: Percentiles  # from the scheduler's decision to the end of a transfer, including the wait for the link


@dataclass(frozen=True, kw_only=True)
class PoolOutcome:
    """Statistics of a pool of replicas in lockstep, from its start to its end."""

    name: str  # "prefill" or "decode", numbered if there are several; empty: one pool does both
    num_nodes: int
    dp: int
    cache_tokens: int  # capacity of each replica
    starts_at: float  # virtual time
    seconds: float  # from the start of the pool to its end
    busy_s: float  # part of `seconds` in which steps ran
    output_tokens: int
    output_tokens_per_s: float
    num_steps: int
    step_s: Percentiles  # on the accelerators, from the first pipeline stage to the last
    decode_only_share: float  # fraction of the steps
    host_s: float  # time that the host worked for all steps
    host_waited_s: float  # part of `host_s` in which the accelerators waited; the rest was hidden
    fullest_rank: Percentiles  # rows of the fullest rank over the mean in each step, by placement and random variation
    tokens_run: int
    tokens_per_step: float
    idle_step_share: float  # fraction of replica-steps in which the replica had no work but another had
    num_replicas_used: int
    num_preemptions: int
    cache_used_most: float  # maximum fraction of a replica's blocks in use
    loaded: TransferTotals  # from the host's memory
    saved: TransferTotals  # to the host's memory
    received: TransferTotals  # from replicas of another pool
    # Expected rows of the fullest rank over the mean, by the placements alone; mean over the layers.
    balance_at_start: float
    balance_mean: float  # mean over the time in which steps ran
    balance_at_end: float
    rebalances: tuple[Rebalance, ...]


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A change of the number of nodes during a simulation."""

    asked_s: float
    at_s: float  # end of the last step of the old size
    nodes_before: int
    nodes_after: int
    num_resumed: int  # requests that the new size continued
    pause_s: float  # from `at_s` to the next token of the first request to continue
    gap_s: Percentiles  # time between the tokens before and after the switch, of requests that had tokens before


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of serving the traffic. Times are in virtual seconds."""

    num_finished: int
    prompt_tokens: int  # prompt tokens of finished requests, as for the following counts of tokens
    repeated_tokens: int  # prompt tokens shared with an earlier prompt: the maximum that any cache could find
    # Prompt tokens found in the KV cache when the request was first admitted by the last pool that computed its prompt.
    # Tokens loaded from the host's memory just before are included.
    cached_tokens: int
    output_tokens: int
    seconds: float  # time from the first arrival to the last end
    output_tokens_per_s: float
    first_token_s: Percentiles  # time from the arrival to the first token
    gap_s: Percentiles  # time between consecutive tokens of a request, over all tokens
    output_token_s: Percentiles  # mean time per token after the first, of each request with at least two tokens
    num_good: int  # requests within the limits of the settings
    good_output_tokens_per_s: float  # output tokens of requests within the limits
    pools: tuple[PoolOutcome, ...]
    switches: tuple[Switch, ...]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The layout and the traffic of a simulation, and its outcome."""

    hardware: str
    ranks_per_node: int
    tp: int
    pp: int
    num_requests: int
    requests_per_s: float
    first_token_limit: float | None
    output_token_limit: float | None
    outcome: Outcome


def as_text(found: Simulation) -> str:
    """Return the results as tables."""
    outcome = found.outcome
    repeated = outcome.repeated_tokens / outcome.prompt_tokens
    lines = [
        *_heads(found),
        f"{found.num_requests} requests, {found.requests_per_s:.2f} in a second",
        "",
        f"{'finished requests':<28}{outcome.num_finished}, in {outcome.seconds:.2f} s",
        f"{'prompt tokens':<28}{outcome.prompt_tokens} ({outcome.cached_tokens} from the prefix cache; {repeated:.1%} "
        f"repeat an earlier prompt)",
        f"{'output tokens':<28}{outcome.output_tokens}, {outcome.output_tokens_per_s:.0f} in a second",
        *_goodput(found),
        "",
        f"{'':<28}{'p50':>12}{'p90':>12}{'p99':>12}",
        _times("time to the first token", outcome.first_token_s),
        _times("between two tokens", outcome.gap_s),
        _times("time per output token", outcome.output_token_s),
    ]
    for pool in outcome.pools:
        lines += ["", *_pool_lines(pool, is_one=len(outcome.pools) == 1)]
    if outcome.switches:
        lines += ["", f"{'size asked at':>13}{'taken over at':>15}{'nodes':>12}{'resumed':>9}{'pause':>12}"]
        lines[-1] += f"{'between tokens, p50':>21}{'p99':>12}"
        lines += map(_switch_line, outcome.switches)
    return "\n".join(lines)


def _heads(found: Simulation) -> Iterator[str]:
    pp = f", pp {found.pp}" if found.pp > 1 else ""
    for pool in found.outcome.pools:
        name = f"{pool.name}: " if pool.name else ""
        yield (
            f"{name}{pool.num_nodes} x {found.ranks_per_node} {found.hardware}, tp {found.tp}, dp {pool.dp}{pp}, "
            f"{pool.cache_tokens} tokens in the KV cache of a replica"
        )


def _goodput(found: Simulation) -> Iterator[str]:
    limits = {"to the first token": found.first_token_limit, "per output token": found.output_token_limit}
    asked = [f"{shown_seconds(limit)} {name}" for name, limit in limits.items() if limit is not None]
    if asked:
        outcome = found.outcome
        yield (
            f"{'within the limits':<28}{outcome.num_good} requests, {outcome.num_good / outcome.num_finished:.1%}; "
            f"{outcome.good_output_tokens_per_s:.0f} output tokens in a second ({', '.join(asked)})"
        )


def _pool_lines(pool: PoolOutcome, *, is_one: bool) -> list[str]:
    hidden = 1 - pool.host_waited_s / pool.host_s if pool.host_s else 1.0
    head = f"{pool.name or 'pool'} of {pool.num_nodes} nodes"
    copies = {"loaded from the host": pool.loaded, "saved to the host": pool.saved, "received": pool.received}
    lines = [
        f"{'steps' if is_one else head:<28}{pool.num_steps}, of {pool.tokens_per_step:.1f} tokens, in "
        f"{pool.busy_s:.2f} s; {pool.decode_only_share:.1%} only decode",
        f"{'work of the host':<28}{pool.host_s:.2f} s, {hidden:.1%} hidden behind steps",
        f"{'idle steps':<28}{pool.idle_step_share:.1%}; {pool.num_replicas_used} of {pool.dp} replicas served",
        f"{'KV cache in use':<28}at most {pool.cache_used_most:.1%} of a replica's; {pool.num_preemptions} preemptions",
        *(_copies_line(name, totals) for name, totals in copies.items() if totals.num_transfers),
    ]
    if not is_one:
        lines.append(
            f"{'output tokens':<28}{pool.output_tokens}, {pool.output_tokens_per_s:.0f} in a second, from "
            f"{pool.starts_at:.2f} s to {pool.starts_at + pool.seconds:.2f} s"
        )
    lines += [
        _times("step", pool.step_s),
        f"{'fullest rank in a step':<28}" + "".join(f"{value:>12.2f}" for value in vars(pool.fullest_rank).values()),
        f"{'fullest rank by placement':<28}{pool.balance_at_start:.2f} at the start, "
        f"{pool.balance_mean:.2f} on average, {pool.balance_at_end:.2f} at the end",
    ]
    if pool.rebalances:
        lines += ["", f"{'rebalanced at':>13}{'layers':>8}{'moved':>12}{'takes':>12}{'balance':>16}"]
        lines += map(_rebalance_line, pool.rebalances[:MAX_LISTED])
        if len(pool.rebalances) > MAX_LISTED:
            lines.append(f"{'':>13}and {len(pool.rebalances) - MAX_LISTED} more; use --json to see all")
    return lines


def _copies_line(name: str, totals: TransferTotals) -> str:
    return (
        f"{name:<28}{totals.num_tokens} tokens, {shown_bytes(totals.num_bytes)}, in {totals.num_transfers} transfers: "
        f"{shown_seconds(totals.takes_s.p50)} the median, {shown_seconds(totals.takes_s.p99)} p99"
    )


def _switch_line(each: Switch) -> str:
    nodes = f"{each.nodes_before} -> {each.nodes_after}"
    return (
        f"{each.asked_s:>11.0f} s{each.at_s:>13.2f} s{nodes:>12}{each.num_resumed:>9}{shown_seconds(each.pause_s):>12}"
        f"{shown_seconds(each.gap_s.p50):>21}{shown_seconds(each.gap_s.p99):>12}"
    )


def _rebalance_line(each: Rebalance) -> str:
    return (
        f"{each.at_s:>11.0f} s{each.num_layers:>8}{shown_bytes(round(each.num_bytes)):>12}"
        f"{shown_seconds(each.transfer_s):>12}{each.balance_before:>8.2f} ->{each.balance_after:>5.2f}"
    )


def _times(name: str, values: Percentiles) -> str:
    return f"{name:<28}" + "".join(f"{shown_seconds(value):>12}" for value in vars(values).values())
