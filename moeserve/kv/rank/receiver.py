"""The receiver of KV cache items from the ranks of another engine, whose tp and pp sizes may differ."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeserve.addresses import is_loopback
from moeserve.kv.rank.items import CachedItems, indices_by_kind
from moeserve.kv.rank.nixl import NixlMemory, ranges
from moeserve.kv.rank.wire import (
    Answer,
    CacheShare,
    Claim,
    HasRead,
    Piece,
    Read,
    bytes_of,
    select_piece,
)
from moeserve.processes.peer_connection import Connection, PeerError
from moeserve.protocol import ReceiveItems, TransferResult

logger = logging.getLogger(__name__)

SECONDS_TO_CONNECT = 5.0  # enough for three tries, because lost packets are sent again after 1 and 3 s
SECONDS_TO_AVOID = 10.0  # time for which a sender that did not answer is avoided


@dataclass(frozen=True)
class _Part:
    """A piece of a sender's cache, and its destination in this rank's cache."""

    piece: Piece
    tensor: int  # index in this rank's `CacheShare.tensors`
    first: int  # first index along the axis by which the tensor is divided


@dataclass(frozen=True)
class _Missing:
    """A range of a tensor that has not been read yet. A tensor that is not divided has one range of length 0."""

    tensor: int  # index in this rank's `CacheShare.tensors`
    first: int  # first index along the axis by which the tensor is divided on this rank
    first_of_whole: int  # the same index, counted along the whole tensor of all ranks
    length: int


class Cancellation:
    """A flag by which another thread ends a transfer early."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._connections: Sequence[Connection] = ()

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """End the transfer: close the connections on which the transfer's thread may be waiting."""
        with self._lock:
            self._is_set = True
            for connection in self._connections:
                connection.close()

    def watch(self, connections: Sequence[Connection]) -> None:
        """Close these connections when the transfer is cancelled. Raises PeerError if it has been cancelled already."""
        with self._lock:
            if self._is_set:
                raise PeerError("the request has ended")
            self._connections = connections


