"""Updates of a rank's weights by a trainer, tensor by tensor, into the memory that kernels and CPU graphs read.

A second decoder without memory, the skeleton, has the destinations of all tensors. So tensors are divided over ranks
and expert slots, and converted, exactly as in loading. Rows that fill whole panels (units of packed weights) are packed
directly into the model's panels. Other weights get unpacked memory when their first tensor arrives. They are packed,
and this memory is released, when their last tensor has arrived.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from moeserve.controls import (
    CancelUpdate,
    FinishUpdate,
    LoadTensors,
    Outcome,
    ReadChecksums,
    ReceiveTensors,
    StartUpdate,
    WeightCommand,
)
from moeserve.errors import CheckpointError
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.rows import Destination
from moeserve.layers.weights import AnyWeights
from moeserve.memory import free_pages
from moeserve.models.checkpoint.loading import PIECE_VALUES, Destinations, check_tensors, fill_place
from moeserve.models.checkpoint.mapped_files import MappedFiles
from moeserve.models.checkpoint.names import Translation, translated
from moeserve.models.checkpoint.packing import fill_panels, packed_state, weights_of
from moeserve.models.checkpoint.shards import Checkpoint, list_names, open_checkpoint, read_header
from moeserve.models.checkpoint.tensors import PlainTensor, ReadRows, StoredTensor
from moeserve.models.checkpoint.unused_tensors import harmful
from moeserve.models.checkpoint.weight_format import WeightFormat
from moeserve.models.decoder import Decoder
from moeserve.models.registry import Description
from moeserve.models.remote_chunk import RemoteChunk
from moeserve.models.weight_mapping import destinations
from moeserve.progress import progress_bar

logger = logging.getLogger(__name__)

SHARED_MEMORY, CHUNK_PREFIX = Path("/dev/shm"), "moeserve-weights-"
# Smaller tensors have few whole pages; some are constants that no checkpoint stores.
MIN_FREED_BYTES = 2**16
EMBEDDING = "model.embed_tokens.weight"
OF_DRAFTS = "draft."  # prefix of the tensors of modules for multi-token prediction


class _Chunk(NamedTuple):
    """Some tensors of an update, and the function that reads them."""

    checkpoint: Checkpoint
    read_rows: ReadRows


Gather = Callable[[bytes], list[bytes]]  # returns the data of all ranks. Collective: all ranks


class WeightUpdates:
    """Runs the commands of updates on one rank. All ranks run the same commands in the same rounds."""

    def __init__(
        self,
        model: Decoder,
        description: Description,
        placements: Sequence[Placement],
        stored: Mapping[str, tuple[int, ...]],
        gather: Gather,
    ) -> None:
        """
        Args:
            placements: placements of all layers with experts as they were loaded; rebalancing may have changed some.
            stored: shapes of the checkpoint's tensors, by translated name.
        """
        self._model, self._description, self._placements = model, description, placements
        self._translation = Translation(description.family, description.model.num_decoder_layers)
        self._stored, self._gather = stored, gather
        self._update: _Update | None = None
        self._is_stale = False  # the weights are a mixture of versions, or were discarded

    def run(self, command: WeightCommand) -> Outcome:
        """Run a command, and return the outcome of all ranks together. Collective: all ranks."""
        match command:
            case StartUpdate():
                self._cancel()
                error = self._shared_error(lambda: self._start(command))
                if error:
                    self._cancel()
            case LoadTensors() | ReceiveTensors():
                with contextlib.ExitStack() as ending:
                    error = self._shared_error(lambda: self._require_open().prepare(self._open(command, ending)))
                    if not error and (error := self._shared_error(self._require_open().fill)):
                        self._cancel()
            case FinishUpdate():
                error = self._shared_error(lambda: self._require_open().finish()) or self._lack_of_drafts()
                if not error:
                    self._update, self._is_stale = None, False
            case CancelUpdate():
                error = self._shared_error(self._cancel)
            case ReadChecksums():
                return Outcome(
                    is_open=self._update is not None, is_whole=self._is_whole(), checksums=self._read_checksums()
                )
        return Outcome(error=error, is_open=self._update is not None, is_whole=self._is_whole())

    def _lack_of_drafts(self) -> str:
        """Return an error if the update is only of drafts, and no rank has received a tensor. Collective: all ranks."""
        update = self._require_open()
        if not update.only_drafts or any(self._gather(b"1" if update.has_written else b"")):
            return ""
        return (
            "the update has no tensor of the modules for multi-token prediction; send these tensors with the "
            "checkpoint's names, or begin another update"
        )

    def discard(self) -> Outcome:
        """Release the memory of all weights to the system, which makes the weights stale. Collective: all ranks."""
        self._update, self._is_stale = None, True
        for tensor in packed_state(self._model).values():
            if tensor.nbytes >= MIN_FREED_BYTES:
                free_pages(tensor.data)
        return Outcome(is_whole=self._is_whole())

    def _is_whole(self) -> bool:
        """Return True if the weights of all ranks are of one version. Collective: all ranks."""
        is_stale = any(each == b"1" for each in self._gather(b"1" if self._is_stale else b"0"))
        self._is_stale = is_stale
        return not is_stale and self._update is None

    def _shared_error(self, work: Callable[[], None]) -> str:
        """Call `work`. Return the distinct errors of all ranks as one text; empty: none. Collective: all ranks.

        Errors of any kind are reported: whatever names and shapes a trainer sends, the engine must go on.
        """
        error = ""
        try:
            work()
        except CheckpointError as failure:
            error = str(failure)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            logger.exception("an update of the weights failed")
        return "; ".join(dict.fromkeys(each.decode() for each in self._gather(error.encode()) if each))

    def _start(self, command: StartUpdate) -> None:
        stored = self._stored
        if command.shapes:
            names = {name: self._translation(name) for name in command.shapes}
            stored = {name: tuple(command.shapes[given]) for given, name in names.items() if name is not None}
        if command.only_drafts:
            if not self._model.config.num_draft_layers:
                raise CheckpointError(
                    "the engine has no modules for multi-token prediction; set speculative_config with method='mtp'"
                )
            of_others = {name: shape for name, shape in self._stored.items() if not name.startswith(OF_DRAFTS)}
            stored = of_others | {name: shape for name, shape in stored.items() if name.startswith(OF_DRAFTS)}
        needs_all = command.needs_all or self._is_stale
        if needs_all and command.only_drafts:
            raise CheckpointError("the weights are stale; update all of them before those of drafts")
        skeleton = self._skeleton()
        places = destinations(skeleton, self._description.family.norm_offset, stored)
        if command.only_drafts:
            places = _only_of_drafts(places)
        self._update = _Update(self._model, skeleton, places, needs_all=needs_all, only_drafts=command.only_drafts)

    def _cancel(self) -> None:
        if self._update is not None:
            self._is_stale |= self._update.has_written
            self._update = None

    def _require_open(self) -> _Update:
        if self._update is None:
            raise CheckpointError("no update of the weights has begun; call start_weight_update first")
        return self._update

    def _open(self, command: LoadTensors | ReceiveTensors, ending: contextlib.ExitStack) -> _Chunk:
        """Open the tensors of a folder, of a file in shared memory, or of a connection, which `ending` will close."""
        read_rows = MappedFiles().read_rows
        if isinstance(command, ReceiveTensors):
            remote = RemoteChunk(command.address, bytes.fromhex(command.key))
            ending.callback(remote.close)
            checkpoint, read_rows = _checkpoint_of(Path(command.address), remote.tensors), remote.read_rows
        elif (folder := Path(command.path)).is_dir():
            checkpoint = open_checkpoint(folder, WeightFormat())
        else:
            _require_chunk(folder)
            checkpoint = _checkpoint_of(folder, read_header(folder))
        layers = self._description.model.num_decoder_layers
        return _Chunk(translated(checkpoint, self._description.family, layers), read_rows)

    def _skeleton(self) -> Decoder:
        """Return a second decoder that shares the model's unpacked parameters, and has no memory for packed weights."""
        model, context = self._model, self._model.context
        placements = list(self._placements)
        own = model.config.of_stage(range(len(placements)), model.stage)
        moes = [block.network.moe for block in model.blocks if block.network.moe is not None]
        for index, moe in zip(own, moes, strict=True):  # rebalancing may have moved experts
            placements[index] = moe.placement
        ep = model.groups.ep
        dispatchers = TorchDispatchers("local" if ep.world_size == 1 else "allgather", ep, context)
        skeleton = Decoder(model.config, placements, dispatchers, context, model.stage)
        modules = dict(model.named_modules())
        for name, module in skeleton.named_modules():
            for part, parameter in modules[name].named_parameters(recurse=False):
                setattr(module, part, parameter)
        return skeleton

    def _read_checksums(self) -> dict[str, str]:
        rank = self._model.groups.rank
        own = {f"{rank}.{name}": _checksum(tensor) for name, tensor in packed_state(self._model).items()}
        checksums: dict[str, str] = {}
        for each in self._gather(msgspec.msgpack.encode(own)):
            checksums |= msgspec.msgpack.decode(each, type=dict[str, str])
        return checksums


