"""`WakeUp`: ends the wait of another thread."""

from __future__ import annotations

import contextlib
import os
import weakref

_PIPE_BYTES = 2**16  # as much as a pipe holds, or more


class WakeUp:
    """Ends the wait of another thread."""

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe()  # readable after `wake`, until `take`
        for fd in (self.fd, self._writer):
            os.set_blocking(fd, False)
            weakref.finalize(self, os.close, fd)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is readable
            os.write(self._writer, b"\0")

    def take(self) -> bool:
        """Return True if `wake` was called since the last `take`."""
        try:
            return bool(os.read(self.fd, _PIPE_BYTES))
        except BlockingIOError:
            return False
