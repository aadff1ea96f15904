"""Proofs by which both sides of a connection show that they know the same key, without sending it."""

from __future__ import annotations

import hmac

NONCE_BYTES = 32  # random bytes that each side sends


def proof(key: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    """Return the proof to the other side that this side knows the key.

    Args:
        role: role of this side, so that its proof cannot be sent back to it.
        first, second: the nonces of both sides, in an order that depends on the role.
    """
    return hmac.digest(key, role + first + second, "sha256")