class BlockReceiver:
    """A receiver that fills places of this rank's KV cache. Several threads may use it at the same time."""

    def __init__(
        self,
        items: CachedItems,
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
            share: description of this rank's part of the cache.
            key: key that senders must know; empty: items are received only from this host.
            timeout_s: maximum time of a transfer over TCP in seconds.
            rank: index of this rank among the `num_ranks` ranks of its replica.
            nixl: registered memory for reading from senders that use NIXL too; None: NIXL is not used.
        """
        self._items, self._share, self._key, self._timeout_s = items, share, key, timeout_s
        self._rank, self._num_ranks, self._nixl = rank, num_ranks, nixl
        self._avoided_until: dict[str, float] = {}  # addresses of senders that did not answer

    def run(self, transfer: ReceiveItems, submitted: float, cancellation: Cancellation) -> TransferResult:
        """Read all items, or report none if an error occurs or the transfer is cancelled. All senders free their items.

        Nothing is written to the places after this call.

        Args:
            submitted: time by `time.monotonic` from which the time limit of the transfer counts.
        """
        num_copied, deadline = 0, submitted + self._timeout_s
        senders: list[Connection] = []
        try:
            for address in transfer.source.addresses:
                senders.append(self._connect(address, deadline))
                senders[-1].send_message(self._claim(transfer))
            cancellation.watch(senders)  # only now: closing a connection frees items only after its claim
            shares: list[CacheShare] = [sender.receive_message(CacheShare) for sender in senders]
            if transfer.places:
                self._read(transfer, senders, shares)
            num_copied = len(transfer.places)
        except (OSError, ValueError, PeerError) as error:
            if not cancellation.is_set:
                logger.warning("KV cache blocks of another engine cannot be read, and will be computed: %s", error)
        finally:
            for sender in senders:
                sender.close()
        seconds = time.monotonic() - submitted
        return TransferResult(number=transfer.number, num_copied=num_copied, seconds=seconds)

    def _claim(self, transfer: ReceiveItems) -> Claim:
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
    def _read(self, transfer: ReceiveItems, senders: Sequence[Connection], shares: Sequence[CacheShare]) -> None:
        """Read each part of each tensor from the first sender that has it."""
        kinds = {place.kind for place in transfer.places}
        missing: list[_Missing] = []
        for number, share in enumerate(self._share.tensors):
            first = 0
            for start, length in (share.ranges or [(0, 0)]) if share.kind in kinds else []:
                missing.append(_Missing(number, first, start, length))
                first += length
        first = self._rank % len(senders)  # spreads the load, because every sender has latent caches completely
        for index in [*range(first, len(senders)), *range(first)]:
            sender, theirs = senders[index], shares[index]
            if others := {name for name, fact in self._share.facts.items() if theirs.facts.get(name) != fact}:
                shown = ", ".join(
                    f"{name} {theirs.facts.get(name)} instead of {self._share.facts[name]}" for name in others
                )
                raise PeerError(f"its items have other contents: {shown}")
            parts, missing = self._take_parts(theirs, missing)
            if parts:
                if self._nixl is not None and theirs.has_nixl:
                    self._read_by_nixl(self._nixl, sender, transfer, parts)
                else:
                    self._read_pieces(sender, transfer, parts)
        if missing:
            lacking = {self._share.tensors[each.tensor].name for each in missing}
            raise PeerError(f"no rank has all of tensors {sorted(lacking)}")

    def _take_parts(self, theirs: CacheShare, missing: Sequence[_Missing]) -> tuple[list[_Part], list[_Missing]]:
        """Return the parts of the missing ranges that a sender has, and the ranges that are still missing."""
        index_of_name = {share.name: index for index, share in enumerate(theirs.tensors)}
        parts: list[_Part] = []
        left = list(missing)
        rest: list[_Missing] = []
        while left:
            each = left.pop()
            index = index_of_name.get(self._share.tensors[each.tensor].name)
            part = None if index is None else self._overlap(each, index, theirs.tensors[index].ranges)
            if part is None:
                rest.append(each)
                continue
            parts.append(part)
            if each.length:  # the ranges before and after the part are still missing
                before = part.first - each.first
                behind = each.length - before - part.piece.length
                left += [_Missing(each.tensor, each.first, each.first_of_whole, before)] * (before > 0)
                offset = before + part.piece.length
                after = _Missing(each.tensor, each.first + offset, each.first_of_whole + offset, behind)
                left += [after] * (behind > 0)
        return parts, rest

    @staticmethod
    def _overlap(missing: _Missing, index: int, ranges: Sequence[tuple[int, int]]) -> _Part | None:
        """Return a part of a missing range that the sender has, or None.

        Args:
            index: index of the tensor among the sender's tensors.
            ranges: start and length of the sender's ranges of this tensor; empty: ranks do not divide the tensor.
        """
        if not missing.length and not ranges:
            return _Part(Piece(index, 0, 0), missing.tensor, 0)
        first_of_range = 0
        for start, length in ranges:
            first = max(start, missing.first_of_whole)
            end = min(start + length, missing.first_of_whole + missing.length)
            if first < end:
                piece = Piece(index, first_of_range + first - start, end - first)
                return _Part(piece, missing.tensor, missing.first + first - missing.first_of_whole)
            first_of_range += length
        return None

    def _read_pieces(self, sender: Connection, transfer: ReceiveItems, parts: Sequence[_Part]) -> None:
        """Read parts of items over the connection."""
        numbers = indices_by_kind(transfer.places)
        self._ask(sender, Read(items=transfer.wanted, pieces=[part.piece for part in parts]))
        with self._items.copying():
            for part in parts:
                share, tensor = self._share.tensors[part.tensor], self._items.tensors[part.tensor].tensor
                indices = torch.tensor([transfer.places[number].index for number in numbers[share.kind]])
                target = select_piece(tensor, share.axis, part.first, part.piece.length)
                copies = torch.empty((len(indices), *target.shape[1:]), dtype=tensor.dtype)
                sender.receive_into(bytes_of(copies))
                target.index_copy_(0, indices.to(target.device), copies.to(target.device))

    def _read_by_nixl(
        self, nixl: NixlMemory, sender: Connection, transfer: ReceiveItems, parts: Sequence[_Part]
    ) -> None:
        """Read parts of items from the sender's memory. Raise PeerError if the sender has freed the items meanwhile."""
        answer = self._ask(sender, Read(items=transfer.wanted, pieces=[]))
        if (theirs := answer.nixl) is None:
            raise PeerError("its memory cannot be read by NIXL")
        numbers = indices_by_kind(transfer.places)
        copies = []
        for part in parts:
            piece, own = part.piece, numbers[self._share.tensors[part.tensor].kind]
            there, here = theirs.tensors[piece.tensor], nixl.share.tensors[part.tensor]
            source = ranges(there, [answer.places[number].index for number in own], piece.first, piece.length)
            target = ranges(here, [transfer.places[number].index for number in own], part.first, piece.length)
            copies.append(np.concatenate([source[:, :1], target], axis=1))
        nixl.read(theirs, copies)
        self._ask(sender, HasRead())

    def _ask(self, sender: Connection, message: Read | HasRead) -> Answer:
        sender.send_message(message)
        answer: Answer = sender.receive_message(Answer)
        if answer.error:
            raise PeerError(answer.error)
        return answer
