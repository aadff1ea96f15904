"""The characters that byte-level vocabularies write bytes as, as published with GPT-2.

A printable character of Latin-1 stands for its own code; the other bytes, in order, have the characters from U+0100 on.
"""

from __future__ import annotations

import functools


@functools.cache
def byte_of_character() -> dict[str, int]:
    """Return the byte of each of the 256 characters of a byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
