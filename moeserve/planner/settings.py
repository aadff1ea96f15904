"""Settings of estimates and simulations. Settings that the engine also has have the engine's default on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import msgspec

from moeserve.config.settings import PositiveInt, setting

_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Speed: TypeAlias = Literal["optimum", "calibrated"]
_Factor = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
_Bandwidth = Annotated[float, msgspec.Meta(gt=0, le=1e15)]


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumptions of the estimates"""

    speed: Speed = setting(
        "optimum",
        "times of steps; optimum: limited by the hardware, with the efficiencies and the latency below; calibrated: as "
        "in published engines, with fitted terms instead (`plan` always shows both, and the formulas of this one)",
    )
    expert_imbalance: Annotated[float, msgspec.Meta(ge=1, le=1e4)] = setting(
        1.27,
        "calibrated only: minimum of the expected rows of the fullest rank over the mean, as for real text with "
        "experts placed by counted loads; 1: even loads stay even",
    )
    memory_efficiency: _Share = setting(0.8, "fraction of the peak memory bandwidth that is reached")
    compute_efficiency: _Share = setting(0.6, "fraction of the peak rate that matrix products reach")
    link_efficiency: _Share = setting(0.8, "fraction of a link's peak bandwidth that exchanges reach")
    exchange_latency: Annotated[float, msgspec.Meta(ge=0, le=1)] = setting(
        5e-6, "seconds that each exchange takes in addition to its transfer time"
    )
    memory_share: _Share = setting(0.9, "fraction of the memory that weights and KV cache may take together")
    weights: Literal["auto", "dtype", "fp8"] = setting(
        "auto",
        "format of the weights of attention, experts and dense networks, and of their products; auto: fp8 if the "
        "checkpoint stores them so, else --dtype",
    )
    exchange: Literal["direct", "by_node"] = setting(
        "direct",
        "how rows are sent; direct: one row per expert on another rank; by_node: one row to each other node that has "
        "an expert of the token, forwarded within that node",
    )
    overlap: bool = setting(
        False, "two-batch overlap: divide steps into two halves, one exchanging rows while the other computes"
    )
    overlap_decode_tokens: PositiveInt = setting(
        1, "with --overlap: minimum tokens of the replica with the most, in steps that only decode"
    )
    overlap_prefill_tokens: PositiveInt = setting(1, "with --overlap: the same minimum, in steps with prompts")


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """Traffic and scheduling"""

    rate: _Factor = setting(1.0, "factor on the request rate of the traffic")
    length: _Factor = setting(1.0, "factor on the lengths of prompts and outputs")
    seconds: _Factor | None = setting(None, "simulate only the requests that arrive in the first seconds; none: all")
    max_num_seqs: PositiveInt = setting(256, "maximum requests that a replica runs in one step")
    max_num_batched_tokens: PositiveInt = setting(8192, "maximum tokens that a replica computes in one step")
    async_scheduling: bool = setting(True, "plan the next step while one runs; always off with several pipeline stages")
    host_time: Annotated[float, msgspec.Meta(ge=0, le=10)] = setting(
        0.002, "seconds that the host takes for each step: planning, messages and updates"
    )
    max_prefill_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = setting(
        512, "maximum prompt tokens in a step while any replica decodes; 0: no limit of their own"
    )
    kv_host_memory: int | str = setting(
        0, "size of the store behind the KV cache of each rank, in the host's memory, such as 64GiB; 0: none"
    )
    host_bandwidth: _Bandwidth = setting(
        64e9, "peak bandwidth between a rank and its host's memory, one direction; the default is PCIe 5.0 x16"
    )
    first_token_limit: _Factor | None = setting(
        None, "maximum seconds to the first token of a request that counts for the goodput"
    )
    output_token_limit: _Factor | None = setting(
        None, "maximum mean seconds per output token after the first, of a request that counts for the goodput"
    )
    start_time: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = setting(
        60.0, "seconds that the replicas of a new size take to start, while the old ones serve"
    )
    switch_time: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = setting(
        1.0, "seconds without steps while a new size takes over"
    )
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = setting(0, "seed of the experts' loads and their drift")


@dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """Load and placement of experts"""

    skew: Annotated[float, msgspec.Meta(ge=0, le=5)] = setting(
        0.0, "without --loads: standard deviation of the logarithm of experts' loads; 0: equal loads"
    )
    drift: Annotated[float, msgspec.Meta(ge=0, le=1000)] = setting(
        0.0, "fraction of a layer's experts that swap loads with others per hour"
    )
    num_redundant_experts: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = setting(
        0, "slots beyond one per expert, over all ranks together"
    )
    placement: Literal["even", "loads"] = setting(
        "even", "placement at the start; even: in order; loads: balanced for the initial loads"
    )
    rebalance: Literal["off", "auto"] = setting(
        "off", "auto: after each window, move experts by its counts if the forecast gain exceeds the cost"
    )
    rebalance_window: _Factor = setting(60.0, "seconds of virtual time over which loads are counted")
    rebalance_horizon: _Factor = setting(600.0, "seconds of steps for which counted loads are assumed to stay valid")


@dataclass(frozen=True)
class Resize:
    """A change of the number of ranks while serving."""

    at_s: float  # virtual time at which the change is requested
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class ClusterSize:
    """The ranks of a simulated cluster, in whole nodes."""

    ranks_per_node: int
    serving: tuple[int, ...]  # ranks of each pool that generates tokens; each pool runs in lockstep
    prefill: tuple[int, ...] = ()  # ranks of each pool that only computes prompts; empty: none
    resizes: tuple[Resize, ...] = ()  # allowed with a single pool only
