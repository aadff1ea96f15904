"""Sessions: a failure ends only the prompts that it concerns."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import pytest

from moeserve.api.frontend import Frontend
from moeserve.api.session import Session
from moeserve.errors import EngineError, QueueFullError, RequestError
from moeserve.protocol import Request, RequestUpdate, Sample
from moeserve.sampling_params import SamplingParams
from moeserve.telemetry.observer import LoadObserver


class Engine:
    """An engine whose steps return updates, or raise errors, that the test has queued."""

    def __init__(self) -> None:
        self.steps: deque[list[RequestUpdate] | Exception] = deque()
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.has_work = True

    def add(self, request: Request, samples: Sequence[Sample] = ()) -> None:
        self.added += [request.request_id, *(sample.request_id for sample in samples)]

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
    return Session(cast(Any, engine), frontend, LoadObserver(None, None), max_requests=lambda: 4)


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


def test_whatever_comes_while_the_engine_runs_is_queued(session: Session, engine: Engine) -> None:
    """A stream that is garbage-collected in the middle of a step changes nothing in the engine until the step ends."""
    kept, collected = submit(session), submit(session)
    aborted_in_step = []

    def step() -> list[RequestUpdate]:
        session.discard([collected])
        submit(session)
        aborted_in_step.extend(engine.aborted)
        return [end(kept)]

    engine.step = step  # type: ignore[method-assign]
    session.poll()
    assert aborted_in_step == []
    engine.steps.append([])
    engine.step = engine.steps.popleft  # type: ignore[method-assign]
    session.poll()
    assert engine.aborted == [collected]


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


def test_the_owner_of_a_refused_request_is_notified(
    session: Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for `poll` to return its prompt."""
    prompt_id = submit(session)

    def refuse(request: Request, samples: Sequence[Sample]) -> None:
        raise RequestError("not this one")

    monkeypatch.setattr(engine, "add", refuse)
    engine.has_work = False
    engine.steps.append([])
    assert session.has_work
    assert session.poll() == [prompt_id]
    with pytest.raises(RequestError, match="not this one"):
        session.raise_error([prompt_id])
    assert not session.has_work


def test_a_lost_request_is_an_engine_error(session: Session, engine: Engine) -> None:
    lost = submit(session)
    engine.steps.append([])
    engine.has_work = False
    assert session.advance([lost]) == []
    with pytest.raises(EngineError, match=lost):
        session.raise_error([lost])


def test_a_discarded_id_is_free_at_once(session: Session, engine: Engine) -> None:
    """Its requests may still wait for the engine, or may not have ended there yet."""
    for _ in range(3):
        session.submit([[1]], SamplingParams(n=2), "mine")
        session.discard(["mine"])
    session.submit([[1]], SamplingParams(n=2), "mine")
    engine.steps.append([])
    session.poll()
    with session._frontend_lock:  # a finaliser in a thread that holds it does not wait
        session.discard(["mine"])
    session.submit([[1]], SamplingParams(), "mine")
    engine.steps.append([])
    session.poll()
    assert engine.added == ["3-0", "3-1", "4"]
    assert set(engine.aborted) >= {"3-0", "3-1"}
    assert "4" not in engine.aborted