class _Update:
    """One update, from its first tensor to its last."""

    def __init__(
        self,
        model: Decoder,
        skeleton: Decoder,
        places: Destinations,
        *,
        needs_all: bool,
        only_drafts: bool,
    ) -> None:
        """
        Args:
            places: destinations in `skeleton` of the tensors of the update.
        """
        self.only_drafts, self.has_written = only_drafts, False
        self._destinations = places
        self._needs_all = needs_all
        live, own = weights_of(model), weights_of(skeleton)
        self._live: dict[AnyWeights, AnyWeights] = {weights: live[name] for name, weights in own.items()}
        self._names: dict[AnyWeights, set[str]] = {}  # names of the tensors that fill each packed weight
        for name, of_name in places.into.items():
            for place in of_name:
                if place.owner is not None and self._live[place.owner].panels is not None:
                    self._names.setdefault(place.owner, set()).add(name)
        fill_panels(place for of_name in places.into.values() for place in of_name)
        for weights in self._names:
            if weights.fills_panels:
                weights.panels = self._live[weights].panels
        self._received: set[str] = set()
        self._stored_names: dict[str, str] = {}  # the trainer's names of tensors, by translated name
        self._next: _Chunk | None = None

    def prepare(self, chunk: _Chunk) -> None:
        """Check the tensors of a chunk before any of them is copied."""
        into, checkpoint = self._destinations.into, chunk.checkpoint
        unknown = [name for name in checkpoint.names - into.keys() if not self._destinations.is_ignored(name)]
        if found := checkpoint.shown(
            harmful(unknown, checkpoint.tensors, self._destinations.frequencies, chunk.read_rows)
        ):
            raise CheckpointError(
                f"{len(found)} tensors have no place in the model: {list_names(found)}. If the trainer stacks experts "
                "in another way than the checkpoint, give the shapes of all tensors at the start of the update"
            )
        if twice := checkpoint.shown(checkpoint.names & self._received):
            raise CheckpointError(f"{len(twice)} tensors were sent before in this update: {list_names(twice)}")
        check_tensors(checkpoint, {name: into[name] for name in checkpoint.names & into.keys()})
        self._next = chunk

    def fill(self) -> None:
        """Copy the tensors of the chunk that `prepare` has checked."""
        chunk, self._next = self._next, None
        assert chunk is not None
        checkpoint, into = chunk.checkpoint, self._destinations.into
        self._stored_names |= checkpoint.stored_names
        with progress_bar("weights", total=0, is_shown=False) as progress:
            for name in sorted(checkpoint.names & into.keys()):
                self.has_written = True
                self._received.add(name)
                for place in into[name]:
                    fill_place(self._opened(place), checkpoint.tensors[name], chunk.read_rows, PIECE_VALUES, progress)
                for owner in {place.owner for place in into[name]}:
                    if owner is not None and self._names.get(owner, {""}) <= self._received:
                        self._pack(owner)

    def finish(self) -> None:
        """Check that no weights are partly filled, and pack weights that share the embedding's memory.

        Raises:
            CheckpointError: tensors are missing.
        """
        missing: set[str] = set()
        for names in self._names.values():
            if names & self._received:
                missing |= names - self._received
        others = self._destinations.into.keys() - self._received
        if self._needs_all:
            missing |= {name for name in others if not name.startswith(OF_DRAFTS)}
        if missing:
            why = "the weights are stale, so all must be sent" if self._needs_all else "weights are partly filled"
            raise CheckpointError(f"{why}; {len(missing)} tensors are missing: {list_names(self._shown(missing))}")
        if others and all(name.startswith(OF_DRAFTS) for name in others):
            logger.warning("drafts are those of older weights: %d tensors of MTP modules were not sent", len(others))
        if EMBEDDING in self._received:
            for weights in self._live:
                if weights.is_borrowed:
                    self._pack(weights)

    def _shown(self, names: set[str]) -> list[str]:
        return Checkpoint(Path(), {}, None, 0, self._stored_names).shown(names)

    def _opened(self, place: Destination) -> Destination:
        """Return `place` in unpacked memory. The first destination of some weights allocates this memory."""
        owner = place.owner
        if owner not in self._names or owner is None or owner.fills_panels:
            return place  # a parameter of the model, weights that stay unpacked, or rows that are packed when read
        assert owner.memory is not None
        if owner.memory.is_meta:  # memory that lives for a short time should share no pages with that of other weights
            memory = torch.empty(owner.memory.shape, dtype=owner.memory.dtype, device=owner.context.device)
            owner.memory = nn.Parameter(memory, requires_grad=False)
        like = place.memory
        return dataclasses.replace(
            place, memory=owner.memory.as_strided(like.shape, like.stride(), like.storage_offset())
        )

    def _pack(self, weights: AnyWeights) -> None:
        """Pack filled weights into the panels of the model, and release their unpacked memory."""
        panels = self._live[weights].panels
        if panels is None or weights.fills_panels:
            return
        if weights.borrow is not None:
            weights.use_memory()
        weights.pack_into(panels)


