"""Rules for the part of a request's past that layers keep, counted in blocks, and groups of layers with the same rule.

A layer keeps the items of all tokens, those of a window, or one state. `Has` returns True if the item that ends with a
block is available.

Groups have two shapes. Tokens are in blocks, so a request has a table of block ids for each such group. A state has a
row: a request reads the row of its own state or of a saved state, and a request with drafts has a second row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

from moeserve.cache_kind import CacheKind
from moeserve.kv.pool import num_blocks_for, num_blocks_of_windows
from moeserve.kv.state_pool import STATE_INTERVAL

Has: TypeAlias = Callable[[int], bool]


class Rule(Protocol):
    """A rule for the part of a request's past that layers keep.

    A request can continue after a cached prefix of any multiple of `step` blocks.
    """

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

    def num_kept(self, num_tokens: int) -> int:
        """Return the number of tokens that a request with this many tokens keeps."""
        ...

    def most_blocks(self, max_num_seqs: int, num_tokens_in_flight: int) -> int:
        """Return the maximum number of blocks that running requests can use; `sys.maxsize` if there is no maximum."""
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

    def num_kept(self, num_tokens: int) -> int:
        return num_tokens

    def most_blocks(self, max_num_seqs: int, num_tokens_in_flight: int) -> int:
        return sys.maxsize


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

    def num_kept(self, num_tokens: int) -> int:
        return min(num_tokens, self.num_tokens)

    def most_blocks(self, max_num_seqs: int, num_tokens_in_flight: int) -> int:
        return num_blocks_of_windows(
            self.num_tokens,
            self.block_size,
            max_num_seqs=max_num_seqs,
            num_tokens_in_flight=num_tokens_in_flight,
        )


@dataclass(frozen=True)
class KeepState:
    """One state replaces all tokens. It can be saved after every `step` blocks."""

    step: int
    kind: ClassVar[CacheKind] = CacheKind.STATE

    @classmethod
    def of_blocks(cls, block_size: int) -> KeepState:
        """Return the rule of states that can be saved after every STATE_INTERVAL tokens."""
        return cls(num_blocks_for(STATE_INTERVAL, block_size))

    def needed(self, num_blocks: int) -> range:
        return range(max(num_blocks - 1, 0), num_blocks)

    def usable(self, num_blocks: int, has: Has) -> int:
        ends = range(num_blocks - num_blocks % self.step, 0, -self.step)
        return next((end for end in ends if has(end - 1)), 0)


AnyRule: TypeAlias = RuleOfBlocks | KeepState
RULES: dict[CacheKind, Callable[..., AnyRule]] = {rule.kind: rule for rule in (KeepAll, KeepWindow, KeepState)}


@dataclass(frozen=True)
class CacheGroup:
    """Layers with the same rule, and the number of places for their items."""

    rule: AnyRule
    num_places: int


@dataclass(frozen=True)
class CacheRules:
    """The rules of a model's cache groups, in their two shapes."""

    tables: tuple[RuleOfBlocks, ...] = (KeepAll(),)  # rules of layers with blocks; the first keeps all tokens
    rows: KeepState | None = None  # rule of layers with states; None: the model has none


def groups_of(rules: Iterable[AnyRule]) -> CacheRules:
    """Return the rules of the groups that layers with these rules form.

    All layers with windows have the largest window.
    """
    tables: dict[CacheKind, RuleOfBlocks] = {KeepAll.kind: KeepAll()}
    rows: KeepState | None = None
    for rule in rules:
        if isinstance(rule, KeepState):
            rows = rule
        else:
            tables[rule.kind] = max(tables.get(rule.kind, rule), rule, key=lambda each: each.num_kept(sys.maxsize))
    return CacheRules(tuple(tables.values()), rows)
