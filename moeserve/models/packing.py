"""Packs the weights of a model for the kernels, each as soon as it is filled. Knows no checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from moeserve.config.settings import QuantizationName
from moeserve.layers.weights import Weights

PACKED_STATE_VERSION = 1  # of the layout of packed weights and of the names in a model's packed state


@dataclass
class _Filling:
    weights: Weights
    num_missing: int  # elements


class Packer:
    """Told what memory is filled, packs a weight once all of it is: no two forms of a whole model are in memory."""

    def __init__(self, model: nn.Module, quantization: QuantizationName | None) -> None:
        self._quantization = quantization
        self._borrowed: list[Weights] = []
        self._filling: dict[int, _Filling] = {}
        for weights in weights_of(model).values():
            memory = weights.open.weight_eOI
            if weights.is_borrowed:
                self._borrowed.append(weights)
            elif memory.numel() > 0:
                self._filling[memory.untyped_storage().data_ptr()] = _Filling(weights, memory.numel())

    def filled(self, memory: Tensor) -> None:
        """A part of the model's memory has got its values. Each part is told of once."""
        address = memory.untyped_storage().data_ptr()
        filling = self._filling.get(address)
        if filling is None:  # of a norm, or the like
            return
        filling.num_missing -= memory.numel()
        assert filling.num_missing >= 0
        if filling.num_missing == 0:
            del self._filling[address]
            filling.weights.pack(self._quantization)

    def finish(self) -> None:
        """Everything is filled: pack what is not yet."""
        for filling in self._filling.values():
            filling.weights.pack(self._quantization)
        self._filling.clear()
        for weights in self._borrowed:
            weights.pack(self._quantization)


def packed_state(model: nn.Module) -> dict[str, Tensor]:
    """All of a packed model's memory, by name: what `adopt_state` takes."""
    state: dict[str, Tensor] = dict(model.named_parameters())
    return state | {
        f"{name}.panels": weights.panels for name, weights in weights_of(model).items() if weights.panels is not None
    }


def adopt_state(model: nn.Module, state: Mapping[str, Tensor], quantization: QuantizationName | None) -> bool:
    """Instead of filling and packing: the bytes of a packed model of the same shape, each perhaps with some more.

    Returns whether they are those of this model; if not, it is left as it was.
    """
    weights_by_name = weights_of(model)
    panels = {f"{name}.panels": weights for name, weights in weights_by_name.items() if weights.packs}
    memories = {f"{name}.memory" for name, weights in weights_by_name.items() if weights.packs}
    parameters = {name: weight for name, weight in model.named_parameters() if name not in memories}
    sizes = {name: weights.num_packed_bytes(quantization) for name, weights in panels.items()}
    sizes |= {name: parameter.nbytes for name, parameter in parameters.items()}
    if state.keys() != sizes.keys() or any(state[name].nbytes < size for name, size in sizes.items()):
        return False
    # Biases before the weights that they belong to: kernels are told where they lie.
    for name, parameter in parameters.items():
        parameter.data = state[name][: sizes[name]].view(parameter.dtype).view(parameter.shape)
    for name, weights in panels.items():
        weights.adopt(state[name][: sizes[name]].view(weights.num_weights, -1), quantization)
    return True


def weights_of(model: nn.Module) -> dict[str, Weights]:
    """All weights of a model that are packed, by the name of their place."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Weights)}
