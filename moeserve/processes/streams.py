"""Standard streams that were closed before the program began, as some supervisors of services leave them."""

from __future__ import annotations

import contextlib
import os
import sys


def open_closed_streams() -> None:
    """Open standard streams that are closed on /dev/null.

    Otherwise the next socket or file would become the standard output of every process that is started, and libraries
    that print would fail, because Python's stream is None.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            with contextlib.suppress(OSError):  # no descriptor is left; then nothing could be started anyway
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest closed descriptor, which is `fd`
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, open until the program ends
