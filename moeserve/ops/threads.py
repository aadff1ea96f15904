"""The number of CPU threads that operations use: one number for torch and the C++ kernels, which share the threads."""

from __future__ import annotations

import torch

from moeserve.ops.native import native_kernels


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads that an operation of this process may use, including the calling thread.

    Raises:
        ValueError: the number is less than 1.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}, but it must be at least 1")
    torch.set_num_threads(num_threads)
    if kernels := native_kernels():
        kernels.set_num_threads(num_threads)
