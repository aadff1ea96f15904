"""Efficiencies of the cost model: the fractions of the hardware's peak rates that a step reaches.

Most terms of `CALIBRATED` come from the kernel benchmarks that DeepEP, DeepGEMM and FlashMLA publish. Two terms,
`passes` here and `Assumptions.expert_imbalance`, are each fitted to one published measurement of a whole system.
docs/planning.md compares the model with other systems; tests/unit/test_calibration.py repeats the fits. Sources:
https://github.com/deepseek-ai/DeepGEMM/blob/78cacf70d41d15d688bd493ebc85845f7f2a3d5d/README.md,
https://github.com/deepseek-ai/FlashMLA, https://github.com/pytorch/benchmark/pull/2391 (FlashAttention-3),
https://github.com/deepseek-ai/DeepEP/blob/main/docs/legacy.md, https://github.com/deepseek-ai/profile-data,
https://lmsys.org/blog/2025-05-05-large-scale-ep (SGLang).
"""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.planner.settings import Assumptions


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Terms of the cost model that depend on the engine. Fractions are relative to the peak values in `Hardware`."""

    memory: float  # fraction of the memory bandwidth that matrix products reach when they read weights
    products: float  # fraction of the peak rate that matrix products reach
    cache: float  # fraction of the memory bandwidth that attention reaches when it reads the KV cache
    attention: float  # fraction of the bfloat16 rate that attention reaches
    node_links: float  # fraction of the bandwidth of links inside a node that an exchange reaches
    direct_network: float  # fraction of the network bandwidth that a direct exchange reaches
    forwarding_network: float  # fraction of the network bandwidth that a by_node exchange reaches
    exchange_latency: float  # seconds that each dispatch and each combine takes beyond its transfer time
    # Used only with two-batch overlap:
    forwarding_cores: float  # fraction of the cores that a by_node exchange occupies throughout the step
    exchange_on_cores: float  # seconds for which each dispatch and each combine of a direct exchange occupies all cores
    is_paired: bool  # direct dispatch overlaps only work before attention, combine only attention and the work after
    # Work between the matrix products:
    passes: float  # number of times that each value between two matrix products is read or written; 0: not counted


CALIBRATED = Calibration(
    # DeepGEMM's table of 28 matrix products; the traffic of inputs and outputs is counted separately.
    memory=0.74,
    products=0.70,
    # FlashMLA: 3000 of 3350 GB/s, and 580 of 989 TFLOP/s. FlashAttention-3 reaches 590 on prompts of 4096 tokens.
    cache=0.90,
    attention=0.59,
    # DeepEP's 12 low-latency exchanges, and its normal kernels on 32 and 64 ranks without the rows that stay local.
    node_links=0.86,
    direct_network=0.97,
    forwarding_network=0.87,
    exchange_latency=37e-6,
    # DeepSeek's profile: 24 of 132 cores for prefill, and the paired overlap for decoding. SGLang's report gives the
    # time for which dispatch occupies the cores; combine is assumed to take as long.
    forwarding_cores=24 / 132,
    exchange_on_cores=60e-6,
    is_paired=True,
    # Fitted to SGLang's prefill throughput with evenly loaded experts on 32 H100.
    passes=6.0,
)


def calibration_of(assumptions: Assumptions) -> Calibration:
    """Return the terms of the cost model for `Assumptions.speed`."""
    if assumptions.speed == "calibrated":
        return CALIBRATED
    return Calibration(
        memory=assumptions.memory_efficiency,
        products=assumptions.compute_efficiency,
        cache=assumptions.memory_efficiency,
        attention=assumptions.compute_efficiency,
        node_links=assumptions.link_efficiency,
        direct_network=assumptions.link_efficiency,
        forwarding_network=assumptions.link_efficiency,
        exchange_latency=assumptions.exchange_latency,
        forwarding_cores=0.0,
        exchange_on_cores=0.0,
        is_paired=False,
        passes=0.0,
    )
