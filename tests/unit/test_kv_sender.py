"""Blocks that are kept for another engine go to the first receiver that names their tokens."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from moeserve.cache_kind import CacheKind
from moeserve.kv.layer_cache import CacheItems
from moeserve.kv.rank.items import CachedItems
from moeserve.kv.rank.sender import BlockSender
from moeserve.kv.rank.wire import Answer, CacheShare, Claim, Piece, Read, TensorShare
from moeserve.kv.rules import KeepAll
from moeserve.processes.peer_connection import Connection, PeerError
from moeserve.protocol import CachePlace, KeepItems, TransferResult

NUM_BLOCKS, BLOCK_VALUES = 4, 6


@pytest.fixture
def sender() -> Iterator[BlockSender]:
    blocks = torch.arange(NUM_BLOCKS * BLOCK_VALUES).view(NUM_BLOCKS, BLOCK_VALUES)
    items = CachedItems([(CacheItems(KeepAll(), 1),)], [SimpleNamespace(tensors_of_items=[(blocks,)])], range(0))
    share = CacheShare(facts={}, tensors=[TensorShare(name="", kind=CacheKind.BLOCK, axis=0, ranges=[])])
    sender = BlockSender(items, share, ("127.0.0.1", 0), b"", timeout_s=60)
    yield sender
    sender.close()


@pytest.fixture
def ends(sender: BlockSender) -> SimpleQueue[TransferResult]:
    """Keep block 3, and return where its end appears."""
    ends: SimpleQueue[TransferResult] = SimpleQueue()
    sender.keep(KeepItems(number=7, handle="kept", tokens=b"digest", places=[CachePlace(CacheKind.BLOCK, 3)]), ends.put)
    return ends


def claiming(sender: BlockSender, receiver: str, tokens: bytes = b"digest", rank: int = 0, size: int = 1) -> Connection:
    """Return a connection of a receiver's rank that has claimed the block."""
    host, _, port = sender.address.partition(":")
    connection = Connection(socket.create_connection((host, int(port))), time.monotonic() + 200)
    connection.prove(b"", connects=True)
    connection.receive_message(CacheShare)
    connection.send_message(Claim(handle="kept", receiver=receiver, tokens=tokens, rank=rank, num_ranks=size))
    return connection


def leave(connection: Connection) -> None:
    """Close a connection, and wait until the sender has noticed that."""
    connection._socket.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerError):
        connection.receive(1)  # the sender closes its side last
    connection.close()


def error_of(connection: Connection) -> str:
    """Read the block, and return the error instead if there is one."""
    connection.send_message(Read(items=[0], pieces=[Piece(0, 0, 0)]))
    answer: Answer = connection.receive_message(Answer)
    if not answer.error:
        values = torch.frombuffer(connection.receive(8 * BLOCK_VALUES), dtype=torch.int64)
        assert values.tolist() == list(range(3 * BLOCK_VALUES, 4 * BLOCK_VALUES))
    return answer.error


def test_a_second_receiver_gets_nothing_and_ends_nothing(
    sender: BlockSender, ends: SimpleQueue[TransferResult]
) -> None:
    first = claiming(sender, "first")
    assert error_of(first) == ""  # the answer shows that the sender has registered this claim before the next one
    second = claiming(sender, "second")
    assert "another engine reads" in error_of(second)
    leave(second)
    third = claiming(sender, "third")
    assert "another engine reads" in error_of(third)
    leave(third)
    assert ends.empty()
    assert error_of(first) == ""
    first.close()
    assert ends.get(timeout=60).num_copied == 1


def test_a_receiver_with_other_tokens_does_not_become_the_owner(
    sender: BlockSender, ends: SimpleQueue[TransferResult]
) -> None:
    wrong = claiming(sender, "wrong", tokens=b"another")
    assert "another prompt" in error_of(wrong)
    right = claiming(sender, "right")
    assert error_of(right) == ""
    leave(wrong)
    assert ends.empty()
    assert error_of(right) == ""
    right.close()
    assert ends.get(timeout=60).num_copied == 1


def test_blocks_are_free_when_the_last_rank_has_left(sender: BlockSender, ends: SimpleQueue[TransferResult]) -> None:
    """However it leaves: with an answer unread, as a process that was killed, or without having read anything."""
    first, second = (claiming(sender, "receiver", rank=rank, size=2) for rank in range(2))
    first.send_message(Read(items=[0], pieces=[Piece(0, 0, 0)]))
    first.close()
    assert error_of(second) == ""  # whichever of the two the sender has served first
    assert ends.empty()
    second.close()
    assert ends.get(timeout=60).num_copied == 1
