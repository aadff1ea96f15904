"""`WakeUp`: ends the wait of another thread."""

from __future__ import annotations

import ctypes
import os
import weakref

_PIPE_BYTES = 2**16  # as much as a pipe holds, or more

# `os.write` would release the interpreter lock. The thread that it wakes would take it, and the writer would wait.
_write = ctypes.PyDLL(None).write
_write.argtypes, _write.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_ssize_t


class WakeUp:
    """Ends the wait of another thread."""

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe()  # readable after `wake`, until `take`
        for fd in (self.fd, self._writer):
            os.set_blocking(fd, False)
            weakref.finalize(self, os.close, fd)

    def wake(self) -> None:
        _write(self._writer, b"\0", 1)  # may fail because the pipe is full: then it is readable

    def take(self) -> bool:
        """Return True if `wake` was called since the last `take`."""
        try:
            return bool(os.read(self.fd, _PIPE_BYTES))
        except BlockingIOError:
            return False
