"""Ctrl-C at every line that handles updates of several replicas: the call ends, and other requests lose nothing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from rank_processes import free_blocks
from reference_models import Reference

import moeserve.api.llm
import moeserve.api.session
import moeserve.engine.engine
import moeserve.engine.in_flight
import moeserve.processes.channel
import moeserve.processes.supervision
from moeserve import LLM, EngineError, SamplingParams

pytestmark = pytest.mark.ranks

ALL_BLOCKS = 256 // 16 * 8  # of each replica
FILES = {
    module.__file__
    for module in (
        moeserve.api.llm,
        moeserve.api.session,
        moeserve.engine.in_flight,
        moeserve.engine.engine,
        moeserve.processes.channel,
        moeserve.processes.supervision,
    )
}
STREAMED = SamplingParams(temperature=0, max_tokens=30)
GENERATED = SamplingParams(temperature=0, max_tokens=4)

Line = tuple[str, int]


@pytest.fixture(scope="module")
def reference(reference_named: Callable[[str], Reference]) -> Reference:
    return reference_named("mixtral")


@pytest.fixture(scope="module")
def llm(reference: Reference) -> Iterator[LLM]:
    settings: dict[str, Any] = dict(kv_cache_memory="8MiB", max_model_len=256, max_num_seqs=8, dtype="float32")
    with LLM(reference.folder, data_parallel_size=2, **settings) as llm:
        yield llm


class Tracer:
    """Records the lines of FILES that this thread runs, and raises a real SIGINT at one of them."""

    def __init__(self, at: Line | None) -> None:
        self.at = at
        self.passed: dict[Line, None] = {}

    def __enter__(self) -> Tracer:
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Tracer | None:
        file = frame.f_code.co_filename
        if file not in FILES:
            return None
        if event == "line":
            line = file, frame.f_lineno
            self.passed[line] = None
            if line == self.at:
                self.at = None
                signal.raise_signal(signal.SIGINT)
        return self


def generate_beside_a_stream(llm: LLM, reference: Reference, at: Line | None, seed: int) -> tuple[bool, Tracer]:
    """Return True if the call was interrupted. The stream must not be affected."""
    streamed, *prompts = reference.prompts(9, 5, 7, seed=seed)
    stream = llm.stream(streamed, STREAMED)
    next(stream)
    interrupted = False
    tracer = Tracer(at)
    try:
        with tracer:
            outputs = llm.generate(prompts, GENERATED, use_tqdm=False)
        assert [out.outputs[0].token_ids for out in outputs] == reference.continuations(prompts, 4)
    except KeyboardInterrupt:
        interrupted = True
    assert list(stream)[-1].outputs[0].token_ids == reference.greedy(streamed, 30)
    while llm.core.has_work:
        llm.core.step()
    assert free_blocks(llm, ALL_BLOCKS) == [ALL_BLOCKS] * 2
    assert [book.num_requests for book in llm.core._generation.router._states] == [0, 0]  # type: ignore[attr-defined]
    return interrupted, tracer


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_ctrl_c_at_any_line(llm: LLM, reference: Reference, every: int) -> None:
    handler = signal.getsignal(signal.SIGINT)
    lines: dict[Line, None] = {}
    for seed in range(3):
        interrupted, tracer = generate_beside_a_stream(llm, reference, None, seed)
        assert not interrupted
        lines |= tracer.passed
    assert len(lines) > 100
    num_interrupted, chosen = 0, list(lines)[::every]
    for seed, line in enumerate(chosen):
        interrupted, tracer = generate_beside_a_stream(llm, reference, line, seed % 3)
        assert interrupted == (tracer.at is None), line  # a line may not be passed this time
        num_interrupted += interrupted
        assert signal.getsignal(signal.SIGINT) is handler
    assert num_interrupted > 0.8 * len(chosen)


def test_a_fork_leaves_the_engine_alone(llm: LLM, reference: Reference) -> None:
    (prompt,) = reference.prompts(9)
    stream = llm.stream(prompt, STREAMED)
    next(stream)
    pid = os.fork()
    if pid == 0:  # nothing of pytest must run here
        status = 1
        try:
            llm.generate([[3, 4]], GENERATED, use_tqdm=False)
        except EngineError as error:
            status = 0 if f"belongs to process {os.getppid()}" in str(error) else 2
        llm.shutdown()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert list(stream)[-1].outputs[0].token_ids == reference.greedy(prompt, 30)
