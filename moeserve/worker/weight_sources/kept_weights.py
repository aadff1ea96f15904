"""`KeptWeights`: the weights with which a rank has served before other ranks were left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeserve.errors import CheckpointError
from moeserve.kv.rank.cache import free_bytes
from moeserve.layers.moe.placement.handover import sources_of
from moeserve.machine import shown_bytes
from moeserve.models.checkpoint.packed_cache import bytes_of
from moeserve.models.checkpoint.packing import adopt_state, packed_state, state_places, weights_of
from moeserve.worker.weight_sources.lost_experts import (
    ExpertSource,
    LostExperts,
    moes_of,
    rows_of_experts,
    sizes_of_experts,
)
from moeserve.worker.weight_sources.source import LoadedModel, WeightTarget


@dataclass(frozen=True)
class KeptWeights:
    """A `WeightSource`: the model of the layout before, and the experts that this rank takes over (`hand_over`).

    Both models share memory afterwards. The model of the layout before stays complete, so that it can be a source again
    if this recovery fails.
    """

    before: WeightTarget  # its weights are loaded
    experts: Sequence[ExpertSource]  # the cheapest first; the last one has all experts

    def load(self, target: WeightTarget) -> LoadedModel:
        """See `WeightSource`.

        Raises:
            CheckpointError: the experts do not fit in memory, or cannot be read.
        """
        model = target.model
        taken = self._taken(target)
        self._require_memory(target)
        kept = rows_of_experts(self.before.model)
        panels, parameters = state_places(model)
        known = panels.keys() | parameters.keys()  # without tensors of layers of which this rank had no expert
        state = {name: bytes_of(tensor) for name, tensor in packed_state(self.before.model).items() if name in known}
        for layer, names in sizes_of_experts(model).items():
            for name, (num_slots, num_bytes) in names.items() if taken[layer] else ():
                memory = model.context.backend.allocate_weights(
                    (num_slots, num_bytes), torch.uint8, model.context.of_experts.device
                )
                own = kept.get(layer, {}).get(name, memory[:0])
                memory[: len(own)] = own
                _move(self.before.model, name, memory[: len(own)])
                state[name] = bytes_of(memory)
                kept.get(layer, {}).pop(name, None)
        for lost in self._lost(target):
            rows = next(found for source in self.experts if (found := source.load(lost)) is not None)
            for index, layer, _ in moes_of(model):
                experts = lost.experts[index]
                slots = [self._num_kept(index) + taken[layer].index(expert) for expert in experts]
                for name, (num_slots, num_bytes) in sizes_of_experts(model)[layer].items() if experts else ():
                    state[name].view(num_slots, num_bytes)[slots] = rows[name]
        is_same = adopt_state(model, state)
        assert is_same
        return LoadedModel(model)

    def bytes_needed(self, target: WeightTarget) -> int:
        """Return the most bytes that `load` takes at a time: for a copy of the experts beside them, and for a layer."""
        sizes = sizes_of_experts(target.model)
        bytes_of_slot = {layer: sum(num_bytes for _, num_bytes in names.values()) for layer, names in sizes.items()}
        taken = self._taken(target)
        taken_bytes = sum(len(experts) * bytes_of_slot.get(layer, 0) for layer, experts in taken.items())
        layer_bytes = [number * size for names in sizes.values() for number, size in names.values()]
        return 2 * taken_bytes + max(layer_bytes, default=0) if taken_bytes else 0

    def _taken(self, target: WeightTarget) -> dict[str, tuple[int, ...]]:
        """Return the experts that this rank takes over, by layer."""
        return {layer: moe.local_experts[self._num_kept(index) :] for index, layer, moe in moes_of(target.model)}

    def _num_kept(self, index: int) -> int:
        """Return the number of slots that this rank had in a layer, by the layer's index among layers with experts."""
        return len(self.before.placements[index].logical_of_slot[self._rank])

    @property
    def _rank(self) -> int:
        return self.before.model.groups.ep.rank_in_group

    def _lost(self, target: WeightTarget) -> Iterator[LostExperts]:
        """Yield the experts that this rank takes over, by the rank that held them."""
        rank = target.model.groups.ep.rank_in_group
        own = {index for index, _, _ in moes_of(target.model)}
        sources = [
            sources_of(before, self._rank, before.logical_of_slot[self._rank], after.logical_of_slot[rank])
            if index in own
            else {}
            for index, (before, after) in enumerate(zip(self.before.placements, target.placements, strict=True))
        ]
        for holder in sorted({holder for each in sources for holder in each}):
            yield LostExperts(self.before, holder, [each.get(holder, ()) for each in sources])

    def _require_memory(self, target: WeightTarget) -> None:
        """Raise CheckpointError if the experts that are taken over do not fit."""
        needed = self.bytes_needed(target)
        if needed and needed > (free := free_bytes(target.config)):
            raise CheckpointError(
                f"the experts of ranks that are left out do not fit on the others: each needs {shown_bytes(needed)}, "
                f"and {shown_bytes(free)} are free"
            )


def _move(model: nn.Module, name: str, rows: Tensor) -> None:
    """Make a packed model use `rows`, which have equal bytes, as the tensor of this name in `packed_state`."""
    module, _, part = name.rpartition(".")
    if part == "panels":
        weights = weights_of(model)[module]
        weights.panels = rows
        del weights.product  # holds the memory, and is not used any more
    else:
        parameter = model.get_parameter(name)
        parameter.data = rows.view(-1).view(parameter.dtype).view(parameter.shape)
