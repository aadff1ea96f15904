"""The sender of this rank's KV cache items to other engines, for which this engine has computed a prompt."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from moeserve.errors import SettingsError
from moeserve.kv.rank.items import CachedItems, indices_by_kind
from moeserve.kv.rank.wire import (
    SECONDS_TO_BE_KEPT,
    Answer,
    CacheShare,
    Claim,
    HasRead,
    NixlShare,
    Piece,
    Read,
    bytes_of,
    select_piece,
)
from moeserve.processes.peer_connection import Connection, PeerError
from moeserve.protocol import CachePlace, KeepItems, TransferResult

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256  # maximum number of connections at the same time
MAX_STRANGERS = 64  # maximum number of connections without a proof of the key; others are closed
MAX_REMEMBERED = 4096  # maximum number of remembered handles of items that are no longer kept
SECONDS_BETWEEN_LOOKS = 0.5  # interval between checks for items whose time has expired
SECONDS_TO_AUTHENTICATE = 10.0


@dataclass(eq=False)
class _Kept:
    """Items that another engine may read."""

    message: KeepItems
    on_end: Callable[[TransferResult], None]
    started: float
    receiver: str = ""  # name of the first receiver that has claimed the items
    num_connected: int = 0  # number of connected ranks of the receiver
    ranks_left: set[int] = field(default_factory=set)  # ranks that have claimed the items and disconnected


class BlockSender:
    """A sender that listens for receivers in background threads until it is closed."""

    def __init__(
        self,
        items: CachedItems,
        share: CacheShare,
        address: tuple[str, int],
        key: bytes,
        timeout_s: float,
        nixl: NixlShare | None = None,
    ) -> None:
        """
        Args:
            address: host and port; port 0: any free port.
            key: key that receivers must know.
            timeout_s: time in seconds for which items are kept.
            nixl: description of this rank's memory for receivers with NIXL; None: NIXL is not used.

        Raises:
            SettingsError: the address cannot be used.
        """
        self._items, self._share, self._key, self._timeout_s, self._nixl = items, share, key, timeout_s, nixl
        try:
            self._listener = socket.create_server(address, backlog=MAX_CONNECTIONS)
        except OSError as error:
            host, port = address
            raise SettingsError(f"kv_transfer_address: cannot listen on {host}:{port}: {error}") from None
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._changed = threading.Condition()  # guards all attributes below
        self._kept: dict[str, _Kept] = {}  # by handle
        self._ended: OrderedDict[str, None] = OrderedDict()  # handles, the oldest first
        self._connections: set[Connection] = set()  # connections that have proved that they know the key
        self._is_closed = False
        for run in (self._accept, self._end_old):
            threading.Thread(target=run, name="kv sender", daemon=True).start()

    def keep(self, message: KeepItems, on_end: Callable[[TransferResult], None]) -> None:
        """Let another engine read items until all ranks of that engine have disconnected, or the time has expired.

        Args:
            on_end: called once, in any thread. `num_copied` of the result is 0 if the time has expired.
        """
        with self._changed:
            self._kept[message.handle] = _Kept(message, on_end, time.monotonic())
            self._changed.notify_all()

    def close(self) -> None:
        """Disconnect all receivers, and stop listening. May be called twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for connection in self._connections:
                connection.close()
        self._listener.close()

    def _accept(self) -> None:
        self._listener.settimeout(SECONDS_BETWEEN_LOOKS)
        while not self._is_closed:
            try:
                connected, _ = self._listener.accept()
                if self._strangers.acquire(blocking=False):
                    threading.Thread(target=self._serve, args=(connected,), name="kv sender", daemon=True).start()
                else:
                    connected.close()
            except TimeoutError:
                pass
            except (OSError, RuntimeError):  # no file descriptor or no thread is free, or `close` was called
                time.sleep(SECONDS_BETWEEN_LOOKS)

    def _end_old(self) -> None:
        while not self._is_closed:
            with self._changed:
                for kept in list(self._kept.values()):
                    if kept.num_connected == 0 and time.monotonic() - kept.started > self._timeout_s:
                        self._end(kept, 0)
                self._changed.wait_for(lambda: self._is_closed, SECONDS_BETWEEN_LOOKS)

    def _end(self, kept: _Kept, num_read: int) -> None:
        del self._kept[kept.message.handle]
        self._ended[kept.message.handle] = None
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        seconds = time.monotonic() - kept.started
        kept.on_end(TransferResult(number=kept.message.number, num_copied=num_read, seconds=seconds))

    def _serve(self, connected: socket.socket) -> None:
        torch.set_num_threads(1)  # only for this thread, so that it leaves the cores to steps
        connection = Connection(connected, time.monotonic() + SECONDS_TO_AUTHENTICATE)
        try:
            try:
                connection.prove(self._key, connects=False)
                with self._changed:
                    if len(self._connections) >= MAX_CONNECTIONS:
                        raise PeerError("too many are connected")
                    self._connections.add(connection)
            finally:
                self._strangers.release()
            connection.deadline = time.monotonic() + self._timeout_s
            connection.send_message(self._share)
            self._serve_receiver(connection)
        except (OSError, PeerError) as error:
            logger.debug("a receiver of KV cache blocks has left: %s", error)
        except Exception:
            logger.exception("KV cache blocks could not be sent")
        finally:
            with self._changed:
                self._connections.discard(connection)
            connection.close()

    def _serve_receiver(self, connection: Connection) -> None:
        """Send the items that a receiver claims, until an error occurs, such as the end of the connection."""
        claim: Claim = connection.receive_message(Claim)
        kept, error = self._claimed(claim)
        try:
            while True:
                read: Read = connection.receive_message(Read)
                if kept is not None and not self._is_possible(read, len(kept.message.places)):
                    error = "there are no such items"
                if kept is None or error:
                    connection.send_message(Answer(error=error))
                else:
                    self._send(connection, read, kept)
        finally:
            if kept is not None:
                self._leave(kept, claim)

    def _claimed(self, claim: Claim) -> tuple[_Kept | None, str]:
        """Return the items that a receiver claims, or None and the reason.

        The first receiver that names the tokens of the items gets them. Wait for a limited time if the handle is not
        known yet.
        """

        def is_known() -> bool:
            return self._is_closed or claim.handle in self._kept or claim.handle in self._ended

        with self._changed:
            self._changed.wait_for(is_known, min(self._timeout_s, SECONDS_TO_BE_KEPT))
            kept = self._kept.get(claim.handle)
            if kept is None:
                return None, "the blocks are not kept any more"
            if claim.tokens != kept.message.tokens:
                return None, "the blocks are those of another prompt"
            if kept.receiver not in ("", claim.receiver):
                return None, "another engine reads the blocks"
            kept.receiver = claim.receiver
            kept.num_connected += 1
            return kept, ""

    def _leave(self, kept: _Kept, claim: Claim) -> None:
        """Stop keeping the items if all ranks of the receiver have disconnected."""
        with self._changed:
            kept.num_connected -= 1
            kept.ranks_left.add(claim.rank)
            is_last = kept.num_connected == 0 and len(kept.ranks_left) >= claim.num_ranks
            if is_last and not self._is_closed:
                self._end(kept, len(kept.message.places))

    def _send(self, connection: Connection, read: Read, kept: _Kept) -> None:
        places = [kept.message.places[index] for index in read.items]
        connection.send_message(Answer(places=places, nixl=None if read.pieces else self._nixl))
        if read.pieces:
            with torch.inference_mode():
                self._send_pieces(connection, read.pieces, places)
        else:
            connection.receive_message(HasRead)
            connection.send_message(Answer())  # items are kept while their receiver is connected

    def _is_possible(self, read: Read, num_items: int) -> bool:
        if not all(0 <= index < num_items for index in read.items):
            return False
        for piece in read.pieces:
            if not 0 <= piece.tensor < len(self._share.tensors) or piece.first < 0 or piece.length < 0:
                return False
            length = sum(length for _, length in self._share.tensors[piece.tensor].ranges)
            if piece.first + piece.length > length or (piece.length == 0) != (length == 0):
                return False
        return True

    def _send_pieces(self, connection: Connection, pieces: Sequence[Piece], places: Sequence[CachePlace]) -> None:
        numbers = indices_by_kind(places)
        with self._items.copying():
            for piece in pieces:
                share, tensor = self._share.tensors[piece.tensor], self._items.tensors[piece.tensor].tensor
                indices = torch.tensor(
                    [places[number].index for number in numbers.get(share.kind, [])], dtype=torch.int64
                )
                part = select_piece(tensor, share.axis, piece.first, piece.length)
                copies = part.index_select(0, indices.to(part.device))
                connection.send(bytes_of(copies.contiguous().cpu()))
