"""Steps that measure memory. Products and attention return zeros: nearly all of a large step's time is in them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_thread = threading.local()


@contextlib.contextmanager
def measure_memory_only() -> Iterator[None]:
    """Skip the arithmetic of this thread inside. Results take their memory."""
    _thread.is_measured = True
    try:
        yield
    finally:
        _thread.is_measured = False


def is_measured() -> bool:
    return getattr(_thread, "is_measured", False)
