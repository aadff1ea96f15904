"""Steps that only measure memory. Products and attention, which take most of a large step's time, return zeros."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_thread = threading.local()


@contextlib.contextmanager
def measure_memory_only() -> Iterator[None]:
    """Skip the arithmetic of this thread's kernels inside the context. Results are still allocated and written."""
    _thread.is_measured = True
    try:
        yield
    finally:
        _thread.is_measured = False


def is_measured() -> bool:
    return getattr(_thread, "is_measured", False)
