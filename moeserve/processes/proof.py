"""How the two sides of a connection show each other that they know the same key, without sending it."""

from __future__ import annotations

import hmac

NONCE_BYTES = 32  # of the random bytes that each side sends


def proof(key: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    """Return what shows to the other side that this one knows the key.

    Args:
        role: of this side, so that its proof cannot be sent back to it.
        first, second: the nonces of both sides, in an order that follows from the role.
    """
    return hmac.digest(key, role + first + second, "sha256")
