"""Several threads call one LLM at the same time: the results are those of one call after the other."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from reference_models import Reference

from moeserve import LLM, EngineError, SamplingParams
from moeserve.outputs import RequestOutput

NUM_THREADS = 4
NUM_ROUNDS = 2
ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two replicas"])
def llm(request: pytest.FixtureRequest, default_cache: Path) -> Iterator[LLM]:
    # In float32, so that the last bits of a sum, which depend on the batch, cannot change a token.
    with LLM(dtype="float32", max_model_len=512, kv_cache_memory="400MiB", data_parallel_size=request.param) as llm:
        yield llm


def params(thread: int, round: int) -> SamplingParams:
    # Seeded: the seed of a request without one depends on the order of submission.
    return SamplingParams(temperature=0.5 * (thread % 2), seed=thread, max_tokens=4 + round, n=1 + thread % 2)


def generate(llm: LLM, thread: int, round: int) -> Any:
    prompts = [f"Thread {thread} counts: one, two,", f"In round {round}, the capital of France is"]
    return [output.outputs for output in llm.generate(prompts, params(thread, round), use_tqdm=False)]


def chat(llm: LLM, thread: int, round: int) -> Any:
    messages = [{"role": "user", "content": f"What is {thread} plus {round}?"}]
    return [output.outputs for output in llm.chat(messages, params(thread, round), use_tqdm=False)]


def stream(llm: LLM, thread: int, round: int) -> Any:
    outputs = list(llm.stream(f"Thread {thread} says {round} and", params(thread, round)))
    return outputs[-1].outputs


def stream_and_abort(llm: LLM, thread: int, round: int) -> Any:
    """Abort a stream after two outputs: from its own thread by name, or by closing it."""
    streaming = llm.stream(f"Round {round} of thread {thread}:", ENDLESS)
    first, second = next(streaming), next(streaming)
    if round % 2:
        streaming.close()
        return first.outputs[0].token_ids[:1]
    llm.abort(second.request_id)
    last = list(streaming)[-1].outputs[0]
    assert last.finish_reason == "abort"
    assert last.token_ids[: len(second.outputs[0].token_ids)] == second.outputs[0].token_ids
    return first.outputs[0].token_ids[:1]


CALLS: list[Callable[[LLM, int, int], Any]] = [generate, chat, stream, stream_and_abort]


def calls_of_thread(llm: LLM, thread: int) -> list[Any]:
    return [CALLS[(thread + round) % len(CALLS)](llm, thread, round) for round in range(NUM_ROUNDS)]


@pytest.mark.slow
@pytest.mark.ranks
def test_threads_get_the_results_of_one_call_after_the_other(llm: LLM) -> None:
    expected = [calls_of_thread(llm, thread) for thread in range(NUM_THREADS)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        together = list(pool.map(lambda thread: calls_of_thread(llm, thread), range(NUM_THREADS)))
    assert together == expected
    llm.generate("To take the ends of aborted requests,", params(0, 0), use_tqdm=False)
    assert not llm.session.has_work


@pytest.mark.ranks
def test_shutdown_ends_the_calls_of_other_threads(default_cache: Path) -> None:
    llm = LLM(max_model_len=512, kv_cache_memory="200MiB")
    started = threading.Event()

    def last_output() -> RequestOutput:
        streaming = llm.stream("Once upon a time", ENDLESS)
        next(streaming)
        started.set()
        return list(streaming)[-1]

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(last_output)
        assert started.wait(60)
        llm.shutdown()
        assert ended.result(60).outputs[0].finish_reason == "abort"
    with pytest.raises(EngineError):
        llm.generate("Hello", use_tqdm=False)


def test_ctrl_c_of_one_call_leaves_those_of_other_threads(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted, other = plain.prompts(7, 9)
    started, resumed = threading.Event(), threading.Event()
    greedy = SamplingParams(temperature=0, max_tokens=8)

    def last_output(llm: LLM) -> list[int]:
        streaming = llm.stream(other, greedy)
        next(streaming)
        started.set()
        assert resumed.wait(60)
        return list(streaming)[-1].outputs[0].token_ids

    with LLM(plain.folder, dtype="float32") as llm, ThreadPoolExecutor(1) as pool:
        ended = pool.submit(last_output, llm)
        assert started.wait(60)
        executor: Any = llm.core.replicas[0].executor  # type: ignore[attr-defined]
        submit = executor.submit

        def submit_interrupted(work: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return submit(work)

        with monkeypatch.context() as patch:
            patch.setattr(executor, "submit", submit_interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([interrupted], greedy, use_tqdm=False)
        resumed.set()
        assert ended.result(60) == plain.greedy(other, 8)
        assert llm.generate([interrupted], greedy, use_tqdm=False)[0].outputs[0].token_ids == plain.greedy(
            interrupted, 8
        )
