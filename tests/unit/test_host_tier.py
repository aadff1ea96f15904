"""The index of items in the host's memory."""

from __future__ import annotations

from moeserve.cache_kind import CacheKind
from moeserve.kv.connector import HostTier, ItemKey

A, B, C, D = (ItemKey(CacheKind.BLOCK, bytes([letter])) for letter in b"abcd")
STATE = ItemKey(CacheKind.STATE, A.digest)


def tier_of(num_blocks: int) -> HostTier:
    return HostTier({CacheKind.BLOCK: num_blocks, CacheKind.STATE: 1})


def stored(tier: HostTier, *keys: ItemKey) -> list[ItemKey]:
    """Save items. Return those that the tier took."""
    taken = list(tier.begin_save(keys))
    tier.end_save(taken, len(taken))
    tier.check_invariants()
    return taken


def test_the_least_recently_used_block_is_replaced_but_none_that_is_loaded() -> None:
    tier = tier_of(2)
    assert stored(tier, A, B) == [A, B]
    assert stored(tier, A) == []  # it is there
    tier.begin_load([A, B])
    assert stored(tier, C, STATE) == [STATE]  # no room for another block: both are being read
    tier.end_load([A, B])
    assert stored(tier, C) == [C]
    assert [tier.has(each) for each in (A, B, C, STATE)] == [True, False, True, True]  # the tail went first
    assert stored(tier, ItemKey(CacheKind.WINDOW_BLOCK, A.digest)) == []  # for which it has no places


def test_a_block_is_there_only_when_it_was_saved() -> None:
    tier = tier_of(3)
    places = tier.begin_save([A, B])
    assert len(set(places.values())) == 2
    assert not tier.has(A)
    assert tier.begin_save([A, C, D]).keys() == {C}  # A is being saved, and there is no place for D
    tier.end_save([A, B], 1)  # B failed
    tier.check_invariants()
    assert [tier.has(each) for each in (A, B)] == [True, False]
    assert stored(tier, D) == [D]


def test_a_block_may_be_loaded_twice_at_once() -> None:
    tier = tier_of(1)
    stored(tier, A)
    assert tier.begin_load([A]) == tier.begin_load([A])
    tier.end_load([A])
    assert stored(tier, B) == []
    tier.end_load([A])
    assert stored(tier, B) == [B]