def _only_of_drafts(places: Destinations) -> Destinations:
    """Return only the destinations in modules for multi-token prediction. All other tensors are then ignored."""
    into = {name: of_name for name, of_name in places.into.items() if name.startswith(OF_DRAFTS)}
    return dataclasses.replace(
        places, into=into, is_ignored=lambda name: not name.startswith(OF_DRAFTS) or places.is_ignored(name)
    )


def _checkpoint_of(place: Path, stored: Mapping[str, StoredTensor]) -> Checkpoint:
    """Return a checkpoint of plain tensors."""
    num_bytes = sum(tensor.num_bytes for tensor in stored.values())
    return Checkpoint(place, {name: PlainTensor(tensor) for name, tensor in stored.items()}, None, num_bytes)


def _require_chunk(path: Path) -> None:
    """Raise CheckpointError unless `path` is a chunk that `moeserve.rl` has written to shared memory."""
    is_chunk = path.parent == SHARED_MEMORY and path.name.startswith(CHUNK_PREFIX)
    try:
        is_chunk = is_chunk and stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        is_chunk = False
    if not is_chunk:
        raise CheckpointError(
            f"{path} is neither a folder with safetensors files nor a file {SHARED_MEMORY}/{CHUNK_PREFIX}... on the "
            "host of every rank"
        )


def _checksum(tensor: Tensor) -> str:
    data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()
