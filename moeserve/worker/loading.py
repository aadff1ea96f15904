"""Loading of one rank's part of a model, whose weights come from one of several sources."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moeserve.config.engine_config import EngineConfig
from moeserve.distributed.groups import Groups
from moeserve.distributed.mesh import share_sizes
from moeserve.errors import CheckpointError
from moeserve.kv.rank.cache import free_bytes
from moeserve.kv.rank.items import CachedItems
from moeserve.kv.rank.wire import CacheShare, TensorShare
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.factory import DispatcherFactory, DispatchShape, TorchDispatchers, open_dispatchers
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.weights import allocate_parameters
from moeserve.machine import free_memory, resource_limits, shown_bytes
from moeserve.models import registry
from moeserve.models.checkpoint.file_hashes import FileHashes, hash_files, require_same
from moeserve.models.checkpoint.names import translated
from moeserve.models.checkpoint.packed_cache import hash_key, sampled_digest
from moeserve.models.checkpoint.packed_cache_writer import wait_for_cache_writers
from moeserve.models.checkpoint.shards import Checkpoint, open_checkpoint
from moeserve.models.decoder import Decoder
from moeserve.models.rank_model import RankModel
from moeserve.models.summary import LoadingMemory, loading_memory
from moeserve.models.weight_update import WeightUpdates
from moeserve.ops.backend import Backend
from moeserve.ops.select import select_backend
from moeserve.worker.room import require_room
from moeserve.worker.weight_sources.checkpoint_tensors import CheckpointTensors, choose_packing
from moeserve.worker.weight_sources.packed_entry import PackedEntry, packed_cache_of
from moeserve.worker.weight_sources.random_weights import RandomWeights
from moeserve.worker.weight_sources.source import LoadedModel, WeightSource, WeightTarget, load_from

if TYPE_CHECKING:
    from moeserve.models.expert_store.budget import Budget

logger = logging.getLogger(__name__)

STORED_ITEMS_VERSION = 5  # version of the format of KV cache items in folders


def load_model(
    config: EngineConfig,
    groups: Groups,
    *,
    show_progress: bool,
    replaces_another: bool = False,
    before: WeightTarget | None = None,
) -> LoadedModel:
    """Return this rank's part of a checkpoint's model, with its weights. Collective: all ranks.

    Args:
        before: the model with which this rank has served in a layout with more replicas; None: there was none.
        replaces_another: this rank replaces a rank that has ended, while the other ranks keep their weights. Memory is
            not checked, because memory that the other ranks hold is not free.

    Raises:
        CheckpointError: the weights do not fit in memory, or do not match the config.
    """
    weights = config.weights
    description = registry.describe(weights.model_path, weights.model_impl, weights.hf_overrides)
    if config.schedule.num_mtp_drafts:
        description = description.with_draft_layers(config.schedule.num_mtp_drafts)
    placements = place_experts(config, description, groups.ep.world_size, groups.ep.node_of_rank)
    context = _build_context(config, groups)
    dispatchers = _open_dispatchers(config, description, placements, context)
    if weights.model_impl == "transformers":
        from moeserve.models.transformers_model import TransformersModel

        found = _hash_files(config, Path(weights.model_path).glob("*.safetensors"))
        foreign = TransformersModel(Path(weights.model_path), description.model, placements, dispatchers, context)
        require_room(config, foreign.cache_needs, free_bytes(config))
        return LoadedModel(foreign, file_hashes=found)
    stage = config.parallel.layers_of_stage(groups.mesh.coordinates(groups.rank).pp)
    model = Decoder(description.model, placements, dispatchers, context.without_memory(), stage).eval()
    is_random = weights.load_format == "dummy"
    checkpoint = (
        Checkpoint(Path(weights.model_path), {}, None, 0) if is_random else _open_checkpoint(config, description)
    )
    target = WeightTarget(config, description, placements, model, checkpoint, show_progress)
    file_hashes: FileHashes = ()
    if not is_random:
        file_hashes = _hash_files(config, (tensor.shard for tensor in checkpoint.tensors.values()))
        choose_packing(target)
    memory, budget = _check_memory(config, model, replaces_another=replaces_another)
    groups.world.barrier()  # collective: all ranks; all measure free memory before any rank fills it
    allocate_parameters(model, context)
    loaded = load_from(_sources(config, memory.kept, budget, before), target)
    return replace(loaded, target=target, file_hashes=file_hashes, updates=_updates(target))


def _sources(
    config: EngineConfig, num_bytes: int, budget: Budget | None, before: WeightTarget | None
) -> list[WeightSource]:
    """Return the sources of a rank's weights, the cheapest first.

    Args:
        num_bytes: bytes of the weights in memory.
        budget: memory for experts that are partly on disk; None: all experts are in memory.
    """
    if config.weights.load_format == "dummy":
        return [RandomWeights()]
    if budget is not None:
        from moeserve.worker.weight_sources.stored_experts import StoredExperts

        return [StoredExperts(budget)]
    cache = packed_cache_of(config, num_bytes)
    if before is not None:
        from moeserve.worker.weight_sources.kept_weights import KeptWeights
        from moeserve.worker.weight_sources.lost_experts import CheckpointExperts, PackedExperts

        packed = [] if cache is None else [PackedExperts(cache)]
        return [KeptWeights(before, [*packed, CheckpointExperts()])]
    return [CheckpointTensors()] if cache is None else [PackedEntry(cache), CheckpointTensors(cache)]


def _build_context(config: EngineConfig, groups: Groups) -> BuildContext:
    """Return the context of the model's layers."""
    weights, device = config.weights, torch.device(config.compute.device)
    # Of a model with experts on the host, int8 and int4 are for these alone. Experts in MXFP4 may be on both devices.
    is_hosts_alone = weights.experts_on_host and weights.quantization != "mxfp4"
    return BuildContext(
        _select_backend(config, device),
        groups,
        getattr(torch, weights.dtype),
        device,
        quantization=None if is_hosts_alone else weights.quantization,
        has_float8_cache=config.cache.has_float8_cache,
        block_size=config.cache.block_size,
        max_model_len=config.schedule.max_model_len,
        on_host=_host_context(config, groups) if weights.experts_on_host else None,
        num_host_layers=weights.num_cpu_layers,
    )


