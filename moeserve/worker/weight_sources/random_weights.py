"""`RandomWeights`: dummy weights, for measurements without a checkpoint."""

from __future__ import annotations

from moeserve.models.checkpoint.loading import fill_randomly
from moeserve.models.checkpoint.packing import Packer
from moeserve.worker.weight_sources.source import LoadedModel, WeightTarget


class RandomWeights:
    """A `WeightSource`: random numbers that depend on the seed."""

    def load(self, target: WeightTarget) -> LoadedModel:
        packer = Packer(target.model)
        fill_randomly(target.model, target.config.weights.seed)
        packer.finish()
        return LoadedModel(target.model)
