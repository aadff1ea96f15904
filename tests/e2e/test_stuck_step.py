"""One rank in this process: a step that hangs, and wake-ups while the engine waits for something else."""

from __future__ import annotations

import asyncio
import select
import threading
from typing import Any

import pytest
from reference_models import Reference

from moeserve import LLM, AsyncLLM, EngineError, SamplingParams
from moeserve.engine.engine import Engine
from moeserve.processes.supervision import ProcessPoll
from moeserve.worker.worker import Worker

PARAMS = SamplingParams(temperature=0, max_tokens=4)


def test_a_step_that_hangs_ends_requests_and_the_engine(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {*threading.enumerate()}
    llm = LLM(plain.folder, num_threads=1, max_model_len=96, step_timeout=2)
    released = threading.Event()
    execute = Worker.start

    def hang(worker: Worker, work: Any) -> Any:
        released.wait()
        return execute(worker, work)

    monkeypatch.setattr(Worker, "start", hang)
    (rank,) = (thread for thread in {*threading.enumerate()} - before if thread.name == "moeserve rank 0")
    with pytest.raises(EngineError, match="step_timeout"):
        llm.generate(plain.prompts(9), PARAMS)
    assert not llm.core.has_work  # though the step never ended
    with pytest.raises(EngineError, match="step_timeout"):
        llm.generate(plain.prompts(9), PARAMS)
    llm.shutdown()
    assert rank.is_alive()
    released.set()
    rank.join(60.0)
    assert not rank.is_alive()


def test_the_engine_of_tasks_can_be_shut_down_after_a_step_that_hangs(
    plain: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    start = Worker.start
    monkeypatch.setattr(Worker, "start", lambda worker, work: released.wait() and start(worker, work))

    async def use(llm: AsyncLLM) -> None:
        for _ in range(2):
            with pytest.raises(EngineError, match="step_timeout"):
                async for _ in llm.generate([5, 6], PARAMS):
                    pass

    llm = AsyncLLM(plain.folder, num_threads=1, max_model_len=96, step_timeout=2)
    asyncio.run(use(llm))
    llm.shutdown()
    assert not llm.is_running
    released.set()


def test_a_wake_up_does_not_end_other_waits(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(plain.folder, num_threads=1, max_model_len=96)
    core = llm.core
    assert isinstance(core, Engine)
    execute, ready = Worker.start, ProcessPoll.ready
    waits = threading.Semaphore(0)

    def checked(poll: ProcessPoll[Any], timeout_s: float | None = 0.0) -> list[Any]:
        if timeout_s != 0.0:
            assert not select.select([core._wake_up.fd], [], [], 0)[0], "the wait would end at once"
            waits.release()
        return ready(poll, timeout_s)

    def execute_once_awaited(worker: Worker, work: Any) -> Any:
        assert waits.acquire(timeout=60.0)
        return execute(worker, work)

    monkeypatch.setattr(ProcessPoll, "ready", checked)
    monkeypatch.setattr(Worker, "start", execute_once_awaited)
    core.wake()
    core.collect_load()
    assert core.take_loads(wait=True)
    assert core._wake_up.take()  # the next step
    core.wake()
    core.shutdown()
    assert "shut down" in core.refusal  # no wait failed
