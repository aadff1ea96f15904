"""The store that all ranks can reach: where they meet before they are connected, and where each says why it stopped.

Knows no groups and no tensors. Nothing here is on the path of a step.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store, TCPStore

from moeserve.errors import DistributedError

# Ranks that fail for the same cause do so within moments; those not heard of by then are the cause.
WAIT_FOR_REPORTS_S = 0.5


def start_store(host: str = "127.0.0.1") -> TCPStore:
    """A store's server on a free port of `host`, and of no other address; see its `port`. It ends with the object.

    It serves one launch: each rank connects once.
    """
    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    # The server takes the socket over, so the port is never free for others.
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def own_address(rank: int, host: str, port: int, timeout_s: float) -> str:
    """The address of this machine from which the store can be reached, and so the other ranks."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise DistributedError(
            f"rank {rank} cannot reach the store at {host}:{port} ({error}): has the process that started it ended?"
        ) from error


class Noticeboard:
    """What one rank writes into the store, and reads of the others."""

    def __init__(self, rank: int, store: Store, timeout_s: float) -> None:
        self.rank = rank
        self.store = store
        self.timeout_s = timeout_s
        self._has_reported = False

    def meet(self, ranks: Sequence[int], introduction: str) -> list[str]:
        """Wait until all of these ranks are here: how each introduced itself.

        DistributedError names those that are not in time.
        """
        if self.store.add(f"came/{self.rank}", 1) > 1:
            raise DistributedError(f"rank {self.rank} came twice: every rank connects once to a store")
        self.store.set(f"here/{self.rank}", introduction)
        keys = [f"here/{rank}" for rank in ranks]
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout_s))
            return [said.decode() for said in self.store.multi_get(keys)]
        except RuntimeError as error:
            missing = [rank for rank in ranks if not self._holds(f"here/{rank}")]
            why = f"{listed(missing)} did not come within {self.timeout_s:g} s"
            self.report(why)
            raise DistributedError(
                f"rank {self.rank}: {why}: see what these ranks wrote, or allow more time"
            ) from error

    def report(self, why: str) -> None:
        """Leave word of why this rank stops. Only the first report counts: later ones follow from it."""
        if not self._has_reported:
            self._has_reported = True
            try:
                self.store.set(f"stopped/{self.rank}", why)
            except RuntimeError:  # the process with the store is gone, and nobody is left to read
                return

    def blame(self, ranks: Sequence[int]) -> str:
        """What is known of others when a collective of these ranks has failed: who said why it stopped, who nothing."""
        deadline = time.monotonic() + WAIT_FOR_REPORTS_S
        others = [rank for rank in ranks if rank != self.rank]
        while not all(self._holds(f"stopped/{rank}") for rank in others) and time.monotonic() < deadline:
            time.sleep(0.01)
        heard = [rank for rank in others if self._holds(f"stopped/{rank}")]
        silent = [rank for rank in others if rank not in heard]
        sentences = [f"Rank {rank} stopped: {self.store.get(f'stopped/{rank}').decode()}." for rank in heard]
        if silent:
            sentences.insert(0, f"Nothing was heard of {listed(silent)}: dead, stuck, or doing something else.")
        return " ".join(sentences)

    def _holds(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except RuntimeError:  # the process with the store is gone: nothing is known any more
            return False


def listed(ranks: Sequence[int]) -> str:
    """Ranks as a message names them."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
