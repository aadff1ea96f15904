"""Makes one rank's part of a model: from a checkpoint, or from a packed copy of an earlier start."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moeserve.config.environment import cache_folder
from moeserve.config.settings import EngineConfig
from moeserve.distributed.group import Groups
from moeserve.distributed.mesh import share_sizes
from moeserve.errors import CheckpointError
from moeserve.expert_placement.placement import Placement
from moeserve.layers.attention import AttentionConfig
from moeserve.machine import free_memory, shown_bytes
from moeserve.models import registry
from moeserve.models.decoder import Decoder
from moeserve.models.packed_copies import PackedCopies, fingerprint, key_of
from moeserve.models.packing import PACKED_STATE_VERSION, Packer, adopt_state, packed_state, weights_of
from moeserve.models.summary import LoadingMemory, loading_memory
from moeserve.models.weight_mapping import destinations
from moeserve.models.weights import Checkpoint, fill_randomly, load_weights, open_checkpoint
from moeserve.moe.dispatch.factory import DispatcherFactory, DispatchShape, TorchDispatchers, open_dispatchers
from moeserve.ops.attention_peers import PEER_NAMES, AttentionPeers, open_attention_peers
from moeserve.ops.native import native_kernels

logger = logging.getLogger(__name__)

MIN_KEPT_BYTES = 64 * 2**20  # of a rank's weights: less is loaded about as fast
SECONDS_BEFORE_KEEPING = 5.0
SECONDS_BETWEEN_LOOKS = 0.1  # of a writer, for the end of the process
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
    placements = tuple(map(Placement.from_json, config.placements)) or description.model.place_experts(
        groups.ep.world_size, loads=config.expert_loads, num_redundant=config.num_redundant_experts
    )
    memory = loading_memory(
        description,
        config.dtype,
        groups,
        placements,
        device=config.device,
        quantization=config.quantization,
        fills_all_first=config.load_format == "dummy",
    )
    wait_for_copies(only_given_up=True)  # which hold the weights of a model that is gone
    free = free_memory() // config.num_ranks if config.device == "cpu" else torch.cuda.mem_get_info()[0]
    if memory.peak > free:
        raise CheckpointError(_too_large(config, memory, free))
    groups.world.barrier()  # collective: all ranks; all have looked at the memory before any of them fills it
    dispatchers = _open_dispatchers(config, description, placements, groups, dtype, device)
    peers = _attention_peers(config, description, device)
    model = Decoder(
        description.model,
        groups,
        dispatchers,
        placements,
        peers=peers,
        quantization=config.quantization,
        dtype=dtype,
        device=device,
    )
    if config.load_format == "dummy":
        packer = Packer(model, config.quantization)
        fill_randomly(model, config.seed)
        packer.finish()
        return LoadedModel(model.eval())
    checkpoint = open_checkpoint(Path(config.model_path), description.weight_format)
    copies = PackedCopies(cache_folder() / "packed", config.packed_cache)
    # Experts that change places would be written where the copy is read from, or is being written from.
    keeps_copy = (
        config.rebalance == "off"
        and config.packed_cache > 0
        and config.device == "cpu"
        and memory.kept >= MIN_KEPT_BYTES
    )
    key = _key_of_copy(config, groups, placements, checkpoint) if keeps_copy else ""
    if keeps_copy and (state := copies.find(key)) is not None:
        if adopt_state(model, state, config.quantization):
            return LoadedModel(model.eval(), mapped_bytes=sum(tensor.nbytes for tensor in state.values()))
        copies.remove(key)
    packer = Packer(model, config.quantization)
    places = destinations(model, description.family, checkpoint.names)
    load_weights(checkpoint, places, filled=_packing_as_filled(model, packer), show_progress=show_progress)
    packer.finish()
    if keeps_copy:
        writer = _CopyWriter(copies, key, packed_state(model))
        weakref.finalize(model, writer.given_up.set)
        writer.start()
    return LoadedModel(model.eval())


def _open_dispatchers(
    config: EngineConfig,
    description: registry.Description,
    placements: tuple[Placement, ...],
    groups: Groups,
    dtype: torch.dtype,
    device: torch.device,
) -> DispatcherFactory:
    """Open the dispatchers for all layers. Collective: all ranks."""
    moe = description.model.first_moe
    if moe is None:
        return TorchDispatchers("local", groups.ep, device)
    shape = DispatchShape(
        hidden_size=description.model.hidden_size,
        top_k=moe.router.top_k,
        dtype=dtype,
        num_slots=placements[0].num_slots,
        max_tokens_per_rank=max(share_sizes(config.max_num_batched_tokens, groups.mesh.tp)),
    )
    return open_dispatchers(config, shape, groups.ep, device)


def _attention_peers(
    config: EngineConfig, description: registry.Description, device: torch.device
) -> AttentionPeers | None:
    """Libraries for the layers of grouped-query attention; latent attention is by our own kernels."""
    if any(isinstance(layer.attention, AttentionConfig) for layer in description.model.layers):
        return open_attention_peers(config.attention_backend, device, config.block_size)
    if config.attention_backend in PEER_NAMES:
        logger.info("our kernels attend, not %s: the model's attention is latent", config.attention_backend)
    return None


def _packing_as_filled(model: Decoder, packer: Packer) -> Callable[[Tensor], None]:
    """Tells the packer what is filled, and gives back memory whose weights are packed elsewhere now.

    It would not go by itself: the destinations have views of it until all weights are loaded.
    """
    own = [weights for weights in weights_of(model).values() if not weights.is_borrowed]
    weights_at = {weights.open.weight_eOI.untyped_storage().data_ptr(): weights for weights in own}

    def filled(memory: Tensor) -> None:
        packer.filled(memory)
        storage = memory.untyped_storage()
        weights = weights_at.get(storage.data_ptr())
        if weights is None or weights.panels is None:
            return
        if weights.panels.untyped_storage().data_ptr() != storage.data_ptr():
            storage.resize_(0)

    return filled


def wait_for_copies(*, only_given_up: bool = False) -> None:
    """Until what this process writes is written, or only until copies of models that are gone are given up."""
    for thread in threading.enumerate():
        if isinstance(thread, _CopyWriter) and (thread.given_up.is_set() or not only_given_up):
            thread.join()


class _CopyWriter(threading.Thread):
    """Keeps a copy while requests are served, the first of them undisturbed.

    It is given up when the model is gone, whose memory it holds, or when the process is about to end: who has an answer
    should not wait for the disk. A longer run keeps it.
    """

    def __init__(self, copies: PackedCopies, key: str, state: dict[str, Tensor]) -> None:
        super().__init__(name="packed copy")
        self.given_up = threading.Event()
        self._copies = copies
        self._key = key
        self._state = state

    def run(self) -> None:
        state, self._state = self._state, {}  # held no longer than this takes
        due = time.monotonic() + SECONDS_BEFORE_KEEPING
        while time.monotonic() < due and not self._is_unwanted():
            self.given_up.wait(SECONDS_BETWEEN_LOOKS)
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)  # of this thread alone
        self._copies.keep(self._key, state, self._is_unwanted)

    def _is_unwanted(self) -> bool:
        return self.given_up.is_set() or not threading.main_thread().is_alive()  # an interpreter that ends waits for us


def _too_large(config: EngineConfig, memory: LoadingMemory, free: int) -> str:
    """What to tell, and what to try."""
    share = f" for each of {config.num_ranks} ranks" if config.num_ranks > 1 else ""
    form = f"{config.dtype}, quantised to {config.quantization}" if config.quantization else config.dtype
    more = memory.peak - memory.kept
    meanwhile = f" and {shown_bytes(more)} more while they are loaded" if more else ""
    trials = ["a machine with more memory", "a smaller model"]
    if config.device == "cpu" and config.dtype != "float16" and native_kernels() and config.quantization != "int4":
        trials.append('quantization="int4"' if config.quantization else 'quantization="int8" or "int4"')
    if config.device == "cuda" and config.quantization is None:
        trials.append('quantization="fp8"')
    return (
        f"the weights of {config.model_path} do not fit in memory: they take {shown_bytes(memory.kept)} as "
        f"{form}{meanwhile}{share}, but {shown_bytes(free)} are free{share}. Use {', '.join(trials)}, or "
        "dtype=bfloat16 if the checkpoint is float32; `moeserve inspect` shows what takes how much"
    )


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
