"""The error of a library that cannot be used, and the capability of GPUs."""

from __future__ import annotations

import torch


class LibraryUnusable(Exception):
    """A library cannot be used on this machine. The message is the reason, as a clause."""


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for other devices, on which tests run."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
