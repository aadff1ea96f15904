"""Refuses settings that need more memory than a rank has beside its weights."""

from __future__ import annotations

from moeserve.config.engine_config import EngineConfig
from moeserve.errors import SettingsError
from moeserve.kv.layer_cache import CacheNeeds
from moeserve.machine import free_memory, shown_bytes

BYTES_PER_REQUEST = 512  # bytes of a rank's and a scheduler's tables for a running request, without blocks and states
BYTES_PER_BLOCK = 4  # bytes of an entry of a block table


def require_room(config: EngineConfig, needs: CacheNeeds, free: int) -> None:
    """Refuse settings whose memory this rank will not have. Called before weights are loaded, which may take minutes.

    Args:
        needs: cache memory that all layers of this rank need.
        free: bytes that this rank may allocate besides its weights.

    Raises:
        SettingsError: max_num_seqs, kv_cache_memory or kv_host_memory is too large.
    """
    schedule, cache = config.schedule, config.cache
    num_ranks = config.parallel.num_sharing_ranks
    share = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
    num_blocks = -(-schedule.max_model_len // cache.block_size) * len(needs.rules.tables)
    tables = schedule.max_num_seqs * (BYTES_PER_REQUEST + BYTES_PER_BLOCK * num_blocks)
    states = num_states_of(config) * needs.row_bytes
    if tables + states > free:
        saved = f" with num_saved_states={cache.num_saved_states}" if states else ""
        raise SettingsError(
            f"max_num_seqs={schedule.max_num_seqs}{saved} does not fit in memory: the tables and states of these "
            f"requests take {shown_bytes(tables + states)}, but {shown_bytes(free)} are free beside the weights"
            f"{share}; about {schedule.max_num_seqs * free // (tables + states)} requests fit"
        )
    left = free - tables - states
    if cache.kv_cache_memory is not None:
        _require("kv_cache_memory", cache.kv_cache_memory, left, share)
    if config.store.kv_file is None:
        on_host = (
            free_memory(config.parallel.num_sharing_ranks)
            if config.compute.device == "cuda"
            else left - (cache.kv_cache_memory or 0)
        )
        _require("kv_host_memory", config.store.kv_host_memory, on_host, share)


def num_states_of(config: EngineConfig) -> int:
    """Return the number of rows for states: one or, with drafts, two per running request, and one per saved state."""
    rows_per_request = 1 if config.schedule.speculative_config is None else 2
    return rows_per_request * config.schedule.max_num_seqs + (config.cache.num_saved_states or 0)


def _require(setting: str, num_bytes: int, left: int, share: str) -> None:
    if num_bytes > left:
        raise SettingsError(
            f"{setting}={num_bytes} does not fit in memory: these are {shown_bytes(num_bytes)}, but "
            f"{shown_bytes(max(0, left))} are free beside the weights{share}; set it to less than that"
        )
