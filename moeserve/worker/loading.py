"""Makes one rank's part of a model: from a checkpoint, or from a packed copy of an earlier start."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moeserve.config import EngineConfig, cache_folder
from moeserve.distributed.group import Groups
from moeserve.errors import CheckpointError
from moeserve.machine import free_memory, shown_bytes
from moeserve.models import registry
from moeserve.models.decoder import Decoder
from moeserve.models.packed_copies import PackedCopies, fingerprint, key_of
from moeserve.models.packing import PACKED_STATE_VERSION, Packer, adopt_state, packed_state
from moeserve.models.published import destinations
from moeserve.models.summary import summarize
from moeserve.models.weights import Checkpoint, fill_randomly, load_weights, open_checkpoint
from moeserve.moe.placement import Placement
from moeserve.ops.native import native_kernels

MIN_KEPT_BYTES = 64 * 2**20  # of a rank's weights: less is loaded about as fast
SECONDS_BEFORE_KEEPING = 5.0
LOWEST_PRIORITY = 19


@dataclass(frozen=True)
class LoadedModel:
    model: Decoder
    mapped_bytes: int = 0  # of its weights, if they lie in a mapped file


def load_model(config: EngineConfig, groups: Groups, *, show_progress: bool) -> LoadedModel:
    """This rank's part of a checkpoint's model, with its weights.

    Raises:
        CheckpointError: the weights do not fit in memory, or are not those that the config asks for.
    """
    description = registry.describe(config.model_path)
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    placements = description.model.place_experts(
        groups.ep.world_size, loads=config.expert_loads, num_redundant=config.num_redundant_experts
    )
    num_bytes = summarize(description, config.dtype, groups, placements).weight_bytes
    free = free_memory() // config.num_ranks if config.device == "cpu" else torch.cuda.mem_get_info()[0]
    if num_bytes > free:
        share = f" for each of {config.num_ranks} ranks" if config.num_ranks > 1 else ""
        raise CheckpointError(
            f"the weights of {config.model_path} do not fit in memory: they take {shown_bytes(num_bytes)} as "
            f"{config.dtype}{share}, but {shown_bytes(free)} are free{share}. Use a machine with more memory, a "
            "smaller model, or dtype=bfloat16 if the checkpoint is float32; `moeserve inspect` shows what takes how "
            "much"
        )
    groups.world.barrier()  # collective: all ranks; all have looked at the memory before any of them fills it
    model = Decoder(description.model, groups, config.dispatcher, placements, dtype=dtype, device=device)
    if config.load_format == "dummy":
        packer = Packer(model, config.quantization)
        fill_randomly(model, config.seed)
        packer.finish()
        return LoadedModel(model.eval())
    checkpoint = open_checkpoint(Path(config.model_path), description.weight_format)
    copies = PackedCopies(cache_folder() / "packed", config.packed_cache)
    keeps_copy = config.packed_cache > 0 and config.device == "cpu" and num_bytes >= MIN_KEPT_BYTES
    key = _key_of_copy(config, groups, placements, checkpoint) if keeps_copy else ""
    if keeps_copy and (state := copies.find(key)) is not None and adopt_state(model, state, config.quantization):
        return LoadedModel(model.eval(), mapped_bytes=sum(tensor.nbytes for tensor in state.values()))
    packer = Packer(model, config.quantization)
    places = destinations(model, description.family, checkpoint.names)
    load_weights(checkpoint, places, filled=packer.filled, show_progress=show_progress)
    packer.finish()
    if keeps_copy:
        state = packed_state(model)
        threading.Thread(target=_keep_in_background, args=(copies, key, state), name="packed copy").start()
    return LoadedModel(model.eval())


def _keep_in_background(copies: PackedCopies, key: str, state: dict[str, Tensor]) -> None:
    """Meanwhile requests are served, the first of them undisturbed. An interpreter that ends waits for it."""
    threading.main_thread().join(SECONDS_BEFORE_KEEPING)
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)  # of this thread alone
    copies.keep(key, state)


def _key_of_copy(config: EngineConfig, groups: Groups, placements: Sequence[Placement], checkpoint: Checkpoint) -> str:
    """Of this rank's part of this checkpoint, packed as this machine wants it."""
    files = {Path(config.model_path) / "config.json", *(tensor.shard for tensor in checkpoint.tensors.values())}
    kernels = native_kernels()
    return key_of(
        PACKED_STATE_VERSION,
        fingerprint(files),
        config.dtype,
        config.quantization,
        kernels.isa() if kernels else "none",
        [groups.mesh.tp, groups.mesh.dp, groups.rank],
        [placement.logical_of_slot[groups.ep.rank_in_group] for placement in placements],
    )
