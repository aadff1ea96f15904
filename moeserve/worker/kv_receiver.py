"""Reads KV cache blocks from the ranks of another engine, whose tp and pp sizes may differ from this one's."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moeserve.addresses import is_loopback
from moeserve.protocol import ReceiveBlocks, TransferOutcome
from moeserve.worker.kv_copies import CopyStream
from moeserve.worker.kv_nixl import NixlMemory, ranges
from moeserve.worker.kv_wire import (
    Answer,
    CacheShare,
    Claim,
    Connection,
    HasRead,
    PeerError,
    Piece,
    Read,
    bytes_of,
    select_heads,
)

logger = logging.getLogger(__name__)

SECONDS_TO_CONNECT = 5.0  # three tries: lost packets are sent again after 1 and 3 s
SECONDS_TO_AVOID = 10.0  # a sender that did not answer


@dataclass(frozen=True)
class _Part:
    """A piece of a sender's cache, and where it belongs in this rank's."""

    piece: Piece
    layer: int  # index in this rank's `CacheShare.layers`
    first_head: int


class Cancellation:
    """Lets another thread end a transfer early."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._connections: Sequence[Connection] = ()

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """End the transfer: close its connections, for which its thread may wait."""
        with self._lock:
            self._is_set = True
            for connection in self._connections:
                connection.close()

    def watch(self, connections: Sequence[Connection]) -> None:
        """Close these connections when the transfer is cancelled. Raises PeerError if it is already."""
        with self._lock:
            if self._is_set:
                raise PeerError("the request has ended")
            self._connections = connections


