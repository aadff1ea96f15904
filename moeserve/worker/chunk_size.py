"""The largest step of a model whose experts are partly on disk."""

from __future__ import annotations

import functools
import logging

from moeserve.config.devices import DEVICES
from moeserve.config.engine_config import EngineConfig
from moeserve.kv.rank.cache import free_bytes, measure_step_memory
from moeserve.worker.profiling import largest_step, make_probe, run_for_memory
from moeserve.worker.rank_context import RankContext
from moeserve.worker.weight_sources.source import LoadedModel

logger = logging.getLogger(__name__)

MOST_SHARE = 4  # a step may take this part of the memory that is left beside weights, experts and a given KV cache


def choose_chunk_size(
    config: EngineConfig, loaded: LoadedModel, context: RankContext, *, replaces_another: bool
) -> int:
    """Return the most tokens of a step: the user's setting, or as many as memory allows. Collective: all ranks.

    A prompt reads each absent expert once for each of its chunks, so larger chunks read less. If all experts are in
    memory, the size is the default of the device.

    Args:
        replaces_another: this rank replaces one that has ended, while others may serve: it takes the default.
    """
    schedule = config.schedule
    default = DEVICES[config.compute.device].max_num_batched_tokens
    if not schedule.max_num_batched_tokens_may_shrink or schedule.max_num_batched_tokens <= default:
        return schedule.max_num_batched_tokens
    if replaces_another:
        return default
    world = loaded.model.groups.world
    if world.all_reduce_minimum(int(loaded.expert_store is not None)) == 0:  # collective: all ranks
        return default
    probe, num_tokens = make_probe(loaded.model, context, config), schedule.max_num_batched_tokens
    while num_tokens > default:
        run = functools.partial(run_for_memory, probe, largest_step(config, num_tokens))  # collective: all ranks
        step = measure_step_memory(run, config.compute.device)
        left = free_bytes(config) - loaded.reserved_bytes - (config.cache.kv_cache_memory or 0)
        if world.all_reduce_minimum(int(step <= left // MOST_SHARE)):  # collective: all ranks
            break
        num_tokens = max(default, num_tokens // 2)
    if loaded.model.groups.rank == 0:
        logger.info(
            "a step computes up to %d tokens of prompts, for which each expert is read once (max_num_batched_tokens)",
            num_tokens,
        )
    return num_tokens
