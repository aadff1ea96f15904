"""Messages between ranks of two engines, one of which reads items of the other's KV cache.

The receiver connects. Both sides prove that they know the same key, if one is configured; without a key, ranks listen
and connect only on the loopback interface. Then the sender describes its cache (`CacheShare`), and the receiver names
the items that it needs (`Claim`). Each `Read` is answered with the raw bytes of items. Closing the connection frees the
items.
Nothing is encrypted, and nothing after the proofs is authenticated.
"""

from __future__ import annotations

import ipaddress

import msgspec
import torch
from torch import Tensor

from moeserve.addresses import address_on
from moeserve.cache_kind import CacheKind
from moeserve.config.engine_config import EngineConfig
from moeserve.errors import SettingsError
from moeserve.processes.peer_connection import SECONDS_OF_SILENCE
from moeserve.processes.proof import key_in_file
from moeserve.protocol import CachePlace

# A receiver may claim items before the sender knows the handle: a rank in a step handles `KeepItems` only afterwards.
SECONDS_TO_BE_KEPT = SECONDS_OF_SILENCE - 5.0


class TensorShare(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's part of a tensor of the cache, whose first axis is the index of an item of one kind."""

    name: str  # index of the layer in the model, and of the tensor in the layer's cache
    kind: CacheKind
    axis: int  # axis along which tp ranks divide the tensor; 0: it is replicated on every tp rank
    ranges: list[tuple[int, int]]  # consecutive ranges (first index, length) of the whole axis; empty if not divided


class TensorPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of one tensor's items in a rank's memory."""

    address: int
    item_bytes: int  # distance between items
    num_rows: int  # rows of an item: product of its dimensions before the axis along which it is divided
    row_bytes: int  # distance between rows
    unit_bytes: int  # distance between indices along the axis


class NixlShare(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's memory, described for ranks that read it by NIXL. See `nixl.py`."""

    agent: bytes  # metadata of the rank's NIXL agent
    device: int
    tensors: list[TensorPlace]  # as many as in `CacheShare.tensors`


class CacheShare(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a rank's KV cache for ranks of other engines."""

    facts: dict[str, str]  # facts that the contents of items depend on; they must be equal on both sides
    tensors: list[TensorShare]
    has_nixl: bool = False  # the rank's memory can be read by NIXL


class Piece(msgspec.Struct, frozen=True):
    """A range of a tensor in the sender's cache, along the axis by which it is divided. Length 0: the whole tensor."""

    tensor: int  # index in the sender's `CacheShare.tensors`
    first: int
    length: int


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a receiver on each connection, which names the items that its rank will read.

    When the connection ends, the rank no longer needs the items, even if it has not read them. Items are freed when all
    ranks of the receiver have claimed them and have disconnected.
    """

    handle: str
    receiver: str  # name of the transfer, the same on all ranks
    tokens: bytes  # digest that the tokens of all items with this handle must have
    rank: int  # index of the rank in the receiver's replica
    num_ranks: int


class Read(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    """Request to send items piece by piece. For each piece, the sender sends the range for all items in the piece's
    tensor.

    Without pieces, the receiver reads the items by NIXL, and then sends `HasRead`.
    """

    items: list[int]  # indices among the claimed items
    pieces: list[Piece]


class HasRead(msgspec.Struct, frozen=True, tag="has-read"):
    """Message that the receiver has read items by NIXL. An `Answer` without an error confirms that they were valid."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a `HasRead` or a `Read`. The bytes that a `Read` requests follow its answer."""

    error: str = ""  # reason why the items cannot be read
    places: list[CachePlace] = []  # places of the requested items in the sender's cache
    nixl: NixlShare | None = None  # set if the items must be read by NIXL


def listening_address(config: EngineConfig, rank: int) -> tuple[str, int]:
    """Return the host and port on which a rank listens for other engines. Port 0 is any free port.

    Raises:
        SettingsError: kv_transfer_address is not an address of this host, or needs a key.
    """
    store = config.store
    assert store.kv_transfer_address is not None
    shown = f"kv_transfer_address={store.kv_transfer_address!r}"
    host, _, port = store.kv_transfer_address.partition(":")
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        address = ipaddress.IPv4Address(address_on(host, "kv_transfer_address"))
    if address.is_unspecified:
        raise SettingsError(
            f"{shown} is no address to which others can connect; name one of this host, or an interface"
        )
    if not address.is_loopback and store.kv_transfer_key_file is None:
        raise SettingsError(
            f"{shown} can be reached from other machines and needs a key that all engines share: kv_transfer_key_file"
        )
    last = int(port or 0) + (rank if port else 0)
    if last >= 2**16:
        raise SettingsError(f"{shown}: rank {rank} would have port {last}, and the last one is {2**16 - 1}")
    return str(address), last


def read_key(path: str | None) -> bytes:
    """Return the key in a file (see `key_in_file`); empty if there is no file."""
    return b"" if path is None else key_in_file("kv_transfer_key_file", path)


def select_piece(tensor: Tensor, axis: int, first: int, length: int) -> Tensor:
    """Return a range of a cached tensor along an axis. Length 0: the whole tensor."""
    return tensor.narrow(axis, first, length) if length else tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of a contiguous CPU tensor's memory."""
    return tensor.view(torch.uint8).view(-1).numpy().data
