"""RMSNorm as one operation, alone or after an addition: C++ on a CPU, Triton on a GPU where it is installed."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from moeserve.ops import backend
from moeserve.ops.native import NATIVE_DTYPES, require_native

# T tokens (any number of leading dimensions), D width of a row


class RMSNormKernel(Protocol):
    """(x_TD, weight_D, epsilon) -> [T, D] in the dtype of x_TD"""

    def __call__(self, x_TD: Tensor, weight_D: Tensor, epsilon: float, /) -> Tensor: ...


class AddRMSNormKernel(Protocol):
    """(x_TD, update_TD, weight_D, epsilon) -> their sum, and the sum normalised. Changes neither."""

    def __call__(
        self, x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, epsilon: float, /
    ) -> tuple[Tensor, Tensor]: ...


class RMSNormInPlace(Protocol):
    """(x_TD, weight_D, epsilon): leaves in x_TD what `RMSNormKernel` returns."""

    def __call__(self, x_TD: Tensor, weight_D: Tensor, epsilon: float, /) -> None: ...


def choose_rms_norm(device: str) -> RMSNormKernel:
    """The implementation for a device type."""
    match backend.of(device):
        case "native":
            return functools.partial(_native_rms_norm, require_native())
        case "triton":
            from moeserve.triton_kernels.rms_norm import rms_norm

            return rms_norm
        case "torch":
            return torch_rms_norm


def choose_add_rms_norm(device: str) -> AddRMSNormKernel:
    """The implementation for a device type."""
    match backend.of(device):
        case "native":
            return functools.partial(_native_add_rms_norm, require_native())
        case "triton":
            from moeserve.triton_kernels.rms_norm import add_rms_norm

            return add_rms_norm
        case "torch":
            return functools.partial(add_then_norm, torch_rms_norm)


def choose_rms_norm_in_place(device: str) -> RMSNormInPlace:
    """The implementation for a device type."""
    match backend.of(device):
        case "native":
            return functools.partial(_native_rms_norm_in_place, require_native())
        case "triton":
            from moeserve.triton_kernels.rms_norm import rms_norm_in_place

            return rms_norm_in_place
        case "torch":
            return functools.partial(_norm_then_copy, torch_rms_norm)


def torch_rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """The reference: x / sqrt(mean(x²) + epsilon) in float32, rounded to the dtype of x_TD, then times the weight.

    The order of operations is transformers', so that float32 results are equal to the last bit.
    """
    wide_TD = x_TD.to(torch.float32)
    mean_square_T1 = wide_TD.pow(2).mean(-1, keepdim=True)
    return weight_D * (wide_TD * torch.rsqrt(mean_square_T1 + epsilon)).to(x_TD.dtype)


def add_then_norm(
    rms_norm: RMSNormKernel, x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The reference, around a norm."""
    sum_TD = x_TD + update_TD
    return sum_TD, rms_norm(sum_TD, weight_D, epsilon)


def _native_rms_norm(kernels: ModuleType, x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Two or three dimensions, of which the last is contiguous: heads may be views of a fused projection."""
    if x_TD.dtype not in NATIVE_DTYPES:
        return torch_rms_norm(x_TD, weight_D, epsilon)
    out_TD = torch.empty_like(x_TD)
    kernels.rms_norm(x_TD, weight_D, epsilon, out_TD)
    return out_TD


def _native_rms_norm_in_place(kernels: ModuleType, x_TD: Tensor, weight_D: Tensor, epsilon: float) -> None:
    if x_TD.dtype not in NATIVE_DTYPES:
        return _norm_then_copy(torch_rms_norm, x_TD, weight_D, epsilon)
    kernels.rms_norm(x_TD, weight_D, epsilon, x_TD)


def _norm_then_copy(rms_norm: RMSNormKernel, x_TD: Tensor, weight_D: Tensor, epsilon: float) -> None:
    x_TD.copy_(rms_norm(x_TD, weight_D, epsilon))


def _native_add_rms_norm(
    kernels: ModuleType, x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    if x_TD.dtype not in NATIVE_DTYPES:
        return add_then_norm(torch_rms_norm, x_TD, update_TD, weight_D, epsilon)
    sum_TD, out_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    kernels.add_rms_norm(x_TD, update_TD, weight_D, epsilon, sum_TD, out_TD)
    return sum_TD, out_TD
