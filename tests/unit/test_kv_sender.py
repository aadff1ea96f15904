"""Blocks that are kept for another engine go to the first receiver that names itself."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from moeserve.protocol import KeepBlocks, TransferOutcome
from moeserve.worker.kv_sender import BlockSender
from moeserve.worker.kv_wire import Answer, CacheShare, Connection, Done, LayerShare, Piece, Read

NUM_BLOCKS, BLOCK_VALUES = 4, 6


@pytest.fixture
def sender() -> Iterator[BlockSender]:
    cache = SimpleNamespace(tensors=(torch.arange(NUM_BLOCKS * BLOCK_VALUES).view(NUM_BLOCKS, BLOCK_VALUES),))
    share = CacheShare(facts={}, layers=[LayerShare(0, 0, 0)])
    sender = BlockSender([cache], share, ("127.0.0.1", 0), b"", timeout_s=60)
    yield sender
    sender.close()


def connected(sender: BlockSender) -> Connection:
    host, _, port = sender.address.partition(":")
    connection = Connection(socket.create_connection((host, int(port))), time.monotonic() + 60)
    connection.prove(b"", connects=True)
    connection.receive_message(CacheShare)
    return connection


def error_of(connection: Connection, receiver: str) -> str:
    """Read block 3, and return the error instead if there is one."""
    connection.send_message(
        Read(handle="kept", receiver=receiver, tokens=b"digest", first=0, num_blocks=1, pieces=[Piece(0, 0, 0)])
    )
    answer: Answer = connection.receive_message(Answer)
    if not answer.error:
        values = torch.frombuffer(connection.receive(8 * BLOCK_VALUES), dtype=torch.int64)
        assert values.tolist() == list(range(3 * BLOCK_VALUES, 4 * BLOCK_VALUES))
    return answer.error


def test_a_second_receiver_gets_nothing_and_ends_nothing(sender: BlockSender) -> None:
    ends: SimpleQueue[TransferOutcome] = SimpleQueue()
    sender.keep(KeepBlocks(number=7, handle="kept", tokens=b"digest", block_ids=[3]), ends.put)
    first, second = connected(sender), connected(sender)
    assert error_of(first, "first") == ""
    assert "another engine reads them" in error_of(second, "second")
    second.send_message(Done(handle="kept", receiver="second", rank=0, num_ranks=1))
    assert "another engine reads them" in error_of(second, "second")  # so its `Done` was seen before
    assert ends.empty()
    assert error_of(first, "first") == ""
    first.send_message(Done(handle="kept", receiver="first", rank=0, num_ranks=1))
    assert ends.get(timeout=60).num_copied == 1
    first.close()
    second.close()
