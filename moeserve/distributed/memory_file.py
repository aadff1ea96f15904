"""Memory that processes share by passing its file descriptor. It has no name, so killed processes leave nothing."""

from __future__ import annotations

import fcntl
import os
import secrets
import sys

HAS_MEMFD = sys.platform == "linux"


def make_memory_file(num_bytes: int) -> int:
    """Return the file descriptor of new memory, which is zero. Raises OSError if there is not enough."""
    fd = _open_without_name()
    try:
        os.ftruncate(fd, num_bytes)
        if sys.platform == "linux" and HAS_MEMFD:
            # A rank that shrank its memory would kill the ranks that read it.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_without_name() -> int:
    """Return an empty memfd or, elsewhere, POSIX shared memory. macOS lets the size of that be set once."""
    if sys.platform == "linux" and HAS_MEMFD:
        return os.memfd_create("moeserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # The module behind multiprocessing.shared_memory, which gives its users no file descriptor.
    import _posixshmem  # type: ignore[import-not-found]

    name = f"/moeserve-{secrets.token_hex(8)}"  # macOS allows 31 characters
    fd: int = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
    _posixshmem.shm_unlink(name)
    return fd
