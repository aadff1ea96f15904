"""`WakeUp`: ends the wait of another thread."""

from __future__ import annotations

import os
import weakref


class WakeUp:
    """Ends the wait of another thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)  # readable after `wake`, until `take`
        weakref.finalize(self, os.close, self.fd)

    def wake(self) -> None:
        os.eventfd_write(self.fd, 1)

    def take(self) -> bool:
        """Return True if `wake` was called since the last `take`."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True
