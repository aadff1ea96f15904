"""`StoredExperts`: weights whose experts are read from a file while the model runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from moeserve.config.environment import cache_folder
from moeserve.machine import free_memory
from moeserve.models.expert_store.budget import Budget
from moeserve.models.expert_store.loading import load_with_store
from moeserve.models.expert_store.served import ServedStore
from moeserve.worker.weight_sources.checkpoint_tensors import fill
from moeserve.worker.weight_sources.source import LoadedModel, WeightTarget


@dataclass(frozen=True)
class StoredExperts:
    """A `WeightSource`: the file of packed weights, which is written from the checkpoint if there is none."""

    budget: Budget

    def load(self, target: WeightTarget) -> LoadedModel:
        folder = target.config.weights.expert_store
        path = (cache_folder() / "experts" if folder is None else Path(folder)) / f"{target.key}.safetensors"
        model, is_first = target.model, target.model.groups.rank == 0
        store = load_with_store(model, self.budget, path, functools.partial(fill, target), says=is_first)
        # Slots get memory when experts are read. On the host of a GPU, it is not that of the KV cache.
        reserved = 0 if target.config.weights.experts_on_host else store.num_bytes
        free = functools.partial(free_memory, target.config.parallel.num_sharing_ranks)
        served = ServedStore(store, self.budget.least_slots, free)
        return LoadedModel(model, reserved_bytes=reserved, expert_store=served)
