"""The interface of sources of weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from moeserve.config.engine_config import EngineConfig
from moeserve.layers.moe.placement.placement import Placement
from moeserve.models.checkpoint.file_hashes import FileHashes
from moeserve.models.checkpoint.loading import Destinations
from moeserve.models.checkpoint.packed_cache import fingerprint, hash_key
from moeserve.models.checkpoint.packed_cache_writer import CacheChecker
from moeserve.models.checkpoint.packing import PACKED_STATE_VERSION
from moeserve.models.checkpoint.shards import Checkpoint
from moeserve.models.decoder import Decoder
from moeserve.models.rank_model import RankModel
from moeserve.models.registry import Description
from moeserve.models.weight_mapping import destinations
from moeserve.models.weight_update import WeightUpdates

if TYPE_CHECKING:
    from moeserve.models.expert_store.served import ServedStore


@dataclass(frozen=True)
class WeightTarget:
    """A rank's model whose weights have no values yet, and the checkpoint to which they belong."""

    config: EngineConfig
    description: Description
    placements: Sequence[Placement]  # placements of all layers with experts
    model: Decoder
    checkpoint: Checkpoint
    show_progress: bool = False

    @functools.cached_property
    def key(self) -> str:
        """The name under which these weights are stored, packed for this machine."""
        weights, groups = self.config.weights, self.model.groups
        shards = (tensor.shard for tensor in self.checkpoint.tensors.values())
        return hash_key(
            PACKED_STATE_VERSION,
            fingerprint({Path(weights.model_path) / "config.json", *shards}),
            weights.hf_overrides,
            weights.dtype,
            weights.quantization,
            self.model.context.backend.instruction_set,
            [groups.mesh.tp, groups.mesh.dp, groups.rank, self.model.stage.start, self.model.stage.stop],
            [(each.logical_of_slot[groups.ep.rank_in_group], each.num_slices) for each in self.placements],
        )

    def destinations(self) -> Destinations:
        """Return where the checkpoint's tensors belong in the model as it is now, with or without memory."""
        return destinations(self.model, self.description.family.norm_offset, self.checkpoint.shapes)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights."""

    model: RankModel
    target: WeightTarget | None = None  # target of this model; None: transformers runs it
    reserved_bytes: int = 0  # memory that looks free but is not: mapped weights, and slots for experts on disk
    checker: CacheChecker | None = None  # checker of these weights
    expert_store: ServedStore | None = None  # None: all experts are in memory
    file_hashes: FileHashes = ()  # hashes of the checkpoint's files; empty for random weights
    updates: WeightUpdates | None = None  # None: no trainer may update the weights


class WeightSource(Protocol):
    """A place from which the weights of a rank can come."""

    def load(self, target: WeightTarget) -> LoadedModel | None:
        """Give all weights their values, packed for the kernels.

        Returns:
            None if this source does not have these weights. The model is then as it was.

        Raises:
            CheckpointError: the source has the weights, but they cannot be used.
        """
        ...


def load_from(sources: Sequence[WeightSource], target: WeightTarget) -> LoadedModel:
    """Load weights from the first source that has them. The last one must have them."""
    loaded = next(filter(None, (source.load(target) for source in sources)), None)
    assert loaded is not None
    return loaded
