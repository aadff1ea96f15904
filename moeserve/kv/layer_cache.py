"""The items that networks keep in their caches, declared as data, and the number of places for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moeserve.kv.rules import AnyRule, CacheGroup, CacheRules, RuleOfBlocks


@dataclass(frozen=True)
class CacheDivision:
    """The part of a cache tensor that one tp rank has: ranges of the whole tensor along one axis, concatenated."""

    axis: int  # axis of the ranges, never the axis of blocks or rows; 0: the rank has the whole tensor
    ranges: tuple[range, ...]


@dataclass(frozen=True)
class CacheItems:
    """The items that one network on one rank keeps by one rule."""

    rule: AnyRule
    num_bytes: int  # bytes of one item: a block of tokens, or a state
    # this rank's part of each tensor; empty: the rank has all of every tensor
    divisions: tuple[CacheDivision, ...] = ()


@dataclass(frozen=True)
class CacheNeeds:
    """The cache memory that all networks of a rank need together."""

    rules: CacheRules  # rules of the whole model
    block_bytes: tuple[int, ...]  # bytes of a block, for each table
    row_bytes: int  # bytes of one request's states; a saved copy of them is as large
    block_size: int  # tokens

    @classmethod
    def of(cls, items: Iterable[CacheItems], rules: CacheRules, block_size: int) -> CacheNeeds:
        """Return the memory for one item of each group."""
        items = tuple(items)

        def total(rule: AnyRule | None) -> int:
            return sum(each.num_bytes for each in items if rule is not None and each.rule.kind == rule.kind)

        return cls(rules, tuple(map(total, rules.tables)), total(rules.rows), block_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all tables."""
        return -(-sum(self.block_bytes) // self.block_size)

    def bytes_of_tokens(self, num_tokens: int) -> int:
        """Return the bytes of the tokens that a request with this many tokens keeps."""
        tables = zip(self.rules.tables, self.block_bytes, strict=True)
        return -(-sum(rule.num_kept(num_tokens) * num_bytes for rule, num_bytes in tables) // self.block_size)


@dataclass(frozen=True)
class NoCache:
    """The cache of a layer that keeps nothing."""

    tensors: tuple[()] = ()
    tensors_of_items: tuple[()] = ()

    def clear(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Places:
    """The number of places for the items of each group on a rank."""

    tables: tuple[CacheGroup, ...]  # groups with blocks; the first keeps all tokens
    num_rows: int = 0  # rows for states: those of running requests and saved copies

    @classmethod
    def equal(cls, rules: CacheRules, num_places: int) -> Places:
        """Return `num_places` places for each group."""
        return cls(tuple(CacheGroup(rule, num_places) for rule in rules.tables), num_places)

    def group_of(self, rule: RuleOfBlocks) -> int:
        """Return the index of a rule's group. A rule without a group uses the first group, which keeps all tokens."""
        return next((index for index, group in enumerate(self.tables) if group.rule.kind == rule.kind), 0)
