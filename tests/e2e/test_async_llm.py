"""AsyncLLM: many tasks and threads share an engine; cancellation; kinds of output; errors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from reference_models import Reference

from moeserve import AsyncLLM, EngineError, RequestError, RequestOutputKind, SamplingParams
from moeserve.engine.engine import Engine

NUM_TOKENS = 8


@pytest.fixture(scope="module", params=["uniproc", "mp"])
def llm(request: pytest.FixtureRequest, plain: Reference) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(plain.folder, dtype="float32", max_model_len=512, executor=request.param, show_progress=False)
    yield llm
    llm.shutdown()


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | more)


async def tokens_of(llm: AsyncLLM, prompt: list[int], kind: RequestOutputKind) -> tuple[list[int], int]:
    """Return the tokens of a request, and the number of outputs in which they came."""
    tokens: list[int] = []
    num_outputs = 0
    async for output in llm.generate(prompt, greedy(output_kind=kind)):
        num_outputs += 1
        given = output.outputs[0].token_ids
        tokens = tokens + given if kind is RequestOutputKind.DELTA else given
    return tokens, num_outputs


def test_tasks_and_threads_share_the_engine(llm: AsyncLLM, plain: Reference) -> None:
    prompts = plain.clear_prompts((3, 9, 5, 17, 4, 11), NUM_TOKENS)
    expected = plain.continuations(prompts, NUM_TOKENS)
    results: list[Any] = []

    async def run() -> None:
        kinds = list(RequestOutputKind)
        calls = [tokens_of(llm, prompt, kinds[index % 3]) for index, prompt in enumerate(prompts)]
        results.append(await asyncio.gather(*calls))

    threads = [threading.Thread(target=lambda: asyncio.run(run())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for result in results:
        assert [tokens for tokens, _ in result] == expected
        assert all(num_outputs == 1 for _, num_outputs in result[2::3])  # FINAL_ONLY


def test_cancelled_tasks_end_their_requests_alone(llm: AsyncLLM, plain: Reference) -> None:
    """64 tasks, of which every third is cancelled: before the first output, or after some, if it has not ended then."""
    prompts = plain.clear_prompts((3, 9, 5, 17, 4, 11, 2, 6), NUM_TOKENS)
    expected = plain.continuations(prompts, NUM_TOKENS)

    async def cancelled(index: int) -> bool:
        async def endless() -> None:
            async for output in llm.generate(prompts[index % 8], greedy(max_tokens=400)):
                if len(output.outputs[0].token_ids) > index % 5:
                    has_begun.set()

        has_begun = asyncio.Event()
        task = asyncio.create_task(endless())
        if index % 2:
            await has_begun.wait()
        else:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    async def run() -> None:
        kind = RequestOutputKind.CUMULATIVE
        calls = [cancelled(i) if i % 3 == 0 else tokens_of(llm, prompts[i % 8], kind) for i in range(64)]
        for index, result in enumerate(await asyncio.gather(*calls)):
            if index % 3:
                assert isinstance(result, tuple)
                assert result[0] == expected[index % 8]
            else:
                assert result or index % 2

    asyncio.run(run())
    deadline = time.monotonic() + 200
    while used_blocks(llm) or llm.session.frontend._prompts:  # steps that were in flight are on their way out
        assert time.monotonic() < deadline
        time.sleep(0.01)


def used_blocks(llm: AsyncLLM) -> int:
    engine = llm.session.engine
    assert isinstance(engine, Engine)
    with llm.session._exclusive():
        return sum(engine.num_blocks - num_free for num_free in engine.num_free_blocks)


def test_abort_by_id(llm: AsyncLLM) -> None:
    async def run() -> Any:
        async for output in llm.generate([5, 6], greedy(max_tokens=500), request_id="mine"):
            last = output
            await llm.abort("mine")
        return last

    last = asyncio.run(run())
    assert last.request_id == "mine"
    assert last.outputs[0].finish_reason == "abort"


def test_errors_concern_their_own_request(llm: AsyncLLM, plain: Reference) -> None:
    async def consume(prompt: Any, **more: Any) -> None:
        async for _ in llm.generate(prompt, greedy(), **more):
            pass

    async def run() -> list[int]:
        with pytest.raises(RequestError, match="empty"):
            await consume([])
        first = llm.generate([5, 6], greedy(), request_id="twice")
        await anext(first)
        with pytest.raises(RequestError, match="twice"):
            await consume([7], request_id="twice")
        await first.aclose()
        await llm.check_health()
        return (await tokens_of(llm, [5, 6, 7], RequestOutputKind.DELTA))[0]

    assert asyncio.run(run()) == plain.greedy([5, 6, 7], NUM_TOKENS)


def test_after_shutdown_requests_are_refused(plain: Reference) -> None:
    llm = AsyncLLM(plain.folder, dtype="float32", max_model_len=512, show_progress=False)

    async def run() -> list[str | None]:
        reasons = []
        async for output in llm.generate([5, 6], greedy(max_tokens=500)):
            reasons.append(output.outputs[0].finish_reason)
            if len(reasons) == 2:
                await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineError, match="shut down"):
            await anext(llm.generate([5], greedy()))
        return reasons

    assert asyncio.run(run())[-1] == "abort"
    assert not llm.is_running
    assert not llm.errored


def test_a_full_disk_does_not_end_the_engine(plain: Reference, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = dict(expert_load_file="/dev/full", expert_load_window=1)
    llm = AsyncLLM(plain.folder, dtype="float32", max_model_len=512, show_progress=False, **settings)
    tokens, _ = asyncio.run(tokens_of(llm, [5, 6, 7], RequestOutputKind.DELTA))
    llm.shutdown()
    assert tokens == plain.greedy([5, 6, 7], NUM_TOKENS)
    assert ["/dev/full" in message for message in caplog.messages if "expert" in message] == [True]
