"""What the block pool promises, one sentence a test. Random histories are in test_scheduling_states.py."""

from __future__ import annotations

import hashlib

import pytest

from moeserve.scheduling.block_pool import BlockPool, block_digests, num_blocks_for, root_digest

A, B, C = b"a", b"b", b"c"  # digests, as far as the pool can tell


def pool_with(*digests: bytes, num_blocks: int = 4) -> tuple[BlockPool, list[int]]:
    """A pool in which one holder has a block registered under each digest."""
    pool = BlockPool(num_blocks)
    block_ids = pool.allocate(len(digests))
    for block_id, digest in zip(block_ids, digests, strict=True):
        pool.register(block_id, digest)
    return pool, block_ids


def test_all_blocks_can_be_handed_out_and_come_back() -> None:
    pool = BlockPool(3)
    taken = pool.allocate(2) + pool.allocate(1)
    assert sorted(taken) == [0, 1, 2]
    assert pool.num_free == 0
    pool.release(taken)
    assert pool.num_free == 3
    pool.check_invariants(held=[])


def test_more_blocks_than_are_free_are_refused() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 free"):
        pool.allocate(2)


def test_a_block_is_not_released_twice() -> None:
    pool = BlockPool(2)
    taken = pool.allocate(1)
    pool.release(taken)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(taken)


def test_a_registered_block_is_found_while_it_is_held_and_while_it_is_free() -> None:
    pool, (block_id,) = pool_with(A)
    assert pool.find(A) == block_id
    pool.release([block_id])
    assert pool.find(A) == block_id
    assert pool.find(B) is None


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool, (block_id,) = pool_with(A)
    pool.share([block_id])
    pool.release([block_id])
    assert not pool.is_free(block_id)
    pool.check_invariants(held=[block_id])
    pool.release([block_id])
    assert pool.is_free(block_id)


def test_sharing_a_free_block_takes_it_off_the_free_list() -> None:
    pool, (block_id,) = pool_with(A, num_blocks=2)
    pool.release([block_id])
    pool.share([block_id])
    assert pool.num_free == 1
    assert pool.allocate(1) != [block_id]
    assert pool.find(A) == block_id


def test_a_block_that_was_never_registered_cannot_be_shared() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="not registered"):
        pool.share(pool.allocate(1))


def test_handing_a_block_out_forgets_what_it_held() -> None:
    pool, (block_id,) = pool_with(A, num_blocks=1)
    pool.release([block_id])
    assert pool.allocate(1) == [block_id]
    assert pool.find(A) is None


def test_blocks_that_hold_nothing_go_first() -> None:
    pool, cached = pool_with(A, B)
    plain = pool.allocate(2)
    pool.release(cached)
    pool.release(plain)
    assert sorted(pool.allocate(2)) == sorted(plain)
    assert pool.find(A) == cached[0]
    assert pool.find(B) == cached[1]


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool, (first, second, third) = pool_with(A, B, C, num_blocks=3)
    for block_id in (first, second, third):
        pool.release([block_id])
    pool.share([first])  # used again: now the most recent
    pool.release([first])
    assert pool.allocate(3) == [second, third, first]


def test_the_tail_of_a_prefix_is_forgotten_before_its_head() -> None:
    pool, block_ids = pool_with(A, B, C, num_blocks=3)
    pool.release(block_ids)
    pool.allocate(2)
    assert pool.find(A) == block_ids[0]
    assert pool.find(B) is None
    assert pool.find(C) is None


def test_the_first_of_two_blocks_with_equal_contents_stays_registered() -> None:
    pool, (first,) = pool_with(A)
    second = pool.allocate(1)[0]
    pool.register(second, A)
    assert pool.find(A) == first
    pool.release([second])
    pool.release([first])
    pool.check_invariants(held=[])
    assert pool.allocate(4)[-1] == first  # the other one holds nothing of use


@pytest.mark.parametrize("held", [[], [0], [0, 0, 1]])
def test_the_check_notices_holders_that_do_not_add_up(held: list[int]) -> None:
    pool, _ = pool_with(A, B)
    pool.check_invariants(held=[0, 1])
    with pytest.raises(AssertionError, match="miscounted"):
        pool.check_invariants(held)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_a_number_of_tokens(num_tokens: int, num_blocks: int) -> None:
    assert num_blocks_for(num_tokens, 4) == num_blocks


def test_a_digest_is_sha256_over_the_one_before_and_eight_little_endian_bytes_per_token() -> None:
    parent = bytes(range(32))
    first = hashlib.sha256(parent + b"\x01" + bytes(7) + b"\x00\x02" + bytes(6)).digest()
    second = hashlib.sha256(first + b"\xff" * 8 + b"\x03" + bytes(7)).digest()
    assert block_digests(parent, [1, 512, -1, 3, 4], 2) == [first, second]  # the last block is not full
    assert block_digests(parent, [1, 512], 4) == []


def test_digests_of_a_sequence_are_those_of_its_parts_one_after_the_other() -> None:
    token_ids = list(range(12))
    whole = block_digests(bytes(32), token_ids, 3)
    assert whole == block_digests(bytes(32), token_ids[:6], 3) + block_digests(whole[1], token_ids[6:], 3)


def test_a_digest_tells_apart_what_came_before_and_what_is_in_the_block() -> None:
    root = root_digest(b"engine", "")
    parents = (root, *block_digests(root, [0], 1))
    digests = {digest for parent in parents for tokens in ([1], [2]) for digest in block_digests(parent, tokens, 1)}
    assert len(digests) == 4


def test_roots_differ_by_engine_and_by_tenant_and_salts_never_run_together() -> None:
    pairs = [(b"engine", ""), (b"other", ""), (b"engine", "a"), (b"engine", "b"), (b"enginea", ""), (b"e", "nginea")]
    assert len({root_digest(*pair) for pair in pairs}) == len(pairs)
    assert root_digest(b"engine", "a") == root_digest(b"engine", "a")
