"""The size of a rank's KV cache, from the memory that is free after the largest step."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moeserve.config.engine_config import EngineConfig
from moeserve.errors import CacheTooSmallError
from moeserve.kv.layer_cache import CacheNeeds
from moeserve.kv.rules import RuleOfBlocks
from moeserve.machine import free_memory, shown_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankMemory:
    """Memory of a rank in bytes, measured with the largest step that the scheduler may plan."""

    step: int  # peak of the step, in addition to the memory in use before it
    free: int  # bytes that this rank may allocate
    own_gpu: int = 0  # bytes that this rank may take of its GPU, besides those of existing tensors; 0 on a CPU

    @classmethod
    def measured(cls, config: EngineConfig, run_largest_step: Callable[[], object]) -> RankMemory:
        step, free = measure_step_memory(run_largest_step, config.compute.device), free_bytes(config)
        return cls(step, free, own_gpu_memory(config) if config.compute.device == "cuda" else 0)


def count_blocks(
    config: EngineConfig, needs: CacheNeeds, reserved_bytes: int, measure: Callable[[], RankMemory]
) -> int:
    """Return the number of KV cache blocks, from the setting or a profiling run, but not more than can be in use.

    Every cache group has the same number of blocks, but at most `most_blocks`.

    Args:
        needs: cache memory that all layers of this rank need.
        reserved_bytes: bytes of each rank that only look free: weights in mapped files, and later allocations.
        measure: executes the largest step that the scheduler may plan; called if no size is set.

    Raises:
        CacheTooSmallError: not even one request of the shortest useful length fits.
    """
    cache, schedule = config.cache, config.schedule
    most = [most_blocks(config, rule) for rule in needs.rules.tables]

    def bytes_of(num_blocks: int) -> int:
        return sum(min(num_blocks, limit) * size for limit, size in zip(most, needs.block_bytes, strict=True))

    blocks_per_request = -(-schedule.max_model_len // cache.block_size)
    if cache.kv_cache_memory is not None:
        num_bytes = cache.kv_cache_memory
    else:
        memory = measure()
        taken = memory.step + reserved_bytes
        free = max(0, memory.free - taken)
        if config.compute.device == "cuda":
            num_bytes = min(free, max(0, memory.own_gpu - taken))
        else:
            num_bytes = int(free * cache.memory_share)
        if cache.num_cache_blocks is not None:  # the caches of the previous replicas may not have been freed yet
            num_bytes = max(num_bytes, min(bytes_of(cache.num_cache_blocks), free))
        logger.info("largest step takes %s, KV cache may take %s", shown_bytes(memory.step), shown_bytes(num_bytes))
    num_usable = blocks_per_request * schedule.max_num_seqs
    num_blocks = bisect.bisect_right(range(1, num_usable + 1), num_bytes, key=bytes_of)  # the maximum that fits

    blocks_needed = min(2, blocks_per_request) if schedule.max_model_len_may_shrink else blocks_per_request
    if num_blocks < blocks_needed:
        length = min(schedule.max_model_len, blocks_needed * cache.block_size)
        raise CacheTooSmallError(
            f"a KV cache of {num_bytes} bytes holds {num_blocks * cache.block_size} tokens, but one request of "
            f"max_model_len={length} tokens needs {bytes_of(blocks_needed)} bytes "
            f"({needs.bytes_per_token} per token); raise kv_cache_memory"
            f"{', raise gpu_memory_utilization' if config.compute.device == 'cuda' else ''} or lower max_model_len"
        )
    return num_blocks


def most_blocks(config: EngineConfig, rule: RuleOfBlocks) -> int:
    """Return the maximum useful number of blocks of layers with a rule."""
    schedule = config.schedule
    return rule.most_blocks(schedule.max_num_seqs, schedule.max_concurrent_batches * schedule.max_num_batched_tokens)


def measure_step_memory(run_largest_step: Callable[[], object], device: str) -> int:
    """Return the peak memory of a step in bytes, in addition to the memory in use before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_largest_step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    before, shared_before = _resident_bytes("VmRSS"), _resident_bytes("RssShmem")
    _reset_peak()
    run_largest_step()
    # Memory shared by ranks is resident in each of them. It stays allocated, so free memory excludes it already.
    shared = _resident_bytes("RssShmem") - shared_before
    return max(0, _resident_bytes("VmHWM") - before - shared)


def free_bytes(config: EngineConfig) -> int:
    """Return the bytes that this rank may allocate. On a CPU, all ranks of a host share its memory equally."""
    return free_gpu_memory() if config.compute.device == "cuda" else free_memory(config.parallel.num_sharing_ranks)


def own_gpu_memory(config: EngineConfig) -> int:
    """Return the bytes that this rank may take of its GPU, besides those of existing tensors.

    The rest of the GPU is left to what torch does not count, such as CUDA's context and libraries, and to other
    processes.
    """
    return int(torch.cuda.mem_get_info()[1] * config.cache.memory_share) - torch.cuda.memory_allocated()


def free_gpu_memory() -> int:
    """Return the free GPU memory in bytes, after releasing torch's unused cached memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def _resident_bytes(name: str) -> int:
    """Return a figure of this process in bytes: VmRSS, its peak VmHWM, or RssShmem. Return 0 if it is not reported."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{name}:")), 0)


def _reset_peak() -> None:
    """Reset VmHWM to the current VmRSS."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        logger.debug("the peak of resident memory cannot be reset here; the largest step may be overestimated")
