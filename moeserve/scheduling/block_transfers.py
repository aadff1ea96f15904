"""The transfers of one replica in flight: which blocks they read and write, and who waits for them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from moeserve.protocol import (
    BlockTransfer,
    CancelReceive,
    KeepBlocks,
    PeerBlocks,
    ReceiveBlocks,
    RequestUpdate,
    Transfer,
    TransferOutcome,
)
from moeserve.scheduling.block_pool import BlockPool, tokens_digest
from moeserve.scheduling.kv_connector import KVConnector
from moeserve.scheduling.load_rates import LoadRates
from moeserve.scheduling.request import LiveRequest


@dataclass(frozen=True)
class _InFlight:
    kind: Literal["save", "load", "keep", "receive", "cancel"]
    block_ids: list[int]
    digests: list[bytes]  # of blocks that are saved, loaded or received
    request: LiveRequest | None = None  # that waits for the end
    handle: str = ""  # of blocks that are received


class BlockTransfers:
    """Copies of blocks beside the steps, to and from the store behind the cache, and between engines.

    Blocks that were computed are saved, and those that a waiting request begins with are loaded. Another engine may
    compute a prompt: it keeps the prompt's blocks until this one has received them.

    A block of a transfer in flight has a holder, so it is not given to others.
    """

    def __init__(self, connector: KVConnector, pool: BlockPool, block_size: int, addresses: Sequence[str] = ()) -> None:
        """
        Args:
            block_size: tokens.
            addresses: where other engines can read blocks of each rank of this replica; none: they cannot.
        """
        self._connector, self._pool, self._addresses = connector, pool, list(addresses)
        self._computed: dict[bytes, int] = {}  # blocks to be saved, unless they are evicted before
        self._new: list[Transfer] = []
        self._in_flight: dict[int, _InFlight] = {}
        self._is_saving = False
        self._block_size = block_size
        self._rates = LoadRates(block_size)
        self._num_begun = 0
        self.num_loaded_blocks = self.num_saved_blocks = self.num_failed_blocks = 0

    @property
    def has_peers(self) -> bool:
        """True if blocks can be read from other engines, and by them."""
        return bool(self._addresses)

    @property
    def are_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def hold_blocks_alone(self) -> bool:
        """True if a save or a load in flight is the only holder of a block, which is free soon."""
        transfers = [each for each in self._in_flight.values() if each.kind in ("save", "load")]
        return any(self._pool.num_holders(block) == 1 for transfer in transfers for block in transfer.block_ids)

    def note_computed(self, digest: bytes, block_id: int) -> None:
        """Let the next save include a block."""
        self._computed[digest] = block_id

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a step with this many tokens."""
        self._rates.note_step(num_tokens, seconds)

    def num_loadable(self, digests: Sequence[bytes]) -> int:
        """Return how many of these consecutive blocks to load, from the first on. 0 if computing them is faster."""
        num_blocks = self._connector.get_num_new_matched_blocks(digests)
        return num_blocks if num_blocks and self._rates.pays() else 0

    def load(self, request: LiveRequest, digests: list[bytes], block_ids: list[int]) -> None:
        """Load blocks of a request that waits for them.

        Args:
            block_ids: of the cache, allocated for these blocks.
        """
        transfer = BlockTransfer(
            number=self._num_begun, is_load=True, block_ids=block_ids, store_keys=self._connector.begin_load(digests)
        )
        self._begin(transfer, _InFlight("load", block_ids, digests, request))

    def keep(self, request: LiveRequest, update: RequestUpdate) -> RequestUpdate:
        """Keep the full blocks of the prompt of a request that ends, for another engine.

        Nothing is kept if half of the cache is kept already: others must be able to run.

        Returns:
            Its last update, with `kv_blocks` if they are kept.
        """
        num_blocks = request.num_prompt_tokens // self._block_size
        num_kept = sum(len(each.block_ids) for each in self._in_flight.values() if each.kind == "keep")
        if not self.has_peers or not num_blocks or num_kept + num_blocks > self._pool.num_blocks // 2:
            return update
        handle, block_ids = request.request.kv_handle, request.block_ids[:num_blocks]
        self._pool.share(block_ids)
        keep = KeepBlocks(
            number=self._num_begun,
            handle=handle,
            tokens=tokens_digest(request.token_ids[: num_blocks * self._block_size]),
            block_ids=block_ids,
        )
        self._begin(keep, _InFlight("keep", block_ids, []))
        source = PeerBlocks(handle=handle, addresses=self._addresses, num_blocks=num_blocks)
        return msgspec.structs.replace(update, kv_blocks=source)

    def is_receiving(self, handle: str) -> bool:
        """True while blocks with this handle are on their way."""
        return any(each.block_ids and each.handle == handle for each in self._in_flight.values())

    def receive(self, request: LiveRequest, first: int, digests: list[bytes], block_ids: list[int]) -> None:
        """Read blocks of a request's `kv_source`, and set all of them free there. The source is used only once.

        Args:
            first: of the source's blocks that is read.
            digests: of the blocks that are read. None: the source is only set free, and the request does not wait.
            block_ids: of the cache, allocated for these blocks.
        """
        source, request.kv_source = request.kv_source, None
        assert source is not None
        receive = ReceiveBlocks(
            number=self._num_begun,
            receiver=secrets.token_hex(8),
            source=source,
            tokens=tokens_digest(request.token_ids[: source.num_blocks * self._block_size]),
            first=first,
            block_ids=block_ids,
        )
        self._begin(receive, _InFlight("receive", block_ids, digests, request if digests else None, source.handle))

    def cancel_receive(self, handle: str) -> None:
        """End the transfer of blocks with this handle early, if the request that waits for it has ended."""
        for number, each in list(self._in_flight.items()):
            if each.handle == handle and each.request is not None and each.request.ended:
                self._begin(CancelReceive(number=self._num_begun, receive=number), _InFlight("cancel", [], []))

    def take_new(self) -> list[Transfer]:
        """Return the transfers that begin now. One save at a time takes all blocks that were computed meanwhile."""
        if self._computed and not self._is_saving:
            computed, self._computed = self._computed, {}
            kept = {digest: block for digest, block in computed.items() if self._pool.find(digest) == block}
            keys = self._connector.begin_save(list(kept))
            if keys:
                self._is_saving = True
                block_ids = [kept[digest] for digest in keys]
                self._pool.share(block_ids)
                transfer = BlockTransfer(
                    number=self._num_begun, is_load=False, block_ids=block_ids, store_keys=list(keys.values())
                )
                self._begin(transfer, _InFlight("save", block_ids, list(keys)))
        new, self._new = self._new, []
        return new

    def end(self, outcome: TransferOutcome) -> LiveRequest | None:
        """End a transfer. Blocks that were loaded or received can be found in the pool from now on.

        Returns:
            The request that waited for it, if one did.
        """
        transfer, num_copied = self._in_flight.pop(outcome.number), outcome.num_copied
        if transfer.request is None or not transfer.request.ended:  # else it may have been cancelled
            self.num_failed_blocks += len(transfer.block_ids) - num_copied
        match transfer.kind:
            case "save":
                self._is_saving = False
                self._connector.end_save(transfer.digests, num_copied)
                self.num_saved_blocks += num_copied
            case "load":
                self._connector.end_load(transfer.digests, num_copied)
                self._rates.note_load(num_copied, outcome.seconds)
        if transfer.kind in ("load", "receive"):
            self.num_loaded_blocks += num_copied
            for digest, block_id in list(zip(transfer.digests, transfer.block_ids, strict=True))[:num_copied]:
                self._pool.register(block_id, digest)
        else:
            self._pool.release(transfer.block_ids)
        return transfer.request

    def _begin(self, message: Transfer, transfer: _InFlight) -> None:
        self._in_flight[message.number] = transfer
        self._new.append(message)
        self._num_begun += 1

    def held_blocks(self) -> list[int]:
        """Return the blocks that transfers hold, with the cached prefixes of requests that wait for loads."""
        held: list[int] = []
        for each in self._in_flight.values():
            held += each.block_ids if each.request is None else each.request.block_ids
        return held
