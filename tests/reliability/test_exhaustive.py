"""Two and three replicas, a few rounds, at most one fault, in every order."""

from __future__ import annotations

import planted_bugs as bugs
import pytest
from exhaustive_search import Explored, Found, Script, explore

from moeserve.protocol import AbortRequest, AddRequest, CollectLoad, ReplicaMessage, Request, Shutdown, Wake
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.replica import Replica

# Bugs of a replica or scheduler that show within a few rounds. Agreements are left to the simulator.
FOUND_BY_SEARCH = [bug for bug in bugs.PLANTED if bug.agree_as is None]


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
    "abort": [[add("a", 2), AbortRequest("a")], [add("b", 1, 1)]],
    "collect": [[add("a", 2, 1), CollectLoad()], [Wake()]],
    "shutdown": [[add("a", 2), Shutdown()], [Shutdown()], [add("refused", 0), Shutdown()]],
}


def explored(script: str, max_sent: int, *, max_rounds: int = 2, plans_ahead: bool = True) -> Explored:
    return explore(SCRIPTS[script], Replica, max_sent=max_sent, max_rounds=max_rounds, plans_ahead=plans_ahead)


@pytest.mark.parametrize(("max_rounds", "plans_ahead"), [(2, True), (2, False), (1, True)])
@pytest.mark.parametrize("script", list(SCRIPTS))
def test_every_order(script: str, max_rounds: int, plans_ahead: bool) -> None:
    found = explored(script, 4, max_rounds=max_rounds, plans_ahead=plans_ahead)
    assert found.num_ends > 0 or script != "shutdown"  # the others do not shut down
    assert found.faults.keys() >= {"none", "internal", "row"}


@pytest.mark.parametrize("bug", FOUND_BY_SEARCH, ids=[bug.name for bug in FOUND_BY_SEARCH])
def test_planted_bug_is_found(bug: bugs.Planted) -> None:
    with pytest.raises(Found):
        for script in SCRIPTS.values():
            explore(script, bug.make_replica, max_sent=3)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("script", list(SCRIPTS))
def test_more_rounds(script: str) -> None:
    assert explored(script, 6).num_states > 0
