"""Packs the weights of a model for the kernels, each as soon as it is filled. Knows no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from moeserve.config import QuantizationName
from moeserve.layers.weights import Weights


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


def weights_of(model: nn.Module) -> dict[str, Weights]:
    """All weights of a model that are packed, by the name of their place."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Weights)}
