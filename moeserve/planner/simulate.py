"""`moeserve simulate`: serves recorded traffic on a simulated cluster in virtual time.

The scheduling is real: each replica of a `LockstepGroup` runs `Replica` and `Scheduler`, behind a `DPRouter`. The time
of a step comes from the cost model, and the time of a KV cache transfer from its bytes. Experts are placed and
rebalanced by expert_balance.py. The result depends only on the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from moeserve.errors import SettingsError
from moeserve.layers.moe.placement.placement import read_loads
from moeserve.models.model_config import ModelSpec
from moeserve.models.registry import describe
from moeserve.planner.costs import LayoutCosts
from moeserve.planner.estimate import estimate_layouts
from moeserve.planner.expert_balance import ExpertBalance, draw_loads
from moeserve.planner.hardware import Hardware
from moeserve.planner.layout import Layouts
from moeserve.planner.pool import PoolPlan
from moeserve.planner.serving import ClusterPlan, serve
from moeserve.planner.settings import Assumptions, ClusterSize, ExpertSettings, SimulationSettings
from moeserve.planner.simulation_report import Simulation
from moeserve.planner.traffic import Traffic


def simulate(
    find: Callable[[int], Layouts],
    hardware: Hardware,
    traffic: Traffic,
    size: ClusterSize,
    *,
    loads: Path | None = None,
    assumptions: Assumptions,
    settings: SimulationSettings,
    experts: ExpertSettings,
) -> Simulation:
    """Simulate one layout.

    Args:
        find: returns the layout of a pool for its number of ranks; see `find_layouts`.
        traffic: the traffic before its rate and lengths are scaled.
        loads: file of the initial expert loads; see `read_loads`. None: random loads.

    Raises:
        SettingsError: an impossible layout, traffic that does not fit into it, loads of another model, or both a file
            of loads and a skew.
        CheckpointError: see `describe`.
    """
    traffic, ranks_per_node = _scaled(traffic, settings), size.ranks_per_node

    def plan_pool(num_ranks: int, assumptions: Assumptions = assumptions) -> PoolPlan:
        found = find(num_ranks)
        (layout,) = found.layouts
        (estimate,) = estimate_layouts(found, hardware, traffic, assumptions, ranks_per_node=ranks_per_node).layouts
        if not estimate.cache_tokens:
            fault = f"{num_ranks} ranks of {hardware.name}, tp={layout.tp}: {estimate.refusal}"
            raise SettingsError(f"{fault}; use more ranks or a larger tp")
        description = describe(found.model, hf_overrides=found.hf_overrides)
        costs = LayoutCosts(description, found, layout, hardware, assumptions, ranks_per_node)
        initial = _initial_loads(description.model, loads, experts, settings.seed)
        return PoolPlan(
            num_nodes=num_ranks // ranks_per_node,
            costs=costs,
            balance=ExpertBalance(costs, experts, initial, settings.seed),
            cache_tokens=estimate.cache_tokens,
            cache_bytes_per_token=layout.cache_bytes_per_token,
        )

    plan = ClusterPlan(
        serving=tuple(map(plan_pool, size.serving)),
        prefill=tuple(plan_pool(num_ranks, replace(assumptions, exchange="by_node")) for num_ranks in size.prefill),
        resizes=tuple((resize.at_s, plan_pool(resize.num_ranks)) for resize in size.resizes),
    )
    costs, last_s = plan.serving[0].costs, traffic.requests[-1].arrival_s
    return Simulation(
        hardware=hardware.name,
        ranks_per_node=ranks_per_node,
        tp=costs.tp,
        pp=costs.pp,
        num_requests=len(traffic.requests),
        requests_per_s=len(traffic.requests) / last_s if last_s else 0.0,
        first_token_limit=settings.first_token_limit,
        output_token_limit=settings.output_token_limit,
        outcome=serve(traffic, plan, settings),
    )


def _initial_loads(
    config: ModelSpec, loads: Path | None, experts: ExpertSettings, seed: int
) -> Sequence[Sequence[float]]:
    """Return the loads of experts at the start, by layer."""
    if loads is None:
        return draw_loads(config.num_sparse_layers, config.num_experts, experts.skew, seed)
    if experts.skew:
        raise SettingsError(f"skew={experts.skew:g} draws random loads, but loads={loads} gives them; use one of them")
    return read_loads(loads, num_layers=config.num_sparse_layers, num_experts=config.num_experts)


def _scaled(traffic: Traffic, settings: SimulationSettings) -> Traffic:
    scaled = traffic.scaled(rate=settings.rate, length=settings.length)
    if settings.seconds is None:
        return scaled
    within = settings.seconds
    return replace(scaled, requests=tuple(each for each in scaled.requests if each.arrival_s < within))
