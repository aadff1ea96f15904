"""A matrix product with a weight: the one operation that every projection, expert and output head is made of."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

# T rows, I values in, O values out


class LinearKernel(Protocol):
    """(input_TI, weight_OI, bias_O) -> input_TI @ weight_OI.T + bias_O"""

    def __call__(self, input_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor: ...


def choose_linear(device: str) -> LinearKernel:
    """The implementation for a device type."""
    match device:
        case "cpu" if torch.cpu._is_amx_tile_supported():
            return amx_linear
        case "cpu" | "cuda" | "meta":
            return torch_linear
        case _:
            raise AssertionError(f"no linear map for device {device!r}")


def torch_linear(input_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """The reference."""
    return functional.linear(input_TI, weight_OI, bias_O)


def amx_linear(input_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """torch's product, with one row as a matrix-vector product.

    On a CPU with matrix tiles (AMX), that reads the weight about a third faster; on one without, about a third slower.
    """
    if input_TI.shape[0] != 1:
        return functional.linear(input_TI, weight_OI, bias_O)
    output_O = torch.mv(weight_OI, input_TI[0])
    return (output_O if bias_O is None else output_O + bias_O)[None]
