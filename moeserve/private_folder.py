"""Folders that only their user may write to, and a secret in them."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from moeserve.errors import SettingsError

SECRET = "secret"
SECRET_BYTES = 32


def make_private_folder(setting: str, folder: Path) -> None:
    """Make a folder that only this user can enter, unless it exists.

    Args:
        setting: name of the setting that names the folder, for error messages.

    Raises:
        SettingsError: the folder cannot be made, or belongs to another user, or others may write there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise SettingsError(f"{setting}={str(folder)!r} cannot be used: {error}") from None
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SettingsError(
            f"{setting}={str(folder)!r} must belong to this user, and nobody else may write there; choose another "
            "folder, or run chmod go-w on it"
        )


def secret_of(setting: str, folder: Path) -> bytes:
    """Return the secret of a private folder, which is the same for all processes. The first process creates it.

    Raises:
        SettingsError: see `make_private_folder`, or the secret cannot be created or read.
    """
    make_private_folder(setting, folder)
    path, new = folder / SECRET, folder / f"{SECRET}.{secrets.token_hex(8)}"
    try:
        if not path.exists():
            new.touch(mode=0o600)
            new.write_bytes(secrets.token_bytes(SECRET_BYTES))
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(new, path)
            new.unlink()
        secret = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{setting}={str(folder)!r}: the file {SECRET!r} cannot be used: {error}") from None
    if len(secret) != SECRET_BYTES:
        raise SettingsError(f"{setting}={str(folder)!r}: the file {SECRET!r} is damaged; delete the folder")
    return secret
