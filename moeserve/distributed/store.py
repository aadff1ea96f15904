"""The key-value store where ranks meet, and where each rank reports why it failed. Not used on the path of a step."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store, TCPStore

from moeserve.errors import DistributedError

# Ranks that fail of the same cause report within moments of each other. Those silent after this time are the cause.
WAIT_FOR_REPORTS_S = 0.5


def start_store(host: str = "127.0.0.1") -> TCPStore:
    """Start a store server on a free port (see its `port`) of `host` alone. It stops when the object is deleted.

    A store serves one launch: each rank connects once.
    """
    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    # The server takes over the listening socket, so no other process can take the port in between.
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def own_address(rank: int, host: str, port: int, timeout_s: float) -> str:
    """Return the address of this machine on the network of the store, where other ranks can reach it."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise DistributedError(
            f"rank {rank} cannot reach the store at {host}:{port} ({error}): has the process that started it ended?"
        ) from error


class RankStore:
    """One rank's access to the store: it registers the rank, and exchanges failure reports with the others."""

    def __init__(self, rank: int, store: Store, timeout_s: float) -> None:
        self.rank = rank
        self.store = store
        self.timeout_s = timeout_s
        self._has_reported = False

    def register(self, ranks: Sequence[int], description: str) -> list[str]:
        """Publish this rank's description, and return those of `ranks` once all have registered.

        Raises:
            DistributedError: this rank registered before, or a rank did not register in time; names the missing ranks.
        """
        if self.store.add(f"num_registrations/{self.rank}", 1) > 1:
            raise DistributedError(f"rank {self.rank} registered twice: every rank connects once to a store")
        self.store.set(f"rank/{self.rank}", description)
        return self._read("rank", ranks, self.timeout_s, f"did not connect within {self.timeout_s:g} s")

    def wait_until_loaded(self, ranks: Sequence[int], timeout_s: float, since_s: float) -> None:
        """Wait until all of `ranks` have called this, for longer than a collective may take.

        Args:
            since_s: the time, by `time.monotonic`, at which the wait began to count.

        Raises:
            DistributedError: a rank did not call it in time; names the missing ranks.
        """
        self.store.set(f"loaded/{self.rank}", "")
        left_s = max(0.0, since_s + timeout_s - time.monotonic())
        self._read("loaded", ranks, left_s, f"did not load the model within {timeout_s:g} s (load_timeout)")

    def _read(self, name: str, ranks: Sequence[int], timeout_s: float, failure: str) -> list[str]:
        """Return what each of `ranks` has stored under a name, after waiting for it."""
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
        """Publish why this rank stops. Only the first report counts: later failures follow from it."""
        if not self._has_reported:
            self._has_reported = True
            try:
                self.store.set(f"failure/{self.rank}", cause)
            except RuntimeError:  # the process with the store has ended, and with it all readers
                return

    def failure_reports(self, ranks: Sequence[int]) -> str:
        """Return the failure reports of `ranks` as sentences, silent ranks first. Waits a moment for late reports."""
        deadline = time.monotonic() + WAIT_FOR_REPORTS_S
        others = [rank for rank in ranks if rank != self.rank]
        while not all(self._has_key(f"failure/{rank}") for rank in others) and time.monotonic() < deadline:
            time.sleep(0.01)
        silent = [rank for rank in others if not self._has_key(f"failure/{rank}")]
        sentences = []
        if silent:
            sentences.append(f"No failure report from {format_ranks(silent)}: dead, stuck, or busy elsewhere.")
        for rank in others:
            if rank not in silent:
                sentences.append(f"Rank {rank} reported: {self.store.get(f'failure/{rank}').decode()}.")
        return " ".join(sentences)

    def _has_key(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except RuntimeError:  # the process with the store has ended
            return False


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message: "rank 3", "ranks 0, 1"."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
