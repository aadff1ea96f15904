"""Resolution of the caches, and of the store behind them."""

from __future__ import annotations

import logging

from moeserve.config.engine_config import CacheConfig, ScheduleConfig, StoreConfig
from moeserve.config.facts import Facts, from_settings
from moeserve.config.needs import Needs
from moeserve.config.settings import CacheDtypeName, CacheSettings
from moeserve.config.validation import parse_bytes
from moeserve.errors import SettingsError, shown

logger = logging.getLogger(__name__)


def resolve_cache(cache: CacheSettings, facts: Facts, schedule: ScheduleConfig) -> CacheConfig:
    """Return the sizes and formats of caches.

    Raises:
        SettingsError: the model does not support the settings.
    """
    needs = facts.checkpoint.needs
    memory_share = facts.device.memory_share
    if facts.on_gpu:
        memory_share = cache.gpu_memory_utilization or memory_share
    elif cache.gpu_memory_utilization is not None:
        logger.warning(
            "%s=%r has no effect on CPUs: a profiling run sizes the KV cache, or kv_cache_memory",
            "gpu_memory_utilization",
            cache.gpu_memory_utilization,
        )
    if cache.block_size and cache.block_size % needs.block_multiple:
        raise SettingsError(
            f"block_size={cache.block_size}: an entry of this model stands for {needs.block_multiple} tokens, and "
            f"blocks must have whole entries; use a multiple of {needs.block_multiple}"
        )
    memory = cache.kv_cache_memory
    return from_settings(
        CacheConfig,
        cache,
        block_size=cache.block_size or needs.block_size,
        has_float8_cache=is_float8_cache(cache.kv_cache_dtype, needs),
        kv_cache_memory=None if memory is None else parse_bytes("kv_cache_memory", memory),
        memory_share=memory_share,
        num_cache_blocks=None,
        redoes_drafts=needs.redoes_drafts,
        num_saved_states=_num_saved_states(cache, needs, schedule.max_num_seqs),
    )


def resolve_store(cache: CacheSettings) -> StoreConfig:
    """Return the store behind the KV cache, and the transfers between engines.

    Raises:
        SettingsError: the settings contradict each other.
    """
    _check_store(cache)
    return from_settings(
        StoreConfig,
        cache,
        kv_host_memory=parse_bytes("kv_host_memory", cache.kv_host_memory, least=0),
        kv_folder_size=parse_bytes("kv_folder_size", cache.kv_folder_size),
    )


def is_float8_cache(kv_cache_dtype: CacheDtypeName, needs: Needs) -> bool:
    """Return True if keys and values are stored as 8-bit floats.

    Raises:
        SettingsError: 8-bit floats are required, but the model's caches do not support them.
    """
    if kv_cache_dtype != "auto" and not needs.fits_float8_cache:
        raise SettingsError(
            f"kv_cache_dtype={kv_cache_dtype!r} does not support models with latent attention (MLA) or compressed "
            "entries, whose cache is small as it is; use kv_cache_dtype='auto'"
        )
    return kv_cache_dtype != "auto"


def _num_saved_states(cache: CacheSettings, needs: Needs, max_num_seqs: int) -> int | None:
    """Return the number of rows for saved states, or None if the model has no recurrent states.

    Raises:
        SettingsError: `num_saved_states` is set, but the model has no recurrent states.
    """
    if not needs.keeps_state:
        if cache.num_saved_states is not None:
            raise SettingsError(
                f"num_saved_states={cache.num_saved_states}: this model has no recurrent states; leave it out"
            )
        return None
    if not cache.enable_prefix_caching:
        return 0
    return max_num_seqs if cache.num_saved_states is None else cache.num_saved_states


def _check_store(cache: CacheSettings) -> None:
    """Raise SettingsError if the settings of the store behind the KV cache contradict each other."""
    if cache.kv_folder is not None and cache.kv_host_memory != 0:
        raise SettingsError(
            f"kv_folder={cache.kv_folder!r} and kv_host_memory={shown(cache.kv_host_memory)} exclude each other; "
            "choose one store behind the KV cache"
        )
    if cache.kv_file is not None and cache.kv_host_memory == 0:
        raise SettingsError(f"kv_file={cache.kv_file!r} needs the size of the file: kv_host_memory")
    uses_prefixes = (cache.kv_folder, cache.kv_transfer_address) != (None, None) or cache.kv_host_memory != 0
    if not cache.enable_prefix_caching and uses_prefixes:
        raise SettingsError(
            "kv_host_memory, kv_folder and kv_transfer_address need the prefix cache: enable_prefix_caching=True"
        )
    if cache.kv_transfer_address is not None:
        _, colon, port = cache.kv_transfer_address.partition(":")
        if colon and not (port.isdecimal() and 0 < int(port) < 2**16):
            raise SettingsError(
                f"kv_transfer_address={shown(cache.kv_transfer_address)}: {port!r} is not a port; an example is "
                "10.0.0.1:7000"
            )
        if cache.kv_transfer_backend == "nixl" and cache.kv_transfer_key_file is None:
            raise SettingsError(
                "kv_transfer_backend='nixl' lets others read this engine's memory and needs a key: kv_transfer_key_file"
            )
    elif cache.kv_transfer_key_file is not None:
        raise SettingsError(
            f"kv_transfer_key_file={shown(cache.kv_transfer_key_file)} is for engines with a kv_transfer_address"
        )
