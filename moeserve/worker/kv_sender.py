"""Gives KV cache blocks of this rank to ranks of other engines, which have asked this engine to compute a prompt."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moeserve.errors import SettingsError
from moeserve.protocol import KeepBlocks, TransferOutcome
from moeserve.worker.kv_wire import (
    Answer,
    CacheShare,
    Connection,
    Done,
    FromReader,
    HasRead,
    PeerError,
    Piece,
    Read,
    bytes_of,
    select_heads,
)

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256  # at once; further ones wait
MAX_REMEMBERED = 4096  # handles of blocks that are not kept any more
SECONDS_BETWEEN_LOOKS = 0.5  # for blocks that were kept for too long
SECONDS_TO_AUTHENTICATE = 10.0


@dataclass(eq=False)
class _Kept:
    """Blocks that other engines may read."""

    message: KeepBlocks
    on_end: Callable[[TransferOutcome], None]
    started: float
    num_reading: int = 0  # connections that read them now
    done: set[int] = field(default_factory=set)  # readers that need no more


class BlockSender:
    """Listens for readers in threads of its own until it is closed."""

    def __init__(
        self, caches: Sequence[Any], share: CacheShare, address: tuple[str, int], key: bytes, timeout_s: float
    ) -> None:
        """
        Args:
            caches: of the layers; each has `tensors` whose first dimension is the block.
            address: host and port; port 0: any that is free.
            key: that readers must know.
            timeout_s: for which blocks are kept.

        Raises:
            SettingsError: the address cannot be used.
        """
        self._caches, self._share, self._key, self._timeout_s = caches, share, key, timeout_s
        try:
            self._listener = socket.create_server(address, backlog=MAX_CONNECTIONS)
        except OSError as error:
            host, port = address
            raise SettingsError(f"kv_transfer_address: cannot listen on {host}:{port}: {error}") from None
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._stream = torch.cuda.Stream() if caches[0].tensors[0].is_cuda else None
        self._changed = threading.Condition()  # guards all below
        self._kept: dict[str, _Kept] = {}  # by handle
        self._ended: OrderedDict[str, None] = OrderedDict()  # handles, the oldest first
        self._connections: set[Connection] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, name="kv sender", daemon=True).start()

    def keep(self, message: KeepBlocks, on_end: Callable[[TransferOutcome], None]) -> None:
        """Let other engines read blocks until all of their ranks are done or the time is up.

        Args:
            on_end: called once, in any thread. No block was "copied" if the time was up.
        """
        with self._changed:
            self._kept[message.handle] = _Kept(message, on_end, time.monotonic())
            self._changed.notify_all()

    def close(self) -> None:
        """Disconnect all readers, and listen no more. May be called twice."""
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
            except TimeoutError:
                pass
            except OSError:  # no file descriptor is free, or `close` was called
                time.sleep(SECONDS_BETWEEN_LOOKS)
            else:
                connection = Connection(connected, time.monotonic() + SECONDS_TO_AUTHENTICATE)
                with self._changed:
                    self._changed.wait_for(lambda: len(self._connections) < MAX_CONNECTIONS, SECONDS_TO_AUTHENTICATE)
                    self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), name="kv reader", daemon=True).start()
            self._end_old()

    def _end_old(self) -> None:
        with self._changed:
            for kept in list(self._kept.values()):
                if kept.num_reading == 0 and time.monotonic() - kept.started > self._timeout_s:
                    self._end(kept, 0)

    def _end(self, kept: _Kept, num_read: int) -> None:
        del self._kept[kept.message.handle]
        self._ended[kept.message.handle] = None
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        seconds = time.monotonic() - kept.started
        kept.on_end(TransferOutcome(number=kept.message.number, num_copied=num_read, seconds=seconds))

    def _serve(self, connection: Connection) -> None:
        torch.set_num_threads(1)  # of this thread: the others compute
        try:
            connection.prove(self._key, connects=False)
            connection.deadline = time.monotonic() + self._timeout_s
            connection.send_message(self._share)
            while True:
                message: FromReader = connection.receive_message(FromReader)
                match message:
                    case Read():
                        self._send(connection, message)
                    case HasRead():
                        raise PeerError("it has read nothing")
                    case Done():
                        self._note_done(message)
        except (OSError, PeerError) as error:
            logger.debug("a reader of KV cache blocks has left: %s", error)
        finally:
            with self._changed:
                self._connections.discard(connection)
                self._changed.notify_all()
            connection.close()

    def _note_done(self, message: Done) -> None:
        with self._changed:
            kept = self._kept.get(message.handle)
            if kept is not None:
                kept.done.add(message.reader)
                if len(kept.done) >= message.num_readers:
                    self._end(kept, len(kept.message.block_ids))

    def _send(self, connection: Connection, read: Read) -> None:
        error, kept = self._begin_reading(read)
        if kept is None:
            connection.send_message(Answer(error))
            return
        block_ids = kept.message.block_ids[read.first : read.first + read.num_blocks]
        try:
            connection.send_message(Answer(block_ids=block_ids))
            if read.pieces:
                with torch.inference_mode():
                    self._send_blocks(connection, read.pieces, torch.tensor(block_ids))
            else:
                connection.receive_message(HasRead)
                connection.send_message(Answer())
        finally:
            with self._changed:
                kept.num_reading -= 1

    def _begin_reading(self, read: Read) -> tuple[str, _Kept | None]:
        """Return the blocks that a reader wants, or why it cannot have them. They may be kept in a moment."""

        def is_known() -> bool:
            return self._is_closed or read.handle in self._kept or read.handle in self._ended

        with self._changed:
            self._changed.wait_for(is_known, self._timeout_s)
            kept = self._kept.get(read.handle)
            if kept is None:
                return "the blocks are not kept any more", None
            if not self._is_possible(read, len(kept.message.block_ids)):
                return "there are no such blocks", None
            kept.num_reading += 1
            return "", kept

    def _is_possible(self, read: Read, num_blocks: int) -> bool:
        if not 0 <= read.first <= read.first + read.num_blocks <= num_blocks:
            return False
        for piece in read.pieces:
            if not 0 <= piece.layer < len(self._share.layers) or piece.first_head < 0 or piece.num_heads < 0:
                return False
            num_heads = self._share.layers[piece.layer].num_heads
            if piece.first_head + piece.num_heads > num_heads or (piece.num_heads == 0) != (num_heads == 0):
                return False
        return True

    def _send_blocks(self, connection: Connection, pieces: Sequence[Piece], block_ids: Tensor) -> None:
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for piece in pieces:
                for tensor in self._caches[piece.layer].tensors:
                    heads = select_heads(tensor, piece.first_head, piece.num_heads)
                    blocks = heads.index_select(0, block_ids.to(heads.device))
                    connection.send(bytes_of(blocks.contiguous().cpu()))
