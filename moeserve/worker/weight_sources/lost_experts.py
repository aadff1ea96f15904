"""`LostExperts`: experts of a rank that is left out, and where the rank that takes them over finds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from moeserve.distributed.groups import unconnected
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.moe.layer import MoELayer
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.weights import allocate_parameters
from moeserve.models.checkpoint.loading import load_weights
from moeserve.models.checkpoint.packed_cache import Entry, PackedWeightCache, bytes_of
from moeserve.models.checkpoint.packing import Packer, packed_state, state_places, weights_of
from moeserve.models.decoder import Decoder
from moeserve.models.expert_store.budget import moe_layers
from moeserve.worker.weight_sources.checkpoint_tensors import choose_packing
from moeserve.worker.weight_sources.source import WeightTarget

Rows = Mapping[str, Tensor]  # by name of a tensor of `packed_state`: [experts, bytes] uint8


@dataclass(frozen=True)
class LostExperts:
    """Experts that one rank held in the layout before, for each of the model's layers with experts."""

    before: WeightTarget  # weights of the rank that takes the experts over
    holder: int  # index in the ep group
    experts: Sequence[Sequence[int]]

    def target(self, *, only_these: bool) -> WeightTarget:
        """Return the model of the rank that held the experts, without memory.

        Args:
            only_these: without the other experts of that rank.
        """
        model, groups = self.before.model, self.before.model.groups
        context = dataclasses.replace(
            model.context.without_memory(), groups=unconnected(groups.mesh, groups.ep.ranks[self.holder])
        )
        placements = self.before.placements
        if only_these:
            pairs = zip(placements, self.experts, strict=True)
            placements = [_reduced(placement, self.holder, experts) for placement, experts in pairs]
        dispatchers = TorchDispatchers("allgather", context.groups.ep, context)
        decoder = Decoder(model.config, placements, dispatchers, context, model.stage)
        target = dataclasses.replace(self.before, placements=placements, model=decoder, show_progress=False)
        choose_packing(target)
        return target


def _reduced(placement: Placement, rank: int, experts: Sequence[int]) -> Placement:
    """Return a placement in which a rank has only these experts, and another rank also has the remaining experts."""
    ranks = list(placement.logical_of_slot)
    others = tuple(expert for expert in ranks[rank] if expert not in experts)
    ranks[rank] = tuple(experts)
    ranks[rank - 1] += others
    return Placement(tuple(ranks), placement.num_logical)


class ExpertSource(Protocol):
    """A place from which lost experts can come."""

    def load(self, lost: LostExperts) -> Rows | None:
        """Return the packed weights of the experts, layer by layer in their order; None if this source lacks them."""
        ...


@dataclass(frozen=True)
class PackedExperts:
    """An `ExpertSource`: the entry of the rank that held the experts in the packed weight cache."""

    cache: PackedWeightCache

    def load(self, lost: LostExperts) -> Rows | None:
        target = lost.target(only_these=False)
        entry = self.cache.load(target.key)
        if entry is None:
            return None
        sizes = {name: size for names in sizes_of_experts(target.model).values() for name, size in names.items()}
        tensors = {name: entry.tensors[name] for name in sizes}
        used = Entry(entry.path, tensors, {name: entry.checksums[name] for name in sizes})
        if used.damaged_tensor(lambda: False) is not None:
            self.cache.remove(target.key)
            return None
        rows: dict[str, Tensor] = {}
        for index, name_of_layer, moe in moes_of(target.model):
            slots = [moe.local_experts.index(expert) for expert in lost.experts[index]]
            for name, (num_slots, num_bytes) in sizes_of_experts(target.model)[name_of_layer].items() if slots else ():
                rows[name] = tensors[name][: num_slots * num_bytes].view(num_slots, num_bytes)[slots]
        return rows


class CheckpointExperts:
    """An `ExpertSource`: the tensors of the checkpoint. Only tensors of the lost experts are read."""

    def load(self, lost: LostExperts) -> Rows:
        target = lost.target(only_these=True)
        experts = nn.ModuleList(layer.experts for layer in moe_layers(target.model).values())
        for each in experts:
            allocate_parameters(each, target.model.context.of_experts)
        own, places = set(weights_of(experts).values()), target.destinations()
        into = {
            name: wanted
            for name, found in places.into.items()
            if (wanted := [place for place in found if place.owner in own or not place.memory.is_meta])
        }
        packer = Packer(experts)
        load_weights(
            target.checkpoint,
            dataclasses.replace(places, into=into, is_ignored=lambda name: True),
            on_filled=packer.on_filled,
            show_progress=False,
        )
        packer.finish()
        return {name: rows for names in rows_of_experts(target.model).values() for name, rows in names.items()}


def rows_of_experts(model: Decoder) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each layer's experts, [experts, bytes] uint8 each, by layer name and by tensor name.

    Args:
        model: a model whose experts are packed.
    """
    state = packed_state(model)
    return {
        layer: {name: rows_of(tensor) for name, tensor in state.items() if name.startswith(f"{layer}.experts.")}
        for layer in moe_layers(model)
    }


def rows_of(tensor: Tensor) -> Tensor:
    """Return a view of the weights of several experts as [experts, bytes] uint8."""
    return bytes_of(tensor).view(len(tensor), -1) if len(tensor) else bytes_of(tensor).view(0, 0)


def sizes_of_experts(model: Decoder) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the number of experts and the bytes of an expert for each tensor of `rows_of_experts`."""
    panels, parameters = state_places(model)
    sizes = {name: (weights.shape[0], weights.num_packed_bytes) for name, weights in panels.items()}
    sizes |= {name: (parameter.shape[0], parameter.nbytes) for name, parameter in parameters.items() if parameter.ndim}
    return {
        layer: {
            name: (number, size // number)
            for name, (number, size) in sizes.items()
            if name.startswith(f"{layer}.experts.")
        }
        for layer in moe_layers(model)
    }


def moes_of(model: Decoder) -> list[tuple[int, str, MoELayer]]:
    """Return the layers with experts of this rank: index among all layers with experts, name, and layer."""
    own = model.config.of_stage(range(model.config.num_sparse_layers), model.stage)
    layers = [block.network.moe for block in model.blocks if block.network.moe is not None]
    names = {layer: name for name, layer in moe_layers(model).items()}
    return [(index, names[layer], layer) for index, layer in zip(own, layers, strict=True) if layer in names]
