"""Transfers of one replica in flight, the places of the cache that they use, and the requests that wait for them."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from moeserve.cache_kind import CacheKind
from moeserve.kv.connector import ItemKey, KVConnector
from moeserve.kv.load_rates import LoadRates
from moeserve.kv.manager import CacheLimits
from moeserve.kv.pool import BlockPool, tokens_digest
from moeserve.kv.route_store import RouteStore
from moeserve.protocol import (
    CachePlace,
    CancelReceive,
    KeepItems,
    PeerBlocks,
    ReceiveItems,
    Request,
    RequestUpdate,
    StoreTransfer,
    Transfer,
    TransferResult,
)


class TransferredRequest(Protocol):
    """The part of a request that transfers read. Transfers clear `kv_source`, because a source is used only once."""

    kv_source: PeerBlocks | None

    @property
    def request(self) -> Request: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def ended(self) -> bool: ...


Waiting = TypeVar("Waiting", bound=TransferredRequest)

KINDS_OF_RUNNING = (CacheKind.BLOCK, CacheKind.WINDOW_BLOCK)  # the kinds of items that every running request needs


@dataclass(frozen=True)
class _InFlight(Generic[Waiting]):
    kind: Literal["save", "load", "keep", "receive", "cancel"]
    places: list[CachePlace]  # places that the transfer reads or writes, and of which it is a holder
    keys: list[ItemKey]  # keys of the items that are saved, loaded or received
    held: list[CachePlace]  # other places that the transfer holds: the rest of the prefix for which the request waits
    request: Waiting | None = None  # the request that waits for the end of the transfer
    handle: str = ""  # handle of the items that are received


class BlockTransfers(Generic[Waiting]):
    """Asynchronous copies of cached items to and from the store behind the cache, and between engines.

    Computed items are saved, and items that a waiting request begins with are loaded. If another engine computes a
    prompt, it keeps the prompt's items until this engine has received them.

    A transfer in flight is a holder of its places, so that they are not allocated for other items.
    """

    def __init__(
        self,
        connector: KVConnector,
        pools: Mapping[CacheKind, BlockPool],
        limits: CacheLimits,
        addresses: Sequence[str] = (),
        routes: RouteStore | None = None,
    ) -> None:
        """
        Args:
            pools: pool of the cache's places for each kind of items.
            limits: limits of the caches, among them the number of tokens in a block.
            addresses: address of each rank of this replica at which other engines can read items; empty: other engines
                cannot read items.
            routes: the experts of cached tokens, which are copied with their blocks.
        """
        self.connector = connector
        self._pools, self._addresses = pools, list(addresses)
        self._computed: dict[ItemKey, None] = {}  # computed items to save, unless they are evicted first
        self._new: list[Transfer] = []
        self._in_flight: dict[int, _InFlight] = {}
        self._is_saving = False
        self._limits, self._routes = limits, routes
        self._rates = LoadRates()
        self._num_begun = 0
        self._num_loaded: Counter[CacheKind] = Counter()
        self._num_saved: Counter[CacheKind] = Counter()
        self._num_failed = 0

    @property
    def has_peers(self) -> bool:
        """True if this engine can receive items from other engines and send items to them."""
        return bool(self._addresses)

    @property
    def are_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def hold_blocks_alone(self) -> bool:
        """True if a save or a load in flight is the only holder of a place, which will therefore be free soon."""
        transfers = [each for each in self._in_flight.values() if each.kind in ("save", "load")]
        places = [place for each in transfers for place in each.places if place.kind in KINDS_OF_RUNNING]
        return any(self._pools[place.kind].num_holders(place.index) == 1 for place in places)

    @property
    def pays_to_load(self) -> bool:
        """True if blocks should be loaded now because computing them is not faster."""
        return self._rates.pays()

    def counts(self) -> dict[str, int]:
        """Return the fields of `ReplicaStats` about copies."""
        return {
            "num_loaded_tokens": self._num_loaded[CacheKind.BLOCK] * self._limits.block_size,
            "num_loaded_states": self._num_loaded[CacheKind.STATE],
            "num_saved_blocks": self._num_saved[CacheKind.BLOCK] + self._num_saved[CacheKind.WINDOW_BLOCK],
            "num_saved_states": self._num_saved[CacheKind.STATE],
            "num_failed_blocks": self._num_failed,
        }

    def note_computed(self, keys: Iterable[ItemKey]) -> None:
        """Add computed items to the next save."""
        self._computed.update(dict.fromkeys(keys))

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a step with this many tokens."""
        self._rates.note_step(num_tokens, seconds)

    def fit(self, keys: Sequence[ItemKey]) -> bool:
        """Return True if the cache has room for all of these items, some of which it may have already."""
        return all(
            sum(self._needs_free_place(key) for key in keys if key.kind == kind) <= pool.num_free
            for kind, pool in self._pools.items()
        )

    def _needs_free_place(self, key: ItemKey) -> bool:
        pool = self._pools[key.kind]
        index = pool.find(key.digest)
        return index is None or pool.is_free(index)

    def load(self, request: Waiting, keys: Sequence[ItemKey]) -> None:
        """Load the items that the cache lacks, for a request that waits for them. All items must fit."""
        missing, held = self._hold(keys)
        absent = [keys[index] for index in missing]
        transfer = StoreTransfer(
            number=self._num_begun,
            is_load=True,
            places=list(missing.values()),
            store_keys=self.connector.begin_load(absent),
        )
        self._begin(transfer, _InFlight("load", transfer.places, absent, held, request))

    def _hold(self, keys: Sequence[ItemKey]) -> tuple[dict[int, CachePlace], list[CachePlace]]:
        """Hold the places of cached items, and allocate places for the other items.

        Returns:
            The new places by index of the item's key, and the places of cached items.
        """
        indices = [self._pools[key.kind].find(key.digest) for key in keys]
        held = [CachePlace(key.kind, index) for key, index in zip(keys, indices, strict=True) if index is not None]
        for place in held:  # hold cached items before an allocation could evict them
            self._pools[place.kind].share([place.index])
        missing = {
            number: CachePlace(key.kind, self._pools[key.kind].allocate(1)[0])
            for number, (key, index) in enumerate(zip(keys, indices, strict=True))
            if index is None
        }
        return missing, held

    def keep(self, request: Waiting, keys: Sequence[ItemKey], update: RequestUpdate) -> RequestUpdate:
        """Keep items of an ended request's prompt for another engine. The cache must have the items.

        The items are not kept if more than half of the cache would be kept, so that other requests can run.

        Returns:
            The request's last update, with `kv_blocks` if the items are kept.
        """
        num_blocks = sum(key.kind == CacheKind.BLOCK for key in keys)
        num_kept = Counter(key.kind for key in keys)
        for each in self._in_flight.values():
            num_kept.update(place.kind for place in each.places if each.kind == "keep")
        is_too_much = any(num_kept[kind] > self._pools[kind].num_blocks // 2 for kind in KINDS_OF_RUNNING)
        if not self.has_peers or not num_blocks or is_too_much:
            return update
        handle = request.request.kv_handle
        _, places = self._hold(keys)
        tokens = tokens_digest(request.token_ids[: num_blocks * self._limits.block_size])
        keep = KeepItems(
            number=self._num_begun, handle=handle, tokens=tokens, places=places, routes=self._routes_of(places)
        )
        self._begin(keep, _InFlight("keep", places, [], []))
        source = PeerBlocks(handle=handle, addresses=self._addresses, num_blocks=num_blocks)
        return msgspec.structs.replace(update, kv_blocks=source)

    def is_receiving(self, handle: str) -> bool:
        """Return True while items with this handle are being received."""
        return any(each.places and each.handle == handle for each in self._in_flight.values())

    def receive(self, request: Waiting, keys: Sequence[ItemKey]) -> None:
        """Receive the items of a request's `kv_source` that the cache lacks, and free all items of the source.

        A source can be used only once.

        Args:
            keys: keys of all items of the source, in order. Empty: only free the source; the request does not wait.
        """
        source, request.kv_source = request.kv_source, None
        assert source is not None
        missing, held = self._hold(keys)
        receive = ReceiveItems(
            number=self._num_begun,
            receiver=secrets.token_hex(8),
            source=source,
            tokens=tokens_digest(request.token_ids[: source.num_blocks * self._limits.block_size]),
            wanted=list(missing),
            places=list(missing.values()),
        )
        absent, waits = [keys[index] for index in missing], request if keys else None
        self._begin(receive, _InFlight("receive", receive.places, absent, held, waits, source.handle))

    def cancel_receive(self, handle: str) -> None:
        """End the transfer of items with this handle early, if the request that waits for it has ended."""
        for number, each in list(self._in_flight.items()):
            if each.handle == handle and each.request is not None and each.request.ended:
                self._begin(CancelReceive(number=self._num_begun, receive=number), _InFlight("cancel", [], [], []))

    def take_new(self) -> list[Transfer]:
        """Return the transfers to start now. At most one save runs at a time; it includes all items computed so far."""
        if self._computed and not self._is_saving:
            computed, self._computed = self._computed, {}
            kept = [key for key in computed if self._pools[key.kind].find(key.digest) is not None]
            store_keys = self.connector.begin_save(kept)
            if store_keys:
                self._is_saving = True
                keys = list(store_keys)
                _, places = self._hold(keys)
                transfer = StoreTransfer(
                    number=self._num_begun,
                    is_load=False,
                    places=places,
                    store_keys=list(store_keys.values()),
                    routes=self._routes_of(places),
                )
                self._begin(transfer, _InFlight("save", places, keys, []))
        new, self._new = self._new, []
        return new

    def end(self, result: TransferResult) -> Waiting | None:
        """End a transfer. Items that it has loaded or received can then be found in the cache.

        Returns:
            The request that waited for the transfer, or None.
        """
        transfer, num_copied = self._in_flight.pop(result.number), result.num_copied
        copied = Counter(place.kind for place in transfer.places[:num_copied])
        if transfer.request is None or not transfer.request.ended:  # else it may have been cancelled
            self._num_failed += len(transfer.places) - num_copied
        match transfer.kind:
            case "save":
                self._is_saving = False
                self.connector.end_save(transfer.keys, num_copied)
                self._num_saved += copied
            case "load":
                self.connector.end_load(transfer.keys)
                self._rates.note_load(copied[CacheKind.BLOCK] * self._limits.block_size, result.seconds)
        if transfer.kind in ("load", "receive"):
            self._num_loaded += copied
            if self._routes is not None:
                self._routes.write_blocks(transfer.places[:num_copied], result.routes)
            for key, place in list(zip(transfer.keys, transfer.places, strict=True))[:num_copied]:
                self._pools[key.kind].register(place.index, key.digest)
        for kind, pool in self._pools.items():  # release by kind, so that the first blocks of a prefix are evicted last
            pool.release([place.index for place in [*transfer.held, *transfer.places] if place.kind == kind])
        return transfer.request

    def _routes_of(self, places: Sequence[CachePlace]) -> bytes:
        return b"" if self._routes is None else self._routes.read_blocks(places)

    def _begin(self, message: Transfer, transfer: _InFlight) -> None:
        self._in_flight[message.number] = transfer
        self._new.append(message)
        self._num_begun += 1

    def held_places(self) -> list[CachePlace]:
        """Return the places that transfers hold, each once per transfer that holds it."""
        return [place for each in self._in_flight.values() for place in [*each.places, *each.held]]