def _host_context(config: EngineConfig, groups: Groups) -> BuildContext:
    """Return the context of experts on the host of this rank's GPU."""
    host, dtype = torch.device("cpu"), getattr(torch, config.weights.dtype)
    return BuildContext(select_backend(host, dtype), groups, dtype, host, quantization=config.weights.quantization)


def _updates(target: WeightTarget) -> WeightUpdates | None:
    if not target.config.weights.rl:
        return None
    model, stored = target.model, target.checkpoint.shapes
    return WeightUpdates(model, target.description, target.placements, stored, model.groups.world.all_gather_bytes)


def _hash_files(config: EngineConfig, shards: Iterable[Path]) -> FileHashes:
    """Return the hashes of the checkpoint's files.

    Raises:
        WeightsChangedError: the files differ from those that the engine's first ranks have read.
    """
    files = {Path(config.weights.model_path) / "config.json", *shards}
    found = hash_files(files, are_copies=config.parallel.executor == "ray" or config.parallel.nnodes > 1)
    require_same(config.weights.file_hashes or found, found)
    return found


def _check_memory(
    config: EngineConfig, model: Decoder, *, replaces_another: bool
) -> tuple[LoadingMemory, Budget | None]:
    """Return the memory that the weights of a model need, and the memory for experts if some of them are on disk.

    Raises:
        CheckpointError: the weights do not fit in memory.
        SettingsError: the settings need more memory than is left.
    """
    wait_for_cache_writers(cancelled_only=True)  # cancelled writers still hold the weights of a deleted model
    free, on_host = free_bytes(config), config.weights.experts_on_host
    budget = None
    if config.weights.expert_memory is not None:
        from moeserve.models.expert_store.budget import choose_budget

        beside = (free_memory(), 0) if on_host else (free, config.cache.kv_cache_memory)
        budget = choose_budget(model, config.weights.expert_memory, *beside)
    fills_all_first = config.weights.load_format == "dummy"
    memory = loading_memory(model, fills_all_first=fills_all_first)
    if replaces_another:
        return memory, budget
    if memory.peak > free:
        raise CheckpointError(_too_large(config, memory, free))
    if on_host:
        of_experts = loading_memory(model, fills_all_first=fills_all_first, device=torch.device("cpu"))
        if of_experts.peak > free_memory():
            raise CheckpointError(_too_large(config, of_experts, free_memory(), "the experts"))
    expert_bytes = 0 if on_host or budget is None else budget.num_bytes
    require_room(config, model.cache_needs, free - memory.kept - expert_bytes)
    return memory, budget


def _open_checkpoint(config: EngineConfig, description: registry.Description) -> Checkpoint:
    """Open the checkpoint with the tensors' names that all families share."""
    weight_format = description.weight_format
    if config.weights.quantization == "mxfp4":
        weight_format = weight_format.with_mxfp4_kept()
    checkpoint = open_checkpoint(Path(config.weights.model_path), weight_format)
    return translated(checkpoint, description.family, description.model.num_decoder_layers)


def place_experts(
    config: EngineConfig, description: registry.Description, num_ranks: int, node_of_rank: Sequence[int]
) -> tuple[Placement, ...]:
    """Return the placement of the experts of each layer on the ranks of a pipeline stage."""
    model = description.model
    if not config.experts.expert_parallel:
        return model.slice_experts(num_ranks)
    return tuple(map(Placement.from_json, config.experts.placements)) or model.place_experts(
        num_ranks,
        loads=config.experts.expert_loads,
        num_redundant=config.experts.num_redundant_experts,
        node_of_rank=node_of_rank,
    )


