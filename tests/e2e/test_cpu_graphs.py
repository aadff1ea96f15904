"""CPU graphs: decode steps replayed from them give the bytes of eager steps, and unsuitable steps are not captured."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from planted_operations import plant
from reference_models import Reference

from moeserve import LLM, SamplingParams
from moeserve.executor import uniproc
from moeserve.executor.results import ResultQueue
from moeserve.memory import Arena
from moeserve.ops import rows
from moeserve.ops.native import native_kernels
from moeserve.scheduling.lockstep import Round
from moeserve.worker import cpu_graphs
from moeserve.worker.cpu_graphs import CapturedStep, CpuGraphs, OnlyKernels, StepSizes
from moeserve.worker.worker import PendingRound, Worker

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels are not built")

LENGTHS = [1, 5, 16, 17, 33, 40]  # of prompts
NUM_TOKENS = [30, 4, 18, 9, 25, 18]  # of their outputs: requests leave at different steps, so sizes vary


@pytest.fixture
def never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes but the first are captured when they occur."""
    monkeypatch.setattr(uniproc, "IDLE_SECONDS", 3600.0)


@contextmanager
def started(reference: Reference, **options: Any) -> Iterator[LLM]:
    llm = LLM(model=str(reference.folder), num_threads=1, max_model_len=128, **options)
    try:
        yield llm
    finally:
        llm.shutdown()


def graphs_of(llm: LLM) -> CpuGraphs | None:
    """Return None if the engine runs all steps eagerly."""
    replay = llm.core.replicas[0].executor.worker.runner.step_runner  # type: ignore[attr-defined]
    return replay if isinstance(replay, CpuGraphs) else None


def captured(llm: LLM) -> dict[StepSizes, CapturedStep | None]:
    graphs = graphs_of(llm)
    assert graphs is not None
    return graphs.captured


def sizes_of(llm: LLM) -> set[int]:
    """Return the numbers of tokens that have graphs."""
    return {sizes.num_tokens for sizes, step in captured(llm).items() if step is not None}


def generate_twice(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Return tokens and log-probabilities of two rounds. The sizes of the first round recur in the second."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=3) for n in NUM_TOKENS]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = llm.generate(inputs, params) + llm.generate(inputs[::-1], params)
    return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]


@pytest.mark.slow_but("jamba-bfloat16", "deepseek-v3-float32", "gpt-oss-bfloat16", "mixtral-window-float32")
@pytest.mark.usefixtures("never_idle")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [
        *("mixtral", "mixtral-window", "deepseek-v2", "deepseek-v3", "glm5", "qwen2-moe", "qwen3-moe", "gpt-oss"),
        *("phimoe", "jamba", "cohere2-moe", "laguna-odd", "minimax-m3", "beam"),
        "axk2",
        "dots3-note",
        "hy-v4",
        "minimax",
        "jetmoe",
        "glm5-next",
        "inkling",
        "inkling2",
    ],
)
def test_replayed_steps_equal_eager_steps(name: str, dtype: str, reference_named: Callable[[str], Reference]) -> None:
    reference = reference_named(name)
    prompts = reference.prompts(*LENGTHS)
    with started(reference, dtype=dtype, enforce_eager=True) as llm:
        assert graphs_of(llm) is None
        expected = generate_twice(llm, prompts)
    with started(reference, dtype=dtype) as llm:
        assert generate_twice(llm, prompts) == expected
        assert {1, 2, 4, 6} <= sizes_of(llm)


@pytest.mark.slow_but("deepseek-v4-odd", "gpt-oss")
@pytest.mark.usefixtures("never_idle")
@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "gpt-oss", "deepseek-v4", "deepseek-v4-odd"])
def test_steps_with_drafts_are_replayed(name: str, reference_named: Callable[[str], Reference]) -> None:
    reference = reference_named(name)
    prompts = [[*prompt, *prompt[-4:]] for prompt in reference.prompts(*LENGTHS[:3])]
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with started(reference, enforce_eager=True) as llm:
        expected = generate_alone(llm, prompts)
    with started(reference, speculative_config=config) as llm:
        assert generate_alone(llm, prompts) == expected
        with_drafts = {sizes for sizes, step in captured(llm).items() if step is not None and sizes.num_tokens > 1}
        assert StepSizes(4, 4, (4,), 3) in with_drafts
        # DeepSeek-V4 computes accepted drafts again.
        has_more = any(sizes.num_tokens > 4 and sizes.drafts_per_request == 3 for sizes in with_drafts)
        assert has_more == (name == "deepseek-v4-odd")
        assert all(sizes.num_tokens == sizes.tokens_per_request for sizes in with_drafts)


