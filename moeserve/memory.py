"""Memory on the CPU that is used again once nobody holds the tensors in it any more. Knows no operation.

The C library gives large blocks back to the system when they are freed, and every page of a new one costs about a
microsecond to get: a result of 32 MB is ready sooner than its memory.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_REUSED_BYTES = 2**22  # smaller blocks are kept by the C library
PAGE_BYTES = 2**21  # a large page
ALIGNMENT = 64  # bytes
REFERENCES_OF_FREE = 2  # to memory: its owner's, and the one that is asked with


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
        for i in range(len(self._buffers)):
            if len(self._buffers[i]) >= num_bytes and self._is_free(i):
                return self._buffers[i]
        return None

    def _is_free(self, index: int) -> bool:
        # Without a variable: whether one counts depends on the version of Python.
        return sys.getrefcount(self._buffers[index]) == REFERENCES_OF_FREE

    def _add(self, num_bytes: int) -> mmap.mmap:
        """A new buffer instead of those that are free, all of which were too small."""
        in_use = [self._buffers[i] for i in range(len(self._buffers)) if not self._is_free(i)]
        buffer = mmap.mmap(-1, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        self._buffers = sorted([*in_use, buffer], key=len)
        return buffer


@dataclass(frozen=True)
class Piece:
    start: int
    end: int
    memory: memoryview


class Arena:
    """One range of addresses, from which tensors are taken, and again when they and all their views are gone.

    What has never been used takes no memory. Not for several threads.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = memoryview(self._block)
        self._pieces: list[Piece] = []  # in use, in their order
        self.address = torch.frombuffer(self._block, dtype=torch.uint8).data_ptr()

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """A tensor with any contents, as far in front as it fits. None where it fits nowhere."""
        num_bytes = max(1, math.prod(shape)) * dtype.itemsize
        self._pieces = [self._pieces[i] for i in range(len(self._pieces)) if not self._is_free(i)]
        starts = [0, *(-(-piece.end // ALIGNMENT) * ALIGNMENT for piece in self._pieces)]
        ends = [*(piece.start for piece in self._pieces), self.num_bytes]
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end - start >= num_bytes:
                memory = self._memory[start : start + num_bytes]
                self._pieces.insert(i, Piece(start, start + num_bytes, memory))
                return torch.frombuffer(memory, dtype=dtype)[: math.prod(shape)].view(shape)
        return None

    def alias(self, tensor: Tensor) -> Tensor | None:
        """The same numbers as a tensor that does not keep others off their memory. None if they are not from here."""
        offset = tensor.data_ptr() - self.address
        if not 0 <= offset < self.num_bytes or not tensor.is_contiguous():
            return None
        count = max(1, tensor.numel())
        return torch.frombuffer(self._block, dtype=tensor.dtype, count=count, offset=offset)[: tensor.numel()].view(
            tensor.shape
        )

    def _is_free(self, index: int) -> bool:
        return sys.getrefcount(self._pieces[index].memory) == REFERENCES_OF_FREE


_pool = BufferPool()
_uses_pool = True


def new_empty(like: Tensor, *shape: int) -> Tensor:
    """`like.new_empty(shape)`, where it is large in memory of this module."""
    if math.prod(shape) * like.dtype.itemsize < MIN_REUSED_BYTES or like.device.type != "cpu" or not _uses_pool:
        return like.new_empty(shape)
    return _pool.empty(*shape, dtype=like.dtype)


@contextmanager
def without_pool() -> Iterator[None]:
    """For who wants to see all memory that is taken: large results come from torch, as small ones do."""
    global _uses_pool
    _uses_pool = False
    try:
        yield
    finally:
        _uses_pool = True
