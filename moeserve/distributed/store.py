"""The key-value store where ranks meet, and where a failing rank reports the cause. Steps do not use the store."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store

from moeserve.addresses import StoreAddress
from moeserve.distributed.store_server import (
    Add,
    Check,
    Collect,
    CompareSet,
    Delete,
    Get,
    Operation,
    Reply,
    Request,
    Set,
)
from moeserve.errors import DistributedError, shown
from moeserve.processes import local_sockets
from moeserve.processes.channel import Channel
from moeserve.processes.proof import NONCE_BYTES, proof

# Seconds. Ranks that fail from the same cause report within moments of each other. Ranks that are silent after this
# time are probably the cause.
WAIT_FOR_REPORTS_S = 0.5


class StoreConnection:
    """An authenticated connection to the server of a store. Any thread may use it."""

    def __init__(self, address: StoreAddress, timeout_s: float) -> None:
        """
        Args:
            timeout_s: limits the connecting, and each request without a timeout of its own.

        Raises:
            OSError: the server cannot be reached, or does not know the secret.
        """
        self.timeout_s = timeout_s
        self.kept: list[Store] = []  # torch objects refer to a store without keeping it alive
        if address.name:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(timeout_s)
            local_sockets.connect(connection, address.name)
            if not local_sockets.is_same_user(connection):
                raise ConnectionRefusedError("the store runs as another user")
            self.own_address = "127.0.0.1"
        else:
            connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
            self.own_address = str(connection.getsockname()[0])
        _authenticate(connection, address.key)
        self._channel: Channel[Reply] = Channel(connection, Reply)
        self._lock = threading.Lock()
        self._num_requests = 0

    def close(self) -> None:
        with self._lock:
            self._channel.close()

    def request(self, operation: Operation, timeout_s: float | None = None) -> Any:
        """Send a request, and return the reply.

        Raises:
            DistStoreError: there is no reply in time, because another rank did not set a key.
            DistNetworkError: the server has exited.
        """
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        with self._lock:
            self._num_requests += 1
            self._channel.send(Request(self._num_requests, operation))
            while True:
                for reply in self._channel.receive(max(0.0, deadline - time.monotonic())):
                    if reply.number == self._num_requests:  # else the reply to a request that timed out
                        return reply.value
                if self._channel.is_closed:
                    raise DistNetworkError("the store has ended")
                if time.monotonic() >= deadline:
                    raise DistStoreError(f"the store: timed out waiting for {shown(operation)}")


class RendezvousStore(Store):
    """A store of torch.distributed over a `StoreConnection`. All keys of a store begin with the same prefix.

    The methods have torch's names, because torch's libraries call them.
    """

    def __init__(self, connection: StoreConnection, prefix: str = "") -> None:
        super().__init__()
        self._connection = connection
        self._prefix = prefix
        connection.kept.append(self)

    @property
    def own_address(self) -> str:
        """The address of this machine in the network of the store, at which other ranks can reach it."""
        return self._connection.own_address

    def close(self) -> None:
        """Close the connection to the server, which all parts of the store share."""
        self._connection.close()

    def within(self, name: str) -> RendezvousStore:
        """Return the part of this store whose keys begin with `name`."""
        return RendezvousStore(self._connection, f"{self._prefix}{name}/")

    def collect(self, folder: str, num_entries: int) -> dict[str, bytes]:
        """Return all entries whose keys are `folder`, "/" and a name, once there are `num_entries` entries.

        The call makes one request, however many entries there are.
        """
        entries = self._connection.request(Collect(self._prefix + folder, num_entries))
        return {f"{folder}/{name}": value for name, value in entries.items()}

    def set(self, key: str, value: str | bytes) -> None:
        self._connection.request(Set(self._prefix + key, _as_bytes(value)))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values: list[bytes] = self._connection.request(Get(self._keys(keys)))
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        total: int = self._connection.request(Add(self._prefix + key, amount))
        return total

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        values = _as_bytes(expected_value), _as_bytes(desired_value)
        value: bytes = self._connection.request(CompareSet(self._prefix + key, *values))
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._connection.request(Delete(self._prefix + key)))

    deleteKey = delete_key  # the name that torch's C++ code looks up

    def clone(self) -> RendezvousStore:
        return RendezvousStore(self._connection, self._prefix)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._connection.request(Check(self._keys(keys))))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._connection.request(Get(self._keys(keys)), None if timeout is None else timeout.total_seconds())

    def has_extended_api(self) -> bool:
        return False

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class GatheringStore(Store):
    """A store in which each rank sets one key and reads the keys of all ranks, which are fetched in one request.

    gloo sets and reads keys in this way to connect ranks. Without this class, n ranks would make n * n requests.
    """

    def __init__(self, store: RendezvousStore, num_ranks: int) -> None:
        super().__init__()
        self._store = store
        self._num_ranks = num_ranks
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            folder, separator, _ = key.rpartition("/")
            if key not in self._values and separator:
                self._values |= self._store.collect(folder, self._num_ranks)
            if key not in self._values:  # not one of the keys that ranks set
                self._values[key] = self._store.get(key)


def connect_store(rank: int, address: StoreAddress, timeout_s: float, scope: str = "") -> RendezvousStore:
    """Return the store at an address.

    Args:
        scope: launches that share a store use different scopes.

    Raises:
        DistributedError: the store cannot be reached.
    """
    try:
        store = RendezvousStore(StoreConnection(address, timeout_s))
    except OSError as error:
        raise DistributedError(
            f"rank {rank} cannot reach the store at {address} ({error}): has the process that started it ended?"
        ) from error
    return store.within(scope) if scope else store


def _authenticate(connection: socket.socket, key: str) -> None:
    """Prove that this side knows the secret, and check that the other side does."""
    challenge = _receive(connection, NONCE_BYTES)
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(nonce + proof(bytes.fromhex(key), b"rank", challenge, nonce))
    answer = _receive(connection, NONCE_BYTES)
    if not hmac.compare_digest(answer, proof(bytes.fromhex(key), b"store", nonce, challenge)):
        raise ConnectionRefusedError("it does not know the secret of this launch")


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        if not (more := connection.recv(num_bytes - len(received))):
            raise ConnectionRefusedError("it closed the connection: this rank has the secret of another launch")
        received += more
    return received


class RankStore:
    """One rank's access to the store: it registers the rank, and exchanges failure reports with the other ranks."""

    def __init__(
        self, rank: int, store: RendezvousStore, timeout_s: float, seconds_for_reports: float = WAIT_FOR_REPORTS_S
    ) -> None:
        self.rank = rank
        self.store = store
        self.timeout_s = timeout_s
        self._seconds_for_reports = seconds_for_reports
        self._has_reported = False

    def register(self, ranks: Sequence[int], description: str) -> list[str]:
        """Publish this rank's description, and return the descriptions of `ranks` once all of them have registered.

        Raises:
            DistributedError: this rank registered before, or a rank did not register in time; the message names the
                missing ranks.
        """
        if self.store.add(f"num_registrations/{self.rank}", 1) > 1:
            raise DistributedError(f"rank {self.rank} registered twice: every rank connects once to a store")
        self.store.set(f"rank/{self.rank}", description)
        return self._read("rank", ranks, self.timeout_s, f"did not connect within {self.timeout_s:g} s")

    def wait_until_loaded(self, ranks: Sequence[int], timeout_s: float, since_s: float) -> None:
        """Wait until all of `ranks` have called this. The wait may exceed the timeout of a collective.

        Args:
            since_s: the `time.monotonic` time from which `timeout_s` counts.

        Raises:
            DistributedError: a rank did not call this in time; the message names the missing ranks.
        """
        self.store.set(f"loaded/{self.rank}", "")
        left_s = max(0.0, since_s + timeout_s - time.monotonic())
        self._read("loaded", ranks, left_s, f"did not load the model within {timeout_s:g} s (load_timeout)")

    def _read(self, name: str, ranks: Sequence[int], timeout_s: float, failure: str) -> list[str]:
        """Wait until each of `ranks` has stored a value under `name`, and return the values."""
        keys = [f"{name}/{rank}" for rank in ranks]
        try:
            self.store.wait(keys, timedelta(seconds=timeout_s))
            return [value.decode() for value in self.store.multi_get(keys)]
        except RuntimeError as error:
            missing = [rank for rank in ranks if not self._has_key(f"{name}/{rank}")]
            cause = f"{format_ranks(missing)} {failure}"
            self.report_failure(cause)
            raise DistributedError(
                f"rank {self.rank}: {cause}: see the output of these ranks, or allow more time"
            ) from error

    def report_failure(self, cause: str) -> None:
        """Publish the reason why this rank stops. Only the first report counts: later failures follow from it."""
        if not self._has_reported:
            self._has_reported = True
            try:
                self.store.set(f"failure/{self.rank}", cause)
            except RuntimeError:  # the process of the store has exited, and with it all readers
                return

    def failure_reports(self, ranks: Sequence[int]) -> str:
        """Return the failure reports of `ranks` as sentences, silent ranks first. Waits briefly for late reports."""
        deadline = time.monotonic() + self._seconds_for_reports
        others = [rank for rank in ranks if rank != self.rank]
        while not all(self._has_key(f"failure/{rank}") for rank in others) and time.monotonic() < deadline:
            time.sleep(0.01)
        silent = [rank for rank in others if not self._has_key(f"failure/{rank}")]
        sentences = []
        if silent:
            sentences.append(f"No failure report from {format_ranks(silent)}: dead, stuck, or busy elsewhere.")
        for rank in others:
            if rank not in silent:
                with contextlib.suppress(RuntimeError):  # the store has been closed
                    sentences.append(f"Rank {rank} reported: {self.store.get(f'failure/{rank}').decode()}.")
        return " ".join(sentences)

    def close(self) -> None:
        """Close the connection to the store. May be called twice."""
        self.store.close()

    def _has_key(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except RuntimeError:  # the process of the store has exited
            return False


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message, such as "rank 3" or "ranks 0, 1"."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
