"""Order of eviction and digests of the block pool. Random histories are in test_scheduling_states.py."""

from __future__ import annotations

import hashlib

import pytest

from moeserve.scheduling.block_pool import BlockPool, block_digests, num_blocks_for, root_digest

A, B, C = b"a", b"b", b"c"  # digests


def pool_with(*digests: bytes, num_blocks: int = 4) -> tuple[BlockPool, list[int]]:
    """Return a pool in which one holder has a block registered under each digest."""
    pool = BlockPool(num_blocks)
    block_ids = pool.allocate(len(digests))
    for block_id, digest in zip(block_ids, digests, strict=True):
        pool.register(block_id, digest)
    return pool, block_ids


def test_wrong_use_is_an_assertion() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks needed, 1 free"):
        pool.allocate(2)
    with pytest.raises(AssertionError, match="not registered"):
        pool.share([block_id])
    pool.release([block_id])
    with pytest.raises(AssertionError, match="no holder"):
        pool.release([block_id])
    with pytest.raises(AssertionError, match="no holder"):
        pool.register(block_id, A)


def test_a_registered_block_is_found_until_it_is_allocated_again() -> None:
    pool, (block_id,) = pool_with(A, num_blocks=1)
    pool.share([block_id])
    pool.release([block_id])
    assert not pool.is_free(block_id)
    pool.release([block_id])
    assert pool.is_free(block_id)
    assert pool.find(A) == block_id
    assert pool.allocate(1) == [block_id]
    assert pool.find(A) is None


def test_blocks_without_a_digest_are_allocated_first() -> None:
    pool, cached = pool_with(A, B)
    plain = pool.allocate(2)
    pool.release(cached)
    pool.release(plain)
    assert sorted(pool.allocate(2)) == sorted(plain)
    assert [pool.find(A), pool.find(B)] == cached


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool, (first, second, third) = pool_with(A, B, C, num_blocks=3)
    for block_id in (first, second, third):
        pool.release([block_id])
    pool.share([first])  # used again: now the most recent
    pool.release([first])
    assert pool.allocate(3) == [second, third, first]


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool, block_ids = pool_with(A, B, C, num_blocks=3)
    pool.release(block_ids)
    pool.allocate(2)
    assert [pool.find(A), pool.find(B), pool.find(C)] == [block_ids[0], None, None]


def test_the_first_of_two_blocks_with_equal_contents_stays_registered() -> None:
    pool, (first,) = pool_with(A)
    second = pool.allocate(1)[0]
    pool.register(second, A)
    assert pool.find(A) == first
    pool.release([second])
    pool.release([first])
    pool.check_invariants(held=[])
    assert pool.allocate(4)[-1] == first


@pytest.mark.parametrize("held", [[], [0], [0, 0, 1]])
def test_check_invariants_detects_wrong_holders(held: list[int]) -> None:
    pool, _ = pool_with(A, B)
    pool.check_invariants(held=[0, 1])
    with pytest.raises(AssertionError, match="miscounted"):
        pool.check_invariants(held)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_blocks_for_a_number_of_tokens(num_tokens: int, num_blocks: int) -> None:
    assert num_blocks_for(num_tokens, 4) == num_blocks


def test_a_digest_is_sha256_of_its_parent_and_eight_little_endian_bytes_per_token() -> None:
    parent = bytes(range(32))
    first = hashlib.sha256(parent + b"\x01" + bytes(7) + b"\x00\x02" + bytes(6)).digest()
    second = hashlib.sha256(first + b"\xff" * 8 + b"\x03" + bytes(7)).digest()
    assert block_digests(parent, [1, 512, -1, 3, 4], 2) == [first, second]  # the last block is not full
    assert block_digests(parent, [1, 512], 4) == []


def test_root_digests_differ_by_engine_and_by_tenant() -> None:
    pairs = [(b"engine", ""), (b"other", ""), (b"engine", "a"), (b"engine", "b"), (b"enginea", ""), (b"e", "nginea")]
    assert len({root_digest(*pair) for pair in pairs}) == len(pairs)
    assert root_digest(b"engine", "a") == root_digest(b"engine", "a")
