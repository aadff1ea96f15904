"""Copies of KV cache blocks that run beside the steps of a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch


class CopyStream:
    """The CUDA stream of copies to and from a KV cache on a GPU. Without a GPU, copies run at once."""

    def __init__(self, caches: Sequence[Any]) -> None:
        """
        Args:
            caches: of the layers; each has `tensors`.
        """
        self._stream = torch.cuda.Stream() if any(each.is_cuda for cache in caches for each in cache.tensors) else None

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Run the copies of a `with` block on the stream. At its end, also by an error, they have ended."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()
