"""Ctrl-C only where it loses nothing: deferred while state is changed, allowed while the process waits or computes.

Python raises KeyboardInterrupt between any two instructions of the main thread. A message that has left a socket and is
not yet stored would be lost. Other threads are never interrupted, so they need no protection.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Deferral:
    """A signal handler that records SIGINT instead of handling it."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler  # called later
        self.recorded: tuple[int, FrameType | None] | None = None

    def record(self, number: int, frame: FrameType | None) -> None:
        self.recorded = number, frame

    def handle(self) -> None:
        if self.recorded is not None:
            recorded, self.recorded = self.recorded, None
            self.handler(*recorded)


_deferral: _Deferral | None = None  # deferral of the main thread; None: Ctrl-C is not deferred now


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise a Ctrl-C only when the context is left. May be nested."""
    global _deferral
    handler = signal.getsignal(signal.SIGINT)
    if _deferral is not None or not _is_main_thread() or not callable(handler):
        yield
        return
    deferral = _Deferral(handler)
    signal.signal(signal.SIGINT, deferral.record)
    _deferral = deferral
    try:
        yield
    finally:
        _deferral = None
        signal.signal(signal.SIGINT, handler)
        deferral.handle()


@contextmanager
def interrupts_allowed() -> Iterator[None]:
    """Inside `interrupts_deferred`, raise a Ctrl-C at once: for waiting and for long computations."""
    deferral = _deferral
    if deferral is None or not _is_main_thread():
        yield
        return
    signal.signal(signal.SIGINT, deferral.handler)
    try:
        deferral.handle()
        yield
    finally:
        signal.signal(signal.SIGINT, deferral.record)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
