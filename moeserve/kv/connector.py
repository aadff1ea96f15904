"""The scheduler's part of KV connectors: the index of the items in a store behind the KV cache.

An item is a block, a block of layers with windows, or a saved state. An item depends on all tokens up to its end, so
its key is the digest of these tokens. Copies between the cache and a store are *transfers*. They run asynchronously on
every rank of the replica, and a request continues when all ranks have ended its transfer. An item is saved as soon as
it is computed, so that its place can later be reused at once. If a waiting request begins with items that have been
evicted from the cache but are in the store, they are loaded first, and are then found in the prefix cache like all
others. An item that cannot be loaded is computed, so a failure of a store never changes a token.

Names are those of vLLM's KVConnectorBase_V1 if the meaning is the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from moeserve.cache_kind import CacheKind
from moeserve.protocol import StoreKey

ITEM_FILE_ENDING = ".safetensors"  # file name extension of an item in a folder; see `ItemKey.name`


class ItemKey(NamedTuple):
    """The identity of an item."""

    kind: CacheKind
    digest: bytes  # digest of the tokens up to the end of the item, as in prefix caching

    @property
    def name(self) -> str:
        """File name of the item in a folder."""
        return f"{self.digest.hex()}.{self.kind.name.lower()}"


class KVConnector(Protocol):
    """The index of a store behind the KV cache of one replica."""

    def has(self, key: ItemKey) -> bool:
        """Return True if an item can be loaded now."""
        ...

    def begin_load(self, keys: Sequence[ItemKey]) -> list[StoreKey]:
        """Return the store's keys of items to load. The store does not evict the items until `end_load`."""
        ...

    def end_load(self, keys: Sequence[ItemKey]) -> None:
        """End a load, so that its items can be evicted."""
        ...

    def begin_save(self, keys: Sequence[ItemKey]) -> dict[ItemKey, StoreKey]:
        """Return the store's keys for the items that the store lacks and has room for."""
        ...

    def end_save(self, keys: Sequence[ItemKey], num_saved: int) -> None:
        """End a save: the first `num_saved` of the items that `begin_save` returned are in the store."""
        ...


class FolderTier:
    """An index of the items in a folder, to which other processes have access. See `kv/rank/folder.py`."""

    def __init__(self, is_stored: Callable[[str], bool]) -> None:
        """
        Args:
            is_stored: returns True if the folder has an item with this name.
        """
        self._is_stored = is_stored

    def has(self, key: ItemKey) -> bool:
        return self._is_stored(key.name)

    def begin_load(self, keys: Sequence[ItemKey]) -> list[StoreKey]:
        return [key.name for key in keys]

    def end_load(self, keys: Sequence[ItemKey]) -> None:
        pass

    def begin_save(self, keys: Sequence[ItemKey]) -> dict[ItemKey, StoreKey]:
        return {key: key.name for key in keys if not self.has(key)}

    def end_save(self, keys: Sequence[ItemKey], num_saved: int) -> None:
        pass


class HostTier:
    """An LRU index of a store in host memory, which has a fixed number of places for each kind of item."""

    def __init__(self, num_places: Mapping[CacheKind, int]) -> None:
        """
        Args:
            num_places: number of places for each kind of items. Items of other kinds are not stored.
        """
        self._num_places = dict(num_places)
        self._free = {kind: list(range(num - 1, -1, -1)) for kind, num in num_places.items()}
        # Stored items by kind, the least recently used first.
        self._stored: dict[CacheKind, OrderedDict[ItemKey, int]] = {kind: OrderedDict() for kind in num_places}
        self._saving: dict[ItemKey, int] = {}
        self._num_loads: dict[ItemKey, int] = {}  # number of loads in flight of each item

    def has(self, key: ItemKey) -> bool:
        return key in self._stored.get(key.kind, ())

    def begin_load(self, keys: Sequence[ItemKey]) -> list[StoreKey]:
        for key in keys:
            self._num_loads[key] = self._num_loads.get(key, 0) + 1
        for key in reversed(keys):  # so that the tail of a prefix is evicted before its head
            self._stored[key.kind].move_to_end(key)
        return [self._stored[key.kind][key] for key in keys]

    def end_load(self, keys: Sequence[ItemKey]) -> None:
        for key in keys:
            self._num_loads[key] -= 1
            if not self._num_loads[key]:
                del self._num_loads[key]

    def begin_save(self, keys: Sequence[ItemKey]) -> dict[ItemKey, StoreKey]:
        places: dict[ItemKey, StoreKey] = {}
        for key in keys:
            if self.has(key) or key in self._saving:
                continue
            place = self._take_place(key.kind)
            if place is not None:
                places[key] = self._saving[key] = place
        return places

    def end_save(self, keys: Sequence[ItemKey], num_saved: int) -> None:
        for index, key in reversed(list(enumerate(keys))):
            place = self._saving.pop(key)
            if index < num_saved:
                self._stored[key.kind][key] = place
            else:
                self._free[key.kind].append(place)

    def _take_place(self, kind: CacheKind) -> int | None:
        """Return a place for another item; None if transfers use all places."""
        if free := self._free.get(kind):
            return free.pop()
        stored = self._stored.get(kind, OrderedDict())
        oldest = next((key for key in stored if key not in self._num_loads), None)
        return None if oldest is None else stored.pop(oldest)

    def check_invariants(self) -> None:
        """Raise AssertionError if a place is lost or used twice."""
        for kind, num_places in self._num_places.items():
            saving = [place for key, place in self._saving.items() if key.kind == kind]
            places = [*self._free[kind], *self._stored[kind].values(), *saving]
            assert sorted(places) == list(range(num_places)), "places of the host tier are lost"
        assert all(map(self.has, self._num_loads)), "an item that is being loaded was replaced"
