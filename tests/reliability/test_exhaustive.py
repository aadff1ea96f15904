"""Three replicas, three steps, at most one fault, in every order."""

from __future__ import annotations

import planted_bugs as bugs
import pytest
from exhaustive_search import Explored, Found, Script, explore

from moeserve.protocol import AbortRequest, AddRequest, CollectLoad, ReplicaMessage, Request, Shutdown, Wake
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.lockstep import Lockstep
from moeserve.scheduling.replica import Replica


def add(request_id: str, num_prompt_tokens: int, max_tokens: int = 2) -> ReplicaMessage:
    request = Request(
        request_id=request_id,
        prompt_token_ids=list(range(num_prompt_tokens)),
        params=RequestParams(max_tokens=max_tokens),
        seed=1,
    )
    return AddRequest(request)


# The messages on their way to each replica.
SCRIPTS: dict[str, Script] = {
    "one busy": [[add("a", 6)], [Wake()], [Wake()]],  # three steps: two for its prompt
    "abort": [[add("a", 2), AbortRequest("a")], [add("b", 1, 1)], [Wake()]],
    "collect": [[add("a", 2, 1), CollectLoad()], [Wake()], [Wake()]],
    "shutdown": [[add("a", 2), Shutdown()], [Shutdown()], [add("refused", 0), Shutdown()]],
}


def explored(script: str, max_steps: int, max_idle_rounds: int, *, is_reduced: bool = True) -> Explored:
    result = explore(
        SCRIPTS[script],
        bugs.maker(Replica),
        max_steps=max_steps,
        max_idle_rounds=max_idle_rounds,
        is_reduced=is_reduced,
    )
    print(f"{script}: {result}")
    return result


def test_three_steps() -> None:
    result = explored("one busy", 3, 1)
    assert result.num_states == 162_657
    assert set(result.faults) == {"none", "kill", "raise", "local", "internal", "drop"}


@pytest.mark.parametrize(("script", "max_steps", "num_states"), [("abort", 2, 81_279), ("shutdown", 1, 46_625)])
def test_fewer_steps(script: str, max_steps: int, num_states: int) -> None:
    assert explored(script, max_steps, 0).num_states == num_states


def test_reduction_loses_no_end() -> None:
    full, reduced = (explored("one busy", 1, 0, is_reduced=is_reduced) for is_reduced in (False, True))
    assert full.num_states > reduced.num_states
    assert full.num_ends == reduced.num_ends > 0


@pytest.mark.parametrize(
    ("part", "script", "invariant"),
    [(bug.part, bug.script, bug.found_as) for bug in bugs.PLANTED if bug.script is not None],
    ids=[bug.part.__name__ for bug in bugs.PLANTED if bug.script is not None],
)
def test_planted_bug_is_found(part: type[Replica] | type[Lockstep], script: str, invariant: str) -> None:
    with pytest.raises(Found) as found:
        explore(SCRIPTS[script], bugs.maker(part), max_steps=1, max_idle_rounds=1, is_reduced=True)
    assert found.value.invariant == invariant


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("script", list(SCRIPTS))
@pytest.mark.parametrize(("max_idle_rounds", "is_reduced"), [(1, False), (2, True)])
def test_three_steps_of_each(script: str, max_idle_rounds: int, is_reduced: bool) -> None:
    assert explored(script, 3, max_idle_rounds, is_reduced=is_reduced).num_ends > 0
