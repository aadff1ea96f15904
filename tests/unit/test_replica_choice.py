"""The choice of a replica for a request."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from moeserve.protocol import Request
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.replica_choice import DPRouter

BLOCK_SIZE = 4
NUM_BLOCKS = 30  # of each replica


def request(name: str, token_ids: list[int], cache_salt: str = "") -> Request:
    return Request(request_id=name, prompt_token_ids=token_ids, params=RequestParams(), seed=0, cache_salt=cache_salt)


def router(num_replicas: int, *, enable_prefix_caching: bool = True) -> DPRouter:
    return DPRouter(num_replicas, NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching, salt=b"s")


@dataclass(eq=False)
class PlainReplica:
    """The state of a replica as a router knows it, without any index."""

    num_free_blocks: int = NUM_BLOCKS
    waiting: dict[str, int] = field(default_factory=dict)  # blocks to compute before the first token, by live request
    recent: list[tuple[str, ...]] = field(default_factory=list)  # prefixes of whole blocks, most recent first

    def num_cached(self, prefixes: list[tuple[str, ...]]) -> int:
        return next((index for index, each in enumerate(prefixes) if each not in self.recent), len(prefixes))

    def cost(self, prefixes: list[tuple[str, ...]], num_blocks: int) -> tuple[bool, int]:
        num_to_compute = num_blocks - self.num_cached(prefixes)
        num_waiting = sum(self.waiting.values())
        is_full = num_to_compute > self.num_free_blocks - num_waiting
        return is_full, num_to_compute + num_waiting + len(self.waiting)

    def send(self, name: str, prefixes: list[tuple[str, ...]], num_blocks: int) -> None:
        self.waiting[name] = num_blocks - self.num_cached(prefixes)
        self.recent = (prefixes + [each for each in self.recent if each not in prefixes])[:NUM_BLOCKS]


@pytest.mark.parametrize("num_replicas", [1, 2, 5, 20])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_choices_equal_those_of_a_plain_search(num_replicas: int, enable_prefix_caching: bool) -> None:
    """Random prompts with common prefixes, first tokens, ends and reports, against a minimum over all replicas."""
    dice = random.Random(num_replicas)
    state = router(num_replicas, enable_prefix_caching=enable_prefix_caching)
    plain = [PlainReplica() for _ in range(num_replicas)]
    live: dict[str, int] = {}
    used = set()
    for number in range(600):
        draw, name = dice.random(), str(number)
        if draw < 0.5 or not live:
            token_ids = [dice.randrange(2)] * (4 * dice.randrange(5)) + [
                dice.randrange(2) for _ in range(dice.randint(1, 60))
            ]
            salt = dice.choice(["", "tenant"])
            whole = len(token_ids) // BLOCK_SIZE if enable_prefix_caching and num_replicas > 1 else 0
            prefixes = [(salt, *map(str, token_ids[: (end + 1) * BLOCK_SIZE])) for end in range(whole)]
            num_blocks = -(-len(token_ids) // BLOCK_SIZE)
            costs = [(*each.cost(prefixes, num_blocks), index) for index, each in enumerate(plain)]
            live[name] = state.choose(request(name, token_ids, salt))
            assert live[name] == min(costs)[-1]
            plain[live[name]].send(name, prefixes, num_blocks)
            used.add(live[name])
        elif draw < 0.85:
            name = dice.choice(list(live))
            has_ended = dice.random() < 0.7
            state.note_update(name, has_ended=has_ended)
            plain[live[name]].waiting[name] = 0
            if has_ended:
                del plain[live.pop(name)].waiting[name]
        else:
            index, num_free = dice.randrange(num_replicas), dice.randint(0, NUM_BLOCKS)
            state.note_free_blocks(index, num_free)
            plain[index].num_free_blocks = num_free
        assert state.num_used == len(used)


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
