"""The dp router, which chooses the replica for a request by load and by cached prefixes."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.kv.pool import block_digests, num_blocks_for, root_digest
from moeserve.protocol import Request


class PrefixIndex:
    """An LRU index of the prompt blocks that were sent to each replica.

    A set of replicas is an integer whose bit i represents replica i, so that a prompt is compared with hundreds of
    replicas in one pass over its blocks.
    """

    def __init__(self, num_replicas: int, max_blocks: int) -> None:
        """
        Args:
            max_blocks: maximum number of blocks remembered for each replica.
        """
        self._max_blocks = max_blocks
        self._recent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._holders: dict[bytes, int] = {}  # set of replicas

    def known(self, digests: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return pairs: a number of blocks, and the set of replicas that have this many of the prompt's first blocks.

        Numbers are in descending order. Replicas without any of the blocks are in no set.
        """
        levels = []
        remaining = (1 << len(self._recent)) - 1
        for index, digest in enumerate(digests):
            still_known = remaining & self._holders.get(digest, 0)
            if index and remaining != still_known:
                levels.append((index, remaining & ~still_known))
            remaining = still_known
            if not remaining:
                return levels[::-1]
        return [(len(digests), remaining), *levels[::-1]] if digests else []

    def of(self, replica: int) -> list[bytes]:
        """Return the blocks of a replica, the most recently used first."""
        return [*reversed(self._recent[replica])]

    def remember(self, replica: int, digests: Sequence[bytes]) -> None:
        """Add a prompt. Its tail is evicted first, because the tail could not be found without the head."""
        recent, bit = self._recent[replica], 1 << replica
        for digest in reversed(digests):
            recent[digest] = None
            recent.move_to_end(digest)
            self._holders[digest] = self._holders.get(digest, 0) | bit
        while len(recent) > self._max_blocks:
            digest, _ = recent.popitem(last=False)
            self._holders[digest] &= ~bit
            if not self._holders[digest]:
                del self._holders[digest]


class DPRouter:
    """The choice of a replica for each request, from the state of all replicas.

    Replicas with room for the prompt are preferred. Among them, the replica with the least work is chosen. Work is the
    number of prompt blocks to compute, including this prompt's, plus one for each decoding request. Ties go to the
    lowest index.
    """

    def __init__(
        self, num_replicas: int, num_blocks: int, block_size: int, *, enable_prefix_caching: bool, salt: bytes
    ) -> None:
        """
        Args:
            num_blocks: KV cache blocks of each replica.
            salt: secret that is mixed into the digests of prompts, so that a client cannot construct a collision.
        """
        self._num_blocks, self._block_size, self._enable_prefix_caching = num_blocks, block_size, enable_prefix_caching
        self._compares_prefixes = enable_prefix_caching and num_replicas > 1
        self._salt = salt
        self._states = [_ReplicaState(num_blocks) for _ in range(num_replicas)]
        self._by_load = [(0, index) for index in range(num_replicas)]  # sorted
        self._prefixes = PrefixIndex(num_replicas, num_blocks)
        self._used: set[int] = set()
        self._sent: dict[str, _SentRequest] = {}

    def restarted(self, kept: Sequence[int | None]) -> DPRouter:
        """Return a router without requests, for replicas that start again.

        Args:
            kept: for each replica, the old index of the replica whose prefix cache it has; None: its cache is empty.
        """
        router = DPRouter(
            len(kept),
            self._num_blocks,
            self._block_size,
            enable_prefix_caching=self._enable_prefix_caching,
            salt=self._salt,
        )
        for index, before in enumerate(kept):
            if before is not None:
                router._prefixes.remember(index, self._prefixes.of(before))
        return router

    @property
    def num_used(self) -> int:
        """Number of replicas that have been chosen at least once."""
        return len(self._used)

    def choose(self, request: Request) -> int:
        """Return the index of the replica for a request. The caller must then send the request to this replica."""
        return self.choose_each(request, [request.request_id])[0]

    def choose_each(self, request: Request, request_ids: Sequence[str]) -> list[int]:
        """Return the index of a replica for each of several requests with the same prompt.

        Args:
            request: one of these requests.
        """
        num_blocks = num_blocks_for(len(request.prompt_token_ids), self._block_size)
        digests: list[bytes] = []
        if self._compares_prefixes:
            root = root_digest(self._salt, request.cache_salt)
            digests = block_digests(root, request.prompt_token_ids, self._block_size)
        return [self._choose(request_id, num_blocks, digests) for request_id in request_ids]

    def note_free_blocks(self, index: int, num_free_blocks: int) -> None:
        """Record the number of free blocks that a replica reported."""
        self._states[index].num_free_blocks = num_free_blocks

    def note_update(self, request_id: str, *, has_ended: bool) -> None:
        """Record an update of a request: its prompt has been computed, or it has ended."""
        sent = self._sent[request_id]
        if sent.num_blocks_waiting or has_ended:
            self._change(sent.index, -sent.num_blocks_waiting, -int(has_ended))
        sent.num_blocks_waiting = 0
        if has_ended:
            del self._sent[request_id]

    def _choose(self, request_id: str, num_blocks: int, digests: Sequence[bytes]) -> int:
        chosen, num_known = self._cheapest(num_blocks, self._prefixes.known(digests))
        self._prefixes.remember(chosen, digests)
        self._change(chosen, num_blocks - num_known, 1)
        self._sent[request_id] = _SentRequest(chosen, num_blocks - num_known)
        self._used.add(chosen)
        return chosen

    def _cheapest(self, num_blocks: int, levels: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Return the best replica, and the number of the prompt's blocks that it has.

        Replicas are visited in the order of ascending load, until no other replica can be better.
        """
        most_known = levels[0][0] if levels else 0
        best: tuple[bool, int, int, int] | None = None  # is full, work, index, known blocks
        for load, index in self._by_load:
            if best is not None and not best[0] and best[1:3] < (load + num_blocks - most_known, index):
                break
            num_known = next((known for known, replicas in levels if replicas >> index & 1), 0)
            state, num_to_compute = self._states[index], num_blocks - num_known
            is_full = num_to_compute > state.num_free_blocks - state.num_blocks_waiting
            found = is_full, load + num_to_compute, index, num_known
            best = found if best is None else min(best, found)
        assert best is not None
        return best[2], best[3]

    def _change(self, index: int, num_blocks: int, num_requests: int) -> None:
        """Add to the work of a replica."""
        state = self._states[index]
        del self._by_load[bisect.bisect_left(self._by_load, (state.load, index))]
        state.num_blocks_waiting += num_blocks
        state.num_requests += num_requests
        bisect.insort(self._by_load, (state.load, index))


@dataclass(eq=False)
class _ReplicaState:
    num_free_blocks: int  # blocks that no request holds
    num_requests: int = 0  # requests sent to the replica that have not ended
    num_blocks_waiting: int = 0  # blocks of prompts sent to the replica that have no first token yet

    @property
    def load(self) -> int:
        return self.num_requests + self.num_blocks_waiting


@dataclass(eq=False)
class _SentRequest:
    """A request that was sent to a replica and has not ended."""

    index: int  # index of the request's replica
    num_blocks_waiting: int  # blocks of the prompt; 0 after the request's first update
