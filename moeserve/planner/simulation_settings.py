"""Settings of a simulation. Defaults are those of the engine on a GPU, as far as it has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from moeserve.config.settings import PositiveInt, setting

_Factor = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """Traffic and scheduling"""

    rate: _Factor = setting(1.0, "factor on the request rate of the traffic")
    length: _Factor = setting(1.0, "factor on the lengths of prompts and outputs")
    seconds: _Factor | None = setting(None, "simulate only the requests that arrive in the first seconds; none: all")
    max_num_seqs: PositiveInt = setting(256, "most requests that a replica runs in one step")
    max_num_batched_tokens: PositiveInt = setting(8192, "most tokens that a replica computes in one step")
    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = setting(16, "tokens per block of the KV cache")
    enable_prefix_caching: bool = setting(
        True, "keep the blocks of finished requests for prompts with the same prefix, if the traffic records prefixes"
    )
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = setting(0, "seed of loads, drift and counts")


@dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """Load and placement of experts"""

    skew: Annotated[float, msgspec.Meta(ge=0, le=5)] = setting(
        0.0, "without --loads: standard deviation of the logarithm of experts' loads; 0: equal loads"
    )
    drift: Annotated[float, msgspec.Meta(ge=0, le=1000)] = setting(
        0.0, "share of a layer's experts that exchange their loads with others per hour"
    )
    num_redundant_experts: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = setting(
        0, "slots beyond one for each expert, over all ranks together"
    )
    shared_as_routed: bool = setting(
        False, "shared experts are placed as experts that every token chooses, with copies; otherwise on every rank"
    )
    placement: Literal["even", "loads"] = setting(
        "even",
        "placement at the start; even: in order (with --shared-as-routed: balanced for equal routed loads); "
        "loads: balanced for the loads at the start",
    )
    rebalance: Literal["off", "auto"] = setting(
        "off",
        "auto: after each window, experts move by its counts if the forecast gain exceeds the cost",
    )
    rebalance_window: _Factor = setting(60.0, "seconds of virtual time in which loads are counted")
    rebalance_horizon: _Factor = setting(600.0, "seconds for which counted loads are assumed to last")
    rebalance_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = setting(
        0.1, "maximum that moves add to the time of a step, as a share of it"
    )
