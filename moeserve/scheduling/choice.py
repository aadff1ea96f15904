"""Which replica serves a request: a choice by numbers. Knows no process and no message."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.messages import Request
from moeserve.scheduling.block_pool import block_digest, root_digest


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
    digests, digest = [], root_digest(salt, request.cache_salt)
    token_ids = request.prompt_token_ids
    for end in range(block_size, len(token_ids) + 1, block_size):
        digest = block_digest(digest, token_ids[end - block_size : end])
        digests.append(digest)
    return digests


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
