"""Rules of what layers keep of a request's past, counted in blocks, and the groups of layers that share one.

A layer keeps the items of all tokens, those of a window, or one state. `Has` tells whether the item that ends with a
block is available.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

from moeserve.cache_kind import CacheKind

Has: TypeAlias = Callable[[int], bool]


class Rule(Protocol):
    """A part of a request's past that layers keep. Its prefixes can be continued after multiples of `step` blocks."""

    @property
    def kind(self) -> CacheKind: ...

    @property
    def step(self) -> int: ...

    def needed(self, num_blocks: int) -> range:
        """Return the blocks whose items a request needs to continue after its first `num_blocks` blocks."""
        ...

    def usable(self, num_blocks: int, has: Has) -> int:
        """Return the number of first blocks, at most `num_blocks`, after which a request can continue."""
        ...


class RuleOfBlocks(Rule, Protocol):
    """A rule of layers that keep blocks of tokens."""

    def first_kept(self, position: int) -> int:
        """Return the first block that the token at a position, or a later token, reads."""
        ...


@dataclass(frozen=True)
class KeepAll:
    """Every token is kept."""

    kind: ClassVar[CacheKind] = CacheKind.BLOCK
    step: ClassVar[int] = 1

    def needed(self, num_blocks: int) -> range:
        return range(num_blocks)

    def usable(self, num_blocks: int, has: Has) -> int:
        return next((index for index in range(num_blocks) if not has(index)), num_blocks)

    def first_kept(self, position: int) -> int:
        return 0


@dataclass(frozen=True)
class KeepWindow:
    """A token reads itself and the `num_tokens` - 1 tokens before it."""

    num_tokens: int
    block_size: int
    kind: ClassVar[CacheKind] = CacheKind.WINDOW_BLOCK
    step: ClassVar[int] = 1

    def needed(self, num_blocks: int) -> range:
        return range(self.first_kept(num_blocks * self.block_size), num_blocks)

    def usable(self, num_blocks: int, has: Has) -> int:
        end, index = num_blocks, num_blocks - 1
        while index >= self.first_kept(end * self.block_size):
            if not has(index):
                end = index  # the window of every longer prefix up to the previous end includes this block
            index -= 1
        return end

    def first_kept(self, position: int) -> int:
        return max(0, position - self.num_tokens + 1) // self.block_size


@dataclass(frozen=True)
class KeepState:
    """One state replaces all tokens. It can be saved after every `step` blocks."""

    step: int
    kind: ClassVar[CacheKind] = CacheKind.STATE

    def needed(self, num_blocks: int) -> range:
        return range(max(num_blocks - 1, 0), num_blocks)

    def usable(self, num_blocks: int, has: Has) -> int:
        ends = range(num_blocks - num_blocks % self.step, 0, -self.step)
        return next((end for end in ends if has(end - 1)), 0)


@dataclass(frozen=True)
class CacheGroup:
    """Layers with the same rule, and the number of places for their items."""

    rule: RuleOfBlocks | KeepState
    num_places: int
