"""Caches of layers: the memory they need for requests, declared as data, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CacheNeeds:
    """The memory that a layer, or several layers together, need for requests, in bytes.

    Entries of tokens lie in blocks. A state has a fixed size for each request.
    """

    bytes_per_token: int = 0  # of entries that are kept to the end of a request
    window_bytes_per_token: int = 0  # of entries that are kept while later tokens may read them
    window: int = 0  # the most positions that a token reads of the latter, its own included; 0: there are none
    state_bytes: int = 0  # of the states of each running request, and of each saved copy of them

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
        """Return the bytes of the entries of a request with this many tokens, if those behind the window are freed."""
        return self.bytes_per_token * num_tokens + self.window_bytes_per_token * min(num_tokens, self.window)

    def without_window(self) -> CacheNeeds:
        """Return what is needed if nothing is freed behind the window."""
        return CacheNeeds(bytes_per_token=self.total_bytes_per_token, state_bytes=self.state_bytes)


@dataclass(frozen=True)
class CacheSize:
    """The size of the cache of a layer of any kind."""

    num_blocks: int
    block_size: int  # tokens
    num_states: int = 0  # rows for states, of running requests and of saved ones
    num_window_blocks: int = 0  # of layers with windows; 0: as many as of others, since nothing is freed

    def blocks_of(self, *, has_window: bool) -> int:
        """Return the number of blocks of a layer."""
        return self.num_window_blocks or self.num_blocks if has_window else self.num_blocks
