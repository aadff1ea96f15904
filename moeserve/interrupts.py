"""Ctrl-C at the right moments: never while the books are being changed, always while somebody waits.

Python raises KeyboardInterrupt between any two instructions of the main thread. Where news has left a socket and is not
yet in its place, that would lose it. To other threads the interrupt never comes, and nothing is done for them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Deferral:
    """SIGINT is written down instead of handled."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler  # whose turn it is afterwards
        self.came: tuple[int, FrameType | None] | None = None

    def write_down(self, number: int, frame: FrameType | None) -> None:
        self.came = number, frame

    def handle(self) -> None:
        if self.came is not None:
            came, self.came = self.came, None
            self.handler(*came)


_deferral: _Deferral | None = None  # of the main thread


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """A Ctrl-C that comes meanwhile is raised at the end. May be nested."""
    global _deferral
    handler = signal.getsignal(signal.SIGINT)
    if _deferral is not None or not _is_main_thread() or not callable(handler):
        yield
        return
    deferral = _Deferral(handler)
    signal.signal(signal.SIGINT, deferral.write_down)
    _deferral = deferral
    try:
        yield
    finally:
        _deferral = None
        signal.signal(signal.SIGINT, handler)
        deferral.handle()


@contextmanager
def interrupts_allowed() -> Iterator[None]:
    """Within `interrupts_deferred`: a stretch in which Ctrl-C is raised at once, for waiting and for long computing."""
    deferral = _deferral
    if deferral is None or not _is_main_thread():
        yield
        return
    signal.signal(signal.SIGINT, deferral.handler)
    try:
        deferral.handle()
        yield
    finally:
        signal.signal(signal.SIGINT, deferral.write_down)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
