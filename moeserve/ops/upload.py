"""Copies from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def uploaded(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Copy integers to a device as int64. The host does not wait for the copy."""
    return upload(torch.tensor(numbers, dtype=torch.int64), device)


def upload(on_host: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device. For a GPU, pinned memory is used so that the host does not wait."""
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host.to(device)
