"""The index of blocks in the host's memory."""

from __future__ import annotations

from moeserve.scheduling.kv_connector import HostTier

A, B, C, D = (bytes([letter]) for letter in b"abcd")


def stored(tier: HostTier, *digests: bytes) -> list[bytes]:
    """Save blocks. Return those that the tier took."""
    taken = list(tier.begin_save(digests))
    tier.end_save(taken, len(taken))
    tier.check_invariants()
    return taken


def test_the_least_recently_used_block_is_replaced_but_none_that_is_loaded() -> None:
    tier = HostTier(2)
    assert stored(tier, A, B) == [A, B]
    assert stored(tier, A) == []  # it is there
    tier.begin_load([A, B])
    assert stored(tier, C) == []  # no room: both are being read
    tier.end_load([A, B], 2)
    assert stored(tier, C) == [C]
    assert [tier.get_num_new_matched_blocks([each]) for each in (A, B, C)] == [1, 0, 1]  # the tail went first
    assert tier.get_num_new_matched_blocks([A, B, C]) == 1


def test_a_block_is_there_only_when_it_was_saved() -> None:
    tier = HostTier(3)
    places = tier.begin_save([A, B])
    assert len(set(places.values())) == 2
    assert tier.get_num_new_matched_blocks([A]) == 0
    assert tier.begin_save([A, C, D]).keys() == {C}  # A is being saved, and there is no place for D
    tier.end_save([A, B], 1)  # B failed
    tier.check_invariants()
    assert [tier.get_num_new_matched_blocks([each]) for each in (A, B)] == [1, 0]
    assert stored(tier, D) == [D]


def test_a_block_may_be_loaded_twice_at_once() -> None:
    tier = HostTier(1)
    stored(tier, A)
    assert tier.begin_load([A]) == tier.begin_load([A])
    tier.end_load([A], 1)
    assert stored(tier, B) == []
    tier.end_load([A], 1)
    assert stored(tier, B) == [B]
