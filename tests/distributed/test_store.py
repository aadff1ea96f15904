"""The store where ranks meet: what it answers, and that peers without its secret learn and change nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rank_processes import living_ranks
from reference_models import Reference
from torch.distributed import DistNetworkError, DistStoreError, HashStore, PrefixStore

from moeserve import LLM, SamplingParams
from moeserve.addresses import StoreAddress
from moeserve.distributed import gloo
from moeserve.distributed.store import GatheringStore, RendezvousStore, StoreConnection, connect_store
from moeserve.distributed.store_server import (
    SECONDS_TO_AUTHENTICATE,
    Check,
    Operation,
    Request,
    Set,
    StoreServer,
    start_store,
)
from moeserve.errors import DistributedError
from moeserve.processes.channel import frame
from moeserve.processes.proof import NONCE_BYTES, proof


@pytest.fixture(params=["unix", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    server = start_store("127.0.0.1" if request.param == "tcp" else None)
    yield server
    server.close()


def raw_connection(address: StoreAddress) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX if address.name else socket.AF_INET)
    peer.settimeout(20)
    peer.connect(b"\0" + address.name[1:].encode() if address.name else (address.host, address.port))
    return peer


def read_to_end(peer: socket.socket) -> bytes:
    """Return what a peer receives until it is disconnected, which resets the connection if it has sent too much."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while more := peer.recv(2**16):
            received += more
    return received


