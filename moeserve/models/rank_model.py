"""The interface of one rank's part of a model, as a worker uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from moeserve.distributed.groups import Groups
from moeserve.kv.layer_cache import CacheItems, CacheNeeds, Places
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.factory import DispatcherFactory
from moeserve.models.model_config import ModelSpec
from moeserve.step_inputs import StepInputs


class RankModel(Protocol):
    """A `Decoder`, or a model of transformers' own code, with the members that a worker uses."""

    config: ModelSpec
    context: BuildContext
    groups: Groups
    dispatchers: DispatcherFactory
    stage: range  # layers of this rank

    @property
    def head(self) -> Any:
        """The output head; None on all pipeline stages but the last."""

    @property
    def moe_layers(self) -> Mapping[int, Any]:
        """The layers with experts, by their index in the model."""

    @property
    def layers_of_caches(self) -> list[int]:
        """For each element of `cache_items`, the index of its layer in the model."""

    @property
    def cache_items(self) -> list[tuple[CacheItems, ...]]:
        """For each network with a cache, its cache items: blocks of keys and values, or states."""

    @property
    def cache_needs(self) -> CacheNeeds:
        """The cache memory that all layers of this rank need together."""

    def make_caches(self, places: Places) -> list[Any]:
        """Return a cache for each element of `cache_items`."""

    def with_one_layer_of_each_kind(self) -> RankModel:
        """Return a model, with fewer layers if possible, whose steps need as much memory as this model's."""

    def is_capturable(self, tokens_per_rank: Sequence[int]) -> bool:
        """Return True if a padded step with these numbers of tokens should run as a CUDA graph."""

    def __call__(self, step: StepInputs, caches: list[Any]) -> Tensor:
        """Return the hidden states [T, D] of all tokens of the replica. Collective: all ranks."""

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return the logits [T, V] of hidden states. Last stage only."""
