"""A pause stops all ranks between two steps, in each of its modes; `resume` continues."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from reference_models import Reference

from moeserve import LLM, AsyncLLM, RequestError, RequestOutput, SamplingParams
from moeserve.controls import PauseMode

PROMPTS = [[5, 7], [*range(1, 40)], [3, 1, 4, 1, 5, 9], [*range(1, 30), 7]]
NUM_TOKENS = 60
LAYOUTS = [
    pytest.param(dict(max_num_batched_tokens=7), id="one"),
    pytest.param(dict(data_parallel_size=2, executor="mp"), id="dp", marks=pytest.mark.ranks),
    pytest.param(
        dict(tensor_parallel_size=2, pipeline_parallel_size=2, executor="mp"),
        id="tp-pp",
        marks=[pytest.mark.ranks, pytest.mark.slow],
    ),
]


@pytest.fixture(scope="module", params=LAYOUTS)
def llm(request: pytest.FixtureRequest, reference_named: Callable[[str], Reference]) -> Iterator[AsyncLLM]:
    folder = reference_named("qwen3-next").folder
    llm = AsyncLLM(str(folder), max_model_len=128, kv_cache_memory="8MiB", num_threads=1, **request.param)
    yield llm
    llm.shutdown()


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": NUM_TOKENS, "ignore_eos": True} | more)


class Running:
    """A request, and its output so far."""

    def __init__(self, llm: AsyncLLM, prompt: list[int], **more: Any) -> None:
        self.last: RequestOutput | None = None
        self.has_begun = asyncio.Event()
        self.task = asyncio.create_task(self._run(llm, prompt, params(**more)))

    async def _run(self, llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
        async for output in llm.generate(prompt, params):
            self.last = output
            self.has_begun.set()
        assert self.last is not None
        return self.last

    @property
    def tokens(self) -> list[int]:
        return [] if self.last is None else self.last.outputs[0].token_ids


async def barrier(llm: AsyncLLM) -> None:
    """Return when all ranks have run another control, so that steps in flight and their tokens would be known."""
    await llm.pause("keep")
    for _ in range(3):  # tasks with new output run
        await asyncio.sleep(0)


async def whole_outputs(llm: AsyncLLM) -> list[list[int]]:
    running = [Running(llm, prompt) for prompt in PROMPTS]
    return [(await each.task).outputs[0].token_ids for each in running]


@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_requests_continue_with_the_same_tokens(llm: AsyncLLM, mode: PauseMode) -> None:
    async def run() -> None:
        expected = await whole_outputs(llm)
        running = [Running(llm, prompt) for prompt in PROMPTS]
        for each in running:
            await each.has_begun.wait()
        num_preemptions = sum(stats.num_preemptions for stats in llm.session.engine.replica_stats)
        await llm.pause(mode)
        assert await llm.is_paused()
        await barrier(llm)
        before = [each.tokens for each in running]
        assert any(len(tokens) < NUM_TOKENS for tokens in before), "all ended before the pause"
        late = Running(llm, PROMPTS[0])
        await barrier(llm)
        assert [each.tokens for each in running] == before
        assert late.tokens == []
        preempted = sum(stats.num_preemptions for stats in llm.session.engine.replica_stats) - num_preemptions
        assert (preempted > 0) == (mode == "retract")
        await llm.resume()
        assert not await llm.is_paused()
        outputs = [(await each.task).outputs[0] for each in (*running, late)]
        assert [output.token_ids for output in outputs] == [*expected, expected[0]]
        assert {output.finish_reason for output in outputs} == {"length"}

    asyncio.run(run())


def test_abort_returns_the_tokens_so_far(llm: AsyncLLM) -> None:
    async def run() -> None:
        expected = await whole_outputs(llm)
        running = [Running(llm, prompt) for prompt in PROMPTS]
        for each in running:
            await each.has_begun.wait()
        await llm.pause()
        outputs = [(await each.task).outputs[0] for each in running]
        assert "abort" in {output.finish_reason for output in outputs}
        for output, tokens in zip(outputs, expected, strict=True):
            assert output.token_ids == tokens[: len(output.token_ids)]
        late = Running(llm, PROMPTS[1])
        await barrier(llm)
        assert late.tokens == []
        await llm.resume()
        assert (await late.task).outputs[0].token_ids == expected[1]

    asyncio.run(run())


def test_the_end_of_all_requests_leaves_the_pause_as_it_is(llm: AsyncLLM) -> None:
    """Also if several calls overlap with each other and with a pause."""

    async def run() -> None:
        running = [Running(llm, prompt) for prompt in PROMPTS]
        for each in running:
            await each.has_begun.wait()
        await asyncio.gather(llm.end_requests(), llm.end_requests())
        for each in running:
            assert (await each.task).outputs[0].finish_reason == "abort"
            assert 0 < len(each.tokens) < NUM_TOKENS
        assert not await llm.is_paused()
        expected = await whole_outputs(llm)
        await asyncio.gather(llm.end_requests(), llm.pause("keep"), llm.end_requests())
        late = Running(llm, PROMPTS[1])
        await barrier(llm)
        await asyncio.gather(llm.end_requests(), llm.end_requests())
        (ended,) = (await late.task).outputs
        assert (ended.finish_reason, ended.token_ids) == ("abort", [])
        assert await llm.is_paused()
        await llm.resume()
        assert await whole_outputs(llm) == expected

    asyncio.run(run())


def test_wait_lets_requests_finish_and_later_ones_wait(llm: AsyncLLM) -> None:
    async def run() -> None:
        running = [Running(llm, prompt) for prompt in PROMPTS]
        for each in running:
            await each.has_begun.wait()
        await llm.pause("wait")
        late = Running(llm, PROMPTS[1])
        await barrier(llm)
        assert all(len(each.tokens) == NUM_TOKENS for each in running)
        assert late.tokens == []
        late.task.cancel()  # a request that waits can be aborted
        other = Running(llm, PROMPTS[2])
        await llm.resume()
        assert (await other.task).outputs[0].token_ids == running[2].tokens

    asyncio.run(run())


def test_a_cleared_cache_has_no_earlier_prefix(llm: AsyncLLM) -> None:
    prompt = [*range(2, 90)]

    async def num_cached() -> int:
        return (await Running(llm, prompt, max_tokens=1).task).num_cached_tokens

    async def run() -> None:
        await num_cached()
        for mode, clears, remains in (("wait", False, True), ("keep", True, True), ("retract", True, False)):
            assert await num_cached() > 0
            await llm.pause(mode, clear_cache=clears)  # type: ignore[arg-type]
            await llm.resume()
            assert (await num_cached() > 0) == remains, mode

    asyncio.run(run())


def test_llm_pauses_while_another_thread_generates(reference_named: Callable[[str], Reference]) -> None:
    settings: dict[str, Any] = dict(max_model_len=128, kv_cache_memory="8MiB", num_threads=1)
    with LLM(str(reference_named("qwen3-moe").folder), **settings) as llm:
        (expected,) = llm.generate(PROMPTS[:1], params())
        llm.resume()  # nothing is paused
        llm.pause("wait")
        assert llm.is_paused()
        outputs: list[RequestOutput] = []
        thread = threading.Thread(target=lambda: outputs.extend(llm.generate(PROMPTS[:1], params())))
        thread.start()
        llm.pause("keep")
        assert not outputs
        llm.resume()
        thread.join()
        assert outputs[0].outputs == expected.outputs
        with pytest.raises(RequestError) as error:
            llm.pause("stop")  # type: ignore[arg-type]
        assert error.value.parameter == "mode"
