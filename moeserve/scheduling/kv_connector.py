"""KV connectors, as a scheduler sees them: which blocks lie in a store behind the KV cache.

Copies between the cache and a store are *transfers*. They run beside the steps, on every rank of the replica, and a
request moves on when all ranks have ended its transfer. A full block is saved when it is computed, so that later it can
be given to others at once. When a waiting request begins with blocks that the cache has lost and the store has kept,
they are loaded first, and then found in the prefix cache as if they had always been there. A block that cannot be
loaded is computed: no failure of a store changes a token.

The names are those of vLLM's KVConnectorBase_V1 where the meaning is the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from moeserve.protocol import StoreKey


class KVConnector(Protocol):
    """The index of a store behind the KV cache of one replica. Blocks are named by the digests of prefix caching."""

    def get_num_new_matched_blocks(self, digests: Sequence[bytes]) -> int:
        """Return how many of these consecutive blocks, from the first on, can be loaded now."""
        ...

    def begin_load(self, digests: Sequence[bytes]) -> list[StoreKey]:
        """Return the keys of blocks to load. The store keeps them until `end_load`."""
        ...

    def end_load(self, digests: Sequence[bytes], num_loaded: int) -> None:
        """End a load, in which the first `num_loaded` blocks could be read."""
        ...

    def begin_save(self, digests: Sequence[bytes]) -> dict[bytes, StoreKey]:
        """Return the keys of those blocks that the store lacks and has room for."""
        ...

    def end_save(self, digests: Sequence[bytes], num_saved: int) -> None:
        """End a save: the first `num_saved` of the blocks that `begin_save` returned are in the store."""
        ...


class FolderTier:
    """Blocks in a folder, which others may add and delete. See `worker/kv_folder.py`."""

    def __init__(self, is_stored: Callable[[bytes], bool]) -> None:
        """
        Args:
            is_stored: returns whether the folder has the block with a digest.
        """
        self._is_stored = is_stored

    def get_num_new_matched_blocks(self, digests: Sequence[bytes]) -> int:
        for index, digest in enumerate(digests):
            if not self._is_stored(digest):
                return index
        return len(digests)

    def begin_load(self, digests: Sequence[bytes]) -> list[StoreKey]:
        return list(digests)

    def end_load(self, digests: Sequence[bytes], num_loaded: int) -> None:
        pass

    def begin_save(self, digests: Sequence[bytes]) -> dict[bytes, StoreKey]:
        return {digest: digest for digest in digests if not self._is_stored(digest)}

    def end_save(self, digests: Sequence[bytes], num_saved: int) -> None:
        pass


class HostTier:
    """Blocks in the host's memory. The least recently used ones are replaced."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # places without a block
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._saving: dict[bytes, int] = {}
        self._num_loads: dict[bytes, int] = {}  # in flight, by block

    def __len__(self) -> int:
        return len(self._place_of)

    def get_num_new_matched_blocks(self, digests: Sequence[bytes]) -> int:
        for index, digest in enumerate(digests):
            if digest not in self._place_of:
                return index
        return len(digests)

    def begin_load(self, digests: Sequence[bytes]) -> list[StoreKey]:
        for digest in digests:
            self._num_loads[digest] = self._num_loads.get(digest, 0) + 1
        for digest in reversed(digests):  # the tail of a prefix is replaced before its head
            self._place_of.move_to_end(digest)
        return [self._place_of[digest] for digest in digests]

    def end_load(self, digests: Sequence[bytes], num_loaded: int) -> None:
        for digest in digests:
            self._num_loads[digest] -= 1
            if not self._num_loads[digest]:
                del self._num_loads[digest]

    def begin_save(self, digests: Sequence[bytes]) -> dict[bytes, StoreKey]:
        places: dict[bytes, StoreKey] = {}
        for digest in digests:
            if digest in self._place_of or digest in self._saving:
                continue
            place = self._take_place()
            if place is None:
                break
            places[digest] = self._saving[digest] = place
        return places

    def end_save(self, digests: Sequence[bytes], num_saved: int) -> None:
        for index, digest in reversed(list(enumerate(digests))):
            place = self._saving.pop(digest)
            if index < num_saved:
                self._place_of[digest] = place
            else:
                self._free.append(place)

    def _take_place(self) -> int | None:
        """Return a place for another block; None if all are in use by transfers."""
        if self._free:
            return self._free.pop()
        for digest in self._place_of:  # the least recently used first
            if digest not in self._num_loads:
                return self._place_of.pop(digest)
        return None

    def check_invariants(self) -> None:
        """Raise AssertionError if a place is lost or used twice."""
        places = [*self._free, *self._place_of.values(), *self._saving.values()]
        assert sorted(places) == list(range(self.num_blocks)), "places of the host tier are lost"
        assert self._num_loads.keys() <= self._place_of.keys(), "a block that is being loaded was replaced"