def _open_dispatchers(
    config: EngineConfig,
    description: registry.Description,
    placements: tuple[Placement, ...],
    context: BuildContext,
) -> DispatcherFactory:
    """Open the dispatchers for all layers. Collective: all ranks."""
    experts = description.model.expert_shape
    if experts is None:
        return TorchDispatchers("local", context.groups.ep, context)
    shape = DispatchShape(
        hidden_size=experts.hidden_size,
        top_k=experts.top_k,
        dtype=context.dtype,
        num_slots=placements[0].num_slots,
        max_tokens_per_rank=max(share_sizes(config.schedule.max_num_batched_tokens, context.groups.mesh.tp)),
    )
    return open_dispatchers(config, shape, context.groups.ep, context)


def _select_backend(config: EngineConfig, device: torch.device) -> Backend:
    """Return this rank's backend.

    Raises:
        SettingsError: a library that the config names cannot be used.
    """
    dtype = getattr(torch, config.weights.dtype)
    if config.compute.batch_invariant:
        backend = select_backend(device, dtype, batch_invariant=True)
    else:
        backend = select_backend(device, dtype, config.compute.attention_backend, config.cache.block_size)
    if config.compute.product_backend == "triton":
        return backend
    from moeserve.ops.products.deep_gemm import with_deep_gemm

    only_fastest = config.compute.product_backend == "measured"
    return with_deep_gemm(backend, device, dtype, only_fastest=only_fastest)


def _too_large(config: EngineConfig, memory: LoadingMemory, free: int, what: str = "the weights") -> str:
    """Return an error message for weights that do not fit, with remedies."""
    weights = config.weights
    num_ranks = config.parallel.num_sharing_ranks
    share = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
    limits = "".join(f" ({limit})" for limit in resource_limits())
    form = f"{weights.dtype}, quantised to {weights.quantization}" if weights.quantization else weights.dtype
    return (
        f"{what} of {weights.model_path} do not fit in memory: as {form} they take {shown_bytes(memory.kept)}, "
        f"and {shown_bytes(memory.peak)} while they are loaded{share}, but {shown_bytes(free)} are "
        f"free{share}{limits}. "
        "Use a machine with more memory, a smaller model or dtype, or a smaller quantization (int8 or int4 on CPUs, "
        "fp8 on GPUs); on a CPU, expert_memory='auto' reads experts that do not fit from disk; `moeserve "
        "inspect` lists the sizes of its parts"
    )


def store_key(config: EngineConfig, model: RankModel) -> str:
    """Return the name of this rank's folder of KV cache items: a hash of all that the items depend on except tokens."""
    groups = model.groups
    layout = [groups.mesh.tp, groups.tp.rank_in_group, model.stage.start, model.stage.stop]
    return hash_key(_cache_facts(config, model), layout)


def cache_share(config: EngineConfig, model: RankModel, items: CachedItems) -> CacheShare:
    """Return the description of this rank's KV cache for ranks of other engines."""
    tensors: list[TensorShare] = []
    num_of_layer: Counter[int] = Counter()
    for each in items.tensors:
        ranges = [(part.start, len(part)) for part in each.division.ranges]
        name = "routes"
        if each.block is not None:
            layer = model.layers_of_caches[each.block]
            name = f"{layer}.{num_of_layer[layer]}"
            num_of_layer[layer] += 1
        tensors.append(TensorShare(name=name, kind=each.kind, axis=each.division.axis, ranges=ranges))
    return CacheShare(facts=_cache_facts(config, model), tensors=tensors)


def _cache_facts(config: EngineConfig, model: RankModel) -> dict[str, str]:
    """Return all facts that the contents of items depend on, except tokens and the division over ranks."""
    weights = config.weights
    folder = Path(weights.model_path)
    files = [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    routes = config.experts.routes
    host = model.context.on_host
    return {
        "version": str(STORED_ITEMS_VERSION),
        "model": sampled_digest(files),
        "hf_overrides": json.dumps(weights.hf_overrides, sort_keys=True),
        "dtype": weights.dtype,
        "kv_cache_dtype": "fp8" if config.cache.has_float8_cache else weights.dtype,
        "quantization": str(weights.quantization),
        "device": config.compute.device,
        "kernels": model.context.backend.instruction_set,
        "block_size": str(config.cache.block_size),
        "has_long_rotations": str(model.config.has_long_rotations(model.context.max_model_len)),
        **({} if host is None else {"host": f"{host.backend.instruction_set}, {weights.num_cpu_layers} layers"}),
        **({} if routes is None else {"routes": f"{routes.num_layers} layers, {routes.top_k} {routes.dtype}"}),
    }
