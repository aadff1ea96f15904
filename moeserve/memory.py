"""Memory on the CPU that is reused as soon as no tensor in it is alive.

The C library returns large blocks to the system when they are freed, and each page of a new block costs about a
microsecond. Allocating a result of 32 MB this way takes longer than computing it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

# The C library keeps smaller freed blocks. It returns larger blocks of varying sizes, such as the rows of experts on
# several ranks, to the system again and again: page faults took a tenth of a prefill.
MIN_REUSED_BYTES = 2**19
PAGE_BYTES = 2**21  # a large page
ALIGNMENT = 64  # bytes
REFERENCES_OF_FREE = 2  # references to an unused buffer: from its owner, and from the argument of sys.getrefcount


class BufferPool:
    """Buffers for tensors. A buffer is reused once its tensor and all views of it are freed.

    The pool holds at most the maximum memory that was in use at one time, plus less than a large page for each tensor.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[mmap.mmap] = []  # smallest first

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor of this shape on the CPU."""
        num_elements = math.prod(shape)
        num_bytes = num_elements * dtype.itemsize
        with self._lock:
            buffer = self._take_free(num_bytes) or self._add(num_bytes)
            return torch.frombuffer(buffer, dtype=dtype, count=num_elements).view(shape)

    def free(self) -> None:
        """Drop the buffers that no tensor uses."""
        with self._lock:
            self._buffers = [self._buffers[i] for i in range(len(self._buffers)) if not self._is_free(i)]

    @property
    def num_bytes(self) -> int:
        """Size of all buffers, used and free."""
        return sum(len(buffer) for buffer in self._buffers)

    def _take_free(self, num_bytes: int) -> mmap.mmap | None:
        for i in range(len(self._buffers)):
            if len(self._buffers[i]) >= num_bytes and self._is_free(i):
                return self._buffers[i]
        return None

    def _is_free(self, index: int) -> bool:
        # A local variable may count as a reference, depending on the version of Python.
        return sys.getrefcount(self._buffers[index]) == REFERENCES_OF_FREE

    def _add(self, num_bytes: int) -> mmap.mmap:
        """Return a new buffer, and drop the free buffers, which are all too small."""
        in_use = [self._buffers[i] for i in range(len(self._buffers)) if not self._is_free(i)]
        buffer = mmap.mmap(-1, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        self._buffers = sorted([*in_use, buffer], key=len)
        return buffer


@dataclass(frozen=True)
class Piece:
    """A range of an arena that is in use."""

    start: int
    end: int
    memory: memoryview


class Arena:
    """One range of addresses for tensors. A part is reused once its tensor and all views of it are freed.

    Parts that were never used take no memory. Not thread-safe.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = memoryview(self._block)
        self._pieces: list[Piece] = []  # by address
        self.address = torch.frombuffer(self._block, dtype=torch.uint8).data_ptr()

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return an uninitialised tensor in the first gap that is large enough; None if no gap is large enough."""
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

    def free(self) -> None:
        """Return all pages to the system. The values of tensors in the arena are lost."""
        _free_pages(self.address, self.num_bytes)

    def alias(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor on the memory of a contiguous tensor of this arena, without keeping this memory in use.

        Returns:
            A tensor with the same shape and values; None if the given tensor is not contiguous or not in this arena.
        """
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


def new_empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return `like.new_empty(shape, dtype=dtype)`, in reused memory if it is large and on the CPU."""
    dtype = dtype or like.dtype
    if math.prod(shape) * dtype.itemsize < MIN_REUSED_BYTES or like.device.type != "cpu" or not _uses_pool:
        return like.new_empty(shape, dtype=dtype)
    return _pool.empty(*shape, dtype=dtype)


def free_pool() -> None:
    """Drop the pool's buffers that no tensor uses now."""
    _pool.free()


def free_pages(tensor: Tensor) -> None:
    """Return the whole pages of a contiguous tensor on the CPU to the system, on Linux; elsewhere do nothing.

    The tensor keeps its address and loses its values: the pages are zeros when they are read again.
    """
    assert tensor.is_contiguous()
    _free_pages(tensor.data_ptr(), tensor.nbytes)


def _free_pages(address: int, num_bytes: int) -> None:
    if sys.platform == "linux":  # elsewhere, the advice has other effects
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


@contextmanager
def without_pool() -> Iterator[None]:
    """Within the context, let torch allocate large results too, so that a torch dispatch mode sees all allocations."""
    global _uses_pool
    _uses_pool = False
    try:
        yield
    finally:
        _uses_pool = True
