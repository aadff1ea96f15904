"""The queue of requests has a limit, which long lists of prompts respect and single requests report."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from reference_models import Reference

from moeserve import LLM, AsyncLLM, QueueFullError, SamplingParams

SHORT: dict[str, Any] = dict(max_num_seqs=2, max_queued_requests=1, kv_cache_memory="8MiB", max_model_len=128)
GREEDY = SamplingParams(temperature=0, max_tokens=6)
LONG = SamplingParams(temperature=0, max_tokens=40)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_long_list_passes_through_a_short_queue(plain: Reference, num_replicas: int) -> None:
    """Several threads feed the queue at once. Samples of one prompt take a place each."""
    prompts = plain.prompts(*range(3, 40, 2))
    expected = plain.continuations(prompts, 6)
    params = [SamplingParams(temperature=0, max_tokens=6, n=1 + index % 3) for index in range(len(prompts))]
    with (
        LLM(plain.folder, data_parallel_size=num_replicas, dtype="float32", **SHORT) as llm,
        ThreadPoolExecutor(3) as threads,
    ):
        lists = [threads.submit(llm.generate, prompts, params, use_tqdm=False) for _ in range(3)]
        for each in lists:
            outputs = each.result()
            assert [output.outputs[0].token_ids for output in outputs] == expected
            assert [len(output.outputs) for output in outputs] == [each.n for each in params]
            assert all(
                sample.token_ids == output.outputs[0].token_ids for output in outputs for sample in output.outputs
            )


def test_a_task_learns_that_the_queue_is_full(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes no step before all requests have come."""
    prompts = plain.prompts(5, 6, 7, 8)
    llm = AsyncLLM(plain.folder, dtype="float32", **SHORT)
    submit, step = llm.session.submit, llm.session.engine.step
    num_submitted, have_all_come = itertools.count(1), threading.Event()

    def counted(*arguments: Any) -> list[str]:
        try:
            return submit(*arguments)
        finally:
            if next(num_submitted) == len(prompts):
                have_all_come.set()

    monkeypatch.setattr(llm.session, "submit", counted)
    monkeypatch.setattr(llm.session.engine, "step", lambda: have_all_come.wait(60) and step())

    async def tokens_of(prompt: list[int]) -> list[int]:
        *_, last = [output async for output in llm.generate(prompt, LONG)]
        return last.outputs[0].token_ids

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*map(tokens_of, prompts), return_exceptions=True)

    found = asyncio.run(all_at_once())
    assert [type(each) for each in found].count(QueueFullError) == 1
    for prompt, each in zip(prompts, found, strict=True):
        assert isinstance(each, QueueFullError) or each == plain.greedy(prompt, 40)
    assert asyncio.run(tokens_of(prompts[0])) == plain.greedy(prompts[0], 40)
    llm.shutdown()
