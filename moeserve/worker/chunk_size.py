"""The largest step of a model whose experts are partly on disk."""

from __future__ import annotations

import functools
import logging

from moeserve.config.devices import DEVICES
from moeserve.config.engine_config import EngineConfig
from moeserve.kv.rank.cache import free_bytes, measure_step_memory
from moeserve.memory import free_pool
from moeserve.worker.profiling import largest_step, make_probe, run_for_memory
from moeserve.worker.rank_context import RankContext
from moeserve.worker.weight_sources.source import LoadedModel

logger = logging.getLogger(__name__)

MOST_SHARE = 4  # a step may take this part of the memory that is left beside weights, experts and a given KV cache


def choose_chunk_size(config: EngineConfig, loaded: LoadedModel, context: RankContext, reserved_bytes: int) -> int:
    """Return the most tokens of a step: the user's setting, or as many as memory allows. Collective: all ranks.

    A prompt reads each absent expert once for each of its chunks, so larger chunks read less. If all experts are in
    memory, the size is the default of the device. From there it doubles while a step twice as large, in proportion to
    the last trial step, has room on all ranks, so that no trial step takes memory that does not exist.

    Args:
        reserved_bytes: bytes of this rank that only look free, see `count_blocks`.
    """
    schedule = config.schedule
    num_tokens, most = DEVICES[config.compute.device].max_num_batched_tokens, schedule.max_num_batched_tokens
    if not schedule.max_num_batched_tokens_may_shrink or most <= num_tokens:
        return most
    world = loaded.model.groups.world
    if world.all_reduce_minimum(int(loaded.expert_store is not None)) == 0:  # collective: all ranks
        return num_tokens
    probe = make_probe(loaded.model, context, config)
    while num_tokens < most:
        run = functools.partial(run_for_memory, probe, largest_step(config, num_tokens))  # collective: all ranks
        free_pool()  # otherwise only what this step takes in addition to the last one would be measured
        step, following = measure_step_memory(run, config.compute.device), min(2 * num_tokens, most)
        free_pool()
        left = free_bytes(config) - reserved_bytes - (config.cache.kv_cache_memory or 0)
        may_double = step * following // num_tokens <= left // MOST_SHARE
        if not world.all_reduce_minimum(int(may_double)):  # collective: all ranks
            break
        num_tokens = following
    if loaded.model.groups.rank == 0:
        logger.info(
            "a step computes up to %d tokens of prompts, for which each expert is read once (max_num_batched_tokens)",
            num_tokens,
        )
    return num_tokens
