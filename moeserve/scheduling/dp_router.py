"""Which replica serves a request: a choice by what is known of each. Knows no process and no message."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.protocol import Request
from moeserve.scheduling.block_pool import block_digests, num_blocks_for, root_digest


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """How a replica stands, in blocks of KV cache, as the chooser last knew it."""

    num_free_blocks: int  # held by no request
    num_requests: int  # sent to it, and not ended
    num_blocks_waiting: int  # of prompts sent to it whose first token has not come
    num_cached_blocks: int  # of this prompt's first ones, that it was sent before


def choose_replica(candidates: Sequence[Candidate], num_prompt_blocks: int) -> int:
    """The index of the replica that will probably answer first.

    Those with room for the prompt come first. Among them the one with the least to do: blocks of prompts to compute,
    this one's included, and one for each request, whose tokens it must compute beside them. Equals: the first.
    """

    def cost(index: int) -> tuple[bool, int, int]:
        candidate = candidates[index]
        num_to_compute = num_prompt_blocks - candidate.num_cached_blocks
        is_full = num_to_compute > candidate.num_free_blocks - candidate.num_blocks_waiting
        return is_full, num_to_compute + candidate.num_blocks_waiting + candidate.num_requests, index

    return min(range(len(candidates)), key=cost)


def prompt_digests(request: Request, block_size: int, salt: bytes) -> list[bytes]:
    """One digest for each full block that a prompt begins with, over all up to it. Cache salts keep apart."""
    return block_digests(root_digest(salt, request.cache_salt), request.prompt_token_ids, block_size)


class PrefixMemory:
    """The blocks of prompts that a replica was sent, the least recent forgotten first."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def num_known(self, digests: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks it remembers."""
        for index, digest in enumerate(digests):
            if digest not in self._digests:
                return index
        return len(digests)

    def remember(self, digests: Sequence[bytes]) -> None:
        """Takes in a prompt. Its tail is forgotten before its head, without which it could not be found."""
        for digest in reversed(digests):
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._max_blocks:
            self._digests.popitem(last=False)


class DPRouter:
    """Chooses a replica for each request, and keeps the books that the choice is made by.

    It learns of requests that it chose a replica for, and of blocks that a replica tells of; of nothing else.
    """

    def __init__(
        self, num_replicas: int, num_blocks: int, block_size: int, *, finds_prefixes: bool, salt: bytes
    ) -> None:
        """
        Args:
            num_blocks: of KV cache, of each replica.
            finds_prefixes: whether replicas have prefix caches.
            salt: of the digests by which prompts are remembered, so that nobody can make two alike.
        """
        self._block_size = block_size
        self._finds_prefixes = finds_prefixes and num_replicas > 1
        self._salt = salt
        self._books = [_Book(num_blocks, PrefixMemory(num_blocks)) for _ in range(num_replicas)]
        self._candidates = [book.candidate() for book in self._books]
        self._outdated: set[int] = set()  # of these
        self._used: dict[int, None] = {}
        self._sent: dict[str, _Sent] = {}

    @property
    def num_used(self) -> int:
        """Replicas that were ever chosen."""
        return len(self._used)

    def choose(self, request: Request) -> int:
        """The number of a replica, to which the request is taken to be sent now."""
        for index in self._outdated:
            self._candidates[index] = self._books[index].candidate()
        self._outdated.clear()
        num_blocks = num_blocks_for(len(request.prompt_token_ids), self._block_size)
        candidates = self._candidates
        digests: list[bytes] = []
        if self._finds_prefixes:
            digests = prompt_digests(request, self._block_size, self._salt)
            candidates = candidates.copy()
            for index in self._used:
                if num_cached_blocks := self._books[index].memory.num_known(digests):
                    candidates[index] = self._books[index].candidate(num_cached_blocks)
        chosen = choose_replica(candidates, num_blocks)
        book, num_waiting = self._books[chosen], num_blocks - candidates[chosen].num_cached_blocks
        book.memory.remember(digests)
        book.num_requests += 1
        book.num_blocks_waiting += num_waiting
        self._sent[request.request_id] = _Sent(chosen, num_waiting)
        self._used[chosen] = None
        self._outdated.add(chosen)
        return chosen

    def note_free_blocks(self, index: int, num_free_blocks: int) -> None:
        """What a replica says of itself."""
        self._books[index].num_free_blocks = num_free_blocks
        self._outdated.add(index)

    def note_news(self, request_id: str, *, has_ended: bool) -> None:
        """There was something to tell of a request: its prompt waits no more."""
        sent = self._sent[request_id]
        book = self._books[sent.index]
        book.num_blocks_waiting -= sent.num_blocks_waiting
        sent.num_blocks_waiting = 0
        if has_ended:
            book.num_requests -= 1
            del self._sent[request_id]
        self._outdated.add(sent.index)


@dataclass(eq=False)
class _Book:
    """A replica as the chooser last knew it."""

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
class _Sent:
    """A request that has not ended."""

    index: int  # of its replica
    num_blocks_waiting: int  # of its prompt; 0 once there was news of it
