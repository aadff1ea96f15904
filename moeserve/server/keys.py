"""API keys. If any are set, each request needs one. Clients with different keys share no cached prefixes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from moeserve.errors import SettingsError

ANYONE = ""


class Keys:
    """The accepted API keys. Each client is identified by a digest of its key."""

    def __init__(self, keys: Iterable[str]) -> None:
        """
        Args:
            keys: the keys; if empty, every request is accepted.
        """
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def read(cls, keys: Iterable[str], path: str | None) -> Keys:
        """Return the given keys and those in a file, which has one key per line.

        Raises:
            SettingsError: the file cannot be read or has no keys, or a key has characters other than visible ASCII.
        """
        found = list(keys)
        if path is not None:
            try:
                lines = Path(path).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"api_key_file={path!r} cannot be read: {error}") from None
            in_file = [line.strip() for line in lines if line.strip()]
            if not in_file:
                raise SettingsError(f"api_key_file={path!r} has no key; write one per line")
            found += in_file
        for place, key in enumerate(found, start=1):
            if not key.isascii() or not key.isprintable() or not key or " " in key:
                raise SettingsError(f"API key {place} of {len(found)} must be visible ASCII characters without spaces")
        return cls(found)

    @property
    def are_required(self) -> bool:
        return bool(self._digests)

    def client(self, headers: Mapping[str, str]) -> str | None:
        """Return the name of the client that sent a request; None if its key is missing or wrong.

        The key is compared with all accepted keys, each in constant time, so that the duration reveals nothing about
        them.

        Args:
            headers: the request's headers by lower-case name. The key is in "authorization" or "x-api-key".
        """
        if not self._digests:
            return ANYONE
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", ""))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest.hex() if any(matches) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
