"""A device that computes a step while the host prepares the next one gives the same results. A CPU stands for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_stand_ins import LateCopies
from rank_processes import free_blocks
from reference_models import Reference
from structured_cases import requests, result, small_llm, write_model

from moeserve import LLM, SamplingParams
from moeserve.worker import model_runner
from moeserve.worker.model_runner import ModelRunner

SETTINGS: dict[str, Any] = dict(max_num_seqs=6, max_num_batched_tokens=32, kv_cache_memory="200KiB", block_size=8)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=1, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=2, top_p=0.9, top_k=30, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=9, stop_token_ids=[5, 6, 7]),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, logprobs=2, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, min_tokens=6, stop_token_ids=list(range(60)), max_tokens=20),
    SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=6, logit_bias={5: 2.0, 9: -3.0, 11: 4.0}, logprobs=0, max_tokens=9),
    SamplingParams(temperature=0, frequency_penalty=0.6, logit_bias={7: 1.5}, max_tokens=7, ignore_eos=True),
]


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[LateCopies]:
    """Let later engines have such a device. Its memories are returned."""
    made: list[LateCopies] = []

    def copies_for(table: Any, device: Any) -> LateCopies:
        made.append(LateCopies(table))
        return made[-1]

    monkeypatch.setattr(model_runner, "copies_for", copies_for)
    return made


@pytest.fixture
def num_overlaps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the steps that start while the one before them has not been read."""
    counts = [0]
    start = ModelRunner.start

    def counted(
        runner: ModelRunner,
        chunks: Any,
        num_tokens: Any,
        padded_to: Any = None,
        previous: Any = None,
        **options: Any,
    ) -> Any:
        counts[0] += previous is not None and previous._results is None
        return start(runner, chunks, num_tokens, padded_to, previous, **options)

    monkeypatch.setattr(ModelRunner, "start", counted)
    return counts


def mixed_results(folder: str | Path, **settings: Any) -> list[Any]:
    """Return the results of requests that sample in many ways, more than run at once."""
    prompts = [[3 + number % 50] * (1 + 9 * (number % 5)) for number in range(3 * len(PARAMS))]
    with LLM(
        folder, dtype="float32", max_model_len=128, num_threads=1, show_progress=False, **SETTINGS, **settings
    ) as llm:
        stream = llm.stream(prompts[0], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        first = next(stream)
        outputs = llm.generate(prompts, PARAMS * 3, use_tqdm=False)
        llm.abort(first.request_id)
        ended = list(stream)[-1].outputs[0]
        assert ended.finish_reason in ("abort", "length")
        again = llm.generate(prompts[:4], PARAMS[:4], use_tqdm=False)
        while llm.core.has_work:
            llm.core.step()
        assert set(free_blocks(llm, llm.core.num_blocks)) == {llm.core.num_blocks}
    return [
        (output.prompt_logprobs, [(each.token_ids, each.logprobs, each.finish_reason) for each in output.outputs])
        for output in outputs + again
    ]


def test_results_are_those_of_a_cpu(plain: Reference, request: pytest.FixtureRequest, num_overlaps: list[int]) -> None:
    expected = mixed_results(plain.folder)
    assert num_overlaps == [0]
    memories: list[LateCopies] = request.getfixturevalue("memories")
    assert mixed_results(plain.folder) == expected
    assert memories[-1].num_tokens_kept > 100
    assert num_overlaps[0] > 20


@pytest.mark.ranks
@pytest.mark.parametrize("has_reports", [False, True])
def test_results_of_four_ranks(plain: Reference, monkeypatch: pytest.MonkeyPatch, has_reports: bool) -> None:
    layout: dict[str, Any] = dict(
        tensor_parallel_size=2, data_parallel_size=2, executor="mp", debug_rank_state=has_reports
    )
    expected = mixed_results(plain.folder)
    monkeypatch.setenv("MOESERVE_TEST_PLANT", "gpu_stand_ins:")
    assert mixed_results(plain.folder, **layout) == expected


def test_grammars_wait_for_tokens(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = write_model(tmp_path)

    def results() -> list[Any]:
        with small_llm(folder, max_num_seqs=8, kv_cache_memory="2MiB") as llm:
            return [result(output.outputs[0]) for output in llm.generate(*requests())]

    expected = results()
    request.getfixturevalue("memories")
    assert results() == expected
