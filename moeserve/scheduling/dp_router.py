"""Chooses the replica that serves a request, by load and by cached prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.protocol import Request
from moeserve.scheduling.block_pool import block_digests, num_blocks_for, root_digest


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The known state of a replica, in blocks of KV cache."""

    num_free_blocks: int  # held by no request
    num_requests: int  # sent to it, and not ended
    num_blocks_waiting: int  # of prompts sent to it whose first token has not come
    num_cached_blocks: int  # of this prompt's first blocks that were sent to it before


def choose_replica(candidates: Sequence[Candidate], num_prompt_blocks: int) -> int:
    """Return the index of the replica that will probably answer first.

    Replicas with room for the prompt come first. Among them the one with the least work wins: blocks of prompts to
    compute, this one's included, plus one for each request that decodes beside them. Ties go to the lowest index.
    """

    def cost(index: int) -> tuple[bool, int, int]:
        candidate = candidates[index]
        num_to_compute = num_prompt_blocks - candidate.num_cached_blocks
        is_full = num_to_compute > candidate.num_free_blocks - candidate.num_blocks_waiting
        return is_full, num_to_compute + candidate.num_blocks_waiting + candidate.num_requests, index

    return min(range(len(candidates)), key=cost)


class PrefixMemory:
    """The blocks of prompts that were sent to a replica, evicted least recently used first."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def num_known(self, digests: Sequence[bytes]) -> int:
        """Return how many of a prompt's first blocks are remembered."""
        for index, digest in enumerate(digests):
            if digest not in self._digests:
                return index
        return len(digests)

    def remember(self, digests: Sequence[bytes]) -> None:
        """Add a prompt. Its tail is evicted before its head, without which the tail could not be found."""
        for digest in reversed(digests):
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._max_blocks:
            self._digests.popitem(last=False)


class DPRouter:
    """Chooses a replica for each request, and keeps the state of all replicas that the choice needs."""

    def __init__(
        self, num_replicas: int, num_blocks: int, block_size: int, *, enable_prefix_caching: bool, salt: bytes
    ) -> None:
        """
        Args:
            num_blocks: of KV cache, of each replica.
            salt: secret, mixed into the digests of prompts so that a client cannot construct a collision.
        """
        self._block_size = block_size
        self._compares_prefixes = enable_prefix_caching and num_replicas > 1
        self._salt = salt
        self._states = [_ReplicaState(num_blocks, PrefixMemory(num_blocks)) for _ in range(num_replicas)]
        self._candidates = [state.candidate() for state in self._states]
        self._outdated: set[int] = set()  # indices of candidates
        self._used: dict[int, None] = {}
        self._sent: dict[str, _SentRequest] = {}

    @property
    def num_used(self) -> int:
        """Number of replicas that were ever chosen."""
        return len(self._used)

    def choose(self, request: Request) -> int:
        """Return the index of a replica. The caller must then send the request to it."""
        for index in self._outdated:
            self._candidates[index] = self._states[index].candidate()
        self._outdated.clear()
        num_blocks = num_blocks_for(len(request.prompt_token_ids), self._block_size)
        candidates = self._candidates
        digests: list[bytes] = []
        if self._compares_prefixes:
            root = root_digest(self._salt, request.cache_salt)
            digests = block_digests(root, request.prompt_token_ids, self._block_size)
            candidates = candidates.copy()
            for index in self._used:
                if num_cached_blocks := self._states[index].memory.num_known(digests):
                    candidates[index] = self._states[index].candidate(num_cached_blocks)
        chosen = choose_replica(candidates, num_blocks)
        state, num_waiting = self._states[chosen], num_blocks - candidates[chosen].num_cached_blocks
        state.memory.remember(digests)
        state.num_requests += 1
        state.num_blocks_waiting += num_waiting
        self._sent[request.request_id] = _SentRequest(chosen, num_waiting)
        self._used[chosen] = None
        self._outdated.add(chosen)
        return chosen

    def note_free_blocks(self, index: int, num_free_blocks: int) -> None:
        """Record the number of free blocks that a replica reported."""
        self._states[index].num_free_blocks = num_free_blocks
        self._outdated.add(index)

    def note_update(self, request_id: str, *, has_ended: bool) -> None:
        """Record an update of a request: its prompt has been computed, or it has ended."""
        sent = self._sent[request_id]
        state = self._states[sent.index]
        state.num_blocks_waiting -= sent.num_blocks_waiting
        sent.num_blocks_waiting = 0
        if has_ended:
            state.num_requests -= 1
            del self._sent[request_id]
        self._outdated.add(sent.index)


@dataclass(eq=False)
class _ReplicaState:
    num_free_blocks: int
    memory: PrefixMemory  # of its prefix cache
    num_requests: int = 0
    num_blocks_waiting: int = 0

    def candidate(self, num_cached_blocks: int = 0) -> Candidate:
        return Candidate(
            num_free_blocks=self.num_free_blocks,
            num_requests=self.num_requests,
            num_blocks_waiting=self.num_blocks_waiting,
            num_cached_blocks=num_cached_blocks,
        )


@dataclass(eq=False)
class _SentRequest:
    """A request that has not ended."""

    index: int  # of its replica
    num_blocks_waiting: int  # of its prompt; 0 after its first update
