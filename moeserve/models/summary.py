"""The size of a model before it is loaded: parameters, memory, and cache per token.

The counts are taken from the model, which is built without memory for its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from moeserve.config.resolve_cache import is_float8_cache
from moeserve.config.settings import CacheDtypeName, DtypeName, QuantizationName
from moeserve.distributed.groups import Groups, groups_of_one_rank
from moeserve.kv.layer_cache import CacheNeeds
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.weights import AnyWeights, Weights
from moeserve.models.checkpoint.packing import weights_of
from moeserve.models.checkpoint.shards import Checkpoint
from moeserve.models.checkpoint.stored_codes import keep_stored
from moeserve.models.decoder import Decoder
from moeserve.models.model_config import ModelSpec
from moeserve.models.registry import Description
from moeserve.models.weight_mapping import destinations
from moeserve.ops.select import select_backend


@dataclass(frozen=True)
class Part:
    """The number of parameters of one kind, in all layers together."""

    name: str
    dtype: str  # "mxfp4", a format that keeps codes of the checkpoint, or torch's name of a dtype
    num_parameters: int
    num_active: int  # parameters that one token uses: one row of the embedding, and only the chosen experts
    num_bytes: int
    is_stored: bool = False  # weights keep the codes of the checkpoint


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The size of a model in `dtype`."""

    dtype: DtypeName
    parts: tuple[Part, ...]
    num_layers: int
    cache: CacheNeeds  # cache memory of all layers together

    @property
    def num_parameters(self) -> int:
        return sum(part.num_parameters for part in self.parts)

    @property
    def num_active(self) -> int:
        """Number of parameters that one token uses."""
        return sum(part.num_active for part in self.parts)

    @property
    def weight_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def summarize(
    description: Description,
    dtype: DtypeName,
    groups: Groups | None = None,
    placements: Sequence[Placement] | None = None,
    stage: range | None = None,
    kv_cache_dtype: CacheDtypeName = "auto",
    checkpoint: Checkpoint | None = None,
) -> Summary:
    """Count the parameters of a model, or of one of its ranks, by kind.

    Args:
        groups: the groups of the rank; None: the whole model.
        placements: the placement of each sparse layer; None: each expert once, in order.
        stage: indices of the rank's layers; None: all layers.
        checkpoint: the checkpoint, some of whose tensors may be kept as they are stored; None: all are dequantised.

    Raises:
        SettingsError: `kv_cache_dtype` does not support this model.
    """
    config = description.model
    groups = groups or groups_of_one_rank()
    if placements is None:
        placements = config.place_experts(groups.ep.world_size)
    stage = range(len(config.layers)) if stage is None else stage
    keeps_stored = checkpoint is not None and description.keeps_stored(dtype)
    device = torch.device("cpu" if keeps_stored else "meta")
    quantization: QuantizationName | None = "mxfp4" if description.keeps_mxfp4(dtype) else None
    context = BuildContext(
        select_backend(device, getattr(torch, dtype)),
        groups,
        getattr(torch, dtype),
        device,
        quantization,
        has_memory=not keeps_stored,
        has_float8_cache=is_float8_cache(kv_cache_dtype, config.needs),
        block_size=config.needs.block_size,
    )
    model = _build_without_memory(config, placements, context, stage)
    if checkpoint is not None and keeps_stored:
        keep_stored(checkpoint, destinations(model, description.family.norm_offset, checkpoint.shapes).into)
    counts = _Counts()
    rows_used = config.vocab_size if config.tie_word_embeddings else 1  # a tied output head uses all rows
    if model.embedding is not None:
        counts.add("embedding", model.embedding, active=(rows_used, config.vocab_size))
    for block in model.blocks:
        for part in block.network.parts():
            counts.add(part.name, part.module, active=(part.num_active, part.num_all))
        counts.add("norms", block.place)
    if model.last is not None and model.head is not None:
        counts.add("norms", model.last)
        if not model.head.weights.is_borrowed:
            counts.add("output head", model.head)
    return Summary(
        dtype=dtype,
        parts=counts.parts(),
        num_layers=len(stage),
        cache=model.cache_needs,
    )


def quantised_bytes(description: Description, dtype: DtypeName, quantization: QuantizationName) -> int:
    """Return the bytes that the weights need on a single CPU rank with this setting of `quantization`."""
    return loading_memory(cpu_model(description, dtype, quantization)).kept


