"""What a simulation is asked for. Defaults are those of the engine on a GPU, where it has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from moeserve.config.settings import PositiveInt, setting

_Factor = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """Traffic and scheduling"""

    rate: _Factor = setting(1.0, "requests come so many times as densely as in the traffic")
    length: _Factor = setting(1.0, "prompts and outputs are so many times as long")
    seconds: _Factor | None = setting(
        None, "only the requests that come in the first so many seconds, until the last of them ends; none: all"
    )
    max_num_seqs: PositiveInt = setting(256, "most requests that a replica runs in one step")
    max_num_batched_tokens: PositiveInt = setting(8192, "most tokens that a replica computes in one step")
    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = setting(16, "tokens per block of the KV cache")
    enable_prefix_caching: bool = setting(
        True, "keep the blocks of finished requests for prompts that begin alike, if the traffic tells which do"
    )
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = setting(0, "of loads, drift and counts")


@dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """Load and placement of experts"""

    skew: Annotated[float, msgspec.Meta(ge=0, le=5)] = setting(
        0.0, "without --loads: standard deviation of the logarithm of experts' loads; 0: all are alike"
    )
    drift: Annotated[float, msgspec.Meta(ge=0, le=1000)] = setting(
        0.0, "share of a layer's experts that exchange their loads with others in an hour"
    )
    num_redundant_experts: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = setting(
        0, "slots beyond one for each expert, over all ranks together"
    )
    shared_as_routed: bool = setting(
        False, "shared experts lie in slots, with copies, as experts that every token chooses; otherwise on every rank"
    )
    placement: Literal["even", "loads"] = setting(
        "even",
        "of experts at the start; even: in their order (with --shared-as-routed: as if routed ones were alike), loads: "
        "balanced, by the loads of the start",
    )
    rebalance: Literal["off", "auto"] = setting(
        "off",
        "auto: after each window, experts move by what they were given in it, where the forecast gain is worth it",
    )
    rebalance_window: _Factor = setting(60.0, "seconds of virtual time in which loads are counted")
    rebalance_horizon: _Factor = setting(600.0, "seconds for which loads are forecast to stay as they were counted")
    rebalance_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = setting(
        0.1, "most that moving may add to the time of a step, as a share of it"
    )
