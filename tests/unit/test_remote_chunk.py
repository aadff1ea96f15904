"""Chunks of weights over TCP: both sides know the key, and nothing outside the chunk is read."""

from __future__ import annotations

import json
import math
import secrets
import socket
import threading
import time

import pytest
import torch

from moeserve.errors import CheckpointError
from moeserve.models.remote_chunk import ReadBytes, RemoteChunk
from moeserve.processes.peer_connection import Connection, PeerError
from moeserve.rl.transports import offer_over_tcp

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(4, 3),
    "b": torch.arange(7, dtype=torch.bfloat16),
    "c": torch.tensor(3.0),
    "none": torch.empty(0, 5),
}


def test_rows_are_those_of_the_tensors() -> None:
    with offer_over_tcp(TENSORS, "127.0.0.1") as info:
        chunks = [RemoteChunk(info["address"], bytes.fromhex(info["key"])) for _ in range(3)]
        for chunk in chunks:
            stored = chunk.tensors
            assert {name: tensor.shape for name, tensor in stored.items()} == {
                name: tuple(tensor.shape) for name, tensor in TENSORS.items()
            }
            assert torch.equal(chunk.read_rows(stored["a"], 1, 3), TENSORS["a"][1:3])
            assert torch.equal(chunk.read_rows(stored["b"], 0, 7), TENSORS["b"])
            assert torch.equal(chunk.read_rows(stored["c"], 0, 1), TENSORS["c"])
            assert torch.equal(chunk.read_rows(stored["none"], 0, 0), TENSORS["none"])
            chunk.close()
    with pytest.raises(CheckpointError, match="cannot be reached"):
        RemoteChunk(info["address"], bytes.fromhex(info["key"]))


def test_neither_side_serves_one_with_another_key() -> None:
    with offer_over_tcp(TENSORS, "127.0.0.1") as info:
        with pytest.raises(CheckpointError, match="closed the connection"):
            RemoteChunk(info["address"], secrets.token_bytes(32))
        host, port = info["address"].split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(bytes(64))
            received = b""
            while piece := stranger.recv(1000):
                received += piece
        assert len(received) == 32, "it gets a random number, and neither a proof nor tensors"


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (5, 4), (0, 10**9)])
def test_bytes_outside_of_the_chunk_are_refused(start: int, stop: int) -> None:
    with offer_over_tcp(TENSORS, "127.0.0.1") as info:
        host, port = info["address"].split(":")
        connection = Connection(socket.create_connection((host, int(port))), time.monotonic() + 60)
        connection.prove(bytes.fromhex(info["key"]), connects=True)
        connection.receive(int.from_bytes(connection.receive(8), "little"))
        connection.send_message(ReadBytes(start, stop))
        with pytest.raises(PeerError):
            connection.receive(1)
        connection.close()


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{", "truncated"),
        (b"[]", "object"),
        (json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode(), "shape"),
        (json.dumps({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}).encode(), "shape"),
        (json.dumps({"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}).encode(), "F64"),
        (json.dumps({"a": {"dtype": "F32", "shape": [1]}}).encode(), "data_offsets"),
        (None, "header of"),
    ],
)
def test_wrong_headers_are_refused(header: bytes | None, words: str) -> None:
    key = secrets.token_bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection = Connection(listener.accept()[0], math.inf)
            connection.prove(key, connects=False)
            length = 2**40 if header is None else len(header)
            connection.send(length.to_bytes(8, "little") + (header or b""))
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(CheckpointError, match=words):
            RemoteChunk("{}:{}".format(*listener.getsockname()), key)
