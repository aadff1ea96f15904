"""RMSNorm as one operation: plain torch on a CPU, Triton on a GPU where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

# T tokens (any number of leading dimensions), D width of a row

RMSNormKernel = Callable[[Tensor, Tensor, float], Tensor]


def choose_rms_norm(device: str) -> RMSNormKernel:
    """The implementation for a device type: (x_TD, weight_D, epsilon) -> [T, D] in the dtype of x_TD."""
    match device:
        case "cuda" if importlib.util.find_spec("triton"):
            from moeserve.triton_kernels.rms_norm import rms_norm

            return rms_norm
        case "cpu" | "cuda" | "meta":
            return torch_rms_norm
        case _:
            raise AssertionError(f"no RMSNorm for device {device!r}")


def torch_rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """The reference: x / sqrt(mean(x²) + epsilon) in float32, rounded to the dtype of x_TD, then times the weight.

    The order of operations is transformers', so that float32 results are equal to the last bit.
    """
    wide_TD = x_TD.to(torch.float32)
    mean_square_T1 = wide_TD.pow(2).mean(-1, keepdim=True)
    return weight_D * (wide_TD * torch.rsqrt(mean_square_T1 + epsilon)).to(x_TD.dtype)
