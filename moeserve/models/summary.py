"""What a model takes, counted before any of it is loaded: parameters, memory, and cache per token.

The model is built without memory behind its weights (torch's meta device), so what is counted is what will be loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from moeserve.config.settings import DtypeName, QuantizationName
from moeserve.distributed.groups import Groups, groups_of_one_rank
from moeserve.expert_placement.placement import Placement
from moeserve.layers.context import ModelContext
from moeserve.layers.weights import Weights
from moeserve.models.decoder import Decoder
from moeserve.models.packing import weights_of
from moeserve.models.registry import Description
from moeserve.moe.dispatch.factory import TorchDispatchers
from moeserve.moe.layer import MoEConfig, MoELayer
from moeserve.ops.select import select_kernels


@dataclass(frozen=True)
class Part:
    """One kind of weights, in all layers together."""

    name: str
    dtype: DtypeName
    num_parameters: int
    num_active: int  # those that one token uses: of the embedding one row, of the experts those it is sent to
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a model takes when it is loaded as `dtype`."""

    dtype: DtypeName
    parts: tuple[Part, ...]
    num_layers: int
    num_sparse_layers: int  # those with experts
    cache_bytes_per_token: int  # of all layers

    @property
    def num_parameters(self) -> int:
        return sum(part.num_parameters for part in self.parts)

    @property
    def num_active(self) -> int:
        """Parameters that one token uses."""
        return sum(part.num_active for part in self.parts)

    @property
    def weight_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def summarize(
    description: Description,
    dtype: DtypeName,
    groups: Groups | None = None,
    placements: Sequence[Placement] | None = None,
) -> Summary:
    """Counts a model's weights, part by part: all of them, or those of the rank that the groups are of.

    Args:
        placements: of the experts of each sparse layer; none: each expert once, in order.
    """
    config = description.model
    groups = groups or groups_of_one_rank()
    if placements is None:
        placements = config.place_experts(groups.ep.world_size)
    meta = torch.device("meta")
    context = ModelContext(select_kernels(meta), groups, getattr(torch, dtype), meta)
    model = _without_memory(description, placements, context)
    counts = _Counts()
    is_whole_used = config.tie_word_embeddings  # by the output head
    counts.add("embedding", model.embedding, share_active=(1, 1 if is_whole_used else config.vocab_size))
    for layer, layer_config in zip(model.layers, config.layers, strict=True):
        counts.add("attention", layer.attention)
        counts.add("norms", layer.attention_norm, layer.feed_forward_norm)
        match layer.feed_forward, layer_config.feed_forward:
            case MoELayer() as moe, MoEConfig(router=router):
                counts.add("routers", moe.router)
                counts.add("routed experts", moe.experts, share_active=(router.top_k, router.num_experts))
                if moe.shared_experts is not None:
                    counts.add("shared experts", moe.shared_experts)
            case dense, _:
                counts.add("dense networks", dense)
    counts.add("norms", model.norm)
    if not config.tie_word_embeddings:
        counts.add("output head", model.head)
    return Summary(
        dtype=dtype,
        parts=counts.parts(),
        num_layers=len(config.layers),
        num_sparse_layers=config.num_sparse_layers,
        cache_bytes_per_token=model.cache_bytes_per_token,
    )


@dataclass(frozen=True)
class LoadingMemory:
    """Bytes that a rank's weights take."""

    kept: int  # once they are loaded
    peak: int  # while they are: what is packed beside what is open


def loading_memory(
    description: Description,
    placements: Sequence[Placement],
    context: ModelContext,
    *,
    quantization: QuantizationName | None,
    fills_all_first: bool = False,
) -> LoadingMemory:
    """Counts what `Packer` will leave of a rank's weights, and the most that it will need on the way.

    Args:
        fills_all_first: all weights are open before the first is packed; otherwise those of about one layer are.
    """
    model = _without_memory(description, placements, context, quantization)
    every = weights_of(model).values()
    memories = {id(weights.memory) for weights in every}
    others = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in memories)
    kept = others + sum(_kept_bytes(weights, quantization) for weights in every)
    replaced = {id(weights) for weights in every if _is_replaced(weights, quantization)}
    if fills_all_first:
        opened = others + sum(weights.open.weight_eOI.nbytes for weights in every if not weights.is_borrowed)
        panels = [_kept_bytes(weights, quantization) for weights in every if id(weights) in replaced]
        return LoadingMemory(kept, max(kept, opened + max(panels, default=0)))
    most_open = max(
        sum(part.open.weight_eOI.nbytes for part in weights_of(module).values() if id(part) in replaced)
        for module in (*model.layers, model.head)
    )
    return LoadingMemory(kept, kept + most_open)


def _without_memory(
    description: Description,
    placements: Sequence[Placement],
    context: ModelContext,
    quantization: QuantizationName | None = None,
) -> Decoder:
    """Return the model that the context would build, on the meta device."""
    context, ep = dataclasses.replace(context, device=torch.device("meta")), context.groups.ep
    dispatchers = TorchDispatchers("local" if ep.world_size == 1 else "all_to_all", ep, context)
    return Decoder(description.model, placements, dispatchers, context, quantization=quantization)


def _kept_bytes(weights: Weights, quantization: QuantizationName | None) -> int:
    if weights.packs:
        return weights.num_packed_bytes(quantization)
    return 0 if weights.is_borrowed else weights.open.weight_eOI.nbytes


def _is_replaced(weights: Weights, quantization: QuantizationName | None) -> bool:
    """True if the weights are packed into other memory, and their own is released."""
    return weights.packs and not weights.is_borrowed and not weights.packs_in_place(quantization)


class _Counts:
    """Parameters by the name of the part and by dtype, in the order in which they first came."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, torch.dtype], list[int]] = {}

    def add(self, name: str, *modules: nn.Module, share_active: tuple[int, int] = (1, 1)) -> None:
        for weight in (weight for module in modules for weight in module.parameters()):
            total = self._totals.setdefault((name, weight.dtype), [0, 0, 0])
            total[0] += weight.numel()
            total[1] += weight.numel() * share_active[0] // share_active[1]
            total[2] += weight.nbytes

    def parts(self) -> tuple[Part, ...]:
        return tuple(
            Part(name, str(dtype).removeprefix("torch."), *totals)  # type: ignore[arg-type]
            for (name, dtype), totals in self._totals.items()
        )
