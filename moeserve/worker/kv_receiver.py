"""Reads KV cache blocks from the ranks of another engine, whose tp and pp sizes may be others."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from moeserve.addresses import is_loopback
from moeserve.protocol import ReceiveBlocks, TransferOutcome
from moeserve.worker.kv_wire import (
    Answer,
    CacheShare,
    Connection,
    Done,
    PeerError,
    Piece,
    Read,
    bytes_of,
    select_heads,
)

logger = logging.getLogger(__name__)


class BlockReceiver:
    """Fills blocks of this rank's KV cache. Several threads may use it at once."""

    def __init__(
        self,
        caches: Sequence[Any],
        share: CacheShare,
        key: bytes,
        timeout_s: float,
        *,
        reader: int,
        num_readers: int,
    ) -> None:
        """
        Args:
            caches: of the layers; each has `tensors` whose first dimension is the block.
            share: what they are.
            key: that senders must know; empty: only those on this host are read.
            timeout_s: of a transfer.
            reader: index of this rank in its replica, of `num_readers`.
        """
        self._caches, self._share, self._key, self._timeout_s = caches, share, key, timeout_s
        self._reader, self._num_readers = reader, num_readers
        self._stream = torch.cuda.Stream() if caches[0].tensors[0].is_cuda else None

    def run(self, transfer: ReceiveBlocks) -> TransferOutcome:
        """Read all blocks, or none if something is wrong, and tell all senders to forget them."""
        started, num_copied = time.monotonic(), 0
        senders: list[Connection] = []
        try:
            for address in transfer.source.addresses:
                senders.append(self._connect(address, started + self._timeout_s))
            if transfer.block_ids:
                self._read(transfer, senders)
            num_copied = len(transfer.block_ids)
        except (OSError, ValueError, PeerError) as error:
            logger.warning("KV cache blocks of another engine cannot be read, and will be computed: %s", error)
        for sender in senders:
            with contextlib.suppress(OSError):
                sender.send_message(Done(transfer.source.handle, self._reader, self._num_readers))
            sender.close()
        seconds = time.monotonic() - started
        return TransferOutcome(number=transfer.number, num_copied=num_copied, seconds=seconds)

    def _connect(self, address: str, deadline: float) -> Connection:
        host, _, port = address.rpartition(":")
        if not self._key and not is_loopback(host):
            raise PeerError(f"{address} is another machine, which needs a key (kv_transfer_key_file)")
        timeout_s = max(deadline - time.monotonic(), 0.001)
        connection = Connection(socket.create_connection((host, int(port)), timeout_s), deadline)
        try:
            connection.prove(self._key, connects=True)
        except (OSError, PeerError) as error:
            connection.close()
            raise PeerError(f"{address}: {error}") from None
        return connection

    @torch.inference_mode()
    def _read(self, transfer: ReceiveBlocks, senders: Sequence[Connection]) -> None:
        """Read each head of each layer from the first sender that has it."""
        missing = {
            share.layer: set(range(share.first_head, share.first_head + max(share.num_heads, 1)))
            for share in self._share.layers
        }
        first = self._reader % len(senders)  # so that ranks do not all read what is not divided from the same one
        for sender in [*senders[first:], *senders[:first]]:
            theirs: CacheShare = sender.receive_message(CacheShare)
            if (theirs.contents, theirs.block_size) != (self._share.contents, self._share.block_size):
                raise PeerError("it has another model, dtype, quantization or block_size")
            if pieces := self._pieces(theirs, missing):
                self._read_pieces(sender, transfer, theirs, pieces)
        if lacking := [layer for layer, heads in missing.items() if heads]:
            raise PeerError(f"no rank has all of layers {lacking}")

    def _pieces(self, theirs: CacheShare, missing: dict[int, set[int]]) -> list[Piece]:
        """Return what a sender has of what is missing, and remove it from there."""
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

    def _read_pieces(
        self, sender: Connection, transfer: ReceiveBlocks, theirs: CacheShare, pieces: list[Piece]
    ) -> None:
        num_blocks = len(transfer.block_ids)
        sender.send_message(Read(transfer.source.handle, transfer.first, num_blocks, pieces))
        answer: Answer = sender.receive_message(Answer)
        if answer.error:
            raise PeerError(answer.error)
        block_ids = torch.tensor(transfer.block_ids)
        own = {share.layer: index for index, share in enumerate(self._share.layers)}
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for piece in pieces:
                share = theirs.layers[piece.layer]
                index = own[share.layer]
                first_head = share.first_head + piece.first_head - self._share.layers[index].first_head
                for tensor in self._caches[index].tensors:
                    heads = select_heads(tensor, first_head, piece.num_heads)
                    blocks = torch.empty((num_blocks, *heads.shape[1:]), dtype=tensor.dtype)
                    sender.receive_into(bytes_of(blocks))
                    heads.index_copy_(0, block_ids.to(heads.device), blocks.to(heads.device))
        if self._stream is not None:
            self._stream.synchronize()