def generate_alone(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Return tokens and log-probabilities of one request at a time."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=3)
    outputs = [llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0] for prompt in prompts]
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "gpt-oss"])
def test_an_idle_rank_captures_likely_sizes_before_they_occur(
    name: str, reference_named: Callable[[str], Reference]
) -> None:
    reference = reference_named(name)
    prompts = reference.prompts(*LENGTHS)
    with started(reference, enforce_eager=True) as llm:
        expected = generate_twice(llm, prompts)
    with started(reference, max_num_seqs=8) as llm:
        deadline = time.monotonic() + 200
        while len(captured(llm)) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sizes_of(llm) == set(range(1, 9))
        graphs = {sizes: id(step) for sizes, step in captured(llm).items()}
        assert generate_twice(llm, prompts) == expected
        assert {sizes: id(step) for sizes, step in captured(llm).items()} == graphs


@pytest.mark.usefixtures("never_idle")
def test_a_size_is_captured_when_it_occurs_again(plain: Reference) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in plain.prompts(5, 5, 5)]
    with started(plain) as llm:
        assert sizes_of(llm) == {1}
        for max_tokens, expected in ((2, {1}), (3, {1, 3})):  # the first token of each comes with its prompt
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
            assert sizes_of(llm) == expected


@pytest.mark.usefixtures("never_idle")
def test_a_capture_in_traffic_costs_a_few_eager_steps(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Function calls of Python and C are counted, because a clock also measures other processes.

    A step that captures makes 3 times the calls of an eager step. It would make more if it imported modules, or if
    every capture looked for reads on the host.
    """
    execute = Worker.start
    calls: dict[str, list[int]] = {"eager": [], "captured": [], "replayed": []}

    def counted(worker: Worker, work: Any) -> Any:
        num_calls = 0

        def count(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        graphs = worker.runner.step_runner
        assert isinstance(graphs, CpuGraphs)
        captured_before = set(graphs.captured)
        sys.setprofile(count)
        try:
            result = execute(worker, work)
        finally:
            sys.setprofile(None)
        if work.plan is not None and work.plan.is_decode_only:
            sizes = StepSizes(work.plan.num_tokens, 1, (work.plan.num_tokens,))
            has_graph = sizes in graphs.captured
            kind = "replayed" if sizes in captured_before else "captured" if has_graph else "eager"
            calls[kind].append(num_calls)
        return result

    monkeypatch.setattr(Worker, "start", counted)
    with started(plain) as llm:
        generate_twice(llm, plain.prompts(*LENGTHS))
    assert len(calls["eager"]) == len(calls["captured"]) == 4  # of 6, 5, 4 and 2 tokens; 1 is captured at the start
    for eager, captured in zip(calls["eager"], calls["captured"], strict=True):
        assert captured < 4 * eager
    assert max(calls["replayed"]) < min(calls["eager"])


def test_a_step_with_other_operations_is_not_captured(
    reference_named: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here torch adds the output of the shared experts."""
    reference = reference_named("deepseek-v3")
    prompts = reference.prompts(*LENGTHS)
    plant(monkeypatch, rows.TABLE, "cpu", lambda operations: operations._replace(add=torch.add))
    with started(reference, enforce_eager=True) as llm:
        expected = generate_twice(llm, prompts)
    with started(reference) as llm:
        assert generate_twice(llm, prompts) == expected
        assert sizes_of(llm) == set()
        assert captured(llm)[StepSizes(1, 1, (1,))] is None


@pytest.mark.usefixtures("never_idle")
def test_the_least_recently_used_graph_is_evicted(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = plain.prompts(*LENGTHS)
    with started(plain) as llm:
        expected = generate_twice(llm, prompts)
        assert len(captured(llm)) > 2
    monkeypatch.setattr(cpu_graphs, "MAX_CPU_GRAPHS", 2)
    with started(plain) as llm:
        assert generate_twice(llm, prompts) == expected
        assert list(captured(llm)) == [StepSizes(2, 1, (2,)), StepSizes(1, 1, (1,))]  # the batch shrinks in the end


@pytest.mark.usefixtures("never_idle")
def test_all_graphs_share_memory(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little more than one layer of the largest step needs is enough for all sizes; with less, only small steps fit."""
    prompts = plain.prompts(*LENGTHS)
    with started(plain) as llm:
        expected, sizes = generate_twice(llm, prompts), sizes_of(llm)
        graphs = graphs_of(llm)
        assert graphs is not None
        memory = torch.frombuffer(graphs.memory._block, dtype=torch.uint8)
        used = int(memory.nonzero().max()) + 1
        del memory, graphs
    for num_bytes, is_enough in ((used + 4096, True), (used // 2, False)):
        monkeypatch.setattr(cpu_graphs, "MEMORY_BYTES", num_bytes)
        with started(plain) as llm:
            assert generate_twice(llm, prompts) == expected
            assert 1 in sizes_of(llm)
            assert (sizes_of(llm) == sizes) == is_enough


@pytest.mark.usefixtures("never_idle")
def test_large_steps_are_not_captured(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_graphs, "MAX_TOKENS", 3)
    with started(plain) as llm:
        generate_twice(llm, plain.prompts(*LENGTHS))
        assert {1, 2} <= sizes_of(llm) <= {1, 2, 3}


@pytest.mark.parametrize(
    ("do", "is_missed"),
    [
        (lambda x: x.view(6)[2:].unsqueeze(0), False),
        (lambda x: x.split([1, 2], dim=1)[1].unflatten(0, (2, 1)).transpose(0, 1), False),
        (lambda x: x.flatten(), False),
        (lambda x: x.new_empty(3), False),
        (lambda x: torch.empty_like(x), False),
        (lambda x: x.contiguous(), False),
        (lambda x: x.t().contiguous(), True),
        (lambda x: x.t().flatten(), True),
        (lambda x: x + 1, True),
        (lambda x: x.add_(1), True),
        (lambda x: x[:, 1:].copy_(x[:, :2]), True),
        (lambda x: torch.add(x, x, out=torch.empty_like(x)), True),
        (lambda x: torch.zeros(3), True),
        (lambda x: x.new_zeros(3), True),
        (lambda x: x.sum().item(), True),
        (lambda x: torch.cat([x, x]), True),
        (lambda x: x[torch.tensor([1])], True),
        (lambda x: x.tolist(), True),
        (lambda x: x[0, 1:].numpy(), True),
        (lambda x: x.new_empty(2000), True),
        (lambda x: x.t().new_empty(2, 3), False),
    ],
)
def test_a_graph_misses_all_operations_but_views_and_allocations(
    do: Callable[[torch.Tensor], Any], is_missed: bool
) -> None:
    with torch.inference_mode():
        x = torch.arange(6.0).view(2, 3)
        with OnlyKernels(Arena(4096)) as check, check.reads:
            do(x)
    assert bool(check.missed) == is_missed, check.missed


def test_layers_of_the_next_step_begin_before_an_outcome_wakes_the_engine(
    plain: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def record(owner: type, name: str, event: str) -> None:
        original = getattr(owner, name)

        def recorded(*arguments: Any) -> Any:
            events.append(event)
            return original(*arguments)

        monkeypatch.setattr(owner, name, recorded)

    record(CapturedStep, "copy_inputs", "inputs")
    record(CapturedStep, "run", "layers")
    record(ResultQueue, "add", "result")
    num_steps = 10
    with started(plain, async_scheduling=True) as llm:
        executor: Any = llm.core.replicas[0].executor  # type: ignore[attr-defined]
        start, num_executed = executor.worker.start, 0

        def start_and_await_another_round(work: Round) -> PendingRound:
            nonlocal num_executed
            num_executed += 1
            round_: PendingRound = start(work)
            deadline = time.monotonic() + 200
            while num_executed < num_steps and executor._work.empty() and time.monotonic() < deadline:
                time.sleep(0.001)
            return round_

        executor.worker.start = start_and_await_another_round
        params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
        llm.generate([{"prompt_token_ids": plain.prompts(5)[0]}], params)
    assert "/".join(events).startswith("/".join(["inputs", "result", "layers"] * (num_steps - 1)))
