"""The kinds of items in a KV cache. Does not import msgspec: the GPU benchmarks import the layers without it."""

from __future__ import annotations

import enum


class CacheKind(enum.IntEnum):
    """The kinds of items in a KV cache.

    All items of a kind have the same size, and each kind numbers its own places.
    """

    BLOCK = 0  # block of the layers that keep all tokens
    WINDOW_BLOCK = 1  # block of the layers with windows
    STATE = 2  # a saved copy of a recurrent state
