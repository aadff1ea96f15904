"""AsyncLLM on engines that fail: nobody waits for ever, and what can be restarted is."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from test_config import FACTS

from moeserve import AsyncLLM, EngineError, SamplingParams
from moeserve.api import engine_thread
from moeserve.api.frontend import Frontend
from moeserve.api.session import Session
from moeserve.api.startup import TextParts
from moeserve.config.facts import MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.protocol import Request, RequestUpdate
from moeserve.telemetry.observer import LoadObserver


class Engine:
    """Ends each request with one token, unless it is dead."""

    def __init__(self, on_failure: str) -> None:
        settings = parse_settings({"data_parallel_size": 2, "on_failure": on_failure})
        self.config = resolve(settings, FACTS, MachineFacts(num_cores=2))
        self.is_dead = False
        self.crash: Exception | None = None
        self.num_restarts = 0
        self._failure = ""
        self._in_flight: list[str] = []

    @property
    def refusal(self) -> str:
        return self._failure if self.config.failure.on_failure == "end" else ""

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight)

    def add(self, request: Request, samples: Any = ()) -> None:
        if self._failure and not self.refusal and not self.is_dead:
            self._failure = ""
            self.num_restarts += 1
        if self._failure:
            raise EngineError(self._failure)
        self._in_flight.append(request.request_id)

    def abort(self, request_id: str) -> None:
        pass

    def wake(self) -> None:
        pass

    def cancel_restart(self) -> None:
        pass

    def step(self) -> list[RequestUpdate]:
        if self.crash is not None:
            raise self.crash
        if self.is_dead:
            self._failure = "rank 1: killed"
        if self._failure:
            raise EngineError(self._failure)
        ended, self._in_flight = self._in_flight, []
        return [RequestUpdate(request_id=name, token_ids=[1], finish_reason="length") for name in ended]

    def take_loads(self) -> list[Any]:
        return []

    def shutdown(self) -> None:
        if self.crash is not None:
            raise self.crash


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[AsyncLLM, Engine]]:
    def start(on_failure: str = "end") -> tuple[AsyncLLM, Engine]:
        engine: Any = Engine(on_failure)
        frontend = Frontend(None, vocab_size=10, max_model_len=100, eos_token_ids=[], engine_seed=0)
        session = Session(engine, frontend, LoadObserver(None, None), max_requests=lambda: 4)
        texts = TextParts(None, SamplingParams(), eos_token_ids=[])
        return AsyncLLM.of_session(session, texts), engine

    monkeypatch.setattr(engine_thread, "SECONDS_BETWEEN_CHECKS", 0.01)
    return start


async def tokens_of(llm: AsyncLLM) -> list[int]:
    (output,) = [output async for output in llm.generate([5])]
    return output.outputs[0].token_ids


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def test_tasks_end_even_if_the_shutdown_fails(start: Any) -> None:
    llm, engine = start()
    engine.crash = OSError("no space left")
    with pytest.raises(EngineError, match="no space left"):
        asyncio.run(asyncio.wait_for(tokens_of(llm), 60))
    llm.shutdown()
    assert llm.errored


def test_an_idle_engine_that_dies_is_noticed(start: Any) -> None:
    llm, engine = start()
    asyncio.run(llm.check_health())
    engine.is_dead = True
    wait_until(lambda: bool(llm.errored))
    with pytest.raises(EngineError, match="rank 1"):
        asyncio.run(llm.check_health())
    with pytest.raises(EngineError, match="rank 1"):
        asyncio.run(tokens_of(llm))
    llm.shutdown()


def test_a_request_restarts_an_engine_after_a_restart_that_failed(start: Any) -> None:
    llm, engine = start("restart")
    engine.is_dead = True
    with pytest.raises(EngineError, match="rank 1"):
        asyncio.run(tokens_of(llm))
    asyncio.run(llm.check_health())  # the next request may restart it
    engine.is_dead = False
    assert asyncio.run(tokens_of(llm)) == [1]
    assert engine.num_restarts == 1
    llm.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_closed_event_loop_does_not_concern_others(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be closed between any check and the call."""
    llm, engine = start()
    may_step = threading.Event()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: step() if may_step.is_set() else [])
    loop = asyncio.new_event_loop()
    task = loop.create_task(tokens_of(llm))
    while not llm._engine_thread.mailboxes:
        loop.run_until_complete(asyncio.sleep(0.005))
    loop.close()
    loop.is_closed = lambda: False  # type: ignore[method-assign]
    may_step.set()
    assert asyncio.run(tokens_of(llm)) == [1]
    assert not task.done()
    llm.shutdown()
    del loop.is_closed, task
    gc.collect()  # which warns of the task, inside this test


def test_a_submission_that_outlives_its_event_loop_is_discarded(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = start()
    is_submitting, is_cancelled = threading.Event(), threading.Event()
    submit = llm.session.submit

    def slow(*arguments: Any) -> list[str]:
        is_submitting.set()
        is_cancelled.wait(60)
        return submit(*arguments)

    async def run() -> None:
        task = asyncio.ensure_future(tokens_of(llm))
        task.add_done_callback(lambda _: is_cancelled.set())
        await asyncio.to_thread(is_submitting.wait)

    monkeypatch.setattr(llm.session, "submit", slow)
    asyncio.run(run())  # which cancels the task, and waits for threads
    assert is_cancelled.is_set()
    with pytest.raises(KeyError):
        llm.session.output("0")
    llm.shutdown()
