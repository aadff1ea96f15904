"""The transfers of one replica in flight: which blocks they read and write, and who waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.protocol import BlockTransfer, StoreKey, TransferOutcome
from moeserve.scheduling.block_pool import BlockPool
from moeserve.scheduling.kv_connector import KVConnector
from moeserve.scheduling.request import LiveRequest


@dataclass(frozen=True)
class _Transfer:
    block_ids: list[int]
    digests: list[bytes]
    request: LiveRequest | None  # that waits for a load; None: a save


class BlockTransfers:
    """Saves blocks that were computed, and loads blocks for requests that wait.

    A block of a transfer in flight has a holder, so it is not given to others.
    """

    def __init__(self, connector: KVConnector, pool: BlockPool) -> None:
        self._connector, self._pool = connector, pool
        self._computed: dict[bytes, int] = {}  # blocks to be saved, unless they are evicted before
        self._new: list[BlockTransfer] = []
        self._in_flight: dict[int, _Transfer] = {}
        self._is_saving = False
        self._num_begun = 0
        self.num_loaded_blocks = self.num_saved_blocks = self.num_failed_blocks = 0

    @property
    def are_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def hold_blocks_alone(self) -> bool:
        """True if blocks become free when transfers in flight have ended."""
        transfers = self._in_flight.values()
        return any(self._pool.num_holders(block) == 1 for transfer in transfers for block in transfer.block_ids)

    def note_computed(self, digest: bytes, block_id: int) -> None:
        """Save a block with the next transfer."""
        self._computed[digest] = block_id

    def num_loadable(self, digests: Sequence[bytes]) -> int:
        """Return how many of these consecutive blocks, from the first on, can be loaded."""
        return self._connector.get_num_new_matched_blocks(digests)

    def load(self, request: LiveRequest, digests: list[bytes], block_ids: list[int]) -> None:
        """Load blocks of a request that waits for them.

        Args:
            block_ids: of the cache, allocated for these blocks.
        """
        self._begin(_Transfer(block_ids, digests, request), self._connector.begin_load(digests))

    def take_new(self) -> list[BlockTransfer]:
        """Return the transfers that begin now. One save at a time takes all blocks that were computed meanwhile."""
        if self._computed and not self._is_saving:
            computed, self._computed = self._computed, {}
            kept = {digest: block for digest, block in computed.items() if self._pool.find(digest) == block}
            keys = self._connector.begin_save(list(kept))
            if keys:
                self._is_saving = True
                block_ids = [kept[digest] for digest in keys]
                self._pool.share(block_ids)
                self._begin(_Transfer(block_ids, list(keys), None), list(keys.values()))
        new, self._new = self._new, []
        return new

    def end(self, outcome: TransferOutcome) -> LiveRequest | None:
        """End a transfer. Blocks that were loaded can be found in the pool from now on.

        Returns:
            The request that waited for it; None after a save.
        """
        transfer = self._in_flight.pop(outcome.number)
        self.num_failed_blocks += len(transfer.block_ids) - outcome.num_copied
        if transfer.request is None:
            self._is_saving = False
            self._connector.end_save(transfer.digests, outcome.num_copied)
            self.num_saved_blocks += outcome.num_copied
            self._pool.release(transfer.block_ids)
            return None
        self._connector.end_load(transfer.digests, outcome.num_copied)
        self.num_loaded_blocks += outcome.num_copied
        for digest, block_id in list(zip(transfer.digests, transfer.block_ids, strict=True))[: outcome.num_copied]:
            self._pool.register(block_id, digest)
        return transfer.request

    def _begin(self, transfer: _Transfer, keys: list[StoreKey]) -> None:
        message = BlockTransfer(
            number=self._num_begun,
            is_load=transfer.request is not None,
            block_ids=transfer.block_ids,
            store_keys=keys,
        )
        self._in_flight[message.number] = transfer
        self._new.append(message)
        self._num_begun += 1

    def held_blocks(self) -> list[int]:
        """Return the blocks that transfers hold, with the cached prefixes of requests that wait for loads."""
        held: list[int] = []
        for each in self._in_flight.values():
            held += each.block_ids if each.request is None else each.request.block_ids
        return held
