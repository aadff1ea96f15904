"""Proofs by which both sides of a connection show that they know the same key, without sending it."""

from __future__ import annotations

import hmac
from pathlib import Path

from moeserve.errors import SettingsError

NONCE_BYTES = 32  # random bytes that each side sends
MIN_KEY_CHARACTERS = 16


def key_in_file(setting: str, path: str) -> bytes:
    """Return the key in a file.

    Args:
        setting: name of the setting that names the file, for error messages.

    Raises:
        SettingsError: the key cannot be read, or is too short.
    """
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"{setting}={path!r} cannot be read: {error}") from None
    if len(key) < MIN_KEY_CHARACTERS:
        raise SettingsError(
            f"{setting}={path!r} has {len(key)} characters; at least {MIN_KEY_CHARACTERS} are needed, for example "
            "those of `openssl rand -hex 32`"
        )
    return key


def proof(key: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    """Return the proof to the other side that this side knows the key.

    Args:
        role: role of this side, so that the other side cannot send the proof back as its own.
        first, second: the nonces of both sides, in an order that depends on the role.
    """
    return hmac.digest(key, role + first + second, "sha256")
