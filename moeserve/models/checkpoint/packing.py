"""Packing of a model's weights for the kernels while they are loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from moeserve.layers.rows import Destination
from moeserve.layers.weights import AnyWeights, Weights
from moeserve.ops.products.interface import PANEL_ROWS

PACKED_STATE_VERSION = 11


def fill_panels(places: Iterable[Destination]) -> None:
    """Prepare weights whose rows fill whole panels (units of packed rows), so that rows are packed as they are read.

    Args:
        places: all destinations of a model without memory.
    """
    parts: dict[AnyWeights, list[Destination]] = {}
    for place in places:
        if place.owner is not None:
            parts.setdefault(place.owner, []).append(place)
    for weights, found in parts.items():
        is_plain = not (weights.is_borrowed or weights.is_mxfp4 or weights.fills_panels)
        is_filled = sum(place.memory.numel() for place in found) == math.prod(weights.shape)
        keeps_values = weights.int4_scales is None and weights.packs
        if is_plain and is_filled and keeps_values and all(_has_whole_panels(place, weights) for place in found):
            weights.fill_panels()


def _has_whole_panels(place: Destination, weights: AnyWeights) -> bool:
    """Return True if a destination's rows are in order, and share no panel with rows of another destination."""
    _, num_outputs, num_inputs = weights.shape
    memory, part_rows = place.memory, num_outputs // weights.num_parts
    if not memory.is_contiguous() or memory.shape[-1] != num_inputs:
        return False
    first, last = place.first_row, place.first_row + memory.numel() // num_inputs
    if part_rows % PANEL_ROWS and first // part_rows != (last - 1) // part_rows:
        return False  # a piece of the rows could begin inside of a panel
    return first % part_rows % PANEL_ROWS == 0 and last % part_rows % PANEL_ROWS == 0


class Packer:
    """Packs each weight as soon as it is fully loaded, so the model is never held twice."""

    def __init__(self, model: nn.Module, on_packed: Callable[[AnyWeights], None] = lambda weights: None) -> None:
        self._on_packed = on_packed
        self._num_missing = {
            weights: sum(tensor.numel() for tensor in weights.open_tensors)
            for weights in weights_of(model).values()
            if weights.packs
        }

    def on_filled(self, place: Destination) -> None:
        """Count the values of a filled destination, and pack its weight if all values of the weight are loaded.

        Must be called once for each destination.
        """
        owner = place.owner
        if owner is None or owner.is_borrowed or owner not in self._num_missing:
            return
        self._num_missing[owner] -= sum(tensor.numel() for tensor in place.tensors)
        assert self._num_missing[owner] >= 0
        if self._num_missing[owner] == 0:
            del self._num_missing[owner]
            owner.pack()
            self._on_packed(owner)

    def finish(self) -> None:
        """Pack all remaining weights after everything has been filled."""
        for weights in sorted(self._num_missing, key=lambda weights: weights.is_borrowed):  # lending weights first
            weights.pack()
            self._on_packed(weights)
        self._num_missing.clear()


def packed_state(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a packed model by name, for `adopt_state`."""
    state: dict[str, Tensor] = dict(model.named_parameters())
    return state | {
        f"{name}.panels": weights.panels for name, weights in weights_of(model).items() if weights.panels is not None
    }


def state_places(model: nn.Module) -> tuple[dict[str, AnyWeights], dict[str, nn.Parameter]]:
    """Return where `adopt_state` puts tensors, by name: weights that will be packed, and other parameters.

    The model's weights may be without memory.
    """
    packed = {name: weights for name, weights in weights_of(model).items() if weights.packs}
    memories = {f"{name}.{part}" for name in packed for part in ("memory", "scales")}
    panels = {f"{name}.panels": weights for name, weights in packed.items()}
    return panels, {name: weight for name, weight in model.named_parameters() if name not in memories}


def adopt_state(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Use the tensors of a packed model as this model's weights, instead of filling and packing its own.

    A tensor may have padding at its end. Return False, without changing the model, if the tensors do not belong to this
    model.
    """
    panels, parameters = state_places(model)
    sizes = {name: weights.num_packed_bytes for name, weights in panels.items()}
    sizes |= {name: parameter.nbytes for name, parameter in parameters.items()}
    if state.keys() != sizes.keys() or any(state[name].nbytes < size for name, size in sizes.items()):
        return False
    # Set biases before weights, because kernels of weights keep the addresses of biases.
    for name, parameter in parameters.items():
        parameter.data = state[name][: sizes[name]].view(parameter.dtype).view(parameter.shape)
    for name, weights in panels.items():
        weights.adopt(state[name][: sizes[name]].view(weights.shape[0], -1))
    return True


def weights_of(model: nn.Module) -> dict[str, AnyWeights]:
    """Return all weights of a model that can be packed, by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Weights)}
