"""Two and three replicas, a few rounds, at most one fault, in every order."""

from __future__ import annotations

import planted_bugs as bugs
import pytest
from exhaustive_search import Found, Script, explore

from moeserve.controls import Control, EndRequests, FinishUpdate, Pause, PauseMode, Resume, StartUpdate
from moeserve.protocol import AbortRequest, AddRequest, CollectLoad, ReplicaMessage, Request, Shutdown, Wake
from moeserve.sampling_params import RequestParams
from moeserve.scheduling.replica import Replica


def add(request_id: str, num_prompt_tokens: int, max_tokens: int = 2) -> ReplicaMessage:
    request = Request(
        request_id=request_id,
        prompt_token_ids=list(range(num_prompt_tokens)),
        params=RequestParams(max_tokens=max_tokens),
        seed=ord(request_id[0]),  # by which the search recognises a row
    )
    return AddRequest(request)


def pause(mode: PauseMode) -> ReplicaMessage:
    return Control(1, Pause(mode=mode, salt=b"new"))


RESUME = Control(2, Resume())
END_REQUESTS = Control(1, EndRequests())
START, FINISH = Control(1, StartUpdate()), Control(2, FinishUpdate(version="new", salt=b"new"))

# The messages on their way to each replica.
SCRIPTS: dict[str, Script] = {
    "alone": [[add("a", 2), add("b", 6), AbortRequest("a"), Shutdown()]],
    "abort": [[add("a", 2), AbortRequest("a")], [add("b", 1, 1), add("c", 1, 1)]],
    "collect": [[add("a", 2, 1), CollectLoad()], [Wake()]],
    "one busy": [[add("a", 6)], [Wake()], [Wake()]],  # three steps: two for its prompt
    "shutdown": [[add("a", 2), Shutdown()], [Shutdown()], [add("refused", 0), Shutdown()]],
    "keep": [[add("a", 2), pause("keep"), RESUME], [pause("keep"), add("b", 1, 1), RESUME]],
    "retract": [[add("a", 2), pause("retract"), RESUME, AbortRequest("a")], [pause("retract"), RESUME]],
    "wait": [[add("a", 2, 1), pause("wait"), add("b", 1, 1)], [pause("wait"), AbortRequest("a")]],
    "update": [[add("a", 2), START, FINISH], [START, FINISH, add("b", 1, 1)]],
    "end": [[add("a", 2), pause("abort"), add("b", 1), AbortRequest("b")], [pause("abort"), Shutdown()]],
    "end requests": [[add("a", 2), END_REQUESTS], [END_REQUESTS, add("b", 1, 1)]],
}
ROUNDS = dict.fromkeys(SCRIPTS, 3) | dict.fromkeys(("alone", "abort", "collect", "one busy"), 4)


@pytest.mark.slow
@pytest.mark.parametrize("script", list(SCRIPTS))
def test_every_order(script: str) -> None:
    found = explore(SCRIPTS[script], Replica, max_sent=ROUNDS[script])
    assert found.num_ends > 0
    assert found.faults.keys() >= {"none", "internal", "row"}
    assert ("step" in found.faults) == (script == "alone")
    assert script != "one busy" or found.most_steps == 3


@pytest.mark.slow
@pytest.mark.parametrize(("max_rounds", "plans_ahead"), [(2, False), (1, True), (3, True)])
@pytest.mark.parametrize("script", list(SCRIPTS))
def test_every_order_of_other_settings(script: str, max_rounds: int, plans_ahead: bool) -> None:
    num_rounds = ROUNDS[script] - 1
    found = explore(SCRIPTS[script], Replica, max_sent=num_rounds, max_rounds=max_rounds, plans_ahead=plans_ahead)
    assert found.num_ends > 0


@pytest.mark.slow
@pytest.mark.parametrize("bug", bugs.PLANTED, ids=[bug.name for bug in bugs.PLANTED])
def test_planted_bug_is_found(bug: bugs.Planted) -> None:
    with pytest.raises(Found):
        explore_all(bug)


def explore_all(bug: bugs.Planted) -> None:
    for num_rounds in (2, 3):
        for script in SCRIPTS.values():
            explore(script, bug.make_replica, bug.agree_as, max_sent=num_rounds)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("script", list(SCRIPTS))
def test_more_rounds(script: str) -> None:
    assert explore(SCRIPTS[script], Replica, max_sent=ROUNDS[script] + 1).num_ends > 0