def test_a_prompt_discarded_while_its_lock_is_held_ends_when_the_lock_is_free(
    session: Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may close a stream inside any call."""
    kept, collected = submit(session), submit(session)
    engine.steps.append([])
    session.poll()
    output = session.frontend.output

    def collecting_output(prompt_id: str) -> Any:
        session.discard([collected])
        return output(prompt_id)

    monkeypatch.setattr(session.frontend, "output", collecting_output)
    session.output(kept)
    assert engine.aborted == [collected]


def test_ctrl_c_does_not_wait_for_the_step_of_another_thread(session: Session, engine: Engine) -> None:
    prompt_id = submit(session)
    is_running, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def step() -> list[RequestUpdate]:
        is_running.set()
        may_end.wait(60)
        has_ended.set()
        return [end(prompt_id)]

    engine.step = step  # type: ignore[method-assign]
    other = threading.Thread(target=session.poll)
    other.start()
    assert is_running.wait(60)

    def advance() -> None:
        threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        session.advance([prompt_id])

    with pytest.raises(KeyboardInterrupt):
        advance()
    assert not has_ended.is_set()
    may_end.set()
    other.join()


def test_an_aborted_prompt_is_added_first(session: Session, engine: Engine) -> None:
    prompt_id = submit(session)
    session.abort(prompt_id)
    assert engine.aborted == []
    engine.steps.append([])
    session.poll()
    assert (engine.added, engine.aborted) == ([prompt_id], [prompt_id])


def test_a_discard_never_adds_requests(session: Session, engine: Engine) -> None:
    """Adding one may restart the engine, and a discard runs in event loops."""
    running = submit(session)
    engine.steps.append([])
    session.poll()
    session.discard([running])
    assert engine.aborted == [running]
    discarded, waiting = submit(session), submit(session)
    session.discard([discarded])
    assert engine.added == [running]
    engine.steps.append([])
    session.poll()
    assert engine.added == [running, waiting]


def test_an_interrupted_restart_loses_no_request(
    session: Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt_id = submit(session)

    def interrupted(request: Request, samples: Sequence[Sample]) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.poll()
    engine.steps.append([])
    session.poll()
    assert engine.added == [prompt_id]


def test_a_failure_does_not_concern_requests_that_the_engine_never_got(session: Session, engine: Engine) -> None:
    """They may restart it."""
    submitted = []

    def step() -> list[RequestUpdate]:
        submitted.append(submit(session))
        raise EngineError("disk on fire")

    failed = submit(session)
    engine.step = step  # type: ignore[method-assign]
    assert session.poll() == [failed]
    session.raise_error(submitted)  # nothing
    assert engine.added == [failed, *submitted]


def test_a_submission_counts_requests_while_others_fail(
    session: Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: Request, samples: Sequence[Sample]) -> None:
        raise RequestError("not this one")

    monkeypatch.setattr(engine, "add", refuse)
    engine.steps += [[], []]
    submit(session)
    session.poll()
    submit(session)
    thread = threading.Thread(target=session.poll)  # refuses the second one
    unfinished = session.frontend.unfinished

    def slow(prompt_id: str) -> list[str]:
        if thread.ident is None:
            thread.start()
            thread.join(0.2)  # it waits for this submission
        return unfinished(prompt_id)

    monkeypatch.setattr(session.frontend, "unfinished", slow)
    submit(session)
    thread.join()


def test_a_prompt_that_another_thread_has_advanced_needs_no_step(session: Session, engine: Engine) -> None:
    first, second = submit(session), submit(session)
    engine.steps.append(
        [RequestUpdate(request_id=first, token_ids=[3]), RequestUpdate(request_id=second, token_ids=[4])]
    )
    assert session.advance([first]) == [first]
    assert session.advance([second]) == [second]  # without a step: none is left
    engine.steps.append([end(second)])
    assert session.advance([second]) == []


def test_a_full_queue_refuses_before_it_tokenizes(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(session, n=4)
    monkeypatch.setattr(session.frontend, "encode", None)
    with pytest.raises(QueueFullError):
        submit(session)


def test_a_full_queue_refuses_prompts_and_changes_nothing(session: Session, engine: Engine) -> None:
    first, _ = submit(session, n=3), submit(session)
    for params in (SamplingParams(), SamplingParams(n=2)):
        with pytest.raises(QueueFullError, match=r"4 requests are in flight; at most 4"):
            session.submit([[1]], params)
    engine.steps += [[end(f"{first}-{index}")] for index in range(3)]
    while session.advance([first]):
        pass
    submit(session, n=3)  # there is room again
    with pytest.raises(QueueFullError):
        submit(session)
    engine.steps.append(EngineError("disk on fire"))
    session.poll()  # requests that have failed are not in flight, though their outputs are still there
    submit(session, n=4)


def test_a_long_list_is_started_in_order_as_room_appears(session: Session, engine: Engine) -> None:
    other = submit(session, n=2)
    encoded = session.frontend.encode([[1]] * 5, [SamplingParams(n=n) for n in (1, 2, 1, 1, 9)])
    waiting, prompt_ids = deque(encoded), []
    prompt_ids += session.submit_first(waiting)
    assert (len(prompt_ids), len(waiting)) == (1, 4)  # the next one needs two places
    for request_id in (f"{other}-0", prompt_ids[0], f"{other}-1"):
        engine.steps.append([end(request_id)])
        session.advance([], waits_for_others=True)
    prompt_ids += session.submit_first(waiting)
    assert len(prompt_ids) == 4
    assert session.submit_first(waiting) == []
    session.discard(prompt_ids)
    assert len(session.submit_first(waiting)) == 1  # more than the limit, but alone; the engine never got the others
    session.wake()
    engine.steps.append([])
    session.advance([], waits_for_others=True)
    assert engine.added == ["0-0", "0-1", "1", *(f"5-{index}" for index in range(9))]
