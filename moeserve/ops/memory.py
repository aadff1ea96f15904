"""Memory for large results on the CPU, used again once nobody holds them any more.

The C library gives large blocks back to the system when they are freed, and every page of a new one costs about a
microsecond to get: a result of 32 MB is ready sooner than its memory. Knows no operation.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading

import torch
from torch import Tensor

MIN_REUSED_BYTES = 2**22  # smaller blocks are kept by the C library
PAGE_BYTES = 2**21  # a large page
REFERENCES_OF_FREE = 3  # to a buffer: the pool's, a variable's, and the one that is asked with


class BufferPool:
    """Buffers that are handed out as tensors, and again when the tensor and all its views are gone.

    At most as much memory is kept as was once in use at the same time, and less than a large page for each tensor.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[mmap.mmap] = []  # smallest first

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor with any contents."""
        num_elements = math.prod(shape)
        num_bytes = num_elements * dtype.itemsize
        with self._lock:
            buffer = self._take_free(num_bytes) or self._add(num_bytes)
            return torch.frombuffer(buffer, dtype=dtype, count=num_elements).view(shape)

    @property
    def num_bytes(self) -> int:
        """Of all buffers, in use or free."""
        return sum(len(buffer) for buffer in self._buffers)

    def _take_free(self, num_bytes: int) -> mmap.mmap | None:
        for buffer in self._buffers:
            if len(buffer) >= num_bytes and sys.getrefcount(buffer) == REFERENCES_OF_FREE:
                return buffer
        return None

    def _add(self, num_bytes: int) -> mmap.mmap:
        """A new buffer instead of those that are free, all of which were too small."""
        in_use = [buffer for buffer in self._buffers if sys.getrefcount(buffer) > REFERENCES_OF_FREE]
        buffer = mmap.mmap(-1, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        self._buffers = sorted([*in_use, buffer], key=len)
        return buffer


_pool = BufferPool()


def new_empty(like: Tensor, *shape: int) -> Tensor:
    """`like.new_empty(shape)`, where it is large in memory of this module."""
    if math.prod(shape) * like.dtype.itemsize < MIN_REUSED_BYTES or like.device.type != "cpu":
        return like.new_empty(shape)
    return _pool.empty(*shape, dtype=like.dtype)
