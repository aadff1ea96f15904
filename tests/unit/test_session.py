"""Sessions: a failure ends only the prompts that it concerns."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import pytest

from moeserve.api.frontend import Frontend
from moeserve.api.session import Session
from moeserve.errors import EngineError
from moeserve.protocol import Request, RequestUpdate
from moeserve.sampling_params import SamplingParams
from moeserve.telemetry.observer import LoadObserver


class Engine:
    """An engine whose steps return updates, or raise errors, that the test has queued."""

    def __init__(self) -> None:
        self.steps: deque[list[RequestUpdate] | Exception] = deque()
        self.aborted: list[str] = []
        self.has_work = True

    def add(self, request: Request) -> None:
        pass

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def wake(self) -> None:
        pass

    def step(self) -> list[RequestUpdate]:
        outcome = self.steps.popleft()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def take_loads(self) -> list[Any]:
        return []


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def session(engine: Engine) -> Session:
    frontend = Frontend(None, vocab_size=10, max_model_len=100, eos_token_ids=[], engine_seed=0)
    return Session(cast(Any, engine), frontend, LoadObserver(None, None))


def submit(session: Session, **params: Any) -> str:
    (prompt_id,) = session.submit([[1]], SamplingParams(**params))
    return prompt_id


def end(prompt_id: str) -> RequestUpdate:
    return RequestUpdate(request_id=prompt_id, token_ids=[2], finish_reason="length")


def test_a_failed_step_leaves_finished_outputs(session: Session, engine: Engine) -> None:
    finished, failed = submit(session), submit(session)
    engine.steps += [[end(finished)], EngineError("disk on fire")]
    assert session.advance([failed, finished]) == [failed]
    assert session.advance([failed, finished]) == []
    with pytest.raises(EngineError, match="disk on fire"):
        session.raise_error([failed])
    session.raise_error([finished])  # nothing
    assert session.output(finished).outputs[0].token_ids == [2]


def test_an_update_that_fails_ends_its_prompt_only(session: Session, engine: Engine) -> None:
    bad, good = submit(session, logprobs=1), submit(session)
    engine.steps.append([end(bad), end(good)])  # the bad one lacks log-probabilities
    engine.has_work = False
    assert session.advance([good]) == []
    assert session.output(good).outputs[0].token_ids == [2]
    assert session.advance([good, bad]) == []
    with pytest.raises(EngineError, match="IndexError") as caught:
        session.raise_error([good, bad])
    assert isinstance(caught.value.__cause__, IndexError)
    session.discard([bad])
    assert engine.aborted == [bad]  # the engine may not have ended it


def test_a_lost_request_is_an_engine_error(session: Session, engine: Engine) -> None:
    lost = submit(session)
    engine.steps.append([])
    engine.has_work = False
    assert session.advance([lost]) == []
    with pytest.raises(EngineError, match=lost):
        session.raise_error([lost])
