"""AsyncLLM: many tasks and threads share an engine; cancellation; kinds of output; errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from reference_models import Reference

from moeserve import AsyncLLM, EngineError, RequestError, SamplingParams
from moeserve.sampling_params import RequestOutputKind

NUM_TOKENS = 8


@pytest.fixture(scope="module", params=["uniproc", "mp"])
def llm(request: pytest.FixtureRequest, plain: Reference) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(plain.folder, dtype="float32", max_model_len=128, executor=request.param, show_progress=False)
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
    expected = [plain.greedy(prompt, NUM_TOKENS) for prompt in prompts]
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


def test_a_cancelled_task_ends_its_request(llm: AsyncLLM, plain: Reference) -> None:
    async def endless() -> None:
        async for _ in llm.generate([5, 6], greedy(max_tokens=120)):
            started.set()

    async def run() -> list[int]:
        task = asyncio.create_task(endless())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return (await tokens_of(llm, [5, 6, 7], RequestOutputKind.CUMULATIVE))[0]

    started = asyncio.Event()
    assert asyncio.run(run()) == plain.greedy([5, 6, 7], NUM_TOKENS)
    assert not llm.session.engine.has_work or llm.session.has_work  # what is left is on its way out


def test_abort_by_id(llm: AsyncLLM) -> None:
    async def run() -> Any:
        async for output in llm.generate([5, 6], greedy(max_tokens=120), request_id="mine"):
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
    llm = AsyncLLM(plain.folder, dtype="float32", max_model_len=128, show_progress=False)

    async def run() -> list[str | None]:
        reasons = []
        async for output in llm.generate([5, 6], greedy(max_tokens=120)):
            reasons.append(output.outputs[0].finish_reason)
            if len(reasons) == 2:
                await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineError, match="shut down"):
            await anext(llm.generate([5], greedy()))
        return reasons

    assert asyncio.run(run())[-1] == "abort"
    assert not llm.is_running
    assert not llm.errored