class BlockReceiver:
    """Fills blocks of this rank's KV cache. Several threads may use it at once."""

    def __init__(
        self,
        caches: Sequence[Any],
        share: CacheShare,
        key: bytes,
        timeout_s: float,
        *,
        rank: int,
        num_ranks: int,
        nixl: NixlMemory | None = None,
    ) -> None:
        """
        Args:
            caches: of the layers; each has `tensors` whose first dimension is the block.
            share: the layers and heads in these caches.
            key: that senders must know; empty: blocks are read from this host alone.
            timeout_s: seconds, the longest time of a transfer over TCP.
            rank: of this replica, of `num_ranks`.
            nixl: to read memory of senders that have it too.
        """
        self._caches, self._share, self._key, self._timeout_s = caches, share, key, timeout_s
        self._rank, self._num_ranks, self._nixl = rank, num_ranks, nixl
        self._avoided_until: dict[str, float] = {}  # addresses of senders that did not answer
        self._stream = CopyStream(caches)

    def run(self, transfer: ReceiveBlocks, submitted: float, cancellation: Cancellation) -> TransferOutcome:
        """Read all blocks, or none if something is wrong or the transfer is cancelled. All senders set theirs free.

        Nothing is written into the blocks after this call.

        Args:
            submitted: time from which the transfer is limited, by `time.monotonic`.
        """
        num_copied, deadline = 0, submitted + self._timeout_s
        senders: list[Connection] = []
        try:
            for address in transfer.source.addresses:
                senders.append(self._connect(address, deadline))
                senders[-1].send_message(self._claim(transfer))
            cancellation.watch(senders)  # not before: closing a connection with a claim sets the blocks free
            shares: list[CacheShare] = [sender.receive_message(CacheShare) for sender in senders]
            if transfer.block_ids:
                self._read(transfer, senders, shares)
            num_copied = len(transfer.block_ids)
        except (OSError, ValueError, PeerError) as error:
            if not cancellation.is_set:
                logger.warning("KV cache blocks of another engine cannot be read, and will be computed: %s", error)
        finally:
            for sender in senders:
                sender.close()
        seconds = time.monotonic() - submitted
        return TransferOutcome(number=transfer.number, num_copied=num_copied, seconds=seconds)

    def _claim(self, transfer: ReceiveBlocks) -> Claim:
        return Claim(
            handle=transfer.source.handle,
            receiver=transfer.receiver,
            tokens=transfer.tokens,
            rank=self._rank,
            num_ranks=self._num_ranks,
        )

    def _connect(self, address: str, deadline: float) -> Connection:
        host, _, port = address.rpartition(":")
        if not self._key and not is_loopback(host):
            raise PeerError(f"{address} is another machine, which needs a key (kv_transfer_key_file)")
        now = time.monotonic()
        if now < self._avoided_until.get(address, 0.0):
            raise PeerError(f"{address} did not answer a moment ago")
        timeout_s = min(deadline - now, SECONDS_TO_CONNECT)
        if timeout_s <= 0:
            raise PeerError("the time is up")
        try:
            connection = Connection(socket.create_connection((host, int(port)), timeout_s), deadline)
        except OSError as error:
            self._avoided_until[address] = time.monotonic() + SECONDS_TO_AVOID
            raise PeerError(f"{address}: {error}") from None
        try:
            connection.prove(self._key, connects=True)
        except (OSError, PeerError) as error:
            connection.close()
            raise PeerError(f"{address}: {error}") from None
        self._avoided_until.pop(address, None)
        return connection

    @torch.inference_mode()
    def _read(self, transfer: ReceiveBlocks, senders: Sequence[Connection], shares: Sequence[CacheShare]) -> None:
        """Read each head of each layer from the first sender that has it."""
        missing = {
            share.layer: set(range(share.first_head, share.first_head + max(share.num_heads, 1)))
            for share in self._share.layers
        }
        first = self._rank % len(senders)  # spreads the load: latent caches are whole on each sender
        for index in [*range(first, len(senders)), *range(first)]:
            sender, theirs = senders[index], shares[index]
            if others := {name for name, fact in self._share.facts.items() if theirs.facts.get(name) != fact}:
                shown = ", ".join(
                    f"{name} {theirs.facts.get(name)} instead of {self._share.facts[name]}" for name in others
                )
                raise PeerError(f"its blocks have other contents: {shown}")
            if pieces := self._pieces(theirs, missing):
                parts = [self._part(theirs, piece) for piece in pieces]
                if self._nixl is not None and theirs.has_nixl:
                    self._read_by_nixl(self._nixl, sender, transfer, parts)
                else:
                    self._read_pieces(sender, transfer, parts)
        if lacking := [layer for layer, heads in missing.items() if heads]:
            raise PeerError(f"no rank has all of layers {lacking}")

    def _pieces(self, theirs: CacheShare, missing: dict[int, set[int]]) -> list[Piece]:
        """Return the missing heads that a sender has, and remove them from `missing`: heads by layer."""
        pieces = []
        for index, share in enumerate(theirs.layers):
            heads = range(share.first_head, share.first_head + max(share.num_heads, 1))
            wanted = sorted(missing.get(share.layer, set()).intersection(heads))
            if wanted:
                missing[share.layer] -= set(wanted)
                if wanted[-1] - wanted[0] + 1 != len(wanted):
                    raise PeerError(f"it does not divide heads evenly: it has {heads} of layer {share.layer}")
                num_heads = len(wanted) if share.num_heads else 0
                pieces.append(Piece(index, wanted[0] - share.first_head, num_heads))
        return pieces

    def _part(self, theirs: CacheShare, piece: Piece) -> _Part:
        share = theirs.layers[piece.layer]
        (index,) = (index for index, own in enumerate(self._share.layers) if own.layer == share.layer)
        return _Part(piece, index, share.first_head + piece.first_head - self._share.layers[index].first_head)

    def _read_pieces(self, sender: Connection, transfer: ReceiveBlocks, parts: Sequence[_Part]) -> None:
        """Read blocks over the connection."""
        num_blocks, block_ids = len(transfer.block_ids), torch.tensor(transfer.block_ids)
        self._ask(sender, self._wanted(transfer, [part.piece for part in parts]))
        with self._stream.copying():
            for part in parts:
                for tensor in self._caches[part.layer].tensors:
                    heads = select_heads(tensor, part.first_head, part.piece.num_heads)
                    blocks = torch.empty((num_blocks, *heads.shape[1:]), dtype=tensor.dtype)
                    sender.receive_into(bytes_of(blocks))
                    heads.index_copy_(0, block_ids.to(heads.device), blocks.to(heads.device))

    def _read_by_nixl(
        self, nixl: NixlMemory, sender: Connection, transfer: ReceiveBlocks, parts: Sequence[_Part]
    ) -> None:
        """Read blocks from the sender's memory, then require that it has kept them until now."""
        answer = self._ask(sender, self._wanted(transfer, []))
        if (theirs := answer.nixl) is None:
            raise PeerError("its memory cannot be read by NIXL")
        copies = []
        for part in parts:
            piece = part.piece
            for here, there in zip(nixl.share.tensors[part.layer], theirs.tensors[piece.layer], strict=True):
                source = ranges(there, answer.block_ids, piece.first_head, piece.num_heads)
                target = ranges(here, transfer.block_ids, part.first_head, piece.num_heads)
                copies.append(np.concatenate([source[:, :1], target], axis=1))
        nixl.read(theirs, copies)
        self._ask(sender, HasRead())

    def _wanted(self, transfer: ReceiveBlocks, pieces: list[Piece]) -> Read:
        return Read(first=transfer.first, num_blocks=len(transfer.block_ids), pieces=pieces)

    def _ask(self, sender: Connection, message: Read | HasRead) -> Answer:
        sender.send_message(message)
        answer: Answer = sender.receive_message(Answer)
        if answer.error:
            raise PeerError(answer.error)
        return answer
