"""Decode steps from graphs: the bytes that the layers give, whoever comes and goes, and no graph where it would lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from reference_models import Reference

from moeserve import LLM, SamplingParams
from moeserve.memory import Arena
from moeserve.ops.native import native_kernels
from moeserve.worker import cpu_graphs
from moeserve.worker.cpu_graphs import CpuGraphs, OnlyKernels

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels are not built")

LENGTHS = [1, 5, 16, 17, 33, 40]  # of prompts
NUM_TOKENS = [30, 4, 18, 9, 25, 18]  # of their outputs: requests leave at different steps, so sizes come and go


@contextmanager
def started(reference: Reference, **options: Any) -> Iterator[LLM]:
    llm = LLM(model=str(reference.folder), num_threads=1, max_model_len=128, **options)
    try:
        yield llm
    finally:
        llm.shutdown()


def cpu_graphs_of(llm: LLM) -> CpuGraphs:
    forward = llm.core.executor.worker.runner.forward  # type: ignore[attr-defined]
    assert isinstance(forward, CpuGraphs)
    return forward


def sizes_of(llm: LLM) -> set[int]:
    """Numbers of tokens of which there are graphs."""
    return {num_tokens for num_tokens, _ in cpu_graphs_of(llm).recorded}


def told(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """What the requests were told, in two rounds: the second begins with the sizes of the first."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=3) for n in NUM_TOKENS]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = llm.generate(inputs, params) + llm.generate(inputs[::-1], params)
    return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["mixtral", "mixtral-window", "deepseek-v2", "deepseek-v3", "qwen2-moe", "qwen3-moe", "gpt-oss"]
)
def test_cpu_graphs_give_what_the_layers_give(
    name: str, dtype: str, reference_named: Callable[[str], Reference]
) -> None:
    reference = reference_named(name)
    prompts = reference.prompts(*LENGTHS)
    with started(reference, dtype=dtype, enforce_eager=True) as llm:
        assert not isinstance(llm.core.executor.worker.runner.forward, CpuGraphs)  # type: ignore[attr-defined]
        expected = told(llm, prompts)
    with started(reference, dtype=dtype) as llm:
        assert told(llm, prompts) == expected
        assert {1, 2, 4, 6} <= sizes_of(llm)


def test_what_cpu_graphs_would_miss_is_not_recorded(
    reference_named: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that call torch's own arithmetic, to add what shared experts give."""
    reference = reference_named("deepseek-v3")
    prompts = reference.prompts(*LENGTHS)
    monkeypatch.setattr("moeserve.moe.layer.choose_addition", lambda device: torch.add)
    with started(reference, enforce_eager=True) as llm:
        expected = told(llm, prompts)
    with started(reference) as llm:
        assert told(llm, prompts) == expected
        assert not cpu_graphs_of(llm).recorded
        assert cpu_graphs_of(llm).was_refused[1, (1,)]


def test_cpu_graphs_used_least_recently_go_first(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = plain.prompts(*LENGTHS)
    with started(plain) as llm:
        expected = told(llm, prompts)
        assert len(cpu_graphs_of(llm).recorded) > 2
    monkeypatch.setattr(cpu_graphs, "MAX_CPU_GRAPHS", 2)
    with started(plain) as llm:
        assert told(llm, prompts) == expected
        assert list(cpu_graphs_of(llm).recorded) == [(2, (2,)), (1, (1,))]  # the batch shrinks in the end


def test_cpu_graphs_work_in_memory_that_they_share(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hardly more than one layer of the largest step needs, all sizes have graphs; with less, only small steps."""
    prompts = plain.prompts(*LENGTHS)
    with started(plain) as llm:
        expected, sizes = told(llm, prompts), sizes_of(llm)
        memory = torch.frombuffer(cpu_graphs_of(llm).memory._block, dtype=torch.uint8)
        used = int(memory.nonzero().max()) + 1
        del memory
    for num_bytes, is_enough in ((used + 4096, True), (used // 2, False)):
        monkeypatch.setattr(cpu_graphs, "MEMORY_BYTES", num_bytes)
        with started(plain) as llm:
            assert told(llm, prompts) == expected
            assert 1 in sizes_of(llm)
            assert (sizes_of(llm) == sizes) == is_enough


def test_large_steps_are_not_recorded(plain: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_graphs, "MAX_TOKENS", 3)
    with started(plain) as llm:
        told(llm, plain.prompts(*LENGTHS))
        assert {1, 2} <= sizes_of(llm) <= {1, 2, 3}


@pytest.mark.parametrize(
    ("do", "is_stranger"),
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
def test_only_views_and_fresh_memory_are_no_work(do: Callable[[torch.Tensor], Any], is_stranger: bool) -> None:
    with torch.inference_mode():
        x = torch.arange(6.0).view(2, 3)
        with OnlyKernels(Arena(4096)) as watch, watch.reads:
            do(x)
    assert bool(watch.strangers) == is_stranger, watch.strangers
