"""Memory that processes share by passing its file descriptor. It has no name, so a killed process leaves nothing."""

from __future__ import annotations

import fcntl
import os
import secrets
import sys

HAS_MEMFD = sys.platform == "linux"


def make_memory_file(num_bytes: int) -> int:
    """Return the file descriptor of new zero-filled memory. Raises OSError if there is not enough memory."""
    fd = _open_without_name()
    try:
        os.ftruncate(fd, num_bytes)
        if sys.platform == "linux" and HAS_MEMFD:
            # If a rank could shrink its memory, ranks that read it would be killed.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_without_name() -> int:
    """Return an empty memfd on Linux, else POSIX shared memory, whose size can be set only once on macOS."""
    if sys.platform == "linux" and HAS_MEMFD:
        return os.memfd_create("moeserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # The module behind multiprocessing.shared_memory, which does not expose the file descriptor.
    import _posixshmem  # type: ignore[import-not-found]

    name = f"/moeserve-{secrets.token_hex(8)}"  # macOS allows 31 characters
    fd: int = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
    _posixshmem.shm_unlink(name)
    return fd