def cpu_model(description: Description, dtype: DtypeName, quantization: QuantizationName | None) -> Decoder:
    """Return the model of a single CPU rank, whose weights have no memory."""
    cpu = torch.device("cpu")
    torch_dtype = getattr(torch, dtype)
    context = BuildContext(
        select_backend(cpu, torch_dtype), groups_of_one_rank(), torch_dtype, cpu, quantization, has_memory=False
    )
    config = description.model
    return _build_without_memory(config, config.place_experts(1), context, range(len(config.layers)))


@dataclass(frozen=True)
class LoadingMemory:
    """The memory of a rank's weights in bytes."""

    kept: int  # after loading
    peak: int  # maximum during loading, when some weights exist both unpacked and packed


def loading_memory(
    model: Decoder, *, fills_all_first: bool = False, device: torch.device | None = None
) -> LoadingMemory:
    """Return the memory that a model's weights will need. The model may be on the meta device.

    Args:
        fills_all_first: True: all weights are filled before the first is packed; False: about one layer at a time is
            filled and packed.
        device: where the memory is needed; None: the device of the model.
    """
    device = device or model.context.device

    def weights_in(module: nn.Module) -> list[AnyWeights]:
        return [weights for weights in weights_of(module).values() if weights.context.device == device]

    every = weights_in(model)
    others = 0
    if device == model.context.device:  # on other devices, there are only small biases of experts
        memories = {id(tensor) for weights in weights_of(model).values() for tensor in weights.open_tensors}
        others = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in memories)
    kept = others + sum(map(_kept_bytes, every))
    if fills_all_first:
        opened = others + sum(map(_open_bytes, (weights for weights in every if not weights.is_borrowed)))
        panels = [_kept_bytes(weights) for weights in every if _is_replaced(weights)]
        return LoadingMemory(kept, max(kept, opened + max(panels, default=0)))
    most_open = max(
        sum(map(_open_bytes, filter(_is_replaced, weights_in(module))))
        for module in (*model.registered_layers.values(), model.head)
        if module is not None
    )
    return LoadingMemory(kept, kept + most_open)


def _build_without_memory(
    config: ModelSpec, placements: Sequence[Placement], context: BuildContext, stage: range
) -> Decoder:
    ep = context.groups.ep
    dispatchers = TorchDispatchers("local" if ep.world_size == 1 else "allgather", ep, context)
    return Decoder(config, placements, dispatchers, context, stage)


def _kept_bytes(weights: AnyWeights) -> int:
    if weights.is_on_disk:
        return 0
    if weights.packs:
        return weights.num_packed_bytes
    return 0 if weights.is_borrowed else _open_bytes(weights)


def _open_bytes(weights: AnyWeights) -> int:
    return weights.num_open_bytes


def _is_replaced(weights: AnyWeights) -> bool:
    """Return True if packing copies the weights into new memory, after which their unpacked memory is released."""
    return weights.packs and not weights.is_borrowed and not weights.packs_in_place and not weights.fills_panels


class _Counts:
    """Counts of parameters by kind and dtype, in the order in which kinds are first added."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str, bool], list[int]] = {}

    def add(self, name: str, module: nn.Module, active: tuple[int, int] = (1, 1)) -> None:
        """Add the parameters of a module. `active` is the fraction (numerator, denominator) that a token uses."""
        for part in module.modules():
            is_mxfp4 = isinstance(part, Weights) and part.is_mxfp4
            for parameter_name, parameter in part.named_parameters(recurse=False):
                is_encoded = is_mxfp4 and parameter_name in ("memory", "scales")
                dtype = "mxfp4" if is_encoded else str(parameter.dtype).removeprefix("torch.")
                num_bytes = parameter.nbytes
                stored = part.stored_rows if isinstance(part, Weights) and parameter_name == "memory" else ()
                if isinstance(part, Weights) and stored:
                    dtype, num_bytes = "+".join(sorted({rows.format for rows in stored})), part.num_packed_bytes
                total = self._totals.setdefault((name, dtype, bool(stored)), [0, 0, 0])
                count = parameter.numel()
                if is_encoded:
                    count = 2 * count if parameter_name == "memory" else 0
                total[0] += count
                total[1] += count * active[0] // active[1]
                total[2] += num_bytes

    def parts(self) -> tuple[Part, ...]:
        return tuple(
            Part(name, dtype, total, active, num_bytes, is_stored)
            for (name, dtype, is_stored), (total, active, num_bytes) in self._totals.items()
        )
