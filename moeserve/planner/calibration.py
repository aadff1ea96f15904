"""Shares of the hardware's peaks that steps reach: in the best case, and in published engines.

Most terms of `CALIBRATED` follow from tables of single kernels, which DeepEP, DeepGEMM and FlashMLA publish. Two terms
are fitted to systems, one figure of each: `passes` here, and `Assumptions.expert_imbalance`. docs/published_figures.md
has the sources and compares the result with systems that were not fitted; tests/unit/test_calibration.py repeats the
fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.planner.settings import Assumptions


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Terms of the cost model that depend on the engine. Shares are of the peaks in `Hardware`."""

    memory: float  # share of the memory bandwidth that products reach when they read weights
    products: float  # share of the rate that products reach
    cache: float  # share of the memory bandwidth that attention reaches when it reads the cache
    attention: float  # share of the bfloat16 rate that attention reaches
    node_links: float  # share of the links inside a node that an exchange reaches
    direct_network: float  # share of the network that a direct exchange reaches
    forwarding_network: float  # the same, by_node
    exchange_latency: float  # seconds that each of dispatch and combine takes beside its bytes
    # If two halves of a step overlap:
    forwarding_cores: float  # share of the cores that a by_node exchange occupies all the time
    exchange_on_cores: float  # seconds in which each of dispatch and combine occupies all cores, if direct
    is_paired: bool  # direct: dispatch hides behind projections and shared experts only, combine behind attention only
    # Beside the products:
    passes: float  # how often each value between products is read or written; 0: not counted


CALIBRATED = Calibration(
    # DeepGEMM's table of 28 products, with the bytes of inputs and outputs taken apart.
    memory=0.74,
    products=0.70,
    # FlashMLA: 3000 of 3350 GB/s, and 580 of 989 TFLOP/s. FlashAttention-3 reaches 590 on prompts of 4096 tokens.
    cache=0.90,
    attention=0.59,
    # DeepEP's 12 low-latency exchanges; and its normal kernels on 32 and 64 ranks, without the rows that stay.
    node_links=0.86,
    direct_network=0.97,
    forwarding_network=0.87,
    exchange_latency=37e-6,
    # DeepSeek's profile: 24 of 132 cores for prompts; the pairs for decoding. SGLang's report has the cores' part of a
    # dispatch, which is taken for combine too.
    forwarding_cores=24 / 132,
    exchange_on_cores=60e-6,
    is_paired=True,
    # Fitted to SGLang's prompts with even experts on 32 H100.
    passes=6.0,
)


def calibration_of(assumptions: Assumptions) -> Calibration:
    """Return the terms for `Assumptions.speed`."""
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
