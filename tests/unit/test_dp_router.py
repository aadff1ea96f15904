"""The choice of a replica for a request."""

from __future__ import annotations

import random

import pytest

from moeserve.protocol import Request
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.dp_router import Candidate, DPRouter, PrefixMemory, choose_replica


def candidate(free: int = 100, requests: int = 0, waiting: int = 0, cached: int = 0) -> Candidate:
    return Candidate(num_free_blocks=free, num_requests=requests, num_blocks_waiting=waiting, num_cached_blocks=cached)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([candidate(), candidate(), candidate()], 0),
        ([candidate(requests=3), candidate(requests=2), candidate(requests=4)], 1),
        ([candidate(waiting=9), candidate(waiting=8)], 1),
        # the prefix of 6 blocks is worth 5 requests more, but not 7
        ([candidate(requests=1), candidate(requests=6, cached=6)], 1),
        ([candidate(requests=1), candidate(requests=8, cached=6)], 0),
        # no room for 10 blocks, or only without the waiting prompts
        ([candidate(free=9), candidate(requests=50, free=10)], 1),
        ([candidate(free=15, waiting=6), candidate(requests=50, free=10)], 1),
        ([candidate(free=4, cached=6), candidate(requests=50, free=9)], 0),
        # no room anywhere
        ([candidate(free=0, requests=2), candidate(free=1, requests=1)], 1),
    ],
)
def test_choice_of_a_replica(candidates: list[Candidate], chosen: int) -> None:
    assert choose_replica(candidates, 10) == chosen


def test_prefix_memory_equals_a_plain_list() -> None:
    """Random prompts with common prefixes, against a list of digests, most recent first."""
    generator = random.Random(0)
    memory, recent = PrefixMemory(8), []
    for _ in range(300):
        prompt = [generator.randrange(2) for _ in range(generator.randrange(1, 6))]
        digests = [bytes(prompt[: end + 1]) for end in range(len(prompt))]
        known = 0
        while known < len(digests) and digests[known] in recent:
            known += 1
        assert memory.num_known(digests) == known
        memory.remember(digests)
        recent = (digests + [digest for digest in recent if digest not in digests])[:8]


def request(name: str, token_ids: list[int], cache_salt: str = "") -> Request:
    return Request(request_id=name, prompt_token_ids=token_ids, params=RequestParams(), seed=0, cache_salt=cache_salt)


def router(num_replicas: int, *, enable_prefix_caching: bool = True) -> DPRouter:
    return DPRouter(num_replicas, 100, 4, enable_prefix_caching=enable_prefix_caching, salt=b"s")


def test_choices_follow_requests_and_updates() -> None:
    state = router(2)
    assert state.choose(request("long", list(range(40)))) == 0  # 10 blocks wait
    assert [state.choose(request(f"short{number}", [number] * 8)) for number in range(100, 103)] == [1, 1, 1]
    state.note_update("long", has_ended=False)  # its prompt is computed: one request against three
    assert state.choose(request("next", [7] * 8)) == 0
    state.note_update("long", has_ended=False)  # more of its tokens change nothing
    for number in range(100, 103):
        state.note_update(f"short{number}", has_ended=True)
    assert state.choose(request("last", [8] * 8)) == 1
    state.note_free_blocks(1, 1)  # fewer than a prompt of two blocks needs
    assert state.choose(request("elsewhere", [9] * 8)) == 0
    assert state.num_used == 2


@pytest.mark.parametrize(
    ("enable_prefix_caching", "cache_salt", "chosen"), [(True, "tenant", 0), (True, "", 1), (False, "tenant", 1)]
)
def test_a_prompt_follows_its_prefix(enable_prefix_caching: bool, cache_salt: str, chosen: int) -> None:
    prefix = list(range(32))
    state = router(2, enable_prefix_caching=enable_prefix_caching)
    assert state.choose(request("first", prefix, "tenant")) == 0
    state.note_update("first", has_ended=False)
    assert state.choose(request("second", [*prefix, 1, 2, 3, 4], cache_salt)) == chosen
