"""Sockets between processes of one host: how they are found, and who is at the other end.

On Linux a listening socket has a name in the abstract namespace, which ends with its process. Elsewhere it is a file in
a folder that only this user can enter.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import struct
import sys
import tempfile

HAS_ABSTRACT_NAMES = sys.platform == "linux"
# For `send`: a closed socket raises an error and no SIGPIPE. Python ignores that signal unless the program changes it.
NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)


def listen(backlog: int) -> socket.socket:
    """Return a socket to which processes of this host can connect. `stop_listening` closes it. Raises OSError."""
    if HAS_ABSTRACT_NAMES:
        address = f"@moeserve-{secrets.token_hex(16)}"
    else:
        address = os.path.join(tempfile.mkdtemp(prefix="moeserve-"), "socket")
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_name(address))
        listener.listen(backlog)
    except OSError:
        listener.close()
        _remove(address)
        raise
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the address at which a socket listens: "@" and its abstract name, or a path."""
    name = listener.getsockname()
    return f"@{name[1:].decode()}" if isinstance(name, bytes) else str(name)


def connect(peer: socket.socket, address: str) -> None:
    """Connect to a listening socket. Raises OSError."""
    peer.connect(_name(address))


def stop_listening(listener: socket.socket) -> None:
    """Close a listening socket, and remove its file. Connections stay open."""
    address = address_of(listener)
    listener.close()
    _remove(address)


def _name(address: str) -> bytes | str:
    """Return an address in the form that sockets take."""
    return b"\0" + address[1:].encode() if address.startswith("@") else address


def _remove(address: str) -> None:
    if not address.startswith("@"):
        with contextlib.suppress(OSError):
            os.unlink(address)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(address))


def is_same_user(peer: socket.socket) -> bool:
    """True if the process at the other end runs as this process' user, according to the kernel."""
    if sys.platform == "linux":
        credentials = struct.Struct("3i")  # process, user and group
        _, user, _ = credentials.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
        return bool(user == os.geteuid())
    else:
        own_user, group = ctypes.c_uint32(), ctypes.c_uint32()
        failed = ctypes.CDLL(None).getpeereid(peer.fileno(), ctypes.byref(own_user), ctypes.byref(group))
        return not failed and own_user.value == os.geteuid()