def listening_names(processes: list[psutil.Process]) -> set[str]:
    """Return the names in the abstract namespace on which processes listen, after "@"."""
    links = [link for process in processes for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    inodes = {os.readlink(link)[8:-1] for link in links if link.is_symlink()}
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    accepting = [fields for fields in sockets if int(fields[3], 16) & 0x10000 and fields[6] in inodes]
    return {fields[-1] for fields in accepting}


def test_ranks_exchange_values(server: StoreServer) -> None:
    first, second = (connect_store(rank, server.address, 20.0) for rank in range(2))
    assert not second.check(["a"])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(second.multi_get, ["a", "b/c"])
        first.within("b").set("c", b"2")
        first.set("a", "1")
        assert waiting.result() == [b"1", b"2"]
    assert [first.add("n", 2), second.add("n", 3), second.within("b").add("n", 1)] == [2, 5, 1]
    assert first.collect("b", 2) == {"b/c": b"2", "b/n": b"1"}
    with pytest.raises(DistStoreError, match=r"timed out waiting for .*missing"):
        first.wait(["missing"], timedelta(seconds=0.01))
    second.set("missing", "too late")  # the reply to the request that was given up
    assert first.get("a") == b"1"
    server.close()
    with pytest.raises(DistNetworkError):
        first.get("a")


def test_libraries_find_the_operations_of_a_store_of_torch(server: StoreServer) -> None:
    """They call the methods through the base class, here under a prefix, and get the results of torch's own store."""
    own = connect_store(0, server.address, 20.0)
    found = []
    for store in (PrefixStore("a", own), PrefixStore("a", HashStore())):
        store.set("k", "v")
        store.multi_set(["m", "n"], ["1", "2"])
        found.append(
            [
                *(store.get("k"), store.multi_get(["m", "n"]), store.check(["k", "m"]), store.check(["k", "z"])),
                *(
                    store.add("c", 2),
                    store.add("c", 3),
                    store.delete_key("k"),
                    store.delete_key("k"),
                    store.check(["k"]),
                ),
                *(store.compare_set("m", "1", "one"), store.compare_set("m", "1", "two"), store.get("m")),
                *(store.compare_set("new", "", "first"), store.compare_set("none", "x", "y"), store.check(["none"])),
            ]
        )
    assert found[0] == found[1]
    assert own.clone().get("a/m") == b"one"


@pytest.mark.parametrize("sent", ["nothing", "noise", "request", "other secret"])
def test_a_peer_without_the_secret_learns_and_changes_nothing(server: StoreServer, sent: str) -> None:
    """It gets a random challenge, which two peers have not in common, and is disconnected."""
    rank = connect_store(0, server.address, 20.0)
    rank.set("secret", "of the launch")
    if sent == "other secret":
        address = StoreAddress(
            name=server.address.name, host=server.address.host, port=server.address.port, key="ab" * NONCE_BYTES
        )
        with pytest.raises(DistributedError, match=r"rank 1 cannot reach .*another launch"):
            connect_store(1, address, 20.0)
    else:
        peers = [raw_connection(server.address) for _ in range(2)]
        requests = frame(Request(1, Set("secret", b"changed"))) + frame(Request(2, Check(["secret"])))
        challenges = [peer.recv(NONCE_BYTES, socket.MSG_WAITALL) for peer in peers]
        assert challenges[0] != challenges[1]
        for peer in peers:
            match sent:
                case "nothing":
                    peer.shutdown(socket.SHUT_WR)
                case "noise":
                    peer.sendall(os.urandom(2 * NONCE_BYTES))
                case "request":
                    peer.sendall(requests)
        assert [read_to_end(peer) for peer in peers] == [b"", b""]
    assert rank.get("secret") == b"of the launch"


def test_a_proof_cannot_be_used_again(server: StoreServer) -> None:
    """A recorded answer does not fit the challenge of another connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # relays and records
        host, port = listener.getsockname()
        rank = threading.Thread(
            target=connect_store, args=(0, StoreAddress(host=host, port=port, key=server.address.key), 20.0)
        )
        rank.start()
        theirs, _ = listener.accept()
        ours = raw_connection(server.address)
        theirs.sendall(ours.recv(NONCE_BYTES, socket.MSG_WAITALL))
        answer = theirs.recv(2 * NONCE_BYTES, socket.MSG_WAITALL)
        ours.sendall(answer)
        theirs.sendall(ours.recv(NONCE_BYTES, socket.MSG_WAITALL))
        rank.join()
        again = raw_connection(server.address)
        again.sendall(answer)
        assert len(read_to_end(again)) == NONCE_BYTES


def test_a_rank_does_not_trust_a_server_without_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        host, port = listener.getsockname()
        joining = threads.submit(connect_store, 0, StoreAddress(host=host, port=port, key="ab" * NONCE_BYTES), 20.0)
        peer, _ = listener.accept()
        peer.sendall(bytes(NONCE_BYTES))
        peer.recv(2 * NONCE_BYTES, socket.MSG_WAITALL)
        peer.sendall(bytes(NONCE_BYTES))
        with pytest.raises(DistributedError, match="does not know the secret"):
            joining.result()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_disconnected_at_once() -> None:
    server = start_store()
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.setuid(65534)
        os.write(writer, b"%d" % len(read_to_end(raw_connection(server.address))))
        os._exit(0)
    assert os.read(reader, 8) == b"0"
    os.waitpid(pid, 0)
    server.close()


def test_a_fork_that_closes_the_store_leaves_its_owners_alone() -> None:
    server = start_store()
    if not (pid := os.fork()):
        server.close()
        os._exit(0)
    os.waitpid(pid, 0)
    rank = connect_store(0, server.address, 20.0)
    rank.set("a", "1")
    assert rank.get("a") == b"1"
    server.close()


def test_a_peer_that_does_not_read_its_proof_is_disconnected() -> None:
    """Its connection would stay ready, and the server would look at nothing else."""
    server = start_store()
    peer, nonce = raw_connection(server.address), bytes(NONCE_BYTES)
    challenge = peer.recv(NONCE_BYTES, socket.MSG_WAITALL)
    peer.shutdown(socket.SHUT_RD)
    peer.sendall(nonce + proof(bytes.fromhex(server.address.key), b"rank", challenge, nonce))
    poll = select.poll()
    poll.register(peer, 0)
    assert poll.poll(0.5 * SECONDS_TO_AUTHENTICATE * 1000)
    server.close()


def test_a_server_without_file_descriptors_pauses_and_accepts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_store()
    accept = socket.socket.accept
    calls_s: list[float] = []

    def refuse_once(listener: socket.socket) -> Any:
        calls_s.append(time.monotonic())
        if len(calls_s) == 1:
            raise OSError(errno.EMFILE, "planted")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", refuse_once)
    rank = connect_store(0, server.address, 20.0)
    rank.set("a", "1")
    assert rank.get("a") == b"1"
    assert calls_s[1] - calls_s[0] > 0.9
    server.close()


class CountingConnection(StoreConnection):
    num_requests = 0

    def request(self, operation: Operation, timeout_s: float | None = None) -> Any:
        self.num_requests += 1
        return super().request(operation, timeout_s)


def test_ranks_connect_by_gloo_with_a_fixed_number_of_requests() -> None:
    server = start_store()

    def requests_of(rank: int, num_ranks: int) -> int:
        connection = CountingConnection(server.address, 20.0)
        store = GatheringStore(RendezvousStore(connection, f"{num_ranks}/"), num_ranks)
        group = gloo.make_process_group(store, rank, num_ranks, address="127.0.0.1", timeout_s=20.0)
        x = torch.tensor([rank])
        group.allreduce([x]).wait()
        assert int(x) == num_ranks * (num_ranks - 1) // 2
        return connection.num_requests

    for num_ranks in (2, 12):
        with ThreadPoolExecutor(num_ranks) as threads:
            assert set(threads.map(requests_of, range(num_ranks), [num_ranks] * num_ranks)) == {2}
    server.close()


def test_a_running_engine_listens_nowhere_but_at_its_store(plain: Reference) -> None:
    """Peers connect to every socket on which its processes listen, and the engine goes on."""
    own = psutil.Process()
    before = listening_names([own])
    options: dict[str, Any] = dict(kv_cache_memory="8MiB", max_model_len=128, dtype="float32")
    with LLM(plain.folder, tensor_parallel_size=2, data_parallel_size=2, **options) as llm:
        processes = living_ranks()
        assert not [each for process in processes for each in process.net_connections("inet")]
        names = listening_names([own, *processes]) - before
        assert len(names) == 1
        for name in names:
            peer = raw_connection(StoreAddress(name=name, key=""))
            assert len(peer.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
            peer.sendall(os.urandom(4096))
            assert read_to_end(peer) == b""
        (prompt,) = plain.prompts(9)
        output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
        assert output.token_ids == plain.greedy(prompt, 12)
