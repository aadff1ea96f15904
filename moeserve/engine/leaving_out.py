"""The config with which some replicas serve on when others are left out, without a restart of their ranks."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.config.engine_config import EngineConfig
from moeserve.errors import EngineError


def without_others(config: EngineConfig, survivors: Sequence[int]) -> EngineConfig:
    """Return the config with which some of the replicas serve on, with the experts of all replicas.

    Args:
        survivors: indices of these replicas, ascending.

    Raises:
        EngineError: these replicas cannot serve on without a restart; the message has the reason.
    """
    from moeserve.layers.moe.placement.handover import hand_over
    from moeserve.models import registry
    from moeserve.worker.loading import place_experts

    weights, num_tp = config.weights, config.parallel.tensor_parallel_size
    description = registry.describe(weights.model_path, weights.model_impl, weights.hf_overrides)
    if config.schedule.num_mtp_drafts:
        description = description.with_draft_layers(config.schedule.num_mtp_drafts)
    num_ranks = config.parallel.data_parallel_size * num_tp  # ranks of a stage
    before = place_experts(config, description, num_ranks, [0] * num_ranks)
    reasons = {
        "no replica is left": not survivors,
        "experts are read from disk": weights.expert_memory is not None,
        "the weights are dummies": weights.load_format == "dummy",
    }
    for reason, holds in reasons.items():
        if holds:
            raise EngineError(f"replicas cannot be left out: {reason}")
    ranks = [replica * num_tp + rank for replica in survivors for rank in range(num_tp)]
    placements = [hand_over(placement, ranks) for placement in before]
    num_redundant = sum(placements[0].num_slots) - placements[0].num_logical if placements else 0
    return config.changed(
        parallel={"data_parallel_size": len(survivors)},
        experts={
            "dispatcher": config.experts.dispatcher if len(ranks) > 1 else "local",
            "placements": tuple(placement.to_json() for placement in placements),
            "num_redundant_experts": num_redundant,
        },
    )
