"""`PackedEntry`: weights that an earlier start has packed, mapped from the packed weight cache."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.config.engine_config import EngineConfig
from moeserve.config.environment import cache_folder
from moeserve.models.checkpoint.packed_cache import PackedWeightCache
from moeserve.models.checkpoint.packed_cache_writer import CacheChecker
from moeserve.models.checkpoint.packing import adopt_state
from moeserve.worker.weight_sources.source import LoadedModel, WeightTarget

MIN_CACHED_BYTES = 64 * 2**20  # smaller weights of a rank are loaded about as fast from the checkpoint


@dataclass(frozen=True)
class PackedEntry:
    """A `WeightSource`: the entry of the cache for this rank."""

    cache: PackedWeightCache

    def load(self, target: WeightTarget) -> LoadedModel | None:
        entry = self.cache.load(target.key)
        if entry is None:
            return None
        if not adopt_state(target.model, entry.tensors):
            self.cache.remove(target.key)
            return None
        checker = CacheChecker(target.model, self.cache, target.key, entry)
        checker.start()
        mapped_bytes = sum(tensor.nbytes for tensor in entry.tensors.values())
        return LoadedModel(target.model, reserved_bytes=mapped_bytes, checker=checker)


def packed_cache_of(config: EngineConfig, num_bytes: int) -> PackedWeightCache | None:
    """Return the cache for weights of this size; None if they are not cached.

    Rebalancing and trainers write to weights, which must not be mapped from the cache or be in use by its writer.
    """
    are_written = config.weights.rl or config.experts.rebalance != "off"
    if not config.weights.packed_cache or config.compute.device != "cpu" or are_written or num_bytes < MIN_CACHED_BYTES:
        return None
    return PackedWeightCache(cache_folder() / "packed", config.weights.packed_cache)
