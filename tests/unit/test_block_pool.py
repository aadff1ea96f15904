"""Digests of the block pool. Its histories are in test_scheduling_states.py."""

from __future__ import annotations

import hashlib

import pytest

from moeserve.kv.pool import BlockPool, block_digests, root_digest


@pytest.mark.parametrize("held", [[], [0], [0, 0, 1]])
def test_check_invariants_detects_wrong_holders(held: list[int]) -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.check_invariants(held=[0, 1])
    with pytest.raises(AssertionError, match="miscounted"):
        pool.check_invariants(held)


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
