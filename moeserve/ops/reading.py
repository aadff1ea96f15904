"""Copies from a device to the host, which the host need not wait for at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Reading(Protocol):
    """Tensors that are being copied to the host."""

    @property
    def is_done(self) -> bool:
        """True if `wait` would return at once."""
        ...

    def wait(self) -> list[Tensor]:
        """Wait until the device has computed the tensors, and return them on the host."""
        ...


class HostReading:
    """A `Reading` of tensors that are already on the host."""

    is_done = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)

    def wait(self) -> list[Tensor]:
        return self._tensors


class GpuReading:
    """A `Reading` of tensors on a GPU."""

    def __init__(self, tensors: Sequence[Tensor], pinned: Sequence[Tensor]) -> None:
        """
        Args:
            pinned: pinned host memory for the tensors.
        """
        self._on_host = list(pinned)
        for host, each in zip(self._on_host, tensors, strict=True):
            host.copy_(each, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    @property
    def is_done(self) -> bool:
        return self._copied.query()

    def wait(self) -> list[Tensor]:
        self._copied.synchronize()
        return self._on_host


def start_reading(tensors: Sequence[Tensor]) -> Reading:
    """Start to copy tensors of one device to the host. On a CPU, nothing is copied."""
    if not tensors[0].is_cuda:
        return HostReading(tensors)
    return GpuReading(tensors, [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors])
