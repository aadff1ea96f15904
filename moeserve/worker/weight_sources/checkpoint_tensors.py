"""`CheckpointTensors`: weights that are read from the checkpoint and packed."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from moeserve.models.checkpoint.loading import keep_int4, load_weights
from moeserve.models.checkpoint.packed_cache import PackedWeightCache
from moeserve.models.checkpoint.packed_cache_writer import CacheWriter
from moeserve.models.checkpoint.packing import Packer, fill_panels, packed_state
from moeserve.models.checkpoint.stored_codes import keep_stored
from moeserve.worker.weight_sources.source import LoadedModel, WeightTarget

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointTensors:
    """A `WeightSource`: the tensors of the checkpoint."""

    cache: PackedWeightCache | None = None  # where the packed weights are stored for later starts

    def load(self, target: WeightTarget) -> LoadedModel:
        fill(target, Packer(target.model))
        if self.cache is not None:
            CacheWriter(target.model, self.cache, target.key, packed_state(target.model)).start()
        return LoadedModel(target.model)


def fill(target: WeightTarget, packer: Packer) -> None:
    """Fill a model that has memory, and pack its weights.

    Raises:
        CheckpointError: the checkpoint does not match the model.
    """
    load_weights(
        target.checkpoint,
        target.destinations(),
        on_filled=packer.on_filled,
        ignore_unused=target.config.weights.ignore_unused_weights,
        show_progress=target.show_progress,
    )
    packer.finish()


def choose_packing(target: WeightTarget) -> None:
    """Prepare the weights of a model without memory for the form in which the checkpoint's tensors will be packed."""
    weights, description, places = target.config.weights, target.description, target.destinations()
    if description.keeps_stored(weights.dtype, weights.quantization):
        others = keep_stored(target.checkpoint, places.into)
        if others:
            folder = target.checkpoint.folder
            logger.warning("%s: some weights do not stay as they are stored: %s", folder, others)
    if weights.quantization == "int4" and description.weight_format.is_int4:
        keep_int4(target.checkpoint, places)
    fill_panels(place for each in places.into.values() for place in each)
