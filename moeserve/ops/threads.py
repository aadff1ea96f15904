"""The number of CPU threads that operations use: one number for torch and the C++ kernels, which share the threads."""

from __future__ import annotations

import torch

from moeserve.ops.cpu.native import native_kernels


def set_num_threads(num_threads: int) -> None:
    """Set the threads that an operation of this process may use, the calling one included.

    Raises:
        ValueError: fewer than 1.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}, but it must be at least 1")
    torch.set_num_threads(num_threads)
    if kernels := native_kernels():
        kernels.set_num_threads(num_threads)
