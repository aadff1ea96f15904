"""How many blocks of KV cache this rank can hold. Knows memory, not requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from moeserve.config.settings import EngineConfig
from moeserve.errors import CacheTooSmallError
from moeserve.machine import free_memory, shown_bytes

logger = logging.getLogger(__name__)

# Of the memory that is free once the weights are loaded and the largest step has run, the share the cache may take.
# A CPU shares its memory with everything else on the machine; a GPU is taken to be ours.
FREE_MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.9}


def count_blocks(
    config: EngineConfig, bytes_per_token: int, reserved_bytes: int, run_largest_step: Callable[[], object]
) -> int:
    """Blocks of KV cache, from the setting or from a profiling run, never more than could be used at once.

    Args:
        bytes_per_token: keys and values of one token in all layers.
        reserved_bytes: of each rank, which look free and are not: weights in mapped files, and what it takes later.
        run_largest_step: executes a step as large as any that the scheduler may plan.

    Raises:
        CacheTooSmallError: not even one request of the shortest useful length fits.
    """
    block_bytes = bytes_per_token * config.block_size
    blocks_per_request = -(-config.max_model_len // config.block_size)
    if config.kv_cache_memory is not None:
        num_bytes = config.kv_cache_memory
    else:
        peak = measure_step_memory(run_largest_step, config.device)
        # On a CPU all ranks of the host take their memory, and that of their largest steps, from the same.
        num_sharing = config.num_ranks if config.device == "cpu" else 1
        now_free = free_gpu_memory() if config.device == "cuda" else free_memory()
        free = max(0, now_free - (peak + reserved_bytes) * num_sharing)
        num_bytes = int(free * FREE_MEMORY_SHARE[config.device] / num_sharing)
        logger.info("largest step takes %s, KV cache may take %s", shown_bytes(peak), shown_bytes(num_bytes))
    num_blocks = min(num_bytes // block_bytes, blocks_per_request * config.max_num_seqs)

    blocks_needed = min(2, blocks_per_request) if config.max_model_len_may_shrink else blocks_per_request
    if num_blocks < blocks_needed:
        length = min(config.max_model_len, blocks_needed * config.block_size)
        raise CacheTooSmallError(
            f"a KV cache of {num_bytes} bytes holds {num_blocks * config.block_size} tokens, but one request of "
            f"max_model_len={length} tokens takes {blocks_needed * block_bytes} bytes "
            f"({bytes_per_token} per token); raise kv_cache_memory or lower max_model_len"
        )
    return num_blocks


def measure_step_memory(run_largest_step: Callable[[], object], device: str) -> int:
    """Bytes that a step takes at its peak, beyond what is held before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_largest_step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    before = _resident_bytes("VmRSS")
    _reset_peak()
    run_largest_step()
    return max(0, _resident_bytes("VmHWM") - before)


def free_gpu_memory() -> int:
    """Bytes that nothing holds: what torch has taken and does not use is given back first."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def _resident_bytes(name: str) -> int:
    """VmRSS or VmHWM (the peak of it) of this process; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{name}:")), 0)


def _reset_peak() -> None:
    """Makes VmHWM start again from the present VmRSS."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        logger.debug("the peak of resident memory cannot be reset here; the largest step may be overestimated")
