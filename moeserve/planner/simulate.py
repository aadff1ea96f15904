"""`moeserve simulate`: serves recorded traffic on a simulated cluster in virtual time.

The scheduling is real: each replica of a `LockstepGroup` runs `Replica` and `Scheduler`, behind a `DPRouter`. The time
of a step comes from the cost model, placement and rebalancing of experts from expert_balance.py, and the time of a KV
cache transfer from its bytes. The result depends only on the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeserve.config.settings import CacheDtypeName, DtypeName
from moeserve.errors import SettingsError
from moeserve.layers.moe.placement.placement import read_loads
from moeserve.models.registry import describe
from moeserve.planner.costs import LayoutCosts
from moeserve.planner.estimate import estimate_layouts
from moeserve.planner.expert_balance import ExpertBalance, draw_loads
from moeserve.planner.hardware import Hardware
from moeserve.planner.layout import find_layouts
from moeserve.planner.pool import PoolPlan
from moeserve.planner.serving import ClusterPlan, serve
from moeserve.planner.settings import Assumptions, ClusterSize, ExpertSettings, SimulationSettings
from moeserve.planner.simulation_report import Simulation
from moeserve.planner.traffic import Traffic


def simulate(
    model: Path,
    hardware: Hardware,
    traffic: Traffic,
    size: ClusterSize,
    *,
    tp: int = 1,
    pp: int = 1,
    pipeline_layers: Sequence[int] | None = None,
    dtype: DtypeName | None = None,
    kv_cache_dtype: CacheDtypeName = "auto",
    loads: Path | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    assumptions: Assumptions,
    settings: SimulationSettings,
    experts: ExpertSettings,
) -> Simulation:
    """Simulate one layout.

    Args:
        model: folder with a config.json.
        traffic: before its rate and lengths are scaled.
        tp: ranks that share the heads of each replica.
        pp: pipeline stages of each replica.
        pipeline_layers: number of layers of each stage; None: even shares.
        loads: file of the initial expert loads; see `read_loads`. None: random loads.
        hf_overrides: changes to config.json.

    Raises:
        SettingsError: an impossible layout, traffic that does not fit into it, or loads that belong to another model or
            are given twice.
        CheckpointError: see `describe`.
    """
    if loads is not None and experts.skew:
        raise SettingsError(f"skew={experts.skew:g} draws random loads, but loads={loads} gives them; use one of them")
    traffic = _scaled(traffic, settings)
    description = describe(model, hf_overrides=hf_overrides)
    config = description.model
    sizes = {"num_layers": config.num_sparse_layers, "num_experts": config.num_experts}
    initial: Sequence[Sequence[float]]
    if loads is not None:
        initial = read_loads(loads, **sizes)
    else:
        initial = draw_loads(**sizes, skew=experts.skew, seed=settings.seed)

    def plan_pool(num_ranks: int, assumptions: Assumptions = assumptions) -> PoolPlan:
        found = find_layouts(
            model,
            num_ranks,
            dtype,
            tp,
            kv_cache_dtype=kv_cache_dtype,
            pp=pp,
            pipeline_layers=pipeline_layers,
            num_redundant=experts.num_redundant_experts,
            hf_overrides=hf_overrides,
        )
        (layout,) = found.layouts
        estimates = estimate_layouts(found, hardware, traffic, assumptions, ranks_per_node=size.ranks_per_node)
        (estimate,) = estimates.layouts
        if not estimate.cache_tokens:
            fault = f"{num_ranks} ranks of {hardware.name}, tp={tp}: {estimate.refusal}"
            raise SettingsError(f"{fault}; use more ranks or a larger tp")
        costs = LayoutCosts(description, found, layout, hardware, assumptions, size.ranks_per_node)
        return PoolPlan(
            num_nodes=num_ranks // size.ranks_per_node,
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
    last_s = traffic.requests[-1].arrival_s
    return Simulation(
        hardware=hardware.name,
        ranks_per_node=size.ranks_per_node,
        tp=tp,
        pp=pp,
        num_requests=len(traffic.requests),
        requests_per_s=len(traffic.requests) / last_s if last_s else 0.0,
        first_token_limit=settings.first_token_limit,
        output_token_limit=settings.output_token_limit,
        outcome=serve(traffic, plan, settings),
    )


def _scaled(traffic: Traffic, settings: SimulationSettings) -> Traffic:
    scaled = traffic.scaled(rate=settings.rate, length=settings.length)
    if settings.seconds is None:
        return scaled
    within = settings.seconds
    return replace(scaled, requests=tuple(each for each in scaled.requests if each.arrival_s < within))
