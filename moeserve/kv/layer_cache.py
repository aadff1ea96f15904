"""The cache memory that layers need, declared as data, and the sizes of their caches."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.cache_kind import CacheKind


@dataclass(frozen=True, kw_only=True)
class CacheNeeds:
    """The cache memory that one layer, or several layers together, need, in bytes.

    Tokens have entries, which are stored in blocks. A state has a fixed size for each request.
    """

    bytes_per_token: int = 0  # of entries that are kept until the request ends
    window_bytes_per_token: int = 0  # of entries that are kept only while inside the window
    window: int = 0  # the largest window, the token's own position included; 0: no layer has a window
    state_bytes: int = 0  # of one request's states, and of each saved copy of them

    def __add__(self, other: CacheNeeds) -> CacheNeeds:
        return CacheNeeds(
            bytes_per_token=self.bytes_per_token + other.bytes_per_token,
            window_bytes_per_token=self.window_bytes_per_token + other.window_bytes_per_token,
            window=max(self.window, other.window),
            state_bytes=self.state_bytes + other.state_bytes,
        )

    @property
    def total_bytes_per_token(self) -> int:
        """Bytes of one token's entries of both kinds."""
        return self.bytes_per_token + self.window_bytes_per_token

    def bytes_of_tokens(self, num_tokens: int) -> int:
        """Return the bytes of the entries of a request with this many tokens, without those behind the window."""
        return self.bytes_per_token * num_tokens + self.window_bytes_per_token * min(num_tokens, self.window)


@dataclass(frozen=True)
class CacheDivision:
    """The part of a tensor of a cache that one tp rank has: ranges of the whole along one axis, one after the other."""

    axis: int  # not the first, which is that of blocks or rows
    ranges: tuple[range, ...]


@dataclass(frozen=True)
class NoCache:
    """The cache of a layer that keeps nothing."""

    tensors: tuple[()] = ()

    @property
    def tensors_of_items(self) -> dict[CacheKind, tuple[()]]:
        """The tensors by the kind of their items: none."""
        return {}

    def clear(self) -> None:
        """Return at once."""


@dataclass(frozen=True)
class CacheSize:
    """The size of the cache of a layer of any kind."""

    num_blocks: int
    block_size: int  # tokens
    num_states: int = 0  # rows for states: those of running requests and saved copies
    num_window_blocks: int = 0  # of sliding-window layers; 0: `num_blocks`, because they keep all entries

    def blocks_of(self, *, has_window: bool) -> int:
        """Return the number of blocks of a layer."""
        return self.num_window_blocks or self.num_blocks if has_window else self.num_blocks
