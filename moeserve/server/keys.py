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

    def __init__(self, keys: Iterable[str], admin_keys: Iterable[str] = ()) -> None:
        """
        Args:
            keys: accepted keys; if empty, every request is accepted.
            admin_keys: accepted keys that also identify administrators.
        """
        self._digests = [_digest(key) for key in keys]
        self._admin_digests = [_digest(key) for key in admin_keys]

    @classmethod
    def read(cls, keys: Iterable[str], path: str | None, admin_keys: Iterable[str] = ()) -> Keys:
        """Return the given keys and the keys in a file, which has one key per line.

        Args:
            path: the file; None: no file.
            admin_keys: keys of administrators.

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
        administrators = list(admin_keys)
        for place, key in enumerate([*found, *administrators], start=1):
            if not key.isascii() or not key.isprintable() or not key or " " in key:
                number = f"{place} of {len(found) + len(administrators)}"
                raise SettingsError(f"API key {number} must be visible ASCII characters without spaces")
        return cls(found, administrators)

    @property
    def have_administrator(self) -> bool:
        return bool(self._admin_digests)

    def is_administrator(self, headers: Mapping[str, str]) -> bool:
        """Return True if a request has the key of an administrator (see `client`)."""
        return _is_one_of(_given_digest(headers), self._admin_digests)

    @property
    def are_required(self) -> bool:
        return bool(self._digests)

    def client(self, headers: Mapping[str, str]) -> str | None:
        """Return the name of the client that sent a request; None if the request's key is missing or wrong.

        The key is compared with all accepted keys, each in constant time. So the duration reveals nothing about
        accepted keys.

        Args:
            headers: the request's headers by lower-case name. The key is in "authorization" or "x-api-key".
        """
        if not self._digests:
            return ANYONE
        digest = _given_digest(headers)
        return digest.hex() if _is_one_of(digest, [*self._digests, *self._admin_digests]) else None


def _given_digest(headers: Mapping[str, str]) -> bytes:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return _digest(key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", ""))


def _is_one_of(digest: bytes, accepted: list[bytes]) -> bool:
    matches = [hmac.compare_digest(digest, known) for known in accepted]
    return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
