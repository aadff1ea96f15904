"""Standard streams that were closed before the program began, as some supervisors of services leave them."""

from __future__ import annotations

import contextlib
import os
import sys

STREAMS = {0: ("stdin", "r"), 1: ("stdout", "w"), 2: ("stderr", "w")}


def open_closed_streams() -> None:
    """Open standard streams that are closed on /dev/null.

    Otherwise the next socket or file would become the standard output of every process that is started, and libraries
    that print would fail, because Python's stream is None.
    """
    for fd in STREAMS:
        try:
            os.fstat(fd)
        except OSError:
            with contextlib.suppress(OSError):  # no descriptor is left; then nothing could be started anyway
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest closed descriptor, which is `fd`
    for name, mode in STREAMS.values():  # afterwards: these open further descriptors, which processes do not inherit
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, open until the program ends


def copy_of_stream(fd: int) -> int:
    """Return a copy of standard output or error, or of /dev/null if the stream is closed.

    If a file of the program has the stream's number, because it was opened while the stream was closed, then processes
    do not inherit it, and the stream counts as closed.
    """
    try:
        is_stream = os.get_inheritable(fd)
    except OSError:
        is_stream = False
    return os.dup(fd) if is_stream else os.open(os.devnull, os.O_WRONLY)
