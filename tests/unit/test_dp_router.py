"""Which replica is chosen for a request, by numbers alone."""

from __future__ import annotations

import random

import pytest

from moeserve.protocol import Request
from moeserve.sampling_params import SamplingParams
from moeserve.scheduling.dp_router import Candidate, DPRouter, PrefixMemory, choose_replica, prompt_digests


def candidate(free: int = 100, requests: int = 0, waiting: int = 0, cached: int = 0) -> Candidate:
    return Candidate(num_free_blocks=free, num_requests=requests, num_blocks_waiting=waiting, num_cached_blocks=cached)


def request(token_ids: list[int], cache_salt: str = "") -> Request:
    return Request(request_id="0", prompt_token_ids=token_ids, params=SamplingParams(), seed=0, cache_salt=cache_salt)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([candidate()], 0),
        ([candidate(), candidate(), candidate()], 0),
        ([candidate(requests=3), candidate(requests=2), candidate(requests=4)], 1),
        ([candidate(waiting=9), candidate(waiting=8)], 1),
        # the prefix of 6 blocks is worth 5 requests more, but not 7
        ([candidate(requests=1), candidate(requests=6, cached=6)], 1),
        ([candidate(requests=1), candidate(requests=8, cached=6)], 0),
        # no room for 10 blocks, or only before those come that wait
        ([candidate(free=9), candidate(requests=50, free=10)], 1),
        ([candidate(free=15, waiting=6), candidate(requests=50, free=10)], 1),
        ([candidate(free=4, cached=6), candidate(requests=50, free=9)], 0),
        # no room anywhere
        ([candidate(free=0, requests=2), candidate(free=1, requests=1)], 1),
    ],
)
def test_the_choice(candidates: list[Candidate], chosen: int) -> None:
    assert choose_replica(candidates, 10) == chosen


def test_equal_requests_are_spread_evenly() -> None:
    counts = [0, 0, 0]
    for _ in range(30):
        counts[choose_replica([candidate(requests=count, waiting=count) for count in counts], 1)] += 1
    assert counts == [10, 10, 10]


def test_prompts_share_digests_as_far_as_they_are_equal() -> None:
    def digests(token_ids: list[int], cache_salt: str = "", salt: bytes = b"s") -> list[bytes]:
        return prompt_digests(request(token_ids, cache_salt), 4, salt)

    first = digests(list(range(11)))
    assert len(first) == 2
    assert digests([*range(8), 1, 2, 3, 4])[:2] == first
    assert digests([*range(7), 9])[:1] == first[:1]
    assert digests([*range(7), 9])[1] != first[1]
    assert digests([9, *range(1, 11)])[1] != first[1]  # all that came before counts
    assert not set(digests(list(range(11)), "tenant")) & set(first)
    assert not set(digests(list(range(11)), salt=b"other")) & set(first)
    assert digests([1, 2, 3]) == []


def test_a_memory_knows_what_it_was_told_last() -> None:
    """Against a plain list of what was told, newest first, over random prompts that share beginnings."""
    generator = random.Random(0)
    memory, told = PrefixMemory(8), []
    for _ in range(300):
        prompt = [generator.randrange(2) for _ in range(generator.randrange(1, 6))]
        digests = [bytes(prompt[: end + 1]) for end in range(len(prompt))]
        known = 0
        while known < len(digests) and digests[known] in told:
            known += 1
        assert memory.num_known(digests) == known
        memory.remember(digests)
        told = (digests + [digest for digest in told if digest not in digests])[:8]


def chooser(num_replicas: int, num_blocks: int = 100, finds_prefixes: bool = True) -> DPRouter:
    return DPRouter(num_replicas, num_blocks, 4, finds_prefixes=finds_prefixes, salt=b"s")


def named(name: str, token_ids: list[int]) -> Request:
    return Request(request_id=name, prompt_token_ids=token_ids, params=SamplingParams(), seed=0)


def test_books_follow_what_was_sent_and_what_was_told() -> None:
    books = chooser(2)
    assert books.choose(named("long", list(range(40)))) == 0  # 10 blocks wait
    assert [books.choose(named(f"short{number}", [number] * 8)) for number in range(100, 103)] == [1, 1, 1]
    books.note_news("long", has_ended=False)  # its prompt is computed: one request against three
    assert books.choose(named("next", [7] * 8)) == 0
    books.note_news("long", has_ended=False)  # more of its tokens change nothing
    for number in range(100, 103):
        books.note_news(f"short{number}", has_ended=True)
    assert books.choose(named("last", [8] * 8)) == 1
    books.note_free_blocks(1, 1)  # less than a prompt of two blocks takes
    assert books.choose(named("elsewhere", [9] * 8)) == 0
    assert books.num_used == 2


def test_a_prompt_goes_where_its_beginning_went_before() -> None:
    beginning = list(range(32))
    for finds_prefixes, then in ((True, 0), (False, 1)):
        books = chooser(2, finds_prefixes=finds_prefixes)
        assert books.choose(named("first", beginning)) == 0
        books.note_news("first", has_ended=False)
        assert books.choose(named("second", [*beginning, 1, 2, 3, 4])) == then
