"""Which family of implementations serves a device: decided here, for all operations. Knows none of them."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from moeserve.ops.native import native_kernels

Backend = Literal["native", "triton", "torch"]
FLOAT8_CAPABILITY = (8, 9)  # from here on, tensor cores multiply E4M3


def of(device: str) -> Backend:
    """For a device type: the C++ kernels, those in Triton, or plain torch where they are not installed."""
    match device:
        case "cpu":
            return "torch" if native_kernels() is None else "native"
        case "cuda":
            return "torch" if importlib.util.find_spec("triton") is None else "triton"
        case "meta":
            return "torch"
        case _:
            raise AssertionError(f"no operations for device {device!r}")


def has_float8() -> bool:
    """Whether products of 8-bit floats run on this host's GPU."""
    is_able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY
    return is_able and of("cuda") == "triton"
