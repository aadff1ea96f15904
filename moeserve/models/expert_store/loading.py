"""Loads a model whose experts are read from a file while the model runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from moeserve.layers.weights import AnyWeights
from moeserve.machine import shown_bytes
from moeserve.models.checkpoint.packed_cache import bytes_of
from moeserve.models.checkpoint.packing import Packer, adopt_state, packed_state, state_places
from moeserve.models.decoder import Decoder
from moeserve.models.expert_store.budget import Budget, moe_layers
from moeserve.models.expert_store.file import NewStore, Rows, StoreFile
from moeserve.ops.products.cpu import CpuExpertStore, CpuGroupedProduct
from moeserve.private_folder import make_private_folder

logger = logging.getLogger(__name__)


def load_with_store(
    model: Decoder, budget: Budget, path: Path, fill: Callable[[Packer], None], *, says: bool
) -> CpuExpertStore:
    """Load a model whose experts are marked as on disk, and return the store that reads the experts.

    Args:
        model: a model without weights.
        path: the file of packed weights, which is written if it does not exist.
        fill: fills the model from the checkpoint.
        says: True: log how much is in memory and how much on disk.

    Raises:
        CheckpointError: the file cannot be written.
        SettingsError: other users can access the folder of the file.
    """
    make_private_folder("expert_store", path.parent)
    native = model.context.of_experts.backend.native
    assert native is not None
    sizes = _sizes(model)
    file = _adopt(model, native, path, sizes)
    if file is None:
        if says:
            logger.info("writing %s of packed weights to %s, once", shown_bytes(_total(sizes)), path)
        _write(model, native, path, sizes, fill)
        file = StoreFile(native, path, sizes)
    store = CpuExpertStore(native, str(path))
    names = {weights: name for name, weights in state_places(model)[0].items()}
    for layer_name, layer in moe_layers(model).items():
        gate_up, down = layer.experts.gate_up, layer.experts.down
        assert isinstance(gate_up.product, CpuGroupedProduct)
        assert isinstance(down.product, CpuGroupedProduct)
        parts = [_places(file, names[weights], sizes) for weights in (gate_up, down)]
        layer.experts.stored = store.add_layer(gate_up.product, down.product, parts, budget.slots[layer_name])
    if says:
        slots = sorted(set(budget.slots.values()))
        logger.info(
            "%s of %s of experts are in memory (%s of each layer's); the others are read from %s%s",
            shown_bytes(store.num_bytes),
            shown_bytes(budget.stored_bytes),
            " to ".join(str(number) for number in dict.fromkeys((slots[0], slots[-1]))),
            path,
            "" if store.is_direct else ", through the page cache, because its file system refuses O_DIRECT",
        )
    return store


def _sizes(model: Decoder) -> dict[str, Rows]:
    panels, parameters = state_places(model)
    sizes = {}
    for name, weights in panels.items():
        number = weights.shape[0] if weights.is_on_disk else 1
        sizes[name] = Rows(number, weights.num_packed_bytes // number)
    return sizes | {name: Rows(1, parameter.nbytes) for name, parameter in parameters.items()}


def _total(sizes: dict[str, Rows]) -> int:
    return sum(rows.number * rows.num_bytes for rows in sizes.values())


def _places(file: StoreFile, name: str, sizes: dict[str, Rows]) -> list[tuple[int, int, int]]:
    """Return the offset in the file, the size in bytes and the checksum of each expert's weights."""
    size = sizes[name].num_bytes
    return [(file.offsets[name] + row * size, size, sum_) for row, sum_ in enumerate(file.checksums[name])]


def _adopt(model: Decoder, native: ModuleType, path: Path, sizes: dict[str, Rows]) -> StoreFile | None:
    """Use the weights in an existing file. Return None if there is no intact file, so that weights must be filled.

    Experts are mapped, which takes no memory. Other weights are copied, to a GPU if they belong there.
    """
    panels, parameters = state_places(model)
    try:
        file = StoreFile(native, path, sizes)
        state: dict[str, Tensor] = {}
        for name in sizes:
            rows_RB = file.mapped_rows(name)
            weights = panels.get(name)
            if weights is None or not weights.is_on_disk:
                memory = bytes_of(parameters[name].data) if weights is None else _panels_like(rows_RB, weights)
                rows_RB = memory.view(rows_RB.shape).copy_(rows_RB)
                if not file.is_intact(name, rows_RB.cpu()):
                    raise ValueError(f"the checksum of {name} differs")
            state[name] = rows_RB.view(-1)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is damaged (%s); it is written again", path, error)
        path.unlink(missing_ok=True)
        return None
    is_same = adopt_state(model, state)
    assert is_same
    return file


def _panels_like(rows_RB: Tensor, weights: AnyWeights) -> Tensor:
    return weights.context.backend.allocate_weights(tuple(rows_RB.shape), torch.uint8, rows_RB.device)


def _write(
    model: Decoder, native: ModuleType, path: Path, sizes: dict[str, Rows], fill: Callable[[Packer], None]
) -> None:
    """Fill the model, and write the file. Each layer's experts are written as soon as they are packed."""
    on_disk = {weights: name for name, weights in state_places(model)[0].items() if weights.is_on_disk}
    new = NewStore(native, path, sizes)
    try:
        for weights, name in on_disk.items():
            weights.fill_on_disk(new.rows_of(name))

        def on_packed(weights: AnyWeights) -> None:
            if weights in on_disk:
                new.finish_rows(on_disk[weights])

        fill(Packer(model, on_packed))
        for name, tensor in packed_state(model).items():
            if name not in on_disk.values():
                new.rows_of(name).copy_(bytes_of(tensor))
                new.finish_rows(name)
        new.finish()
    finally:
        new.close()
